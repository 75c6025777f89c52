"""Status documents with something in one place that does not belong there."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

JUNK = st.sampled_from([None, True, -1, 10**400, float("nan"), float("inf"), "", "\x1b[2J", [], {}, [[1]], {"a": 1}])


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something: a key or index for each level."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield (*above, key)
        yield from paths(one, (*above, key))


def spoiled(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The document with junk somewhere in it."""
    return st.builds(_spoil, st.just(document), st.sampled_from(list(paths(document))), JUNK)


def _spoil(document: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    changed = deepcopy(document)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = deepcopy(junk)
    return changed
