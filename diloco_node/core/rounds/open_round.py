"""What the leader knows of one open round: its current ballot, and what came in for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from diloco_node.core.merge.outliers import Clips
from diloco_node.core.merge.weights import SQUARED_NORM_MAX
from diloco_node.core.messages import BallotOpened, MergeDecided, ReductionReported, StripesReceived
from diloco_node.core.rounds.suspicion import BallotPart
from diloco_node.core.types import Ballot, Contribution, Stripe

NORM_TOLERANCE: Final = 1e-3
"""Squared norms summed stripe by stripe may differ by this part from those in a contribution's header."""

NORM_FLOOR: Final = 2.0**-200
"""Squares of values that the encoder flushes to zero."""


def payload_digest(stripe_digests: Sequence[bytes]) -> bytes:
    """The digest that names a merged payload: SHA-256 over its stripes' digests in block order."""
    return hashlib.sha256(b"".join(stripe_digests)).digest()


def is_same_norm(one: float, other: float) -> bool:
    """Whether two squared norms of the same values agree, whoever added them up in whatever order."""
    return abs(one - other) <= NORM_TOLERANCE * max(one, other) + NORM_FLOOR


@dataclass(frozen=True, slots=True)
class Questioned:
    """A merged ballot whose norms do not add up: the leader reduces the same stripes itself to see who is wrong.

    Attributes:
        stripes: of the ballot. reports: one per stripe. contributions: as they were named in the decision.
    """

    stripes: tuple[Stripe, ...]
    reports: tuple[ReductionReported, ...]
    contributions: tuple[Contribution, ...]

    def blocks(self) -> list[tuple[int, int]]:
        """How the fragment was cut."""
        return [(stripe.block_start, stripe.block_stop) for stripe in self.stripes]


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a ballot may take, and why.

    Attributes:
        duration_ns: from the opening of the ballot.
        derivation: one line, for log and status.
    """

    duration_ns: int
    derivation: str


@dataclass(slots=True)
class OpenRound:
    """One fragment on its way to one version, with the current ballot.

    Attributes:
        opened_at_ns: of the first ballot; attempt counts the ballots from 0.
        announcement, ballot_at_ns, deadline: the current ballot, as it was announced.
        contributions: by learner, judged and named in this ballot.
        declined: members that will not contribute, and why.
        received: per learner and stripe the contribution that is there, as the reducer said in this ballot: its
            incarnation and snapshot.
        decision, weights, clips: once decided.
        merged: by stripe.
        holders: regions that have the merged payload on disk, with its digest.
        received_merged: the digests of the merged stripes that a region has, as it says.
        questioned: the ballot before, whose norms did not add up.
        tried: regions in doubt, with the part in which this ballot tries each.
        renamed: members that gave their contribution another name in this round.
        rejected: learners that may not be in any ballot of this round, and why.
        excluded: reducers that held up a ballot of this round.
        is_proposed: it is in the leader's log; nothing is changed any more.
        held_since_ns: when a majority had the payload of this ballot, and the leader had not.
        is_last: it is the run's last round of this fragment.
    """

    opened_at_ns: int
    is_last: bool
    announcement: BallotOpened
    ballot_at_ns: int
    deadline: Deadline
    attempt: int = 0
    contributions: dict[str, Contribution] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    received: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    decision: MergeDecided | None = None
    weights: tuple[float, ...] = ()
    clips: Clips = ()
    merged: dict[int, ReductionReported] = field(default_factory=dict)
    holders: dict[str, bytes] = field(default_factory=dict)
    received_merged: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    questioned: Questioned | None = None
    tried: tuple[tuple[str, BallotPart], ...] = ()
    renamed: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    is_proposed: bool = False
    held_since_ns: int | None = None

    def begin_ballot(
        self, announcement: BallotOpened, *, deadline: Deadline, contributions: dict[str, Contribution], now_ns: int
    ) -> None:
        """Forget what came in for the ballot before, but not who is rejected or excluded."""
        self.announcement, self.deadline, self.ballot_at_ns = announcement, deadline, now_ns
        self.attempt += 1
        self.contributions = contributions
        self.declined, self.received, self.merged, self.holders, self.received_merged = {}, {}, {}, {}, {}
        self.decision, self.weights, self.clips, self.tried, self.held_since_ns = None, (), (), (), None

    @property
    def fragment(self) -> int:
        """Its index."""
        return self.announcement.fragment

    @property
    def version(self) -> int:
        """The version that the round makes."""
        return self.announcement.version

    @property
    def ballot(self) -> Ballot:
        """The current one."""
        return self.announcement.ballot

    @property
    def members(self) -> tuple[str, ...]:
        """Of the current ballot."""
        return self.announcement.members

    @property
    def stripes(self) -> tuple[Stripe, ...]:
        """Of the current ballot, in block order."""
        return self.announcement.stripes

    @property
    def deadline_ns(self) -> int:
        """When the current ballot is given up."""
        return self.ballot_at_ns + self.deadline.duration_ns

    @property
    def reducers(self) -> tuple[str, ...]:
        """Each once, in the order of their stripes."""
        return tuple(dict.fromkeys(stripe.reducer for stripe in self.stripes))

    @property
    def is_merged(self) -> bool:
        """Every reducer has reported its merged stripe."""
        return self.decision is not None and len(self.merged) == len(self.stripes)

    @property
    def digest(self) -> bytes:
        """Of the merged payload, once `is_merged`."""
        return payload_digest([self.merged[index].digest for index in range(len(self.stripes))])

    def payload_holders(self) -> list[str]:
        """Regions that have this very payload on disk, sorted; once `is_merged`."""
        return [name for name, digest in sorted(self.holders.items()) if digest == self.digest]

    def has_merged_of(self, reducer: str, region: str) -> bool:
        """Whether a region has said that it has all merged stripes of a reducer, as that one told them."""
        if self.holders.get(region) == self.digest:
            return True
        got = self.received_merged.get(region)
        return got is not None and all(got[index] == self.merged[index].digest for index in self.stripes_of(reducer))

    def holds_other_of(self, reducer: str, region: str) -> bool:
        """Whether a region has said that it got a merged stripe of a reducer with another digest than the told one."""
        got = self.received_merged.get(region)
        return got is not None and any(
            got[index] and got[index] != self.merged[index].digest for index in self.stripes_of(reducer)
        )

    def stripes_of(self, reducer: str) -> list[int]:
        """What a reducer merges: indexes into `stripes`."""
        return [index for index, stripe in enumerate(self.stripes) if stripe.reducer == reducer]

    def late_reducers(self) -> tuple[str, ...]:
        """Those that have not reported each of their merged stripes, each once, in the order of the stripes."""
        late = (stripe.reducer for index, stripe in enumerate(self.stripes) if index not in self.merged)
        return tuple(dict.fromkeys(late))

    def missing_members(self) -> tuple[str, ...]:
        """Members that have neither contributed nor declined."""
        return tuple(one for one in self.members if one not in self.contributions and one not in self.declined)

    def stripes_received(self, reducer: str, told: StripesReceived) -> None:
        """A member's contribution has arrived at a reducer."""
        if told.learner in self.members:
            known = self.received.setdefault(told.learner, {})
            known |= dict.fromkeys(self.stripes_of(reducer), (told.incarnation, told.snapshot))

    def is_received(self, learner: str, stripes: Sequence[int] | None = None) -> bool:
        """Whether a learner's contribution to this ballot has arrived at all reducers, or at those of these stripes."""
        offered = self.contributions.get(learner)
        if offered is None:
            return False
        needed = range(len(self.stripes)) if stripes is None else stripes
        known, name = self.received.get(learner, {}), (offered.incarnation, offered.snapshot)
        return all(known.get(index) == name for index in needed)

    @property
    def phase(self) -> str:
        """Which of `view.PHASES` it is in."""
        if self.decision is None:
            return "gather"
        return "commit" if self.is_proposed else "reduce"

    def late_regions(self, regions: Sequence[str]) -> tuple[str, ...]:
        """Whom it waits for. Args: regions: of the run."""
        if self.decision is None:
            return self.missing_members()
        if self.is_merged:
            return tuple(name for name in regions if name not in self.holders)
        unheld = tuple(one.learner for one in self.decision.contributions if not self.is_received(one.learner))
        return unheld or self.late_reducers()

    def waiting(self) -> str:
        """What the round waits for, in words."""
        if self.is_proposed:
            return "waits for its ledger entry to commit"
        if self.decision is None:
            return f"waits for contributions of {', '.join(self.missing_members())}"
        if not self.is_merged:
            late = self.late_reducers()
            named = [one.learner for one in self.decision.contributions]
            unheld = [name for name in named if not self.is_received(name)]
            on_the_way = f", stripes of {', '.join(unheld)} are on their way" if unheld else ""
            return f"waits for merged stripes of {', '.join(late)}{on_the_way}"
        return f"waits for a majority to have the payload on disk, {', '.join(sorted(self.holders)) or 'nobody'} has"

    def report_fault(self, peer: str, report: ReductionReported, pieces: int) -> str:
        """Why a reducer's report is unusable; empty if it is fine."""
        assert self.decision is not None
        if not 0 <= report.stripe < len(self.stripes) or self.stripes[report.stripe].reducer != peer:
            return f"stripe {report.stripe} is not reduced by {peer}"
        rows = (report.squared_norms, *report.contribution_norms)
        if len(rows) != 1 + len(self.decision.contributions) or any(len(row) != pieces for row in rows):
            return "norms of another shape"
        # Of a merged stripe it is a little more than of the contributions, for its values are rounded.
        if not all(0.0 <= norm <= 4.0 * SQUARED_NORM_MAX for row in rows for norm in row):
            return "norms that are negative, not finite or beyond all bounds"
        return ""

    def norm_mismatch(self) -> tuple[str, ...]:
        """Learners whose stripes do not add up to the norms in the header of their contribution."""
        assert self.decision is not None
        found = []
        for place, one in enumerate(self.decision.contributions):
            for piece, claimed in enumerate(one.squared_norms):
                summed = sum(self.merged[index].contribution_norms[place][piece] for index in range(len(self.stripes)))
                if not is_same_norm(summed, claimed):
                    found.append(one.learner)
                    break
        return tuple(found)

    def merged_squared_norms(self) -> tuple[float, ...]:
        """Per piece, of the whole decoded payload; added in the order of the stripes."""
        columns = zip(*(self.merged[index].squared_norms for index in range(len(self.stripes))), strict=True)
        return tuple(sum(column) for column in columns)
