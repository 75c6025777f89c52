"""Stripes: the blocks of a fragment that each region reduces.

A fragment's pieces are cut into blocks of 256 values that never cross the edge of a piece; a stripe is a range of whole
blocks. Stripes follow the regions' names and cover all blocks. They are equal where nobody has a budget; else they make
the largest of (egress / budget) and (ingress / budget) over all regions as small as whole blocks allow.

A region's blocks of a large fragment are cut into several stripes: the first is on its way to the others, and to the
disk, while the next is being summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.merge.fragments import Fragment
from diloco_node.core.types import BLOCK_VALUES, NO_LIMITS, RateLimits, Stripe
from diloco_node.numeric import NS_PER_S

STRIPE_BYTES_MIN: Final = 8 * 2**20
"""No stripe is cut into shorter ones: each costs messages, and on a busy machine threads that wait for their turn."""

STRIPES_MAX: Final = 32
"""Stripes of a fragment beside one for each region; longer ones make up for it."""


def piece_blocks(sizes: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each piece: `ceil(size / 256)`. sizes: values in each piece, each at least 1."""
    if any(size < 1 for size in sizes):
        raise ValueError(f"a piece holds at least one value, got sizes {tuple(sizes)}")
    return tuple(-(-size // BLOCK_VALUES) for size in sizes)


def block_count(fragment: Fragment) -> int:
    """Blocks of the whole fragment."""
    return sum(piece_blocks(fragment.piece_sizes))


def stripes_fault(stripes: Sequence[Stripe], *, regions: Collection[str], blocks: int) -> str:
    """Why these are not stripes of a fragment; empty if they cover it in order, and regions of the run reduce it."""
    at = 0
    for stripe in stripes:
        if stripe.reducer not in regions:
            return f"{stripe.reducer} is no region of the run"
        if stripe.block_start != at or stripe.block_stop <= at:
            return f"a stripe from block {stripe.block_start} where {at} is next"
        at = stripe.block_stop
    return "" if at == blocks else f"stripes of {at} blocks for a fragment of {blocks}"


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """The bytes that one round of a fragment moves: a whole contribution up, a whole merged fragment down.

    regions: that contribute and get the merged fragment, the reducers among them.
    """

    blocks: int
    up_bytes: int
    down_bytes: int
    regions: int

    def egress_bytes(self, blocks: int) -> int:
        """Return the bytes that a reducer of so many blocks sends, times `blocks`.

        They are its contribution to the other reducers, and its merged blocks to all others.
        """
        return self.up_bytes * (self.blocks - blocks) + (self.regions - 1) * self.down_bytes * blocks

    def ingress_bytes(self, blocks: int) -> int:
        """Return the bytes that it receives, times `blocks`: contributions to its blocks, and other merged blocks."""
        return (self.regions - 1) * self.up_bytes * blocks + self.down_bytes * (self.blocks - blocks)

    def span(self, limits: RateLimits, time_ns: int) -> tuple[int, int] | None:
        """The fewest and the most blocks that a region can reduce in this time; None: none, not even no block."""
        lowest, highest = 0, self.blocks
        for rate, at_none, at_all in (
            (limits.egress, self.egress_bytes(0), self.egress_bytes(self.blocks)),
            (limits.ingress, self.ingress_bytes(0), self.ingress_bytes(self.blocks)),
        ):
            if rate is None:
                continue
            capacity = max(rate, 1) * self.blocks * time_ns // NS_PER_S
            slope = (at_all - at_none) // self.blocks  # exact: the load is linear in whole blocks
            if slope > 0:
                highest = min(highest, (capacity - at_none) // slope)
            elif slope < 0:
                lowest = max(lowest, -((capacity - at_none) // -slope))
            elif at_none > capacity:
                return None
        return (lowest, highest) if lowest <= highest else None


def cut_by_budget(load: RoundLoad, reducers: Sequence[str], budgets: Mapping[str, RateLimits]) -> tuple[Stripe, ...]:
    """Cut the blocks so that the slowest region, sending or receiving, is done as early as whole blocks allow.

    budgets: ceilings by region, at least of all reducers. A region without a ceiling in one direction counts as one
    with the largest of the others': what its line carries nobody knows. Without any the stripes are equal.

    Returns: sorted by region, without gaps. A region has no stripe if its own contribution takes it longest of all.
    """
    limits = _filled(reducers, budgets)
    if all(limit == NO_LIMITS for limit in limits.values()):
        return _spread(load.blocks, dict.fromkeys(reducers, (0, load.blocks)))

    def spans(time_ns: int) -> dict[str, tuple[int, int]] | None:
        all_spans = {name: load.span(limit, time_ns) for name, limit in limits.items()}
        finite = {name: span for name, span in all_spans.items() if span is not None}
        sums = [sum(edges) for edges in zip(*finite.values(), strict=True)]
        return finite if len(finite) == len(limits) and sums[0] <= load.blocks <= sums[1] else None

    # The whole load of everybody through the slowest ceiling is certainly enough.
    slowest = min(
        max(rate, 1) for limit in limits.values() for rate in (limit.egress, limit.ingress) if rate is not None
    )
    enough_ns = load.regions * (load.up_bytes + load.down_bytes) * NS_PER_S // slowest + 1
    shortest_ns, longest_ns = 0, enough_ns
    while shortest_ns < longest_ns:  # more time is never less
        middle_ns = (shortest_ns + longest_ns) // 2
        shortest_ns, longest_ns = (
            (shortest_ns, middle_ns) if spans(middle_ns) is not None else (middle_ns + 1, longest_ns)
        )
    shortest = spans(shortest_ns)
    assert shortest is not None, f"{load} does not pass {limits} in {shortest_ns} ns"
    return _spread(load.blocks, shortest)


CEILING_FACTOR_MAX: Final = 2
"""No ceiling counts for more than so many times the (lower) median of those that were reported."""


def _filled(reducers: Sequence[str], budgets: Mapping[str, RateLimits]) -> dict[str, RateLimits]:
    """The reducers' ceilings by name; one that is not set is the largest that is believed of any reducer."""
    budgets_of = {name: budgets[name] for name in sorted(reducers)}
    egress = _credible([budget.egress for budget in budgets_of.values()])
    ingress = _credible([budget.ingress for budget in budgets_of.values()])
    return {
        name: RateLimits(
            egress if egress is None or budget.egress is None else min(budget.egress, egress),
            ingress if ingress is None or budget.ingress is None else min(budget.ingress, ingress),
        )
        for name, budget in budgets_of.items()
    }


def _credible(claims: Sequence[int | None]) -> int | None:
    """The largest ceiling that is believed: nobody gets all the work by reporting a line that no other comes near."""
    rates = sorted(rate for rate in claims if rate is not None)
    if not rates:
        return None
    return min(rates[-1], CEILING_FACTOR_MAX * max(1, rates[(len(rates) - 1) // 2]))


def _spread(blocks: int, spans: Mapping[str, tuple[int, int]]) -> tuple[Stripe, ...]:
    """Stripes within their spans: the fewest for each, the rest in proportion to what each could take more."""
    more = blocks - sum(lowest for lowest, _ in spans.values())
    room = sum(highest - lowest for lowest, highest in spans.values())
    stripes = []
    start = sure = total = 0
    for name, (lowest, highest) in sorted(spans.items()):
        sure += lowest
        total += highest - lowest
        stop = sure + (more * total // room if room else 0)  # the running sum is rounded: no span is exceeded
        if stop > start:
            stripes.append(Stripe(name, start, stop))
        start = stop
    return tuple(stripes)


def cut_finer(stripes: Sequence[Stripe], *, encoded_bytes: int) -> tuple[Stripe, ...]:
    """Cut stripes into nearly equal ones of the same reducer, so that its work and the transfers overlap.

    encoded_bytes: of the whole merged fragment; none is shorter than STRIPE_BYTES_MIN.

    Returns: in block order, over the same blocks; at most STRIPES_MAX more than there were.
    """
    blocks = sum(stripe.block_stop - stripe.block_start for stripe in stripes)
    shortest = max(1, -(-STRIPE_BYTES_MIN * blocks // encoded_bytes), -(-blocks // STRIPES_MAX))
    finer = []
    for stripe in stripes:
        length = stripe.block_stop - stripe.block_start
        count = max(1, length // shortest)
        edges = [stripe.block_start + length * place // count for place in range(count + 1)]
        finer += [Stripe(stripe.reducer, *pair) for pair in itertools.pairwise(edges)]
    return tuple(finer)
