"""Who failed a ballot, as far as the regions' own reports can tell.

What is missing is missing between two: one that gives, one that takes. Of each pair either may be at fault, so the one
is blamed that is in more of them, if that is more than half of those it could be in. Of a pair that nothing else
explains, the reducer is blamed: to be without stripes for a while costs it nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco_node.core.rounds.open_round import OpenRound, Questioned, is_same_norm
from diloco_node.core.rounds.suspicion import BallotPart, Blame

Pair = tuple[str, str]
"""(who gives, who takes)."""


@dataclass(frozen=True, slots=True)
class Culprits:
    """What explains a set of pairs; each with those that saw it, sorted.

    Attributes:
        rest: pairs that nobody explains.
    """

    givers: dict[str, list[str]]
    takers: dict[str, list[str]]
    rest: frozenset[Pair]


def find_culprits(pairs: Collection[Pair], givers: Collection[str], takers: Collection[str]) -> Culprits:
    """Blame, one after the other, who is in most of the pairs that are left; takers before givers.

    Args:
        givers, takers: all that could be in a pair. Nobody gives to itself.
    """
    left, found = set(pairs), Culprits({}, {}, frozenset())
    while left:
        ranked = []
        for at, (names, others, blamed) in enumerate(((takers, givers, found.takers), (givers, takers, found.givers))):
            for name in sorted(names):
                seen_by = sorted(pair[at] for pair in left if pair[1 - at] == name)
                if 2 * len(seen_by) > len(set(others) - {name}):
                    ranked.append((-len(seen_by), at, name, seen_by, blamed))
        if not ranked:
            break
        _, at, name, seen_by, blamed = min(ranked, key=lambda one: one[:3])
        blamed[name] = seen_by
        left = {pair for pair in left if pair[1 - at] != name}
    return Culprits(found.givers, found.takers, frozenset(left))


@dataclass(frozen=True, slots=True)
class Findings:
    """About one failed ballot.

    Attributes:
        blames: sorted by region.
        cut_off: regions that merged stripes of most reducers do not reach: the fault is theirs.
    """

    blames: tuple[Blame, ...] = ()
    cut_off: frozenset[str] = frozenset()


def late_parts(one: OpenRound) -> Findings:
    """Whose part is missing when the deadline of a ballot has passed."""
    if one.is_merged:
        return _late_payload(one)
    if one.decision is not None:
        blames = _late_stripes(one)
    else:
        missing = [Blame(name, BallotPart.MEMBER, "its contribution did not come") for name in one.missing_members()]
        found = _missing_stripes(one, sorted(one.contributions))
        blames = missing + [_lacks(name, of) for name, of in found.takers.items()]
    return Findings(tuple(sorted(blames, key=lambda blame: (blame.region, blame.part))))


def _missing_stripes(one: OpenRound, members: list[str]) -> Culprits:
    pairs = {
        (member, reducer)
        for reducer in one.late_reducers()
        for member in members
        if member != reducer and not one.is_received(member, one.stripes_of(reducer))
    }
    return find_culprits(pairs, members, one.reducers)


def _lacks(reducer: str, members: list[str]) -> Blame:
    return Blame(reducer, BallotPart.REDUCER, f"contributions of {', '.join(members)} did not reach it")


def _late_stripes(one: OpenRound) -> list[Blame]:
    assert one.decision is not None
    found = _missing_stripes(one, [offered.learner for offered in one.decision.contributions])
    blames = []
    for name, at in found.givers.items():
        reason = f"its contribution did not reach {', '.join(at)}"
        blames.append(Blame(name, BallotPart.MEMBER, reason))
        if name in one.reducers:
            # What it merges would not reach anybody either.
            blames.append(Blame(name, BallotPart.REDUCER, reason))
    lacking = found.takers | _unexplained(found)
    blames += [_lacks(name, of) for name, of in lacking.items()]
    waiting = {reducer for at in found.givers.values() for reducer in at}
    for name in one.late_reducers():
        if name not in lacking and name not in waiting:
            blames.append(Blame(name, BallotPart.REDUCER, "it has all contributions and did not merge them"))
    return blames


def _unexplained(found: Culprits) -> dict[str, list[str]]:
    """Pairs that nobody explains, by who takes."""
    return {taker: sorted(one for one, at in found.rest if at == taker) for _, taker in sorted(found.rest)}


def _late_payload(one: OpenRound) -> Findings:
    """All reducers said that they merged; the regions say what of it they have."""
    observers = set(one.received_merged) | set(one.payload_holders())
    pairs = {
        (name, reducer)
        for name in observers
        for reducer in one.reducers
        if reducer != name and not one.has_merged_of(reducer, name)
    }
    # Here a reducer gives and a region takes; still the reducer is blamed first.
    found = find_culprits(pairs, observers, one.reducers)
    blames = []
    for reducer, at in sorted((found.takers | _unexplained(found)).items()):
        reason = f"its merged stripe did not reach {', '.join(at)}"
        blames.append(_disputed(one, reducer, len(observers - {reducer})) or Blame(reducer, BallotPart.REDUCER, reason))
    return Findings(tuple(blames), frozenset(found.givers))


def disputed_reducers(one: OpenRound, regions: int) -> tuple[Blame, ...]:
    """Reducers that told the leader another digest than the one that most of the other regions got.

    Args:
        regions: of the run. Of two nobody can say who is wrong.
    """
    blames = (_disputed(one, reducer, regions - 1) for reducer in one.reducers)
    return tuple(blame for blame in blames if blame is not None) if regions > 2 else ()


def _disputed(one: OpenRound, reducer: str, others: int) -> Blame | None:
    against = [name for name in sorted(one.received_merged) if name != reducer and one.holds_other_of(reducer, name)]
    if 2 * len(against) <= others:
        return None
    reason = f"it told another digest of its merged stripe than {', '.join(against)} got from it"
    return Blame(reducer, BallotPart.REDUCER, reason, is_proved=True)


def differing_norms(before: Questioned, one: OpenRound) -> set[Pair]:
    """(member, reducer): norms of the reducer that are not those which the leader found over the same blocks itself.

    Args:
        before: the ballot in question. one: the next one of the round, whose same stripes the leader reduced alone.
    """
    assert one.decision is not None
    places = {offered: place for place, offered in enumerate(one.decision.contributions)}
    pairs = set()
    for index, (stripe, report) in enumerate(zip(before.stripes, before.reports, strict=True)):
        for offered, row in zip(before.contributions, report.contribution_norms, strict=True):
            place = places.get(offered)
            own = None if place is None else one.merged[index].contribution_norms[place]
            if own is not None and not all(is_same_norm(a, b) for a, b in zip(row, own, strict=True)):
                pairs.add((offered.learner, stripe.reducer))
    return pairs


def blame_norms(pairs: Collection[Pair], disputes: Mapping[str, Collection[str]]) -> tuple[Blame, ...]:
    """Whose word about norms is wrong: the one of each pair that is in more pairs.

    A member may have sent other bytes to one reducer than to the leader. So a pair by itself costs the reducer its
    stripes at first, and the member its place if it was in such a pair with another reducer before.

    Args:
        disputes: per member, reducers with which it was in a pair by itself.
    """
    blames = {}
    for member, reducer in sorted(pairs):
        members = sum(pair[1] == reducer for pair in pairs)
        reducers = sum(pair[0] == member for pair in pairs)
        is_member = reducers > members or (reducers == members and set(disputes.get(member, ())) - {reducer})
        if is_member:
            reason = "reducers got other bytes of its contribution than the leader"
            blames[member, BallotPart.MEMBER] = Blame(member, BallotPart.MEMBER, reason, is_proved=True)
        else:
            reason = "the norms that it reports are not those which the leader finds"
            blames[reducer, BallotPart.REDUCER] = Blame(reducer, BallotPart.REDUCER, reason, is_proved=True)
    return tuple(blames[key] for key in sorted(blames))
