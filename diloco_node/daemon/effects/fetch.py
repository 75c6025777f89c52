"""Payloads and states that are missing: requested from peers, checked, stored; and served to peers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.core.events import Event, FetchFailed, FetchPayload, FetchState, PayloadStored, StateStored
from diloco_node.core.messages import Payload, PayloadRequested, Refused, State, StateRequested
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.effects.open_stripes import cut_payload
from diloco_node.daemon.effects.sending import EffectContext, Transport
from diloco_node.daemon.work import in_thread
from diloco_node.errors import LinkLost, PayloadCorrupt, StorageError
from diloco_node.numeric import U8
from diloco_node.storage.durable import DamagedFile

FETCH_SILENCE_S: Final = 30.0
"""A donor that sends nothing for this long has forgotten us: the core asks another."""
SERVES_MAX: Final = 8
"""Transfers served to peers at once; further ones are refused as busy and requested again."""

SERVES_OF_A_PEER_MAX: Final = 4
"""Limit on what a peer fetches at once: however much it asks for, the others get their part."""


@dataclass(slots=True)
class _Pending:
    """A fetch under way: what was requested from whom, and the watchdog that ends it."""

    order: FetchPayload | FetchState
    watchdog: asyncio.TimerHandle


@dataclass(slots=True, kw_only=True)
class Fetcher(EffectContext):
    """Both sides of a fetch. Every order of the core is answered exactly once.

    Attributes:
        serves: transfers to peers that are being prepared or are on their way.
    """

    transport: Transport
    initial: InitialStates
    writes: DiskWrites
    serves: int = field(default=0, init=False)
    _serves_of: Counter[str] = field(default_factory=Counter, init=False)
    pending: dict[tuple[str, int, bool], _Pending] = field(default_factory=dict, init=False)

    def ask(self, order: FetchPayload | FetchState) -> None:
        """Send the request and start the watchdog."""
        is_payload = isinstance(order, FetchPayload)
        key = (order.peer, order.fragment, is_payload)
        if key in self.pending:
            self._fail(key, "requested again")
        watchdog = asyncio.get_running_loop().call_later(FETCH_SILENCE_S, self._fail, key, "no answer in time")
        self.pending[key] = _Pending(order, watchdog)
        request: PayloadRequested | StateRequested
        if isinstance(order, FetchPayload):
            request = PayloadRequested(order.fragment, order.version, order.digest)
        else:
            request = StateRequested(order.fragment, order.version, order.digest)
        if not self.transport.send(key[0], request):
            # The link went down after the core chose this peer: nothing will come, and nothing else would say so.
            self._fail(key, "no link")

    def on_refusal(self, peer: str, message: Refused) -> None:
        """The peer can't help."""
        for is_payload in (True, False):
            key = (peer, message.fragment, is_payload)
            pending = self.pending.get(key)
            if pending is not None and pending.order.version == message.version:
                self._fail(key, message.reason)

    def peer_lost(self, peer: str) -> None:
        """The link is down: nothing more will come from there."""
        for key in sorted(key for key in self.pending if key[0] == peer):
            self._fail(key, "link lost")

    def expects(self, peer: str, header: Payload | State, raw_bytes: int) -> bool:
        """Whether a transfer that a peer begins is one that was requested, with the size it must have."""
        pending = self.pending.get((peer, header.fragment, isinstance(header, Payload)))
        if pending is None or not self._is_requested(pending.order, header, raw_bytes):
            return False
        # Progress within the transfer is the transport's to watch (its own floor in bytes/s).
        pending.watchdog.cancel()
        return True

    def _is_requested(self, order: FetchPayload | FetchState, header: Payload | State, raw_bytes: int) -> bool:
        return (header.version, header.digest, raw_bytes) == (order.version, order.digest, self._raw_bytes(order))

    def _raw_bytes(self, order: FetchPayload | FetchState) -> int:
        if isinstance(order, FetchPayload):
            return self.parameters.blocks[order.fragment].encoded_bytes
        return 8 * self.parameters.manifest.fragments[order.fragment].size

    def drop_fetch(self, fragment: int, version: int) -> None:
        """The payload came by itself, as merged stripes: that is the answer, and what the peer sends is not needed."""
        for key in sorted(self.pending):
            if key[1:] == (fragment, True) and self.pending[key].order.version == version:
                self.pending.pop(key).watchdog.cancel()

    async def take_transfer(self, peer: str, header: Payload | State, body: U8, *, is_whole: bool) -> None:
        """Check and store what came; tell the core."""
        key = (peer, header.fragment, isinstance(header, Payload))
        pending = self.pending.get(key)
        if pending is None or not self._is_requested(pending.order, header, body.nbytes):
            return
        if not is_whole:
            self._fail(key, "the transfer broke off")
            return
        # From here on the answer is this one, whatever becomes of the link: what is being written will be on the disk.
        del self.pending[key]
        pending.watchdog.cancel()
        if isinstance(header, Payload):
            assert isinstance(pending.order, FetchPayload)
            self.post(await self._store_payload(pending.order, body))
        else:
            self.post(await self._store_state(pending.order, body))

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

    def _fail(self, key: tuple[str, int, bool], reason: str) -> None:
        pending = self.pending.pop(key, None)
        if pending is None:
            return
        pending.watchdog.cancel()
        self.post(FetchFailed(key[0], key[1], pending.order.version, reason))

    def serve(self, peer: str, message: PayloadRequested | StateRequested) -> None:
        """A peer requests bytes; answer with a transfer or Refused."""
        if not 0 <= message.fragment < len(self.parameters.versions):
            self.transport.send(peer, Refused(message.fragment, message.version, "unknown"))
        elif self.serves >= SERVES_MAX or self._serves_of[peer] >= SERVES_OF_A_PEER_MAX:
            self.transport.send(peer, Refused(message.fragment, message.version, "busy"))
        else:
            self.serves += 1
            self._serves_of[peer] += 1
            self.spawn(self._serve(peer, message), f"serve {peer}")

    async def _serve(self, peer: str, message: PayloadRequested | StateRequested) -> None:
        name = (message.fragment, message.version, message.digest)
        try:
            header: Payload | State
            if isinstance(message, PayloadRequested):
                body = await in_thread(self.files, self.store.read_payload, *name)
                header = Payload(*name)
            else:
                # From disk, where a version stays as it is while later rounds change the memory.
                body = await in_thread(self.files, self.store.read_state_bytes, *name)
                header = State(*name)
            await self.transport.transfer(peer, header, body.data)
        except DamagedFile:
            self.transport.send(peer, Refused(message.fragment, message.version, "gone"))
        except StorageError:  # it is there, and can't be read just now
            self.transport.send(peer, Refused(message.fragment, message.version, "busy"))
        except LinkLost:
            pass  # the peer sees the link go too, and asks again when it is back
        finally:
            self.serves -= 1
            self._serves_of[peer] -= 1
