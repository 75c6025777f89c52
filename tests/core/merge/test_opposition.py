"""Members that point against the others are found by the projections in the ledger, and nobody else is."""

import math
import random
import struct

import pytest

from diloco_node.core.merge.freivalds import WINDOWS
from diloco_node.core.merge.opposition import FREE_ABOVE, OPPOSED_BELOW, Opposition, Score
from diloco_node.core.types import Contribution
from diloco_node.errors import ProtocolViolation

NAMES = ("a", "b", "c", "d")
EQUAL = (1.0, 1.0, 1.0, 1.0)


def of(name: str, norm: float = 1.0) -> Contribution:
    return Contribution(name, 1, 0, 3, 7, 40, 56, 100, (norm * norm / 2, norm * norm / 2))


def rows_of(chance: random.Random, *factors: float, shared: float = 0.6) -> list[list[float]]:
    """Projections of contributions that share so much of their direction, each times a factor."""
    common = [chance.gauss(0.0, 1.0) for _ in range(WINDOWS)]
    own = math.sqrt(1.0 - shared * shared)
    return [[factor * (shared * value + own * chance.gauss(0.0, 1.0)) / 50.0 for value in common] for factor in factors]


def audits_until(opposition: Opposition, name: str, *factors: float, shared: float = 0.6, most: int = 60) -> int:
    """Return after how many audited rounds a member is opposed, or `most`."""
    chance = random.Random(3)
    contributions = [of(name_, abs(factor)) for name_, factor in zip(NAMES, factors, strict=True)]
    for count in range(1, most):
        opposition = opposition.after(contributions, EQUAL, rows_of(chance, *factors, shared=shared))
        if name in opposition.opposed(NAMES):
            return count
    return most


def test_a_member_whose_gradient_is_turned_does_not_count_after_a_dozen_audits() -> None:
    assert 4 <= audits_until(Opposition(), "d", 1.0, 1.0, 1.0, -1.0) <= 16


def test_neither_length_nor_an_honest_past_puts_it_off() -> None:
    assert audits_until(Opposition(), "d", 1.0, 1.0, 1.0, -5.0) <= 16
    past, chance = Opposition(), random.Random(5)
    for _ in range(200):
        past = past.after([*map(of, NAMES)], EQUAL, rows_of(chance, 1.0, 1.0, 1.0, 1.0))
    assert past.scores.get("d", Score(0.0, is_opposed=False)).value > -2.0, "nothing speaks against it"
    assert audits_until(past, "d", 1.0, 1.0, 1.0, -1.0) <= 16


@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_honest_members_are_never_opposed_even_if_their_data_say_nothing_about_one_another(shared: float) -> None:
    chance, opposition = random.Random(11), Opposition()
    lowest = 0.0
    for _ in range(2000):
        opposition = opposition.after([*map(of, NAMES)], EQUAL, rows_of(chance, 1.0, 1.0, 1.0, 1.0, shared=shared))
        assert not opposition.opposed(NAMES)
        lowest = min([lowest, *(score.value for score in opposition.scores.values())])
    assert lowest < -2.0, "there was noise to be taken for a lie"


def test_who_mends_its_ways_counts_again_and_who_goes_on_does_not() -> None:
    chance, opposition = random.Random(7), Opposition()
    contributions = [*map(of, NAMES)]
    for _ in range(60):
        opposition = opposition.after(contributions, EQUAL, rows_of(chance, 1.0, 1.0, 1.0, -1.0))
    for _ in range(300):
        opposition = opposition.after(contributions, EQUAL, rows_of(chance, 1.0, 1.0, 1.0, -1.0))
        assert opposition.opposed(NAMES) == {"d"}
    for _ in range(40):
        opposition = opposition.after(contributions, EQUAL, rows_of(chance, 1.0, 1.0, 1.0, 1.0))
    assert not opposition.opposed(NAMES)


def test_where_a_row_is_missing_nobody_is_judged_and_who_is_away_is_free_in_time() -> None:
    opposition, chance = Opposition(9, {"d": Score(-40.0, is_opposed=True)}), random.Random(2)
    for _ in range(30):
        rows = rows_of(chance, 1.0, 1.0, -1.0, 1.0)
        assert opposition.after([*map(of, NAMES)], EQUAL, [*rows[:3], []]) is opposition, "no sum binds the others"
    for _ in range(40):
        opposition = opposition.after([*map(of, NAMES[:3])], EQUAL, rows_of(chance, 1.0, 1.0, 1.0))
    assert not opposition.opposed(NAMES)


def test_a_row_that_no_sum_binds_turns_nobody_into_an_opponent() -> None:
    chance, opposition = random.Random(9), Opposition()
    for _ in range(60):
        rows = rows_of(chance, 1.0, 1.0, 1.0, 1.0, shared=0.5)
        rows[3] = [-1e6 * value for value in rows[0]]
        opposition = opposition.after([*map(of, NAMES)], (1.0, 1.0, 1.0, 0.0), rows)
    assert opposition.opposed(NAMES) == {"d"}
    assert set(opposition.scores) == {"d"}


def test_an_opposed_member_that_tells_no_row_shields_nobody_and_stays_opposed() -> None:
    names, chance = (*NAMES, "e"), random.Random(12)
    opposition = Opposition(9, {"d": Score(-40.0, is_opposed=True)})
    for _ in range(40):
        rows = rows_of(chance, 1.0, 1.0, -1.0, 1.0, 1.0)
        rows[3] = []
        opposition = opposition.after([*map(of, names)], (1.0, 1.0, 1.0, 0.0, 1.0), rows)
    assert opposition.opposed(names) == {"c", "d"}
    assert opposition.scores["d"].value == -40.0


def test_an_opposed_member_that_tells_better_rows_than_its_own_is_freed_by_time_alone() -> None:
    opposition, chance, audits = Opposition(9, {"d": Score(-17.0, is_opposed=True)}), random.Random(6), 0
    while opposition.opposed(NAMES):
        rows = rows_of(chance, 1.0, 1.0, 1.0, -1.0)
        rows[3] = [sum(column) for column in zip(*rows[:3], strict=True)]
        opposition, audits = opposition.after([*map(of, NAMES)], (1.0, 1.0, 1.0, 0.0), rows), audits + 1
        assert audits < 60
    assert audits >= 20


def test_never_half_of_the_members_are_opposed_and_none_of_two() -> None:
    low = Score(OPPOSED_BELOW - 1.0, is_opposed=True)
    opposition = Opposition(9, {"c": low, "d": low})
    assert opposition.opposed(NAMES) == frozenset()
    assert opposition.opposed((*NAMES, "e")) == {"c", "d"}
    assert opposition.opposed(("a", "d")) == frozenset()
    assert opposition.opposed(("a", "b", "d")) == {"d"}


def test_rounds_without_audit_or_of_two_change_nothing() -> None:
    before = Opposition(3, {"d": Score(FREE_ABOVE - 1.0, is_opposed=False)})
    contributions = [*map(of, NAMES)]
    assert before.after(contributions, EQUAL, ()) is before
    assert before.after(contributions[:2], EQUAL, rows_of(random.Random(1), 1.0, 1.0)) is before
    assert before.after([of("a"), of("b"), of("d", 0.0)], EQUAL, [[1.0], [1.0], [1.0]]) is before, (
        "no length, no direction"
    )


def test_windows_of_zeros_say_nothing() -> None:
    after = Opposition().after([*map(of, NAMES[:3])], EQUAL, [[0.0] * 4] * 3)
    assert after == Opposition(1)


def test_numbers_at_the_bounds_of_the_wire_are_no_trouble() -> None:
    tiny = Contribution("d", 1, 0, 3, 7, 40, 56, 100, (5e-324, 0.0))
    rows = [[2.0**110, -(2.0**110)]] * 3
    after = Opposition().after([*map(of, NAMES[:3]), tiny], EQUAL, [*rows, [-(2.0**110), 2.0**110]])
    assert all(math.isfinite(score.value) for score in after.scores.values())
    short = Contribution("d", 1, 0, 3, 7, 40, 56, 100, (2.0**-804, 0.0))
    assert Opposition().after([of("a"), of("b"), short], EQUAL, [*rows[:2], [2.0**110] * 2]) == Opposition()
    assert Opposition.unpacked(after.packed()) == after


def test_scores_are_the_same_after_a_summary() -> None:
    chance, opposition = random.Random(4), Opposition()
    assert Opposition.unpacked(b"") == opposition
    for _ in range(40):
        opposition = opposition.after([*map(of, NAMES)], EQUAL, rows_of(chance, 1.0, 1.0, 1.0, -1.0, shared=0.3))
    assert opposition.scores
    assert Opposition.unpacked(opposition.packed()) == opposition


@pytest.mark.parametrize(
    "data",
    [
        b"\1",
        struct.pack("<I", 1) + b"\1",
        struct.pack("<IB?d", 1, 9, True, -1.0) + b"a",
        struct.pack("<IB?d", 1, 1, True, -1.0) + b"\xff",
        struct.pack("<IB?d", 1, 1, True, 1.0) + b"a",
        struct.pack("<IB?d", 1, 1, True, math.nan) + b"a",
        struct.pack("<IB?d", 1, 1, True, -1.0) + b"b" + struct.pack("<B?d", 1, True, -1.0) + b"a",
        struct.pack("<IB?d", 1, 1, True, -1.0) + b"a" + struct.pack("<B?d", 1, True, -2.0) + b"a",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="norms of recent rounds: scores"):
        Opposition.unpacked(data)
