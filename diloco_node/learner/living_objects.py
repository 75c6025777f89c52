"""All objects of some classes that are alive, without a search of the process where they are the same as before.

A process has some 300,000 objects, and a search takes as long as several steps. But each object counts as a reference
to its class. So while those found before are alive, and no class has more references than then, there are no others.
NumPy's generators do not count: one that was made since the last search is found by the next one.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from itertools import compress
from typing import Any


class LivingObjects:
    """Objects of these classes and those derived from them.

    By their type alone: `isinstance` would wake what only looks like one.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        # As of the last search: references to each class, by its address, and a way to each object.
        self._counts: dict[int, int] = {}
        self._references: list[Callable[[], Any]] = []

    def now(self) -> list[Any]:
        """All of them."""
        objects = [reference() for reference in self._references]
        if any(item is None for item in objects) or self._count() != self._counts:
            return self.search()
        return objects

    def search(self) -> list[Any]:
        """The same, from among all objects. No line of Python runs for each, for the loop waits for this."""
        self._counts = self._count()
        everything = gc.get_objects()
        objects = [*compress(everything, map(self._counts.__contains__, map(id, map(type, everything))))]
        self._references = [*map(_reference, objects)]
        return objects

    def _count(self) -> dict[int, int]:
        """References to each class, by its address: one with a metaclass of its own may lack a hash."""
        edge, counts = list(self._kinds), dict[int, int]()
        while edge:
            kind = edge.pop()
            if id(kind) not in counts:
                counts[id(kind)] = sys.getrefcount(kind)
                edge += type.__subclasses__(kind)
        return counts


def _reference(item: Any) -> Callable[[], Any]:
    """A way to an object; one that knows no weak references, as NumPy's generators, is kept."""
    try:
        return weakref.ref(item)
    except TypeError:
        return lambda: item
