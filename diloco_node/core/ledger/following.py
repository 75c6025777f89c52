"""What a follower knows of its leader in one term: when it was heard, how far the logs agree, what it was told."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_node.core.ledger.entries import verify_chain
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.replication import BATCH_ENTRIES_MAX
from diloco_node.core.messages import AppendAsked
from diloco_node.errors import ProtocolViolation


@dataclass(slots=True)
class Following:
    """One term under one leader, or under none yet.

    Attributes:
        matched_index: up to here this log, staged entries counted, is the leader's. At first what is committed: that
            much is in the log of every leader to come.
        heard_ns: when the leader was last heard; None if not, or if its link is down.
        commit_index: what the leader said is committed.
        asked_sequence: of its last message; acknowledgements that nobody asked for carry it.
        told_index: what it was last told to be durable here.
    """

    matched_index: int = 0
    heard_ns: int | None = None
    commit_index: int = 0
    asked_sequence: int = 0
    told_index: int = 0

    def acknowledged_index(self, log: ReplicaLog) -> int:
        """On disk here, and the same as the leader's."""
        return min(log.durable_index, self.matched_index)

    def take(self, log: ReplicaLog, asked: AppendAsked) -> None:
        """Stage the entries of a message whose previous entry matches, in place of what differs."""
        conflict = log.first_conflict(asked.entries)
        if conflict:
            log.truncate(conflict)
            self.matched_index = min(self.matched_index, conflict - 1)
        log.stage(asked.entries)
        reached = min(asked.previous_index + len(asked.entries), log.known_index)
        self.matched_index = max(self.matched_index, reached)


def fault_in(asked: AppendAsked, log: ReplicaLog, *, committed_index: int) -> str:
    """Why the message can't come from a correct leader of its term; empty if it can."""
    entries = asked.entries
    if len(entries) > BATCH_ENTRIES_MAX or asked.previous_index < 0 or asked.commit_index < 0:
        return f"{len(entries)} entries after {asked.previous_index}, {asked.commit_index} committed"
    if entries and entries[-1].term > asked.term:
        return f"entry {entries[-1].index} is of term {entries[-1].term}, the leader's is {asked.term}"
    try:
        verify_chain(entries, previous_index=asked.previous_index, previous_hash=asked.previous_hash)
    except ProtocolViolation as error:
        return str(error)
    conflict = log.first_conflict(entries) if log.has(asked.previous_index, asked.previous_hash) else 0
    if 0 < conflict <= committed_index:
        return f"its entry {conflict} is another one than the entry that is committed here"
    return ""
