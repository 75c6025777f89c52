"""The last rounds as this region saw them: how long each phase took, and for whom it waited.

Reads the core after each event and decides nothing. Only the leader knows for whom a ballot waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from diloco_node.core import events as ev
from diloco_node.core.messages import BallotOpened, MergeDecided
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Ballot
from diloco_node.escaping import escaped_document
from diloco_node.numeric import NS_PER_S

ROUNDS_KEPT: Final = 128
GAPS_KEPT: Final = 64
"""Times between two commits, for the usual one."""

REASON_CHARS_MAX: Final = 300


@dataclass(slots=True)
class TrackedRound:
    """A round on its way.

    Attributes:
        phase: of `core.view.PHASES`, since `since_ns`. spent_ns: by phase, what is over. late: who is waited for now.
        blame_ns: how long (region, phase) was waited for.
    """

    fragment: int
    version: int
    ballot: Ballot
    members: tuple[str, ...]
    opened_ns: int
    since_ns: int
    phase: str = "gather"
    late: tuple[str, ...] = ()
    spent_ns: dict[str, int] = field(default_factory=dict)
    blame_ns: dict[tuple[str, str], int] = field(default_factory=dict)

    def pass_time(self, phase: str, late: tuple[str, ...], *, now_ns: int) -> None:
        """Book the time since the last look, then go on with what is so now."""
        passed_ns = now_ns - self.since_ns
        self.spent_ns[self.phase] = self.spent_ns.get(self.phase, 0) + passed_ns
        for name in self.late:
            self.blame_ns[name, self.phase] = self.blame_ns.get((name, self.phase), 0) + passed_ns
        self.phase, self.late, self.since_ns = phase, late, now_ns

    def waited_for(self) -> dict[str, str] | None:
        """Region and phase of the longest wait; None when it is not known who took most of that phase."""
        (region, phase), blamed_ns = max(
            sorted(self.blame_ns.items()), key=lambda blame: blame[1], default=(("", ""), 0)
        )
        is_known = blamed_ns > 0 and 2 * blamed_ns >= self.spent_ns[phase]
        return {"region": region, "phase": phase} if is_known else None


class RoundLog:
    """Give it to the pump as `observe`. unix_s: the wall clock, for people. on_committed: takes each finished row."""

    def __init__(
        self,
        core: RegionCore,
        *,
        region: str,
        now_ns: Callable[[], int],
        unix_s: Callable[[], float],
        on_committed: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._core = core
        self._region = region
        self._now_ns = now_ns
        self._unix_s = unix_s
        self._on_committed = on_committed
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROUNDS_KEPT)
        self._open: dict[int, TrackedRound] = {}
        self._applying: dict[tuple[int, int], TrackedRound] = {}
        self._merged: dict[tuple[int, int], tuple[str, ...]] = {}
        self._reasons: dict[int, str] = {}
        self._committed = core.history.rounds_committed
        self._committed_ns: int | None = None
        self._followed_ns: int | None = None
        self._gaps_ns: deque[int] = deque(maxlen=GAPS_KEPT)

    def rows(self) -> list[dict[str, Any]]:
        """The last rounds that ended, oldest first, plain values; all texts escaped, and none is changed later."""
        return list(self._rows)

    def commit_age_s(self) -> float | None:
        """Seconds since this region saw a round committed; None before the first since it started."""
        return None if self._committed_ns is None else (self._now_ns() - self._committed_ns) / NS_PER_S

    def usual_commit_s(self) -> float | None:
        """Seconds that usually lie between two commits of rounds that were seen open; None: too few were."""
        return median(self._gaps_ns) / NS_PER_S if len(self._gaps_ns) > 1 else None

    def observe(self, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        """After each event of the core."""
        now_ns = self._now_ns()
        for effect in effects:
            if isinstance(effect, ev.ApplyVersion):
                names = tuple(member.contribution.learner for member in effect.body.members)
                self._merged[effect.body.fragment, effect.body.version] = names
            elif isinstance(effect, ev.Note) and effect.kind in ("ballot", "abandoned"):
                self._reasons[effect.fragment] = effect.text
        if self._core.history.rounds_committed != self._committed:
            self._note_commits(now_ns)
        if self._core.leader.is_acting:
            self._look_as_leader(now_ns)
        elif (fragment := _fragment_of(event)) is not None:
            self._look_at(fragment, now_ns)
        if isinstance(event, ev.VersionApplied):
            self._end_apply(event.fragment, event.version, now_ns)
        self._reasons.clear()

    def _note_commits(self, now_ns: int) -> None:
        history = self._core.history
        self._committed = history.rounds_committed
        self._committed_ns = now_ns
        fragments = [
            fragment for fragment, round_ in self._open.items() if history.versions[fragment] >= round_.version
        ]
        for fragment in fragments:
            round_ = self._open.pop(fragment)
            round_.pass_time("apply", (self._region,), now_ns=now_ns)
            self._applying[fragment, round_.version] = round_
        if fragments:
            if self._followed_ns is not None:
                self._gaps_ns.append(now_ns - self._followed_ns)
            self._followed_ns = now_ns

    def _look_as_leader(self, now_ns: int) -> None:
        rounds, names = self._core.leader.rounds, self._core.history.roster.names
        for fragment, round_ in rounds.items():
            row = self._track(fragment, round_.version, round_.ballot, round_.members, now_ns)
            row.pass_time(round_.phase, round_.late_regions(names), now_ns=now_ns)
        for fragment in [fragment_open for fragment_open in self._open if fragment_open not in rounds]:
            self._fail(fragment, now_ns)

    def _look_at(self, fragment: int, now_ns: int) -> None:
        if not 0 <= fragment < len(self._core.history.versions):
            return  # a peer chose it
        standing = self._core.participant.standing(fragment)
        if standing is not None:
            version, ballot, phase, late = standing
            self._track(fragment, version, ballot, (), now_ns).pass_time(phase, late, now_ns=now_ns)

    def _track(
        self, fragment: int, version: int, ballot: Ballot, members: tuple[str, ...], now_ns: int
    ) -> TrackedRound:
        round_ = self._open.get(fragment)
        if round_ is not None and (round_.version, round_.ballot) != (version, ballot):
            if round_.version < version:
                del self._open[fragment]  # it was merged; how long that took is not known to a region that catches up
            else:
                self._fail(fragment, now_ns)
            round_ = None
        if round_ is None:
            round_ = self._open[fragment] = TrackedRound(fragment, version, ballot, members, now_ns, now_ns)
        return round_

    def _fail(self, fragment: int, now_ns: int) -> None:
        round_ = self._open.pop(fragment)
        late = round_.late
        round_.pass_time(round_.phase, (), now_ns=now_ns)
        reason = self._reasons.get(fragment, "another ballot took its place")
        self._add(round_, "failed", now_ns, members=round_.members, missing=late, reason=reason)

    def _end_apply(self, fragment: int, version: int, now_ns: int) -> None:
        for at in sorted(place for place in self._applying if place[0] == fragment and place[1] <= version):
            round_ = self._applying.pop(at)
            round_.pass_time("apply", (), now_ns=now_ns)
            members = self._merged.get(at, round_.members)
            missing = tuple(name for name in self._core.history.roster.names if name not in members) if members else ()
            self._add(round_, "committed", now_ns, members=members, missing=missing, reason="")
        for at in [place for place in self._merged if place[0] == fragment and place[1] <= version]:
            del self._merged[at]

    def _add(
        self,
        round_: TrackedRound,
        outcome: str,
        now_ns: int,
        *,
        members: tuple[str, ...],
        missing: tuple[str, ...],
        reason: str,
    ) -> None:
        # Here and not in each status document, of which these rows would be most.
        row = escaped_document(
            {
                "fragment": round_.fragment,
                "version": round_.version,
                "ballot": str(round_.ballot),
                "ended_unix": self._unix_s(),
                "outcome": outcome,
                "seconds": (now_ns - round_.opened_ns) / NS_PER_S,
                "phases": {phase: spent_ns / NS_PER_S for phase, spent_ns in round_.spent_ns.items()},
                "members": list(members),
                "missing": list(missing),
                "waited_for": round_.waited_for(),
                "reason": reason[:REASON_CHARS_MAX],
            }
        )
        self._rows.append(row)
        if outcome == "committed":
            self._on_committed(row)


def _fragment_of(event: ev.Event) -> int | None:
    """The fragment whose round an event may have moved on."""
    match event:
        case ev.MessageArrived(message=BallotOpened() | MergeDecided() as message):
            return message.fragment
        case ev.SnapshotTaken() | ev.ContributionStripeArrived():
            return event.contribution.fragment
        case ev.SnapshotRefused() | ev.MergedStripeArrived() | ev.PayloadStored():
            return event.fragment
        case _:
            return None
