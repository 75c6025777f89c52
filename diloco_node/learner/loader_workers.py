"""Workers of torchdata's `StatefulDataLoader`: its position is good for as many as it was kept with.

The loader itself looks at that when it is iterated, and then fails without a reason.
"""

from __future__ import annotations

from collections.abc import Mapping


def workers_before(loader: object, state: object) -> int | None:
    """Return how many workers a state was kept with, where the loader has another number; else None."""
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
