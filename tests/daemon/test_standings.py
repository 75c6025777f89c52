"""What regions brought to the last rounds, from committed rounds."""

import pytest

from diloco_node.core.types import Ballot, Contribution, Member, RoundBody
from diloco_node.daemon.standings import ROUNDS_KEPT, ROUNDS_RECENT, Standings


def member(name: str, *, weight: float = 1.0, steps: int = 16, tokens: int = 1600, length: float = 3.0) -> Member:
    return Member(Contribution(name, 1, 0, 0, 1, 0, steps, tokens, (length**2 / 2, length**2 / 2)), weight)


def body(*members: Member) -> RoundBody:
    return RoundBody(0, 1, Ballot(1, 1), members, 1.0, (1.0, 1.0), (), b"")


def test_a_row_has_what_the_region_brought_beside_the_others() -> None:
    standings = Standings({"b": [-0.5, 0.25, -0.5]})
    assert standings.document() == []
    standings.observe(body(member("a"), member("b", weight=2.0, tokens=12_800), member("c", length=30.0)))
    standings.observe(body(member("a"), member("b", weight=2.0, tokens=12_800, steps=32)))
    a, b, c = standings.document()
    assert (a["region"], a["rounds"], a["tokens_per_step"]) == ("a", 2, 100.0)
    assert (b["tokens_per_step"], b["weight_share"]) == (25_600 / 48, pytest.approx((1 / 2 + 2 / 3) / 2))
    assert (b["steps_share"], c["weight_share"]) == (48 / 96, pytest.approx(1 / 8))
    assert (c["length"], c["usual_length"]) == (pytest.approx(30.0), pytest.approx(3.0))
    assert (b["cosine"], b["cosines"], b["cosines_negative"]) == (-0.25, 3, 2)
    assert (a["cosine"], a["cosines"]) == (None, 0)


def test_the_worst_length_is_told_until_its_round_is_old() -> None:
    standings = Standings({})
    standings.observe(body(member("a"), member("b", length=30.0), member("c")))
    for _ in range(ROUNDS_KEPT - 1):
        standings.observe(body(member("a"), member("b", length=4.0), member("c")))
    assert standings.document()[1]["length"] == pytest.approx(30.0)
    standings.observe(body(member("a"), member("b"), member("c")))
    assert standings.document()[1]["length"] == pytest.approx(4.0)


def test_of_two_nobody_is_too_long() -> None:
    standings = Standings({})
    standings.observe(body(member("a"), member("b", length=30.0)))
    assert [(row["length"], row["usual_length"]) for row in standings.document()] == [(None, None)] * 2


def test_a_count_of_tokens_that_turned_wrong_late_is_told_after_half_of_the_recent_rounds() -> None:
    standings = Standings({})
    for _ in range(ROUNDS_KEPT):
        standings.observe(body(member("a"), member("b")))
    for _ in range(ROUNDS_RECENT // 2):
        standings.observe(body(member("a"), member("b", tokens=12_800)))
    assert [row["tokens_per_step"] for row in standings.document()] == [100.0, 450.0]
