"""Steps that no merge will ever include: each region finds those of its own learner, and the leader books them."""

from __future__ import annotations

from typing import Final

from diloco_node.core.rounds.claim_limits import STEPS_MAX, is_plausible_incarnation
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import Contribution, DiscardedBody, LearnerStatus
from diloco_node.numeric import NS_PER_S

REPORTED_MAX: Final = 64
"""Intervals in one report. The next report has further ones, once these are booked."""

BOOKING_MAX: Final = 256
"""Intervals in the leader's log that are not committed yet. Further ones are refused, and reported again."""

DEATHS_AT_ONCE: Final = 2
"""Incarnations of one region whose lost steps are booked at once: one interval per fragment and incarnation."""


class DiscardReporter:
    """Finds the lost steps of this region's learner: of dead incarnations, and what a living one threw away.

    ended: steps of each incarnation that has ended.
    """

    def __init__(self, context: RoundContext) -> None:
        self._region, self._fragments, self._history = context.region, len(context.fragments), context.history
        self._trained: dict[int, tuple[int, int]] = {}
        self.ended: dict[int, int] = {}
        self._learner: LearnerStatus | None = None
        self._seen: frozenset[tuple[int, int]] = frozenset()

    def on_attach(self, status: LearnerStatus, trained_before: tuple[tuple[int, int, int], ...]) -> None:
        """Take an attached learner's list of its dead incarnations: (incarnation, steps, tokens) each."""
        self._learner = status
        for incarnation, steps, tokens in trained_before:
            if incarnation < status.incarnation:
                self._trained[incarnation] = (steps, tokens)
                self.ended[incarnation] = steps

    def learner_changed(self, status: LearnerStatus | None) -> None:
        """Take the learner's report; None: it is gone."""
        self._learner = status

    def has_news(self) -> bool:
        """Whether the learner threw steps away since the last call: its next contribution waits for their booking."""
        if self._learner is None:
            return False
        marks = frozenset((body.fragment, body.step_to) for body in self._overwritten(self._learner))
        is_news = not marks <= self._seen
        self._seen = marks
        return is_news

    def bodies(self) -> tuple[DiscardedBody, ...]:
        """Return the lost steps that are not booked yet, by incarnation and fragment."""
        bodies: list[DiscardedBody] = []
        for incarnation, (steps, tokens) in sorted(self._trained.items()):
            if len(bodies) >= REPORTED_MAX:
                break
            due = self._history.account.discards_due(
                self._region,
                incarnation,
                steps=steps,
                tokens=tokens,
                fragments=self._fragments,
                reason="its learner ended before it was merged",
            )
            bodies.extend(due)
            if not due:
                # All its lost steps are booked, for good. A learner that dies often must not slow every heartbeat down.
                del self._trained[incarnation]
        if self._learner is not None:
            bodies.extend(self._overwritten(self._learner))
        return tuple(bodies[:REPORTED_MAX])

    def overbooked(self) -> str:
        """Describe lost steps in the ledger that the living learner has not made; empty if there are none.

        A leader lied while this region could not object, and the steps of this incarnation are merged no more.
        """
        if (learner := self._learner) is None:
            return ""
        for line in self._history.account.given_up_lines():
            if (line.learner, line.incarnation) == (self._region, learner.incarnation) and line.step_to > learner.step:
                steps = f"steps up to {line.step_to} of incarnation {line.incarnation} as lost"
                return f"the ledger has {steps} in fragment {line.fragment}, and the learner has made {learner.step}"
        return ""

    def _overwritten(self, learner: LearnerStatus) -> list[DiscardedBody]:
        """Return the steps that a living learner threw away when it applied a version.

        They are known only once the ledger has that version, which may include some of them.
        """
        bodies = []
        for fragment, position in enumerate(learner.positions):
            step, tokens = self._history.account.covered(self._region, learner.incarnation, fragment)
            is_known = position.base_version <= self._history.versions[fragment]
            if is_known and position.included_step > step:
                bodies.append(
                    DiscardedBody(
                        self._region,
                        learner.incarnation,
                        fragment,
                        step,
                        position.included_step,
                        max(0, position.included_tokens - tokens),
                        "overwritten by a version that does not include them",
                    )
                )
        return bodies


class DiscardDesk:
    """The leader's side: it books each interval once, and only when no merge can include any of its steps.

    A region may have `DEATHS_AT_ONCE` intervals per fragment booked at once. It earns one more each second, and one
    with each committed round, for `overwrite` throws steps away in every round. Refused intervals are reported again.
    """

    def __init__(self, history: RoundHistory) -> None:
        self._history = history
        self._booking: set[tuple[str, int, int]] = set()
        self._spent: dict[str, int] = {}
        self._earned_at_ns = 0

    def clear(self) -> None:
        """Forget the intervals in the log: this region leads no longer. The next one may still commit them."""
        self._booking.clear()

    def on_commit(self, body: DiscardedBody) -> None:
        """Take a committed interval."""
        self._booking.discard(_booking_key(body))

    def on_round(self) -> None:
        """Allow every region one more interval: a round was committed."""
        self._earn(1)

    def is_booking(self, contribution: Contribution) -> bool:
        """Whether steps of the same incarnation and fragment are in the log as discarded, but not committed yet."""
        return _booking_key(contribution) in self._booking

    def accept(self, body: DiscardedBody, *, now_ns: int) -> bool:
        """Count an interval as booked if it may go into the log now; return whether it may.

        The caller has checked that there is such a fragment, and that no open round includes the learner.
        """
        seconds = (now_ns - self._earned_at_ns) // NS_PER_S
        if seconds > 0:
            self._earn(seconds)
            self._earned_at_ns += seconds * NS_PER_S
        if len(self._booking) >= BOOKING_MAX or _booking_key(body) in self._booking:
            return False
        if self._spent.get(body.learner, 0) >= DEATHS_AT_ONCE * len(self._history.versions):
            return False
        newest = self._history.account.newest_incarnation(body.learner)
        if not is_plausible_incarnation(body.incarnation, newest) or body.step_to > STEPS_MAX:
            return False
        if self._history.account.fault(body):
            return False
        self._spent[body.learner] = self._spent.get(body.learner, 0) + 1
        self._booking.add(_booking_key(body))
        return True

    def _earn(self, intervals: int) -> None:
        self._spent = {name: spent - intervals for name, spent in self._spent.items() if spent > intervals}


def _booking_key(body: DiscardedBody | Contribution) -> tuple[str, int, int]:
    return body.learner, body.incarnation, body.fragment
