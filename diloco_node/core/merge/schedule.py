"""When a fragment is due, which one goes first, and how fast rounds may follow each other.

All integers: steps of a learner, and nanoseconds. The leader asks these questions; learners never wait for the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.types import FragmentPosition, LearnerStatus

LEAD_STEPS: Final = 1
"""The ballot opens this many steps before H, so that the snapshot at the next step boundary falls on H."""

_AVERAGE_SHIFT: Final = 3
"""A new sample weighs 1/8: about the last ten steps decide."""

_OUTLIER_FACTOR: Final = 4
"""A sample counts as at most this times the average: one stall (a checkpoint, a SIGSTOP) must not slow the pace for
long, while a lasting slowdown is still followed within a few steps."""


def due_step(
    fragment: int, position: FragmentPosition, *, sync_every: int, fragments: int, lead: int = LEAD_STEPS
) -> int | None:
    """The learner's step from which on it is due for this fragment; None while it has not applied genesis.

    Before the first round, fragment p of P is due at `ceil((p + 1) * H / P)`, so that the cycle is staggered from the
    start; later `H - lead` steps after its mark (at least one). sync_every: H. fragments: P.
    """
    if position.base_version < 0:
        return None
    if position.base_version == 0 and position.cycle_start_step == 0:
        return -(-(fragment + 1) * sync_every // fragments)
    return position.cycle_start_step + max(1, sync_every - lead)


def overdue_steps(fragment: int, position: FragmentPosition, step: int, *, sync_every: int, fragments: int) -> int:
    """How many steps ago the learner became due; negative: in that many steps; -1 before it has applied genesis."""
    due = due_step(fragment, position, sync_every=sync_every, fragments=fragments)
    return -1 if due is None else step - due


def due_fragments(status: LearnerStatus, *, sync_every: int) -> frozenset[int]:
    """Fragments for which a learner is due, by its report."""
    fragments = len(status.positions)
    return frozenset(
        fragment
        for fragment, position in enumerate(status.positions)
        if overdue_steps(fragment, position, status.step, sync_every=sync_every, fragments=fragments) >= 0
    )


def next_news_step(positions: Sequence[FragmentPosition], step: int, *, sync_every: int) -> int | None:
    """The next step of a learner that changes what the leader may do; None before genesis.

    There a fragment becomes due, or has something to contribute for the first time. step: the last one reported.
    """
    news = [position.included_step + 1 for position in positions]
    for fragment, position in enumerate(positions):
        due = due_step(fragment, position, sync_every=sync_every, fragments=len(positions))
        if due is not None:
            news.append(due)
    return min((step_of_news for step_of_news in news if step_of_news > step), default=None)


def most_overdue_first(overdue: Iterable[tuple[int, int]]) -> list[int]:
    """Fragments in the order in which their rounds are opened: the most overdue first; ties go to the smaller index.

    overdue: (fragment, overdue steps) of the candidates; negative ones are not due and left out.
    """
    return [fragment for _, fragment in sorted((-steps, fragment) for fragment, steps in overdue if steps >= 0)]


def earliest_open_ns(last_open_ns: int | None, *, sync_every: int, fragments: int, step_time_ns: int) -> int:
    """The time before which no further round may be opened: at most one per `H * step_time / P`.

    Counted from the last opening (first ballot), not from a grid: what was missed in a stall is not made up in a burst.
    An unknown step time, 0, means no pacing.
    """
    if last_open_ns is None:
        return 0
    return last_open_ns + -(-sync_every * step_time_ns // fragments)


SLOWER_MAX: Final = 16
"""A learner is believed to be so many times slower than the median, but not more."""


def median_step_time_ns(averages_ns: Sequence[int]) -> int:
    """Median of the live learners' averages, those of 0 left out; 0 if none is known.

    For an even number the mean of the middle two counts, rounded down. If the larger one is beyond `SLOWER_MAX` times
    the smaller, it is not believed: the smaller counts.
    """
    averages = sorted(average for average in averages_ns if average > 0)
    if not averages:
        return 0
    lower, upper = averages[(len(averages) - 1) // 2], averages[len(averages) // 2]
    return lower if upper > SLOWER_MAX * lower else (lower + upper) // 2


def believed_step_time_ns(reported_ns: int, averages_ns: Sequence[int]) -> int:
    """Return a learner's reported step time, but not more than `SLOWER_MAX` times the others'; 0 means unknown.

    Rounds wait for members in proportion to this: without a bound one that reports a year would hold them up for years.
    """
    averages = sorted(average for average in averages_ns if average > 0)
    # The lower one of the middle two: of two learners one may be wrong.
    return max(0, min(reported_ns, SLOWER_MAX * averages[(len(averages) - 1) // 2])) if averages else 0


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """Moving average of durations, in integers.

    scaled_ns: the average times 8; the bits below a nanosecond keep the average from sticking.
    """

    samples: int = 0
    scaled_ns: int = 0

    @property
    def average_ns(self) -> int:
        """0 while nothing is known."""
        return self.scaled_ns >> _AVERAGE_SHIFT

    def after(self, sample_ns: int) -> MovingAverage:
        """The average with one more sample.

        The second sample replaces the first: a first step compiles, allocates and reads the disk.
        """
        if sample_ns < 0:
            raise ValueError(f"a duration can't be negative: {sample_ns} ns")
        if self.samples < 2 or self.scaled_ns == 0:
            return MovingAverage(self.samples + 1, sample_ns << _AVERAGE_SHIFT)
        counted_ns = min(sample_ns, _OUTLIER_FACTOR * max(1, self.average_ns))
        return MovingAverage(self.samples + 1, self.scaled_ns + counted_ns - self.average_ns)
