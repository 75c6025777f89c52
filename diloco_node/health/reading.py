"""Readers of status documents. Daemons of other versions write them too: an unexpected value counts as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

Document = Mapping[str, Any]
UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def section(document: Document, key: str) -> Document:
    """An object in a document; empty if there is none."""
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def rows(document: Document, key: str) -> list[Document]:
    """The objects of a list in a document."""
    value = document.get(key)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, (list, tuple)) else []


def number(document: Document, key: str) -> float | None:
    """A finite number in a document; None if there is none."""
    value = document.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON has integers of any size
        return None


def text(document: Document, key: str) -> str:
    """A text in a document; empty if there is none."""
    value = document.get(key)
    return value if isinstance(value, str) else ""


def duration(seconds: float) -> str:
    """Write a time for people: 250 ms, 4.5 s, 45 s, 12 min, 3.5 h, 2 d."""
    if seconds < 10:
        return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def human_bytes(count: float) -> str:
    """Write an amount of bytes, as 12.3 MB."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
