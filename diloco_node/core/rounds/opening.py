"""The next round to open, and why none is open: due learners, quorum, grace, pacing, measured times."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from diloco_node.core.merge.quorum import LearnerDue, RoundTiming, decide_open, p99, quorum_size
from diloco_node.core.merge.schedule import (
    MovingAverage,
    earliest_open_ns,
    median_step_time_ns,
    most_overdue_first,
    overdue_steps,
)
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.eligibility import LEAVING_NS, Eligibility, Reachability
from diloco_node.core.types import LearnerStatus

LEAVE_ROUNDS: Final = 2
"""Rounds of each fragment that begin without a quorum for a learner that leaves: one, and another if that fails."""


SPREADS_KEPT: Final = 128
"""Times from quorum to the last due learner that are remembered for their 99th percentile."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A round to open, and why. due_at_ns: when each due learner became due, sorted. learners: live ones, due or not.

    is_last: it is the run's last round of this fragment. leavers: learners for which it is opened early.
    """

    fragment: int
    reason: str
    due_at_ns: tuple[int, ...] = ()
    learners: int = 0
    is_last: bool = False
    leavers: tuple[str, ...] = ()


class Opener:
    """Remembers when each learner became due, and decides which round to open.

    Attributes:
        reason: why no round is opened now, in words; empty when one was.
        wake_at_ns: when to ask again even if nothing happens; None: only an event changes the answer.
    """

    def __init__(self, context: RoundContext) -> None:
        self.reason = ""
        self.wake_at_ns: int | None = None
        self._fragments = len(context.fragments)
        self._history, self._liveness = context.history, context.liveness
        self._due: dict[int, dict[str, int]] = {fragment: {} for fragment in range(self._fragments)}
        self._last_open_ns: int | None = None
        self._quorum_time = MovingAverage()
        self._sync_time = MovingAverage()
        self._spreads_ns: deque[int] = deque(maxlen=SPREADS_KEPT)
        # Per learner that leaves, when rounds were opened early for it. Its incarnation is its own word.
        self._leave_rounds: dict[str, list[int]] = {}

    def on_status(self, region: str, status: LearnerStatus | None, *, now_ns: int) -> bool:
        """Take a report (None: the learner is gone); whether it is due for other fragments than before."""
        is_news = False
        for fragment, due in self._due.items():
            is_due = status is not None and self._overdue(fragment, status) >= 0
            if is_due is not (region in due):
                is_news = True
                if is_due:
                    due[region] = now_ns
                else:
                    del due[region]
        return is_news

    @property
    def last_open_ns(self) -> int:
        """When the last round was opened by this leader; 0 if none was."""
        return self._last_open_ns or 0

    def on_open(self, opening: Opening, *, now_ns: int) -> None:
        """Take an opened round: pace the next one, learn from this one."""
        self._last_open_ns = now_ns
        for name in opening.leavers:
            self._leave_rounds[name] = [*self._left_early(name, now_ns), now_ns]
        due = opening.due_at_ns
        if due:
            quorum = quorum_size(opening.learners, self._history.settings.quorum_min)
            quorum_ns = due[min(quorum, len(due)) - 1]
            self._quorum_time = self._quorum_time.after(quorum_ns - due[0])
            last_ns = due[-1] if len(due) == opening.learners else now_ns
            self._spreads_ns.append(last_ns - quorum_ns)

    def on_commit(self, sync_ns: int) -> None:
        """Take the time from opening to commit of a round that was opened here."""
        self._sync_time = self._sync_time.after(sync_ns)

    def timing(self, reachability: Reachability) -> RoundTiming:
        """Return the times that are measured now."""
        averages = [status.step_time_ns for _, status in self._statuses(reachability)]
        return RoundTiming(
            step_time_ns=median_step_time_ns(averages),
            quorum_time_ns=self._quorum_time.average_ns,
            sync_time_ns=self._sync_time.average_ns,
            spread_p99_ns=p99(self._spreads_ns),
            rtt_ns=max((self._liveness.rtt_ns(name) for name in reachability.learners), default=0),
        )

    def choose(
        self,
        reachability: Reachability,
        open_fragments: Collection[int],
        resting: Collection[int],
        eligibility: Eligibility,
        *,
        now_ns: int,
    ) -> Opening | None:
        """Return the round to open now, if any; else `reason` and `wake_at_ns` say what is waited for.

        The most overdue fragment goes first; one that waits for its grace window does not hold up the others. None is
        opened whose round is in flight, or that is resting.
        """
        self.wake_at_ns = None
        timing = self.timing(reachability)
        not_before_ns = earliest_open_ns(
            self._last_open_ns,
            sync_every=self._history.settings.sync_every,
            fragments=self._fragments,
            step_time_ns=timing.step_time_ns,
        )
        statuses = self._statuses(reachability)
        overdue = [
            (fragment, max((self._overdue(fragment, status) for name, status in statuses if name in due), default=-1))
            for fragment, due in self._due.items()
            if fragment not in open_fragments and fragment not in resting
        ]
        reasons = []
        for fragment in most_overdue_first(overdue):
            learners = self._learners(fragment, reachability, eligibility, now_ns)
            decision = decide_open(
                now_ns,
                learners,
                timing,
                self._history.settings,
                not_before_ns=not_before_ns,
                rounds_in_flight=len(open_fragments),
            )
            if decision.open:
                self.reason = ""
                due = sorted(learner.due_at_ns for learner in learners if learner.due_at_ns is not None)
                leavers = [learner.name for learner in learners if learner.is_leaving and learner.due_at_ns is not None]
                return Opening(fragment, decision.reason, tuple(due), len(learners), leavers=tuple(leavers))
            if decision.wake_at_ns is not None:
                self.wake_at_ns = min(self.wake_at_ns or decision.wake_at_ns, decision.wake_at_ns)
            reasons.append(f"fragment {fragment}: {decision.reason}")
        self.reason = reasons[0] if reasons else "no fragment is due"
        return None

    def _statuses(self, reachability: Reachability) -> list[tuple[str, LearnerStatus]]:
        statuses = ((name, self._liveness.learner(name)) for name in reachability.learners)
        return [(name, status) for name, status in statuses if status is not None]

    def _overdue(self, fragment: int, status: LearnerStatus) -> int:
        """Return the steps since the learner became due; negative while it is not.

        A report may be older than the learner's apply of the last version, and count steps that are merged already.
        It makes nobody due: otherwise another round would follow each round at once.
        """
        position = status.positions[fragment]
        if position.base_version < self._history.versions[fragment]:
            return -1
        if status.leaving:
            # It stays only until its steps are merged: its fragments go before those of others.
            return self._history.settings.sync_every if status.step > position.included_step else -1
        return overdue_steps(
            fragment, position, status.step, sync_every=self._history.settings.sync_every, fragments=self._fragments
        )

    def _left_early(self, name: str, now_ns: int) -> list[int]:
        """When rounds were opened early for a learner, as long ago as one may take to leave."""
        return [at_ns for at_ns in self._leave_rounds.get(name, ()) if now_ns - at_ns < LEAVING_NS]

    def _learners(
        self, fragment: int, reachability: Reachability, eligibility: Eligibility, now_ns: int
    ) -> list[LearnerDue]:
        """Return live learners that have some version, due or not."""
        learners = []
        for name, status in self._statuses(reachability):
            if status.positions[fragment].base_version < 0:
                continue
            is_ended_life = status.incarnation < eligibility.incarnation_min(name)
            is_due = not is_ended_life and self._overdue(fragment, status) >= 0
            is_leaving = status.leaving and len(self._left_early(name, now_ns)) < LEAVE_ROUNDS * self._fragments
            learners.append(LearnerDue(name, self._due[fragment].get(name) if is_due else None, is_leaving=is_leaving))
        return learners
