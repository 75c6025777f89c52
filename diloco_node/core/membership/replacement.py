"""A region whose folder was lost comes back with another one: the leader has the ledger name it, in two entries."""

from __future__ import annotations

from typing import Final

from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.types import DiskNamedBody

REST_HEARTBEATS: Final = 50
"""After a region's folder was named, the next change of the same region waits for so long: 10 s by default. A folder is
lost once in years; a region that tells another id each time must not fill the ledger."""


class DiskReplacement:
    """The leader's side: which change of the view is due. Asked with each heartbeat."""

    def __init__(self, ledger: LedgerCore, *, heartbeat_ns: int) -> None:
        self._ledger = ledger
        self._rest_ns = REST_HEARTBEATS * heartbeat_ns
        self._named_at_ns: dict[str, int] = {}
        self._commit_index_before = 0

    def due(self, *, now_ns: int) -> DiskNamedBody | None:
        """The next change of the view; None when none is due, or one is not committed yet."""
        ledger, disks = self._ledger, self._ledger.disks
        caught_up_index, self._commit_index_before = self._commit_index_before, ledger.cluster_commit_index
        if not ledger.is_settled or not disks.has_view or disks.last_change_index > ledger.cluster_commit_index:
            return None
        for region, disk in sorted(ledger.told_disks.items()):
            named = disks.named(region)
            if disk == named:
                continue
            if now_ns - self._named_at_ns.get(region, now_ns - self._rest_ns) < self._rest_ns:
                continue
            if named:
                return DiskNamedBody(region, b"")
            # All that was committed a heartbeat ago is on the new folder: from there it can follow as anybody does.
            if ledger.durable_indexes[region] >= max(caught_up_index, disks.last_change_index):
                self._named_at_ns[region] = now_ns
                return DiskNamedBody(region, disk)
        return None
