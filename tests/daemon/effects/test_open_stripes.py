"""Bytes of open rounds and the reduction: order, what is kept and what is forgotten."""

from dataclasses import replace

import numpy as np
import pytest

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import stripe_digest
from diloco_node.core.events import ReduceStripe
from diloco_node.core.messages import MergedStripe
from diloco_node.core.types import Ballot, Codec, Contribution, Stripe
from diloco_node.daemon.effects.open_stripes import (
    MergedPart,
    StripeTable,
    add_trimmed,
    checked_digest,
    cosines,
    is_contiguous,
    reduce_stripe,
)
from diloco_node.errors import PayloadCorrupt

SIZES = (5000, 300)
UP = FragmentBlocks(SIZES, Codec.INT4)
DOWN = FragmentBlocks(SIZES, Codec.INT8)
BALLOT = Ballot(1, 1)


def name(learner: str) -> Contribution:
    return Contribution(learner, 1, 0, 0, 1, 0, 16, 1600, (1.0, 1.0))


def order(learners: list[str], coefficients: list[tuple[float, float]]) -> ReduceStripe:
    return ReduceStripe(
        ballot=BALLOT,
        fragment=0,
        version=1,
        stripe=0,
        block_start=0,
        block_stop=UP.block_count,
        contributions=tuple(name(learner) for learner in learners),
        coefficients=tuple(coefficients),
    )


def whole(values: np.ndarray) -> np.ndarray:
    out = np.zeros(UP.encoded_bytes, np.uint8)
    kernels.encode(UP, values, out)
    return out


def decoded(blocks: FragmentBlocks, body: np.ndarray) -> np.ndarray:
    out = np.zeros(blocks.values, np.float32)
    kernels.decode(blocks, body, out)
    return out


@pytest.fixture
def contributions() -> list[np.ndarray]:
    rng = np.random.default_rng(499)
    return [whole((rng.standard_normal(UP.values) * 10.0**k).astype(np.float32)) for k in (-3, 0, 3)]


def test_the_merge_is_the_weighted_sum_in_the_given_order(contributions) -> None:
    coefficients = [(0.25, 1.0), (0.5, 0.0), (0.125, 2.0)]
    reduction, body = reduce_stripe(order(["a", "b", "c"], coefficients), contributions, UP, DOWN)
    total = np.zeros(UP.values, np.float32)
    for contribution, pair in zip(contributions, coefficients, strict=True):
        per_value = np.repeat(np.array(pair, np.float32), SIZES)
        total = total + per_value * decoded(UP, contribution)
    reference = np.zeros(DOWN.encoded_bytes, np.uint8)
    norms = kernels.encode(DOWN, total, reference)
    assert body.tobytes() == reference.tobytes()
    assert reduction.digest == stripe_digest(reference)
    assert reduction.squared_norms == tuple(norms)


def test_norms_of_contributions_come_back_without_their_coefficients(contributions) -> None:
    reduction, _ = reduce_stripe(order(["a"], [(0.0, 7.0)]), contributions[:1], UP, DOWN)
    values = decoded(UP, contributions[0]).astype(np.float64)
    np.testing.assert_allclose(
        reduction.contribution_norms[0], [(values[:5000] ** 2).sum(), (values[5000:] ** 2).sum()], rtol=1e-7
    )


@pytest.mark.parametrize(("members", "cut"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (7, 1), (8, 2), (12, 3)])
def test_the_trimmed_sum_leaves_out_the_extremes_of_each_value(members: int, cut: int) -> None:
    values = np.random.default_rng(members).standard_normal((members, 999)).astype(np.float32)
    total = np.zeros(999, np.float32)
    add_trimmed(list(values.copy()), total)
    middle = np.sort(values.astype(np.float64), axis=0)[cut : members - cut]
    np.testing.assert_allclose(total, middle.mean(axis=0) * members, rtol=1e-4, atol=1e-5)


def test_one_of_four_that_lies_can_not_leave_the_range_of_the_others() -> None:
    rng = np.random.default_rng(3)
    common = rng.standard_normal(UP.values).astype(np.float32)
    vectors = [common + 0.3 * rng.standard_normal(UP.values).astype(np.float32) for _ in range(3)] + [-40.0 * common]
    bodies = [whole(vector) for vector in vectors]
    sums = {}
    for is_trimmed in (False, True):
        _, body = reduce_stripe(
            order(list("abcd"), [(0.25, 0.25)] * 4),
            bodies,
            UP,
            DOWN,
            is_trimmed=is_trimmed,
        )
        total = decoded(DOWN, body)
        sums[is_trimmed] = float(total @ common / np.linalg.norm(total) / np.linalg.norm(common))
    assert sums[False] < -0.9
    assert sums[True] > 0.9


def test_who_counts_nothing_is_no_member_of_a_trimmed_sum(contributions) -> None:
    coefficients = [(0.5, 0.5), (0.0, 0.0), (0.5, 0.5)]
    bodies = []
    for is_trimmed in (False, True):
        _, body = reduce_stripe(
            order(["a", "b", "c"], coefficients),
            contributions,
            UP,
            DOWN,
            is_trimmed=is_trimmed,
        )
        bodies.append(body.tobytes())
    assert bodies[0] == bodies[1]


def test_the_cosine_is_that_with_the_mean_direction_of_the_others() -> None:
    rng = np.random.default_rng(7)
    common = rng.standard_normal(UP.values)
    vectors = [common + rng.standard_normal(UP.values) for _ in range(4)]
    vectors[3] = -50.0 * vectors[3]
    bodies = [whole(vector.astype(np.float32)) for vector in vectors]
    units = [decoded(UP, body).astype(np.float64) for body in bodies]
    units = [unit / np.linalg.norm(unit) for unit in units]
    found = cosines(order(list("abcd"), [(1.0, 1.0)] * 4), bodies, UP)
    for place, value in enumerate(found):
        others = sum(unit for at, unit in enumerate(units) if at != place)
        assert value == pytest.approx(units[place] @ others / np.linalg.norm(others), abs=1e-5)
    assert found[3] < -0.5 < 0.1 < min(found[:3]), "who is against, however long it is"
    silent = whole(np.zeros(UP.values, np.float32))
    assert cosines(order(["a", "b"], [(1.0, 1.0)] * 2), [bodies[0], silent], UP) == (0.0, 0.0)


def test_the_window_of_the_cosines_moves_over_the_whole_stripe() -> None:
    blocks = FragmentBlocks((1000 * 256,), Codec.INT4)
    first, second = np.ones(blocks.values, np.float32), np.ones(blocks.values, np.float32)
    second[700 * 256 :] = -1.0
    bodies = [np.zeros(blocks.span_bytes(100, 1000), np.uint8) for _ in range(2)]
    for values, body in zip((first, second), bodies, strict=True):
        kernels.encode(blocks, values[100 * 256 :], body, 100, 1000)
    sample = replace(order(["a", "b"], [(1.0,)] * 2), block_start=100, block_stop=1000)
    found = {cosines(replace(sample, version=version), bodies, blocks)[0] for version in range(40)}
    assert min(found) == pytest.approx(-1.0)
    assert max(found) == pytest.approx(1.0)


def test_a_part_of_another_size_is_refused_by_name(contributions) -> None:
    with pytest.raises(PayloadCorrupt, match="of b for fragment 0"):
        reduce_stripe(
            order(["a", "b"], [(1.0, 1.0)] * 2),
            [contributions[0], contributions[1][:-1]],
            UP,
            DOWN,
        )


def test_a_merged_stripe_that_no_encoder_wrote_is_refused_on_arrival() -> None:
    stripe = np.zeros(DOWN.encoded_bytes, np.uint8)
    norms = kernels.encode(DOWN, np.ones(DOWN.values, np.float32), stripe)
    assert checked_digest(DOWN, stripe, 0, DOWN.block_count) == (stripe_digest(stripe), tuple(norms))
    stripe[:4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    with pytest.raises(PayloadCorrupt):
        checked_digest(DOWN, stripe, 0, DOWN.block_count)


def part_of(size: int, value: int = 0, *, sender: str = "r", blocks: tuple[int, int] = (0, 4)) -> MergedPart:
    return MergedPart(np.full(size, value, np.uint8), b"digest", *blocks, sender)


def test_a_commit_frees_the_round() -> None:
    table = StripeTable()
    table.keep_contribution(1, name("a"), 0, 4, np.zeros(10, np.uint8), limit_bytes=100)
    failed_ballot, won = Ballot(1, 1), Ballot(1, 2)
    for ballot in (failed_ballot, won):
        assert table.keep_merged(ballot, 0, 0, 1, part_of(7), limit_bytes=100)
    table.close(failed_ballot, 0, 1, is_committed=False)
    assert table.payload(failed_ballot, 0, 1, [Stripe("r", 0, 4)]) == []
    assert table.buffered_bytes() == 17
    table.close(won, 0, 1, is_committed=True)
    assert table.buffered_bytes() == 0


def test_the_payload_is_in_stripe_order_and_of_one_ballot() -> None:
    table = StripeTable()
    for stripe in (2, 0, 1):
        assert table.keep_merged(BALLOT, stripe, 3, 5, part_of(1, stripe), limit_bytes=100)
    assert table.keep_merged(Ballot(9, 9), 3, 3, 5, part_of(1, 99), limit_bytes=100)
    assert [int(stripe.encoded[0]) for stripe in table.payload(BALLOT, 3, 5, [Stripe("r", 0, 4)] * 3)] == [0, 1, 2]


def test_a_merged_stripe_that_was_told_is_not_replaced_nor_held_off_by_another_sender() -> None:
    table = StripeTable()
    assert table.keep_merged(BALLOT, 0, 0, 1, part_of(5, 9, sender="s"), limit_bytes=100)
    assert table.fits(MergedStripe(BALLOT, 0, 0, 1, b"digest", 0, 4), "r")
    assert table.keep_merged(BALLOT, 0, 0, 1, part_of(5, 1), limit_bytes=100)
    assert not table.keep_merged(BALLOT, 0, 0, 1, part_of(5, 2), limit_bytes=100)
    assert [int(stripe.encoded[0]) for stripe in table.payload(BALLOT, 0, 1, [Stripe("r", 0, 4)])] == [1]


def test_a_question_leaves_nothing_behind() -> None:
    table = StripeTable()
    assert table.payload(BALLOT, 0, 1, [Stripe("r", 0, 4)]) == []
    assert table.merged_stripe(BALLOT, 0, 0, 1, sender="r") is None
    assert table.contribution(1, name("a"), 0, 4) is None
    assert not table._rounds


def test_one_sender_can_not_fill_the_memory_and_pushes_out_nobody_else() -> None:
    table = StripeTable()
    table.keep_contribution(1, name("b"), 0, 4, np.zeros(60, np.uint8), limit_bytes=100)
    for start in range(50):
        table.keep_contribution(1, name("a"), start, start + 1, np.zeros(30, np.uint8), limit_bytes=90)
        table.keep_merged(Ballot(2, start), 0, 0, 1, part_of(40, sender="a"), limit_bytes=80)
    assert table.buffered_bytes() == 60 + 3 * 30 + 2 * 40
    assert table.contribution(1, name("b"), 0, 4) is not None
    assert table.contribution(1, name("a"), 49, 50) is not None, "the newest bytes stay"
    # One that is larger than the limit by itself is kept alone: it was asked for.
    table.keep_contribution(1, name("a"), 0, 99, np.zeros(130, np.uint8), limit_bytes=100)
    assert table.contribution(1, name("a"), 0, 99) is not None
    assert table.buffered_bytes() == 60 + 130 + 2 * 40


def test_the_same_stripe_again_takes_the_place_of_the_first() -> None:
    table = StripeTable()
    for _ in range(5):
        table.keep_contribution(1, name("a"), 0, 4, np.zeros(60, np.uint8), limit_bytes=100)
    assert table.buffered_bytes() == 60


def test_what_came_again_is_the_newest() -> None:
    table = StripeTable()
    for start in (0, 1, 0, 2):
        table.keep_contribution(1, name("a"), start, start + 1, np.zeros(50, np.uint8), limit_bytes=100)
    assert [table.contribution(1, name("a"), start, start + 1) is not None for start in range(3)] == [True, False, True]


def test_merged_stripes_of_a_known_ballot_come_from_their_reducer_in_their_range() -> None:
    table = StripeTable()

    def header(stripe: int, start: int, stop: int) -> MergedStripe:
        return MergedStripe(BALLOT, stripe, 0, 1, b"digest", start, stop)

    assert table.fits(header(1, 3, 7), "anybody"), "before the ballot is known anything may be right"
    table.note_ballot(BALLOT, 0, 1, (Stripe("r", 0, 3), Stripe("s", 3, 7)))
    assert table.fits(header(0, 0, 3), "r")
    assert table.fits(header(1, 3, 7), "s")
    assert not table.fits(header(1, 3, 7), "r"), "another region's stripe"
    assert not table.fits(header(0, 0, 4), "r"), "another range"
    assert not table.fits(header(2, 7, 9), "r"), "no such stripe"
    assert not table.fits(header(-1, 3, 7), "s")
    assert table.keep_merged(BALLOT, 0, 0, 1, part_of(5, sender="r", blocks=(0, 3)), limit_bytes=100)
    assert not table.fits(header(0, 0, 3), "r"), "it is here already"


def test_late_bytes_of_a_round_that_is_over_are_forgotten_with_it() -> None:
    table = StripeTable()
    for version in (1, 2, 3):
        table.keep_contribution(version, name("a"), 0, 4, np.zeros(10, np.uint8), limit_bytes=100)
    table.forget(0, 2)
    assert table.buffered_bytes() == 10
    assert table.contribution(3, name("a"), 0, 4) is not None
    table.forget(1, 9)
    assert table.buffered_bytes() == 10, "another fragment"


@pytest.mark.parametrize(
    ("ranges", "is_right"),
    [
        ([(0, 3), (3, 7)], True),
        ([(0, 7)], True),
        ([(0, 3), (4, 7)], False),
        ([(0, 3), (2, 7)], False),
        ([(1, 7)], False),
        ([(0, 3), (3, 6)], False),
        ([], False),
    ],
)
def test_stripes_are_a_payload_when_they_follow_each_other_to_the_end(ranges, is_right) -> None:
    assert is_contiguous([part_of(1, blocks=blocks) for blocks in ranges], 7) is is_right
