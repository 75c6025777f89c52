"""The witness: a third vote beside two voters, kept in one object that is written only by compare-and-swap. Pure.

It votes and acknowledges as any voter of the ledger does, and is no process: each region answers its own core's
messages to it (`answer`), by what the object holds. An answer that changed the record counts once the object is
written, and only if nobody else wrote it since it was read. So there is one sequence of records, whoever wrote each.

It keeps a tail of the log: where that begins, and the entries that are not on the disks of both voters. A leader
has it begin anew (`BaseSent`) where both have everything. An entry counts as held when its payload is in the bucket,
too. So what is committed is on two of three: the disk here, the disk there, and the bucket.

A leader asks it only while the other voter is silent (`WitnessFollower`), and writes a sign of life then. A voter asks
it for a vote later than it asks the other one (`election.UNANSWERED_MIN`), and gets none while the record shows signs
of life (`WitnessWatch`). So of two regions that don't hear each other, the one that was first goes on undisturbed.

A voter whose log ends before the witness's gets no vote, and is shown the tail instead (`recorded`).

Source: "witness" in Liskov et al., "Replication in the Harp File System" (1991), and etcd-io/raft issue 133.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgpack

from diloco_node.core.bounds import DISK_BYTES, RUN_ID_BYTES
from diloco_node.core.ledger.election import TERM_STEP_MAX, ballot_paper
from diloco_node.core.ledger.entries import ZERO_HASH, decode_chain, encode_entry
from diloco_node.core.ledger.replication import BATCH_ENTRIES_MAX, fault_in
from diloco_node.core.messages import (
    AppendEntries,
    AppendEntriesReply,
    BaseSent,
    Message,
    RequestVote,
    RequestVoteReply,
)
from diloco_node.core.types import NO_BASE, Entry, LedgerBase, RoundBody, RunSettings
from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation
from diloco_node.numeric import NS_PER_S

FORMAT: Final = 1
BEAT_NS: Final = 2 * NS_PER_S
"""A leader that asks the witness has the record written at least so often."""

QUIET_NS: Final = 6 * NS_PER_S
"""A record that was seen unchanged for so long has no leader any more."""

ENTRIES_MAX: Final = 1 << 14
"""Entries of a tail. A record with more is not written: nobody would read it."""

TAIL_BYTES_MAX: Final = 8 << 20
"""Encoded bytes of them: the record is written at least every BEAT_NS while a leader is alone."""

FRESH_BYTES_MAX: Final = 4 * TAIL_BYTES_MAX
"""So many of those that are not known to be committed: a leader that was started again commits them with its first."""

RECORD_BYTES_MAX: Final = FRESH_BYTES_MAX + (1 << 20)
_NAMES_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """The content of the object.

    Attributes:
        run_id: of the run. disk: the id of the object, made at random with it: one that was lost counts no more.
        writes: so far; no two records of an object are equal.
        term, voted_for: Raft's hard state (`election.ballot_paper`).
        leader: who sent the entries in this term; empty: nobody has.
        base: where the tail begins; its summary is empty. entries: the tail.
        commit_index: as the leader has told.
        entry_bytes: entries by their hashes, as far as they were encoded or read.
    """

    run_id: str
    disk: bytes
    writes: int = 0
    term: int = 0
    voted_for: str = ""
    leader: str = ""
    base: LedgerBase = NO_BASE
    entries: tuple[Entry, ...] = ()
    commit_index: int = 0
    entry_bytes: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)

    def encode(self, entry: Entry) -> bytes:
        """An entry of this record, or of one that is to be made of it, as bytes: encoded once in a turn."""
        if entry.hash not in self.entry_bytes:
            self.entry_bytes[entry.hash] = encode_entry(entry)
        return self.entry_bytes[entry.hash]

    @property
    def last(self) -> tuple[int, int]:
        """(term, index) of the last entry."""
        return (self.entries[-1].term, self.entries[-1].index) if self.entries else (self.base.term, self.base.index)

    @property
    def holder(self) -> str:
        """The region that leads, or got the vote, in this term; empty: none."""
        return self.leader or self.voted_for.partition(" ")[0]

    @property
    def payloads(self) -> frozenset[bytes]:
        """The rounds of the tail, by the hashes of their entries, after which their payloads are named.

        An entry that has left the tail never comes back to it. So what is removed then is never missed.
        """
        return frozenset(entry.hash for entry in self.entries if isinstance(entry.body, RoundBody))

    def entry_of(self, fragment: int, version: int, digest: bytes) -> bytes:
        """The hash of the entry of a round; empty if the tail does not have it."""
        name = (fragment, version, digest)
        rounds = ((entry.hash, entry.body) for entry in self.entries if isinstance(entry.body, RoundBody))
        hashes = (
            entry_hash for entry_hash, body in rounds if (body.fragment, body.version, body.payload_digest) == name
        )
        return next(hashes, b"")

    def hash_at(self, index: int) -> bytes:
        """The hash of an entry from the base on; ZERO_HASH of any other."""
        if index == self.base.index:
            return self.base.hash
        return self.entries[index - self.base.index - 1].hash if self.base.index < index <= self.last[1] else ZERO_HASH


@dataclass(frozen=True, slots=True)
class WitnessAnswer:
    """An answer to one message.

    Attributes:
        record: as it is to be before the reply leaves. reply: None: the message asks for none.
        lacking: entries of rounds whose payload has to be in the bucket before they are taken.
    """

    record: WitnessRecord
    reply: RequestVoteReply | AppendEntriesReply | None = None
    lacking: tuple[Entry, ...] = ()


def tail_limit(settings: RunSettings) -> int:
    """How many entries of a tail are kept: the rounds whose payloads a region keeps, too."""
    rounds = settings.fragments * (settings.payload_versions + settings.checkpoint_versions)
    return min(max(BATCH_ENTRIES_MAX, rounds), ENTRIES_MAX)


def answer(
    record: WitnessRecord, peer: str, message: Message, has_payload: Callable[[Entry], bool], *, tail_max: int
) -> WitnessAnswer:
    """Answer a message of a voter's core.

    Args:
        record: of this run. has_payload: whether the bucket has the payload of a round's entry.
        tail_max: beyond so many entries, or TAIL_BYTES_MAX, the oldest committed ones go: a voter that lacks those
            needs the other one. Others are not taken beyond ENTRIES_MAX and FRESH_BYTES_MAX.
    """
    match message:
        case RequestVote():
            return _vote(record, peer, message)
        case AppendEntries():
            return _append(record, peer, message, has_payload, tail_max)
        case BaseSent():
            return _begin(record, peer, message)
        case _:
            return WitnessAnswer(record)


def recorded(record: WitnessRecord) -> tuple[AppendEntries, ...]:
    """The tail, for a voter that may lack some of it. From a witness, which leads nobody, it is no more than that.

    The term of each message is that of the last entry: a voter compares logs by it, whatever a batch ends with.
    """
    messages, previous = [], (record.base.index, record.base.hash)
    for start in range(0, len(record.entries), BATCH_ENTRIES_MAX):
        batch = record.entries[start : start + BATCH_ENTRIES_MAX]
        messages.append(AppendEntries(record.last[0], 0, *previous, batch, record.commit_index))
        previous = (batch[-1].index, batch[-1].hash)
    return tuple(messages)


def _in_term(record: WitnessRecord, term: int) -> WitnessRecord:
    """Adopt a newer term, or a step towards it."""
    if term <= record.term:
        return record
    return replace(record, term=min(term, record.term + TERM_STEP_MAX), voted_for="", leader="")


def _vote(record: WitnessRecord, peer: str, request: RequestVote) -> WitnessAnswer:
    is_welcome = request.has_view and (request.last_term, request.last_index) >= record.last
    if request.pre_vote:
        is_granted = is_welcome and record.term < request.term <= record.term + TERM_STEP_MAX
        term = request.term if is_granted else record.term
        return WitnessAnswer(record, RequestVoteReply(term, True, is_granted, record.disk))
    record, paper = _in_term(record, request.term), ballot_paper(peer, request.disk)
    is_granted = is_welcome and request.term == record.term and record.voted_for in ("", paper)
    if is_granted:
        record = replace(record, voted_for=paper)
    return WitnessAnswer(record, RequestVoteReply(record.term, False, is_granted, record.disk))


def _follow(record: WitnessRecord, peer: str, term: int) -> tuple[WitnessRecord, bool]:
    """The record with this leader, and whether it is the one of its term."""
    record = _in_term(record, term)
    is_leader = term == record.term and record.leader in ("", peer)
    return (replace(record, leader=peer) if is_leader else record), is_leader


def _append(
    record: WitnessRecord, peer: str, request: AppendEntries, has_payload: Callable[[Entry], bool], tail_max: int
) -> WitnessAnswer:
    record, is_leader = _follow(record, peer, request.term)
    if not is_leader or fault_in(request):
        return _refusal(record, request.sequence, 0)
    base, index, entries = record.base, request.previous_index, request.entries
    if index < base.index:
        # What is before the base is committed: the leader has it, too.
        index, entries = base.index, tuple(entry for entry in entries if entry.index > base.index)
        is_matching = not entries or entries[0].previous == base.hash
    else:
        is_matching = index <= record.last[1] and record.hash_at(index) == request.previous_hash
    if not is_matching:
        # Where the tail is longer and another one, step by step: what it has of the leader's log it keeps.
        return _refusal(record, request.sequence, min(record.last[1], request.previous_index - 1))
    lacking: list[Entry] = []
    sizes = [len(record.encode(entry)) for entry in record.entries]
    for entry in entries:
        if record.hash_at(entry.index) == entry.hash:
            index = index if lacking else entry.index
            continue
        if entry.index <= record.commit_index:
            return _refusal(record, request.sequence, record.commit_index)  # what is committed stays
        if isinstance(entry.body, RoundBody) and not has_payload(entry):
            lacking.append(entry)
        count, settled = entry.index - base.index - 1, max(record.commit_index, request.commit_index) - base.index
        fresh_bytes = len(record.encode(entry)) + sum(sizes[max(0, settled) : count])
        if count + 1 - settled > ENTRIES_MAX or fresh_bytes > FRESH_BYTES_MAX:
            break  # none of these can go to make room
        if not lacking:
            sizes[count:] = [len(record.encode(entry))]
            record = replace(record, entries=(*record.entries[:count], entry))
            index = entry.index
    commit_index = max(record.commit_index, min(request.commit_index, index))
    record = _tail_after(record, min(commit_index, base.index + _excess(sizes, tail_max)))
    reply = AppendEntriesReply(record.term, request.sequence, True, index, record.hash_at(index), record.disk)
    return WitnessAnswer(replace(record, commit_index=commit_index), reply, tuple(lacking))


def _excess(sizes: Sequence[int], tail_max: int) -> int:
    """Count the oldest entries that are beyond the limits of a tail. sizes: encoded bytes of each, oldest first."""
    tail_bytes, excess = sum(sizes), 0
    while tail_bytes > TAIL_BYTES_MAX:
        tail_bytes, excess = tail_bytes - sizes[excess], excess + 1
    return max(excess, len(sizes) - tail_max)


def _begin(record: WitnessRecord, peer: str, message: BaseSent) -> WitnessAnswer:
    record, is_leader = _follow(record, peer, message.term)
    if not is_leader:
        return _refusal(record, message.sequence, 0)
    if message.index > record.base.index:
        if record.hash_at(message.index) == message.hash:
            record = _tail_after(record, message.index)
        else:
            base = LedgerBase(message.index, message.base_term, message.hash, b"")
            record = replace(record, base=base, entries=())
        record = replace(record, commit_index=max(record.commit_index, message.index))
    reply = AppendEntriesReply(record.term, message.sequence, True, record.base.index, record.base.hash, record.disk)
    return WitnessAnswer(record, reply)


def _tail_after(record: WitnessRecord, index: int) -> WitnessRecord:
    """Without the entries up to this one, which it has, and the base there."""
    count = index - record.base.index
    if count <= 0:
        return record
    last = record.entries[count - 1]
    return replace(record, base=LedgerBase(last.index, last.term, last.hash, b""), entries=record.entries[count:])


def _refusal(record: WitnessRecord, sequence: int, index: int) -> WitnessAnswer:
    reply = AppendEntriesReply(record.term, sequence, False, max(0, index), ZERO_HASH, record.disk)
    return WitnessAnswer(record, reply)


def encode_record(record: WitnessRecord) -> bytes:
    """The record as the bytes of the object."""
    names, base = [FORMAT, record.run_id, record.disk, record.writes], record.base
    state = [record.term, record.voted_for, record.leader, [base.index, base.term, base.hash], record.commit_index]
    return bytes(msgpack.packb([*names, *state, [record.encode(entry) for entry in record.entries]]))


def decode_record(data: bytes | memoryview) -> WitnessRecord:
    """The record in the bytes of an object. Raises ProtocolViolation: they are none, or of another format."""
    plain = unpack(data, depth_max=3, values_max=ENTRIES_MAX + 64, items_max=ENTRIES_MAX)
    if type(plain) is not list or len(plain) != 10 or plain[0] != FORMAT:
        raise ProtocolViolation(f"no record of a witness of format {FORMAT}")
    _, run_id, disk, writes, term, voted_for, leader, base, commit_index, entries = plain
    numbers = [writes, term, commit_index, *(base[:2] if type(base) is list and len(base) == 3 else [None])]
    texts = [(run_id, RUN_ID_BYTES), (voted_for, _NAMES_BYTES_MAX), (leader, _NAMES_BYTES_MAX)]
    is_sound = (
        all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        and all(type(text) is str and len(text) <= most for text, most in texts)
        and type(disk) is bytes
        and len(disk) == DISK_BYTES
        and type(base[2]) is bytes
        and len(base[2]) == len(ZERO_HASH)
        and type(entries) is list
        and all(type(entry) is bytes for entry in entries)
    )
    if not is_sound:
        raise ProtocolViolation("a record of a witness with a field that can't be")
    tail = decode_chain(entries, previous_index=base[0], previous_hash=base[2])
    log_base = LedgerBase(base[0], base[1], base[2], b"")
    entry_bytes = {entry.hash: data for entry, data in zip(tail, entries, strict=True)}
    return WitnessRecord(run_id, disk, writes, term, voted_for, leader, log_base, tail, commit_index, entry_bytes)


class WitnessWatch:
    """The time since when a region has seen the record unchanged."""

    def __init__(self) -> None:
        self._disk, self._writes, self._since_ns = b"", -1, 0

    def is_stale(self, record: WitnessRecord) -> bool:
        """Whether a later version of this record was seen: what a stale one lacks, the witness may have."""
        return record.disk == self._disk and record.writes < self._writes

    def see(self, record: WitnessRecord, *, now_ns: int) -> int:
        """Take the record as it was read. Returns for how long it is known to be unchanged, in ns."""
        if record.disk != self._disk or record.writes != self._writes:
            self._disk, self._writes, self._since_ns = record.disk, record.writes, now_ns
        return now_ns - self._since_ns


@dataclass(frozen=True, slots=True)
class WitnessTurn:
    """One message to the witness: what is to be written, and what follows once it is.

    Attributes:
        record: to write in place of what was read; None: nothing changes.
        messages: for the own core, from the witness. lacking: see `WitnessAnswer`.
        dropped: payloads that no record needs any more, by the hashes of their entries.
    """

    record: WitnessRecord | None = None
    messages: tuple[Message, ...] = ()
    lacking: tuple[Entry, ...] = ()
    dropped: frozenset[bytes] = frozenset()


def take_turn(
    current: WitnessRecord | None,
    message: Message,
    *,
    watch: WitnessWatch,
    now_ns: int,
    region: str,
    run_id: str,
    new_disk: bytes,
    uploads: frozenset[bytes],
    tail_max: int,
) -> WitnessTurn:
    """Answer a message of a region's core to the witness.

    Args:
        current: as read; None: there is no object. Only a leader makes one.
        watch: of this region. now_ns: monotonic time.
        region: whose core. new_disk: the id of an object that is made now, at random.
        uploads: payloads that this region has put into the bucket, by the hashes of their entries.
        tail_max: see `answer`.

    Raises:
        ProtocolViolation: the object is of another run.
    """
    if current is None:
        if not isinstance(message, AppendEntries | BaseSent):
            return WitnessTurn()
        current = WitnessRecord(run_id, new_disk)
    elif current.run_id != run_id:
        raise ProtocolViolation(f"the witness is of run {current.run_id}, and this one is {run_id}")
    payloads = current.payloads | uploads
    if watch.is_stale(current):
        return WitnessTurn()
    quiet_ns = watch.see(current, now_ns=now_ns)
    if isinstance(message, RequestVote) and current.holder not in ("", region) and quiet_ns < QUIET_NS:
        result = WitnessAnswer(current, RequestVoteReply(current.term, message.pre_vote, False, current.disk))
    else:
        result = answer(current, region, message, lambda entry: entry.hash in payloads, tail_max=tail_max)
    is_same = replace(result.record, commit_index=current.commit_index) == current
    is_led = isinstance(result.reply, AppendEntriesReply) and result.reply.accepted
    is_same = is_same and current.writes > 0 and not (is_led and quiet_ns >= BEAT_NS)
    record = None if is_same else replace(result.record, writes=current.writes + 1)
    messages: list[Message] = [] if result.reply is None else [result.reply]
    if isinstance(result.reply, RequestVoteReply) and not result.reply.granted:
        messages += recorded(current)
    # What was put there in advance stays: the other region may have done so, too, and count on it.
    return WitnessTurn(record, tuple(messages), result.lacking, current.payloads - result.record.payloads)
