"""When a leader lets another region lead: the others wait for nothing but this region."""

from __future__ import annotations

from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery.upkeep import Upkeep
from diloco_node.core.rounds.leader import RoundLeader


class Succession:
    """Asked with each heartbeat."""

    def __init__(self, *, ledger: LedgerCore, upkeep: Upkeep, leader: RoundLeader) -> None:
        self._ledger = ledger
        self._upkeep = upkeep
        self._leader = leader
        self._behind_since_ns: int | None = None

    def reason(self, *, now_ns: int) -> str:
        """Why another region should lead; empty if this one may, or does not lead."""
        ledger = self._ledger
        if not ledger.is_leader or ledger.commit_index >= ledger.cluster_commit_index:
            self._behind_since_ns = None
        elif self._behind_since_ns is None:
            self._behind_since_ns = now_ns
        if not ledger.is_leader:
            return ""
        if self._behind_since_ns is not None and now_ns - self._behind_since_ns >= self._leader.disk_patience_ns:
            return "its disk lacks what is committed"
        in_the_way = "it holds up the others: its disk, or its bulk" if self._leader.is_in_the_way else ""
        return self._upkeep.reason or in_the_way
