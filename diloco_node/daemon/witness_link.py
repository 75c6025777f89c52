"""The run's witness, as this region's core speaks with it: requests to a bucket instead of a link.

Each message of the core becomes one turn (`core.ledger.witness`): read the record, answer, and write it if nobody else
did meanwhile. A request that fails has no answer: the core asks again. Payloads go beside the turns, so heartbeats are
answered meanwhile. All is within the region's budget: records count as control, payloads wait.

A payload that no record names is removed a day after it was put there (`_orphans`), and an upload counts for as long.
Both go by the bucket's clock, and a region looks for them right after it wrote the record. So a region that counts on
an upload read the record before, and can't write it any more; or it reads how late it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.witness import (
    RECORD_BYTES_MAX,
    WitnessRecord,
    WitnessTurn,
    WitnessWatch,
    decode_record,
    encode_record,
    tail_limit,
    take_turn,
)
from diloco_node.core.types import DISK_ID_BYTES, Entry, RoundBody
from diloco_node.daemon.effects.fetch import Fetcher
from diloco_node.daemon.effects.sending import Transport
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.work import T, in_thread
from diloco_node.errors import DilocoError, PeerError, ProtocolViolation, StoreRefused
from diloco_node.numeric import U8
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.object_store import BucketObjects, bucket_scheme
from diloco_node.storage.swapped_object import BEFORE, FOLDER, RECORD, SwappedObject
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.wire.message_tables import BudgetLane

THREADS: Final = 3
QUEUE_MAX: Final = 16
"""Messages of the core that wait for their turn; the oldest are dropped beyond it, as a network might."""

UPLOADS_MAX: Final = 2
STORED_MAX: Final = 4096
"""Payloads of which is remembered that they are in the bucket."""

ORPHAN_AGE: Final = timedelta(days=1)
"""The longest time from an upload, however slow it is, to the record that names it."""

SWEEP_EVERY: Final = timedelta(hours=1)
WAIT_S: Final = 1.0

LOOK_S: Final = 300.0
"""Between two looks at the bucket: a region that could not go on alone is to know before it has to."""


@dataclass(frozen=True, slots=True)
class _OpenBucket:
    """The record, and the payloads, which may take long."""

    record: SwappedObject
    payloads: BucketObjects


@dataclass(slots=True)
class _WitnessPlace:
    """A witness that the log names, and the knowledge of it. It ends with it: what is on its way then comes too late.

    Attributes:
        since: the entry that added it. bucket: once it is opened and tried.
        disk: the id of the object that was read last. read_at: when that was written, by the bucket's clock.
        seen: the records that were read. swept_at: by the same clock, when orphans were looked for.
        stored: by the hashes of their entries, payloads in the bucket, and `read_at` before each. uploads: on their
            way.
    """

    name: str = ""
    url: str = ""
    since: int = 0
    bucket: _OpenBucket | None = None
    disk: bytes = b""
    read_at: datetime | None = None
    seen: WitnessWatch = field(default_factory=WitnessWatch)
    swept_at: datetime | None = None
    stored: dict[bytes, datetime] = field(default_factory=dict)
    uploads: set[bytes] = field(default_factory=set)

    def opened(self) -> _OpenBucket:
        """The bucket, in a thread: opened and tried once. Raises ConfigError or StoreRefused."""
        if self.bucket is None:
            scheme = bucket_scheme(self.url)
            bucket = _OpenBucket(SwappedObject(self.url, scheme), BucketObjects(self.url, scheme))
            bucket.record.check(FOLDER)
            self.bucket = bucket
        return self.bucket

    def uploaded(self, read_at: datetime) -> frozenset[bytes]:
        """The uploads that count beside a record that was written then."""
        return frozenset(key for key, at in list(self.stored.items()) if read_at - at < ORPHAN_AGE)


class WitnessLink:
    """Requests to the bucket of the witness, one turn for each message of the core. All methods run on the event loop.

    Attributes:
        fault: why the last request failed; or empty. fetcher: takes payloads; set before the first request.
    """

    fetcher: Fetcher

    def __init__(self, runtime: NodeRuntime, pacer: Pacer, post: Callable[[ev.Event], None]) -> None:
        self.fault = ""
        spec = runtime.spec
        self._region, self._run_id, self._settings = spec.region, spec.run_id, spec.settings
        self._store, self._now_ns = runtime.store, runtime.now_ns
        self._spawn, self._note = runtime.spawn, runtime.notes.add
        self._pacer, self._post = pacer, post
        self._place = _WitnessPlace()
        # Of the lane in the budget one piece waits at a time, and one that was read.
        self._turn_to_send, self._turn_to_read = asyncio.Lock(), asyncio.Lock()
        # Turns have a thread of their own: payloads wait in theirs, for the budget, as long as it takes.
        self._turns, self._threads = ThreadPoolExecutor(1, "witness-turn"), ThreadPoolExecutor(THREADS, "witness")
        self._queue: deque[msg.Message] = deque(maxlen=QUEUE_MAX)
        self._is_busy = self._is_watching = False

    @property
    def name(self) -> str:
        """The witness's name; empty: the log names none."""
        return self._place.name

    @property
    def there(self) -> frozenset[str]:
        """The witness's name, if there is one and it answers."""
        return frozenset({self.name} if self.name and not self.fault else ())

    def follow(self, roster: Roster) -> None:
        """Speak with the witness of this roster from now on."""
        line = roster.memberships.get(roster.witness)
        place = _WitnessPlace(roster.witness, line.address, line.since) if line else _WitnessPlace()
        if (place.name, place.url, place.since) == (self._place.name, self._place.url, self._place.since):
            return
        self.fault, self._place = "", place
        self._queue.clear()
        if line and not self._is_watching:
            self._is_watching = True
            self._pacer.add_peer(place.name, is_linked=False)
            self._spawn(self._watch(), "witness watch")

    def close(self) -> None:
        """Ask nothing any more."""
        for threads in (self._turns, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def send(self, message: msg.Message) -> None:
        """Take a message of the core, or a request for bytes."""
        match message:
            case msg.PayloadRequested():
                self._spawn(self._fetch(message), "witness fetch")
            case msg.StateRequested():
                self.fetcher.on_refusal(self.name, msg.Refused(message.fragment, message.version, "busy"))
            case msg.AppendEntries(entries=()) if self._is_busy:
                pass  # what is on its way answers for this heartbeat, too
            case msg.RequestVote() | msg.AppendEntries() | msg.BaseSent():
                self._queue.append(message)
                if not self._is_busy:
                    self._is_busy = True
                    self._spawn(self._take_turns(), "witness")
            case _:
                pass  # it needs no other message

    async def _take_turns(self) -> None:
        try:
            while self._queue:
                await self._take_turn(self._queue.popleft())
        finally:
            self._is_busy = False

    async def _take_turn(self, message: msg.Message) -> None:
        place, loop = self._place, asyncio.get_running_loop()
        outcome = await self._ask(place, partial(self._swap, place, message, loop), self._turns)
        if outcome is None or place is not self._place:
            return
        turn, record = outcome
        if record is not None and record.disk != place.disk:
            place.disk = record.disk
            place.stored.clear()
        for entry in turn.lacking:
            if place.read_at is not None and entry.hash not in place.uploads and len(place.uploads) < UPLOADS_MAX:
                place.uploads.add(entry.hash)
                self._spawn(self._upload(place, entry, place.read_at), "witness payload")
        for answer in turn.messages:
            try:
                self._post(ev.MessageArrived(place.name, answer))
            except PeerError as error:
                self._note(ev.Note("witness", f"{place.name}: {error}", is_alarm=True))
        is_due = place.read_at and (place.swept_at is None or place.read_at - place.swept_at >= SWEEP_EVERY)
        if turn.record is not None and is_due:
            place.swept_at = place.read_at
            self._spawn(self._remove(place, turn.dropped, self._orphans(place, turn.record)), "witness sweep")
        elif turn.dropped:
            self._spawn(self._remove(place, turn.dropped), "witness cleaning")

    async def _ask(self, place: _WitnessPlace, request: Callable[[], T], threads: ThreadPoolExecutor) -> T | None:
        """The outcome of a request in a thread; None: it failed. Both are told, if that is news."""
        try:
            outcome = await in_thread(threads, request)
        except (DilocoError, RuntimeError) as error:  # the latter after `close`
            self._tell(place, str(error))
            return None
        self._tell(place, "")
        return outcome

    def _swap(
        self, place: _WitnessPlace, message: msg.Message, loop: asyncio.AbstractEventLoop
    ) -> tuple[WitnessTurn, WitnessRecord | None]:
        """Take one turn, in a thread. The turn is empty if somebody else wrote the record first."""
        bucket = place.opened()
        answer = bucket.record.read_tagged(RECORD, RECORD_BYTES_MAX)
        current, uploads = None, frozenset[bytes]()
        if answer is not None:
            loop.call_soon_threadsafe(partial(self._pacer.was_read, place.name, len(answer.data), is_bulk=False))
            current, place.read_at = _record(place, answer.data, self._run_id), answer.written
            uploads = place.uploaded(answer.written) if current.disk == place.disk else uploads
        turn = take_turn(
            current,
            message,
            watch=place.seen,
            now_ns=self._now_ns(),
            region=self._region,
            run_id=self._run_id,
            new_disk=secrets.token_bytes(DISK_ID_BYTES),
            uploads=uploads,
            tail_max=tail_limit(self._settings),
        )
        if current is not None and place.seen.is_stale(current):
            raise StoreRefused(
                f"{place.url} holds an older record than was read here before, which may have forgotten a vote. Once "
                f"both sites are there, `members remove {place.name}`, then `members witness` with an empty place"
            )
        if current is None and turn.record is None:
            raise _absence(place)
        if turn.record is not None:
            data = encode_record(turn.record)
            loop.call_soon_threadsafe(self._pacer.control_sent, place.name, len(data))
            if not bucket.record.swap(RECORD, data, answer.tag if answer is not None else None):
                return WitnessTurn(), current
            place.seen.see(turn.record, now_ns=self._now_ns())
        return turn, turn.record or current

    async def _upload(self, place: _WitnessPlace, entry: Entry, read_at: datetime) -> None:
        disk, body, loop = place.disk, entry.body, asyncio.get_running_loop()
        assert isinstance(body, RoundBody)
        size_bytes = self.fetcher.parameters.blocks[body.fragment].encoded_bytes

        def pace(count: int) -> None:
            _wait(self._may_send(place.name, count), loop)

        def write() -> bool:
            content = self._store.read_payload(body.fragment, body.version, body.payload_digest)
            place.opened().payloads.write(_key(entry.hash), [content.data], pace=pace)
            return True

        self._pacer.transfer_started(place.name, BudgetLane.ROUNDS, size_bytes)
        try:
            if await self._ask(place, write, self._threads) and disk == place.disk:
                place.stored[entry.hash] = read_at
                while len(place.stored) > STORED_MAX:
                    del place.stored[next(iter(place.stored))]
        finally:
            self._pacer.transfer_ended(place.name, size_bytes)
            place.uploads.discard(entry.hash)

    async def _may_send(self, name: str, count: int) -> None:
        """Wait for the budget. obstore sends what it got at once, so the ceiling holds over a part of an object."""
        async with self._turn_to_send:
            while count > 0:
                piece_bytes = min(count, self._pacer.piece_bytes(name))
                await self._pacer.acquire(name, BudgetLane.ROUNDS, piece_bytes, ())
                count -= piece_bytes

    async def _may_read(self, name: str, count: int) -> None:
        """Count it, and wait as long as it takes at the region's ceiling."""
        async with self._turn_to_read:
            self._pacer.was_read(name, count)
            if rate := self._pacer.status()["ingress_bytes_per_s"]:
                await asyncio.sleep(count / rate)

    def _orphans(self, place: _WitnessPlace, record: WitnessRecord) -> Callable[[], frozenset[str]]:
        """In a thread: the keys of objects that nobody will name, by what was just written."""
        read_at, keys = place.read_at, {RECORD, BEFORE, *map(_key, record.payloads)}
        assert read_at is not None

        def find() -> frozenset[str]:
            times = place.opened().record.written(FOLDER)
            return frozenset(key for key, at in times.items() if key not in keys and read_at - at > ORPHAN_AGE)

        return find

    async def _remove(
        self, place: _WitnessPlace, hashes: frozenset[bytes], find_orphans: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        """Remove what nobody needs, nor puts there. After one that can't be removed all stay: orphans soon."""
        for entry_hash in hashes:
            place.stored.pop(entry_hash, None)
        place.uploads |= hashes

        def remove() -> None:
            objects = place.opened().record
            for key in sorted(find_orphans() | set(map(_key, hashes))):
                with contextlib.suppress(DamagedFile):  # it is gone already
                    objects.remove(key)

        try:
            with contextlib.suppress(DilocoError, RuntimeError):
                await in_thread(self._threads, remove)
        finally:
            place.uploads -= hashes

    async def _fetch(self, request: msg.PayloadRequested) -> None:
        place, loop = self._place, asyncio.get_running_loop()
        name, header = place.name, msg.Payload(request.fragment, request.version, request.digest)
        size_bytes = self.fetcher.parameters.blocks[request.fragment].encoded_bytes

        def pace(count: int) -> None:
            _wait(self._may_read(name, count), loop)

        def read() -> U8 | None:
            bucket = place.opened()
            answer = bucket.record.read_tagged(RECORD, RECORD_BYTES_MAX)
            if answer is None:
                return None
            pace(len(answer.data))
            entry_hash = decode_record(answer.data).entry_of(request.fragment, request.version, request.digest)
            return bucket.payloads.read(_key(entry_hash), size_bytes, pace=pace) if entry_hash else None

        self.fetcher.expects(name, header, size_bytes)  # it is on its way from here on
        body = None
        with contextlib.suppress(DilocoError, RuntimeError):
            body = await in_thread(self._threads, read)
        if body is None:
            self.fetcher.on_refusal(name, msg.Refused(request.fragment, request.version, "busy"))
        else:
            await self.fetcher.take_transfer(name, header, body, is_whole=True)

    async def _watch(self) -> None:
        """Look at the bucket now and then."""
        while True:
            if self.name:
                await self._ask(self._place, partial(_look, self._place, self._run_id), self._turns)
            await asyncio.sleep(LOOK_S)

    def _tell(self, place: _WitnessPlace, fault: str) -> None:
        """Say once that the witness answers no more, or answers again. `fault` is the newest: each has its remedy."""
        if place is not self._place:
            return
        is_news, self.fault = bool(fault) != bool(self.fault), fault
        if is_news:
            news = f"{place.name} does not answer: {fault}" if fault else f"{place.name} answers again"
            self._note(ev.Note("witness", news, is_alarm=bool(fault)))


class WitnessRoute:
    """The links of a region, of which one is no link: messages to the witness go to its bucket. See `Transport`."""

    def __init__(self, transport: Transport, witness: WitnessLink) -> None:
        self._transport, self._witness = transport, witness

    def send(self, peer: str, message: msg.Message) -> bool:
        """See Transport."""
        if peer != self._witness.name:
            return self._transport.send(peer, message)
        self._witness.send(message)
        return True

    async def transfer(self, peer: str, header: msg.BulkHeader, body: memoryview) -> None:
        """See Transport."""
        await self._transport.transfer(peer, header, body)

    def reject(self, peer: str, error: PeerError) -> None:
        """See Transport."""
        self._transport.reject(peer, error)


def _wait(permission: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Wait in a thread, but not for a loop that has ended. Raises StoreRefused."""
    future = asyncio.run_coroutine_threadsafe(permission, loop)
    while True:
        try:
            return future.result(WAIT_S)
        except (TimeoutError, CancelledError):
            if future.cancelled() or loop.is_closed():
                raise StoreRefused("the daemon ends") from None


def _look(place: _WitnessPlace, run_id: str) -> None:
    answer = place.opened().record.read_tagged(RECORD, RECORD_BYTES_MAX)
    if answer is not None:
        _record(place, answer.data, run_id)
    elif place.disk:
        raise _absence(place)


def _record(place: _WitnessPlace, data: bytes, run_id: str) -> WitnessRecord:
    """The record in the bucket. Raises StoreRefused: it is none, or of another run."""
    try:
        record, fault = decode_record(data), ""
    except ProtocolViolation as error:
        record, fault = None, f"holds no record that this version can read ({error})"
    if record is not None and record.run_id == run_id:
        return record
    fault = fault or f"holds the record of run {record.run_id if record else ''}, and this is run {run_id}"
    raise StoreRefused(
        f"{place.url}/{RECORD} {fault}: something else writes there. Once both sites are there, `members remove "
        f"{place.name}`, then `members witness` with an empty place. Where one is gone for good, `members recover`"
    )


def _absence(place: _WitnessPlace) -> StoreRefused:
    return StoreRefused(
        f"{place.url} has lost the record of {place.name}, which gives no vote until a leader has made it anew and "
        "both regions have it in their log: see that nothing empties the bucket"
    )


def _key(entry_hash: bytes) -> str:
    return f"{FOLDER}/{entry_hash.hex()}"
