"""Contributions that are much longer than usual count in part; those of an honest round count whole, to the bit."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.opposition import Opposition, Score
from diloco_node.core.merge.outliers import (
    FASTER_MAX,
    PIECE_RATIO_MAX,
    RATIO_MAX,
    ROUNDS_KEPT,
    Norms,
    RecentRounds,
    clips,
    excess,
    newest_opposition,
    recent_after,
)
from diloco_node.core.types import Ballot, Contribution, Member, RoundBody

ONE = (100,)


def of(name: str, *norms: float, steps: int = 16) -> Contribution:
    return Contribution(name, 1, 0, 3, 7, 40, 40 + steps, 100, tuple(norm * norm for norm in norms))


def clipped(
    *contributions: Contribution, sizes: tuple[int, ...] = ONE, recent: RecentRounds | None = None
) -> list[float]:
    """Return the part that counts of each contribution's first piece."""
    return [row[0] for row in clips(contributions, sizes, recent or RecentRounds())]


def test_twice_the_median_is_what_counts_of_a_longer_one() -> None:
    # Norms 1, 2, 3, 16: the lower median is 2, so 4 of the last one's 16 count.
    contributions = [of("a", 1.0), of("b", 2.0), of("c", 3.0), of("d", 16.0)]
    assert clipped(*contributions) == [1.0, 1.0, 1.0, 0.25]
    assert clipped(*contributions[:3], of("d", 4.0)) == [1.0] * 4, "exactly at the limit"
    assert clipped(*contributions[:3], of("d", 4.0 * (1 + 1e-12)))[3] < 1.0


def test_beyond_twenty_times_nothing_counts() -> None:
    contributions = [of("a", 1.0), of("b", 2.0), of("c", 3.0)]
    assert clipped(*contributions, of("d", 40.0))[3] == pytest.approx(0.1), "exactly at the limit"
    assert clipped(*contributions, of("d", 41.0)) == [1.0, 1.0, 1.0, 0.0]
    assert clipped(*contributions, of("d", 80.0, steps=32))[3] == pytest.approx(0.1), "twice the steps, twice of both"


def test_of_three_one_that_loaded_other_weights_does_not_count() -> None:
    contributions = [of("a", 1.0, 1.0), of("b", 1.5, 1.0), of("c", 30.0, 50.0)]
    rows = clips(contributions, (50, 50), RecentRounds())
    assert rows == ((1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    assert excess(contributions, rows, RecentRounds()) == {
        "c": "length 58.3 is 32.3 times the usual 1.8, nothing of it counts"
    }


def test_of_who_points_against_the_others_nothing_counts() -> None:
    contributions = [of("a", 1.0), of("b", 2.0), of("c", 3.0), of("d", 2.0)]
    recent = RecentRounds(opposition=Opposition(9, {"d": Score(-20.0, is_opposed=True)}))
    rows = clips(contributions, ONE, recent)
    assert rows == ((1.0,), (1.0,), (1.0,), (0.0,))
    assert list(excess(contributions, rows, recent)) == ["d"]
    assert "points against the others" in excess(contributions, rows, recent)["d"]
    assert clipped(*contributions[2:], recent=recent) == [1.0, 1.0], "of two nobody knows"


def test_a_fragment_knows_of_others_rounds_once_it_has_one_more() -> None:
    """A ballot may be open while another fragment's round commits: its numbers must not change for that."""
    members = tuple(Member(of(name, 1.0), 1.0) for name in "abc")
    body = RoundBody(0, 1, Ballot(1, 1), members, 1.0, (1.0,), (), b"", squared_norms=(1.0,))
    audited = replace(body, projections=((1.0, 1.0), (1.0, 1.0), (-1.0, -1.0)))
    before = [RecentRounds(), RecentRounds()]
    first = recent_after(before, audited)
    assert first.opposition.scores.keys() == {"c"}
    assert first.opposition.audits == 1
    after = [first, before[1]]
    assert newest_opposition(after) == first.opposition
    assert recent_after(after, replace(body, fragment=1)).opposition == first.opposition


def test_the_direction_of_what_weighs_nothing_speaks_against_nobody() -> None:
    """No sum binds its row, so it may tell what it wants."""
    members = (*(Member(of(name, 1.0), 1.0) for name in "abc"), Member(of("d", 1.0), 0.0))
    rows = ((1.0, 1.0, -1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 1.0), (-1e6, -1e6, 1e6))
    body = RoundBody(0, 1, Ballot(1, 1), members, 1.0, (1.0,), (), b"", squared_norms=(1.0,), projections=rows)
    assert recent_after([RecentRounds()], body).opposition.scores.keys() == {"d"}


def test_a_summary_holds_who_points_against_the_others() -> None:
    opposition = Opposition(9, {"d": Score(-20.0, is_opposed=True), "e": Score(-1.0, is_opposed=False)})
    recent = RecentRounds((Norms(1.0, (1.0,)),), (1.0,), opposition)
    assert RecentRounds.unpacked(recent.packed()) == recent
    old = replace(recent, opposition=Opposition())
    assert RecentRounds.unpacked(old.packed()) == old


def test_of_two_nobody_knows_who_is_the_outlier() -> None:
    assert clipped(of("a", 1.0), of("b", 1000.0)) == [1.0, 1.0]
    assert clipped(of("a", 1000.0)) == [1.0]


@pytest.mark.parametrize("names", ["d", "ad"])
def test_of_two_the_rounds_before_know(names: str) -> None:
    """A learner that is left alone, or with one other, can't take the model away with it."""
    recent = RecentRounds()
    for _ in range(ROUNDS_KEPT - 1):
        recent = recent.after([of(name, 1.0) for name in "abcd"])
    contributions = [of(name, 1000.0 if name == "d" else 1.0) for name in names]
    assert clipped(*contributions, recent=recent)[-1] == 1.0, "the first rounds of a run are short"
    recent = recent.after([of(name, 1.0) for name in "abcd"])
    # Where all are so long, each counts as if it were as long as usual.
    assert clipped(*contributions, recent=recent)[-1] == (0.001 if names == "d" else 0.0)
    assert clipped(*contributions[:-1], of("d", 2.0), recent=recent)[-1] == 1.0
    assert clipped(*contributions[:-1], of("d", 4.0), recent=recent)[-1] == 0.5
    assert set(excess(contributions, clips(contributions, ONE, recent), recent)) == {"d"}


def test_where_nobody_learnt_anything_there_is_nothing_to_compare_with() -> None:
    assert clipped(of("a", 0.0), of("b", 0.0), of("c", 7.0)) == [1.0] * 3


def test_who_made_more_steps_may_be_longer_but_not_for_ever() -> None:
    others = [of("a", 1.0), of("b", 1.0), of("c", 1.0)]
    assert clipped(*others, of("d", 3.0, steps=24))[3] == 1.0, "one and a half times the steps"
    assert clipped(*others, of("d", 6.0, steps=24))[3] == 0.5
    for steps in (32, 64, 10**9):
        assert clipped(*others, of("d", 20.0, steps=steps))[3] == pytest.approx(RATIO_MAX * FASTER_MAX / 20.0)
    assert clipped(*others, of("d", 2.0, steps=1))[3] == 1.0, "nor is anybody held down for being slow"


def test_a_piece_may_be_as_long_as_one_of_its_size_is_on_average() -> None:
    # Three pieces of 1, 24 and 75 values. The second is never touched by the others: its fair part of the usual norm of
    # 2 is 2 * sqrt(0.24), three times that may come. The first is held to three times its own median.
    sizes = (1, 24, 75)
    others = [of(name, 0.5, 0.0, math.sqrt(3.75)) for name in "abc"]
    fair = 2.0 * math.sqrt(24 / 100)
    row = clips([*others, of("d", 0.5, fair, 1.0)], sizes, RecentRounds())[3]
    assert row == (1.0, 1.0, 1.0)
    row = clips([*others, of("d", 10.0, 0.0, 0.0)], sizes, RecentRounds())[3]
    assert row == pytest.approx((PIECE_RATIO_MAX * 0.5 / 10.0, 1.0, 1.0))
    row = clips([*others, of("d", 6.0, 1.0, 1.0)], sizes, RecentRounds())[3]
    assert row == pytest.approx((0.25, 1.0, 1.0)), "1.5 of 6 count, and then all of it is short enough"
    row = clips([*others, of("d", 0.5, 20.0, 0.0)], sizes, RecentRounds())[3]
    assert row == pytest.approx((1.0, PIECE_RATIO_MAX * fair / 20.0, 1.0))


def test_members_that_made_a_step_or_two_do_not_make_the_others_outliers() -> None:
    recent = RecentRounds()
    for _ in range(ROUNDS_KEPT):
        recent = recent.after([of(name, 1.0) for name in "abcd"])
    last = [of("a", 0.001, steps=1), of("b", 0.001, steps=1), of("c", 0.001, steps=1), of("d", 1.0)]
    assert clipped(*last, recent=recent) == [1.0] * 4
    assert clipped(*last)[3] == 0.0, "nothing is known of the rounds before"
    assert clipped(*last[:3], of("d", 8.0), recent=recent)[3] == 0.5
    assert clipped(*last[:3], of("d", 0.004, steps=1), recent=recent)[3] == 0.5, "a step or two are no cycle"
    assert clipped(*last[:3], of("d", 1.0, steps=1), recent=recent)[3] == 0.0


@pytest.mark.parametrize("names", ["a", "ab"])
def test_one_round_of_few_members_does_not_cut_those_that_bring_a_whole_cycle(names: str) -> None:
    recent = RecentRounds()
    for _ in range(ROUNDS_KEPT):
        recent = recent.after([of(name, 1.0) for name in names])
    last = [of("a", 0.001, steps=1), of("b", 0.001, steps=1), of("c", 1.0), of("d", 1.0)]
    assert clipped(*last, recent=recent) == [1.0] * 4
    recent = recent.after([of("a", 1e9)])
    assert clipped(*last, recent=recent) == [1.0] * 4, "one wild round is not what is usual"
    assert clipped(*last[:3], of("d", 8.0), recent=recent)[3] == 0.5


def test_where_all_are_longer_than_in_the_rounds_before_who_made_more_steps_is_compared_with_them() -> None:
    recent = RecentRounds()
    for _ in range(ROUNDS_KEPT):
        recent = recent.after([of(name, 1.0) for name in "abcd"])
    together = [of("a", 5.0), of("b", 5.0), of("c", 5.0)]
    assert clipped(*together, of("d", 16.0, steps=48), recent=recent) == [1.0] * 4
    assert clipped(*together, of("d", 40.0, steps=48), recent=recent)[3] == 0.5


def test_what_is_usual_follows_the_last_rounds_and_no_minority() -> None:
    recent = RecentRounds()
    assert recent.usual([of("a", 1.0, 2.0)]) == Norms(math.sqrt(5.0), (1.0, 2.0))
    for _ in range(ROUNDS_KEPT):
        recent = recent.after([of("a", 3.0, 4.0), of("b", 3.0, 4.0), of("c", 1e9, 1e9), of("d", 3.0, 4.0)])
        assert recent.usual([of("a", 1.0, 2.0)]) == Norms(5.0, (3.0, 4.0))
    for _ in range(ROUNDS_KEPT // 2 + 1):
        recent = recent.after([of(name, 0.3, 0.4) for name in "abc"])
    usual = recent.usual([of("a", 0.0, 0.0)])
    assert (usual.total, *usual.pieces) == pytest.approx((0.5, 0.3, 0.4))


@given(st.integers(0, 2**32 - 1), st.integers(3, 8))
def test_rounds_of_honest_learners_are_never_touched(seed: int, members: int) -> None:
    """Up to 1.8 times the median's length all over, in all proportions of the pieces that such learners have."""
    rng = random.Random(seed)
    recent, sizes = RecentRounds(), (64, 4096, 100_000)
    for _ in range(4):
        contributions = [of(f"r{m}", *(math.sqrt(s) * rng.uniform(0.8, 1.4) for s in sizes)) for m in range(members)]
        assert clips(contributions, sizes, recent) == ((1.0, 1.0, 1.0),) * members
        recent = recent.after(contributions)


@given(st.integers(0, 2**32 - 1), st.integers(3, 7), st.floats(0.0, 2.0**100))
def test_no_minority_makes_itself_longer_than_the_bound(seed: int, members: int, lie: float) -> None:
    rng = random.Random(seed)
    sizes = (64, 4096, 100_000)
    honest = [of(f"r{m}", *(math.sqrt(s) * rng.uniform(0.5, 2.0) for s in sizes)) for m in range(members)]
    too_long = [
        of(f"x{m}", *(lie * rng.random() for _ in sizes), steps=10 ** rng.randint(0, 9))
        for m in range((members - 1) // 2)
    ]
    rows = clips([*honest, *too_long], sizes, RecentRounds())
    longest = max(math.sqrt(sum(contribution.squared_norms)) for contribution in honest)
    for member, row in zip(too_long, rows[members:], strict=True):
        length = math.sqrt(sum(s * part * part for s, part in zip(member.squared_norms, row, strict=True)))
        assert length <= RATIO_MAX * FASTER_MAX * longest * (1 + 1e-9)
        assert all(0.0 <= part <= 1.0 for part in row)


def test_why_is_said_of_those_that_are_clipped_only() -> None:
    contributions = [of("a", 1.0, 1.0), of("b", 1.0, 1.0), of("c", 1.0, 1.0), of("d", 100.0, 0.1), of("e", 50.0, 50.0)]
    recent = RecentRounds()
    reasons = excess(contributions, clips(contributions, (50, 50), recent), recent)
    assert reasons == {
        "d": "length 100 is 70.7 times the usual 1.41, nothing of it counts",
        "e": "length 70.7 is 50 times the usual 1.41, nothing of it counts",
    }
    partly = [*contributions[:3], of("d", 12.0, 0.1)]
    assert excess(partly, clips(partly, (50, 50), recent), recent) == {
        "d": "length 12 is 8.49 times the usual 1.41, 0.236 of its longest piece counts"
    }
    assert excess(contributions[:3], clips(contributions[:3], (50, 50), recent), recent) == {}
