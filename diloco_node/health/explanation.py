"""Causes of slow rounds, missing merges and regions that are behind, found in status documents.

Every figure is taken from a document or computed from such, and `basis` says how. Figures that can't be computed are
left out.
A finding's code is its topic: "merging", "machine", "rounds", "link", "budget", "learner" or "region".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import is_starved
from diloco_node.health.critical_path import CriticalPath, cost_of, critical_path, last_rounds
from diloco_node.health.finding import Finding, Mark
from diloco_node.health.health_summary import joint_alerts, joint_health
from diloco_node.health.reading import Document, duration, number, rows, section, text

TRIPS: Final = 4
"""Round trips that a round takes over a link of the leader: ballot, decision, merged stripes, entry."""

TRIPS_ASIDE: Final = 1
"""Over another link: a stripe one way, its sum the other way."""

SLOWER: Final = 1.25
"""A learner is slow when its steps take so many times the median of the others."""

COSTS: Final = 0.05
"""A wait that costs less of a round is reported without a remedy."""

BEHIND_STEPS: Final = 0.9
BEHIND_ENTRIES: Final = 4
JOINED_LOW: Final = 0.9

STOPPING: Final = (kinds.NO_COMMIT, kinds.NO_MAJORITY, kinds.CUT_OFF, kinds.DISK_REFUSED)
"""Alerts of what stops rounds from committing."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `why`, the gravest finding first. line: the health in one sentence. regions: see `explain`. path:
    where rounds spend their time; None without a committed round."""

    line: str
    regions: tuple[str, ...]
    path: CriticalPath | None
    findings: tuple[Finding, ...]

    def document(self) -> dict[str, Any]:
        """Describe the answer for JSON."""
        return {
            "line": self.line,
            "region": ", ".join(self.regions),
            "critical_path": None if self.path is None else dataclasses.asdict(self.path),
            "findings": [
                {
                    "topic": finding.code,
                    "regions": finding.regions,
                    "text": finding.text,
                    "change": finding.hint,
                    "saves_seconds": finding.saves_seconds,
                    "basis": finding.basis,
                }
                for finding in self.findings
            ],
        }


def explain(documents: Sequence[Document], regions: Sequence[str] = ()) -> Explanation:
    """Find the causes of slow or missing merges. regions: leave out findings about other regions only; empty: none."""
    documents = [document for document in documents if text(document, "state")]
    path = critical_path(documents)
    alerts = joint_alerts(documents)
    findings = [
        *_of_alerts(alerts, "merging", *(kind.code for kind in STOPPING)),
        *_open_rounds(documents),
        # There the daemon waits for a processor: no link and no budget is to blame.
        *_of_alerts(alerts, "machine", kinds.STARVED.code),
        *_of_alerts(alerts, "merging", kinds.MERGES_LATE.code),
        *_rounds(documents, path),
        *_links(documents, path),
        *_budget(documents),
        *_of_alerts(alerts, "learner", "A-LEARNER", "A-LOSS"),
        *_slow_learners(documents),
        *_behind(documents),
    ]
    documents_of_regions = [document for document in documents if text(document, "region") in regions]
    return Explanation(
        text(joint_health(documents_of_regions or documents), "line"),
        tuple(regions),
        path,
        tuple(
            finding for finding in findings if not regions or not finding.regions or set(regions) & set(finding.regions)
        ),
    )


def region_names(documents: Sequence[Document]) -> list[str]:
    """Every region that the documents name, sorted."""
    peers = {text(peer, "name") for document in documents for peer in rows(document, "peers")}
    return sorted((peers | {text(document, "region") for document in documents}) - {""})


def _cause(
    topic: str,
    regions: tuple[str, ...],
    line: str,
    hint: str = "",
    *,
    saves_seconds: float | None = None,
    basis: str = "",
) -> Finding:
    mark = Mark.WARNING if hint else Mark.INFO
    return Finding(mark, topic, line, regions, hint, basis=basis, saves_seconds=saves_seconds)


def _of_alerts(alerts: Sequence[Finding], topic: str, *codes: str) -> Iterator[Finding]:
    """Make causes of alerts whose codes begin so."""
    for alert in alerts:
        if alert.code.startswith(codes):
            # The hint of these alerts is to run `why`.
            hint = "" if alert.code in (kinds.NO_COMMIT.code, kinds.MERGES_LATE.code) else alert.hint
            regions = () if alert.code in (kinds.NO_COMMIT.code, kinds.NO_MAJORITY.code) else alert.regions
            line = alert.named_text
            yield dataclasses.replace(alert, code=topic, text=line, regions=regions, hint=hint, command="")


def _open_rounds(documents: Sequence[Document]) -> Iterator[Finding]:
    """Name what open rounds wait for."""
    for document in documents:
        if document.get("role") != "leader":
            continue
        for round_ in rows(document, "rounds"):
            line = f"fragment {round_.get('fragment')} to version {round_.get('version')} {text(round_, 'reason')}"
            yield _cause("merging", (), line, basis=f"open since {duration(number(round_, 'open_seconds') or 0.0)}")
        if not rows(document, "rounds") and text(document, "reason"):
            yield _cause("merging", (), f"no round is open: {text(document, 'reason')}")


def _rounds(documents: Sequence[Document], path: CriticalPath | None) -> Iterator[Finding]:
    if path is None or path.seconds <= 0:
        return
    shares = ", ".join(
        f"{phase} {duration(seconds)} ({100 * seconds / path.seconds:.0f} %)"
        for phase, seconds in path.phases
        if seconds
    )
    failures = f"; {path.failed} further ballots failed" if path.failed else ""
    line = f"a round takes {duration(path.seconds)}: {shares}{failures}"
    yield _cause("rounds", (), line, basis=f"mean of the last {path.rounds} rounds, as {path.seen_from} saw them")
    if not path.waits:
        return
    (region, phase), count = path.waits[0]
    cost_s = cost_of(last_rounds(documents)[1], region, phase)
    basis = "" if cost_s is None else f"{duration(cost_s)} each: median of {phase} in them against the other rounds"
    line = f"{count} of {path.rounds} rounds waited for {region} in {phase}"
    saves_s = None if cost_s is None else cost_s * count / path.rounds
    is_dear = saves_s is None or saves_s > COSTS * path.seconds
    help_text = kinds.STARVED.hint if region in _starved_regions(documents) else _HELPS.get(phase, _HELPS[""])
    hint = help_text.format(region=region) if is_dear else ""
    yield _cause("rounds", (region,), line, hint, saves_seconds=saves_s, basis=basis)


_BACKLOG_HELPS: Final = "raise that budget, or choose a smaller codec or a longer H"


def _starved_regions(documents: Sequence[Document]) -> set[str]:
    return {text(document, "region") for document in documents if is_starved(document)}


_HELPS: Final = {
    "gather": "make {region} name its contribution sooner: shorter steps there, or more steps of overlap",
    "reduce": "give {region} more bandwidth, or choose a smaller codec",
    "commit": "look at the disk of {region} and its round trip",
    "apply": "look at processor and disk of {region}",
    "": "look at {region}",
}


def _links(documents: Sequence[Document], path: CriticalPath | None) -> Iterator[Finding]:
    """Compare the pair whose round trips cost a round most with the next one, and name bytes that wait to be sent."""
    costs = _link_costs(documents)
    dearest_s = max((cost_s for cost_s, *_ in costs.values()), default=0.0)
    if costs and (path is None or dearest_s > COSTS * path.seconds):
        pair, (cost_s, trips, rtt_s) = max(sorted(costs.items()), key=lambda entry: entry[1])
        next_s = max((cost for candidate, (cost, *_) in costs.items() if candidate != pair), default=None)
        # Round trips vary: those of now may be longer than all of the last rounds.
        is_within = path is not None and cost_s < path.seconds
        of_round = f" of {duration(path.seconds)} that a round takes" if path and is_within else ""
        line = f"the link that costs most is {pair[0]} to {pair[1]}: {duration(rtt_s)} there and back, "
        line += f"{duration(cost_s)}{of_round}"
        basis = f"round trips for each round: {trips}"
        basis += "" if next_s is None else "; saved if it cost as much as the next one"
        saves_s = cost_s - next_s if next_s is not None and is_within else None
        yield _cause("link", pair, line, saves_seconds=saves_s, basis=basis)
    for document in documents:
        yield from _backlog(document)


def _link_costs(documents: Sequence[Document]) -> dict[tuple[str, ...], tuple[float, int, float]]:
    """By pair of regions: seconds that its round trips cost a round, how many there are, and seconds of one.

    A round trip to a machine that is starved is one of its processor: such pairs are left out.
    """
    starved_regions = _starved_regions(documents)
    leader = text(max(documents, key=lambda document: number(document, "term") or 0.0, default={}), "leader")
    costs: dict[tuple[str, ...], tuple[float, int, float]] = {}
    for document in documents:
        for peer in rows(document, "peers"):
            rtt_s = number(peer, "rtt_seconds")
            pair = tuple(sorted((text(document, "region"), text(peer, "name"))))
            if rtt_s is not None and text(peer, "link") == "up" and not starved_regions.intersection(pair):
                trips = TRIPS if leader in pair else TRIPS_ASIDE
                costs[pair] = max((trips * rtt_s, trips, rtt_s), costs.get(pair, (0.0, 0, 0.0)))
    return costs


def _backlog(document: Document) -> Iterator[Finding]:
    peers = section(section(document, "budget"), "peers")
    for name in sorted(peers):
        row = section(peers, name)
        waiting, rate = number(row, "waiting_bytes") or 0.0, number(row, "egress_bytes_per_s")
        if rate and waiting > rate:  # more than a second's worth
            line = f"{waiting / 1e6:.1f} MB wait to be sent from {text(document, 'region')} to {name}"
            basis = f"{duration(waiting / rate)} at the budget of {8 * rate / 1e6:.1f} Mbit/s"
            hint = kinds.STARVED.hint if is_starved(document) else _BACKLOG_HELPS
            yield _cause("budget", (text(document, "region"), name), line, hint, basis=basis)


def _budget(documents: Sequence[Document]) -> Iterator[Finding]:
    for document in documents:
        warning = text(document, "budget_warning")
        if warning:
            yield _cause("budget", (text(document, "region"),), warning, "set one of the values in the line")


def _slow_learners(documents: Sequence[Document]) -> Iterator[Finding]:
    steps_s = {text(document, "region"): number(section(document, "learner"), "step_seconds") for document in documents}
    times_s = {name: step_s for name, step_s in steps_s.items() if step_s}
    for name, step_s in sorted(times_s.items()):
        peer_times_s = [other_s for peer, other_s in times_s.items() if peer != name]
        if peer_times_s and step_s > SLOWER * median(peer_times_s):
            line = f"a step of {name} takes {duration(step_s)}, of the others {duration(median(peer_times_s))}"
            basis = "a contribution waits for a step boundary: half a step on average"
            saves_s = (step_s - median(peer_times_s)) / 2
            hint = f"smaller steps in {name}: a smaller batch for each"
            yield _cause("learner", (name,), line, hint, saves_seconds=saves_s, basis=basis)


def _behind(documents: Sequence[Document]) -> Iterator[Finding]:
    """Name regions that lack entries, versions, steps or merges, as the region that has applied most knows them."""
    if not documents:
        return
    witness = max(documents, key=lambda document: number(document, "applied_index") or 0.0)
    for peer in rows(witness, "peers"):
        name = text(peer, "name")
        index = number(peer, "applied_index")  # 0: nothing was heard of it yet
        behind = (number(witness, "applied_index") or 0.0) - index if index else 0.0
        if behind > BEHIND_ENTRIES:
            line = f"{name} has {behind:.0f} ledger entries still to apply"
            is_there = text(peer, "link") == "up" and peer.get("has_left") is not True
            hint = "its disk or its link is slow, or it has just come back" if is_there else "it is away: start it"
            yield _cause("region", (name,), line, hint)
    for document in documents:
        fetching = rows(document, "fetching")
        if fetching:
            line = f"{text(document, 'region')} fetches {len(fetching)} versions that it lacks"
            yield _cause("region", (text(document, "region"),), line, "wait: it trains on meanwhile")
    names = sorted(section(witness, "steps_of"))
    steps = {name: step for name in names if (step := number(section(witness, "steps_of"), name))}
    middle = median(steps.values()) if steps else 0.0
    for name in names:  # a region that never made a step has an alert, if it should make some
        if name in steps and steps[name] < BEHIND_STEPS * middle:
            line = f"{name} has made {steps[name]:.0f} steps, the median region {middle:.0f}"
            yield _cause("region", (name,), line, "its steps are slower, or it was away; its steps count all the same")
        participation = number(section(witness, "participation_of"), name)
        if participation is not None and participation < JOINED_LOW:
            line = f"{name} was in {100 * participation:.0f} % of the merges while its learner was there"
            yield _cause("region", (name,), line, "a longer grace window, or a faster link or learner there")
