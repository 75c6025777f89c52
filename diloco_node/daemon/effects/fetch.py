"""Payloads and states that are missing: requested from peers, checked, stored; and served to peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.core.events import Event, FetchFailed, FetchPayload, FetchState, PayloadStored, StateStored
from diloco_node.core.messages import Payload, PayloadRequested, Refused, State, StateRequested
from diloco_node.core.recovery.fetches import LATE
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.effects.open_stripes import cut_payload
from diloco_node.daemon.effects.sending import EffectContext, Transport
from diloco_node.daemon.work import in_thread
from diloco_node.errors import LinkLost, PayloadCorrupt, StorageError
from diloco_node.numeric import U8
from diloco_node.storage.durable import DamagedFile

FETCH_SILENCE_S: Final = 30.0
"""A donor that sends nothing of what we requested for this long has forgotten us: the core asks another."""

TRANSFER_S_MIN: Final = 300.0
SLOW_BYTES_PER_S: Final = 500_000
"""A transfer has so many seconds, or its size at so many bytes/s if that is longer, times how many come in at once.
Then the core asks another, too."""

PATIENCE_MAX: Final = 8.0
"""Where transfers take longer than they have, the next get up to this many times as long: else all is sent again."""

SERVES_MAX: Final = 8
"""Transfers served to peers at once; further ones are refused as busy and requested again."""

SERVES_OF_A_PEER_MAX: Final = 4
"""Limit on what a peer fetches at once: however much it asks for, the others get their part."""


@dataclass(slots=True)
class _Pending:
    """A request that its donor has not answered yet. It stands when the core has lost patience: bytes may still come.

    Attributes:
        is_owed: the core waits for an answer. is_open: the bytes are coming in, since `begun_s` of the loop's clock.
        overtaken: how often the donor has begun to send something else. watchdog: tells the core that it takes too
            long.
    """

    order: FetchPayload | FetchState
    is_owed: bool = True
    is_open: bool = False
    overtaken: int = 0
    begun_s: float = 0.0
    watchdog: asyncio.TimerHandle = field(init=False)


@dataclass(slots=True, kw_only=True)
class Fetcher(EffectContext):
    """Both sides of a fetch. Every order of the core is answered exactly once."""

    transport: Transport
    initial: InitialStates
    writes: DiskWrites
    _serving: set[tuple[str, PayloadRequested | StateRequested]] = field(default_factory=set, init=False)
    # By peer, fragment, version, and whether it is a payload. The oldest first.
    pending: dict[tuple[str, int, int, bool], _Pending] = field(default_factory=dict, init=False)
    # Times of what a transfer has on a line that is as fast as is assumed.
    _patience: float = field(default=1.0, init=False)

    @property
    def serves(self) -> int:
        """How many transfers to peers are being prepared or on their way."""
        return len(self._serving)

    def ask(self, order: FetchPayload | FetchState) -> None:
        """Send the request and start the watchdog."""
        key = (order.peer, order.fragment, order.version, isinstance(order, FetchPayload))
        earlier = self.pending.get(key)
        if earlier is not None and earlier.is_open and earlier.order == order and not earlier.is_owed:
            # It took too long, and is on its way still: another request would have all of it sent again.
            earlier.is_owed = True
            self._watch(earlier, self._transfer_s(order))
            return
        self._end(key, "requested again")
        of_peer = [(name, item) for name, item in self.pending.items() if name[0] == order.peer]
        late = [name for name, item in of_peer if not (item.is_owed or item.is_open)]
        for name in late[: 1 - SERVES_OF_A_PEER_MAX]:  # a donor that has these still would refuse this request
            self._end(name, "requested too long ago")
        ends = [item.watchdog.when() for _, item in of_peer if item.is_open]
        busy_s = max((end_s - asyncio.get_running_loop().time() for end_s in ends), default=0.0)
        self.pending[key] = pending = _Pending(order)
        pending.watchdog = self._timer(pending, max(0.0, busy_s) + FETCH_SILENCE_S)
        kind = PayloadRequested if isinstance(order, FetchPayload) else StateRequested
        if not self.transport.send(order.peer, kind(order.fragment, order.version, order.digest)):
            # The link went down after the core chose this peer: nothing will come, and nothing else would say so.
            self._end(key, "no link")

    def on_refusal(self, peer: str, message: Refused) -> None:
        """The peer can't help."""
        for is_payload in (True, False):
            self._end((peer, message.fragment, message.version, is_payload), message.reason)

    def peer_lost(self, peer: str) -> None:
        """The link is down: nothing more will come from there."""
        for key in sorted(key for key in self.pending if key[0] == peer):
            self._end(key, "link lost")

    def expects(self, peer: str, header: Payload | State, raw_bytes: int) -> bool:
        """Whether a transfer that a peer begins is one that was requested, with the size it must have."""
        pending = self.pending.get((peer, header.fragment, header.version, isinstance(header, Payload)))
        if pending is None or not self._is_requested(pending.order, header, raw_bytes):
            return False
        pending.is_open, pending.begun_s = True, asyncio.get_running_loop().time()
        transfer_s = self._transfer_s(pending.order)
        self._watch(pending, transfer_s)
        for request in self._waiting(peer):
            # A donor sends one after the other. So it has not forgotten these, but a liar must not say so for ever.
            if request.overtaken < SERVES_OF_A_PEER_MAX:
                request.overtaken += 1
                self._watch(request, transfer_s + FETCH_SILENCE_S)
        return True

    def _waiting(self, peer: str) -> list[_Pending]:
        """Return what the core waits for and the peer has not begun to send."""
        return [item for key, item in self.pending.items() if key[0] == peer and item.is_owed and not item.is_open]

    def _transfer_s(self, order: FetchPayload | FetchState) -> float:
        """Return how long this may take, beside the others that come in now: all share one line."""
        usual_s = max(TRANSFER_S_MIN, self._raw_bytes(order) / SLOW_BYTES_PER_S)
        return self._patience * usual_s * sum(item.is_open for item in self.pending.values())

    def _learn(self, pending: _Pending) -> None:
        """Give the next transfers twice the time that this one has taken up to now."""
        took_s = asyncio.get_running_loop().time() - pending.begun_s
        times = 2 * took_s * self._patience / self._transfer_s(pending.order)
        self._patience = min(PATIENCE_MAX, max(1.0, times))

    def _watch(self, pending: _Pending, delay_s: float) -> None:
        pending.watchdog.cancel()
        pending.watchdog = self._timer(pending, delay_s)

    def _timer(self, pending: _Pending, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._on_delay, pending)

    def _on_delay(self, pending: _Pending) -> None:
        """Let the core ask another. Whoever comes first with all of it has answered."""
        order = pending.order
        left_s = pending.begun_s + self._transfer_s(order) - asyncio.get_running_loop().time()
        if pending.is_open and left_s > 0:  # others that began later share the line with it
            self._watch(pending, left_s)
            return
        reason = LATE if pending.is_open else "no answer in time"
        if pending.is_owed:
            pending.is_owed = False
            if pending.is_open:
                self._learn(pending)
            self.post(FetchFailed(order.peer, order.fragment, order.version, reason))

    def _is_requested(self, order: FetchPayload | FetchState, header: Payload | State, raw_bytes: int) -> bool:
        return (header.version, header.digest, raw_bytes) == (order.version, order.digest, self._raw_bytes(order))

    def _raw_bytes(self, order: FetchPayload | FetchState) -> int:
        if isinstance(order, FetchPayload):
            return self.parameters.blocks[order.fragment].encoded_bytes
        return 8 * self.parameters.manifest.fragments[order.fragment].size

    def drop_fetch(self, fragment: int, version: int) -> None:
        """The payload came by itself, as merged stripes: that is the answer, and what the peer sends is not needed."""
        for key, pending in self.pending.items():
            if key[1:] == (fragment, version, True):
                pending.is_owed = False

    async def take_transfer(self, peer: str, header: Payload | State, body: U8, *, is_whole: bool) -> None:
        """Check and store what came; tell the core."""
        key = (peer, header.fragment, header.version, isinstance(header, Payload))
        pending = self.pending.get(key)
        if pending is None or not pending.is_open or not self._is_requested(pending.order, header, body.nbytes):
            return
        for request in self._waiting(peer):
            if request.watchdog.when() > asyncio.get_running_loop().time() + FETCH_SILENCE_S:
                self._watch(request, FETCH_SILENCE_S)
        if not is_whole:
            self._end(key, "the transfer broke off")
            return
        self._learn(pending)
        # From here on the answer is this one, whatever becomes of the link: what is being written will be on the disk.
        del self.pending[key]
        pending.watchdog.cancel()
        # Late, it answers for the donor that was asked next.
        claims = [item for item in (pending, *self.pending.values()) if replace(item.order, peer=peer) == pending.order]
        claim = next((item for item in claims if item.is_owed), None)
        order = pending.order
        if claim is not None:
            claim.is_owed, order = False, claim.order
        elif not self._is_newer_lacking(order):
            return
        if isinstance(order, FetchPayload):
            event = await self._store_payload(order, body)
        else:
            event = await self._store_state(order, body)
        if isinstance(event, FetchFailed):
            if claim is None:  # the core has its answer, and would take this for that of the newer one
                return
            if claim is not pending:
                event = replace(event, reason=f"{peer}, asked before, has sent it: {event.reason}")
        self.post(event)

    async def _store_payload(self, order: FetchPayload, body: U8) -> Event:
        blocks = self.parameters.blocks[order.fragment]
        stripes = cut_payload(body, blocks, order.stripes)
        digest = await in_thread(self.pool, lambda: payload_digest([stripe_digest(stripe) for stripe in stripes]))
        if digest != order.digest:
            return FetchFailed(order.peer, order.fragment, order.version, "the payload does not match its digest")
        try:
            norms = await in_thread(self.pool, squared_norms, blocks, body)
        except PayloadCorrupt as error:
            return FetchFailed(order.peer, order.fragment, order.version, str(error))
        await self._until_written(
            order, lambda: self.store.store_payload(order.fragment, order.version, order.digest, stripes)
        )
        return PayloadStored(order.fragment, order.version, order.digest, tuple(norms.tolist()))

    async def _store_state(self, order: FetchPayload | FetchState, body: U8) -> Event:
        theta, momentum = np.split(body.view(np.float32), 2)
        digest = await in_thread(self.pool, fragment_digest, theta, momentum)
        if digest != order.digest:
            return FetchFailed(order.peer, order.fragment, order.version, "the state is not what the ledger names")
        state = (theta, momentum, digest)
        if order.version == 0:
            await self._until_written(order, lambda: self.initial.store_fetched(order.fragment, *state))
        else:
            await self._until_written(order, lambda: self.store.store_state(order.fragment, order.version, *state))
        return StateStored(order.fragment, order.version, digest)

    async def _until_written(self, order: FetchPayload | FetchState, write: Callable[[], object]) -> None:
        """Hold what came until the own disk takes it: each further try of a peer's would cost the link its bytes."""
        kind = "payload" if isinstance(order, FetchPayload) else "state"
        await self.writes.until_written(
            f"the {kind} {order.fragment}.{order.version} of {order.peer}", self.files, write
        )

    def _is_newer_lacking(self, order: FetchPayload | FetchState) -> bool:
        """Whether the core waits for a later state of this fragment: on a slow line an earlier one is a start."""
        return isinstance(order, FetchState) and any(
            item.is_owed and fragment == order.fragment and not is_payload and 0 < order.version < version
            for (_, fragment, version, is_payload), item in self.pending.items()
        )

    def _end(self, key: tuple[str, int, int, bool], reason: str) -> None:
        """Nothing will come of this request."""
        pending = self.pending.pop(key, None)
        if pending is not None:
            pending.watchdog.cancel()
            if pending.is_owed:
                self.post(FetchFailed(key[0], key[1], pending.order.version, reason))

    def serve(self, peer: str, message: PayloadRequested | StateRequested) -> None:
        """A peer requests bytes; answer with a transfer or Refused. A repeated request is answered by the same."""
        if (peer, message) in self._serving:
            return
        if not 0 <= message.fragment < len(self.parameters.versions):
            self.transport.send(peer, Refused(message.fragment, message.version, "unknown"))
        elif self.serves >= SERVES_MAX or [name for name, _ in self._serving].count(peer) >= SERVES_OF_A_PEER_MAX:
            self.transport.send(peer, Refused(message.fragment, message.version, "busy"))
        else:
            self._serving.add((peer, message))
            self.spawn(self._serve(peer, message), f"serve {peer}")

    async def _serve(self, peer: str, message: PayloadRequested | StateRequested) -> None:
        name = (message.fragment, message.version, message.digest)
        try:
            # A state from disk, too, where a version stays as it is while later rounds change the memory.
            is_payload = isinstance(message, PayloadRequested)
            read = self.store.read_payload if is_payload else self.store.read_state_bytes
            body = await in_thread(self.files, read, *name)
            await self.transport.transfer(peer, Payload(*name) if is_payload else State(*name), body.data)
        except DamagedFile:
            self.transport.send(peer, Refused(message.fragment, message.version, "gone"))
        except StorageError:  # it is there, and can't be read just now
            self.transport.send(peer, Refused(message.fragment, message.version, "busy"))
        except LinkLost:
            pass  # the peer sees the link go too, and asks again when it is back
        finally:
            self._serving.discard((peer, message))
