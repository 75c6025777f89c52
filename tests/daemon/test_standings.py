"""What regions brought to the last rounds, from committed rounds."""

import pytest

from diloco_node.core.merge.opposition import Opposition, Score
from diloco_node.core.types import Ballot, Contribution, Member, RoundBody
from diloco_node.daemon.standings import COSINE_ROUNDS, LENGTH_ROUNDS, ROUNDS_KEPT, TOKEN_ROUNDS, Standings


def member(name: str, *, weight: float = 1.0, steps: int = 16, tokens: int = 1600, length: float = 3.0) -> Member:
    return Member(Contribution(name, 1, 0, 0, 1, 0, steps, tokens, (length**2 / 2, length**2 / 2)), weight)


def body(*members: Member) -> RoundBody:
    return RoundBody(0, 1, Ballot(1, 1), members, 1.0, (1.0, 1.0), (), b"")


def test_a_row_has_what_the_region_brought_beside_the_others() -> None:
    standings = Standings({"b": [-0.5, 0.25, -0.5]})
    assert standings.document() == []
    standings.observe(body(member("a"), member("b", weight=2.0, tokens=12_800), member("c")))
    standings.observe(body(member("a"), member("b", weight=2.0, tokens=12_800, steps=32)))
    a, b, c = standings.document()
    assert (a["region"], a["rounds"], a["tokens_per_step"]) == ("a", 2, 100.0)
    assert (b["tokens_per_step"], b["weight_share"]) == (25_600 / 48, pytest.approx((1 / 2 + 2 / 3) / 2))
    assert (b["steps_share"], c["weight_share"]) == (48 / 96, pytest.approx(1 / 8))
    assert (b["cosine"], b["cosines"], b["cosines_negative"]) == (-0.25, 3, 2)
    assert (a["cosine"], a["cosines"]) == (None, 0)


def test_rounds_of_one_region_alone_say_nothing_of_its_weight() -> None:
    standings = Standings({})
    for members in [(member("a"), member("b"))] * 2 + [(member("a"),)] * 30:
        standings.observe(body(*members))
    a, b = standings.document()
    assert (a["rounds"], a["weight_share"], b["weight_share"]) == (32, pytest.approx(0.5), pytest.approx(0.5))


def rounds_of(*lengths: float, steps: int = 16) -> list[float | None]:
    """The ratio of b's lengths after each of these rounds with two regions of usual length."""
    standings, ratios = Standings({}), []
    for length in lengths:
        standings.observe(body(member("a"), member("b", length=length, steps=steps), member("c")))
        ratios.append(standings.document()[1]["length_ratio"])
    return ratios


def test_a_region_that_turns_too_long_is_told_of_after_half_of_the_recent_rounds() -> None:
    """D-175: one round of twice the length, or three, are usual."""
    ratios = rounds_of(*[3.0] * LENGTH_ROUNDS, *[15.0] * 5)
    assert ratios[: LENGTH_ROUNDS - 1] == [None] * (LENGTH_ROUNDS - 1)
    assert ratios[LENGTH_ROUNDS - 1 :] == pytest.approx([1.0, 1.0, 1.0, 1.0, 5.0, 5.0])


def test_a_region_that_is_too_long_in_every_second_round_is_told_of() -> None:
    """As if it diverged in half of the fragments."""
    assert rounds_of(*[3.0, 15.0] * LENGTH_ROUNDS)[-1] == pytest.approx(5.0)


def test_a_length_is_told_step_for_step() -> None:
    assert rounds_of(*[12.0] * LENGTH_ROUNDS, steps=64)[-1] == pytest.approx(1.0)


def test_one_length_of_which_nothing_counts_is_told_of_at_once_until_its_round_is_old() -> None:
    ratios = rounds_of(63.0, *[3.0] * ROUNDS_KEPT)
    assert ratios[:-1] == pytest.approx([21.0] * ROUNDS_KEPT)
    assert ratios[-1] == pytest.approx(1.0)


def test_a_length_of_which_the_merge_takes_nothing_is_wild_with_many_steps_too() -> None:
    """A merge allows twice the length for more steps, however many they are (`outliers.FASTER_MAX`)."""
    assert rounds_of(180.0, *[3.0] * LENGTH_ROUNDS, steps=64)[-1] == pytest.approx(30.0)


def test_of_two_nobody_is_too_long() -> None:
    standings = Standings({})
    for _ in range(LENGTH_ROUNDS):
        standings.observe(body(member("a"), member("b", length=300.0)))
    assert [row["length_ratio"] for row in standings.document()] == [None] * 2


def test_a_count_of_tokens_that_turned_wrong_late_is_told_after_half_of_the_recent_rounds() -> None:
    standings = Standings({})
    for _ in range(ROUNDS_KEPT):
        standings.observe(body(member("a"), member("b")))
    for _ in range(TOKEN_ROUNDS // 2):
        standings.observe(body(member("a"), member("b", tokens=12_800)))
    assert [row["tokens_per_step"] for row in standings.document()] == [100.0, 450.0]


def test_cosines_that_turn_late_are_told_when_all_of_the_last_are_negative() -> None:
    past = [0.4] * 40
    means = []
    for turned in ([-0.3] * (COSINE_ROUNDS - 1), [-0.3] * COSINE_ROUNDS, [-0.3] * COSINE_ROUNDS + [0.1]):
        standings = Standings({"b": past + turned})
        standings.observe(body(member("a"), member("b")))
        means.append(standings.document()[1]["cosine_recent"])
    assert means == [None, pytest.approx(-0.3), None]


def test_a_row_says_whether_the_region_does_not_count() -> None:
    standings = Standings({})
    standings.observe(body(member("a"), member("b"), member("c")))
    opposition = Opposition(9, {"b": Score(-20.0, is_opposed=True)})
    assert [row["is_opposed"] for row in standings.document(opposition)] == [False, True, False]
    assert not any(row["is_opposed"] for row in standings.document())
