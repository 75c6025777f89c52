"""Rounds that a region follows: the current ballot of each, and some facts that outlive it.

Stripes may come before the ballot that explains them, because bulk and control are on different connections. They wait
in `EarlyArrivals`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum
from typing import Final

from diloco_node.core.events import ContributionStripeArrived, MergedStripeArrived, ReductionDone
from diloco_node.core.merge.freivalds import has_other_projections, wrong_reducers
from diloco_node.core.messages import AuditDrawn, BallotOpened, MergeDecided, PayloadDurable, ReductionReported
from diloco_node.core.projections import NO_PROJECTION, Projection, Window
from diloco_node.core.rounds.audit_draw import drawer_of
from diloco_node.core.types import Ballot, Contribution, RoundBody, Stripe

EARLY_MAX: Final = 256
"""Arrivals that are remembered per sender. Beyond it, those of the sender's oldest ballots are dropped, and their
rounds take a further ballot."""

Arrival = ContributionStripeArrived | MergedStripeArrived
Block = tuple[int, int]
Name = tuple[str, int, int]


def name_of(contribution: Contribution) -> Name:
    """Return the name of a contribution, which stays the same from ballot to ballot."""
    return contribution.learner, contribution.incarnation, contribution.snapshot


@dataclass(slots=True)
class FollowedBallot:
    """This region's part in the current ballot of one round.

    Attributes:
        has_contributed, refusal: the learner's answer in this ballot.
        told_names: of the contributions that the leader was told to have arrived here.
        sum_orders: stripes whose reduction was started, each with the order of its sum (places in the decision).
        reductions: those that are done.
        merged: (digest, squared norms) of the merged stripes that are here. digest: of the payload, once it is stored.
        is_lost: its merged stripes were dropped before they were written.
        drawn: the drawer's nonce, as it told it. nonces: all of the audit, as the leader told them.
        projection: as far as it is worked out. is_row_ordered, is_payload_ordered: that part of it was ordered.
    """

    leader: str
    announcement: BallotOpened
    has_contributed: bool = False
    refusal: str = ""
    told_names: list[Name] = field(default_factory=list)
    decision: MergeDecided | None = None
    sum_orders: dict[int, list[int]] = field(default_factory=dict)
    reductions: dict[int, ReductionDone] = field(default_factory=dict)
    merged: dict[int, tuple[bytes, tuple[float, ...]]] = field(default_factory=dict)
    digest: bytes = b""
    is_lost: bool = False
    drawn: AuditDrawn | None = None
    nonces: tuple[bytes, ...] = ()
    projection: Projection = NO_PROJECTION
    is_row_ordered: bool = False
    is_payload_ordered: bool = False

    @property
    def drawer(self) -> str:
        """The region whose nonce decides, beside the leader's, about the audit."""
        return drawer_of(self.announcement, self.leader)

    @property
    def number(self) -> Ballot:
        """The number of the ballot."""
        return self.announcement.ballot

    def own_stripes(self, region: str) -> list[tuple[int, Stripe]]:
        """Return the stripes that a region reduces, with their places in the ballot."""
        return [(index, stripe) for index, stripe in enumerate(self.announcement.stripes) if stripe.reducer == region]

    def is_reducing(self, region: str) -> bool:
        """Whether a region has yet to reduce any of its stripes."""
        return any(index not in self.reductions for index, _ in self.own_stripes(region))

    def lacking_reducers(self) -> tuple[str, ...]:
        """Return reducers whose merged stripes are not here, each once, in the order of the stripes."""
        lacking = (stripe.reducer for index, stripe in enumerate(self.announcement.stripes) if index not in self.merged)
        return tuple(dict.fromkeys(lacking))

    def keep_merged(self, event: MergedStripeArrived) -> None:
        """Remember a merged stripe, if its number and blocks, which its sender chose, are the ballot's."""
        if 0 <= event.stripe < len(self.announcement.stripes) and self.announcement.stripes[event.stripe] == event.cut:
            self.merged[event.stripe] = event.digest, event.squared_norms

    def durable_report(self) -> PayloadDurable:
        """Build the report that the payload is on disk."""
        return PayloadDurable(self.number, self.digest)

    def payload_norms(self) -> tuple[float, ...]:
        """Return the squared norm of each piece of the payload, once all its stripes are here."""
        rows = (self.merged[index][1] for index in range(len(self.announcement.stripes)))
        return tuple(fsum(column) for column in zip(*rows, strict=True))

    def report_of(self, reduction: ReductionDone) -> ReductionReported:
        """Build the report of a reduction for the leader, with the norms in its order of the contributions."""
        order = self.sum_orders[reduction.stripe]
        norms = dict(zip(order, reduction.contribution_norms, strict=True))
        return ReductionReported(
            self.number,
            reduction.stripe,
            reduction.squared_norms,
            tuple(norms[place] for place in range(len(order))),
            reduction.digest,
        )


@dataclass(slots=True)
class FollowedRound:
    """The round of one fragment that this region follows; the facts that outlive its ballots.

    Attributes:
        version: of the round that the rest is about. ballot: the current one; None before one was opened.
        contribution: the learner's. sent_name: the name of the one that was sent to the reducers.
        requested_base: the base against which a snapshot was requested; None while none is being taken.
        arrivals: contributions and blocks in this region's memory, in the order of arrival, each with its version.
    """

    version: int = -1
    ballot: FollowedBallot | None = None
    contribution: Contribution | None = None
    sent_name: Name | None = None
    requested_base: int | None = None
    arrivals: dict[tuple[Name, Block], int] = field(default_factory=dict)

    def entry_fault(
        self, body: RoundBody, coefficients: tuple[tuple[float, ...], ...], windows: tuple[Window, ...]
    ) -> str:
        """Return how an entry differs from what this region contributed, told and got; empty if it does not."""
        if self.version != body.version:
            return ""
        is_followed = self.ballot is not None and self.ballot.number == body.ballot
        projection = self.ballot.projection if self.ballot is not None and is_followed else NO_PROJECTION
        for member, row in zip(body.members, body.projections or ((),) * len(body.members), strict=True):
            contribution = member.contribution
            if self.contribution is None or name_of(contribution) != name_of(self.contribution):
                continue
            if contribution != self.contribution:
                return f"it names {contribution}, this region contributed {self.contribution}"
            own_row = projection.contribution
            if row and own_row and has_other_projections(contribution, windows, row, own_row):
                return "it names other projections than those of this region's contribution"
        is_same = self.ballot is not None and self.ballot.digest == body.payload_digest
        wrong = wrong_reducers(windows, projection, coefficients, body.projections) if is_same else {}
        return "; ".join(f"{reducer}: {reason}" for reducer, reason in wrong.items())

    def keep_stripe(self, ballot: FollowedBallot, event: ContributionStripeArrived, region: str) -> bool:
        """Remember a stripe that a region is to reduce; False if it belongs to another region, or has other blocks."""
        index, contribution = event.stripe, event.contribution
        if not 0 <= index < len(ballot.announcement.stripes) or ballot.announcement.stripes[index] != Stripe(
            region, *event.blocks
        ):
            return False
        self.arrivals[name_of(contribution), event.blocks] = contribution.base_version + 1
        return True

    def received_names(self, ballot: FollowedBallot, region: str) -> list[Name]:
        """Return each member's newest contribution of which all stripes that a region is to reduce are here, sorted.

        A learner that died leaves older ones behind.
        """
        cuts = [(stripe.block_start, stripe.block_stop) for _, stripe in ballot.own_stripes(region)]
        members = ballot.announcement.members
        names = sorted({name for name, _ in self.arrivals if name[0] in members}) if cuts else []
        return list({name[0]: name for name in names if all((name, cut) in self.arrivals for cut in cuts)}.values())


class EarlyArrivals:
    """Arrivals whose ballot is not known yet: by ballot, in the order in which they came."""

    def __init__(self) -> None:
        self._arrivals: dict[Ballot, list[Arrival]] = {}

    @property
    def has_any(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._arrivals)

    def keep(self, event: Arrival) -> None:
        """Remember an arrival."""
        self._arrivals.setdefault(event.ballot, []).append(event)
        sender = _sender_of(event)
        counts = {
            ballot: sum(_sender_of(arrival) == sender for arrival in events)
            for ballot, events in sorted(self._arrivals.items())
        }
        while sum(counts.values()) > EARLY_MAX:
            oldest = next(ballot for ballot, count in counts.items() if count)
            self._leave(oldest, [arrival for arrival in self._arrivals[oldest] if _sender_of(arrival) != sender])
            counts[oldest] = 0

    def take(self, ballot: Ballot, fragment: int) -> list[Arrival]:
        """Return the arrivals for a ballot that is known now, and forget them."""
        return [event for event in self._arrivals.pop(ballot, []) if _fragment_of(event) == fragment]

    def forget(self, fragment: int, ballot: Ballot) -> None:
        """Drop the fragment's arrivals for this ballot and all before it: its round is over."""
        for older in [number for number in self._arrivals if number <= ballot]:
            self._leave(older, [event for event in self._arrivals[older] if _fragment_of(event) != fragment])

    def _leave(self, ballot: Ballot, arrivals: list[Arrival]) -> None:
        if arrivals:
            self._arrivals[ballot] = arrivals
        else:
            del self._arrivals[ballot]


def _sender_of(event: Arrival) -> str:
    return event.cut.reducer if isinstance(event, MergedStripeArrived) else event.contribution.learner


def _fragment_of(event: Arrival) -> int:
    return event.fragment if isinstance(event, MergedStripeArrived) else event.contribution.fragment


def decision_fault(decision: MergeDecided, announcement: BallotOpened, pieces: int) -> str:
    """Return why a leader's decision does not fit its ballot; empty if it does: the sum follows it blindly."""
    names = [contribution.learner for contribution in decision.contributions]
    if decision.version != announcement.version or not names or len(names) != len(set(names)):
        return f"version {decision.version} of {names}, the ballot is for version {announcement.version}"
    strange = [
        contribution
        for contribution in decision.contributions
        if contribution.learner not in announcement.members or contribution.fragment != decision.fragment
    ]
    if strange:
        return f"{strange[0].learner}'s contribution to fragment {strange[0].fragment} has no part in it"
    rows = [len(row) for row in decision.coefficients]
    if rows != [pieces] * len(names):
        return f"coefficients {rows} for {len(names)} contributions of {pieces} pieces"
    return ""
