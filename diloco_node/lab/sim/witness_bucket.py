"""The witness of a simulated run: a bucket with the faults of buckets, and each region's way to it.

The bucket checks what no witness may do: vote twice in a term, forget a vote, or drop what is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_node.core import events as ev
from diloco_node.core.ledger.witness import (
    WitnessRecord,
    WitnessWatch,
    decode_record,
    encode_record,
    tail_limit,
    take_turn,
)
from diloco_node.core.messages import AppendEntries, Message, Payload
from diloco_node.core.types import DISK_ID_BYTES, Entry, RoundBody
from diloco_node.lab.sim.world import MS, SECOND, World

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host

WITNESS = "witness"
GIVE_UP_NS = 2 * SECOND
"""A request to a bucket that is away ends after so long."""

QUEUE_MAX = 16
STALE_VERSIONS = 4


class FakeBucket:
    """Objects that are written by compare-and-swap.

    Attributes:
        payloads: by the hash of the entry of their round.
        is_away: no request comes through. slower: how many times as long each takes.
        stale_chance: of a read, to give an older version. lost_chance: of an answer, and half as often of a write.
        tag: of the record, and so the number of writes.

    Args:
        violate: takes a broken rule.
    """

    def __init__(self, world: World, violate: Callable[[str], None]) -> None:
        self.payloads: dict[bytes, bytes] = {}
        self.is_away = False
        self.slower = 1
        self.stale_chance = self.lost_chance = 0.0
        self._world, self._violate = world, violate
        # As they were written, by their tags; each was read from its bytes once.
        self._versions: deque[tuple[WitnessRecord, int]] = deque(maxlen=STALE_VERSIONS)
        self.tag = 0

    @property
    def record(self) -> WitnessRecord | None:
        """The record as it is now."""
        return self._versions[-1][0] if self._versions else None

    @property
    def latency_ns(self) -> int:
        """Draw the time of a request."""
        return self.slower * self._world.draw_ns(10 * MS, 80 * MS)

    def read(self) -> tuple[WitnessRecord | None, int]:
        """The record and its tag; None: there is none."""
        if not self._versions:
            return None, 0
        is_stale = self._world.rng.random() < self.stale_chance
        return self._world.rng.choice(self._versions) if is_stale else self._versions[-1]

    def swap(self, data: bytes, tag: int) -> bool:
        """Write the record if it is the one of this tag still (0: if there is none)."""
        if tag != (self.tag if self._versions else 0):
            return False
        before, after = self.record, decode_record(data)
        if before is not None:
            self._check(before, after)
        self.tag += 1
        self._versions.append((after, self.tag))
        return True

    def _check(self, before: WitnessRecord, after: WitnessRecord) -> None:
        is_other_vote = after.term == before.term and before.voted_for not in ("", after.voted_for)
        if after.term < before.term or is_other_vote or after.disk != before.disk:
            self._violate(f"witness: a vote is gone: {before.term} {before.voted_for} {after.term} {after.voted_for}")
        if after.commit_index < before.commit_index or after.base.index < before.base.index:
            self._violate(f"witness: went back from {before.commit_index} to {after.commit_index}")
        for entry in before.entries:
            if after.base.index < entry.index <= before.commit_index and after.hash_at(entry.index) != entry.hash:
                self._violate(f"witness: committed entry {entry.index} is gone")

    def empty(self) -> None:
        """All objects are gone."""
        self._versions.clear()
        self.payloads.clear()

    def keeps(self, entry: Entry) -> bool:
        """Whether it has an entry and what that names, or began its tail later."""
        record = self.record
        if record is None or entry.index <= record.base.index:
            return record is not None
        is_whole = not isinstance(entry.body, RoundBody) or entry.hash in self.payloads
        return record.hash_at(entry.index) == entry.hash and is_whole


class FakeWitness:
    """A region's way to the bucket, for one life of its daemon."""

    def __init__(self, host: Host, bucket: FakeBucket) -> None:
        self._host, self._bucket = host, bucket
        self._queue: deque[Message] = deque(maxlen=QUEUE_MAX)
        self._is_busy = False
        self._watch = WitnessWatch()
        self._disk = b""
        # By the hashes of their entries: payloads that are in the bucket, and on the way there.
        self._payloads: set[bytes] = set()
        self._uploads: set[bytes] = set()

    def send(self, message: Message) -> None:
        """Take a message of the core; a heartbeat only while nothing else waits."""
        if isinstance(message, AppendEntries) and not message.entries and (self._queue or self._is_busy):
            return
        self._queue.append(message)
        self._next()

    def fetch(self, order: ev.FetchPayload) -> None:
        """Bring a payload."""
        key = (order.fragment, order.version, order.digest)

        def answer() -> None:
            record = None if self._bucket.is_away else self._bucket.record
            body = None if record is None else self._bucket.payloads.get(record.entry_of(*key))
            if body is None:
                self._host.post(ev.FetchFailed(WITNESS, order.fragment, order.version, "not in the bucket"))
            else:
                self._host.fetches.arrived(WITNESS, Payload(*key), body)

        self._host.after(self._bucket.latency_ns, answer)

    def _next(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        self._host.after(self._bucket.latency_ns, self._read, self._queue.popleft())

    def _end(self) -> None:
        self._is_busy = False
        self._next()

    def _read(self, message: Message) -> None:
        bucket, setup = self._bucket, self._host.setup
        if bucket.is_away:
            self._host.after(GIVE_UP_NS, self._end)
            return
        record, tag = bucket.read()
        turn = take_turn(
            record,
            message,
            watch=self._watch,
            now_ns=self._host.world.now_ns,
            region=self._host.name,
            run_id="simulated",
            new_disk=self._host.world.rng.randbytes(DISK_ID_BYTES),
            uploads=self._known(record),
            tail_max=tail_limit(setup.settings),
        )
        for entry in turn.lacking:
            self._store(entry)

        def deliver() -> None:
            for event in turn.messages:
                self._host.post(ev.MessageArrived(WITNESS, event))
            self._end()

        def write() -> None:
            # It comes about whether this daemon still lives or not.
            rng = bucket._world.rng
            is_lost = rng.random() < bucket.lost_chance / 2
            if turn.record is None or is_lost or not bucket.swap(encode_record(turn.record), tag):
                self._host.after(0, self._end)
                return
            for key in turn.dropped:
                bucket.payloads.pop(key, None)
            self._payloads -= turn.dropped
            self._host.after(0, self._end if rng.random() < bucket.lost_chance else deliver)

        if turn.record is None:
            deliver()
        else:
            bucket._world.after(bucket.latency_ns, None, write)

    def _known(self, record: WitnessRecord | None) -> frozenset[bytes]:
        if record is not None and record.disk != self._disk:
            self._disk = record.disk
            self._payloads.clear()
        return frozenset(self._payloads)

    def _store(self, entry: Entry) -> None:
        body = entry.body
        assert isinstance(body, RoundBody)
        payload = self._host.disk.payloads.get((body.fragment, body.version, body.payload_digest))
        if payload is None or entry.hash in self._uploads:
            return
        self._uploads.add(entry.hash)

        def finish() -> None:
            self._uploads.discard(entry.hash)
            if not self._bucket.is_away:
                self._bucket.payloads[entry.hash] = payload.data
                self._payloads.add(entry.hash)

        self._host.after(2 * self._bucket.latency_ns, finish)
