"""Output for people: its width, tables, rows of regions, and findings."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from diloco_node.health.finding import Finding, Mark
from diloco_node.health.reading import duration, human_bytes, number, rows, section, text

COLUMNS: Final = ("region", "role", "step", "loss", "tokens/s", "rounds", "versions", "sent", "received", "now")
LEFT: Final = frozenset({"region", "role"})

LEFT_OUT: Final = ("received", "sent", "tokens/s", "versions", "rounds")
"""Columns a narrow output goes without, the first one first."""

SIGNS: Final = {Mark.FAILED: "×", Mark.WARNING: "‼", Mark.INFO: "i", Mark.UNKNOWN: "-", Mark.OK: "√"}
PLAIN_SIGNS: Final = {Mark.FAILED: "xx", Mark.WARNING: "!!", Mark.INFO: "i", Mark.UNKNOWN: "--", Mark.OK: "ok"}
"""For an output that can't show the others."""

INDENT: Final = "  "
UNIX_MAX: Final = 1e11
"""Seconds since 1970: no date of a document is later."""

WRAP_MIN: Final = 20
"""Text is not wrapped to fewer columns than this."""


def output_width() -> int | None:
    """Width of standard output in characters; None: a pipe, whose lines stay whole to be searched. Obeys `COLUMNS`."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_sized else None


def table_lines(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], *, gap: int = 2, width: int | None = None
) -> list[str]:
    """Lay out a table as lines, the heading first. columns: (name, "left" or "right"). gap: between two columns.

    width: the last column is wrapped to so many characters of the whole; None: it is not.
    """
    names = [name for name, _ in columns]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    room = None if width is None else width - sum(widths[:-1]) - gap * (len(widths) - 1)
    lines = []
    for *row, last in (names, *rows):
        first, *more = wrap_text(last, room) if last and room is not None and len(last) > room else [last]
        for cells in ((*row, first), *((*[""] * len(row), line) for line in more)):
            places = zip(cells, widths, columns, strict=True)
            texts = (cell.ljust(most) if side == "left" else cell.rjust(most) for cell, most, (_, side) in places)
            lines.append((" " * gap).join(texts).rstrip())
    return lines


def region_cells(name: str, status: dict[str, Any]) -> list[str]:
    """Make a region's row, a cell for each of COLUMNS, whose last one says what the region waits for.

    `step` counts all lives of its learner, and tokens/s is the rate now: a learner that stands still has none.
    """
    learner = section(status, "learner")
    versions = status.get("versions")
    numbers = [version for version in versions if isinstance(version, int)] if isinstance(versions, list) else []
    loss = number(learner, "loss")
    rate = number(learner, "current_tokens_per_second")
    if "current_tokens_per_second" not in learner:
        rate = number(learner, "tokens_per_second")
    busy = section(learner, "busy")
    pause = (
        f"busy: {text(busy, 'activity')} since {duration(number(busy, 'since_seconds') or 0.0)} ago; " if busy else ""
    )
    return [
        name,
        role_of(status, name, str(status.get("role", status.get("state", "starting")))),
        str(status.get("inner_steps", learner.get("step", "-"))),
        "-" if loss is None else f"{loss:.3f}",
        "-" if rate is None else f"{rate:,.0f}",
        str(status.get("rounds_committed", "-")),
        f"{min(numbers)}-{max(numbers)}" if numbers and min(numbers) >= 0 else "-",
        human_bytes(number(status, "wire_bytes_out") or 0),
        human_bytes(number(status, "wire_bytes_in") or 0),
        pause + str(status.get("reason", "")),
    ]


def role_of(status: dict[str, Any], name: str, role: str) -> str:
    """The role of a region in this status; a follower without a vote is a contributor."""
    lines = rows(section(status, "members"), "rows")
    has_no_vote = any(line.get("region") == name and line.get("kind") == "contributor" for line in lines)
    return "contributor" if has_no_vote and role == "follower" else role


def since(member: Mapping[str, Any]) -> str:
    """Since when a row of the members has its kind: the entry of the ledger, and the time if this region was there."""
    unix, entry = number(member, "since_unix"), f"entry {number(member, 'since') or 0:.0f}"
    if unix is None or not 0 < unix < UNIX_MAX:
        return entry
    return f"{entry}, {datetime.fromtimestamp(unix).astimezone():%Y-%m-%d %H:%M:%S}"


def region_lines(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay out rows of COLUMNS as lines, with the reason to wait below each. Columns that don't fit are left out
    (LEFT_OUT).

    width: of the output in characters; None: no line is wrapped or shortened.
    """
    hidden: list[str] = []

    def layout(gap: int) -> list[str]:
        places = [at for at, name in enumerate(COLUMNS) if name != "now" and name not in hidden]
        columns = [(COLUMNS[at], "left" if COLUMNS[at] in LEFT else "right") for at in places]
        return table_lines(columns, [[row[at] for at in places] for row in rows], gap=gap)

    table = layout(2)
    for column in ("", *LEFT_OUT):
        if width is not None and max(map(len, table)) > width:
            hidden.append(column)
            table = layout(1)
    lines = table[:1]
    for line, row in zip(table[1:], rows, strict=True):
        lines += [line, *wrap_text(row[-1], width, first=INDENT)]
    return lines


def wrap_text(text: str, width: int | None, *, first: str = "") -> list[str]:
    """Wrap a paragraph to lines of at most `width` characters (None: one line), or of a longer word; none where it is
    empty. All lines but the first are indented, and that by `first`."""
    paragraph = " ".join(text.split())
    if width is None:
        return [first + paragraph] if paragraph else []
    # A path stays whole, however long: it is there to be copied.
    return textwrap.wrap(
        paragraph,
        max(width, WRAP_MIN),
        initial_indent=first,
        subsequent_indent=INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


def finding_lines(finding: Finding, width: int | None = None, *, page: str = "") -> list[str]:
    """Show a finding in a line, and what helps in another. width: None: no wrapping. page: has a section per code."""
    basis = f" ({finding.basis})" if finding.basis else ""
    lines = wrap_text(f"{_signs()[finding.mark]} {finding.code}: {finding.named_text}{basis}", width)
    command = f"`{finding.command}`" if finding.command else ""
    section = f"({page}#{finding.code})" if page and finding.hint else ""
    saving = f"saves {duration(finding.saves_seconds)} of a round" if finding.saves_seconds else ""
    remedy = " ".join(filter(None, (finding.hint, command, section)))
    if saving:
        remedy = f"{remedy} ({saving})" if remedy else saving
    return lines + (wrap_text(f"-> {remedy}", width, first=INDENT) if remedy else [])


def _signs() -> dict[Mark, str]:
    try:
        "".join(SIGNS.values()).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_SIGNS
    return SIGNS
