"""The run's witness, as this region's core speaks with it: requests to a bucket instead of a link.

Each message of the core becomes one turn (`core.ledger.witness`): read the record, answer, and write it if nobody else
did meanwhile. Whatever fails has no answer, as a message that was lost; the core asks again. Payloads go to the bucket
beside the turns, so that heartbeats are answered while a large one is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from diloco_node.core import events as ev
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
from diloco_node.core.messages import (
    AppendEntries,
    BaseSent,
    BulkHeader,
    Message,
    Payload,
    PayloadRequested,
    Refused,
    RequestVote,
    StateRequested,
)
from diloco_node.core.types import DISK_ID_BYTES, Entry, RoundBody, RunSettings
from diloco_node.daemon.effects.fetch import Fetcher
from diloco_node.daemon.effects.sending import Transport
from diloco_node.daemon.work import Spawn, in_thread
from diloco_node.errors import DilocoError, PeerError, StoreRefused
from diloco_node.numeric import U8
from diloco_node.storage.object_store import BucketObjects, bucket_scheme
from diloco_node.storage.store import RegionStore
from diloco_node.storage.swapped_object import FOLDER, RECORD, SwappedObject

THREADS: Final = 3
QUEUE_MAX: Final = 16
"""Messages of the core that wait for their turn; the oldest are dropped beyond it, as a network might."""

UPLOADS_MAX: Final = 2
STORED_MAX: Final = 4096
"""Payloads of which is remembered that they are in the bucket."""

LOOK_S: Final = 300.0
"""Between two looks at the bucket: a region that could not go on alone is to know before it has to."""


@dataclass(frozen=True, slots=True)
class _OpenBucket:
    """A witness that the log names: the record, and the payloads, which may take long."""

    name: str
    record: SwappedObject
    payloads: BucketObjects


class WitnessLink:
    """Requests to the bucket of the witness, one turn for each message of the core. All methods run on the event loop.

    Args:
        region: this one. run_id, settings: of the run.
        store: has the payloads.
        post: takes events for the core. note: takes news for the operator. now_ns: monotonic.

    Attributes:
        name, url: of the witness; empty: the log names none.
        fault: why the last request failed; empty: it did not.
        fetcher: takes payloads that were asked for; set before the first request.
    """

    fetcher: Fetcher

    def __init__(
        self,
        *,
        region: str,
        run_id: str,
        settings: RunSettings,
        store: RegionStore,
        spawn: Spawn,
        post: Callable[[ev.Event], None],
        note: Callable[[ev.Note], None],
        now_ns: Callable[[], int],
    ) -> None:
        self.name = self.url = self.fault = ""
        self._region, self._run_id, self._settings = region, run_id, settings
        self._store, self._spawn, self._post, self._note = store, spawn, post, note
        self._now_ns = now_ns
        self._place: _OpenBucket | None = None
        self._threads = ThreadPoolExecutor(THREADS, "witness")
        self._queue: deque[Message] = deque(maxlen=QUEUE_MAX)
        self._is_busy = self._is_watching = False
        # The id of the object that was read last; by the hashes of their entries, payloads that are in its bucket and
        # those on their way there.
        self._disk = b""
        self._seen = WitnessWatch()
        self._stored: dict[bytes, None] = {}
        self._uploads: set[bytes] = set()

    @property
    def there(self) -> frozenset[str]:
        """The witness's name, if there is one and it answers."""
        return frozenset({self.name} if self.name and not self.fault else ())

    def follow(self, roster: Roster) -> None:
        """Speak with the witness of this roster from now on."""
        url = roster.memberships[roster.witness].address if roster.witness else ""
        if (roster.witness, url) == (self.name, self.url):
            return
        self.name, self.url, self.fault, self._place = roster.witness, url, "", None
        self._queue.clear()
        self._stored.clear()
        if url and not self._is_watching:
            self._is_watching = True
            self._spawn(self._watch(), "witness watch")

    def close(self) -> None:
        """Ask nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def send(self, message: Message) -> None:
        """Take a message of the core, or a request for bytes."""
        match message:
            case PayloadRequested():
                self._spawn(self._fetch(message), "witness fetch")
            case StateRequested():
                self.fetcher.on_refusal(self.name, Refused(message.fragment, message.version, "busy"))
            case AppendEntries(entries=()) if self._is_busy:
                pass  # what is on its way answers for this heartbeat, too
            case RequestVote() | AppendEntries() | BaseSent():
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

    async def _take_turn(self, message: Message) -> None:
        name, stored = self.name, frozenset(self._stored)
        try:
            turn, record = await in_thread(self._threads, self._swap, message, stored)
        except (DilocoError, RuntimeError) as error:  # the latter after `close`
            self._tell(name, str(error))
            return
        if name != self.name:
            return
        self._tell(name, "")
        if record is not None and record.disk != self._disk:
            self._disk = record.disk
            self._stored.clear()
        for entry in turn.lacking:
            self._upload_soon(entry)
        for answer in turn.messages:
            try:
                self._post(ev.MessageArrived(name, answer))
            except PeerError as error:
                self._note(ev.Note("witness", f"{name}: {error}", is_alarm=True))
        if turn.dropped:
            self._spawn(self._remove(turn.dropped), "witness cleaning")

    def _swap(self, message: Message, stored: frozenset[bytes]) -> tuple[WitnessTurn, WitnessRecord | None]:
        """Take one turn, in a thread. The turn is empty if somebody else wrote the record first."""
        place = self._opened()
        answer = place.record.read_tagged(RECORD, RECORD_BYTES_MAX)
        data, tag = answer if answer is not None else (b"", None)
        current = decode_record(data) if answer is not None else None
        turn = take_turn(
            current,
            message,
            watch=self._seen,
            now_ns=self._now_ns(),
            region=self._region,
            run_id=self._run_id,
            new_disk=secrets.token_bytes(DISK_ID_BYTES),
            uploads=stored if current is not None and current.disk == self._disk else frozenset(),
            tail_max=tail_limit(self._settings),
        )
        if current is not None and self._seen.is_stale(current):
            raise StoreRefused(
                f"{self.url} holds an older record than was read here before, which may have forgotten a vote: `"
                f"members remove {self.name}`, then `members witness` with an empty place"
            )
        if turn.record is not None:
            if not place.record.swap(RECORD, encode_record(turn.record), tag):
                return WitnessTurn(), current
            self._seen.see(turn.record, now_ns=self._now_ns())
        return turn, turn.record or current

    def _opened(self) -> _OpenBucket:
        """The bucket, in a thread: opened and tried once. Raises ConfigError or StoreRefused."""
        place, name, url = self._place, self.name, self.url
        if place is None or place.name != name or place.record.place != url.rstrip("/"):
            scheme = bucket_scheme(url)
            place = _OpenBucket(name, SwappedObject(url, scheme), BucketObjects(url, scheme))
            place.record.check(FOLDER)
            self._place = place
        return place

    def _upload_soon(self, entry: Entry) -> None:
        if entry.hash not in self._uploads and len(self._uploads) < UPLOADS_MAX:
            self._uploads.add(entry.hash)
            self._spawn(self._upload(entry), "witness payload")

    async def _upload(self, entry: Entry) -> None:
        name, body = self.name, entry.body
        assert isinstance(body, RoundBody)

        def write() -> None:
            content = self._store.read_payload(body.fragment, body.version, body.payload_digest)
            self._opened().payloads.write(_key(entry.hash), [content.data])

        try:
            await in_thread(self._threads, write)
        except (DilocoError, RuntimeError) as error:
            self._tell(name, str(error))
        else:
            if name == self.name:
                self._stored[entry.hash] = None
                while len(self._stored) > STORED_MAX:
                    del self._stored[next(iter(self._stored))]
        finally:
            self._uploads.discard(entry.hash)

    async def _remove(self, hashes: frozenset[bytes]) -> None:
        """Remove payloads that nobody needs. One that can't be removed stays, and costs only its room.

        None of them is put there meanwhile.
        """
        for entry_hash in hashes:
            self._stored.pop(entry_hash, None)
        self._uploads |= hashes

        def remove() -> None:
            place = self._opened()
            for entry_hash in sorted(hashes):
                with contextlib.suppress(DilocoError):
                    place.payloads.remove(_key(entry_hash))

        try:
            with contextlib.suppress(DilocoError, RuntimeError):
                await in_thread(self._threads, remove)
        finally:
            self._uploads -= hashes

    async def _fetch(self, request: PayloadRequested) -> None:
        name, header = self.name, Payload(request.fragment, request.version, request.digest)
        size_bytes = self.fetcher.parameters.blocks[request.fragment].encoded_bytes

        def read() -> U8 | None:
            place = self._opened()
            answer = place.record.read_tagged(RECORD, RECORD_BYTES_MAX)
            entry_hash = decode_record(answer[0]).entry_of(*_name(request)) if answer is not None else b""
            return place.payloads.read(_key(entry_hash), size_bytes) if entry_hash else None

        self.fetcher.expects(name, header, size_bytes)  # no watchdog: the request has its own time limits
        body = None
        with contextlib.suppress(DilocoError, RuntimeError):
            body = await in_thread(self._threads, read)
        if body is None:
            self.fetcher.on_refusal(name, Refused(request.fragment, request.version, "busy"))
        else:
            await self.fetcher.take_transfer(name, header, body, is_whole=True)

    async def _watch(self) -> None:
        """Look at the bucket now and then."""
        while True:
            name = self.name
            if name:
                try:
                    await in_thread(self._threads, lambda: self._opened().record.read_tagged(RECORD, RECORD_BYTES_MAX))
                except (DilocoError, RuntimeError) as error:
                    self._tell(name, str(error))
                else:
                    self._tell(name, "")
            await asyncio.sleep(LOOK_S)

    def _tell(self, name: str, fault: str) -> None:
        """Say once that the witness answers no more, or answers again."""
        if name != self.name or bool(fault) == bool(self.fault):
            return
        self.fault = fault
        news = f"{name} does not answer: {fault}" if fault else f"{name} answers again"
        self._note(ev.Note("witness", news, is_alarm=bool(fault)))


class WitnessRoute:
    """The links of a region, of which one is no link: messages to the witness go to its bucket. See `Transport`."""

    def __init__(self, transport: Transport, witness: WitnessLink) -> None:
        self._transport, self._witness = transport, witness

    def send(self, peer: str, message: Message) -> bool:
        """See Transport."""
        if peer != self._witness.name:
            return self._transport.send(peer, message)
        self._witness.send(message)
        return True

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """See Transport."""
        await self._transport.transfer(peer, header, body)

    def reject(self, peer: str, error: PeerError) -> None:
        """See Transport."""
        self._transport.reject(peer, error)


def _key(entry_hash: bytes) -> str:
    return f"{FOLDER}/{entry_hash.hex()}"


def _name(request: PayloadRequested) -> tuple[int, int, bytes]:
    return request.fragment, request.version, request.digest
