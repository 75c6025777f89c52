"""The demo's view: one calm table that is redrawn in place; plain lines, every few seconds, when not on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Final, TextIO

from diloco_node.cli.status import CLEAR
from diloco_node.cli.tables import COLUMNS, region_lines

PLAIN_PERIOD_S: Final = 5.0
FACTS_MAX: Final = 12


class LiveView:
    """Shows rows while a demo runs. On a terminal a table in place, else plain lines; silent when `is_quiet`."""

    def __init__(self, title: str, *, is_quiet: bool, stream: TextIO | None = None) -> None:
        self._title = title
        self._is_quiet = is_quiet
        self._stream = stream if stream is not None else sys.stderr
        self._facts: list[str] = []
        self._last_plain_s = -PLAIN_PERIOD_S

    def line(self, text: str) -> None:
        """A fact that stays on the screen."""
        self._facts.append(text)
        if not self._is_quiet:
            print(text, file=self._stream, flush=True)

    def show(self, elapsed_s: float, rows: Sequence[list[str]]) -> None:
        """Draw the rows; plain output is limited to a line per region every PLAIN_PERIOD_S."""
        if self._is_quiet:
            return
        if self._stream.isatty():
            table = region_lines(rows, shutil.get_terminal_size().columns)
            lines = [*self._facts[-FACTS_MAX:], "", f"{self._title}   {elapsed_s:.0f} s", *table]
            print(CLEAR + "\n".join(lines), file=self._stream, flush=True)
        elif not 0 <= elapsed_s - self._last_plain_s < PLAIN_PERIOD_S:
            self._last_plain_s = elapsed_s
            for row in rows:
                cells = " ".join(f"{column}={cell}" for column, cell in zip(COLUMNS[1:-1], row[1:-1], strict=True))
                print(f"{elapsed_s:6.1f}s {row[0]:<10} {cells}  {row[-1]}", file=self._stream, flush=True)
