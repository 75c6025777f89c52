"""A place to print tables to: as wide as the terminal, and readable when the output is piped."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS: Final = 100
"""rich takes 80 where there is no terminal, and would cut the tables."""


def table_console() -> Console:
    """Standard output; `COLUMNS` is obeyed."""
    from rich.console import Console

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_sized else PIPED_COLUMNS)
