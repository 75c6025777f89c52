"""Culprits of a failed ballot, as far as the regions' own reports can tell.

Each missing stripe implicates a pair of regions: its sender and its receiver. A region is blamed if it is in more than
half of the pairs that it could be in; the region in most pairs goes first. A pair that no region explains is blamed on
its reducer: a while without stripes costs a reducer nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco_node.core.merge.numbers import is_same_norm, length_limits, stripe_radii
from diloco_node.core.rounds.open_round import OpenRound, QuestionedBallot
from diloco_node.core.rounds.suspicion import BallotRole, Blame
from diloco_node.core.types import RunSettings

Pair = tuple[str, str]
"""(sender, receiver) of stripes that are missing, or that are in question."""


@dataclass(frozen=True, slots=True)
class Culprits:
    """Regions that explain a set of pairs, each with its sorted partners. unexplained: pairs without a culprit."""

    senders: dict[str, list[str]]
    receivers: dict[str, list[str]]
    unexplained: frozenset[Pair]


def find_culprits(pairs: Collection[Pair], senders: Collection[str], receivers: Collection[str]) -> Culprits:
    """Find the region in most of the pairs, take its pairs away, and go on so. In a tie a receiver goes first.

    senders, receivers: all that could be in a pair. No region sends to itself.
    """
    pairs_left, culprits = set(pairs), Culprits({}, {}, frozenset())
    while pairs_left:
        candidates = []
        for side, (names, counterparts, partners_of) in enumerate(
            ((receivers, senders, culprits.receivers), (senders, receivers, culprits.senders))
        ):
            for name in sorted(names):
                partners = sorted(pair[side] for pair in pairs_left if pair[1 - side] == name)
                if 2 * len(partners) > len(set(counterparts) - {name}):
                    candidates.append((-len(partners), side, name, partners, partners_of))
        if not candidates:
            break
        _, side, name, partners, partners_of = min(candidates, key=lambda candidate: candidate[:3])
        partners_of[name] = partners
        pairs_left = {pair for pair in pairs_left if pair[1 - side] != name}
    return Culprits(culprits.senders, culprits.receivers, frozenset(pairs_left))


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings about one failed ballot: blames, sorted by region.

    cut_off: regions that the merged stripes of most reducers do not reach. They are at fault, not the reducers.
    """

    blames: tuple[Blame, ...] = ()
    cut_off: frozenset[str] = frozenset()


def judge_absences(round_: OpenRound, regions: int) -> Findings:
    """Blame the regions that have not done their part by the deadline of a ballot. regions: how many the run has."""
    if round_.is_merged:
        return _late_payload(round_, regions)
    if round_.decision is not None:
        blames = _late_stripes(round_)
    else:
        missing = [Blame(name, BallotRole.MEMBER, "its contribution did not come") for name in round_.missing_members()]
        culprits = _missing_stripes(round_, sorted(round_.contributions))
        blames = missing + [_blame_receiver(name, members) for name, members in culprits.receivers.items()]
    return Findings(tuple(sorted(blames, key=lambda blame: (blame.region, blame.role))))


def _missing_stripes(round_: OpenRound, members: list[str]) -> Culprits:
    pairs = {
        (member, reducer)
        for reducer in round_.late_reducers()
        for member in members
        if member != reducer and not round_.is_received(member, round_.stripes_of(reducer))
    }
    return find_culprits(pairs, members, round_.reducers)


def _blame_receiver(reducer: str, members: list[str]) -> Blame:
    return Blame(reducer, BallotRole.REDUCER, f"contributions of {', '.join(members)} did not reach it")


def _late_stripes(round_: OpenRound) -> list[Blame]:
    assert round_.decision is not None
    culprits = _missing_stripes(round_, [contribution.learner for contribution in round_.decision.contributions])
    blames = []
    for name, reducers in culprits.senders.items():
        reason = f"its contribution did not reach {', '.join(reducers)}"
        blames.append(Blame(name, BallotRole.MEMBER, reason))
        if name in round_.reducers:
            # Its merged stripes would not arrive either.
            blames.append(Blame(name, BallotRole.REDUCER, reason))
    lacking = culprits.receivers | _unexplained_pairs(culprits)
    blames += [_blame_receiver(name, members) for name, members in lacking.items()]
    waiting = {reducer for reducers in culprits.senders.values() for reducer in reducers}
    for name in round_.late_reducers():
        if name not in lacking and name not in waiting:
            blames.append(Blame(name, BallotRole.REDUCER, "it has all contributions and did not merge them"))
    return blames


def _unexplained_pairs(culprits: Culprits) -> dict[str, list[str]]:
    """Return the senders of the pairs that nobody explains, by receiver."""
    return {
        name: sorted(sender for sender, receiver in culprits.unexplained if receiver == name)
        for _, name in sorted(culprits.unexplained)
    }


def _late_payload(round_: OpenRound, regions: int) -> Findings:
    """Find why the payload is late although all reducers have merged: which merged stripes did not reach whom?"""
    observers = set(round_.merged_digests) | set(round_.payload_holders())
    pairs = {
        (name, reducer)
        for name in observers
        for reducer in round_.reducers
        if reducer != name and not round_.has_stripes_of(reducer, name)
    }
    # Here the reducers send. They are passed as receivers nevertheless, so that in a tie they are blamed.
    culprits = find_culprits(pairs, observers, round_.reducers)
    disputed = {blame.region: blame for blame in dispute_reducers(round_, regions)}
    blames = []
    for reducer, names in sorted((culprits.receivers | _unexplained_pairs(culprits)).items()):
        reason = f"its merged stripe did not reach {', '.join(names)}"
        blames.append(disputed.get(reducer, Blame(reducer, BallotRole.REDUCER, reason)))
    return Findings(tuple(blames), frozenset(culprits.senders))


def dispute_reducers(round_: OpenRound, regions: int) -> tuple[Blame, ...]:
    """Blame reducers that told the leader another digest than most of the other regions received.

    Between two regions nobody can say who is wrong.
    """
    blames = (_dispute_with(round_, reducer, regions - 1) for reducer in round_.reducers)
    return tuple(blame for blame in blames if blame is not None) if regions > 2 else ()


def _dispute_with(round_: OpenRound, reducer: str, observers: int) -> Blame | None:
    dissenters = [
        name for name in sorted(round_.merged_digests) if name != reducer and round_.has_other_stripes_of(reducer, name)
    ]
    if 2 * len(dissenters) <= observers:
        return None
    reason = f"it told another digest of its merged stripe than {', '.join(dissenters)} got from it"
    return Blame(reducer, BallotRole.REDUCER, reason, is_proved=True)


def blame_sums(
    round_: OpenRound, stripes: Mapping[int, tuple[bytes, tuple[float, ...]]], settings: RunSettings
) -> tuple[Blame, ...]:
    """Blame reducers whose merged stripe can't be the sum: it is too long, or has other norms than they report.

    The bytes are here, with the digest that the reducer told, and every region decodes them alike.
    stripes: (digest, squared norms per piece) of the merged stripes that came here; each is checked once.
    """
    assert round_.decision is not None
    blames = {}
    for index, (digest, norms) in sorted(stripes.items()):
        report, reducer = round_.reports[index], round_.stripes[index].reducer
        if index in round_.checked or digest != report.digest:
            continue
        round_.checked.add(index)
        radii = stripe_radii(round_.decision.coefficients, report.contribution_norms)
        limits = length_limits(radii, settings)
        for piece, (square, claim, limit) in enumerate(zip(norms, report.squared_norms, limits, strict=True)):
            place = f"its merged stripe {digest.hex()[:16]} has the squared norm {square:.6g} in piece {piece}"
            if not is_same_norm(square, claim):
                blames[reducer] = f"{place}, it reports {claim:.6g}"
            elif square > limit:
                blames[reducer] = f"{place}, its members can't exceed {limit:.6g}"
    return tuple(Blame(name, BallotRole.REDUCER, reason, is_proved=True) for name, reason in sorted(blames.items()))


def differing_norms(before: QuestionedBallot, round_: OpenRound) -> set[Pair]:
    """Find pairs (member, reducer) where the reducer's norms differ from the leader's own.

    before: the ballot in question. round_: its next ballot, in which the leader reduced the same stripes alone.
    """
    assert round_.decision is not None
    places = {contribution: place for place, contribution in enumerate(round_.decision.contributions)}
    pairs = set()
    for index, (stripe, report) in enumerate(zip(before.stripes, before.reports, strict=True)):
        for contribution, row in zip(before.contributions, report.contribution_norms, strict=True):
            place = places.get(contribution)
            own_row = None if place is None else round_.reports[index].contribution_norms[place]
            if own_row is not None and not all(is_same_norm(a, b) for a, b in zip(row, own_row, strict=True)):
                pairs.add((contribution.learner, stripe.reducer))
    return pairs


def blame_norms(pairs: Collection[Pair], disputes: Mapping[str, Collection[str]]) -> tuple[Blame, ...]:
    """Blame in each pair the region that is in more pairs.

    In a tie the reducer may have reported wrong norms, or the member may have sent it other bytes than the leader. The
    reducer is blamed at first. The member is blamed if it was in a pair with another reducer before (`disputes`).
    """
    blames = {}
    for member, reducer in sorted(pairs):
        pairs_of_reducer = sum(pair[1] == reducer for pair in pairs)
        pairs_of_member = sum(pair[0] == member for pair in pairs)
        is_tie = pairs_of_member == pairs_of_reducer
        if pairs_of_member > pairs_of_reducer or (is_tie and set(disputes.get(member, ())) - {reducer}):
            reason = "reducers got other bytes of its contribution than the leader"
            blames[member, BallotRole.MEMBER] = Blame(member, BallotRole.MEMBER, reason, is_proved=True)
        else:
            reason = "the norms that it reports are not those which the leader finds"
            blames[reducer, BallotRole.REDUCER] = Blame(reducer, BallotRole.REDUCER, reason, is_proved=True)
    return tuple(blames[key] for key in sorted(blames))
