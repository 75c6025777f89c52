"""How a round goes on when its ballot has failed: with whom, over which stripes, and what need not be sent again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from diloco_node.core.messages import HeldStripe
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.types import Contribution, Stripe


@dataclass(frozen=True, slots=True)
class NextBallot:
    """The plan.

    Attributes:
        contributions: known already, by learner; they keep their names.
        held: of these, what has arrived and stays where it is.
    """

    members: tuple[str, ...]
    contributions: dict[str, Contribution]
    held: tuple[HeldStripe, ...]


def plan_next(
    one: OpenRound,
    stripes: tuple[Stripe, ...],
    *,
    usable: Mapping[str, Contribution],
    able: tuple[str, ...],
    reachable: Collection[str],
    is_late: bool,
) -> NextBallot:
    """Choose the members of the next ballot.

    After a passed deadline those whose contribution has arrived at all reducers that stay; after a loss all that are
    left. If that is nobody, everybody who can.

    Args:
        one: the round with the ballot that failed.
        stripes: of the next ballot.
        usable: contributions of this ballot that may still be merged.
        able: learners that could contribute to a fresh round, sorted.
        reachable: regions that the leader can talk to.
        is_late: the deadline has passed; else somebody was lost.
    """
    places = {stripe: index for index, stripe in enumerate(stripes)}
    kept = [(old, places[stripe]) for old, stripe in enumerate(one.stripes) if stripe in places]
    stays = stripes == one.stripes
    # The stripes of a member that is lost can't be sent again: it stays only where nothing moves.
    whole = {
        name for name in usable if kept and one.is_held(name, [old for old, _ in kept]) and (name in reachable or stays)
    }
    if is_late:
        chosen = whole
    else:
        chosen = {
            name
            for name in one.members
            if name in reachable and name not in one.declined and (name in usable or name in able)
        }
        chosen |= {name for name in whole if stays}
    members = tuple(sorted(chosen)) or able
    held = tuple(
        HeldStripe(name, new)
        for name in members
        for old, new in kept
        if name in usable and old in one.held.get(name, ())
    )
    return NextBallot(members, {name: usable[name] for name in members if name in usable}, held)


def reducers_to_shun(one: OpenRound) -> set[str]:
    """Reducers that held up a ballot whose deadline has passed.

    A reducer that lacks more than half of what another one holds is itself the one that is cut off from the bulk; where
    merged stripes are missing, those that did not merge.
    """
    held_by = {
        stripe.reducer: sum(1 for name in one.contributions if index in one.held.get(name, ()))
        for index, stripe in enumerate(one.stripes)
    }
    most = max(held_by.values(), default=0)
    late = {name for name, count in held_by.items() if 2 * count < most}
    if one.merged:
        late |= {stripe.reducer for index, stripe in enumerate(one.stripes) if index not in one.merged}
    return late
