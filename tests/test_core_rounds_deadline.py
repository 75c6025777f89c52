"""A ballot's deadline: derived from what was measured, printed with its derivation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_node.core.budget_plan import RateLimits
from diloco_node.core.merge.fragments import Fragment, Piece
from diloco_node.core.merge.schedule import SLOWER_MAX
from diloco_node.core.rounds.ballot import BallotClock, ballot_deadline, encoded_bytes
from diloco_node.core.types import Codec, MergeRule, Stripe
from tests.rounds_kit import MANIFEST, MS, SECOND, SETTINGS, Neighbourhood, status


def fragment(*sizes: int) -> Fragment:
    pieces, offset = [], 0
    for index, size in enumerate(sizes):
        pieces.append(Piece(index, f"t{index}", 0, size, 0, size, offset, MergeRule.RDA))
        offset += size
    return Fragment(0, tuple(pieces), offset)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Codec.FP32, 4 * (8192 + 100)),
        (Codec.BF16, 2 * (8192 + 100)),
        (Codec.INT8, 8192 + 4 * 32 + 2 * 100),
        (Codec.INT4, 4096 + 4 * 32 + 2 * 100),
    ],
)
def test_encoded_bytes_follow_the_layout(codec: Codec, expected: int) -> None:
    assert encoded_bytes(fragment(8192, 100), codec) == expected


def test_minimum_holds_for_fast_rounds() -> None:
    deadline = ballot_deadline(
        minimum_ns=2 * SECOND, attempt=0, step_time_ns=1, rtt_ns=1, transfer_bytes=1, rate_bytes_per_s=10**9
    )
    assert deadline.duration_ns == 2 * SECOND


def test_expected_time_counts_three_times_and_every_term_counts() -> None:
    deadline = ballot_deadline(
        minimum_ns=1, attempt=0, step_time_ns=100 * MS, rtt_ns=50 * MS, transfer_bytes=1_000_000, rate_bytes_per_s=10**6
    )
    assert deadline.duration_ns == 3 * (200 * MS + 200 * MS + SECOND)
    assert deadline.derivation == (
        "4.2 s = 1 x max(1e-09 s, 3 x (2 steps of 0.1 s + 4 round trips of 0.05 s + 1000000 bytes at 1000000 bytes/s))"
    )


def test_failed_ballots_double_the_time_up_to_eight_times() -> None:
    def duration(attempt: int) -> int:
        return ballot_deadline(
            minimum_ns=SECOND, attempt=attempt, step_time_ns=0, rtt_ns=0, transfer_bytes=0, rate_bytes_per_s=1
        ).duration_ns

    assert [duration(attempt) for attempt in range(6)] == [SECOND * factor for factor in (1, 2, 4, 8, 8, 8)]


def test_unknown_rate_is_assumed_and_said() -> None:
    deadline = ballot_deadline(
        minimum_ns=1, attempt=0, step_time_ns=0, rtt_ns=0, transfer_bytes=12_500_000, rate_bytes_per_s=0
    )
    assert deadline.duration_ns == 3 * SECOND
    assert "(assumed)" in deadline.derivation


def test_clock_takes_the_slowest_member_the_longest_way_and_earlier_rounds() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    clock = BallotClock(manifest=MANIFEST, settings=SETTINGS, liveness=world.liveness, regions=3)
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    before = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert before.duration_ns == SETTINGS.ballot_deadline_min_ns
    clock.took(0, 5 * SECOND)
    after = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert after.duration_ns == pytest.approx(3 * (5 * SECOND + 200 * MS), rel=0.01)


def test_nobody_is_believed_to_be_slower_than_so_many_times_the_others() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    clock = BallotClock(manifest=MANIFEST, settings=SETTINGS, liveness=world.liveness, regions=3)
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    for told_ns, believed_ns in ((1500 * MS, 1500 * MS), (2**62, SLOWER_MAX * 100 * MS)):
        world.hear("c", replace(status(), step_time_ns=told_ns), now_ns=1)
        deadline = clock.deadline(0, ("a", "b", "c"), stripes, attempt=0)
        assert f"2 steps of {believed_ns / SECOND:.3g} s" in deadline.derivation
    alone = clock.deadline(0, ("c",), stripes, attempt=0)
    assert f"2 steps of {2**62 / SECOND:.3g} s" in alone.derivation, "nobody else is waiting"


def test_fragment_that_was_never_merged_goes_by_the_slowest_other_and_its_size() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    one, other, new = fragment(8192), fragment(4096), fragment(12_288)
    manifest = replace(MANIFEST, fragments=(one, other, new))
    clock = BallotClock(manifest=manifest, settings=SETTINGS, liveness=world.liveness, regions=3)
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    clock.took(0, 8 * SECOND)
    clock.took(1, 5 * SECOND)
    # Of the smaller one, 5 s: a rate at which three times its size take 15 s; the first would say 12 s.
    deadline = clock.deadline(2, ("a", "b"), stripes, attempt=0)
    assert deadline.duration_ns == pytest.approx(3 * (15 * SECOND + 200 * MS), rel=0.01)
    assert "(assumed)" not in deadline.derivation
    clock.took(2, SECOND)
    assert clock.deadline(2, ("a", "b"), stripes, attempt=0).duration_ns == pytest.approx(3 * 1.2 * SECOND, rel=0.01)


def test_before_anything_was_merged_the_told_budgets_count_where_they_are_low() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(manifest=manifest, settings=SETTINGS, liveness=world.liveness, regions=3)
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    assumed = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert "(assumed)" in assumed.derivation
    world.liveness.own_budget(RateLimits(10**9, None))
    assert clock.deadline(0, ("a", "b"), stripes, attempt=0) == assumed, "a fast line says nothing of the others"
    world.liveness.own_budget(RateLimits(10**5, 10**6))
    told = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert f"at {10**5 // SETTINGS.rounds_in_flight_max} bytes/s" in told.derivation
    assert told.duration_ns > 10 * assumed.duration_ns
