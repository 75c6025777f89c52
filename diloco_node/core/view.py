"""The state of a region as frozen values, for `status` and the dashboard: versions, rounds, peers, waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.messages import LeftOut
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.types import Ballot, LearnerStatus, RoundBody

if TYPE_CHECKING:
    from diloco_node.core.recovery.fetches import Fetches
    from diloco_node.core.recovery.upkeep import Upkeep
    from diloco_node.core.region import RegionCore

PHASES: Final = ("gather", "reduce", "commit", "apply")
"""Phases of a round: contributions are named; merged and on the disks of a majority; in the ledger; applied here."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """An open round, as this region sees it; `waiting`: what it waits for, in words.

    members, reducers: of the current ballot; empty where only the leader knows.
    opened_at_ns: monotonic; 0 where only the leader knows.
    """

    fragment: int
    version: int
    ballot: Ballot
    attempt: int
    members: tuple[str, ...]
    reducers: tuple[str, ...]
    opened_at_ns: int
    waiting: str


@dataclass(frozen=True, slots=True)
class PeerView:
    """Another region. is_alive: its heartbeats arrive. hears: whom it says it hears.

    rtt_ns: round-trip time of the control lane; 0 if unknown. learner: its last report; None without a learner.
    applied_index: the last ledger entry it says it has applied. has_left: it told that it was about to stop.
    """

    region: str
    is_alive: bool
    rtt_ns: int
    hears: tuple[str, ...]
    learner: LearnerStatus | None
    applied_index: int
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class RegionView:
    """Everything at one moment; versions, rounds and entries as in their names.

    Attributes:
        leader: empty if unknown. learner: this region's.
        versions: per fragment, applied here; -1: none yet.
        digests: per fragment (version, first bytes of the digest) of the last one computed here.
        end_waits: what the run's end waits for, see `RunEnd.waiting`.
        waiting: why no (further) round is open, or what this region waits for; in words.
        participation: by region, of the rounds that were committed while its learner was seen to be live, the part that
            it was in; None before the first.
        fetching: (fragment, version, peer).
        rounds_committed, tokens_merged: since genesis; tokens are the mean over the fragments.
        digest_differences: alarms about unequal bytes at equal versions. contradictions: of peers, to Raft.
        wrong_leaders: (peer, reason) of each whose entries were refused. overbooked: steps that the ledger has as lost
            and that this region's learner never made. All four must be 0 or empty.
        is_ending: last rounds are being held. finished: the reason, once the run's end is committed, else empty.
        is_final: every fragment is at its final version and written.
        left_out: whom the leader leaves out of its ballots for a while, in which part, and why.
    """

    region: str
    role: str
    term: int
    leader: str
    ledger_reason: str
    last_index: int
    commit_index: int
    applied_index: int
    versions: tuple[int, ...]
    digests: tuple[tuple[int, bytes], ...]
    learner: LearnerStatus | None
    rounds: tuple[RoundView, ...]
    peers: tuple[PeerView, ...]
    participation: tuple[tuple[str, float | None], ...]
    end_waits: str
    waiting: str
    fetching: tuple[tuple[int, int, str], ...]
    rounds_committed: int
    tokens_merged: int
    digest_differences: int
    is_ending: bool
    finished: str
    is_final: bool
    left_out: tuple[LeftOut, ...] = ()
    contradictions: tuple[tuple[str, str], ...] = ()
    wrong_leaders: tuple[tuple[str, str], ...] = ()
    overbooked: str = ""


class Participation:
    """Counts the merges that learners were in, of those committed while they were live.

    It begins with what the ledger's base says, which does not say who was live while left out.
    """

    def __init__(self, history: RoundHistory, liveness: Liveness) -> None:
        self._history, self._liveness = history, liveness
        self._included = Counter(history.rounds_included)
        self._missed: Counter[str] = Counter()

    def count(self, body: RoundBody) -> None:
        """A round is committed. A member that left is counted anew when it comes back."""
        names, members = set(self._history.roster.names), {member.contribution.learner for member in body.members}
        for counts in (self._included, self._missed):
            for name in counts.keys() - names:
                del counts[name]
        self._included.update(members & names)
        self._missed.update(name for name in names - members if self._liveness.learner(name) is not None)

    def ratios(self) -> tuple[tuple[str, float | None], ...]:
        """By region, sorted, the part of the merges that its learner was in; None before the first."""
        ratios = []
        for name in self._history.roster.names:
            rounds = self._included[name]
            total = rounds + self._missed[name]
            ratios.append((name, rounds / total if total else None))
        return tuple(ratios)


def peer_views(liveness: Liveness, *, now_ns: int) -> tuple[PeerView, ...]:
    """All other regions, by name."""
    return tuple(
        PeerView(
            name,
            liveness.is_alive(name, now_ns=now_ns),
            liveness.rtt_ns(name),
            liveness.hears_claimed(name),
            liveness.learner(name),
            liveness.applied_index(name),
            liveness.has_left(name),
        )
        for name in liveness.others
    )


def round_views(leader: RoundLeader, participant: RoundParticipant) -> tuple[RoundView, ...]:
    """Open rounds by fragment: as the leader knows them if it is here, else as its leader announced them."""
    if not leader.is_acting:
        return tuple(
            RoundView(fragment, version, ballot, 0, (), (), 0, reason)
            for fragment, version, ballot, reason in participant.open_rounds()
        )
    return tuple(
        RoundView(
            round_.fragment,
            round_.version,
            round_.ballot,
            round_.attempt,
            round_.members,
            round_.reducers,
            round_.opened_at_ns,
            round_.wait_reason(),
        )
        for _, round_ in sorted(leader.rounds.items())
    )


def region_view(
    core: RegionCore,
    *,
    region: str,
    upkeep: Upkeep,
    fetches: Fetches,
    participation: Participation,
    excess: str,
    now_ns: int,
) -> RegionView:
    """See `RegionCore.view`."""
    ledger, history, leader, end = core.ledger, core.history, core.leader, core.end
    fragments = range(len(history.versions))
    reason = leader.reason if leader.is_acting else ledger.reason
    end_waits = end.waiting(ledger.leader, now_ns=now_ns)
    return RegionView(
        region=region,
        role=str(ledger.role),
        term=ledger.term,
        leader=ledger.leader,
        ledger_reason=ledger.reason,
        last_index=ledger.last_index,
        commit_index=ledger.commit_index,
        applied_index=core.versions.applied_index(),
        versions=tuple(core.versions.applied),
        digests=tuple(upkeep.digests.newest(fragment) for fragment in fragments),
        learner=core.liveness.learner(region),
        rounds=round_views(leader, core.participant),
        peers=peer_views(core.liveness, now_ns=now_ns),
        participation=participation.ratios(),
        end_waits=end_waits,
        waiting=end_waits or upkeep.reason or reason,
        fetching=fetches.in_flight(),
        rounds_committed=history.rounds_committed,
        tokens_merged=history.account.merged_tokens(len(fragments)),
        digest_differences=upkeep.digests.differences,
        contradictions=tuple(sorted(ledger.contradictions.items())),
        wrong_leaders=tuple(sorted(ledger.wrong_leaders.items())),
        overbooked=excess,
        is_ending=leader.is_ending,
        finished="" if end.end is None else end.end.reason,
        is_final=end.is_final,
        left_out=leader.left_out if leader.is_acting else core.participant.left_out,
    )
