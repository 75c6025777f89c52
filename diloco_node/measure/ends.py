"""The ends of measured flows that are here: makes them, and brings what arrives to the one that it is for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from diloco_node.adapters.aside_ends import Aside
from diloco_node.adapters.flows import make_body
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import Probe
from diloco_node.errors import LinkLost, PeerError
from diloco_node.measure.measured_links import MeasuringTransport
from diloco_node.measure.probes import ReceivingEnd, SendingEnd, SentOverLink
from diloco_node.wire.measurement import FlowBody


class LocalEnds:
    """See the module.

    Args:
        transport: the links. peers: at their other ends. executor: for making what is sent. now_ns: monotonic.
    """

    def __init__(
        self,
        transport: MeasuringTransport,
        *,
        peers: tuple[str, ...],
        executor: Executor,
        now_ns: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._now_ns = now_ns
        self._expected = {peer: msg.ProbesExpected() for peer in peers}
        self._receiving: dict[tuple[str, int], ReceivingEnd] = {}

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def transfer_opened(self, peer: str, header: Probe, raw_bytes: int) -> memoryview | None:
        """Where probes go; None for those that come late. Raises ProtocolViolation for those nobody agreed to."""
        self._expected[peer].arrive(header.measurement, raw_bytes)
        end = self._receiving.get((peer, header.measurement))
        return None if end is None else end.opened(raw_bytes)

    def transfer_closed(self, peer: str, header: Probe, raw_bytes: int, *, is_whole: bool) -> None:
        """Probes arrived, or broke off."""
        end = self._receiving.get((peer, header.measurement))
        if end is not None and is_whole:
            end.closed(raw_bytes)

    def plain_arrived(self, peer: str, measurement: int, size: int) -> None:
        """Bytes arrived over plain TCP. Raises ProtocolViolation for more than was agreed to."""
        self._expected[peer].arrive(measurement, size)
        end = self._receiving.get((peer, measurement))
        if end is not None:
            end.arrived(size)

    async def read(self, peer: str, aside: Aside) -> None:
        """Take what arrives beside the link. Raises PeerError, in any case."""
        try:
            await aside.receive(self)
        except PeerError as error:
            if not isinstance(error, LinkLost):
                self._transport.reject(peer, error)
            raise

    # ---- ends --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def receiving(self, peer: str, asked: msg.MeasurementAsked) -> Iterator[ReceivingEnd]:
        """An end that gets what arrives, for as long as this lasts."""
        key = (peer, asked.measurement)
        self._expected[peer].expect(asked.measurement, asked.bytes_max)
        self._receiving[key] = end = ReceivingEnd(asked, now_ns=self._now_ns)
        try:
            yield end
        finally:
            del self._receiving[key]

    async def body(self, asked: msg.MeasurementAsked) -> memoryview:
        """What to send; making it takes a while."""
        kind = FlowBody.INT4 if asked.is_compressible else FlowBody.RANDOM
        return await asyncio.get_running_loop().run_in_executor(self._executor, make_body, kind)

    def sending(self, peer: str, asked: msg.MeasurementAsked, body: memoryview, aside: Aside | None) -> SendingEnd:
        """An end that sends over the link, or beside it."""

        def booked() -> int:
            lanes = self._transport.budget_status()["peers"][peer]["lanes"]
            return int(lanes["measurement"]["used_bytes"])

        return SendingEnd(aside or self._transport, peer, asked, body, booked)


def told(measurement: int, found: SentOverLink) -> msg.MeasurementSent:
    """What a sending end found, for the peer."""
    sent = found.sent
    counted = (-1, -1)
    if sent.sent_bytes is not None and sent.retransmitted_bytes is not None:
        counted = (sent.sent_bytes, sent.retransmitted_bytes)
    return msg.MeasurementSent(measurement, sent.cpu.cpu_ns, sent.cpu.span_ns, found.wire_bytes, *counted)
