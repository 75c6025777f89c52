"""One way between two regions, measured for the mesh: round trip, then goodput on one connection."""

from __future__ import annotations

from diloco_node.adapters.flows import FlowTimes
from diloco_node.adapters.probe import ProbeSession, warm_up_ns
from diloco_node.measure.samples import NS_PER_S
from diloco_node.wire.measurement import FlowBody, FlowPath, PairAsked, PairMeasured


async def measure_out(session: ProbeSession, asked: PairAsked, *, is_sending: bool) -> PairMeasured:
    """Measure over an open session.

    Args:
        asked: its times; who and where are the session's.
        is_sending: the flow goes from here to the peer; else from the peer to here.

    Raises:
        PeerError: it failed. PeersUnreachable: the port for plain connections can't be reached.
    """
    probes = (await session.latency(asked.probes_ns / NS_PER_S)).latency
    times = FlowTimes(asked.warm_up_ns or warm_up_ns(probes.p50_ns), asked.span_ns)
    one = await session.flow(times, is_sending=is_sending, path=FlowPath.TRANSPORT, body=FlowBody.RANDOM, connections=1)
    plain = 0
    if asked.is_plain_too and session.opened.plain_port:
        other = await session.flow(
            times, is_sending=is_sending, path=FlowPath.PLAIN, body=FlowBody.RANDOM, connections=1
        )
        plain = other.received.goodput.mean
    rates, sent = one.received.goodput, one.sent
    return PairMeasured(
        p50_ns=probes.p50_ns,
        p99_ns=probes.p99_ns,
        jitter_ns=probes.jitter_ns,
        answered=probes.answered,
        unanswered=probes.unanswered,
        bytes_per_s=rates.mean,
        p10=rates.p10,
        p90=rates.p90,
        plain_bytes_per_s=plain,
        sent_bytes=-1 if sent.sent_bytes is None else sent.sent_bytes,
        retransmitted_bytes=-1 if sent.retransmitted_bytes is None else sent.retransmitted_bytes,
    )
