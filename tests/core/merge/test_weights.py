import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.bounds import FLOAT32_MAX
from diloco_node.core.merge import weights as weighing
from diloco_node.core.merge.numbers import MergeNumbers
from diloco_node.core.merge.weights import _share_limit, cycles, refusal, share, to_float32, weight
from diloco_node.core.types import Contribution, MergeRule, RunSettings

RDA, AVG = MergeRule.RDA, MergeRule.AVG
NONE_MISSED = (0, 0, 0, 0)


def weights(contributions, missed, *, weight_cap=2.0, carry_steps_limit=64, clips=None, **changes):
    run = RunSettings(weight_cap=weight_cap, carry_steps_max=carry_steps_limit, **changes)
    return weighing.weights(contributions, missed, clips or whole(contributions, [AVG]), run)


def whole(contributions, rules):
    return [(1.0,) * len(rules)] * len(contributions)


def numbers(contributions, w, rules, part, clips=None):
    return MergeNumbers(contributions, rules, w, clips or whole(contributions, rules), part)


def coefficients(contributions, w, rules, clips=None):
    return numbers(contributions, w, rules, 1.0, clips).coefficients()


def factors(contributions, w, rules, norms, part, clips=None):
    return numbers(contributions, w, rules, part, clips).factors(norms)


def contribution(name: str, norms: tuple[float, ...], *, steps: int = 10, tokens: int = 100) -> Contribution:
    return Contribution(name, 1, 0, 3, 7, 40, 40 + steps, tokens, norms)


def merged(deltas: list[list[np.ndarray]], w: list[float], rules: list[MergeRule], part: float) -> list[np.ndarray]:
    """The whole path: norms, coefficients, sum in learner order, norm of the sum, factors. deltas[m][piece]."""
    contributions = [
        contribution(f"r{m}", tuple(float(np.dot(d, d)) for d in pieces)) for m, pieces in enumerate(deltas)
    ]
    rows = coefficients(contributions, w, rules)
    sums = [
        sum(row[piece] * pieces[piece] for row, pieces in zip(rows, deltas, strict=True)) for piece in range(len(rules))
    ]
    scale = factors(contributions, w, rules, [float(np.dot(s, s)) for s in sums], part)
    return [f * s for f, s in zip(scale, sums, strict=True)]


def rda_reference(vectors: list[np.ndarray], w: list[float]) -> np.ndarray:
    """RDA as printed in the paper, with norms in the radial part; float64."""
    total = sum(w)
    radius = sum(x * np.linalg.norm(v) for x, v in zip(w, vectors, strict=True)) / total
    direction = sum(x * v / np.linalg.norm(v) for x, v in zip(w, vectors, strict=True) if np.linalg.norm(v) > 0)
    return radius * direction / np.linalg.norm(direction)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weight_is_tokens_squared_over_steps() -> None:
    assert weight(100, 10) == 1000.0
    assert weight(100, 20) == 500.0  # the same tokens in twice the steps
    assert weight(100, 0) == 0.0
    assert weight(0, 10) == 0.0
    assert weight(10, 3) == float(np.float32(100 / 3))
    assert weight(2**63, 1) == 2.0**126


def test_only_a_member_that_was_away_is_capped() -> None:
    # With 10 tokens a step, w = 100 * steps.
    usual = [contribution(name, (1.0,), steps=10, tokens=100) for name in "abc"]
    away = contribution("d", (1.0,), steps=250, tokens=2500)
    assert weights([*usual, away], NONE_MISSED) == (1000.0, 1000.0, 1000.0, 2000.0)
    assert weights([*usual, away], NONE_MISSED, carry_steps_limit=250, weight_share_max=1.0)[3] == 25000.0
    assert weights([*usual, away], NONE_MISSED, carry_steps_limit=250)[3] == 2000.0, "0.4 of the weight"
    # A small learner that was away is not lifted to the cap.
    small = contribution("d", (1.0,), steps=250, tokens=500)
    assert weights([*usual, small], NONE_MISSED)[3] == 1000.0


def test_of_two_members_the_one_that_was_away_does_not_set_its_own_cap() -> None:
    both = [contribution("a", (1.0,), steps=10, tokens=100), contribution("b", (1.0,), steps=1000, tokens=10000)]
    assert weights(both, [0, 0]) == (1000.0, 2000.0)


def test_when_all_were_away_the_median_is_over_all() -> None:
    three = [contribution(str(n), (1.0,), steps=n, tokens=10 * n) for n in (900, 100, 200)]
    assert weights(three, [0, 0, 0], weight_share_max=1.0) == (40000.0, 10000.0, 20000.0)
    assert weights(three, [0, 0, 0], weight_share_max=0.5) == (30000.0, 10000.0, 20000.0)
    assert weights(three, [0, 0, 0]) == (20000.0, 10000.0, 20000.0)


@pytest.mark.parametrize("tokens", [401, 800, 6400, 10_000, 2**62])
@pytest.mark.parametrize("others", [1, 2, 3, 5])
def test_tokens_far_beyond_those_of_the_others_count_as_theirs(tokens: int, others: int) -> None:
    """Eight times the tokens weighed 64 times as much, and of two regions 98 percent."""
    members = [*(contribution(name, (1.0,)) for name in "abcde"[:others]), contribution("z", (1.0,), tokens=tokens)]
    assert weights(members, [0] * len(members)) == (1000.0,) * len(members)
    assert weights(members[:-1], [0] * others) == (1000.0,) * others, "nothing changes for the others"


def test_of_three_members_of_which_one_weighs_nothing_the_others_share_alike() -> None:
    """One is opposed, or has no tokens: what is left of three is not left to the larger one."""
    three = [contribution("a", (1.0,), tokens=100), contribution("b", (1.0,), tokens=200), contribution("c", (1.0,))]
    none = replace(three[2], tokens=0)
    assert weights([*three[:2], none], [0, 0, 0], tokens_ratio_max=8.0) == (1000.0, 1000.0, 0.0)
    assert weights(three[:2], [0, 0], tokens_ratio_max=8.0) == (1000.0, 4000.0)


def test_of_the_others_the_median_says_what_is_usual() -> None:
    small, large = contribution("a", (1.0,)), [contribution(name, (1.0,), tokens=800) for name in "bc"]
    # For each large one the others' median is (10 + 80) / 2 tokens a step.
    assert weights([small, *large], [0, 0, 0], weight_share_max=1.0) == (1000.0, 64_000.0, 64_000.0)
    assert weights([small, large[0]], [0, 0], tokens_ratio_max=8.0) == (1000.0, 64_000.0), "as the operator says"
    no_tokens = contribution("b", (1.0,), tokens=0)
    assert weights([no_tokens, contribution("c", (1.0,), tokens=2**62)], [0, 0]) == (0.0, weight(2**62, 10))


@pytest.mark.parametrize("tokens", [200, 300, 400])
def test_of_three_or_more_nobody_has_more_than_two_fifths(tokens: int) -> None:
    honest = [contribution(name, (1.0,)) for name in "abc"]
    claimed = contribution("d", (1.0,), tokens=tokens)
    assert weights([*honest, claimed], NONE_MISSED) == (1000.0, 1000.0, 1000.0, 2000.0)
    assert weights([*honest, claimed], NONE_MISSED, weight_share_max=0.5)[3] == 3000.0
    assert weights([*honest[:2], claimed], [0, 0, 0])[2] == pytest.approx(4000 / 3)
    # Of two nobody knows who is right.
    assert weights([honest[0], claimed], [0, 0])[1] == weight(tokens, 10)


@given(
    # A weight is 0, or tokens squared by steps: far from where doubles lose bits.
    st.lists(st.just(0.0) | st.floats(2.0**-100, 2.0**100), min_size=3, max_size=12).filter(
        lambda values: sum(map(bool, values)) >= 3
    ),
    st.sampled_from([0.05, 0.2, 1 / 3, 0.5, 0.7, 1.0]),
)
def test_nobody_exceeds_the_part_and_only_those_above_it_are_changed(values: list[float], part: float) -> None:
    members = sum(1 for value in values if value)
    limit = _share_limit(values, part)
    limits = [min(value, limit) for value in values]
    assert max(limits) <= max(part, 1 / members) * sum(limits) * (1 + 1e-9)
    if limit < max(values):
        assert limit == pytest.approx(max(part, 1 / members) * sum(limits)), "no lower than it must be"


def test_a_contribution_of_which_nothing_counts_weighs_nothing() -> None:
    members = [contribution(name, (1.0,)) for name in "abc"]
    clips = [(1.0,), (1.0,), (0.0,)]
    assert weights(members, [0, 0, 0], clips=clips) == (1000.0, 1000.0, 0.0)
    no_tokens = [contribution(name, (1.0,), tokens=0) for name in "ab"]
    assert weights([*no_tokens, members[2]], [0, 0, 0], clips=clips) == (1.0, 1.0, 0.0)
    rows = coefficients(members, (1000.0, 1000.0, 0.0), [RDA], clips)
    assert rows == ((0.5,), (0.5,), (0.0,))
    assert factors(members, (1000.0, 1000.0, 0.0), [RDA], [1.0], 1.0, clips) == (1.0,)


def test_members_without_tokens_still_merge() -> None:
    assert weights([contribution("a", (1.0,), tokens=0)] * 2, [0, 3]) == (1.0, 1.0)


@given(
    st.lists(
        st.tuples(
            st.just(0) | st.integers(0, 2**62),
            st.integers(1, 80) | st.integers(1, 2**62),
            st.sampled_from([0, 1, 7, 2**40]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1.0, 2.0, 1e-3]),
)
def test_the_weights_of_a_round_are_never_all_zero(members: list[tuple[int, int, int]], weight_cap: float) -> None:
    """Neither members without tokens nor one that was away makes a round divide by zero."""
    contributions = [contribution(f"r{at}", (4.0,), tokens=own[0], steps=own[1]) for at, own in enumerate(members)]
    versions_missed = [own[2] for own in members]
    result = weights(contributions, versions_missed, weight_cap=weight_cap, carry_steps_limit=40)
    assert all(math.isfinite(value) and value >= 0.0 for value in result)
    assert sum(result) > 0.0
    assert 0.0 < share(result, versions_missed) <= 1.0
    assert all(math.isfinite(value) for row in coefficients(contributions, result, [AVG]) for value in row)


def test_of_members_without_tokens_and_one_that_was_away_the_one_counts() -> None:
    contributions = [contribution(name, (1.0,), tokens=0) for name in "ab"] + [contribution("c", (1.0,), steps=41)]
    result = weights(contributions, (0, 0, 3), weight_cap=2.0, carry_steps_limit=40)
    assert result[:2] == (0.0, 0.0)
    assert result[2] > 0.0


def test_a_contribution_holds_its_last_cycle_and_halves_of_those_it_missed() -> None:
    assert [cycles(versions_missed) for versions_missed in (0, 1, 2, 3)] == [1.0, 1.5, 1.75, 1.875]
    assert cycles(10**6) == 2.0


def test_missed_versions_weigh_as_far_as_they_were_carried() -> None:
    # Both trained at the same pace; the second was left out once, then twice.
    for versions_missed, expected in ((1, 1500.0), (3, 1875.0)):
        long = contribution("b", (1.0,), steps=10 * (versions_missed + 1), tokens=100 * (versions_missed + 1))
        both = [contribution("a", (1.0,)), long]
        assert weights(both, [0, versions_missed]) == (1000.0, expected)


def test_share_is_one_over_the_mean_of_the_cycles_held() -> None:
    assert share([5.0, 5.0, 5.0], [0, 0, 0]) == 1.0
    assert share([2.0], [1]) == float(np.float32(1 / 1.5))
    assert share([1000.0, 1500.0], [0, 1]) == float(np.float32(2500 / (1000 + 1500 * 1.5)))
    assert share([1.0, 0.0], [0, 9]) == 1.0


@given(st.floats(allow_nan=False))
def test_to_float32_rounds_as_numpy_does(value: float) -> None:
    rounded = to_float32(value)
    assert math.isfinite(rounded)
    assert to_float32(rounded) == rounded
    if abs(value) <= FLOAT32_MAX:
        assert rounded == float(np.float32(value))
    else:
        assert rounded == math.copysign(FLOAT32_MAX, value)


def test_nan_is_never_rounded() -> None:
    with pytest.raises(ValueError, match="NaN"):
        to_float32(math.nan)


# ---- merge, by hand --------------------------------------------------------------------------------------------------


def test_rda_of_two_orthogonal_vectors_by_hand() -> None:
    # (3, 0) and (0, 5), equal weights: radius 4, direction (1, 1)/sqrt 2.
    contributions = [contribution("a", (9.0,)), contribution("b", (25.0,))]
    rows = coefficients(contributions, [1.0, 1.0], [RDA])
    assert rows == ((to_float32(0.5 * 4 / 3),), (to_float32(0.5 * 4 / 5),))  # the sum is (2, 2): 4 x mean direction
    assert factors(contributions, [1.0, 1.0], [RDA], [8.0], 1.0) == (to_float32(math.sqrt(2)),)
    (result,) = merged([[np.array([3.0, 0.0])], [np.array([0.0, 5.0])]], [1.0, 1.0], [RDA], 1.0)
    assert result == pytest.approx(np.array([1.0, 1.0]) * 4 / math.sqrt(2), rel=1e-6)


def test_a_clipped_contribution_counts_as_if_it_were_shorter() -> None:
    # (3, 0) and (0, 500) of which a hundredth counts: as (3, 0) and (0, 5) above.
    contributions, plain = [contribution("a", (9.0,)), contribution("b", (250_000.0,))], [(1.0,), (0.01,)]
    rows = coefficients(contributions, [1.0, 1.0], [RDA], plain)
    assert rows == ((to_float32(0.5 * 4 / 3),), (to_float32(0.5 * 4 / 500),))
    assert factors(contributions, [1.0, 1.0], [RDA], [8.0], 1.0, plain) == (to_float32(math.sqrt(2)),)
    assert coefficients(contributions, [1.0, 3.0], [AVG], plain) == ((0.25,), (to_float32(0.0075),))
    assert factors(contributions, [1.0, 3.0], [AVG], [8.0], 0.5, plain) == (0.5,)


def test_avg_by_hand() -> None:
    # Weights 1 and 3: (3, 1)/4 of (4, 0) and (0, 8) is (1, 6); share 1/2 halves it.
    (result,) = merged([[np.array([4.0, 0.0])], [np.array([0.0, 8.0])]], [1.0, 3.0], [AVG], 0.5)
    assert result.tolist() == [0.5, 3.0]


def test_a_single_learner_gets_its_own_delta_times_share() -> None:
    delta = np.array([3.0, -4.0])
    for rule in (RDA, AVG):
        (result,) = merged([[delta]], [17.0], [rule], 0.25)
        assert result == pytest.approx(0.25 * delta, rel=1e-6)


def test_a_zero_delta_has_no_direction_but_shortens_the_radius() -> None:
    (result,) = merged([[np.array([4.0, 0.0])], [np.zeros(2)]], [1.0, 1.0], [RDA], 1.0)
    assert result == pytest.approx(np.array([2.0, 0.0]), rel=1e-6)
    (nothing,) = merged([[np.zeros(2)], [np.zeros(2)]], [1.0, 1.0], [RDA], 1.0)
    assert nothing.tolist() == [0.0, 0.0]


def test_a_sum_shorter_than_the_smallest_contribution_keeps_its_length() -> None:
    # 2^-100 is the shortest norm that counts; the sum of one such and three zeros is a quarter of it.
    deltas = [[np.array([2.0**-100])], *([[np.zeros(1)]] * 3)]
    (result,) = merged(deltas, [1.0] * 4, [RDA], 1.0)
    assert result.tolist() == [2.0**-102]


def test_rules_are_per_piece() -> None:
    deltas = [[np.array([3.0, 0.0]), np.array([2.0])], [np.array([0.0, 3.0]), np.array([4.0])]]
    first, second = merged(deltas, [1.0, 1.0], [RDA, AVG], 1.0)
    assert np.linalg.norm(first) == pytest.approx(3.0, rel=1e-6)
    assert second.tolist() == [3.0]


def test_opposed_contributions_are_not_stretched_without_bound() -> None:
    for epsilon in (0.0, 1e-30, 1e-9, 1e-3):
        (result,) = merged([[np.array([1.0, epsilon])], [np.array([-1.0, epsilon])]], [1.0, 1.0], [RDA], 1.0)
        # Mean direction (0, epsilon), stretched at most by 2 * sqrt(2).
        assert result[0] == 0.0
        assert result[1] == pytest.approx(2 * math.sqrt(2) * epsilon, rel=1e-3)


def test_an_idle_member_does_not_tighten_the_bound() -> None:
    # Two nearly opposed members of weight 1 and an idle one of weight 2: radius 1/2, mean direction (0, epsilon) / 2,
    # orthogonal ones would give sqrt(2) / 4, so the floor is sqrt(2) / 8 (with the idle one it would be sqrt(6) / 8).
    vectors = [np.array([1.0, 1e-6]), np.array([-1.0, 1e-6]), np.zeros(2)]
    (result,) = merged([[vector] for vector in vectors], [1.0, 1.0, 2.0], [RDA], 1.0)
    assert result[1] == pytest.approx(0.5 * 1e-6 / 2 * 8 / math.sqrt(2), rel=1e-4)


def test_the_bound_starts_at_half_of_what_orthogonal_contributions_give() -> None:
    # Two unit vectors at an angle of 2 * a: mean direction cos a; half of 1/sqrt 2 is 0.3536, at a = 69.3 degrees.
    for degrees, length in ((45.0, 1.0), (69.0, 1.0), (75.0, math.cos(math.radians(75)) * 2 * math.sqrt(2))):
        a = math.radians(degrees)
        pair = [[np.array([math.cos(a), math.sin(a)])], [np.array([math.cos(a), -math.sin(a)])]]
        (result,) = merged(pair, [1.0, 1.0], [RDA], 1.0)
        assert np.linalg.norm(result) == pytest.approx(length, rel=1e-5)


# ---- merge, against the reference ------------------------------------------------------------------------------------

scales = st.floats(1e-20, 1e15)


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(scales, st.floats(0.01, 1e6)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_rda_equals_the_reference(seed: int, scales_weights: list[tuple[float, float]]) -> None:
    rng = np.random.default_rng(seed)
    # A common part keeps the mean direction above the floor.
    common = rng.standard_normal(64)
    vectors = [scale * (common + rng.standard_normal(64)) for scale, _ in scales_weights]
    w = [to_float32(value) for _, value in scales_weights]
    (result,) = merged([[v] for v in vectors], w, [RDA], 0.75)
    expected = 0.75 * rda_reference(vectors, w)
    assert np.linalg.norm(result - expected) <= 1e-5 * np.linalg.norm(expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([RDA, AVG]))
@settings(max_examples=200, deadline=None)
def test_a_merge_is_finite_and_never_longer_than_its_radius(seed: int, members: int, rule: MergeRule) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(3) * 10.0 ** rng.integers(-30, 18) * rng.integers(0, 2) for _ in range(members)]
    w = [to_float32(float(x)) for x in rng.uniform(0.1, 1000.0, members)]
    (result,) = merged([[v] for v in vectors], w, [rule], 1.0)
    radius = sum(x * np.linalg.norm(v) for x, v in zip(w, vectors, strict=True)) / sum(w)
    assert np.isfinite(result).all()
    assert np.linalg.norm(result) <= radius * (1 + 1e-5)


def test_coefficients_and_factors_are_float32() -> None:
    contributions = [contribution("a", (0.3, 1e-70, 7.0)), contribution("b", (1e30, 2.0, 11.0))]
    w, rules = [0.1, 0.7], [RDA, RDA, AVG]
    values = [x for row in coefficients(contributions, w, rules) for x in row]
    values += factors(contributions, w, rules, [0.9, 1e-5, 3.3], 0.3)
    assert all(value == float(np.float32(value)) for value in values)
    assert coefficients(contributions, w, rules)[0][1] == 0.0  # norm 1e-35 is below what the encoder keeps


@pytest.mark.parametrize("lie", [1e30, 1e60, 2.0**200])
def test_no_norm_that_is_accepted_makes_the_others_work_overflow(lie: float) -> None:
    honest = contribution("b", (1e-8, 1e-8))
    contributions = [contribution("a", (lie, lie)), honest]
    assert refusal(contributions[0], 2) == ""
    rows = coefficients(contributions, [1.0, 1.0], [RDA, AVG])
    with np.errstate(over="raise"):
        sums = np.float32(rows[1][0]) * np.float32(1e-4) + np.float32(rows[0][0]) * np.float32(math.sqrt(lie))
        assert np.isfinite(
            np.float32(sums) * np.float32(factors(contributions, [1.0, 1.0], [RDA, AVG], [lie, lie], 1.0)[0])
        )


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (contribution("a", (1.0,)), "1 squared norms for 2 pieces"),
        (contribution("a", (1.0, math.nan)), "squared norm of piece 1 is nan"),
        (contribution("a", (math.inf, 1.0)), "squared norm of piece 0 is inf"),
        (contribution("a", (-1.0, 1.0)), "squared norm of piece 0 is -1.0"),
        (contribution("a", (1.0, 1.01 * 2.0**200)), "squared norm of piece 1 is "),
        (contribution("a", (1.0, 1.0), steps=0), "covers 0 steps"),
        (contribution("a", (1.0, 1.0), tokens=-1), "counts -1 tokens"),
    ],
)
def test_unusable_contributions_are_refused(bad: Contribution, reason: str) -> None:
    assert reason in refusal(bad, 2)
    good = replace(contribution("b", (1.0, 1.0)))
    assert refusal(good, 2) == ""
