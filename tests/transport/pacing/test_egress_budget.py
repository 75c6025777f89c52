"""transport/pacing/egress_budget.py, core/budget_plan.py: peers and lanes in order, and no window over any ceiling."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.config.budget_plan import BudgetPlan, TimeWindow
from diloco_node.core.types import Direction, RateLimits
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.pacing.egress_budget import (
    CONTROL_FRAME_BYTES,
    STARVING_NS,
    EgressBudget,
    LimitSource,
    Overhead,
)
from diloco_node.transport.pacing.token_bucket import burst_bytes, piece_bytes
from diloco_node.wire.message_tables import BudgetLane
from tests.kit.budget_kit import most_in_any_window

MS = 1_000_000
ROUNDS, RECOVERY, MEASUREMENT = BudgetLane.ROUNDS, BudgetLane.RECOVERY, BudgetLane.MEASUREMENT


def ready_at_ns(budget: EgressBudget, peer: str, size: int, *, now_ns: int) -> int:
    """When a piece could go while nothing waits, by the limit that there is."""
    budget.request(peer, ROUNDS, size, (), now_ns=now_ns)
    at_ns = budget.wake_at_ns(now_ns=now_ns)
    budget.withdraw(peer, ROUNDS)
    assert at_ns is not None
    return at_ns


# ---- the overhead ----------------------------------------------------------------------------------------------------


def test_the_overhead_begins_with_six_percent_and_follows_what_the_kernel_counts() -> None:
    overhead = Overhead()
    assert overhead.wire_bytes(1_000_000) == 1_060_000
    for _ in range(200):
        overhead.learn(10**6, 1_047_000)
    assert abs(overhead.ppm - 1_047_000) < 500
    for _ in range(400):
        overhead.learn(10**6, 1_003_000)
    assert abs(overhead.ppm - 1_003_000) < 2000
    for _ in range(400):
        overhead.learn(10**6, 5_000_000)
    assert overhead.ppm == 1_250_000


def test_what_the_overhead_did_not_foresee_is_charged() -> None:
    budget = EgressBudget(["b"], now_ns=0)
    budget.region.set_rate(10**6, now_ns=0)
    assert budget.try_spend("b", ROUNDS, 10_000, now_ns=NS_PER_S)
    budget.learn_overhead("b", data_bytes=10_600, other_bytes=0, now_ns=NS_PER_S)
    assert budget.use("b").correction_bytes == 0
    budget.learn_overhead("b", data_bytes=12_600, other_bytes=500, now_ns=NS_PER_S)
    assert budget.use("b").correction_bytes == 2500
    budget.learn_overhead("b", data_bytes=12_600, other_bytes=500, now_ns=NS_PER_S)
    assert budget.use("b").correction_bytes == 2500, "the same counters again cost nothing"
    left = 16_384 + 20_000 - 10_600 - 2_500
    assert ready_at_ns(budget, "b", left * 100 // 106 - 1, now_ns=NS_PER_S) == NS_PER_S
    assert ready_at_ns(budget, "b", left * 100 // 106 + 2, now_ns=NS_PER_S) > NS_PER_S


def test_with_large_headers_a_sender_stays_below_the_ceiling_by_the_kernels_count() -> None:
    rate, budget, now_ns = 1_250_003, EgressBudget(["b"], now_ns=0), 0
    budget.region.set_rate(rate, now_ns=0)
    sent, data, other, sampled_ns = [], 0, 0, 0
    while now_ns < 40 * NS_PER_S:
        size = piece_bytes(rate)
        now_ns = max(now_ns, ready_at_ns(budget, "b", size, now_ns=now_ns))
        assert budget.try_spend("b", RECOVERY, size, now_ns=now_ns)
        data += size * 115 // 100
        other += size * 3 // 100
        sent.append((now_ns, size * 118 // 100))
        if now_ns - sampled_ns >= 100 * MS:
            sampled_ns = now_ns
            budget.learn_overhead("b", data_bytes=data, other_bytes=other, now_ns=now_ns)
    assert most_in_any_window(sent, 10 * NS_PER_S) <= rate * 10 * 102 // 100
    assert sum(size for _, size in sent) >= rate * 40 * 95 // 100
    assert 1_140_000 < budget.use("b").overhead.ppm < 1_160_000


# ---- region, peer, lane ----------------------------------------------------------------------------------------------


def run(budget: EgressBudget, demands: dict[str, BudgetLane], until_ns: int, size: int = 20_000) -> dict[str, int]:
    """Every peer always has a piece in its lane; bytes handed over per peer."""
    handed = dict.fromkeys(demands, 0)
    now_ns = 0
    for peer, lane in demands.items():
        budget.request(peer, lane, size, (), now_ns=now_ns)
    while now_ns < until_ns:
        for peer, lane in budget.release(now_ns=now_ns):
            handed[peer] += size
            budget.request(peer, lane, size, (), now_ns=now_ns)
        wake_ns = budget.wake_at_ns(now_ns=now_ns)
        assert wake_ns is not None
        assert wake_ns > now_ns, "a timer that fires at once, again and again"
        now_ns = wake_ns
    return handed


def test_peers_of_one_lane_share_the_region_equally() -> None:
    budget = EgressBudget("bcd", now_ns=0)
    budget.region.set_rate(3_000_000, now_ns=0)
    handed = run(budget, {"b": ROUNDS, "c": ROUNDS, "d": ROUNDS}, 10 * NS_PER_S)
    assert max(handed.values()) - min(handed.values()) <= 20_000
    assert 0.97 * 30_000_000 < sum(handed.values()) * 1.06 <= 30_000_000 + burst_bytes(3_000_000)


def test_what_a_limited_peer_leaves_goes_to_the_others() -> None:
    budget = EgressBudget("bcd", now_ns=0)
    budget.region.set_rate(3_000_000, now_ns=0)
    budget.set_limit("b", LimitSource.GRANT, 300_001, now_ns=0)
    budget.set_limit("b", LimitSource.PEER, 700_000, now_ns=0)
    handed = run(budget, {"b": ROUNDS, "c": ROUNDS, "d": ROUNDS}, 10 * NS_PER_S)
    assert 0.95 * 3_000_010 < handed["b"] * 1.06 <= 3_000_010 + 20_000 * 1.06
    assert sum(handed.values()) * 1.06 > 0.97 * 30_000_000
    assert budget.limited_by("b") == "grant"
    assert budget.limited_by("c") == ""
    budget.set_limit("b", LimitSource.GRANT, None, now_ns=10 * NS_PER_S)
    assert budget.rate_bytes_per_s("b") == 700_000


def test_rounds_go_before_recovery_and_measurement_but_nobody_starves() -> None:
    budget = EgressBudget("bcd", now_ns=0)
    budget.region.set_rate(2_000_000, now_ns=0)
    handed = run(budget, {"b": MEASUREMENT, "c": RECOVERY, "d": ROUNDS}, 10 * NS_PER_S)
    assert handed["d"] > 0.9 * sum(handed.values())
    for peer in "bc":
        pieces = handed[peer] // 20_000
        assert 3 <= pieces <= 10 * NS_PER_S // STARVING_NS, "one for each time that it had waited long"


def test_a_piece_goes_at_once_only_where_none_waits_for_the_same_bytes() -> None:
    budget = EgressBudget("bc", now_ns=0)
    assert budget.try_spend("b", ROUNDS, 10**9, now_ns=0), "without a limit"
    budget.region.set_rate(10**6, now_ns=0)
    assert not budget.try_spend("b", ROUNDS, 1000, now_ns=0)
    now_ns = ready_at_ns(budget, "b", 1000, now_ns=0)
    assert not budget.try_spend("b", ROUNDS, 1000, now_ns=now_ns - 1)
    assert budget.use("b").lanes[ROUNDS].used_bytes == 1_060_000_000, "nothing was taken"
    assert budget.try_spend("b", ROUNDS, 1000, now_ns=now_ns)
    assert budget.use("b").lanes[ROUNDS].used_bytes == 1_060_001_060
    assert not budget.try_spend("b", ROUNDS, 1000, now_ns=now_ns)
    budget.request("c", RECOVERY, 30_000, (), now_ns=now_ns)
    assert not budget.try_spend("b", ROUNDS, 1000, now_ns=now_ns + 10 * MS), "c waits for the region's"
    budget.region.set_rate(None, now_ns=now_ns)
    assert budget.try_spend("b", ROUNDS, 1000, now_ns=now_ns + 10 * MS), "c waits for nothing of b's"
    assert not budget.try_spend("c", ROUNDS, 1000, now_ns=now_ns + 10 * MS)


def test_what_goes_at_once_and_what_asked_keep_to_the_same_ceiling() -> None:
    rate, now_ns = 1_125_001, 0
    budget, sent = EgressBudget("b", now_ns=0), []
    budget.region.set_rate(rate, now_ns=0)
    budget.set_lateness(40 * MS, now_ns=0)
    while now_ns < 20 * NS_PER_S:
        size = piece_bytes(rate)
        if not budget.try_spend("b", ROUNDS, size, now_ns=now_ns):
            budget.request("b", ROUNDS, size, (), now_ns=now_ns)
            wake_ns = budget.wake_at_ns(now_ns=now_ns)
            assert wake_ns is not None
            now_ns = wake_ns + 20 * MS
            assert budget.release(now_ns=now_ns) == [("b", ROUNDS)]
        sent.append((now_ns, size * 106 // 100))
    assert most_in_any_window(sent, 10 * NS_PER_S) <= rate * 10 + burst_bytes(rate, 40 * MS)
    assert sum(size for _, size in sent) >= rate * 20 * 99 // 100, "gathering loses nothing"


def test_pieces_that_wait_are_level_when_none_of_them_comes_before_another() -> None:
    budget = EgressBudget("bcd", now_ns=0)
    budget.region.set_rate(1, now_ns=0)
    assert budget.is_level()
    budget.request("b", ROUNDS, 10, (1, 2), now_ns=0)
    assert budget.is_level()
    budget.request("c", ROUNDS, 10, (1, 2), now_ns=0)
    assert budget.is_level()
    budget.request("d", ROUNDS, 10, (1, 3), now_ns=0)
    assert not budget.is_level()
    budget.withdraw("d", ROUNDS)
    budget.request("d", RECOVERY, 10, (1, 2), now_ns=0)
    assert not budget.is_level()


def test_in_a_lane_the_most_urgent_goes_first_and_equals_take_turns() -> None:
    budget = EgressBudget("bcd", now_ns=0)
    budget.region.set_rate(10**6, now_ns=0)
    for peer, ballot in (("b", (2, 9)), ("c", (2, 8)), ("d", (1, 99))):
        budget.request(peer, ROUNDS, 29_000, ballot, now_ns=0)
    order, now_ns = [], 0
    while (wake_ns := budget.wake_at_ns(now_ns=now_ns)) is not None:
        now_ns = wake_ns
        order += [peer for peer, _ in budget.release(now_ns=now_ns)]
    assert order == ["d", "c", "b"]


def test_a_small_piece_does_not_slip_past_a_large_one_that_waits_for_the_region() -> None:
    budget = EgressBudget("bc", now_ns=0)
    budget.region.set_rate(10**6, now_ns=0)
    budget.request("b", ROUNDS, 25_000, (), now_ns=0)
    budget.request("c", RECOVERY, 10, (), now_ns=0)
    assert budget.release(now_ns=10 * MS) == []
    assert budget.release(now_ns=27 * MS) == [("b", ROUNDS), ("c", RECOVERY)]


def test_a_piece_that_is_withdrawn_leaves_its_place() -> None:
    budget = EgressBudget("b", now_ns=0)
    budget.region.set_rate(1000, now_ns=0)
    budget.request("b", ROUNDS, 500, (), now_ns=0)
    with pytest.raises(AssertionError, match="waits in lane ROUNDS already"):
        budget.request("b", ROUNDS, 500, (), now_ns=0)
    budget.withdraw("b", ROUNDS)
    budget.withdraw("b", ROUNDS)
    assert budget.wake_at_ns(now_ns=0) is None
    budget.request("b", ROUNDS, 500, (), now_ns=0)


def test_control_never_waits_and_bulk_waits_for_it() -> None:
    budget = EgressBudget("b", now_ns=0)
    budget.region.set_rate(100_000, now_ns=0)
    free_ns = ready_at_ns(budget, "b", 1000, now_ns=NS_PER_S)
    assert free_ns == NS_PER_S
    for _ in range(100):
        budget.charge_control("b", 880, now_ns=NS_PER_S)
    assert budget.use("b").lanes[BudgetLane.CONTROL].used_bytes == 100 * (880 + CONTROL_FRAME_BYTES)
    # A piece of 10,000 and 2,000 more were saved, 100,000 spent.
    assert ready_at_ns(budget, "b", 1000, now_ns=NS_PER_S) == NS_PER_S + (88_000 + 1060) * 10_000


def test_bulk_goes_on_soon_after_acknowledgements_that_nobody_can_hold_back() -> None:
    """10 GB that came in at 100 MB/s, acknowledged within 2 Mbit/s."""
    budget = EgressBudget("bc", now_ns=0)
    budget.region.set_rate(250_000, now_ns=0)
    for second in range(1, 101):
        budget.learn_overhead("b", data_bytes=0, other_bytes=second * 2_300_000, now_ns=second * NS_PER_S)
    for peer in "bc":
        assert ready_at_ns(budget, peer, 1000, now_ns=100 * NS_PER_S) < 111 * NS_PER_S
    budget.region.set_rate(2_500_000, now_ns=100 * NS_PER_S)
    assert ready_at_ns(budget, "b", 1000, now_ns=100 * NS_PER_S) < 102 * NS_PER_S, "a raised budget helps at once"


def test_without_a_limit_everything_goes_at_once_and_is_counted() -> None:
    budget = EgressBudget("bc", now_ns=0)
    assert budget.rate_bytes_per_s("b") is None
    budget.count_demand("b", ROUNDS, 10**9)
    assert budget.try_spend("b", ROUNDS, 10**9, now_ns=0)
    assert budget.use("b").lanes[ROUNDS].used_bytes == budget.use("b").lanes[ROUNDS].demand_bytes == 1_060_000_000
    budget.set_limit("c", LimitSource.GRANT, 5, now_ns=0)
    assert budget.rate_bytes_per_s("c") == 5
    assert budget.rate_bytes_per_s("b") is None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_asked_the_region_and_every_peer_keep_their_ceilings(seed: int) -> None:
    rng = random.Random(seed)
    peers = {"b": 700_001, "c": 300_007, "d": None}
    region = rng.choice([499_999, 1_000_003, 5_000_011])
    budget = EgressBudget(peers, now_ns=0)
    budget.region.set_rate(region, now_ns=0)
    for peer, rate in peers.items():
        budget.set_limit(peer, LimitSource.PEER, rate, now_ns=0)
    now_ns, sizes = 0, {}
    sent: list[tuple[int, str, int]] = []
    for _ in range(400):
        peer, lane = rng.choice("bcd"), rng.choice([ROUNDS, RECOVERY, MEASUREMENT])
        if (peer, lane) not in sizes:
            sizes[peer, lane] = rng.randint(1, 16_384)
            budget.request(peer, lane, sizes[peer, lane], (rng.randint(0, 3),), now_ns=now_ns)
        if rng.random() < 0.1:
            budget.charge_control(peer, 200, now_ns=now_ns)
            sent.append((now_ns, peer, 200 + CONTROL_FRAME_BYTES))
        wake_ns = budget.wake_at_ns(now_ns=now_ns)
        if wake_ns is not None and rng.random() < 0.7:
            now_ns = max(now_ns, wake_ns + rng.choice([0, 0, 5 * MS]))
        for key in budget.release(now_ns=now_ns):
            sent.append((now_ns, key[0], -(-sizes.pop(key) * 106 // 100)))
    for window_ns in (100 * MS, NS_PER_S, 10 * NS_PER_S):
        for scope, rate in [("bcd", region), *((peer, rate) for peer, rate in peers.items() if rate)]:
            some = [(at_ns, size) for at_ns, peer, size in sent if peer in scope]
            control = 320 * 5  # it does not wait, so a few frames may come on top of a window
            allowed = rate * window_ns // NS_PER_S + max(burst_bytes(rate), 17_400) + control + 1
            assert most_in_any_window(some, window_ns) <= allowed


# ---- the plan --------------------------------------------------------------------------------------------------------

NIGHT = TimeWindow(22 * 60, 6 * 60, RateLimits(egress=500))
NOON = TimeWindow(12 * 60, 13 * 60, RateLimits(ingress=7))
PLAN = BudgetPlan(RateLimits(100, 200), (("c", RateLimits(None, 5)),), (NIGHT, NOON))


@pytest.mark.parametrize(
    ("minute", "limits"),
    [
        (0, RateLimits(500, 200)),
        (6 * 60 - 1, RateLimits(500, 200)),
        (6 * 60, RateLimits(100, 200)),
        (12 * 60 - 1, RateLimits(100, 200)),
        (12 * 60, RateLimits(100, 7)),
        (13 * 60, RateLimits(100, 200)),
        (22 * 60 - 1, RateLimits(100, 200)),
        (22 * 60, RateLimits(500, 200)),
    ],
)
def test_the_schedule_decides_by_minute_also_through_midnight(minute: int, limits: RateLimits) -> None:
    assert PLAN.limits_at(minute) == limits


@settings(deadline=None)
@given(
    st.integers(1, 9) | st.none(),
    st.lists(st.tuples(st.integers(0, 1439), st.integers(0, 1439), st.integers(1, 9) | st.none()), max_size=4),
)
def test_the_least_ceiling_is_the_least_of_every_minute(
    egress: int | None, windows: list[tuple[int, int, int | None]]
) -> None:
    schedule = tuple(TimeWindow(start, end, RateLimits(rate)) for start, end, rate in windows if start != end)
    plan = BudgetPlan(RateLimits(egress, 5), (), schedule)
    rates = [plan.limits_at(minute).egress for minute in range(1440)]
    assert plan.least() == RateLimits(min((rate for rate in rates if rate is not None), default=None), 5)


def test_a_rate_that_an_operator_sets_holds_at_any_time() -> None:
    changed = PLAN.with_rate(Direction.EGRESS, 42)
    assert {changed.limits_at(minute).egress for minute in range(0, 1440, 30)} == {42}
    assert changed.limits_at(12 * 60).ingress == 7
    assert PLAN.with_rate(Direction.EGRESS, None).limits_at(0).egress is None
    of_peer = PLAN.with_rate(Direction.EGRESS, 9, peer="c").with_rate(Direction.INGRESS, 8, peer="b")
    assert of_peer.peers == (("b", RateLimits(None, 8)), ("c", RateLimits(9, 5)))
    assert of_peer.peer_limits("z") == RateLimits()


def test_a_plan_survives_json() -> None:
    assert BudgetPlan.from_plain(json.loads(json.dumps(PLAN.to_plain()))) == PLAN
    assert BudgetPlan.from_plain(BudgetPlan().to_plain()) == BudgetPlan()


def test_a_window_must_make_sense() -> None:
    with pytest.raises(ValueError, match="minute 1440"):
        TimeWindow(0, 1440, RateLimits())
    with pytest.raises(ValueError, match="empty"):
        TimeWindow(5, 5, RateLimits())
