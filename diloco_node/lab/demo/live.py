"""The demo's view: one calm table that is redrawn in place; plain lines, every few seconds, when not on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

from diloco_node.cli.tables import COLUMNS, region_lines

PLAIN_PERIOD_S: Final = 5.0


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
            from rich.text import Text

            lines = region_lines(rows, self._live.console.width)
            self._live.update(Text("\n".join([f"{self._title}   {elapsed_s:.0f} s", *lines])))
        elif not self._is_quiet and not 0 <= elapsed_s - self._last_plain_s < PLAIN_PERIOD_S:
            self._last_plain_s = elapsed_s
            for row in rows:
                cells = " ".join(f"{column}={cell}" for column, cell in zip(COLUMNS[1:-1], row[1:-1], strict=True))
                print(f"{elapsed_s:6.1f}s {row[0]:<10} {cells}  {row[-1]}", file=self._stream, flush=True)
