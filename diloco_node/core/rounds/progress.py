"""The run's position by the figures that end it: the leader asks it, and each region tells its learner.

Learners differ in speed, and come and go. So the run is where its median learner is, and a learner that is away for a
moment counts with its steps so far. Otherwise each restart of a slow one would move the run to where the faster ones
are, and might end it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import Final

from diloco_node.core.bounds import INCARNATION_MAX
from diloco_node.core.rounds.context import RoundContext

ABSENT_NS: Final = 300_000_000_000
"""A learner that made no step for so long no longer counts, as long as most are left. Restarts and cuts of minutes do
not move the run, and a minority that is gone for good holds up its end by no more than this."""


@dataclass(frozen=True, slots=True)
class RunPosition:
    """The position of the run.

    steps: of the median learner, all its incarnations together; of an even number the lower of the middle two.
    Never goes back while the daemon lives, and never beyond `steps_max`.
    part: of the way to the run's end, 0 to 1, by whichever limit is nearer; None: nothing says where it ends.
    """

    steps: int
    part: float | None


class RunProgress:
    """Remembers when each learner last made a step, and answers."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._fragments = context, len(context.fragments)
        self._history, self._liveness = context.history, context.liveness
        self._grew: dict[str, tuple[int, int]] = {}
        # The largest median so far: learners that join later do not take the run back.
        self._steps = 0

    @property
    def has_quorum(self) -> bool:
        """Whether a majority of the regions has a learner, or had one: fewer end no run."""
        regions = self._context.regions
        return 2 * sum(self._has_learner(name) for name in regions) > len(regions)

    def _has_learner(self, name: str) -> bool:
        return self._liveness.learner(name) is not None or self.steps_of(name) > 0

    def learners(self, *, now_ns: int) -> list[str]:
        """Return the regions whose learner is there, or was not long ago, sorted.

        If only a minority makes steps, or is heard of, all learners count with their steps so far. Otherwise a region
        that was cut off would take itself for the run; so would the first region to go on after a stall of all. Beside
        a witness one of two is enough.
        """
        names, recent = [], []
        for name in self._context.regions:
            if not self._has_learner(name):
                continue  # it was never there: the run does not stand at its start for it
            steps = self.steps_of(name)
            steps_before, grew_ns = self._grew.get(name, (-1, now_ns))
            if steps > steps_before:
                self._grew[name] = (steps, now_ns)
                grew_ns = now_ns
            names.append(name)
            if now_ns - grew_ns < ABSENT_NS:
                recent.append(name)
        votes = 2 * len(recent) + bool(self._history.roster.witness)
        return recent if votes > len(names) else names

    def learner_steps(self, *, now_ns: int) -> list[int]:
        """Return the steps of each of `learners`, all its incarnations together."""
        return list(map(self.steps_of, self.learners(now_ns=now_ns)))

    def position(self, *, now_ns: int) -> RunPosition:
        """Return where the run is now, as far as this region knows."""
        # Of two learners the slower one: one of two may be wrong.
        steps, settings = median_low(self.learner_steps(now_ns=now_ns) or [0]), self._history.settings
        fractions = []
        if settings.steps_max > 0:
            fractions.append(steps / settings.steps_max)
        if settings.tokens_max > 0:
            fractions.append(self._history.account.merged_tokens(self._fragments) / settings.tokens_max)
        self._steps = max(self._steps, min(steps, settings.steps_max or steps))
        return RunPosition(self._steps, min(1.0, max(fractions)) if fractions else None)

    def steps_of(self, name: str) -> int:
        """Return the steps of a region's learner in all its lives: by its last report, and the ledger before that."""
        in_ledger = self._history.account.steps_before(name, INCARNATION_MAX + 1)
        status = self._liveness.learner(name)
        if status is None:
            return in_ledger
        return max(in_ledger, status.step + self._history.account.steps_before(name, status.incarnation))
