"""Culprits of a failed ballot, as far as the regions' own reports can tell.

Each missing stripe implicates two regions: its sender and its receiver. Blamed is the region that is in more of the
pairs, if it is in more than half of those that it could be in. If nothing else explains a pair, its reducer is blamed:
a while without stripes costs it nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco_node.core.merge.numbers import is_same_norm, length_limits, stripe_radii
from diloco_node.core.rounds.open_round import OpenRound, QuestionedBallot
from diloco_node.core.rounds.suspicion import BallotRole, Blame
from diloco_node.core.types import RunSettings

Pair = tuple[str, str]
"""(sender, receiver)."""


@dataclass(frozen=True, slots=True)
class Culprits:
    """Regions that explain a set of pairs, each with its sorted counterparts; and the pairs that none explains."""

    givers: dict[str, list[str]]
    takers: dict[str, list[str]]
    unexplained: frozenset[Pair]


def find_culprits(pairs: Collection[Pair], givers: Collection[str], takers: Collection[str]) -> Culprits:
    """Blame the region with most of the remaining pairs, one after the other; takers before givers.

    givers, takers: all that could be in a pair. No region gives to itself.
    """
    pairs_left, culprits = set(pairs), Culprits({}, {}, frozenset())
    while pairs_left:
        candidates = []
        for side, (names, counterparts, blame_of) in enumerate(
            ((takers, givers, culprits.takers), (givers, takers, culprits.givers))
        ):
            for name in sorted(names):
                seen_by = sorted(pair[side] for pair in pairs_left if pair[1 - side] == name)
                if 2 * len(seen_by) > len(set(counterparts) - {name}):
                    candidates.append((-len(seen_by), side, name, seen_by, blame_of))
        if not candidates:
            break
        _, side, name, seen_by, blame_of = min(candidates, key=lambda candidate: candidate[:3])
        blame_of[name] = seen_by
        pairs_left = {pair for pair in pairs_left if pair[1 - side] != name}
    return Culprits(culprits.givers, culprits.takers, frozenset(pairs_left))


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings about one failed ballot: blames, sorted by region.

    cut_off: regions that merged stripes of most reducers do not reach: the fault is theirs.
    """

    blames: tuple[Blame, ...] = ()
    cut_off: frozenset[str] = frozenset()


def judge_absences(round_: OpenRound, regions: int) -> Findings:
    """Blame the regions that have not done their part by the deadline of a ballot. regions: number of the run's."""
    if round_.is_merged:
        return _late_payload(round_, regions)
    if round_.decision is not None:
        blames = _late_stripes(round_)
    else:
        missing = [Blame(name, BallotRole.MEMBER, "its contribution did not come") for name in round_.missing_members()]
        culprits = _missing_stripes(round_, sorted(round_.contributions))
        blames = missing + [_lacks(name, of) for name, of in culprits.takers.items()]
    return Findings(tuple(sorted(blames, key=lambda blame: (blame.region, blame.role))))


def _missing_stripes(round_: OpenRound, members: list[str]) -> Culprits:
    pairs = {
        (member, reducer)
        for reducer in round_.late_reducers()
        for member in members
        if member != reducer and not round_.is_received(member, round_.stripes_of(reducer))
    }
    return find_culprits(pairs, members, round_.reducers)


def _lacks(reducer: str, members: list[str]) -> Blame:
    return Blame(reducer, BallotRole.REDUCER, f"contributions of {', '.join(members)} did not reach it")


def _late_stripes(round_: OpenRound) -> list[Blame]:
    assert round_.decision is not None
    culprits = _missing_stripes(round_, [contribution.learner for contribution in round_.decision.contributions])
    blames = []
    for name, reducers in culprits.givers.items():
        reason = f"its contribution did not reach {', '.join(reducers)}"
        blames.append(Blame(name, BallotRole.MEMBER, reason))
        if name in round_.reducers:
            # What it merges would not reach anybody either.
            blames.append(Blame(name, BallotRole.REDUCER, reason))
    lacking = culprits.takers | _unexplained(culprits)
    blames += [_lacks(name, of) for name, of in lacking.items()]
    waiting = {reducer for reducers in culprits.givers.values() for reducer in reducers}
    for name in round_.late_reducers():
        if name not in lacking and name not in waiting:
            blames.append(Blame(name, BallotRole.REDUCER, "it has all contributions and did not merge them"))
    return blames


def _unexplained(culprits: Culprits) -> dict[str, list[str]]:
    """Return the pairs that nobody explains, by receiver."""
    return {
        taker: sorted(giver for giver, receiver in culprits.unexplained if receiver == taker)
        for _, taker in sorted(culprits.unexplained)
    }


def _late_payload(round_: OpenRound, regions: int) -> Findings:
    """All reducers reported their merge; the regions report which merged stripes they have."""
    observers = set(round_.merged_digests) | set(round_.payload_holders())
    pairs = {
        (name, reducer)
        for name in observers
        for reducer in round_.reducers
        if reducer != name and not round_.has_stripes_of(reducer, name)
    }
    # The reducers stand in the place of takers, though they send: they are blamed first.
    culprits = find_culprits(pairs, observers, round_.reducers)
    disputed = {blame.region: blame for blame in dispute_reducers(round_, regions)}
    blames = []
    for reducer, names in sorted((culprits.takers | _unexplained(culprits)).items()):
        reason = f"its merged stripe did not reach {', '.join(names)}"
        blames.append(disputed.get(reducer, Blame(reducer, BallotRole.REDUCER, reason)))
    return Findings(tuple(blames), frozenset(culprits.givers))


def dispute_reducers(round_: OpenRound, regions: int) -> tuple[Blame, ...]:
    """Blame reducers that told the leader another digest than most of the other regions received.

    Between two regions nobody can say who is wrong.
    """
    blames = (_disputed(round_, reducer, regions - 1) for reducer in round_.reducers)
    return tuple(blame for blame in blames if blame is not None) if regions > 2 else ()


def _disputed(round_: OpenRound, reducer: str, observers: int) -> Blame | None:
    against = [
        name for name in sorted(round_.merged_digests) if name != reducer and round_.has_other_stripes_of(reducer, name)
    ]
    if 2 * len(against) <= observers:
        return None
    reason = f"it told another digest of its merged stripe than {', '.join(against)} got from it"
    return Blame(reducer, BallotRole.REDUCER, reason, is_proved=True)


def blame_sums(
    round_: OpenRound,
    stripes: Mapping[int, tuple[bytes, tuple[float, ...]]],
    settings: RunSettings,
) -> tuple[Blame, ...]:
    """Blame reducers whose merged stripe can't be the sum: it is too long, or has other norms than they report.

    Nobody is asked: the bytes are here, with the digest that the reducer told, and every region decodes them alike.
    stripes: (digest, squared norms per piece) of the merged stripes that came here; each is looked at once.
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
    """Find pairs (member, reducer) where the reducer's norms differ from the leader's own over the same blocks.

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
    """Blame the region of each pair that is in more pairs: its word about norms is wrong.

    A member may have sent other bytes to one reducer than to the leader. So a single pair costs the reducer its stripes
    at first. It costs the member its place if that one was in such a pair (`disputes`) with another reducer before.
    """
    blames = {}
    for member, reducer in sorted(pairs):
        members = sum(pair[1] == reducer for pair in pairs)
        reducers = sum(pair[0] == member for pair in pairs)
        is_member = reducers > members or (reducers == members and set(disputes.get(member, ())) - {reducer})
        if is_member:
            reason = "reducers got other bytes of its contribution than the leader"
            blames[member, BallotRole.MEMBER] = Blame(member, BallotRole.MEMBER, reason, is_proved=True)
        else:
            reason = "the norms that it reports are not those which the leader finds"
            blames[reducer, BallotRole.REDUCER] = Blame(reducer, BallotRole.REDUCER, reason, is_proved=True)
    return tuple(blames[key] for key in sorted(blames))
