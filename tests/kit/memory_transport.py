"""Links between the nodes of one process, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from diloco_node.core.messages import BulkHeader, Message
from diloco_node.errors import LinkLost, PeerError
from diloco_node.transport.kernel.wire_meter import PeerTraffic
from diloco_node.wire.envelope import TransferBegin, decode_bulk, decode_control, encode_begin, encode_control
from tests.kit.node_kit import NO_BUDGET

DELAY_S = 0.02


RATE_BYTES_PER_S = 500_000


@dataclass
class Network:
    """Links between all regions: a delay, a rate for bulk, and cuts."""

    handlers: dict[str, MemoryTransport] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)
    transfers: int = 0
    under_way: Counter[frozenset[str]] = field(default_factory=Counter)
    broken_transfers: int = 0

    def is_up(self, region_a: str, region_b: str) -> bool:
        return frozenset((region_a, region_b)) not in self.cuts and {region_a, region_b} <= self.handlers.keys()

    def connect(self, transport: MemoryTransport) -> None:
        self.handlers[transport.region] = transport
        for peer in sorted(self.handlers):
            if peer != transport.region and self.is_up(peer, transport.region):
                self._change(peer, transport.region, is_up=True)

    def disconnect(self, region: str) -> None:
        for peer in sorted(self.handlers):
            if peer != region and self.is_up(peer, region):
                self._change(peer, region, is_up=False)
        self.handlers.pop(region, None)

    def cut(self, region_a: str, region_b: str) -> None:
        if self.is_up(region_a, region_b):
            self._change(region_a, region_b, is_up=False)
        self.cuts.add(frozenset((region_a, region_b)))

    def heal(self, region_a: str, region_b: str) -> None:
        self.cuts.discard(frozenset((region_a, region_b)))
        if self.is_up(region_a, region_b):
            self._change(region_a, region_b, is_up=True)

    def _change(self, region_a: str, region_b: str, *, is_up: bool) -> None:
        for here, there in ((region_a, region_b), (region_b, region_a)):
            if here in self.handlers:
                self.handlers[here].changed(there, is_up=is_up)


class MemoryTransport:
    """GrpcTransport over a Network."""

    network: Network

    def __init__(self, *, region: str, handler: Any, peers: dict[str, Any], **_: Any) -> None:
        self.region = region
        self.rejections: dict[tuple[str, str], int] = {}
        self.handler = handler
        self._peers = sorted(peers)
        self._turns = {peer: asyncio.Lock() for peer in peers}
        self._lost: dict[str, asyncio.Event] = {}
        self.credentials = SimpleNamespace(document=dict, revocations=frozenset())
        self.pacer = SimpleNamespace()  # of a witness in a bucket: these worlds have none

    def register(self, handler: Any, kinds: frozenset[type]) -> None:
        """Nobody measures in these worlds."""

    async def start(self) -> None:
        self.network.connect(self)

    async def stop(self) -> None:
        self.network.disconnect(self.region)

    def expel(self, regions: frozenset[str]) -> None:
        """Here links of an expelled region stay: the core ignores what it says."""

    @property
    def addresses(self) -> dict[str, str | None]:
        return dict.fromkeys(self._peers)

    def follow(self, *_: Any, **__: Any) -> None:
        """Nor do peers come and go."""

    def begin_run(self, _: tuple[str, ...]) -> None:
        """Nobody greets."""

    def changed(self, peer: str, *, is_up: bool) -> None:
        if is_up:
            self._lost[peer] = asyncio.Event()
        else:
            self._lost[peer].set()
        self.handler.link_changed(peer, is_up=is_up)

    def send(self, peer: str, message: Message) -> bool:
        is_up = self.network.is_up(self.region, peer)
        if is_up:
            frame = encode_control(message)
            asyncio.get_running_loop().call_later(DELAY_S, self._arrive, peer, frame, self._lost[peer])
        return is_up

    def _arrive(self, peer: str, frame: bytes, lost: asyncio.Event) -> None:
        # With its link goes what is on the way: nothing of a process that ended comes behind the next one's words.
        if not lost.is_set():
            self.network.handlers[peer].take(self.region, decode_control(frame))

    def take(self, peer: str, message: Message) -> None:
        self.handler.control_arrived(peer, message)

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        async with self._turns[peer]:
            if not self.network.is_up(self.region, peer):
                raise LinkLost(f"{peer}: down")
            self.network.transfers += 1
            there, loss = self.network.handlers[peer], self._lost[peer]
            begin = decode_bulk(encode_begin(self.network.transfers, header, body.nbytes))
            assert isinstance(begin, TransferBegin)
            buffer = there.handler.transfer_opened(self.region, begin.header, begin.raw_bytes)
            half = body.nbytes // 2
            pair = frozenset((self.region, peer))
            self.network.under_way[pair] += 1
            for start, stop in ((0, half), (half, body.nbytes)):
                # Read when it is sent, as gRPC does.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((stop - start) / RATE_BYTES_PER_S + DELAY_S / 2):
                        await loss.wait()
                if buffer is not None and not loss.is_set():
                    buffer[start:stop] = body[start:stop]
            self.network.under_way[pair] -= 1
            if buffer is not None:
                there.handler.transfer_closed(self.region, begin.header, buffer, is_whole=not loss.is_set())
            if loss.is_set():
                self.network.broken_transfers += 1
                raise LinkLost(f"{peer}: lost on the way")

    def traffic(self) -> dict[str, PeerTraffic]:
        return {peer: PeerTraffic(0, 0, False) for peer in self._peers}

    def budget_status(self) -> dict[str, Any]:
        return NO_BUDGET

    def quarantine_reason(self, peer: str) -> str:
        return ""

    other_models: dict[str, str] = {}  # noqa: RUF012 - nobody writes it

    def reject(self, peer: str, error: PeerError) -> None:
        raise AssertionError(f"{self.region} strikes {peer}, which is honest: {error}")

    def peer_status(self) -> dict[str, Any]:
        status = SimpleNamespace(
            state=SimpleNamespace(value="up"), address=None, error="", connections=1, certificate=None
        )
        return dict.fromkeys(self._peers, status)
