"""Limits of the core that a seed lowers, so that a short run reaches them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from types import ModuleType

from diloco_node.core import region
from diloco_node.core.ledger import account, log, replication, witness, write_gate
from diloco_node.core.membership import absence
from diloco_node.core.merge import stripes
from diloco_node.core.recovery import compaction, digest_watch, fetches, upkeep, versions

LOW: tuple[tuple[str, int, tuple[ModuleType, ...]], ...] = (
    ("INCARNATIONS_KEPT", 5, (account,)),
    ("UNPACKED_ENTRIES", 3, (log,)),
    ("STAGED_ENTRIES_MAX", 3, (log, replication)),
    ("BATCH_ENTRIES_MAX", 2, (replication, witness)),
    ("PENDING_MESSAGES_MAX", 6, (write_gate,)),
    ("ENTRIES_PER_EVENT", 1, (region,)),
    ("LEARNT_PER_CALL", 1, (upkeep,)),
    ("SUMS_KEPT", 1, (compaction,)),
    ("FETCHES_MAX", 1, (fetches,)),
    ("PAYLOADS_RATHER_MAX", 1, (versions,)),
    ("VERSIONS_KEPT", 3, (digest_watch,)),
    ("FRESH_MAX", 1, (digest_watch,)),
    ("STRIPE_BYTES_MIN", 1, (stripes,)),
    ("EVICT_AFTER_NS", 4_000_000_000, (absence,)),
)
"""Name, low value, and the modules that read it."""

CHANCE = 0.2


@contextlib.contextmanager
def lowered_limits(seed: int) -> Iterator[tuple[str, ...]]:
    """Lower some limits while a seed runs; gives their names. Others of the seed's draws stay as they are."""
    rng = Random(f"limits of {seed}")
    low_limits = [(name, low, modules) for name, low, modules in LOW if rng.random() < CHANCE]
    # A follower that has no room for one batch would fall behind for ever.
    room = {name: low for name, low, _ in low_limits}.get("BATCH_ENTRIES_MAX", replication.BATCH_ENTRIES_MAX)
    low_limits = [
        (name, max(low, room) if name == "STAGED_ENTRIES_MAX" else low, modules) for name, low, modules in low_limits
    ]
    usual = [(module, name, getattr(module, name)) for name, _, modules in low_limits for module in modules]
    try:
        for name, low, modules in low_limits:
            for module in modules:
                setattr(module, name, low)
        yield tuple(name for name, _, _ in low_limits)
    finally:
        for module, name, value in usual:
            setattr(module, name, value)
