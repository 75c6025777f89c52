"""Regions with which a round can be held right now: pure questions about liveness, reports and the committed past."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.merge.schedule import MovingAverage, believed_step_time_ns
from diloco_node.core.rounds.claim_limits import is_plausible_incarnation
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.suspicion import BallotRole, SuspicionBook

STALLED_STEPS: Final = 8
"""A learner that made no step for this many of its usual steps is not waited for; its work is carried over."""

STALLED_NS_MIN: Final = 2_000_000_000
"""Least time before a learner counts as stalled: evaluation and checkpoints take a second or two."""

LEAVING_NS: Final = 60_000_000_000
"""A learner that leaves makes no steps. Clouds give two minutes of notice at most; half of that is for its merges."""

BEHIND_NS: Final = 1_000_000_000
"""So long after a commit a region may still apply the version. Then it counts as behind: it is fetching the version,
and a round would wait for it. It is longer where heartbeats are rare, and for a region that usually takes longer."""

BEHIND_NS_MAX: Final = 10_000_000_000
"""Most time that is granted: a region that fetches version after version must not be waited for each time."""

BEHIND_MARGIN: Final = 2
"""Factor on the time that a region usually takes."""

COMMITS_KEPT: Final = 256
"""Entries whose time of commit is remembered: `BEHIND_NS_MAX` of them at 25 commits a second. A region that lacks older
ones lacks these too."""


@dataclass(frozen=True, slots=True)
class Reachability:
    """The regions that the leader can work with, sorted.

    reachable: they hear the leader and are heard by it; the leader too. learners: those with a learner that steps.
    reducers: reachable regions that reach every other reachable one; never empty.
    """

    reachable: tuple[str, ...]
    reducers: tuple[str, ...]
    learners: tuple[str, ...]


class Eligibility:
    """The leader's questions about regions and learners; it remembers which incarnations of learners are over.

    Attributes:
        region_to_remove: it is about to leave the run: no new ballot has it. Empty: none is.
    """

    def __init__(self, context: RoundContext, book: SuspicionBook) -> None:
        self.region_to_remove = ""
        self._region, self._context = context.region, context
        self._history, self._liveness = context.history, context.liveness
        self._book = book
        self._incarnations: dict[str, int] = {}
        self._applied: dict[str, int] = {}
        self._lag: dict[str, MovingAverage] = {}
        self._commits: deque[tuple[int, int]] = deque(maxlen=COMMITS_KEPT)

    def on_commit(self, index: int, *, now_ns: int) -> None:
        """Remember when a ledger entry was committed."""
        self._commits.append((index, now_ns))

    def on_report(self, region: str, *, now_ns: int) -> None:
        """Learn from another region's report how long it takes to apply committed versions."""
        index = self._liveness.applied_index(region)
        before, self._applied[region] = self._applied.get(region, 0), index
        history = self._history
        for version, entry, committed_at_ns in zip(
            history.versions, history.version_entries, history.committed_at_ns, strict=True
        ):
            if version > 0 and 0 < before < entry <= index:
                self._lag[region] = self._lag.get(region, MovingAverage()).after(max(0, now_ns - committed_at_ns))

    def behind_ns(self, region: str) -> int:
        """Return how long after a commit a region may still be about to report the apply."""
        usual_ns = self._lag.get(region, MovingAverage()).average_ns
        return max(BEHIND_NS, self._liveness.silent_ns, min(BEHIND_MARGIN * usual_ns, BEHIND_NS_MAX))

    def is_behind(self, region: str, *, now_ns: int) -> bool:
        """Whether another region has had more than its usual time to apply an entry, and has not.

        Its disk is slow, or it fetches missed versions. It takes no stripes of versions that are far ahead of it, so it
        can't reduce. It may be a member: a region that is never waited for might never catch up.
        """
        if region == self._region:
            return False
        applied_index = self._liveness.applied_index(region)
        since_ns = next((at_ns for index, at_ns in self._commits if index > applied_index), now_ns)
        return now_ns - since_ns > self.behind_ns(region)

    def observe_incarnation(self, learner: str, incarnation: int) -> None:
        """Learn that this incarnation is there, or will be the next: older ones are over."""
        newest = self._history.account.newest_incarnation(learner)
        if is_plausible_incarnation(incarnation, newest):
            self._incarnations[learner] = max(incarnation, newest, self._incarnations.get(learner, 0))

    def incarnation_min(self, learner: str) -> int:
        """The oldest incarnation of the learner that may not be over."""
        return self._incarnations.get(learner, 0)

    def reachability(self, *, now_ns: int, exclude: Collection[str] = (), probe: str = "") -> Reachability:
        """Find the regions that are there, those that can reduce, and those whose learner steps.

        Suspended ones are left out, except the one to probe, and those that are behind or stop don't reduce. If two
        regions do not reach each other, neither reduces, so that both stay members: full membership is worth more than
        one more reducer. All of this holds unless nobody else is left.

        exclude: regions that must not reduce.
        """
        regions = tuple(name for name in self._context.regions if name != self.region_to_remove)
        reachable = tuple(name for name in regions if self._liveness.reaches(name, now_ns=now_ns))
        central = self._liveness.central_regions(reachable)
        exclusions = {
            *exclude,
            *self._book.suspensions(BallotRole.REDUCER, probe=probe, now_ns=now_ns),
            *(name for name in self._context.regions if self.is_behind(name, now_ns=now_ns)),
            *(name for name in self._liveness.others if self._liveness.has_left(name)),  # daemons that stop
        }
        reducers = tuple(name for name in central if name not in exclusions) or tuple(central) or (self._region,)
        step_times_ns = self._step_times_ns(regions)
        learners = tuple(name for name in reachable if self._steps(name, step_times_ns, now_ns=now_ns))
        left_out = self._book.suspensions(BallotRole.MEMBER, probe=probe, now_ns=now_ns)
        return Reachability(reachable, reducers, tuple(name for name in learners if name not in left_out) or learners)

    def _step_times_ns(self, regions: Sequence[str]) -> list[int]:
        return [status.step_time_ns for name in regions if (status := self._liveness.learner(name)) is not None]

    def _steps(self, region: str, step_times_ns: Sequence[int], *, now_ns: int) -> bool:
        """Whether a region's learner is waited for. step_times_ns: of all learners."""
        status, stepped_at_ns = self._liveness.learner(region), self._liveness.stepped_at_ns(region)
        if status is None or status.finished or stepped_at_ns is None:
            return False
        step_time_ns = believed_step_time_ns(status.step_time_ns, step_times_ns)
        limit_ns = max(STALLED_NS_MIN, STALLED_STEPS * step_time_ns, LEAVING_NS if status.leaving else 0)
        return now_ns - stepped_at_ns <= limit_ns

    def members(
        self, fragment: int, reachability: Reachability, *, now_ns: int, rejections: Mapping[str, str] | None = None
    ) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Find the learners that can contribute to the next round of a fragment; `rejections` may not, with the
        reasons.

        Returns: members, sorted; and the learners that step but can't join, with reasons.
        """
        members, ineligible = [], []
        for name in reachability.learners:
            fault = (rejections or {}).get(name, "") or self._fault(name, fragment, now_ns)
            if fault:
                ineligible.append((name, fault))
            else:
                members.append(name)
        return tuple(members), tuple(ineligible)

    def unmerged(self, fragment: int, *, now_ns: int) -> tuple[str, ...]:
        """Find the reachable regions whose learner has steps that no version includes, whether or not it makes more."""
        names = (name for name in self._context.regions if self._liveness.reaches(name, now_ns=now_ns))
        return tuple(name for name in names if name != self.region_to_remove and self._has_unmerged(name, fragment))

    def _has_unmerged(self, region: str, fragment: int) -> bool:
        status = self._liveness.learner(region)
        if status is None or status.finished or status.incarnation < self.incarnation_min(region):
            return False
        covered_step = self._history.covered_step(region, status.incarnation, fragment)
        return status.positions[fragment].base_version >= 0 and status.step > covered_step

    def pausing(self, fragment: int, *, now_ns: int, max_ns: int, since_ns: int | None = None) -> tuple[str, ...]:
        """Find those of `unmerged` that make no steps for now, but did within `max_ns`: they evaluate or save.

        since_ns: without a step since then they pause; None: since they count as stalled.
        """
        step_times_ns, names = self._step_times_ns(self._context.regions), []
        candidates = self.unmerged(fragment, now_ns=now_ns)
        left_out = self._book.suspensions(BallotRole.MEMBER, now_ns=now_ns)
        if left_out.keys() >= {*candidates}:
            left_out = {}  # where nobody else has steps a ballot has them
        for name in candidates:
            status, stepped_at_ns = self._liveness.learner(name), self._liveness.stepped_at_ns(name)
            if status is None or status.leaving or name in left_out:
                continue  # it makes no further step and takes part all the same, or no ballot has it
            is_still = not self._steps(name, step_times_ns, now_ns=now_ns)
            if stepped_at_ns is not None and now_ns - stepped_at_ns <= max_ns:
                names += [name] if is_still or (since_ns is not None and stepped_at_ns < since_ns) else []
        return tuple(names)

    def _fault(self, region: str, fragment: int, now_ns: int) -> str:
        """Return why a learner can't join the next round of a fragment, by its report; empty if it can.

        The contribution itself is judged again when it comes (`RoundHistory.contribution_fault`).
        """
        status, history = self._liveness.learner(region), self._history
        if status is None:
            return "no learner"
        # A report may just be older than the apply of the last version, and the steps after it. The member knows
        # better: it takes its snapshot after the apply, and declines without steps.
        is_recent = now_ns - history.committed_at_ns[fragment] <= self.behind_ns(region)
        lacks = history.version_entries[fragment] - self._liveness.applied_index(region)
        if region != self._region and not is_recent and lacks > 0:
            return f"its region is {lacks} ledger entries behind"
        base_version, last = status.positions[fragment].base_version, history.last_version(region, fragment)
        if status.incarnation < self.incarnation_min(region):
            return "its incarnation is over"
        if base_version < 0:
            return "has no version yet"
        if base_version < last and not is_recent:
            return f"has not applied version {last}, which includes it"
        has_steps = status.step > history.covered_step(region, status.incarnation, fragment)
        return "" if has_steps or is_recent else "no steps since its last inclusion"
