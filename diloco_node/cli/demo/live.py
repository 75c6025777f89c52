"""The demo's view: one calm table that is redrawn in place; plain lines, every few seconds, when not on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

PLAIN_PERIOD_S: Final = 5.0
UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """12.3 MB."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def region_cells(name: str, status: dict[str, Any]) -> list[str]:
    """One region's row: name, role, step, loss, tokens/s, rounds, versions, sent, received, what it waits for."""
    learner = status.get("learner") or {}
    versions = status.get("versions") or []
    loss = learner.get("loss")
    rate = learner.get("tokens_per_second")
    return [
        name,
        str(status.get("role", status.get("state", "starting"))),
        str(learner.get("step", "-")),
        "-" if loss is None else f"{loss:.3f}",
        "-" if rate is None else f"{rate:,.0f}",
        str(status.get("rounds_committed", "-")),
        f"{min(versions)}-{max(versions)}" if versions and min(versions) >= 0 else "-",
        human_bytes(status.get("wire_bytes_out", 0)),
        human_bytes(status.get("wire_bytes_in", 0)),
        str(status.get("reason", "")),
    ]


COLUMNS: Final = ("region", "role", "step", "loss", "tokens/s", "rounds", "versions", "sent", "received", "now")

NARROW_COLUMNS: Final = ("region", "role", "step", "loss", "rounds", "now")
"""Where the whole table would leave no room for what a region waits for."""

WIDE_FROM: Final = 120
"""Columns of a terminal that take the whole table."""


class LiveView:
    """Shows rows while a demo runs. On a terminal a table in place, else plain lines; silent when `is_quiet`."""

    def __init__(self, title: str, *, is_quiet: bool, stream: TextIO | None = None) -> None:
        self._title = title
        self._is_quiet = is_quiet
        self._stream = stream if stream is not None else sys.stderr
        self._live: Any = None
        self._last_plain_s = -PLAIN_PERIOD_S
        self._is_terminal = not is_quiet and self._stream.isatty()

    def __enter__(self) -> LiveView:
        if self._is_terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), refresh_per_second=2, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)
            self._live = None

    def line(self, text: str) -> None:
        """A fact that stays on the screen."""
        if self._live is not None:
            self._live.console.print(text)
        elif not self._is_quiet:
            print(text, file=self._stream, flush=True)

    def show(self, elapsed_s: float, rows: Sequence[list[str]]) -> None:
        """Draw the rows; plain output is limited to a line per region every PLAIN_PERIOD_S."""
        if self._live is not None:
            self._live.update(self._table(elapsed_s, rows))
        elif not self._is_quiet and not 0 <= elapsed_s - self._last_plain_s < PLAIN_PERIOD_S:
            self._last_plain_s = elapsed_s
            for row in rows:
                cells = " ".join(f"{column}={cell}" for column, cell in zip(COLUMNS[1:-1], row[1:-1], strict=True))
                print(f"{elapsed_s:6.1f}s {row[0]:<10} {cells}  {row[-1]}", file=self._stream, flush=True)

    def _table(self, elapsed_s: float, rows: Sequence[list[str]]) -> Any:
        from rich.table import Table

        table = Table(title=f"{self._title}   {elapsed_s:.0f} s", title_justify="left", expand=False)
        shown = COLUMNS if self._live.console.width >= WIDE_FROM else NARROW_COLUMNS
        for column in shown:
            is_number = column not in {"region", "role", "now"}
            table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "now")
        for row in rows:
            cells = dict(zip(COLUMNS, row, strict=True))
            table.add_row(*(cells[column] for column in shown))
        return table
