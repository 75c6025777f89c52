import itertools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.merge.stripes import (
    CEILING_FACTOR_MAX,
    STRIPE_BYTES_MIN,
    STRIPES_MAX,
    RoundLoad,
    block_count,
    cut_by_budget,
    cut_finer,
    piece_blocks,
)
from diloco_node.core.types import RateLimits, Stripe


def test_blocks_never_cross_the_edge_of_a_piece() -> None:
    assert piece_blocks([1, 255, 256, 257, 513]) == (1, 1, 1, 2, 3)
    manifest = build_manifest([TensorSpec("a", (3, 100)), TensorSpec("b", (7,)), TensorSpec("c", (256,))], 1)
    assert block_count(manifest.fragments[0]) == 2 + 1 + 1  # 563 values would fit into 3


def test_an_empty_piece_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        piece_blocks([3, 0])


def equal_stripes(blocks: int, names: list[str]) -> tuple[Stripe, ...]:
    return cut_by_budget(RoundLoad(blocks, 1, 1, len(names)), names, dict.fromkeys(names, RateLimits()))


def test_stripes_by_hand() -> None:
    # 10 blocks by thirds: the running sums 10/3, 20/3, 10 are rounded down.
    assert equal_stripes(10, ["c", "b", "a"]) == (Stripe("a", 0, 3), Stripe("b", 3, 6), Stripe("c", 6, 10))


def test_where_blocks_are_fewer_than_regions_some_have_no_stripe() -> None:
    assert equal_stripes(2, ["a", "b", "c"]) == (Stripe("b", 0, 1), Stripe("c", 1, 2))


@settings(deadline=None)
@given(st.integers(1, 5000), st.sets(st.text("abcd", min_size=1, max_size=3), min_size=1, max_size=9))
def test_stripes_cover_all_blocks_in_equal_parts(blocks: int, names: set[str]) -> None:
    stripes = equal_stripes(blocks, sorted(names))
    assert stripes == equal_stripes(blocks, sorted(names, reverse=True))
    assert stripes[0].block_start == 0
    assert stripes[-1].block_stop == blocks
    assert all(left.block_stop == right.block_start for left, right in pairwise(stripes))
    assert all(left.reducer < right.reducer for left, right in pairwise(stripes))
    sizes = {stripe.reducer: stripe.block_stop - stripe.block_start for stripe in stripes}
    assert all(size > 0 for size in sizes.values())
    assert all(abs(sizes.get(name, 0) * len(names) - blocks) < len(names) for name in names)


def test_large_stripes_are_cut_into_nearly_equal_ones_of_the_same_reducer() -> None:
    coarse = (Stripe("a", 0, 10), Stripe("b", 10, 17))
    assert cut_finer(coarse, encoded_bytes=6 * STRIPE_BYTES_MIN) == (
        Stripe("a", 0, 3),
        Stripe("a", 3, 6),
        Stripe("a", 6, 10),
        Stripe("b", 10, 13),
        Stripe("b", 13, 17),
    )
    assert cut_finer(coarse, encoded_bytes=STRIPE_BYTES_MIN) == coarse
    assert cut_finer(coarse, encoded_bytes=1) == coarse


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    encoded_bytes=st.integers(1, 100 * STRIPE_BYTES_MIN),
)
def test_finer_stripes_cover_the_same_blocks_and_are_not_too_many(lengths: list[int], encoded_bytes: int) -> None:
    edges = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    coarse = [Stripe(f"r{place:02d}", *edges[place : place + 2]) for place in range(len(lengths))]
    finer = cut_finer(coarse, encoded_bytes=encoded_bytes)
    assert finer[0].block_start == 0
    assert finer[-1].block_stop == edges[-1]
    assert all(stripe.block_stop == after.block_start for stripe, after in pairwise(finer))
    assert len(finer) <= STRIPES_MAX + len(coarse)
    for stripe in coarse:
        parts = [part for part in finer if part.reducer == stripe.reducer]
        assert (parts[0].block_start, parts[-1].block_stop) == (stripe.block_start, stripe.block_stop)
        bytes_of_a_block = encoded_bytes / edges[-1]
        shortest = min(part.block_stop - part.block_start for part in parts)
        assert len(parts) == 1 or shortest * bytes_of_a_block >= STRIPE_BYTES_MIN


# ---- by budget -------------------------------------------------------------------------------------------------------

rates = st.none() | st.integers(1, 1000)
budgets = st.dictionaries(st.sampled_from("abcd"), st.builds(RateLimits, rates, rates), min_size=1)


def slowest_ns(load: RoundLoad, reduced: dict[str, int], limits: dict[str, RateLimits]) -> int:
    """How long the slowest of these regions takes, nanoseconds, rounded up."""
    times = [0]
    for name, limit in limits.items():
        loads = ((load.egress_bytes(reduced[name]), limit.egress), (load.ingress_bytes(reduced[name]), limit.ingress))
        times += [-(-size * 10**9 // (load.blocks * rate)) for size, rate in loads if rate is not None]
    return max(times)


def sizes_of(stripes: tuple[Stripe, ...], names: object) -> dict[str, int]:
    result = {stripe.reducer: stripe.block_stop - stripe.block_start for stripe in stripes}
    return {name: result.get(name, 0) for name in names}  # type: ignore[attr-defined]


@settings(deadline=None)
@given(budgets, st.integers(1, 6), st.integers(1, 500), st.integers(1, 500), st.integers(0, 2))
def test_no_other_cut_lets_the_slowest_be_done_sooner(
    limits: dict[str, RateLimits], blocks: int, up: int, down: int, others: int
) -> None:
    load = RoundLoad(blocks, up, down, len(limits) + others)
    stripes = cut_by_budget(load, sorted(limits), limits)
    assert stripes == cut_by_budget(load, sorted(limits, reverse=True), limits)
    assert [stripe.reducer for stripe in stripes] == sorted({stripe.reducer for stripe in stripes})
    assert [stripe.block_start for stripe in stripes] == [0, *(stripe.block_stop for stripe in stripes[:-1])]
    assert stripes[-1].block_stop == blocks
    assert all(stripe.block_start < stripe.block_stop for stripe in stripes)
    believed = {}
    for direction in ("egress", "ingress"):
        reported = sorted(rate for limit in limits.values() if (rate := getattr(limit, direction)) is not None)
        believed[direction] = (
            min(reported[-1], CEILING_FACTOR_MAX * reported[(len(reported) - 1) // 2]) if reported else None
        )
    filled = {
        name: RateLimits(
            *(
                ceiling if rate is None or ceiling is None else min(rate, ceiling)
                for rate, ceiling in ((limit.egress, believed["egress"]), (limit.ingress, believed["ingress"]))
            )
        )
        for name, limit in limits.items()
    }
    ours = slowest_ns(load, sizes_of(stripes, limits), filled)
    for cut in itertools.product(range(blocks + 1), repeat=len(limits)):
        if sum(cut) == blocks:
            assert ours <= slowest_ns(load, dict(zip(limits, cut, strict=True)), filled)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 8), rates, rates)
def test_equal_budgets_make_stripes_that_differ_by_a_block(
    blocks: int, count: int, egress: int | None, ingress: int | None
) -> None:
    names = [f"r{index}" for index in range(count)]
    load = RoundLoad(blocks, blocks, 2 * blocks, count)
    sizes = sizes_of(cut_by_budget(load, names, dict.fromkeys(names, RateLimits(egress, ingress))), names)
    if count != 2:  # of two, int4 up and int8 down, whoever reduces more receives less: any cut of them is as good
        assert max(sizes.values()) - min(sizes.values()) <= 2


def test_a_slow_region_reduces_less_and_a_very_slow_one_nothing() -> None:
    load = RoundLoad(3000, 3_000_000, 6_000_000, 4)
    fast, half = RateLimits(10**6, 10**6), RateLimits(5 * 10**5, 5 * 10**5)
    sizes = sizes_of(cut_by_budget(load, "abcd", {"a": fast, "b": half, "c": fast, "d": fast}), "abcd")
    assert sum(sizes.values()) == 3000
    assert sizes["b"] < sizes["a"] // 3
    assert max(sizes["a"], sizes["c"], sizes["d"]) - min(sizes["a"], sizes["c"], sizes["d"]) <= 1
    crawling = RateLimits(10**5, None)
    assert sizes_of(cut_by_budget(load, "abcd", {"a": fast, "b": crawling, "c": fast, "d": fast}), "abcd")["b"] == 0


def test_a_false_report_of_a_budget_does_no_harm() -> None:
    load = RoundLoad(100, 2**40, 2**40, 64)
    for rate in (-(2**63), 0, 1, 2**63 - 1):
        stripes = cut_by_budget(load, "ab", {"a": RateLimits(rate, rate), "b": RateLimits()})
        assert sum(sizes_of(stripes, "ab").values()) == 100


def test_nobody_gets_all_the_work_by_telling_of_a_line_that_no_other_comes_near() -> None:
    load = RoundLoad(10_000, 4_000_000, 8_000_000, 4)
    budgets = {name: RateLimits(10**6, 10**6) for name in "abc"} | {"d": RateLimits(2**62, 2**62)}
    sizes = sizes_of(cut_by_budget(load, "abcd", budgets), "abcd")
    believed = sizes_of(cut_by_budget(load, "abcd", budgets | {"d": RateLimits(2 * 10**6, 2 * 10**6)}), "abcd")
    assert sizes == believed
    assert min(sizes.values()) > 0
