"""Parts of `stateful` that may know where a data loader is, and what a position of torchdata's loader is good for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

REACH: Final = 4
"""How deep a part of `stateful` is looked into for what it keeps: its attributes, their attributes, and so on."""

ITEMS_MAX: Final = 100
"""A longer list holds rows of data."""

SOURCES: Final = (DataLoader, Sampler, Dataset)


def reach(components: Iterable[object]) -> list[Any]:
    """Return the components, and what is in their attributes."""
    members: dict[int, Any] = {}
    edge = list(components)
    for _ in range(REACH):
        members |= {id(item): item for item in edge}
        inner: list[Any] = []
        for item in edge:
            if isinstance(item, list | tuple | dict):
                items = item.values() if isinstance(item, dict) else item
                limit = ITEMS_MAX * (100 if isinstance(next(iter(items), None), Tensor) else 1)
                inner += items if len(item) <= limit else ()
            elif not isinstance(item, Tensor | type):
                inner += getattr(item, "__dict__", {}).values()
        edge = [item for item in inner if id(item) not in members and not inspect.ismodule(item)]
    return list(members.values())


def may_read(component: Any, iterator: Any, model_ids: Collection[int]) -> bool:
    """Whether a part of `stateful` may know where a data loader's iterator is.

    Those that count tokens do, those that have the same data, and those with neither data nor values: a position. Other
    parts are there for something else, such as an average.

    model_ids: of the model's modules and values, which tell nothing.
    """
    if hasattr(component, "token_count"):
        return True
    sampler = getattr(iterator, "_index_sampler", None)
    sources = [getattr(iterator, "_dataset", None), sampler, getattr(sampler, "sampler", None)]
    ids = {id(item) for item in reach(sources) if issubclass(type(item), SOURCES)}  # below a `Subset`, too
    ids |= {id(source) for source in (iterator, *sources) if source is not None}
    members = reach([component])
    if any(id(member) in ids for member in members):
        return True
    return not any(_is_holding(member, model_ids) for member in members)


def _is_holding(member: Any, model_ids: Collection[int]) -> bool:
    """Whether it is data, or has values that are not the model's. An order of rows is none."""
    if issubclass(type(member), Tensor):
        return member.is_floating_point() and id(member) not in model_ids
    if issubclass(type(member), nn.Module):
        return any(id(value) not in model_ids for value in (*member.parameters(), *member.buffers()))
    return issubclass(type(member), SOURCES)


def is_under_way(iterator: Any) -> bool:
    """Whether a data loader has returned a batch, and not all."""
    count = getattr(iterator, "_num_yielded", 0)
    try:
        return 0 < count < len(iterator)
    except TypeError:
        return bool(count)


def workers_before(loader: object, state: object) -> int | None:
    """Return how many workers a state was kept with, where the loader has another number; else None.

    A `StatefulDataLoader` looks at that itself when it is iterated, and then fails without a reason.
    """
    if not isinstance(state, Mapping):
        return None
    before = 0 if "_sampler_iter_yielded" in state else None
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping) and isinstance(snapshot.get("_main_snapshot"), Mapping):
        before = snapshot["_main_snapshot"].get("_num_workers")
    return None if before is None or getattr(loader, "num_workers", before) == before else before


def check_workers(name: str, loader: object, state: object) -> None:
    """Raise ValueError: a part of `stateful` is a loader that can't go on from this state."""
    if (before := workers_before(loader, state)) is not None:
        raise ValueError(f"{name!r} was kept with num_workers={before}: give it so many")
