"""Measures the links of a running region, over the links themselves or beside them; answers peers that ask for it.

`core.measuring` has the messages and the limits, `measure_command` what an operator asks for, `measure_echo` round
trips, `measure_asking` what we ask of peers, `measure_serving` what they ask of us, `local_ends` the ends here.
Nothing here touches rounds: echoes are small control messages, probes go in the lane behind everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, Final

from diloco_node.adapters.flows import FlowTimes
from diloco_node.adapters.probe import LatencyMeasured, warm_up_ns
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import NS_PER_S, MeasuringMessage
from diloco_node.errors import LinkLost, PeerError
from diloco_node.measure.answering import FarLink, MeasurementsForPeers
from diloco_node.measure.asking import AskingPeers, FlowOverLink, FlowWanted
from diloco_node.measure.echoes import EchoProbe
from diloco_node.measure.ends import LocalEnds
from diloco_node.measure.measured_links import MeasuredLinks, MeasuringTransport

RTT_PROBE_S: Final = 0.5


class Measuring:
    """The measurements of one region. All methods run on the event loop.

    Args:
        region: our name. peers: the others. transport: the links.
        spawn: runs a task of the daemon. executor: for making what is sent, behind everything else. now_ns: monotonic.

    Attributes:
        links: those that can be measured. ends: take what arrives over them.
    """

    def __init__(
        self,
        *,
        region: str,
        peers: tuple[str, ...],
        transport: MeasuringTransport,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        executor: Executor,
        now_ns: Callable[[], int],
    ) -> None:
        self.region = region
        self.peers = peers
        self.links = MeasuredLinks(region, transport)
        self.ends = LocalEnds(transport, peers=peers, executor=executor, now_ns=now_ns)
        self._now_ns = now_ns
        self._gate = msg.MeasuringGate(peers, now_ns=now_ns())
        self._echoes = EchoProbe(transport, self._gate, now_ns=now_ns)
        self._asking = AskingPeers(transport, self.ends)
        self._for_peers = MeasurementsForPeers(
            transport=transport,
            gate=self._gate,
            ends=self.ends,
            far_link=FarLink(peers, self.links, self._echoes, self._asking),
            spawn=spawn,
            now_ns=now_ns,
        )

    def describe(self) -> str:
        """The measurement that is going on here, for people; empty when none is."""
        return self._gate.describe(now_ns=self._now_ns())

    # ---- what the links bring ----------------------------------------------------------------------------------------

    def heard(self, peer: str, message: MeasuringMessage) -> None:
        """Take a message of a peer.

        Raises:
            ProtocolViolation: it asks for more than the limits, twice the same, or says more than it was asked.
        """
        match message:
            case msg.EchoWanted():
                self._echoes.wanted(peer, message)
            case msg.EchoAnswered():
                self._echoes.answered(peer, message)
            case msg.MeasurementAsked() | msg.LinkAsked():
                self._for_peers.begin(peer, message)
            case msg.MeasurementStopped():
                self._for_peers.stop(peer, message.measurement)
            case _:
                self._asking.heard(peer, message.measurement, message)

    def link_lost(self, peer: str) -> None:
        """The link is down: what went on over it is over."""
        self._asking.link_lost(peer)
        self._for_peers.link_lost(peer)

    # ---- for the operator --------------------------------------------------------------------------------------------

    async def latency(self, peer: str, span_s: float) -> LatencyMeasured:
        """Round trips through the control lane, one echo every 10 ms, whether or not the one before came back.

        Raises:
            PeersUnreachable: there is no link. LinkLost: none came back. PeerError: another measurement runs here.
        """
        with self._turn(f"latency to {peer}"):
            self.links.check(peer)
            return await self._echoes.measure(peer, span_s)

    async def loaded_latency(self, wanted: FlowWanted, span_s: float) -> LatencyMeasured:
        """The same while a flow fills the link, until its bytes are used up. Raises as `latency` and `flow`."""
        with self._turn(f"latency under load to {wanted.peer}"):
            self.links.check(wanted.peer)
            filling = asyncio.create_task(self._asking.flow(wanted), name=f"load {wanted.peer}")
            try:
                await asyncio.wait([filling], timeout=wanted.times.warm_up_ns / NS_PER_S)
                if filling.done():
                    filling.result()
                    raise LinkLost(
                        f"{wanted.bytes_max} bytes were used up before the link was full: allow more with --most"
                    )
                measured = await self._echoes.measure(wanted.peer, span_s, load=filling)
                await filling  # had it failed on the way, these would not be times under load
                return measured
            finally:
                filling.cancel()
                await asyncio.gather(filling, return_exceptions=True)

    async def flow(self, wanted: FlowWanted) -> FlowOverLink:
        """Fill the measurement lane one way, and count at the far end.

        Raises:
            PeersUnreachable: there is no link. PeerError: it failed, or here or there another measurement runs.
        """
        with self._turn(f"bandwidth {'to' if wanted.is_sending else 'from'} {wanted.peer}"):
            self.links.check(wanted.peer)
            return await self._asking.flow(wanted)

    async def times(self, peer: str, span_ns: int, warm_ns: int | None) -> tuple[FlowTimes, int]:
        """How long flows to a peer are to be, and the round trip (ns) that this was taken from."""
        rtt_ns = (await self.latency(peer, RTT_PROBE_S)).latency.p50_ns
        return FlowTimes(warm_up_ns(rtt_ns) if warm_ns is None else warm_ns, span_ns), rtt_ns

    async def far_link(self, source: str, asked: msg.LinkAsked) -> msg.LinkTold:
        """Let a peer measure from there to a third region. Raises as `flow`."""
        self.links.check(source)
        return await self._asking.far_link(source, asked)

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        reason = self._gate.begin(what, asker=None, bytes_max=0, now_ns=self._now_ns())
        if reason:
            raise PeerError(f"{self.region} is {reason}")
        try:
            yield
        finally:
            self._gate.end(used_bytes=0)
