"""What a region shows: the status document, the metrics, and the report it leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco_node.core.events import Note
from diloco_node.core.view import PeerView, RegionView, RoundView
from diloco_node.daemon.learner.proxy import LearnerSide
from diloco_node.ports import PeerTraffic
from diloco_node.storage.durable import replace_file
from diloco_node.transport.link import PeerStatus
from diloco_node.transport.transport import GrpcTransport

REPORT_NAME: Final = "report.json"
NOTES_SHOWN_MAX: Final = 64

_SHARE: Final = ("peer", "direction")
_LANE: Final = ("peer", "lane")


class NoteBook:
    """The last decisions with their reasons, and how often each kind was made."""

    def __init__(self) -> None:
        self.last: deque[dict[str, Any]] = deque(maxlen=NOTES_SHOWN_MAX)
        self.counts: dict[str, int] = {}
        self.alarms = 0

    def add(self, note: Note, now_ns: int) -> None:
        """Remember one."""
        self.last.append({"at_ns": now_ns, **dataclasses.asdict(note)})
        self.counts[note.kind] = self.counts.get(note.kind, 0) + 1
        self.alarms += note.is_alarm


def model_digest(digests: Iterable[bytes]) -> str:
    """One digest (hex) for a whole model: SHA-256 over the fragments' digests in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def write_report(state_dir: Path, report: Mapping[str, Any]) -> None:
    """Leave report.json; durable when this returns. Raises StorageError."""
    replace_file(state_dir / REPORT_NAME, [(json.dumps(report, indent=1) + "\n").encode()])


def region_status(
    view: RegionView,
    *,
    run_id: str,
    state: str,
    learner: LearnerSide,
    transport: GrpcTransport,
    notes: NoteBook,
    now_ns: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The status document: plain values only, ready for JSON."""
    traffic, links = transport.traffic(), transport.peer_status()
    own = next(one for one in view.participation if one.learner == view.region)
    facts = learner.facts
    digests = [digest for version, digest in view.digests]
    is_hashed = all(version == done for (version, _), done in zip(view.digests, view.versions, strict=True))
    return {
        "region": view.region,
        "run_id": run_id,
        "state": state,
        "role": view.role,
        "leader": view.leader,
        "term": view.term,
        "commit_index": view.commit_index,
        "applied_index": view.applied_index,
        "last_index": view.last_index,
        "reason": _headline(view),
        "versions": list(view.versions),
        "digest": model_digest(digests) if is_hashed else None,
        "rounds_committed": view.rounds_committed,
        "tokens_merged": view.tokens_merged,
        "participation": own.ratio,
        "participation_of": {one.learner: one.ratio for one in view.participation},
        "rounds": [_round(one, now_ns) for one in view.rounds],
        "peers": [_peer(peer, links[peer.region], traffic[peer.region]) for peer in view.peers],
        "fetching": [{"fragment": f, "version": v, "peer": p} for f, v, p in view.fetching],
        "budget": transport.budget_status(),
        "wire_bytes_out": sum(one.bytes_out for one in traffic.values()),
        "wire_bytes_in": sum(one.bytes_in for one in traffic.values()),
        "learner": _learner(learner, now_ns),
        # (fragment, version, monotonic ns) of the last versions that the learner could read.
        "offers": [list(offer) for offer in learner.inbox.offered_at_ns],
        # Of the last learner that was attached, also when it is gone.
        "inner_steps": learner.steps_total,
        "tokens": learner.tokens_total,
        "loss_first": facts.loss_first,
        "loss_last": facts.loss_last,
        "val_loss": facts.val_loss,
        "val_loss_global": facts.val_loss_global,
        "learner_blocked_seconds": facts.blocked_ns / 1e9,
        "digest_differences": view.digest_differences,
        "alarms": notes.alarms,
        "rejections": [
            {"peer": peer, "reason": reason, "count": count}
            for (peer, reason), count in sorted(transport.rejections.items())
        ],
        "quarantine": {peer: why for peer in links if (why := transport.quarantined(peer))},
        "notes": list(notes.last),
        **extra,
    }


def _headline(view: RegionView) -> str:
    """One line: what this region is doing or waiting for."""
    if view.finished:
        return f"finished: {view.finished}"
    if view.rounds:
        first = view.rounds[0]
        return f"fragment {first.fragment} to {first.version}: {first.waiting}"
    return view.waiting


def _round(one: RoundView, now_ns: int) -> dict[str, Any]:
    return {
        "fragment": one.fragment,
        "version": one.version,
        "ballot": str(one.ballot),
        "attempt": one.attempt,
        "members": list(one.members),
        "reducers": list(one.reducers),
        "open_seconds": (now_ns - one.opened_at_ns) / 1e9 if one.opened_at_ns else None,
        "deadline_in_seconds": (one.deadline_ns - now_ns) / 1e9 if one.deadline_ns else None,
        "reason": one.waiting,
    }


def _peer(peer: PeerView, link: PeerStatus, traffic: PeerTraffic) -> dict[str, Any]:
    return {
        "name": peer.region,
        "link": link.state.value,
        "address": link.address,
        "error": link.error,
        "bulk_connections": link.connections,
        "is_alive": peer.is_alive,
        "rtt_seconds": peer.rtt_ns / 1e9 if peer.rtt_ns else None,
        "hears": list(peer.hears),
        "step": peer.learner.step if peer.learner is not None else None,
        "applied_index": peer.applied_index,
        "wire_bytes_out": traffic.bytes_out,
        "wire_bytes_in": traffic.bytes_in,
        "is_measured": traffic.is_measured,
    }


def _learner(learner: LearnerSide, now_ns: int) -> dict[str, Any] | None:
    status, facts = learner.shown_status, learner.facts
    if status is None:
        return None
    seconds = (facts.last_report_ns - facts.first_report_ns) / 1e9
    tokens = status.tokens - facts.tokens_at_first_report
    return {
        "incarnation": status.incarnation,
        "step": status.step,
        "tokens": status.tokens,
        "step_seconds": status.step_time_ns / 1e9,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "loss": facts.loss_last,
        "val_loss": facts.val_loss,
        "val_loss_global": facts.val_loss_global,
        "blocked_seconds": facts.blocked_ns / 1e9,
        "report_age_seconds": (now_ns - facts.last_report_ns) / 1e9 if facts.last_report_ns else None,
        "discounted_versions": facts.discounted_versions,
        "finished": status.finished,
        "positions": [dataclasses.asdict(position) for position in status.positions],
    }


class StatusCollector(Collector):
    """Prometheus metrics made from the status document, so that both always say the same."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """One sample per fact; labels are peers and fragments only."""
        status = self._status()
        if status["state"] == "starting":
            return
        learner = status["learner"]
        yield from _gauges(
            {
                "diloco_learner_attached": learner is not None,
                "diloco_learner_inner_steps": learner["step"] if learner else 0,
                "diloco_learner_tokens": learner["tokens"] if learner else 0,
                "diloco_learner_blocked_seconds": learner["blocked_seconds"] if learner else 0.0,
                "diloco_ledger_term": status["term"],
                "diloco_ledger_commit_index": status["commit_index"],
                "diloco_ledger_applied_index": status["applied_index"],
                "diloco_ledger_is_leader": status["role"] == "leader",
                "diloco_rounds_open": len(status["rounds"]),
                "diloco_participation_ratio": status["participation"],
                "diloco_stripes_buffered_bytes": status["buffered_bytes"],
            }
        )
        yield from _counters(
            {
                "diloco_rounds_committed": status["rounds_committed"],
                "diloco_alarms": status["alarms"],
                "diloco_events": status["events"],
            }
        )
        yield _per_peer("diloco_peer_wire_sent_bytes", status["peers"], "wire_bytes_out")
        yield _per_peer("diloco_peer_wire_received_bytes", status["peers"], "wire_bytes_in")
        yield _per_peer("diloco_peer_rtt_seconds", status["peers"], "rtt_seconds")
        yield _per_peer("diloco_peer_bulk_connections", status["peers"], "bulk_connections")
        yield from _budget(status["budget"])
        versions = GaugeMetricFamily("diloco_fragment_version", "version applied", labels=["fragment"])
        for index, version in enumerate(status["versions"]):
            versions.add_metric([str(index)], version)
        yield versions
        rejections = CounterMetricFamily("diloco_rejections", "input refused", labels=["peer", "reason"])
        for row in status["rejections"]:
            rejections.add_metric([row["peer"], row["reason"]], row["count"])
        yield rejections


def _gauges(values: Mapping[str, float]) -> Iterable[Metric]:
    for name, value in values.items():
        yield GaugeMetricFamily(name, name.replace("_", " "), value=float(value))


def _counters(values: Mapping[str, float]) -> Iterable[Metric]:
    for name, value in values.items():
        yield CounterMetricFamily(name, name.replace("_", " "), value=float(value))


def _budget(budget: Mapping[str, Any]) -> Iterable[Metric]:
    """Ceilings (no sample: no limit), shares, and bytes wanted and used by peer and lane."""
    ceilings = GaugeMetricFamily("diloco_budget_ceiling_bytes_per_second", "of the region", labels=["direction"])
    for direction in ("egress", "ingress"):
        if budget[f"{direction}_bytes_per_s"] is not None:
            ceilings.add_metric([direction], budget[f"{direction}_bytes_per_s"])
    yield ceilings
    yield from _counters(
        {"diloco_budget_allowed_bytes": budget["allowed_bytes"], "diloco_budget_used_bytes": budget["used_bytes"]}
    )
    limits = GaugeMetricFamily("diloco_peer_budget_bytes_per_second", "what a peer may get or send", labels=_SHARE)
    wanted = CounterMetricFamily("diloco_lane_wanted_bytes", "asked to be sent, on the wire", labels=_LANE)
    used = CounterMetricFamily("diloco_lane_used_bytes", "sent, on the wire", labels=_LANE)
    other = CounterMetricFamily("diloco_peer_correction_bytes", "acknowledgements and such", labels=["peer"])
    for peer, row in budget["peers"].items():
        for direction, key in (("egress", "egress_bytes_per_s"), ("ingress", "granted_bytes_per_s")):
            if row[key] is not None:
                limits.add_metric([peer, direction], row[key])
        other.add_metric([peer], row["correction_bytes"])
        for lane, use in row["lanes"].items():
            wanted.add_metric([peer, lane], use["wanted_bytes"])
            used.add_metric([peer, lane], use["used_bytes"])
    yield from (limits, wanted, used, other)


def _per_peer(name: str, peers: Iterable[Mapping[str, Any]], key: str) -> Metric:
    family = GaugeMetricFamily(name, name.replace("_", " "), labels=["peer"])
    for peer in peers:
        if peer[key] is not None:
            family.add_metric([peer["name"]], float(peer[key]))
    return family
