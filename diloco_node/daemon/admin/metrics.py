"""Prometheus metrics, made from the status document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SHARE: Final = ("peer", "direction")
_LANE: Final = ("peer", "lane")


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
        yield from _families(
            GaugeMetricFamily,
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
                "diloco_daemon_tasks": status["tasks"],
            },
        )
        yield from _families(
            CounterMetricFamily,
            {
                "diloco_rounds_committed": status["rounds_committed"],
                "diloco_alarms": status["alarms"],
                "diloco_events": status["events"],
            },
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


def _families(family: Callable[..., Metric], values: Mapping[str, float]) -> Iterable[Metric]:
    return [family(name, name.replace("_", " "), value=float(value)) for name, value in values.items()]


def _budget(budget: Mapping[str, Any]) -> Iterable[Metric]:
    """Ceilings (no sample: no limit), shares, and bytes wanted and used by peer and lane."""
    ceilings = GaugeMetricFamily("diloco_budget_ceiling_bytes_per_second", "of the region", labels=["direction"])
    for direction in ("egress", "ingress"):
        if budget[f"{direction}_bytes_per_s"] is not None:
            ceilings.add_metric([direction], budget[f"{direction}_bytes_per_s"])
    yield ceilings
    yield from _families(
        CounterMetricFamily,
        {"diloco_budget_allowed_bytes": budget["allowed_bytes"], "diloco_budget_used_bytes": budget["used_bytes"]},
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
