"""A region's part in the audits of merged payloads, whoever leads: it draws, projects, and checks entries.

An entry may lack a nonce or a row because a region died or came late. A leader that hides a wrong sum may also leave
them away, or give up each ballot that it knows will be audited. So both are counted, and an alarm tells of them. No
leader is refused for it: on starved machines all would be.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from diloco_node.core.merge.freivalds import draw_windows
from diloco_node.core.merge.stripes import piece_blocks
from diloco_node.core.messages import AuditDrawn, ContributionProjected
from diloco_node.core.projections import NO_PROJECTION, Project, Projected, Projection, Window
from diloco_node.core.rounds.audit_draw import commitment_of, nonce_of
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.followed import FollowedBallot, FollowedRound
from diloco_node.core.types import Ballot, MergeRule, RoundBody, Stripe

LAPSE_BALLOTS: Final = 64
"""Lapses count over this many ballots of a leader."""

LAPSES_TOLD: Final = 3
"""After so many entries that lack something of one region, or so many ballots given up, there is an alarm."""


class AuditPart:
    """This region's part in audits. rounds: per fragment, as this region follows them."""

    def __init__(self, context: RoundContext, rounds: list[FollowedRound]) -> None:
        self._region, self._context, self._effects = context.region, context, context.effects
        self._secret, self._is_on = context.secret, context.settings.merge is not MergeRule.TRIMMED
        self._rounds, self._lapses, self._retreats = rounds, _Lapses(), _Lapses()
        self._piece_blocks = [piece_blocks(fragment.piece_sizes) for fragment in context.fragments]

    def follow(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        """Do what is due: tell the own nonce once all stripes are fixed, project once the leader has told its own."""
        announcement = ballot.announcement
        if ballot.digest and ballot.drawn is None and self._is_on and ballot.drawer == self._region:
            ballot.drawn = AuditDrawn(ballot.number, ballot.digest, (nonce_of(self._secret, ballot.number),))
            self._effects.send_all(self._context.regions, ballot.drawn)
        own = round_.contribution if ballot.has_contributed and not ballot.is_row_ordered else None
        is_payload_due = bool(ballot.digest) and not ballot.is_lost and not ballot.is_payload_ordered
        if not ballot.nonces or (own is None and not is_payload_due):
            return
        if windows := self._windows(announcement.fragment, ballot.nonces, announcement.stripes):
            ballot.is_row_ordered |= own is not None
            ballot.is_payload_ordered |= is_payload_due
            stripes, fragment = announcement.stripes if is_payload_due else (), announcement.fragment
            self._effects.emit(Project(ballot.number, fragment, round_.version, windows, stripes, own))

    def take(self, peer: str, message: AuditDrawn) -> None:
        """Take a nonce of the drawer's, or those of the leader's draw; a repeated draw asks for the row again."""
        round_ = self._round_of(message.ballot)
        if round_ is None or round_.ballot is None:
            return
        ballot = round_.ballot
        if peer == ballot.leader and ballot.nonces:
            self._tell_row(ballot)
        elif peer == ballot.leader and _keeps_commitment(ballot, message.nonces):
            ballot.nonces = message.nonces
        elif peer == ballot.drawer and ballot.drawn is None:
            ballot.drawn = message
        self.follow(round_, ballot)

    def projected(self, event: Projected) -> None:
        """Take what was worked out, and tell the leader the row."""
        round_ = self._round_of(event.ballot)
        if round_ is None or round_.ballot is None:
            return
        ballot, result = round_.ballot, event.projection
        row = result.contribution or ballot.projection.contribution
        is_row_news = row != ballot.projection.contribution
        payload = result if result.sums else ballot.projection
        ballot.projection = Projection(payload.sums, payload.errors, row)
        if is_row_news:
            self._tell_row(ballot)

    def repeat(self, ballot: FollowedBallot) -> None:
        """Tell the leader again what it may have missed."""
        if ballot.drawn is not None and ballot.drawer == self._region:
            self._effects.send(ballot.leader, ballot.drawn)

    def projection(self, fragment: int, number: Ballot) -> Projection:
        """Return this region's projection of a ballot's payload, as far as it is worked out."""
        ballot = self._rounds[fragment].ballot
        return ballot.projection if ballot is not None and ballot.number == number else NO_PROJECTION

    def entry_fault(self, body: RoundBody, coefficients: tuple[tuple[float, ...], ...]) -> str:
        """Return how an entry differs from what is known here of its round; empty if it does not."""
        round_ = self._rounds[body.fragment]
        windows = self._windows(body.fragment, body.nonces, body.stripes)
        if fault := round_.entry_fault(body, coefficients, windows):
            return fault
        ballot = round_.ballot
        if not self._is_on or ballot is None or ballot.number != body.ballot or ballot.leader == self._region:
            return ""
        if not _keeps_commitment(ballot, body.nonces):
            return f"{ballot.leader} names another nonce than it committed to"
        lapses = set()
        if ballot.drawn is not None and (
            body.nonces[1:] != ballot.drawn.nonces or body.payload_digest != ballot.drawn.digest
        ):
            lapses.add(ballot.drawer)
        if windows:
            rows = body.projections or ((),) * len(body.members)
            lapses |= {member.contribution.learner for member, row in zip(body.members, rows, strict=True) if not row}
        for name in self._lapses.note(body.ballot, lapses):
            cause = (
                "the link to it or a machine is too slow"
                if name == self._region
                else f"{name} does not tell them in time"
            )
            text = f"audits of {LAPSES_TOLD} entries by {ballot.leader} lack the nonce or the projections of {name}"
            self._effects.note("audit", f"{text}: {ballot.leader} leaves them out, or {cause}", is_alarm=True)
        return ""

    def give_up(self, ballot: FollowedBallot, leader: str, stripes: tuple[Stripe, ...]) -> None:
        """Count a ballot that its leader gives up for another one, of these stripes.

        Once the drawer has told its nonce the leader knows whether it will be audited. After an audit that finds
        something it reduces alone what others reduced.
        """
        reducers, reducers_before = ({cut.reducer for cut in cuts} for cuts in (stripes, ballot.announcement.stripes))
        is_answer = reducers == {leader} != reducers_before
        if (
            ballot.drawn is not None
            and ballot.leader == leader
            and not is_answer
            and self._retreats.note(ballot.number, {leader})
        ):
            text = (
                f"{leader} gave up {LAPSES_TOLD} ballots once they were drawn: it avoids audits, or links or "
                "machines are too slow"
            )
            self._effects.note("audit", text, is_alarm=True)

    def _windows(self, fragment: int, nonces: tuple[bytes, ...], stripes: tuple[Stripe, ...]) -> tuple[Window, ...]:
        return draw_windows(nonces, stripes, self._piece_blocks[fragment]) if self._is_on else ()

    def _round_of(self, number: Ballot) -> FollowedRound | None:
        rounds = (round_ for round_ in self._rounds if round_.ballot is not None and round_.ballot.number == number)
        return next(rounds, None)

    def _tell_row(self, ballot: FollowedBallot) -> None:
        if ballot.projection.contribution:
            self._effects.send(ballot.leader, ContributionProjected(ballot.number, ballot.projection.contribution))


def _keeps_commitment(ballot: FollowedBallot, nonces: tuple[bytes, ...]) -> bool:
    """Whether the leader's nonce is the one that it committed to."""
    return bool(nonces) and commitment_of(nonces[0]) == ballot.announcement.commitment


class _Lapses:
    """Lapses in one term of a leader: by ballot, the regions whose they are."""

    def __init__(self) -> None:
        self._names: dict[Ballot, set[str]] = {}

    def note(self, ballot: Ballot, names: set[str]) -> list[str]:
        """Take a ballot's lapses. Return the regions of which there are enough now to tell it."""
        is_new = ballot not in self._names
        self._names[ballot] = names
        self._names = {
            number: earlier
            for number, earlier in self._names.items()
            if number.term == ballot.term and number.number > ballot.number - LAPSE_BALLOTS
        }
        counts = Counter(name for earlier in self._names.values() for name in earlier)
        return [name for name in sorted(names) if is_new and counts[name] == LAPSES_TOLD]
