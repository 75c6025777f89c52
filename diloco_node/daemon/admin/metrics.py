"""Prometheus metrics, made from the status document.

Names: `diloco_`, base units last, counters end in `_total`, ratios in `_ratio`. Unknown facts have no sample. Labels
are peers, fragments, lanes, phases and such: bounded by the run. A sum over regions makes sense, but where HELP says
that every region has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco_node import __version__
from diloco_node.health.reading import Document, number, rows, section, text

_SHARE: Final = ("peer", "direction")
_LANE: Final = ("peer", "lane")
_SAME: Final = "; the same in every region, so take max and not sum"

# (name, help, where in the document); without its last part `_total` for counters, as the library adds it.
_GAUGES: Final = (
    ("diloco_commit_age_seconds", "since this region last saw a round committed", ("commit_age_seconds",)),
    ("diloco_failure_tolerance", "regions that may still fail before merging stops", ("health", "failure_tolerance")),
    ("diloco_run_step", f"steps of the run: those of its median learner{_SAME}", ("run", "step")),
    (
        "diloco_run_eta_seconds",
        f"until the run's end at the pace of the last ten minutes{_SAME}",
        ("run", "eta_seconds"),
    ),
    ("diloco_participation_ratio", "part of the merges that included this region's learner", ("participation",)),
    ("diloco_learner_step_seconds", "time of an inner step", ("learner", "step_seconds")),
    ("diloco_learner_loss", "training loss of the last report that had one", ("learner", "loss")),
    ("diloco_learner_tokens_per_second", "in the last half minute", ("learner", "current_tokens_per_second")),
    ("diloco_learner_report_age_seconds", "since the learner last reported a step", ("learner", "report_age_seconds")),
    ("diloco_learner_tokens_carried", "trained, neither merged nor discarded yet", ("token_account", "carried")),
    ("diloco_ledger_term", f"how many elections there were{_SAME}", ("term",)),
    ("diloco_ledger_commit_index", f"entries that a majority has{_SAME}", ("commit_index",)),
    ("diloco_ledger_applied_index", "entries that this region has applied", ("applied_index",)),
    ("diloco_stripes_buffered_bytes", "of stripes in the daemon's memory", ("buffered_bytes",)),
    ("diloco_daemon_tasks", "running in the daemon's event loop", ("tasks",)),
    ("diloco_disk_free_bytes", "where the state folder is", ("disk", "free_bytes")),
    ("diloco_certificate_end_timestamp_seconds", "when this region's ends", ("certificate", "expires_unix")),
)
_COUNTERS: Final = (
    ("diloco_learner_steps", "inner steps of this region's learner in all its lives", ("inner_steps",)),
    ("diloco_learner_tokens", "trained by this region's learner in all its lives", ("tokens",)),
    ("diloco_learner_blocked_seconds", "that training loops spent inside step()", ("learner_blocked_seconds",)),
    ("diloco_learner_restarts", "lives of the learner's process but the first", ("learner_process", "restarts")),
    ("diloco_learner_crashes", "ends of the learner's process with an error", ("learner_process", "crashes")),
    ("diloco_rounds_committed", f"rounds in the ledger{_SAME}", ("rounds_committed",)),
    ("diloco_digest_differences", "unequal bytes at equal versions; must stay 0", ("digest_differences",)),
    ("diloco_alarms", "notes of the daemon that are alarms", ("alarms",)),
    ("diloco_events", "events that the daemon's core has handled", ("events",)),
)
_PEER_GAUGES: Final = (
    ("diloco_peer_rtt_seconds", "round trip of the control lane", "rtt_seconds"),
    ("diloco_peer_bulk_connections", "connections that carry bulk to this peer", "bulk_connections"),
    ("diloco_peer_applied_index", "ledger entries that the peer says it has applied", "applied_index"),
)
_STANDINGS: Final = (
    ("diloco_contribution_tokens_per_step", f"as the region's learner counts them{_SAME}", "tokens_per_step"),
    ("diloco_contribution_weight_ratio", f"part of the weight of the last rounds{_SAME}", "weight_share"),
    ("diloco_contribution_cosine", "with the mean of the others, in what was reduced here", "cosine"),
)
_PEER_COUNTERS: Final = (
    ("diloco_peer_wire_sent_bytes", "on the wire to this peer, with all overhead", "wire_bytes_out"),
    ("diloco_peer_wire_received_bytes", "on the wire from this peer, with all overhead", "wire_bytes_in"),
)


class StatusCollector(Collector):
    """Prometheus metrics made from the status document, so that both always say the same."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """A sample for each known fact."""
        status = self._status()
        yield _build(status)
        yield _alerts(status)
        yield from _single(GaugeMetricFamily, _GAUGES, status)
        yield from _single(CounterMetricFamily, _COUNTERS, status)
        if status["state"] == "starting":
            return
        yield _gauge("diloco_learner_attached", "1 while a learner is attached", status["learner"] is not None)
        yield _gauge("diloco_ledger_is_leader", "1 in the region that leads", status["role"] == "leader")
        yield _gauge("diloco_rounds_open", "rounds on their way, as seen here", len(status["rounds"]))
        yield _tokens(section(status, "token_account"))
        yield _phases(section(status, "phase_seconds"))
        yield _fragments(status)
        yield from _labelled(GaugeMetricFamily, _STANDINGS, "region", "region", rows(status, "standings"))
        yield from _peers(rows(status, "peers"))
        yield from _budget(status["budget"])
        rejections = CounterMetricFamily("diloco_rejections", "input that was refused", labels=["peer", "reason"])
        for row in status["rejections"]:
            rejections.add_metric([row["peer"], row["reason"]], row["count"])
        yield rejections


def _build(status: Document) -> Metric:
    info = GaugeMetricFamily("diloco_build_info", "always 1; what runs here", labels=["version", "region", "run"])
    info.add_metric([__version__, text(status, "region"), text(status, "run_id")], 1.0)
    return info


def _alerts(status: Document) -> Metric:
    family = GaugeMetricFamily("diloco_alerts", "alerts that hold now, see docs/alerts.md", labels=["code", "severity"])
    counts: dict[tuple[str, str], int] = {}
    for alert in rows(section(status, "health"), "alerts"):
        key = text(alert, "code"), text(alert, "severity")
        counts[key] = counts.get(key, 0) + 1
    for (code, severity), count in sorted(counts.items()):
        family.add_metric([code, severity], count)
    return family


def _single(
    family: Callable[..., Metric], table: Sequence[tuple[str, str, tuple[str, ...]]], status: Document
) -> Iterable[Metric]:
    for name, meaning, (*folders, key) in table:
        entry = status
        for folder in folders:
            entry = section(entry, folder)
        value = number(entry, key)
        if value is not None:
            yield family(name, meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=float(value))


def _tokens(account: Document) -> Metric:
    family = CounterMetricFamily("diloco_run_tokens", f"in the ledger, of the whole run{_SAME}", labels=["state"])
    for state in ("merged", "discarded"):
        value = number(account, f"run_{state}")
        if value is not None:
            family.add_metric([state], value)
    return family


def _phases(document: Document) -> Metric:
    meaning = "time that committed rounds spent in each phase, as this region saw it"
    family = HistogramMetricFamily("diloco_round_phase_seconds", meaning, labels=["phase"])
    for phase in document:
        row = section(document, phase)
        family.add_metric([phase], [(str(bound), count) for bound, count in row["buckets"]], row["sum_seconds"])
    return family


def _fragments(status: Document) -> Metric:
    versions = GaugeMetricFamily("diloco_fragment_version", "version applied here", labels=["fragment"])
    for index, version in enumerate(status["versions"]):
        versions.add_metric([str(index)], version)
    return versions


def _peers(peers: Sequence[Document]) -> Iterable[Metric]:
    up = GaugeMetricFamily("diloco_peer_link_up", "1 while both lanes to the peer are there", labels=["peer"])
    alive = GaugeMetricFamily("diloco_peer_alive", "1 while the peer's heartbeats arrive", labels=["peer"])
    for peer in peers:
        up.add_metric([text(peer, "name")], float(text(peer, "link") == "up"))
        alive.add_metric([text(peer, "name")], float(peer.get("is_alive") is True))
    yield from (up, alive)
    for family, table in ((GaugeMetricFamily, _PEER_GAUGES), (CounterMetricFamily, _PEER_COUNTERS)):
        yield from _labelled(family, table, "peer", "name", peers)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Sequence[tuple[str, str, str]],
    label: str,
    field: str,
    documents: Sequence[Document],
) -> Iterable[Metric]:
    for name, meaning, key in table:
        metric = family(name, meaning, labels=[label])
        for document in documents:
            value = number(document, key)
            if value is not None:
                metric.add_metric([text(document, field)], value)
        yield metric


def _budget(budget: Mapping[str, Any]) -> Iterable[Metric]:
    """Ceilings (no sample: no limit), shares, and bytes wanted and used by peer and lane."""
    meaning = "of the region, all peers together; no sample: no limit"
    ceilings = GaugeMetricFamily("diloco_budget_ceiling_bytes_per_second", meaning, labels=["direction"])
    for direction in ("egress", "ingress"):
        if budget[f"{direction}_bytes_per_s"] is not None:
            ceilings.add_metric([direction], budget[f"{direction}_bytes_per_s"])
    yield ceilings
    allowance_bytes, used_of_it = budget["allowed_bytes"], budget["used_bytes"]
    yield CounterMetricFamily("diloco_budget_allowed_bytes", "that the budget had room for", value=allowance_bytes)
    yield CounterMetricFamily("diloco_budget_used_bytes", "sent under the budget", value=used_of_it)
    limits = GaugeMetricFamily("diloco_peer_budget_bytes_per_second", "what a peer may get or send", labels=_SHARE)
    demand = CounterMetricFamily("diloco_lane_wanted_bytes", "asked to be sent, on the wire", labels=_LANE)
    usage = CounterMetricFamily("diloco_lane_used_bytes", "sent, on the wire", labels=_LANE)
    corrections = CounterMetricFamily("diloco_peer_correction_bytes", "acknowledgements and such", labels=["peer"])
    for peer, row in budget["peers"].items():
        for direction, key in (("egress", "egress_bytes_per_s"), ("ingress", "granted_bytes_per_s")):
            if row[key] is not None:
                limits.add_metric([peer, direction], row[key])
        corrections.add_metric([peer], row["correction_bytes"])
        for lane, use in row["lanes"].items():
            demand.add_metric([peer, lane], use["wanted_bytes"])
            usage.add_metric([peer, lane], use["used_bytes"])
    yield from (limits, demand, usage, corrections)
