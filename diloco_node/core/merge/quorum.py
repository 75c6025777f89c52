"""Open the round now, or wait: quorum and the adaptive grace window, with the reason for every answer.

When enough learners are due, waiting a little longer is free as long as the round still ends within the overlap of tau
steps. So the window is a part of that slack, at least what reports usually spread, at most a step or two round trips.

Source: Decoupled DiLoCo (arXiv 2604.21428), equation 3 and section 5.1. The lower and the upper limit are ours; without
a grace window quality collapses there (table 5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.types import RunSettings

_NAMES_SHOWN_MAX: Final = 4
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LearnerDue:
    """A live, reachable learner. due_at_ns: when the leader learnt that it is due for a fragment; None if it is not.

    is_leaving: its machine is about to be taken away: the round in which it is due can't wait for others.
    """

    name: str
    due_at_ns: int | None
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Times that the leader has measured; 0 where it knows nothing yet.

    step_time_ns: median of the live learners' moving averages. rtt_ns: largest round-trip time to one of them.
    quorum_time_ns: usual time from the first learner due to the quorum. spread_p99_ns: from there to the last learner.
    sync_time_ns: usual time from opening a round to its commit.
    """

    step_time_ns: int = 0
    quorum_time_ns: int = 0
    sync_time_ns: int = 0
    spread_p99_ns: int = 0
    rtt_ns: int = 0


@dataclass(frozen=True, slots=True)
class OpenDecision:
    """The answer: whether to open the round now, and why, in one line for log, status and dashboard.

    wake_at_ns: ask again then even if nothing happens; None if only an event can change the answer.
    """

    open: bool
    wake_at_ns: int | None
    reason: str


def p99(samples: Collection[int]) -> int:
    """The smallest sample that at least 99 % of the samples do not exceed; 0 if there are none."""
    rank = -(-99 * len(samples) // 100)
    return sorted(samples)[rank - 1] if samples else 0


def quorum_size(live: int, quorum_min: int) -> int:
    """Learners, at least 1, that must be due before the grace window starts.

    quorum_min: 0 means a majority of the live ones. More than are alive means all: a death must not stop the merging.
    """
    return max(1, min(quorum_min, live) if quorum_min > 0 else live // 2 + 1)


def grace_ns(timing: RoundTiming, *, overlap_steps: int, gamma: float) -> int:
    """How long to wait for the others once the quorum is due.

    `slack = tau * step_time - (quorum_time + sync_time)`; `gamma * slack`, at least the p99 of the spread of reports,
    at most max(one step, two round trips), never negative. The upper limit wins over the lower one.
    """
    slack_ns = overlap_steps * timing.step_time_ns - (timing.quorum_time_ns + timing.sync_time_ns)
    target_ns = max(slack_ns * round(gamma * 1000) // 1000, timing.spread_p99_ns)
    return max(0, min(target_ns, max(timing.step_time_ns, 2 * timing.rtt_ns)))


def decide_open(
    now_ns: int,
    learners: Sequence[LearnerDue],
    timing: RoundTiming,
    settings: RunSettings,
    *,
    not_before_ns: int = 0,
    rounds_in_flight: int = 0,
) -> OpenDecision:
    """Whether the round of one fragment opens now.

    The window starts when the last learner of the quorum became due, so the answer depends on nothing but the
    arguments: a new leader with the same facts answers the same.

    learners: all live, reachable ones. not_before_ns: pacing, from `schedule.earliest_open_ns`.
    rounds_in_flight: rounds open on other fragments.
    """
    due = sorted((learner.due_at_ns, learner.name) for learner in learners if learner.due_at_ns is not None)
    late = sorted(learner.name for learner in learners if learner.due_at_ns is None)
    leavers = sorted(learner.name for learner in learners if learner.is_leaving and learner.due_at_ns is not None)
    quorum = 1 if leavers else quorum_size(len(learners), settings.quorum_min)
    if len(due) < quorum:
        names = f" ({_join_names(sorted(name for _, name in due))})" if due else ""
        reason = f"waits for quorum: {len(due)} of {len(learners)} learners due{names}, {quorum} needed"
        return OpenDecision(False, None, reason if learners else "no live learner")
    if rounds_in_flight >= settings.rounds_in_flight_max:
        reason = f"{rounds_in_flight} rounds in flight, at most {settings.rounds_in_flight_max} allowed"
        return OpenDecision(False, None, reason)
    if now_ns < not_before_ns and not leavers:
        reason = f"paced: {_ms(not_before_ns - now_ns)} until the next round may open"
        return OpenDecision(False, not_before_ns, reason)
    if leavers or not late:
        return OpenDecision(True, None, f"{_join_names(leavers)} leaves" if leavers else f"all {len(due)} due")
    window_ns = grace_ns(timing, overlap_steps=settings.overlap_steps, gamma=settings.grace_gamma)
    closes_ns = due[quorum - 1][0] + window_ns
    if now_ns < closes_ns:
        return OpenDecision(False, closes_ns, f"grace: {_ms(closes_ns - now_ns)} left for {_join_names(late)}")
    reason = f"{len(due)} of {len(learners)} due, grace of {_ms(window_ns)} is over, not due: {_join_names(late)}"
    return OpenDecision(True, None, reason)


def _ms(duration_ns: int) -> str:
    return f"{-(-duration_ns // _NS_PER_MS)} ms"


def _join_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:_NAMES_SHOWN_MAX])
    more = len(names) - _NAMES_SHOWN_MAX
    return f"{text} and {more} more" if more > 0 else text
