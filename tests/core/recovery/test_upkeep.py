"""Upkeep of a long run: what is learnt of entries before the log forgets them."""

from types import SimpleNamespace
from typing import cast

import pytest

from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery import upkeep as module
from diloco_node.core.recovery.upkeep import Upkeep
from diloco_node.core.types import Entry, EntryBody, LeaderBody, LedgerBase, RunSettings, SnapshotBody
from tests.kit.rounds_kit import GENESIS, committed_round, context_of
from tests.kit.versions_kit import Disk

BODIES: list[EntryBody] = [
    GENESIS,
    committed_round(0, 1, ()),
    SnapshotBody(0, 1, b"1" * 32),
    committed_round(0, 2, ()),
    SnapshotBody(0, 2, b"2" * 32),
    LeaderBody("a"),
    LeaderBody("b"),
]


@pytest.mark.parametrize("is_read_ahead", [False, True])
def test_snapshots_are_learnt_once_before_the_log_begins_behind_them(
    monkeypatch: pytest.MonkeyPatch, *, is_read_ahead: bool
) -> None:
    """Entries are read ahead slower than they are applied, and the log is summed up meanwhile."""
    monkeypatch.setattr(module, "LEARNT_PER_CALL", 1)
    disk = Disk()
    entries: list[Entry] = [disk.ledger.add(body) for body in BODIES]
    log = ReplicaLog(entries)
    ledger = SimpleNamespace(base=log.base, cluster_commit_index=len(entries), entry=log.entry)
    context = context_of(disk.history, settings=RunSettings(), effects=disk.effects)
    upkeep = Upkeep(context, cast(LedgerCore, ledger), disk.versions)
    for _ in range(is_read_ahead * len(entries)):
        upkeep.learn()
    for entry in entries[:6]:
        disk.history.apply(entry, now_ns=0)
        disk.versions.on_commit(entry)
        upkeep.on_commit(entry)
    log.compact(LedgerBase(6, 1, entries[5].hash, b"sum"))
    assert upkeep.is_behind != is_read_ahead
    upkeep.learn()
    assert not upkeep.is_behind
    for version, digest in ((1, b"1" * 32), (2, b"2" * 32)):
        snapshot = disk.versions.checkpoint_written(0, version, bytes(32))
        assert snapshot == SnapshotBody(0, version, digest), "the ledger names another state than this region's own"
