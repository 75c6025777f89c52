"""Replication of the log, seen from both ends.

A leader keeps a `Follower` for each of the others: what is on its disk, what to send next, when it last answered. A
follower keeps a `Following`: how far the logs agree, what it has acknowledged.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from diloco_node.core.ledger.entries import encode_entry, verify_chain
from diloco_node.core.ledger.log import STAGED_ENTRIES_MAX, ReplicaLog
from diloco_node.core.messages import AppendEntries, AppendEntriesReply, BaseSent
from diloco_node.core.types import Entry, LedgerBase
from diloco_node.errors import ProtocolViolation

BATCH_ENTRIES_MAX: Final = 64
"""Entries in one message."""

BATCH_BYTES_MAX: Final = 1 << 20
"""Encoded bytes of them, if they are more than one; a message of the control lane may have 4 MiB."""

BASE_AGAIN_MESSAGES: Final = 16
"""A base that was refused is sent again after so many heartbeats: it may be as long as 3 MiB."""


@dataclass(slots=True)
class Follower:
    """A follower in one term of this leader.

    Attributes:
        next_index: the next entry to send. Heartbeats name the entry before it, so that a lost batch is noticed.
        durable_index: what the follower reported to be on its disk of this leader's log.
        disk: the folder that it reported it of; empty before it answered.
        answered_ns: when it last answered; at first the time of the election.
        batch_sequence: the batch whose answer is awaited, 0 if none: one batch at a time.
        sent_sequence: the last message sent.
        heeded_sequence: refusals of earlier messages than this one are old news.
        is_certain: the last message named a previous entry that the follower had reported to be on its disk.
        base_age: messages since the base was sent.
        farewell_sequence: the message that told a removed region so; 0: none yet.
    """

    next_index: int
    answered_ns: int
    durable_index: int = 0
    disk: bytes = b""
    batch_sequence: int = 0
    sent_sequence: int = 0
    heeded_sequence: int = 0
    is_certain: bool = False
    base_age: int = BASE_AGAIN_MESSAGES
    farewell_sequence: int = 0

    def next_message(self, log: ReplicaLog, *, term: int, sequence: int, commit_index: int) -> AppendEntries | BaseSent:
        """The heartbeat for this follower, with the next batch of entries if none is on its way; or the base that
        stands for what it lacks."""
        self.base_age += 1
        is_behind = self.next_index <= log.base.index
        if is_behind:
            if self.batch_sequence == 0 and self.base_age > BASE_AGAIN_MESSAGES:
                return self._send_base(log.base, term, sequence)
            self.next_index = log.base.index + 1
        previous_index = self.next_index - 1
        entries = self._batch(log, commit_index) if self.batch_sequence == 0 and not is_behind else ()
        if entries:
            self.batch_sequence = sequence
            self.next_index += len(entries)
        self.sent_sequence = sequence
        self.is_certain = previous_index <= self.durable_index
        return AppendEntries(
            term=term,
            sequence=sequence,
            previous_index=previous_index,
            previous_hash=log.hash_at(previous_index),
            entries=entries,
            commit_index=commit_index,
        )

    def has_more(self, log: ReplicaLog, *, commit_index: int) -> bool:
        """Whether a message now would carry entries."""
        return self.batch_sequence == 0 and self.next_index <= min(log.last_index, self._window_end(commit_index))

    def answered(self, answer: AppendEntriesReply, *, now_ns: int) -> bool:
        """Take note of an answer of this term, whose acknowledged entry is the leader's own.

        Returns: False if the follower has lost entries that it had acknowledged.
        """
        self.answered_ns = now_ns
        if answer.disk != self.disk:
            # Another folder: what the one before it had on disk says nothing about this one.
            self.disk, self.durable_index, self.is_certain = answer.disk, 0, False
        if self.batch_sequence and answer.sequence >= self.batch_sequence:
            self.batch_sequence = 0
        if answer.accepted:
            self.durable_index = max(self.durable_index, answer.durable_index)
            self.next_index = max(self.next_index, self.durable_index + 1)
            return True
        if not self.heeded_sequence <= answer.sequence <= self.sent_sequence:
            return True
        has_lost = answer.sequence == self.sent_sequence and self.is_certain
        if has_lost:
            self.durable_index = min(self.durable_index, max(0, answer.durable_index))
        # Search the common part further back.
        self.next_index = max(self.durable_index + 1, min(answer.durable_index + 1, self.next_index))
        self.batch_sequence = 0
        self.heeded_sequence = self.sent_sequence + 1
        return not has_lost

    def link_changed(self) -> None:
        """Forget messages on their way, which are lost; the next answer shows where the follower stands."""
        self.batch_sequence = 0
        self.base_age = BASE_AGAIN_MESSAGES

    def _window_end(self, commit_index: int) -> int:
        """A follower keeps committed entries without their payloads, and only so many others in memory."""
        return max(self.durable_index + STAGED_ENTRIES_MAX, commit_index)

    def _send_base(self, base: LedgerBase, term: int, sequence: int) -> BaseSent:
        self.base_age = 0
        self.batch_sequence = self.sent_sequence = sequence
        self.next_index = base.index + 1
        self.is_certain = False
        return BaseSent(term, sequence, base.index, base.term, base.hash, base.summary)

    def _batch(self, log: ReplicaLog, commit_index: int) -> tuple[Entry, ...]:
        last = min(log.last_index, self._window_end(commit_index), self.next_index + BATCH_ENTRIES_MAX - 1)
        entries = log.slice(self.next_index, last)
        if len(entries) == 1:  # the usual case: however long it is, it goes alone
            return entries
        batch: list[Entry] = []
        batch_bytes = 0
        for entry in entries:
            batch_bytes += len(encode_entry(entry))
            if batch and batch_bytes > BATCH_BYTES_MAX:
                break
            batch.append(entry)
        return tuple(batch)


@dataclass(slots=True)
class WitnessFollower(Follower):
    """The witness (`core.ledger.witness`), as a leader sees it. It keeps what not both voters have on disk.

    Committed entries that it lacks were committed by the two voters, as all before them: a majority without the witness
    is both of them. So it gets none of those, and begins its log anew there, at `settled_index`.
    """

    settled_index: int = 0

    def next_message(self, log: ReplicaLog, *, term: int, sequence: int, commit_index: int) -> AppendEntries | BaseSent:
        """As `Follower`."""
        if self.next_index > commit_index or self.batch_sequence:
            self.next_index = max(self.next_index, commit_index + 1)
            return Follower.next_message(self, log, term=term, sequence=sequence, commit_index=commit_index)
        self.settled_index = commit_index
        base = LedgerBase(commit_index, log.term_at(commit_index), log.hash_at(commit_index), b"")
        return self._send_base(base, term, sequence)

    def settle(self, disk_index: int) -> bool:
        """Whether it keeps entries that are on all other disks up to this index: the next message has it drop them."""
        if not self.settled_index < self.durable_index <= disk_index:
            return False
        self.next_index, self.batch_sequence = self.durable_index, 0
        return True


@dataclass(slots=True)
class Following:
    """A term under one leader, or under none yet.

    Attributes:
        matched_index: up to here this log, staged entries counted, is the leader's. At first what is committed: that
            much is in the log of every leader to come.
        commit_index: what the leader reported as committed.
        requested_sequence: of its last message; unsolicited acknowledgements carry it.
        reported_index: what was last reported to it as durable here.
    """

    matched_index: int = 0
    commit_index: int = 0
    requested_sequence: int = 0
    reported_index: int = 0

    def acknowledged_index(self, log: ReplicaLog) -> int:
        """On disk here, and the same as the leader's; 0 for what the base stands for, but is not on disk yet."""
        index = min(log.durable_index, self.matched_index)
        return index if index >= log.base.index else 0

    def take(self, log: ReplicaLog, request: AppendEntries) -> int:
        """Stage the entries of a message whose previous entry matches, in place of what differs.

        Returns: the first index that was overwritten; 0 if none was.
        """
        conflict = log.first_conflict(request.entries)
        if conflict:
            log.truncate(conflict)
            self.matched_index = min(self.matched_index, conflict - 1)
        log.stage(request.entries)
        index = min(request.previous_index + len(request.entries), log.known_index)
        self.matched_index = max(self.matched_index, index)
        return conflict


def fault_in(request: AppendEntries) -> str:
    """Why the message can't come from a correct leader of its term; empty if it can."""
    entries = request.entries
    if len(entries) > BATCH_ENTRIES_MAX or request.previous_index < 0 or request.commit_index < 0:
        return f"{len(entries)} entries after {request.previous_index}, {request.commit_index} committed"
    if entries and entries[-1].term > request.term:
        return f"entry {entries[-1].index} is of term {entries[-1].term}, the leader's is {request.term}"
    try:
        verify_chain(entries, previous_index=request.previous_index, previous_hash=request.previous_hash)
    except ProtocolViolation as error:
        return str(error)
    return ""


def fork_in(request: AppendEntries, log: ReplicaLog, *, committed_index: int) -> tuple[int, bytes] | None:
    """Index and the leader's hash where its log and this one part as no two logs can in Raft; None if they don't."""
    index, entry_hash, terms = request.previous_index, request.previous_hash, set[int]()
    if log.has(index, entry_hash):
        index = log.first_conflict(request.entries)
        if not index:
            return None
        entries = request.entries[index - 1 - request.previous_index :]
        entry_hash, terms = entries[0].hash, {request.term, *(entry.term for entry in entries)}
    return (index, entry_hash) if is_fork(log, index, entry_hash, terms, committed_index=committed_index) else None


def is_fork(log: ReplicaLog, index: int, entry_hash: bytes, terms: Container[int], *, committed_index: int) -> bool:
    """Whether another log can't be, beside this one.

    Committed entries are in all logs to come. And the entries of one term are in the log of its one leader: where two
    logs have parted, no term goes on in both.

    Args:
        entry_hash: of the other log's entry there. terms: of its entries from there on.
    """
    if not log.base.index <= index <= log.known_index or log.has(index, entry_hash):
        return False
    return index <= committed_index or any(log.term_at(later) in terms for later in range(index, log.known_index + 1))
