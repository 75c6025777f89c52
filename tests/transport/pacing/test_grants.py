"""transport/pacing/grants.py: shares are max-min fair, add up to the ceiling, and who does not obey is not read."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.numeric import NS_PER_S
from diloco_node.transport.bundle import WRITE_S
from diloco_node.transport.pacing.grants import (
    ALLOWANCE_BYTES,
    ALLOWANCE_NS,
    DEMAND_MAX,
    SETTLE_NS,
    UNLIMITED,
    IngressGrants,
    max_min,
)
from diloco_node.transport.pacing.token_bucket import DEBT_NS_MAX

MS = 1_000_000
RATE = 999_900


def connected(peers: str, rate: int | None = RATE, *, now_ns: int = 0) -> IngressGrants:
    """All peers are there and have been told, and have settled by one second later."""
    grants = IngressGrants(peers, now_ns=now_ns)
    grants.region.set_rate(rate, now_ns=now_ns)
    for peer in peers:
        grants.link_up(peer)
    grants.due(now_ns=now_ns)
    grants.due(now_ns=now_ns + NS_PER_S // 2)
    return grants


# ---- shares ----------------------------------------------------------------------------------------------------------


@given(total=st.integers(0, 10**9), caps=st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 10**9), min_size=1))
def test_max_min_shares_are_fair(total: int, caps: dict[str, int]) -> None:
    shares = max_min(total, caps)
    assert shares.keys() == caps.keys()
    assert all(0 <= shares[peer] <= caps[peer] for peer in caps)
    assert sum(shares.values()) <= total
    for peer, cap in caps.items():
        if shares[peer] < cap:
            # It wants more: then nobody has more than it (but for a remainder), and nothing is left over.
            assert all(other <= shares[peer] + len(caps) for other in shares.values())
            assert total - sum(shares.values()) <= len(caps)


def test_shares_that_a_person_can_check() -> None:
    assert max_min(100, {"a": 10, "b": 60, "c": DEMAND_MAX}) == {"a": 10, "b": 45, "c": 45}
    assert max_min(90, {"a": 200, "b": 200, "c": 200}) == {"a": 30, "b": 30, "c": 30}
    assert max_min(1000, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert max_min(0, {}) == {}


def test_idle_peers_have_equal_shares_so_that_the_first_need_not_ask() -> None:
    grants = connected("abc")
    assert grants.targets(now_ns=NS_PER_S) == dict.fromkeys("abc", RATE // 3)
    assert [grants.last_grant(peer) for peer in "abc"] == [RATE // 3] * 3


def test_who_wants_something_gets_what_the_idle_ones_leave() -> None:
    grants = connected("abc")
    grants.demand_reported("b", DEMAND_MAX)
    shares = grants.targets(now_ns=NS_PER_S)
    assert shares["a"] == shares["c"] == RATE // 50 // 2
    assert shares["b"] == RATE - 2 * (RATE // 50 // 2)
    grants.demand_reported("a", 100_000)
    shares = grants.targets(now_ns=NS_PER_S)
    assert shares["a"] == 100_000
    assert shares["b"] == RATE - RATE // 50 - 100_000


def test_a_peer_of_its_own_limit_gets_no_more() -> None:
    grants = connected("ab")
    grants.set_peer_rate("a", 50_000)
    grants.demand_reported("a", DEMAND_MAX)
    grants.demand_reported("b", DEMAND_MAX)
    assert grants.targets(now_ns=NS_PER_S) == {"a": 50_000, "b": RATE - 50_000}
    alone = connected("a", None)
    alone.set_peer_rate("a", 7)
    assert alone.due(now_ns=0) == [("a", 7)]


def test_a_share_grows_only_after_the_others_had_time_to_shrink() -> None:
    grants = connected("ab")
    now_ns = NS_PER_S
    grants.demand_reported("a", DEMAND_MAX)
    assert grants.due(now_ns=now_ns) == [("b", RATE // 50)]
    assert grants.wake_at_ns(now_ns=now_ns) == now_ns + SETTLE_NS
    assert grants.due(now_ns=now_ns + SETTLE_NS - 1) == []
    assert grants.due(now_ns=now_ns + SETTLE_NS) == [("a", RATE - RATE // 50)]
    assert grants.wake_at_ns(now_ns=now_ns + SETTLE_NS) is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_may_be_in_use_never_adds_up_to_more_than_the_ceiling(seed: int) -> None:
    rng = random.Random(seed)
    grants = IngressGrants("abcd", now_ns=0)
    grants.region.set_rate(RATE, now_ns=0)
    granted_rates: dict[str, list[tuple[int, int]]] = {peer: [] for peer in "abcd"}
    is_up = dict.fromkeys("abcd", False)
    now_ns = 0
    for _ in range(120):
        now_ns += rng.choice([0, 1, 20 * MS, SETTLE_NS, NS_PER_S])
        peer = rng.choice("abcd")
        if not is_up[peer]:
            grants.link_up(peer)
            is_up[peer] = True
        elif rng.random() < 0.1:
            grants.link_down(peer, now_ns=now_ns)
            is_up[peer] = False
            granted_rates[peer].append((now_ns, 0))
        else:
            grants.demand_reported(peer, rng.choice([0, 1, 333_333, DEMAND_MAX]))
        for name, share in grants.due(now_ns=now_ns):
            assert is_up[name]
            granted_rates[name].append((now_ns, share))
        # A sender may still use what it was told up to SETTLE_NS ago.
        in_use = 0
        for history in granted_rates.values():
            recent = [share for at_ns, share in history if at_ns > now_ns - SETTLE_NS]
            before = [share for at_ns, share in history if at_ns <= now_ns - SETTLE_NS]
            in_use += max([*recent, *before[-1:]], default=0) if history else 0
        assert in_use <= RATE + 4, "one byte each is always granted"


def test_only_real_changes_are_sent() -> None:
    grants = connected("ab")
    grants.demand_reported("a", RATE // 2 * 101 // 100)
    grants.demand_reported("b", DEMAND_MAX)
    assert grants.due(now_ns=NS_PER_S) == []
    assert grants.wake_at_ns(now_ns=NS_PER_S) is None


def test_a_peer_that_comes_back_gets_its_share_again_and_one_that_is_gone_keeps_nothing() -> None:
    grants = connected("ab")
    grants.link_down("a", now_ns=NS_PER_S)
    assert grants.due(now_ns=NS_PER_S + SETTLE_NS) == [("b", RATE)]
    grants.link_up("a")
    now_ns = 2 * NS_PER_S
    assert grants.due(now_ns=now_ns)[0] == ("b", RATE // 2)
    assert ("a", RATE // 2) in grants.due(now_ns=now_ns + SETTLE_NS)


def test_without_a_ceiling_nothing_is_granted() -> None:
    grants = IngressGrants("ab", now_ns=0)
    grants.link_up("a")
    assert grants.due(now_ns=0) == []
    grants.demand_reported("a", DEMAND_MAX)
    assert grants.due(now_ns=NS_PER_S) == []
    assert grants.read_at_ns("a", now_ns=0) == 0


def test_a_ceiling_that_is_taken_away_is_granted_as_no_limit() -> None:
    grants = connected("ab")
    grants.region.set_rate(None, now_ns=NS_PER_S)
    assert grants.due(now_ns=NS_PER_S) == [("a", UNLIMITED), ("b", UNLIMITED)]
    grants.count_arrival("a", 10**9, now_ns=NS_PER_S)
    assert grants.read_at_ns("a", now_ns=NS_PER_S) == NS_PER_S


# ---- what arrives ----------------------------------------------------------------------------------------------------


def test_what_came_beyond_the_ceiling_is_taken_from_the_shares() -> None:
    grants = connected("a")
    grants.demand_reported("a", DEMAND_MAX)
    now_ns = 5 * NS_PER_S
    grants.count_on_wire("a", RATE // 10, now_ns=now_ns)
    assert grants.targets(now_ns=now_ns)["a"] == RATE, "no more than one reading of the counters brings"
    grants.count_on_wire("a", RATE // 10 + RATE // 2, now_ns=now_ns)
    assert RATE * 55 // 100 < grants.targets(now_ns=now_ns)["a"] < RATE * 65 // 100
    grants.count_on_wire("a", 10 * RATE, now_ns=now_ns)
    assert grants.targets(now_ns=now_ns)["a"] == RATE - RATE // 2


def test_a_peer_that_keeps_to_its_share_is_always_read() -> None:
    grants = connected("a")
    now_ns = NS_PER_S
    for _ in range(500):
        assert grants.read_at_ns("a", now_ns=now_ns) == now_ns
        grants.count_arrival("a", 10_000, now_ns=now_ns)
        now_ns += 10_600 * NS_PER_S // RATE


@pytest.mark.parametrize("factor", [2, 10])
def test_a_peer_that_sends_more_is_read_at_its_share(factor: int) -> None:
    grants = connected("a")
    now_ns, read = NS_PER_S, 0
    while now_ns < 11 * NS_PER_S:
        now_ns = max(now_ns, grants.read_at_ns("a", now_ns=now_ns)) + 16_384 * NS_PER_S // (factor * RATE)
        grants.count_arrival("a", 16_384, now_ns=now_ns)
        read += 16_384 * 106 // 100
    assert read >= 10 * RATE
    assert read <= 10 * RATE + ALLOWANCE_BYTES + RATE * ALLOWANCE_NS // NS_PER_S + 4 * 16_384


def test_a_frame_that_was_under_way_when_the_share_fell_does_not_close_the_window_for_long() -> None:
    """The sender gives a link up that takes nothing for WRITE_S."""
    grants = connected("abc", None)
    grants.region.set_rate(30_000, now_ns=NS_PER_S)
    grants.due(now_ns=NS_PER_S)
    for now_ns in (NS_PER_S, 2 * NS_PER_S):
        grants.count_arrival("a", 2**20, now_ns=now_ns)
        assert grants.read_at_ns("a", now_ns=now_ns) - now_ns < WRITE_S / 2 * NS_PER_S


def test_the_overhead_of_what_is_read_is_learnt() -> None:
    grants = connected("a")
    wire = Fraction(0)
    now_ns = NS_PER_S
    for _ in range(300):
        now_ns += 100 * MS
        grants.count_arrival("a", 500_000, now_ns=now_ns)
        wire += Fraction(500_000 * 112, 100)
        grants.count_on_wire("a", int(wire), now_ns=now_ns)
    now_ns += DEBT_NS_MAX
    grants.count_arrival("a", 1_000_000, now_ns=now_ns)
    before_ns = grants.read_at_ns("a", now_ns=now_ns)
    grants.count_arrival("a", 1_000_000, now_ns=now_ns)
    cost = (grants.read_at_ns("a", now_ns=now_ns) - before_ns) * RATE // NS_PER_S
    assert 1_100_000 < cost < 1_130_000
