"""What an operator asks a running daemon to measure (`POST /api/v1/measure`), and the document that comes of it.

The documents are those of `diloco-node measure` between measuring ends (`adapters.measured`), with "through": "daemon".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from diloco_node.adapters.flows import CpuUse, FlowTimes, Received, Sent
from diloco_node.adapters.probe import FlowMeasured
from diloco_node.adapters.series import Keep, forget, run_series
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import NS_PER_S
from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable
from diloco_node.measure.asking import FlowOverLink, FlowWanted, new_measurement
from diloco_node.measure.documents import FlowCase, flow_document, latency_document, pair_document
from diloco_node.measure.exchange import printable
from diloco_node.measure.measuring import Measuring
from diloco_node.measure.samples import Goodput
from diloco_node.wire.measurement import PairMeasured

MESH_PROBES_NS_MAX: Final = 3 * NS_PER_S // 2
SECONDS_MIN: Final = 0.1
LOADED_MORE_NS: Final = NS_PER_S
"""The flow goes on for longer than the echoes, so that the last of them meets it too."""

KEYS: Final = frozenset(
    {"what", "peer", "seconds", "warm_up_seconds", "bytes_max", "load", "reverse", "connections", "plain"}
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an operator asked for.

    Attributes:
        what: "latency", "bandwidth" or "mesh". peer: empty for a mesh.
        warm_ns: None: by the round trip. bytes_max: of each test.
        load: latency also under load. reverse: bandwidth from the peer to here.
        connections: of each test of bandwidth, opened for it; none: those of the link.
        plain: bandwidth and mesh over plain TCP as well.
    """

    what: str
    peer: str
    span_ns: int
    warm_ns: int | None
    bytes_max: int
    load: bool
    reverse: bool
    plain: bool
    connections: tuple[int, ...]


def parse_asked(document: Mapping[str, Any], *, region: str, peers: tuple[str, ...]) -> Asked:
    """Check what came over the admin port.

    Args:
        document: "what"; "peer" but for a mesh; "seconds"; and if wanted "warm_up_seconds", "bytes_max", "load",
            "reverse", "plain", "connections" (numbers). region: ours. peers: names that there are.

    Raises:
        ConfigError: what is wrong with it.
    """
    unknown = sorted(document.keys() - KEYS)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no part of a measurement; there are {', '.join(sorted(KEYS))}")
    what = document.get("what")
    if what not in ("latency", "bandwidth", "mesh"):
        raise ConfigError(f"what is {what!r}: latency, bandwidth or mesh")
    peer = document.get("peer") or ""
    if what != "mesh" and peer not in peers:
        own = f"{peer} is this region" if peer == region else f"peer {peer!r} is no region that {region} knows"
        raise ConfigError(f"{own}: name one of {', '.join(peers)}")
    seconds = _number(document, "seconds", SECONDS_MIN, msg.SPAN_NS_MAX / NS_PER_S)
    warm_up = document.get("warm_up_seconds")
    if warm_up is not None:
        warm_up = _number(document, "warm_up_seconds", 0, msg.WARM_UP_NS_MAX / NS_PER_S)
    most = document.get("bytes_max", msg.BYTES_MAX)
    if type(most) is not int or not msg.BODY_BYTES_MAX <= most <= msg.BYTES_MAX:
        raise ConfigError(f"bytes_max is {most!r}: {msg.BODY_BYTES_MAX} to {msg.BYTES_MAX} bytes for each test")
    flags = {name: document.get(name, False) for name in ("load", "reverse", "plain")}
    for name, value in flags.items():
        if type(value) is not bool:
            raise ConfigError(f"{name} is {value!r}: true or false")
    warm_ns = None if warm_up is None else int(warm_up * NS_PER_S)
    counts = document.get("connections") or []
    if not isinstance(counts, list) or not all(type(one) is int and 1 <= one <= msg.CONNECTIONS_MAX for one in counts):
        raise ConfigError(
            f"connections is {counts!r}: numbers from 1 to {msg.CONNECTIONS_MAX} through a running daemon"
        )
    return Asked(what, peer, int(seconds * NS_PER_S), warm_ns, most, **flags, connections=tuple(sorted(set(counts))))


def _number(document: Mapping[str, Any], key: str, least: float, most: float) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{key} is {value!r}: {least:g} to {most:g} seconds through a running daemon")
    return float(value)


class MeasureCommand:
    """Carries out what an operator asks for, one command at a time.

    Args:
        measuring: of this region. limits: what limits sending to a peer now: (bytes/s or None, by what).
    """

    def __init__(self, measuring: Measuring, limits: Callable[[str], tuple[int | None, str]]) -> None:
        self._measuring = measuring
        self._limits = limits
        self._is_running = False

    async def run(self, document: Mapping[str, Any], say: Say, keep: Keep = forget) -> Mapping[str, Any]:
        """Measure.

        Args:
            document: see `parse_asked`. say: called with what goes on, for people. keep: with the document so far.

        Raises:
            ConfigError: it can't be asked for. PeersUnreachable: there is no link. DilocoError: another one runs, or it
                failed.
        """
        asked = parse_asked(document, region=self._measuring.region, peers=self._measuring.peers)
        if self._is_running:
            raise DilocoError(f"{self._measuring.region} carries out another `measure` command: wait for it, or end it")
        self._is_running = True
        try:
            made = {"latency": self._latency, "bandwidth": self._bandwidth, "mesh": self._mesh}[asked.what]
            return _by_daemon(await made(asked, say, lambda so_far: keep(_by_daemon(so_far))))
        finally:
            self._is_running = False

    async def _latency(self, asked: Asked, say: Say, keep: Keep) -> dict[str, Any]:
        measuring, peer = self._measuring, asked.peer
        say(f"round trips to {peer}")
        about = {**self._ends(asked), "seconds": asked.span_ns / NS_PER_S}
        rows = [latency_document("none", await measuring.latency(peer, asked.span_ns / NS_PER_S))]
        keep({**about, "rows": list(rows)})
        for load in ("out", "in") if asked.load else ():
            say(f"round trips to {peer}, load {load}")
            times, _ = await measuring.times(peer, min(asked.span_ns + LOADED_MORE_NS, msg.SPAN_NS_MAX), asked.warm_ns)
            wanted = FlowWanted(peer, load == "out", False, times, asked.bytes_max)
            rows.append(latency_document(load, await measuring.loaded_latency(wanted, asked.span_ns / NS_PER_S)))
            keep({**about, "rows": list(rows)})
        return {**about, "rows": rows}

    async def _bandwidth(self, asked: Asked, say: Say, keep: Keep) -> dict[str, Any]:
        measuring, peer = self._measuring, asked.peer
        say(f"round trips to {peer}")
        times, rtt_ns = await measuring.times(peer, asked.span_ns, asked.warm_ns)
        ends = self._ends(asked)
        kinds = [("transport", "random"), ("transport", "int4"), *([("plain", "random")] if asked.plain else [])]
        cases = [
            FlowCase(ends["from"], ends["to"], *kind, count) for count in asked.connections or [0] for kind in kinds
        ]

        def document(found: dict[str, Any]) -> dict[str, Any]:
            limit, limited_by = (None, "") if asked.reverse else self._limits(peer)
            return {
                **ends,
                "warm_up_seconds": times.warm_up_ns / NS_PER_S,
                "seconds": asked.span_ns / NS_PER_S,
                "rtt_seconds": rtt_ns / NS_PER_S,
                "congestion_control": measuring.links.congestion_control(peer),
                "limit_bytes_per_second": limit,
                "limited_by": limited_by,
                "over": "own connections" if asked.connections else "link",
                **found,
            }

        return document(
            await run_series(
                cases, lambda case: self._test(asked, case, times), say, lambda found: keep(document(found))
            )
        )

    async def _test(self, asked: Asked, case: FlowCase, times: FlowTimes) -> dict[str, Any]:
        """One test of bandwidth. 0 connections: over the link's own, and plain TCP over as many."""
        measuring, peer, is_plain = self._measuring, asked.peer, case.path == "plain"
        if is_plain and not case.connections:
            case = replace(case, connections=measuring.links.connections(peer))
        found = await measuring.flow(
            FlowWanted(peer, not asked.reverse, case.body == "int4", times, asked.bytes_max, case.connections, is_plain)
        )
        # As many as there were at the end: the warm-up may show that the link is worth more.
        count = case.connections or measuring.links.connections(peer)
        return _flow_document(replace(case, connections=count), found)

    def _ends(self, asked: Asked) -> dict[str, Any]:
        region, peer = self._measuring.region, asked.peer
        source, target = (peer, region) if asked.reverse else (region, peer)
        return {"from": source, "to": target, "address": self._measuring.links.address(peer)}

    async def _mesh(self, asked: Asked, say: Say, keep: Keep) -> dict[str, Any]:
        measuring = self._measuring
        names = sorted((measuring.region, *measuring.peers))
        pairs = [(source, target) for source in names for target in names if source != target]
        found: dict[str, Any] = {"regions": names, "pairs": [], "failures": [], "plain_errors": []}
        found["seconds"] = asked.span_ns / NS_PER_S
        for number, (source, target) in enumerate(pairs, start=1):
            say(f"pair {number} of {len(pairs)}: {source} to {target}")
            try:
                pair, plain_error = await self._pair(asked, source, target)
                found["pairs"].append(pair_document((source, target), pair))
                if plain_error:
                    found["plain_errors"].append({"from": source, "to": target, "error": plain_error})
            except DilocoError as error:
                found["failures"].append({"from": source, "to": target, "error": str(error)})
            keep(found)
        return found

    async def _pair(self, asked: Asked, source: str, target: str) -> tuple[PairMeasured, str]:
        """From here, to here, or between two others, which one of them measures for us; why there is no plain TCP."""
        measuring = self._measuring
        probes_ns = min(MESH_PROBES_NS_MAX, asked.span_ns)
        if measuring.region not in (source, target):
            error = measuring.links.error(source)
            if error:
                raise PeersUnreachable(f"{error}; it can't be asked to measure")
            wanted = msg.LinkAsked(
                new_measurement(),
                target,
                probes_ns,
                asked.warm_ns or 0,
                asked.span_ns,
                asked.bytes_max,
                asked.plain,
            )
            told = await measuring.far_link(source, wanted)
            return _pair_of(told), printable(told.plain_error)
        peer = target if source == measuring.region else source
        echoes = (await measuring.latency(peer, probes_ns / NS_PER_S)).latency
        times, _ = await measuring.times(peer, asked.span_ns, asked.warm_ns)
        wanted_flow = FlowWanted(peer, source == measuring.region, False, times, asked.bytes_max)
        flow = await measuring.flow(wanted_flow)
        plain, plain_error = 0, ""
        if asked.plain:
            try:
                plain = (await measuring.flow(replace(wanted_flow, connections=1, is_plain=True))).received.mean
            except DilocoError as error:
                plain_error = str(error)
        pair = PairMeasured(
            p50_ns=echoes.p50_ns,
            p99_ns=echoes.p99_ns,
            jitter_ns=echoes.jitter_ns,
            answered=echoes.answered,
            unanswered=echoes.unanswered,
            bytes_per_s=flow.received.mean,
            p10=flow.received.p10,
            p90=flow.received.p90,
            plain_bytes_per_s=plain,
            sent_bytes=flow.sent.sent_bytes,
            retransmitted_bytes=flow.sent.retransmitted_bytes,
        )
        return pair, plain_error


def _by_daemon(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "through": "daemon"}


def _pair_of(told: msg.LinkTold) -> PairMeasured:
    return PairMeasured(
        told.p50_ns,
        told.p99_ns,
        told.jitter_ns,
        told.answered,
        told.unanswered,
        told.bytes_per_s,
        told.p10,
        told.p90,
        told.plain_bytes_per_s,
        told.sent_bytes,
        told.retransmitted_bytes,
    )


def _flow_document(case: FlowCase, found: FlowOverLink) -> dict[str, Any]:
    received, sent = found.received, found.sent
    rates = Goodput(received.mean, received.median, received.p10, received.p90)
    counted = (None, None) if sent.sent_bytes < 0 else (sent.sent_bytes, sent.retransmitted_bytes)
    measured = FlowMeasured(
        Received(rates, CpuUse(received.cpu_ns, received.cpu_span_ns)),
        Sent(CpuUse(sent.cpu_ns, sent.cpu_span_ns), *counted),
    )
    return {
        **flow_document(case, measured),
        "counted_seconds": received.span_ns / NS_PER_S,
        "wire_bytes": sent.wire_bytes,
        "wire_bytes_per_second": sent.wire_bytes * NS_PER_S // max(1, sent.cpu_span_ns),
    }
