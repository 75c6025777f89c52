"""What a region knows of the rounds that it follows.

A followed round has a current ballot, and some facts that outlive it. Stripes may come before the ballot that explains
them, because bulk and control are on different connections; they wait in `EarlyArrivals`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from diloco_node.core.events import ContributionStripeArrived, MergedStripeArrived, ReductionDone
from diloco_node.core.messages import BallotOpened, MergeDecided, ReductionReported
from diloco_node.core.types import Ballot, Contribution, Stripe

EARLY_MAX: Final = 256
"""Arrivals of one sender that are remembered. Of more its oldest ballots' are dropped: their rounds take a further
ballot."""

Arrival = ContributionStripeArrived | MergedStripeArrived
Block = tuple[int, int]
Name = tuple[str, int, int]


def name_of(contribution: Contribution) -> Name:
    """What stays the same from ballot to ballot."""
    return contribution.learner, contribution.incarnation, contribution.snapshot


@dataclass(slots=True)
class FollowedBallot:
    """This region's part in the current ballot of one round.

    Attributes:
        leader: who opened it. opened: its announcement.
        has_contributed, declined: its learner's answer in this ballot.
        decision: what to merge, once decided.
        reducing: stripes whose reduction was started, and the order of their sum (places in the decision).
        reduced: those that are done.
        merged: digests of merged stripes that are here. digest: of the payload, once it is being stored.
        is_lost: its merged stripes went before they were written.
    """

    leader: str
    opened: BallotOpened
    has_contributed: bool = False
    declined: str = ""
    decision: MergeDecided | None = None
    reducing: dict[int, list[int]] = field(default_factory=dict)
    reduced: dict[int, ReductionDone] = field(default_factory=dict)
    merged: dict[int, bytes] = field(default_factory=dict)
    digest: bytes = b""
    is_lost: bool = False

    @property
    def ballot(self) -> Ballot:
        """Its number."""
        return self.opened.ballot

    def own_stripes(self, region: str) -> list[tuple[int, Stripe]]:
        """What a region reduces, with the places in the ballot."""
        return [(index, one) for index, one in enumerate(self.opened.stripes) if one.reducer == region]

    def lacking_reducers(self) -> tuple[str, ...]:
        """Those whose merged stripes are not here, each once, in the order of the stripes."""
        lacking = (stripe.reducer for index, stripe in enumerate(self.opened.stripes) if index not in self.merged)
        return tuple(dict.fromkeys(lacking))

    def keep_merged(self, event: MergedStripeArrived) -> None:
        """The sender chose number and blocks; the shell may not have known the ballot's stripes yet."""
        if 0 <= event.stripe < len(self.opened.stripes) and self.opened.stripes[event.stripe] == event.cut:
            self.merged[event.stripe] = event.digest

    def report_of(self, reduced: ReductionDone) -> ReductionReported:
        """For the leader, with the norms in the order in which it named the contributions."""
        order = self.reducing[reduced.stripe]
        norms = dict(zip(order, reduced.contribution_norms, strict=True))
        return ReductionReported(
            self.ballot,
            reduced.stripe,
            reduced.squared_norms,
            tuple(norms[place] for place in range(len(order))),
            reduced.digest,
        )

    def reduced_blocks(self) -> dict[int, Block]:
        """The blocks of what was reduced here, by stripe."""
        stripes = self.opened.stripes
        return {index: (stripes[index].block_start, stripes[index].block_stop) for index in self.reduced}


@dataclass(slots=True)
class FollowedRound:
    """The round of one fragment that this region follows; what outlives its ballots.

    Attributes:
        version: of the round that the rest is about.
        part: the current ballot; None before one was opened.
        pending: the learner's contribution to this round. sent: the name of the one that was sent to the reducers.
        requested_base: the base against which a snapshot was requested; None while none is being taken.
        arrived: contributions and block ranges that are in this region's memory, in the order in which they came, with
            the version that they are for.
        residual: (version, ballot, blocks) of the residual that the last committed ballot left here.
    """

    version: int = -1
    part: FollowedBallot | None = None
    pending: Contribution | None = None
    sent: Name | None = None
    requested_base: int | None = None
    arrived: dict[tuple[Name, Block], int] = field(default_factory=dict)
    residual: tuple[int, Ballot, dict[int, Block]] | None = None

    def keep_stripe(self, part: FollowedBallot, event: ContributionStripeArrived, region: str) -> bool:
        """Remember a stripe that a region is to reduce; False if it is another region's, or other blocks."""
        index, contribution = event.stripe, event.contribution
        if not 0 <= index < len(part.opened.stripes) or part.opened.stripes[index] != Stripe(region, *event.blocks):
            return False
        self.arrived[name_of(contribution), event.blocks] = contribution.base_version + 1
        return True

    def has_all(self, part: FollowedBallot, name: Name, region: str) -> bool:
        """Whether everything of a contribution that a region is to reduce has arrived."""
        own = [(stripe.block_start, stripe.block_stop) for _, stripe in part.own_stripes(region)]
        return bool(own) and all((name, blocks) in self.arrived for blocks in own)

    def received_names(self, part: FollowedBallot, region: str) -> list[Name]:
        """Of each member the newest contribution of which that is so, sorted. A learner that died leaves older ones."""
        whole = sorted({name for name, _ in self.arrived if self.has_all(part, name, region)})
        return list({name[0]: name for name in whole if name[0] in part.opened.members}.values())

    def residual_of(self, stripe: int, blocks: Block) -> Ballot | None:
        """The ballot that committed the version before, if it has left a residual over the same blocks here."""
        if self.residual is None:
            return None
        version, ballot, ranges = self.residual
        return ballot if version == self.version - 1 and ranges.get(stripe) == blocks else None


class EarlyArrivals:
    """By ballot, in the order in which they came."""

    def __init__(self) -> None:
        self._arrivals: dict[Ballot, list[Arrival]] = {}

    @property
    def has_any(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._arrivals)

    def keep(self, event: Arrival) -> None:
        """Remember it."""
        self._arrivals.setdefault(event.ballot, []).append(event)
        sender = _sender_of(event)
        counts = {
            ballot: sum(_sender_of(one) == sender for one in events)
            for ballot, events in sorted(self._arrivals.items())
        }
        while sum(counts.values()) > EARLY_MAX:
            oldest = next(ballot for ballot, count in counts.items() if count)
            self._leave(oldest, [one for one in self._arrivals[oldest] if _sender_of(one) != sender])
            counts[oldest] = 0

    def take(self, ballot: Ballot, fragment: int) -> list[Arrival]:
        """What came for a ballot that is known now."""
        return [event for event in self._arrivals.pop(ballot, []) if _fragment_of(event) == fragment]

    def forget(self, fragment: int, ballot: Ballot) -> None:
        """The fragment's round is over with this ballot: drop what came for it and for the ballots before."""
        for older in [one for one in self._arrivals if one <= ballot]:
            self._leave(older, [event for event in self._arrivals[older] if _fragment_of(event) != fragment])

    def _leave(self, ballot: Ballot, left: list[Arrival]) -> None:
        if left:
            self._arrivals[ballot] = left
        else:
            del self._arrivals[ballot]


def _sender_of(event: Arrival) -> str:
    return event.cut.reducer if isinstance(event, MergedStripeArrived) else event.contribution.learner


def _fragment_of(event: Arrival) -> int:
    return event.fragment if isinstance(event, MergedStripeArrived) else event.contribution.fragment
