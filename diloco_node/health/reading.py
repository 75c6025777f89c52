"""Reads status documents, which come from daemons of other versions too: what is not as expected is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def part(document: Document, key: str) -> Document:
    """An object in it; empty if there is none."""
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def rows(document: Document, key: str) -> list[Document]:
    """The objects of a list in it."""
    found = document.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, (list, tuple)) else []


def number(document: Document, key: str) -> float | None:
    """A finite number in it."""
    found = document.get(key)
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:  # JSON has integers of any size
        return None


def text(document: Document, key: str) -> str:
    """A text in it; empty if there is none."""
    found = document.get(key)
    return found if isinstance(found, str) else ""


def duration(seconds: float) -> str:
    """For people: 250 ms, 4.5 s, 45 s, 12 min, 3.5 h, 2 d."""
    if seconds < 10:
        return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
