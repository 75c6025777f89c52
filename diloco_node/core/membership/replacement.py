"""A region whose folder was lost comes back with another one: the leader has the ledger name it, in two entries."""

from __future__ import annotations

from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.types import DiskNamedBody

REST_HEARTBEATS: Final = 50
"""After a region's folder was named, the next change of the same region waits for so long: 10 s by default. A folder is
lost once in years; a region that tells another id each time must not fill the ledger."""

LIVES_UNKNOWN_MAX: Final = 1000
"""Lives that a learner may have had in one folder without an entry that names any of them."""


def incarnation_min(newest: int, replacements: int) -> int:
    """The least number for a new life of a region's learner, whatever lives the region's folder knows of.

    A folder that was lost may have handed out numbers that no entry names yet, while other regions still hold what
    those lives contributed. So each folder begins well above what the ledger knows.

    Args:
        newest: the newest life in the ledger, -1 if there is none. replacements: how often another folder was named.
    """
    return newest + 1 + LIVES_UNKNOWN_MAX * replacements


class DiskReplacement:
    """The leader's side: which change of the view is due. Asked with each heartbeat."""

    def __init__(self, ledger: LedgerCore, *, heartbeat_ns: int) -> None:
        self._ledger = ledger
        self._rest_ns = REST_HEARTBEATS * heartbeat_ns
        self._named_at_ns: dict[str, int] = {}
        self.commit_index_before = 0

    def propose(self, effects: EffectBuffer, *, now_ns: int) -> list[Effect]:
        """Put the change that is due into the ledger, and say so; what the ledger wants for it."""
        due = self.due(now_ns=now_ns)
        if due is None:
            return []
        news = f"is now {due.disk.hex()}" if due.disk else "is lost: another one is there"
        effects.note("disk", f"the folder of {due.region} {news}", is_alarm=not due.disk)
        return self._ledger.propose(due, now_ns=now_ns)

    def due(self, *, now_ns: int) -> DiskNamedBody | None:
        """The next change of the view; None when none is due, or one is not committed yet."""
        ledger, disks = self._ledger, self._ledger.disks
        caught_up_index, self.commit_index_before = self.commit_index_before, ledger.cluster_commit_index
        if not ledger.is_settled or not disks.has_view or disks.last_change_index > ledger.cluster_commit_index:
            return None
        for region, disk in sorted(ledger.reported_disks.items()):
            named_disk = disks.disk_of(region)
            if disk == named_disk:
                continue
            if now_ns - self._named_at_ns.get(region, now_ns - self._rest_ns) < self._rest_ns:
                continue
            if named_disk:
                return DiskNamedBody(region, b"")
            # All that was committed a heartbeat ago is on the new folder: from there it can follow as anybody does.
            if ledger.durable_indexes[region] >= max(caught_up_index, disks.last_change_index):
                self._named_at_ns[region] = now_ns
                return DiskNamedBody(region, disk)
        return None
