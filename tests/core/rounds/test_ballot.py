"""A round's ballots: the derived deadline, the open round, and what follows a failed ballot."""

from dataclasses import replace

import pytest

from diloco_node.core.merge.fragments import Fragment, Piece
from diloco_node.core.merge.schedule import SLOWER_MAX
from diloco_node.core.messages import BallotOpened, MergeDecided, Receipt, ReductionReported, ReusedStripe
from diloco_node.core.rounds.ballot import (
    RATE_UNKNOWN_BYTES_PER_S,
    BallotClock,
    ballot_deadline,
    encoded_bytes,
    plan_next,
)
from diloco_node.core.rounds.open_round import Deadline, OpenRound, payload_digest
from diloco_node.core.types import Ballot, Codec, MergeRule, RateLimits, Stripe
from tests.kit.rounds_kit import (
    MANIFEST,
    MS,
    SECOND,
    SETTINGS,
    Neighbourhood,
    context_of,
    contribution,
    history_of,
    pieces,
    status,
)


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
    clock = BallotClock(context_of(history_of(), liveness=world.liveness))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    before = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert before.duration_ns == SETTINGS.ballot_deadline_min_ns
    clock.observe(0, 5 * SECOND)
    after = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert after.duration_ns == pytest.approx(3 * (5 * SECOND + 200 * MS), rel=0.01)


def test_nobody_is_believed_to_be_slower_than_so_many_times_the_others() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    clock = BallotClock(context_of(history_of(), liveness=world.liveness))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    for reported_ns, believed_ns in ((1500 * MS, 1500 * MS), (2**62, SLOWER_MAX * 100 * MS)):
        world.hear("c", replace(status(), step_time_ns=reported_ns), now_ns=1)
        deadline = clock.deadline(0, ("a", "b", "c"), stripes, attempt=0)
        assert f"2 steps of {believed_ns / SECOND:.3g} s" in deadline.derivation
    alone = clock.deadline(0, ("c",), stripes, attempt=0)
    assert f"2 steps of {2**62 / SECOND:.3g} s" in alone.derivation, "nobody else is waiting"


def test_fragment_that_was_never_merged_goes_by_the_slowest_other_and_its_size() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    item, other, new = fragment(8192), fragment(4096), fragment(12_288)
    manifest = replace(MANIFEST, fragments=(item, other, new))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    clock.observe(0, 8 * SECOND)
    clock.observe(1, 5 * SECOND)
    # Of the smaller one, 5 s: a rate at which three times its size take 15 s; the first would say 12 s.
    deadline = clock.deadline(2, ("a", "b"), stripes, attempt=0)
    assert deadline.duration_ns == pytest.approx(3 * (15 * SECOND + 200 * MS), rel=0.01)
    assert "(assumed)" not in deadline.derivation
    clock.observe(2, SECOND)
    assert clock.deadline(2, ("a", "b"), stripes, attempt=0).duration_ns == pytest.approx(3 * 1.2 * SECOND, rel=0.01)


def test_before_anything_was_merged_the_reported_budgets_count_where_they_are_low() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    assumed = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert "(assumed)" in assumed.derivation
    world.liveness.own_budget(RateLimits(10**9, None))
    assert clock.deadline(0, ("a", "b"), stripes, attempt=0) == assumed, "a fast line says nothing of the others"
    world.liveness.own_budget(RateLimits(10**5, 10**6))
    reported = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    assert f"at {10**5 // SETTINGS.rounds_in_flight_max} bytes/s" in reported.derivation
    assert reported.duration_ns > 10 * assumed.duration_ns


def test_a_budget_that_was_lowered_counts_more_than_what_was_measured_before() -> None:
    """Else every ballot is given up before its stripes have come, and none is left to learn from."""
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4))
    clock.observe(0, SECOND // 2)
    measured = clock.deadline(0, ("a", "b"), stripes, attempt=0)
    rate = 10 * RATE_UNKNOWN_BYTES_PER_S
    world.liveness.own_budget(RateLimits(100 * rate, 100 * rate))
    assert clock.deadline(0, ("a", "b"), stripes, attempt=0) == measured, "a ballot does not take all of the line"
    for lowered in (2 * RATE_UNKNOWN_BYTES_PER_S, 10**6):
        world.liveness.own_budget(RateLimits(None, lowered))
        deadline = clock.deadline(0, ("a", "b"), stripes, attempt=0)
        assert f"at {lowered // SETTINGS.rounds_in_flight_max} bytes/s" in deadline.derivation
        assert deadline.duration_ns > measured.duration_ns


def deadlines_with(rate: int) -> tuple[int, int]:
    """The deadline of a large ballot of three, in ns, before and after one region reports a budget of so many B/s."""
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 6))
    assumed = clock.deadline(0, ("a", "b", "c"), stripes, attempt=0)
    world.liveness.own_budget(RateLimits(rate, rate))
    return assumed.duration_ns, clock.deadline(0, ("a", "b", "c"), stripes, attempt=0).duration_ns


def test_one_region_with_a_tiny_budget_holds_no_ballot_up_for_days() -> None:
    assumed_ns, reported_ns = deadlines_with(1)
    assert assumed_ns < reported_ns < 40 * assumed_ns


def test_a_budget_beside_which_a_ballot_was_fast_makes_the_next_ones_no_longer() -> None:
    """One region that reported 1 B/s, and was as fast as ever, made all deadlines sixteen times as long."""
    world = Neighbourhood()
    world.all_hear(status(), now_ns=0)
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 6))

    def deadline_s() -> float:
        return clock.deadline(0, ("a", "b", "c"), stripes, attempt=0).duration_ns / SECOND

    clock.observe(0, SECOND)
    usual_s = deadline_s()
    world.liveness.own_budget(RateLimits(100, 100))
    long_s = deadline_s()
    assert long_s > 10 * usual_s
    for names in ((), ("b", "c")):
        clock.observe(0, SECOND, names)
        assert deadline_s() == long_s, "in a later ballot of a round stripes are here already; and it was not in it"
    clock.observe(0, SECOND, ("a", "b", "c"))
    assert usual_s < deadline_s() <= SETTINGS.rounds_in_flight_max * usual_s
    world.liveness.own_budget(RateLimits(200, 200))
    assert deadline_s() <= SETTINGS.rounds_in_flight_max * usual_s
    world.liveness.own_budget(RateLimits(50, 50))
    assert deadline_s() == long_s, "it was lowered since"
    world.liveness.own_budget(RateLimits(100, 100))
    assert deadline_s() < long_s
    clock.deadline(0, ("a", "b", "c"), stripes, attempt=1)
    assert deadline_s() == long_s, "a ballot was late: what it lacked may be what the budget bounds"


def test_budgets_beyond_what_a_ballot_takes_do_not_hide_a_low_one() -> None:
    world = Neighbourhood()
    manifest = replace(MANIFEST, fragments=(fragment(2**24), *MANIFEST.fragments[1:]))
    clock = BallotClock(context_of(history_of(), liveness=world.liveness, manifest=manifest))
    stripes = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 6))
    world.all_hear(status(), now_ns=0)
    clock.observe(0, SECOND)
    world.liveness.own_budget(RateLimits(10**6, 10**6))
    deadlines = set()
    for rate in (None, 10**12):
        for name in "bc":
            world.hear(name, status(), now_ns=1, budget=RateLimits(rate, rate))
        deadlines.add(clock.deadline(0, ("a", "b", "c"), stripes, attempt=0).duration_ns)
    assert len(deadlines) == 1
    assert deadlines.pop() > 10 * SECOND


@pytest.mark.parametrize(
    ("rate", "is_longer"), [(RATE_UNKNOWN_BYTES_PER_S, True), (3 * RATE_UNKNOWN_BYTES_PER_S, False)]
)
def test_of_a_budget_a_ballot_has_the_part_of_one_round(rate: int, is_longer: bool) -> None:
    """Two rounds are in flight: a budget of the assumed rate has half of it for each."""
    assumed_ns, reported_ns = deadlines_with(rate)
    assert (reported_ns > assumed_ns) is is_longer


STRIPES = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 5))
ALL = ("a", "b", "c")
OFFERED = {name: contribution(name) for name in ALL}


def a_round(**received: set[int]) -> OpenRound:
    round_ = OpenRound(
        opened_at_ns=0,
        is_last=False,
        announcement=BallotOpened(Ballot(1, 1), 0, 1, ALL, STRIPES),
        ballot_at_ns=0,
        deadline=Deadline(SECOND, ""),
    )
    round_.contributions = dict(OFFERED)
    round_.receipts = {name: dict.fromkeys(stripes, (1, 1)) for name, stripes in received.items()}
    return round_


def decided(round_: OpenRound, *names: str) -> None:
    chosen = tuple(OFFERED[name] for name in names)
    round_.decision = MergeDecided(round_.ballot, 0, 1, chosen, tuple((1.0,) * pieces(0) for _ in names))


def report(stripe: int, norm: float, *parts: float) -> ReductionReported:
    width = pieces(0)
    return ReductionReported(
        Ballot(1, 1), stripe, (norm,) * width, tuple((part,) * width for part in parts), bytes([stripe]) * 32
    )


def test_after_the_deadline_those_go_on_that_all_reducers_hold() -> None:
    round_ = a_round(a={0, 1, 2}, b={0, 1}, c={0, 1, 2})
    plan = plan_next(round_, STRIPES, usable=OFFERED, able=ALL, reachable=ALL, is_late=True)
    assert plan.members == ("a", "c")
    assert plan.contributions == {"a": OFFERED["a"], "c": OFFERED["c"]}
    assert plan.reused == tuple(ReusedStripe(name, stripe) for name in ("a", "c") for stripe in range(3))


def test_after_the_deadline_a_whole_contribution_of_a_lost_member_stays_if_nothing_moves() -> None:
    round_ = a_round(a={0, 1, 2}, b={0, 1, 2})
    plan = plan_next(round_, STRIPES, usable=OFFERED, able=("a",), reachable=("a",), is_late=True)
    assert plan.members == ("a", "b")
    moved = (Stripe("a", 0, 2), Stripe("c", 2, 5))
    plan = plan_next(round_, moved, usable=OFFERED, able=("a",), reachable=("a",), is_late=True)
    assert plan.members == ("a",)


def test_what_has_arrived_of_a_learner_that_died_is_not_reused() -> None:
    """Its next incarnation contributes: reducers that have stripes of the one before must get the new ones."""
    round_ = a_round(a={0, 1, 2}, b={0, 1, 2})
    round_.contributions["b"] = newer = contribution("b", incarnation=2)
    plan = plan_next(round_, STRIPES, usable=OFFERED | {"b": newer}, able=ALL, reachable=ALL, is_late=True)
    assert plan.members == ("a",)
    round_.on_receipts("b", [Receipt("b", 2, 1)])
    plan = plan_next(round_, STRIPES, usable=OFFERED | {"b": newer}, able=ALL, reachable=ALL, is_late=False)
    assert [reused.stripe for reused in plan.reused if reused.learner == "b"] == [1]


def test_if_nothing_has_arrived_whole_everybody_able_is_asked_again() -> None:
    round_ = a_round(a={0}, b={1})
    plan = plan_next(round_, STRIPES, usable=OFFERED, able=("a", "c"), reachable=ALL, is_late=True)
    assert plan.members == ("a", "c")
    assert plan.reused == (ReusedStripe("a", 0),)
    assert plan.contributions == {"a": OFFERED["a"], "c": OFFERED["c"]}


def test_after_a_loss_all_that_are_left_stay() -> None:
    round_ = a_round(a={0, 1, 2})
    round_.refusals["c"] = "no steps"
    stripes = (Stripe("a", 0, 3), Stripe("c", 3, 5))
    usable = {"a": OFFERED["a"]}
    plan = plan_next(round_, stripes, usable=usable, able=("a", "c"), reachable=("a", "c"), is_late=False)
    assert plan.members == ("a",), "c has declined, b is gone"
    assert plan.reused == (), "every stripe moved"


def test_reused_stripes_are_named_by_their_new_place() -> None:
    round_ = a_round(a={0, 2})
    stripes = (Stripe("b", 0, 4), STRIPES[2])
    plan = plan_next(round_, stripes, usable=OFFERED, able=ALL, reachable=ALL, is_late=False)
    assert plan.reused == (ReusedStripe("a", 1),)


def test_contribution_that_may_not_be_merged_is_not_reused() -> None:
    round_ = a_round(a={0, 1, 2}, b={0, 1, 2})
    usable = {"b": OFFERED["b"], "c": OFFERED["c"]}
    plan = plan_next(round_, STRIPES, usable=usable, able=ALL, reachable=ALL, is_late=True)
    assert plan.members == ("b",)
    assert plan.reused == tuple(ReusedStripe("b", stripe) for stripe in range(3))


def test_next_ballot_forgets_answers_but_not_who_is_rejected() -> None:
    round_ = a_round(a={0})
    decided(round_, "a")
    round_.refusals, round_.reports = {"b": "x"}, {0: report(0, 1.0, 1.0)}
    round_.holders, round_.rejections, round_.exclusions = {"a": b"1"}, {"c": "lied"}, {"b"}
    announcement = BallotOpened(Ballot(1, 2), 0, 1, ("a",), STRIPES)
    round_.begin_ballot(announcement, deadline=Deadline(3, ""), contributions={"a": OFFERED["a"]}, now_ns=7)
    assert (round_.ballot, round_.attempt, round_.deadline_ns, round_.opened_at_ns) == (Ballot(1, 2), 1, 10, 0)
    assert (round_.refusals, round_.receipts, round_.reports, round_.holders, round_.decision, round_.numbers) == (
        {},
        {},
        {},
        {},
        None,
        None,
    )
    assert (round_.rejections, round_.exclusions) == ({"c": "lied"}, {"b"})
    assert round_.missing_members() == ()


def test_norms_are_summed_over_all_stripes_in_their_order() -> None:
    round_ = a_round()
    decided(round_, "a", "b")
    round_.reports = {2: report(2, 4.0, 1.0, 1.0), 0: report(0, 1.0, 1.0, 1.0), 1: report(1, 2.0, 2.0, 2.0)}
    assert round_.is_merged
    assert round_.merged_squared_norms() == (7.0,) * pieces(0)
    assert round_.norm_mismatch() == ()
    assert round_.digest == payload_digest([bytes([index]) * 32 for index in range(3)])


def test_norms_that_do_not_add_up_name_the_learner() -> None:
    for error, norm_mismatch in ((0.0039, ()), (0.0041, ("b",)), (-0.0041, ("b",))):
        round_ = a_round()
        decided(round_, "a", "b")
        round_.reports = {stripe: report(stripe, 1.0, 4.0 / 3, (4.0 + error) / 3) for stripe in range(3)}
        assert round_.norm_mismatch() == norm_mismatch, error


def test_zero_outer_gradient_is_no_lie() -> None:
    round_ = a_round()
    round_.contributions = {"a": replace(OFFERED["a"], squared_norms=(0.0,) * pieces(0))}
    round_.decision = MergeDecided(round_.ballot, 0, 1, (round_.contributions["a"],), ((0.0,) * pieces(0),))
    round_.reports = {stripe: report(stripe, 0.0, 0.0) for stripe in range(3)}
    assert round_.norm_mismatch() == ()


def test_report_with_impossible_numbers_is_refused() -> None:
    round_ = a_round()
    decided(round_, "a", "b")
    good = report(1, 1.0, 2.0, 3.0)
    assert round_.report_fault("b", good, pieces(0)) == ""
    assert "not reduced by a" in round_.report_fault("a", good, pieces(0))
    assert round_.report_fault("b", replace(good, stripe=3), pieces(0))
    assert "shape" in round_.report_fault("b", replace(good, contribution_norms=good.contribution_norms[:1]), pieces(0))
    assert "shape" in round_.report_fault("b", good, pieces(0) + 1)
    assert "finite" in round_.report_fault("b", report(1, float("nan"), 1.0, 1.0), pieces(0))
    assert "negative" in round_.report_fault("b", report(1, 1.0, -1.0, 1.0), pieces(0))


def test_waiting_reason_names_what_is_missing() -> None:
    round_ = a_round()
    del round_.contributions["b"]
    assert round_.wait_reason() == "waits for contributions of b"
    round_.refusals["b"] = "no steps"
    decided(round_, "a", "c")
    round_.receipts = {"a": dict.fromkeys(range(3), (1, 1))}
    assert round_.wait_reason() == "waits for merged stripes of a, b, c, stripes of c are on their way"
    round_.reports = {stripe: report(stripe, 1.0, 1.0, 1.0) for stripe in range(3)}
    assert round_.wait_reason() == "waits until a majority and the leader have the payload on disk; so far nobody"
    round_.audit_lack = "the nonce of b"
    assert round_.wait_reason() == "waits for the nonce of b, to audit the payload"
    round_.is_proposed = True
    assert round_.wait_reason() == "waits for its ledger entry to commit"


def test_a_ballot_is_announced_again_ever_more_rarely_where_there_are_many_regions() -> None:
    for spacing_max, expected in ((1, list(range(1, 13))), (4, [1, 2, 4, 8, 12]), (16, [1, 2, 4, 8])):
        round_ = a_round()
        assert [beat for beat in range(1, 13) if round_.asks_again(spacing_max=spacing_max)] == expected
        round_.begin_ballot(round_.announcement, deadline=round_.deadline, contributions={}, now_ns=0)
        assert round_.asks_again(spacing_max=spacing_max), "another ballot begins anew"
