"""An operator's request to measure, and the document that comes of it.

A running daemon carries it out on the links that it has (`POST /api/v1/measure`), the command line itself on links that
it makes for each test (`measure.ends`). The documents are the same; a daemon's say "through": "daemon".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.measure.measuring import Linked, Measuring
from diloco_node.measure.requester import FlowMeasured, new_flow, new_measurement
from diloco_node.measure.samples import Latency, seconds_per_gb
from diloco_node.numeric import NS_PER_S
from diloco_node.wire import measure_messages as msg

MESH_PROBES_NS_MAX: Final = 3 * NS_PER_S // 2
SECONDS_MIN: Final = 0.1

LOADED_MORE_NS: Final = NS_PER_S
"""The flow goes on for longer than the echoes, so that the last of them meets it too."""

KEYS: Final = frozenset({"what", "peer", "seconds", "warm_up_seconds", "bytes_max", "load", "reverse"})

OnProgress = Callable[[str], None]
OnPartial = Callable[[dict[str, Any]], None]
"""Takes a document as it would be if the measurement ended here: shown when it is cut short."""

Limits = Callable[[str], tuple[int | None, str]]
"""Called with a peer: the limit of sending to it now, in wire bytes per second (None: none), and its origin."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """An operator's request.

    what: "latency", "bandwidth" or "mesh". peer: empty for a mesh. warm_ns: None: by the round trip. bytes_max: of each
    flow. load: latency also under load. reverse: bandwidth from the peer to here.
    """

    what: str
    peer: str
    span_ns: int
    warm_ns: int | None
    bytes_max: int
    load: bool
    reverse: bool


def parse_request(
    document: Mapping[str, Any], *, region: str, peers: tuple[str, ...], is_daemon: bool
) -> MeasureRequest:
    """Check what came over the admin port, or from the command line. Raises ConfigError.

    document: "what"; "peer" but for a mesh; "seconds"; others of KEYS if wanted. is_daemon: it is to be measured over
    the links of a running daemon.
    """
    unknown = sorted(document.keys() - KEYS)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no part of a measurement; there are {', '.join(sorted(KEYS))}")
    kind = document.get("what")
    if kind not in ("latency", "bandwidth", "mesh"):
        raise ConfigError(f"what is {kind!r}: latency, bandwidth or mesh")
    peer = document.get("peer") or ""
    if kind != "mesh" and peer not in peers:
        reason = f"{peer} is this region" if peer == region else f"peer {peer!r} is no region that {region} knows"
        raise ConfigError(f"{reason}: name one of {', '.join(peers)}")
    seconds = _number(document, "seconds", SECONDS_MIN, msg.SPAN_NS_MAX / NS_PER_S)
    warm_up = document.get("warm_up_seconds")
    if warm_up is not None:
        warm_up = _number(document, "warm_up_seconds", 0, msg.WARM_UP_NS_MAX / NS_PER_S)
    most = msg.DAEMON_BYTES_MAX if is_daemon else msg.BYTES_MAX
    bytes_max = document.get("bytes_max", most)
    if type(bytes_max) is not int or not msg.BODY_BYTES_MAX <= bytes_max <= most:
        raise ConfigError(f"bytes_max is {bytes_max!r}: {msg.BODY_BYTES_MAX} to {most} bytes for each test")
    flags = {name: document.get(name, False) for name in ("load", "reverse")}
    for name, value in flags.items():
        if type(value) is not bool:
            raise ConfigError(f"{name} is {value!r}: true or false")
    warm_ns = None if warm_up is None else int(warm_up * NS_PER_S)
    return MeasureRequest(kind, peer, int(seconds * NS_PER_S), warm_ns, bytes_max, **flags)


def _number(document: Mapping[str, Any], key: str, lower: float, upper: float) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lower <= value <= upper:
        raise ConfigError(f"{key} is {value!r}: {lower:g} to {upper:g} seconds")
    return float(value)


class MeasureCommand:
    """Carries out what an operator requests, one command at a time.

    limits: of a daemon's links; None: there is no daemon.
    """

    def __init__(self, region: str, peers: tuple[str, ...], dial: Linked, limits: Limits | None = None) -> None:
        self._region = region
        self.peers = peers
        self._linked = dial
        self._limits = limits
        self._is_running = False

    async def run(
        self, document: Mapping[str, Any], on_progress: OnProgress, on_partial: OnPartial = lambda _: None
    ) -> Mapping[str, Any]:
        """Measure.

        Args:
            document: see `parse_request`. on_progress: called with what goes on, for people.
            on_partial: called with the document so far.

        Raises ConfigError: it can't be asked for. PeersUnreachable: there is no link. DilocoError: another one runs, or
        it failed.
        """
        is_daemon = self._limits is not None
        request = parse_request(document, region=self._region, peers=self.peers, is_daemon=is_daemon)
        if self._is_running:
            raise DilocoError(f"{self._region} carries out another `measure` command: wait for it, or end it")
        self._is_running = True
        through = {"through": "daemon"} if is_daemon else {}
        measure = {"latency": self._latency, "bandwidth": self._bandwidth, "mesh": self._mesh}[request.what]
        try:
            return {**await measure(request, on_progress, lambda so_far: on_partial({**so_far, **through})), **through}
        finally:
            self._is_running = False

    async def _latency(self, request: MeasureRequest, on_progress: OnProgress, on_partial: OnPartial) -> dict[str, Any]:
        peer, seconds = request.peer, request.span_ns / NS_PER_S
        on_progress(f"round trips to {peer}")
        async with self._linked((peer,)) as measuring:
            about = {"from": self._region, "to": peer, "address": measuring.address(peer), "seconds": seconds}
            rows = [latency_document("none", await measuring.latency(peer, seconds))]
            on_partial({**about, "rows": list(rows)})
            for load in ("out", "in") if request.load else ():
                on_progress(f"round trips to {peer}, load {load}")
                span_ns = min(request.span_ns + LOADED_MORE_NS, msg.SPAN_NS_MAX)
                warm_ns, _ = await measuring.warm_up(peer, request.warm_ns)
                flow = new_flow(load == "out", warm_up_ns=warm_ns, span_ns=span_ns, bytes_max=request.bytes_max)
                rows.append(latency_document(load, await measuring.loaded_latency(peer, flow, seconds)))
                on_partial({**about, "rows": list(rows)})
        return {**about, "rows": rows}

    async def _bandwidth(
        self, request: MeasureRequest, on_progress: OnProgress, on_partial: OnPartial
    ) -> dict[str, Any]:
        del on_partial  # there is one flow, and half of it is nothing
        peer = request.peer
        on_progress(f"round trips to {peer}")
        source, target = (peer, self._region) if request.reverse else (self._region, peer)
        async with self._linked((peer,)) as measuring:
            warm_ns, rtt_ns = await measuring.warm_up(peer, request.warm_ns)
            on_progress(f"a flow from {source} to {target}")
            wish = new_flow(
                not request.reverse, warm_up_ns=warm_ns, span_ns=request.span_ns, bytes_max=request.bytes_max
            )
            flow = await measuring.flow(peer, wish)
            about = {
                "from": source,
                "to": target,
                "address": measuring.address(peer),
                "warm_up_seconds": warm_ns / NS_PER_S,
                "seconds": request.span_ns / NS_PER_S,
                "rtt_seconds": rtt_ns / NS_PER_S,
                "congestion_control": measuring.congestion_control(peer),
                # As many as there are at the end: the warm-up may show that the link is worth more.
                **flow_document(flow, measuring.connections(peer)),
            }
        if self._limits is None:
            return about
        limit, limited_by = (None, "") if request.reverse else self._limits(peer)
        return {**about, "limit_bytes_per_second": limit, "limited_by": limited_by}

    async def _mesh(self, request: MeasureRequest, on_progress: OnProgress, on_partial: OnPartial) -> dict[str, Any]:
        names = sorted((self._region, *self.peers))
        pairs = [(source, target) for source in names for target in names if source != target]
        seconds = request.span_ns / NS_PER_S
        mesh: dict[str, Any] = {"regions": names, "pairs": [], "failures": [], "seconds": seconds}
        async with self._linked(self.peers) as measuring:
            for number, (source, target) in enumerate(pairs, start=1):
                on_progress(f"pair {number} of {len(pairs)}: {source} to {target}")
                try:
                    link = await self._pair(measuring, request, source, target)
                    mesh["pairs"].append(pair_document((source, target), link))
                except DilocoError as error:
                    mesh["failures"].append({"from": source, "to": target, "error": str(error)})
                on_partial(mesh)
        return mesh

    async def _pair(self, measuring: Measuring, request: MeasureRequest, source: str, target: str) -> msg.LinkMeasured:
        """From here, to here, or between two others, which the one that sends measures for us."""
        flow = msg.LinkTestRequested(
            new_measurement(),
            target,
            min(MESH_PROBES_NS_MAX, request.span_ns),
            request.warm_ns or 0,
            request.span_ns,
            request.bytes_max,
        )
        if self._region not in (source, target):
            return await measuring.remote_link(source, flow)
        is_sending = source == self._region
        return await measuring.link(target if is_sending else source, flow, is_sending=is_sending)


def latency_document(load: str, latency: Latency) -> dict[str, Any]:
    """A row of the table: `load` is "none", "out" or "in"."""
    least, figures = latency.tcp_rtt_min_ns, ("min", "p50", "p99", "max", "jitter")
    return {
        "load": load,
        "answered": latency.answered,
        "unanswered": latency.unanswered,
        **{f"{name}_seconds": getattr(latency, f"{name}_ns") / NS_PER_S for name in figures},
        "retransmitted_share": latency.retransmitted,
        "tcp_rtt_min_seconds": None if least is None else least / NS_PER_S,
    }


def flow_document(flow: FlowMeasured, connections: int) -> dict[str, Any]:
    """A test over so many connections for bulk; rates are payload bytes per second at the receiver."""
    arrival, sending = flow.received, flow.sent
    is_known = sending.sent_bytes >= 0
    cpu = {"sender": (sending.cpu_ns, sending.cpu_span_ns), "receiver": (arrival.cpu_ns, arrival.cpu_span_ns)}
    return {
        "connections": connections,
        "bytes_per_second": arrival.mean,
        "bytes_per_second_median": arrival.median,
        "bytes_per_second_p10": arrival.p10,
        "bytes_per_second_p90": arrival.p90,
        "cpu_seconds_per_gb": {end: round(seconds_per_gb(*cpu_use, arrival.mean), 4) for end, cpu_use in cpu.items()},
        "sent_bytes": sending.sent_bytes if is_known else None,
        "retransmitted_bytes": sending.retransmitted_bytes if is_known else None,
        "counted_seconds": arrival.span_ns / NS_PER_S,
        "wire_bytes": sending.wire_bytes,
        "wire_bytes_per_second": sending.wire_bytes * NS_PER_S // max(1, sending.cpu_span_ns),
    }


def pair_document(pair: tuple[str, str], link: msg.LinkMeasured) -> dict[str, Any]:
    """A way between two regions, as `plan --mesh` reads it, with further numbers."""
    is_known = link.sent_bytes > 0
    return {
        "from": pair[0],
        "to": pair[1],
        "rtt_seconds": link.p50_ns / NS_PER_S,
        "bytes_per_second": link.bytes_per_s,
        "rtt_p99_seconds": link.p99_ns / NS_PER_S,
        "jitter_seconds": link.jitter_ns / NS_PER_S,
        "probes": link.answered + link.unanswered,
        "unanswered": link.unanswered,
        "bytes_per_second_p10": link.p10,
        "bytes_per_second_p90": link.p90,
        "retransmitted_share": link.retransmitted_bytes / link.sent_bytes if is_known else None,
    }
