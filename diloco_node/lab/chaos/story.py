"""Story of a run, from samples of its regions and from its ledger: the figures of a report. Pure.

All times are nanoseconds from the beginning of the training; before it they are negative. The window is the training:
from 0 to its end, without the order to finish and what follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from statistics import median
from typing import Any, Final

from diloco_node.core.types import Entry, RoundBody
from diloco_node.lab.chaos.executor import StruckFault
from diloco_node.lab.chaos.fault_plan import VICTIMS
from diloco_node.lab.wan.topology import Outage
from diloco_node.numeric import NS_PER_S

MINUTE_NS: Final = 60 * NS_PER_S
DEADLY: Final = frozenset({"kill", "stop", "notice", "wipe"})


@dataclass(frozen=True, slots=True)
class RegionSample:
    """State of a region at one moment.

    Attributes:
        has_daemon: its daemon answers, and a learner is attached to it.
        has_learner: a learner lives, attached or not. is_stopped: it stands still (SIGSTOP).
        incarnation, step: of its learner, as last known. attached_step: where its process attached.
        commit_index, rounds, tokens_merged: of the run, as this region knows them.
    """

    has_daemon: bool
    has_learner: bool
    incarnation: int = 0
    step: int = 0
    attached_step: int = 0
    commit_index: int = 0
    rounds: int = 0
    tokens_merged: int = 0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class RunSample:
    """All members of the run at about one time."""

    at_ns: int
    regions: Mapping[str, RegionSample]

    def most(self, name: str) -> int:
        """The most of a count that any region knows: commit_index, rounds or tokens_merged."""
        return max(int(getattr(region, name)) for region in self.regions.values())


@dataclass(frozen=True, slots=True)
class MergeMember:
    """Share of a learner in a merge; `tokens` are weighted with the fragment's part of the model."""

    incarnation: int
    step_to: int
    tokens: float


@dataclass(frozen=True, slots=True)
class TimedMerge:
    """A committed round: when it was first seen, and who is in it."""

    at_ns: int
    members: Mapping[str, MergeMember]


class LifeState(StrEnum):
    """States of a region's learner."""

    TRAINING = "training"
    ALONE = "training without its daemon"
    CATCHING_UP = "catching up"
    STOPPED = "stopped"
    DEAD = "dead"
    OUTSIDE = "no member"


@dataclass(frozen=True, slots=True)
class LifeSpan:
    """Span of time in which a region was in one state."""

    from_ns: int
    to_ns: int
    state: LifeState


def timed_merges(entries: Iterable[Entry], samples: Sequence[RunSample], sizes: Sequence[int]) -> list[TimedMerge]:
    """The rounds of a ledger, each at the time of the first sample that knows it as committed; later ones are left out.

    entries: in the order of their index. samples: in the order of their time. sizes: values of each fragment.
    """
    merges, total, at = [], sum(sizes), 0
    for entry in entries:
        while at < len(samples) and samples[at].most("commit_index") < entry.index:
            at += 1
        if at == len(samples):
            break
        body = entry.body
        if isinstance(body, RoundBody):
            share = sizes[body.fragment] / total
            contributions = [member.contribution for member in body.members]
            members = {
                contribution.learner: MergeMember(
                    contribution.incarnation, contribution.step_to, share * contribution.tokens
                )
                for contribution in contributions
            }
            merges.append(TimedMerge(samples[at].at_ns, members))
    return merges


def training(
    samples: Sequence[RunSample],
    merges: Sequence[TimedMerge] | None,
    *,
    regions: Sequence[str],
    end_ns: int,
    final: tuple[int, float | None],
) -> dict[str, Any]:
    """Build the report's field `training`: the work within the window. Two demos are compared by it.

    Args:
        merges: all of them; None: not all are known any more, so figures of single regions are None.
        final: tokens merged in the whole run, and the final model's held-out loss.
    """
    tokens = _at(samples, end_ns, "tokens_merged") - _at(samples, 0, "tokens_merged")
    commits = _at(samples, end_ns, "rounds") - _at(samples, 0, "rounds")
    of_regions: dict[str, Any] = dict.fromkeys(("tokens_merged_of", "participation_of"))
    if merges is not None:
        inside = [merge for merge in merges if 0 < merge.at_ns <= end_ns]
        tokens_of = {
            name: [merge.members[name].tokens for merge in inside if name in merge.members] for name in regions
        }
        of_regions = {
            "tokens_merged_of": {name: round(sum(tokens)) for name, tokens in tokens_of.items()},
            "participation_of": {
                name: len(tokens) / len(inside) if inside else None for name, tokens in tokens_of.items()
            },
        }
    return {
        "seconds": end_ns / NS_PER_S,
        "tokens_merged": tokens,
        **of_regions,
        "commits": commits,
        "commits_per_minute": commits * MINUTE_NS / end_ns if end_ns else None,
        "longest_gap_seconds": longest_gap_ns(samples, end_ns) / NS_PER_S,
        "final": {"tokens": final[0], "val_loss": final[1]},
    }


def _at(samples: Sequence[RunSample], at_ns: int, name: str) -> int:
    """The most that was known at a time; 0 before the first sample."""
    return max((sample.most(name) for sample in samples if sample.at_ns <= at_ns), default=0)


def longest_gap_ns(samples: Sequence[RunSample], end_ns: int) -> int:
    """The longest time within the window in which no round was committed, as far as the samples tell."""
    times: list[int] = []
    rounds = _at(samples, 0, "rounds")
    for sample in samples:
        if 0 < sample.at_ns <= end_ns and sample.most("rounds") > rounds:
            times.append(sample.at_ns)
            rounds = sample.most("rounds")
    return int(longest_gap(times, 0, end_ns))


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest time within a window without any of these times, which lie in it and in order."""
    return max(later - sooner for sooner, later in pairwise([begin, *times, end]))


def merged_at_ns(samples: Sequence[RunSample], tokens: int) -> int:
    """When so many tokens were merged, as far as the samples tell; if they never were, the time of the last one."""
    last_ns = samples[-1].at_ns if samples else 0
    return next(
        (sample.at_ns for sample in samples if sample.at_ns > 0 and sample.most("tokens_merged") >= tokens), last_ns
    )


def compare(training: Mapping[str, Any], baseline: Mapping[str, Any], *, ends_by_tokens: bool) -> dict[str, Any]:
    """A run beside an undisturbed one, both as `training` has them: goodput, and the losses of the final models.

    Without figures of single regions in either run, None stands for theirs. Losses are compared at equal tokens only.

    ends_by_tokens: both runs end when the same number of tokens is merged.
    """
    tokens_of, baseline_tokens_of = training["tokens_merged_of"], baseline["tokens_merged_of"]
    own, undisturbed = training["final"], baseline["final"]
    # Both windows are as long, unless the runs end at a number of tokens.
    slower = baseline["seconds"] / training["seconds"] if training["seconds"] else 0.0
    has_losses = ends_by_tokens and own["val_loss"] is not None and undisturbed["val_loss"]
    return {
        "goodput": _ratio(training["tokens_merged"] * slower, baseline["tokens_merged"]),
        "goodput_of": (
            {
                name: _ratio(tokens_of[name] * slower, baseline_tokens_of[name])
                for name in sorted(tokens_of.keys() & baseline_tokens_of.keys())
            }
            if tokens_of is not None and baseline_tokens_of is not None
            else None
        ),
        "loss": {
            "tokens": own["tokens"],
            "own": own["val_loss"],
            "undisturbed": undisturbed["val_loss"],
            "undisturbed_tokens": undisturbed["tokens"],
            "change": own["val_loss"] / undisturbed["val_loss"] - 1,
        }
        if has_losses
        else None,
    }


def goodput_there(
    training: Mapping[str, Any], baseline: Mapping[str, Any], away_s: Mapping[str, float]
) -> float | None:
    """Goodput of the time in which learners were there; `away_s` is how long each region had none, in seconds."""
    baseline_tokens_of = baseline["tokens_merged_of"]
    if baseline_tokens_of is None or away_s.keys() != baseline_tokens_of.keys() or not baseline["seconds"]:
        return None
    there_s = {name: training["seconds"] - seconds for name, seconds in away_s.items()}
    tokens = sum(baseline_tokens_of[name] / baseline["seconds"] * seconds for name, seconds in there_s.items())
    return _ratio(training["tokens_merged"], tokens)


def _ratio(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def rejoin_ns(fault: StruckFault, samples: Sequence[RunSample], merges: Sequence[TimedMerge]) -> int | None:
    """Return the time from a death until a merge has steps that the region's learner made later; None: there is none.

    Steps that the learner had sent before it died may be merged after that, and do not count.
    """
    region = fault.fault.target.region
    samples_before = bisect_right(samples, fault.at_ns, key=lambda sample: sample.at_ns)
    before = samples[samples_before - 1].regions.get(region) if samples_before else None
    incarnation, step = (before.incarnation, before.step) if before is not None else (0, 0)
    lives_on = fault.fault.target.part == "daemon"
    for merge in islice(merges, bisect_right(merges, fault.at_ns, key=lambda merge: merge.at_ns), None):
        member = merge.members.get(region)
        if member is None:
            continue
        is_later = lives_on and member.incarnation == incarnation and member.step_to > step
        if member.incarnation > incarnation or is_later:
            return merge.at_ns - fault.at_ns
    return None


def rejoins(
    faults: Sequence[StruckFault], samples: Sequence[RunSample], merges: Sequence[TimedMerge]
) -> dict[str, dict[str, Any]]:
    """Per victim: how many deaths, and the seconds until the region was in a merge again.

    A region that was struck again before that is counted apart: its time is that of two deaths.
    """
    deaths = [fault for fault in faults if fault.fault.kind in DEADLY and not fault.is_missed]
    times_of: dict[str, list[int]] = {}
    for fault in sorted(deaths, key=lambda fault: fault.at_ns):
        times_of.setdefault(fault.fault.target.region, []).append(fault.at_ns)
    documents: dict[str, dict[str, Any]] = {}
    for victim in VICTIMS:
        victim_deaths = [fault for fault in deaths if fault.fault.target.part == victim]
        taken_ns, again, never = [], 0, 0
        for fault in victim_deaths:
            took_ns = rejoin_ns(fault, samples, merges)
            times = times_of[fault.fault.target.region]
            later = bisect_right(times, fault.at_ns)
            if later < len(times) and (took_ns is None or times[later] < fault.at_ns + took_ns):
                again += 1
            elif took_ns is None:
                never += 1
            else:
                taken_ns.append(took_ns)
        if victim_deaths:
            documents[victim] = {
                "count": len(victim_deaths),
                "seconds_median": median(taken_ns) / NS_PER_S if taken_ns else None,
                "seconds_most": max(taken_ns) / NS_PER_S if taken_ns else None,
                "struck_again": again,
                "never": never,
            }
    return documents


def outage_document(outage: Outage, samples: Sequence[RunSample], merges: Sequence[TimedMerge]) -> dict[str, Any]:
    """Build the report's field `outage`: what a region that was cut off did alone, and when it was merged again.

    outage: a cut of one region from all others. samples: some before and after it.
    """
    name, end_ns = outage.scope.region, outage.at_ns + outage.for_ns
    inside = [sample for sample in samples if outage.at_ns <= sample.at_ns <= end_ns]
    steps = [sample.regions[name].step for sample in inside] or [0]
    rounds = [
        max((region.rounds for peer, region in sample.regions.items() if peer != name), default=0) for sample in inside
    ] or [0]
    returns = (
        merge.at_ns - end_ns
        for merge in merges
        if merge.at_ns > end_ns and name in merge.members and merge.members[name].step_to > steps[-1]
    )
    back_ns = next(returns, None)
    return {
        "region": name,
        "seconds": outage.for_ns / NS_PER_S,
        "inner_steps": steps[-1] - steps[0],
        "commits_of_others": rounds[-1] - rounds[0],
        "seconds_to_merge": None if back_ns is None else back_ns / NS_PER_S,
    }


def life(region: str, samples: Sequence[RunSample], merges: Sequence[TimedMerge], *, end_ns: int) -> list[LifeSpan]:
    """Return a region's states within the window: spans without gaps, no two neighbours alike.

    After each time without learner or daemon, or at a standstill, it is catching up until a merge has steps that its
    learner made from then on.
    """
    merges_of_region = [(merge.at_ns, merge.members[region]) for merge in merges if region in merge.members]
    spans: list[LifeSpan] = []
    is_back, away_ns, at = True, 0, 0
    inside = [sample for sample in samples if sample.at_ns <= end_ns]
    for number, sample in enumerate(inside):
        to_ns = inside[number + 1].at_ns if number + 1 < len(inside) else end_ns
        region_sample = sample.regions.get(region)
        if region_sample is None:
            state = LifeState.OUTSIDE
            is_back, away_ns = False, sample.at_ns
        elif not region_sample.has_learner or region_sample.is_stopped or not region_sample.has_daemon:
            state = (
                LifeState.DEAD
                if not region_sample.has_learner
                else LifeState.STOPPED
                if region_sample.is_stopped
                else LifeState.ALONE
            )
            is_back, away_ns = False, sample.at_ns
        else:
            while not is_back and at < len(merges_of_region) and merges_of_region[at][0] <= sample.at_ns:
                at_ns, member = merges_of_region[at]
                is_later = (member.incarnation, member.step_to) > (
                    region_sample.incarnation,
                    region_sample.attached_step,
                )
                is_back = at_ns > away_ns and is_later
                at += 1
            state = LifeState.TRAINING if is_back else LifeState.CATCHING_UP
        from_ns = max(0, sample.at_ns)
        if to_ns <= from_ns:
            continue
        if spans and spans[-1].state is state:
            spans[-1] = LifeSpan(spans[-1].from_ns, to_ns, state)
        else:
            spans.append(LifeSpan(from_ns, to_ns, state))
    return spans
