"""Why is it slow, why does nobody merge, why is this region behind: answered from status documents.

Every figure is taken from a document or computed from such, and `basis` says how. What can't be computed is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.critical_path import CriticalPath, cost_of, critical_path, last_rounds
from diloco_node.health.health_summary import joint_health, said_of_region
from diloco_node.health.reading import Document, duration, number, part, rows, text

TRIPS: Final = 4
"""Round trips that a round takes over a link of the leader: ballot, decision, merged stripes, entry."""

TRIPS_ASIDE: Final = 1
"""Over another link: a stripe one way, its sum the other way."""

SLOWER: Final = 1.25
"""A learner is slow when its steps take so many times the median of the others."""

COSTS: Final = 0.05
"""A wait that costs less of a round is said without a remedy."""

BEHIND_STEPS: Final = 0.9
BEHIND_ENTRIES: Final = 4
JOINED_LOW: Final = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Attributes:
        topic: "merging", "rounds", "link", "budget", "learner" or "region". regions: whom it is about; none: all.
        text: what is the case. change: what would help; "" if nothing is known to.
        saves_seconds: of each round, where that can be computed. basis: how.
    """

    topic: str
    regions: tuple[str, ...]
    text: str
    change: str = ""
    saves_seconds: float | None = None
    basis: str = ""


def explain(documents: Sequence[Document], region: str = "") -> dict[str, Any]:
    """The answer, ready for JSON: the health line, where rounds spend their time, and the causes, the gravest first.

    Args:
        documents: of the regions that answer. region: leave out what is about others.
    """
    known = [one for one in documents if text(one, "state")]
    path = critical_path(known)
    found = [*_merging(known), *_rounds(known, path), *_links(known, path), *_budget(known), *_learners(known)]
    found += _behind(known)
    if region:
        found = [one for one in found if not one.regions or region in one.regions]
    own = [one for one in known if text(one, "region") == region]
    return {
        "line": text(joint_health(own or known), "line"),
        "region": region,
        "critical_path": None if path is None else dataclasses.asdict(path),
        "findings": [dataclasses.asdict(one) for one in found],
    }


def region_names(documents: Sequence[Document]) -> list[str]:
    """Every region that the documents speak of, sorted."""
    peers = {text(peer, "name") for one in documents for peer in rows(one, "peers")}
    return sorted((peers | {text(one, "region") for one in documents}) - {""})


def _merging(documents: Sequence[Document]) -> Iterator[Finding]:
    """Why no round commits, by the alerts that stop rounds, and by what open rounds wait for."""
    for alert in rows(joint_health(documents), "alerts"):
        code, region = text(alert, "code"), text(alert, "region")
        if code in (kinds.NO_MAJORITY.code, kinds.NO_COMMIT.code):
            hint = text(alert, "hint") if code == kinds.NO_MAJORITY.code else ""  # which is to ask this
            yield Finding("merging", (), said_of_region(alert), hint)
        elif code in (kinds.CUT_OFF.code, kinds.DISK_REFUSED.code):
            yield Finding("merging", (region,), said_of_region(alert), text(alert, "hint"))
    for document in documents:
        if document.get("role") != "leader":
            continue
        for one in rows(document, "rounds"):
            what = f"fragment {one.get('fragment')} to version {one.get('version')} {text(one, 'reason')}"
            yield Finding("merging", (), what, basis=f"open since {duration(number(one, 'open_seconds') or 0.0)}")
        if not rows(document, "rounds") and text(document, "reason"):
            yield Finding("merging", (), f"no round is open: {text(document, 'reason')}")


def _rounds(documents: Sequence[Document], path: CriticalPath | None) -> Iterator[Finding]:
    if path is None or path.seconds <= 0:
        return
    spent = [(phase, seconds) for phase, seconds in path.phases if seconds]
    shares = ", ".join(
        f"{phase} {duration(seconds)} ({100 * seconds / path.seconds:.0f} %)" for phase, seconds in spent
    )
    failed = f"; {path.failed} further ballots failed" if path.failed else ""
    what = f"a round takes {duration(path.seconds)}: {shares}{failed}"
    yield Finding("rounds", (), what, basis=f"mean of the last {path.rounds} rounds, as {path.seen_from} saw them")
    if not path.waits:
        return
    (region, phase), count = path.waits[0]
    cost_s = cost_of(last_rounds(documents)[1], region, phase)
    basis = "" if cost_s is None else f"{duration(cost_s)} each: median of {phase} in them against the other rounds"
    what = f"{count} of {path.rounds} rounds waited for {region} in {phase}"
    saves_s = None if cost_s is None else cost_s * count / path.rounds
    is_dear = saves_s is None or saves_s > COSTS * path.seconds
    change = _HELPS.get(phase, _HELPS[""]).format(region=region) if is_dear else ""
    yield Finding("rounds", (region,), what, change, saves_s, basis)


_HELPS: Final = {
    "gather": "make {region} name its contribution sooner: shorter steps there, or more steps of overlap",
    "reduce": "give {region} more bandwidth, or choose a smaller codec",
    "commit": "look at the disk of {region} and its round trip",
    "apply": "look at processor and disk of {region}",
    "": "look at {region}",
}


def _links(documents: Sequence[Document], path: CriticalPath | None) -> Iterator[Finding]:
    """The pair whose round trips cost a round most, against the next one; and what waits to be sent."""
    leader = text(max(documents, key=lambda one: number(one, "term") or 0.0, default={}), "leader")
    costs: dict[tuple[str, ...], tuple[float, int, float]] = {}
    for document in documents:
        for peer in rows(document, "peers"):
            rtt_s = number(peer, "rtt_seconds")
            pair = tuple(sorted((text(document, "region"), text(peer, "name"))))
            if rtt_s is not None and text(peer, "link") == "up":
                trips = TRIPS if leader in pair else TRIPS_ASIDE
                costs[pair] = max((trips * rtt_s, trips, rtt_s), costs.get(pair, (0.0, 0, 0.0)))
    if costs:
        pair, (cost_s, trips, rtt_s) = max(sorted(costs.items()), key=lambda one: one[1])
        others = [one for other, (one, *_) in costs.items() if other != pair]
        # Round trips vary: those of now may be longer than all of the last rounds.
        is_part = path is not None and cost_s < path.seconds
        of_round = f" of {duration(path.seconds)} that a round takes" if path and is_part else ""
        what = f"the link that costs most is {pair[0]} to {pair[1]}: {duration(rtt_s)} there and back, "
        what += f"{duration(cost_s)}{of_round}"
        basis = f"round trips for each round: {trips}"
        basis += "; saved if it cost as much as the next one" if others else ""
        saves_s = cost_s - max(others) if others and is_part else None
        yield Finding("link", pair, what, saves_seconds=saves_s, basis=basis)
    for document in documents:
        yield from _backlog(document)


def _backlog(document: Document) -> Iterator[Finding]:
    peers = part(part(document, "budget"), "peers")
    for name in sorted(peers):
        row = part(peers, name)
        waiting, rate = number(row, "waiting_bytes") or 0.0, number(row, "egress_bytes_per_s")
        if rate and waiting > rate:  # more than a second's worth
            what = f"{waiting / 1e6:.1f} MB wait to be sent from {text(document, 'region')} to {name}"
            basis = f"{duration(waiting / rate)} at the budget of {8 * rate / 1e6:.1f} Mbit/s"
            change = "raise that budget, or choose a smaller codec or a longer H"
            yield Finding("budget", (text(document, "region"), name), what, change, basis=basis)


def _budget(documents: Sequence[Document]) -> Iterator[Finding]:
    for document in documents:
        warning = text(document, "budget_warning")
        if warning:
            yield Finding("budget", (text(document, "region"),), warning, "set one of the values in the line")


def _learners(documents: Sequence[Document]) -> Iterator[Finding]:
    for alert in rows(joint_health(documents), "alerts"):
        if text(alert, "code").startswith(("A-LEARNER", "A-LOSS")):
            yield Finding("learner", (text(alert, "region"),), said_of_region(alert), text(alert, "hint"))
    steps = {text(one, "region"): number(part(one, "learner"), "step_seconds") for one in documents}
    known = {name: step_s for name, step_s in steps.items() if step_s}
    for name, step_s in sorted(known.items()):
        others = [one for other, one in known.items() if other != name]
        if others and step_s > SLOWER * median(others):
            what = f"a step of {name} takes {duration(step_s)}, of the others {duration(median(others))}"
            basis = "a contribution waits for a step boundary: half a step on average"
            saves_s = (step_s - median(others)) / 2
            yield Finding(
                "learner", (name,), what, f"smaller steps in {name}: a smaller batch for each", saves_s, basis
            )


def _behind(documents: Sequence[Document]) -> Iterator[Finding]:
    """Regions that lack entries, versions, steps or merges, as far as one region knows all of that."""
    if not documents:
        return
    witness = max(documents, key=lambda one: number(one, "applied_index") or 0.0)
    applied = number(witness, "applied_index") or 0.0
    for peer in rows(witness, "peers"):
        known = number(peer, "applied_index")  # 0: nothing was heard of it yet
        behind = applied - known if known else 0.0
        if behind > BEHIND_ENTRIES:
            what = f"{text(peer, 'name')} has {behind:.0f} ledger entries still to apply"
            yield Finding(
                "region", (text(peer, "name"),), what, "its disk or its link is slow, or it has just come back"
            )
    for document in documents:
        fetching = rows(document, "fetching")
        if fetching:
            what = f"{text(document, 'region')} fetches {len(fetching)} versions that it lacks"
            yield Finding("region", (text(document, "region"),), what, "wait: it trains on meanwhile")
    names = sorted(part(witness, "steps_of"))
    steps = {name: step for name in names if (step := number(part(witness, "steps_of"), name))}
    middle = median(steps.values()) if steps else 0.0
    for name in names:  # who never made one is named by an alert, if it should
        if name in steps and steps[name] < BEHIND_STEPS * middle:
            what = f"{name} has made {steps[name]:.0f} steps, the median region {middle:.0f}"
            yield Finding("region", (name,), what, "its steps are slower, or it was away; its steps count all the same")
        joined = number(part(witness, "participation_of"), name)
        if joined is not None and joined < JOINED_LOW:
            what = f"{name} was in {100 * joined:.0f} % of the merges while its learner was there"
            yield Finding("region", (name,), what, "a longer grace window, or a faster link or learner there")
