"""Rounds among learners of different speed and batch, in virtual time: who is due, who waits, who is in which merge.

A tick is the step of the fastest learner, or a part of it. The decisions of the leader are the production code's
(`core.rounds.opening.Opener` with its quorum, grace window and pacing), and so are merge, codec and apply rule
(`quality_merge`). A member takes its snapshot at its next step boundary; the merged version is there some ticks after
the last of them, and every learner takes it at its next boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from quality_merge import Rounds, _Open

from diloco_node.core.merge.quorum import grace_ns
from diloco_node.core.rounds.eligibility import Reachability
from diloco_node.core.rounds.opening import Opener
from diloco_node.core.types import LearnerStatus, RunSettings
from diloco_node.numeric import F32

TICK_NS = 10_000_000


@dataclass(slots=True)
class _Asked:
    """A round that was opened: members are asked for snapshots, and give them one after the other.

    Attributes:
        missing: members whose snapshot is not there. commit_tick: when its version is there; 0 while some are missing.
    """

    round: _Open
    opened_tick: int
    missing: set[int]
    commit_tick: int = 0


@dataclass(slots=True)
class Participation:
    """What became of the learners' work.

    Attributes:
        rounds: committed. included: of these, by learner.
        steps_missing_max: by learner, the most steps between two inclusions in one fragment.
        graces_ns: every grace window that a decision was made with.
        open_ticks: from the opening of a round to its commit.
    """

    included: list[int]
    steps_missing_max: list[int]
    rounds: int = 0
    graces_ns: list[int] = field(default_factory=list)
    open_ticks: list[int] = field(default_factory=list)


class UnevenRounds(Rounds):
    """All rounds of one run with learners of different speed.

    Call `boundary` for the learners that ended a step in a tick, then `lead` once in that tick.

    Args:
        periods: ticks of one inner step of each learner.
        sync_ticks: from the last snapshot of a round to its version in every region.
    """

    def __init__(
        self,
        settings: RunSettings,
        shapes: dict[str, tuple[int, ...]],
        theta: F32,
        *,
        tokens_per_step: Sequence[int],
        periods: Sequence[int],
        sync_ticks: int,
    ) -> None:
        super().__init__(settings, shapes, theta, tokens_per_step=tokens_per_step)
        self.names = [f"region-{m:02d}" for m in range(self.learners)]
        self.steps = [0] * self.learners
        self.seen = Participation([0] * self.learners, [0] * self.learners)
        self._periods, self._sync_ticks = tuple(periods), sync_ticks
        self._asked: dict[int, _Asked] = {}
        self._reports: dict[str, LearnerStatus] = {}
        history: Any = SimpleNamespace(versions=[0] * settings.fragments, settings=settings)
        liveness: Any = SimpleNamespace(learner=self._reports.get, rtt_ns=lambda _: 0)
        self._history, self._eligibility = history, SimpleNamespace(incarnation_min=lambda _: 0)
        fragments = range(settings.fragments)
        context: Any = SimpleNamespace(fragments=fragments, history=history, liveness=liveness)
        self._opener = Opener(context)
        names = tuple(self.names)
        self._reachability = Reachability(names, names, names)

    def boundary(self, m: int, tick: int) -> None:
        """Learner m has ended a step, and its parameters are in its row: it takes versions, and gives snapshots."""
        self.steps[m] += 1
        step = self.steps[m]
        for fragment in range(len(self.globals)):
            self._apply(m, fragment, step)
        for fragment in sorted(self._asked):
            asked = self._asked[fragment]
            copy = self.copies[m][fragment]
            if m not in asked.missing or copy.position.base_version != asked.round.version - 1:
                continue
            asked.missing.discard(m)
            waited = step - copy.position.included_step
            self.seen.steps_missing_max[m] = max(self.seen.steps_missing_max[m], waited)
            self._contribute(asked.round, m, step)
            if not asked.missing:
                asked.commit_tick = tick + self._sync_ticks
        self._reports[self.names[m]] = LearnerStatus(
            incarnation=1,
            step=step,
            tokens=step * self.tokens_per_step[m],
            step_time_ns=self._periods[m] * TICK_NS,
            positions=tuple(self.copies[m][fragment].position for fragment in range(len(self.globals))),
        )
        self._opener.on_status(self.names[m], self._reports[self.names[m]], now_ns=tick * TICK_NS)

    def lead(self, tick: int) -> None:
        """What the leader does in this tick: commit what is there, open what is due."""
        now_ns = tick * TICK_NS
        for fragment, asked in sorted(self._asked.items()):
            if 0 < asked.commit_tick <= tick:
                self._commit_asked(asked, tick)
                del self._asked[fragment]
                self._history.versions[fragment] = asked.round.version
        while True:
            timing = self._opener.timing(self._reachability)
            opening = self._opener.choose(self._reachability, self._asked, (), self._eligibility, now_ns=now_ns)
            if opening is None:
                return
            self.seen.graces_ns.append(
                grace_ns(timing, overlap_steps=self.settings.overlap_steps, gamma=self.settings.grace_gamma)
            )
            self._opener.on_open(opening, now_ns=now_ns)
            self._asked[opening.fragment] = self._new(opening.fragment, tick)

    def finish_uneven(self) -> None:
        """What is in flight, then one last round of each fragment with all new steps."""
        for _, asked in sorted(self._asked.items()):
            for m in sorted(asked.missing):
                self._contribute_new(asked.round, m)
            self._commit(asked.round)
            for m in range(self.learners):
                self._apply(m, asked.round.fragment, self.steps[m])
        self._asked = {}
        for fragment in range(len(self.globals)):
            last = self._new(fragment, 0).round
            last.is_last = True
            for m in range(self.learners):
                self._contribute_new(last, m)
            if last.snapshots:
                self._commit(last)

    def _contribute_new(self, one: _Open, m: int) -> None:
        if self.steps[m] > self.copies[m][one.fragment].position.included_step:
            self._contribute(one, m, self.steps[m])

    def _new(self, fragment: int, tick: int) -> _Asked:
        one = _Open(fragment, self.globals[fragment].version + 1, 0, False, {}, [], [])
        return _Asked(one, tick, set(range(self.learners)))

    def _commit_asked(self, asked: _Asked, tick: int) -> None:
        one = asked.round
        # In the order of the learners, as reducers sum; they came in the order of their boundaries.
        order = sorted(range(len(one.contributions)), key=lambda at: one.contributions[at].learner)
        one.contributions = [one.contributions[at] for at in order]
        one.encoded = [one.encoded[at] for at in order]
        one.snapshots = dict(sorted(one.snapshots.items()))
        self._commit(one)
        took_ticks = tick - asked.opened_tick
        self._opener.on_commit(took_ticks * TICK_NS)
        self.seen.rounds += 1
        self.seen.open_ticks.append(took_ticks)
        for m in one.snapshots:
            self.seen.included[m] += 1
