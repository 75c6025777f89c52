"""`status --watch` on a terminal: a screen like that of `top`, with keys to sort regions and to choose one."""

from __future__ import annotations

import contextlib
import curses
from collections.abc import Callable, Sequence
from typing import Any, Final

from diloco_node.cli.status_view import SEEN, summary_lines, table_rows, trouble_lines
from diloco_node.cli.tables import COLUMNS, region_lines, wrap_text
from diloco_node.health.reading import duration, number, rows, section, text

PERIOD_MS: Final = 1000
SORTS: Final = ("region", "step", "loss", "tokens/s", "rounds")
HELP: Final = "q quit  s sort  r reverse  up/down choose  enter one region  esc back"
ROUNDS_SHOWN: Final = 8


class Board:
    """The content of the screen, and the keys that change it. It does not touch the terminal.

    Attributes:
        sort, is_reversed: order of the regions. chosen: name of the one that is marked; empty: the first.
        is_single: only that one is shown, with all that is known of it. is_over: q was pressed.
    """

    def __init__(self) -> None:
        self.sort = SORTS[0]
        self.is_reversed = False
        self.chosen = ""
        self.is_single = False
        self.is_over = False
        self._names: list[str] = []

    def press(self, key: str) -> None:
        """Take a key: "q", "s", "r", "up", "down", "enter", "esc"; others do nothing."""
        match key:
            case "q":
                self.is_over = True
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "up" | "down" if self._names:
                at = self._names.index(self.chosen) if self.chosen in self._names else 0
                self.chosen = self._names[(at + (1 if key == "down" else -1)) % len(self._names)]
            case "enter":
                self.is_single = True
            case "esc":
                self.is_single = False

    def lines(self, documents: Sequence[dict[str, Any]], width: int, height: int) -> list[str]:
        """Lay out the screen: at most `height` lines of at most `width` characters; the last one names the keys."""
        table, seen_from = table_rows(documents)
        table = sorted(table, key=self._key, reverse=self.is_reversed)
        self._names = [row[0].removesuffix(SEEN) for row in table]
        if self.chosen not in self._names:
            self.chosen = self._names[0] if self._names else ""
        screen = summary_lines(documents, width)
        if self.is_single:
            screen += self._single(documents, table, width)
        else:
            choices = [
                [("> " if row[0].removesuffix(SEEN) == self.chosen else "  ") + row[0], *row[1:]] for row in table
            ]
            screen += region_lines(choices, width)
            if seen_from:
                screen.append(f"{SEEN} as seen from {seen_from}")
            screen += trouble_lines(documents, width)
        foot = f"{HELP}  [{self.sort}{', reversed' if self.is_reversed else ''}]"
        return [line[:width] for line in [*screen[: max(0, height - 1)], foot][:height]]

    def _key(self, row: Sequence[str]) -> tuple[Any, ...]:
        """Key to sort rows by: the largest figure first, and rows without one last."""
        cell = row[COLUMNS.index(self.sort)]
        if self.sort == "region":
            return (cell,)
        try:
            return (0, -float(cell.replace(",", "")), row[0])
        except ValueError:
            return (1, 0.0, row[0])

    def _single(self, documents: Sequence[dict[str, Any]], table: Sequence[list[str]], width: int) -> list[str]:
        documents_here = [document for document in documents if document["region"] == self.chosen]
        lines = region_lines([row for row in table if row[0].removesuffix(SEEN) == self.chosen], width)
        for document in documents_here:
            lines += trouble_lines([document], width)
            lines += [line for fact in _facts(document) for line in wrap_text(fact, width)]
        return lines


def _facts(document: dict[str, Any]) -> list[str]:
    """Describe learner, links and the last rounds of one region."""
    learner = section(document, "learner")
    facts = []
    if learner:
        age_s = number(learner, "report_age_seconds")
        step_s = number(learner, "step_seconds") or 0.0
        report = "has reported nothing yet" if age_s is None else f"reported {duration(age_s)} ago"
        facts.append(f"learner: {duration(step_s)} a step, {report}, life {learner.get('incarnation', '?')}")
    for peer in rows(document, "peers"):
        rtt_s = number(peer, "rtt_seconds")
        away = "" if rtt_s is None else f", {duration(rtt_s)} away"
        facts.append(f"link to {text(peer, 'name')}: {text(peer, 'link')}{away}")
    for round_ in reversed(rows(document, "round_log")[-ROUNDS_SHOWN:]):
        phases = ", ".join(
            f"{phase} {duration(number(section(round_, 'phases'), phase) or 0)}" for phase in section(round_, "phases")
        )
        late = section(round_, "waited_for")
        wait = f"; waited for {text(late, 'region')}" if late else ""
        title = f"fragment {round_.get('fragment')} to {round_.get('version')} {text(round_, 'outcome')}"
        facts.append(f"{title} in {duration(number(round_, 'seconds') or 0)}: {phases}{wait}")
    return facts


def has_screen() -> bool:
    """Whether this machine knows the terminal: small containers don't know the newer ones."""
    try:
        curses.setupterm()
    except curses.error:
        return False
    return curses.tigetstr("cup") is not None


def run_screen(ask: Callable[[], Sequence[dict[str, Any]]]) -> None:
    """Draw until q or Ctrl-C. `ask` returns the documents of the regions."""
    curses.wrapper(_draw, ask)


_KEYS: Final = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_ENTER: "enter",
    10: "enter",
    13: "enter",
    27: "esc",
}


def _draw(screen: curses.window, ask: Callable[[], Sequence[dict[str, Any]]]) -> None:
    with contextlib.suppress(curses.error):  # a terminal without colours
        curses.use_default_colors()
    curses.set_escdelay(25)
    screen.timeout(PERIOD_MS)
    board, documents = Board(), ask()
    while not board.is_over:
        height, width = screen.getmaxyx()
        screen.erase()
        # The last column stays free: writing into the last cell of a screen is an error of curses.
        for at, line in enumerate(board.lines(documents, width - 1, height)):
            screen.addnstr(at, 0, line, width - 1)
        screen.refresh()
        key = screen.getch()
        if key == -1:
            documents = ask()
        elif key != curses.KEY_RESIZE:
            board.press(_KEYS.get(key) or (chr(key) if 0 < key < 128 else ""))
