"""When a packet arrives, and whether: rates over every window, delays, order, loss and cuts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.lab.wan.conditions import Conditions
from diloco_node.lab.wan.fabric import Fabric
from diloco_node.lab.wan.topology import PathChange, Scope, parse_topology

MS = 10**6
S = 10**9
RATE = 499_000
"""Bytes per second, so that nothing divides evenly."""

HALF_RTT = 20 * MS


def build(
    extra: str = "", *, link: str = "", egress: int = RATE, ingress: int = RATE, queue: str = "50ms", seed: int = 1
) -> tuple[Conditions, Fabric]:
    text = f'[wan]\nqueue = "{queue}"\n'
    for name in "abc":
        text += f'[regions.{name}]\negress = "{egress}B/s"\ningress = "{ingress}B/s"\n'
    text += f'[default_link]\nrtt = "40ms"\n{link}\n' + extra
    conditions = Conditions(parse_topology(text, name="t"))
    return conditions, Fabric(conditions, seed=seed)


def send(fabric: Fabric, source: int, target: int, size: int, at_ns: int, packets: int = 1) -> int | None:
    times = fabric.admit(source, target, size, packets, now_ns=at_ns)
    if times is None:
        return None
    return fabric.arrive(source, target, size, packets, first_ns=times[0], last_ns=times[1])


def test_a_lone_packet_takes_its_serialisation_and_the_delay() -> None:
    _, fabric = build()
    assert send(fabric, 0, 1, 998, 5 * S) == 5 * S + 2 * MS + HALF_RTT


def test_a_large_segment_is_not_serialised_twice_where_uplink_and_downlink_are_alike() -> None:
    _, fabric = build()
    # 20 ms of the rate: the downlink takes its first bytes while the uplink still sends the last.
    assert send(fabric, 0, 1, 9980, 0) == 20 * MS + HALF_RTT


def test_a_slower_downlink_takes_its_own_time() -> None:
    _, fabric = build(ingress=RATE // 4)
    assert send(fabric, 0, 1, 4990, 0) == pytest.approx(40 * MS + HALF_RTT, abs=100_000)


def test_packets_queue_at_the_uplink_whoever_they_go_to() -> None:
    _, fabric = build()
    assert send(fabric, 0, 1, 4990, 0) == 10 * MS + HALF_RTT
    assert send(fabric, 0, 2, 4990, 0) == 20 * MS + HALF_RTT
    # Another region's uplink is its own, the downlink is shared.
    assert send(fabric, 2, 1, 4990, 0) == 20 * MS + HALF_RTT


def test_a_full_queue_drops_and_an_empty_one_takes_anything() -> None:
    _, fabric = build(queue="50ms")
    sizes = [49_900, 1, 1]
    assert [send(fabric, 0, 1, size, 0) is None for size in sizes] == [False, True, True]
    assert fabric.counters[1].packets_overflowed == 2
    # 50 ms of the 100 ms are still queued then: no longer more than the limit.
    assert send(fabric, 0, 1, 1, 50 * MS) is not None


def test_the_downlink_has_a_queue_of_its_own() -> None:
    _, fabric = build(ingress=RATE // 10, queue="50ms")
    kept = [send(fabric, source, 1, 2495, 0) is not None for source in (0, 2, 0, 2)]
    assert kept == [True, True, False, False]
    assert fabric.counters[1].packets_overflowed == 1


def test_a_pair_s_own_rate_does_not_slow_the_other_pairs() -> None:
    extra = '[[links]]\nfrom = "a"\nto = "b"\ndelay = "20ms"\nrate = "49900B/s"\n'
    _, fabric = build(extra)
    assert send(fabric, 0, 1, 998, 0) == 20 * MS + HALF_RTT
    assert send(fabric, 0, 2, 998, 0) == 4 * MS + HALF_RTT


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 60),
    jitter_ms=st.sampled_from([0, 3, 20]),
    ingress=st.sampled_from([RATE // 3, RATE, 3 * RATE]),
)
def test_no_window_carries_more_than_the_rates_and_nothing_overtakes(
    seed: int, count: int, jitter_ms: int, ingress: int
) -> None:
    _, fabric = build(link=f'jitter = "{jitter_ms}ms"', ingress=ingress, queue="5s", seed=seed)
    rng = random.Random(seed)
    at_ns, arrivals = 0, []
    for _ in range(count):
        at_ns += rng.choice([0, 0, rng.randrange(30 * MS)])
        size = rng.randrange(40, 9000)
        done_ns = send(fabric, 0, 1, size, at_ns)
        assert done_ns is not None
        assert done_ns >= at_ns + size * S // max(RATE, ingress) + HALF_RTT - jitter_ms * MS
        arrivals.append((done_ns, size))
    times = [time_ns for time_ns, _ in arrivals]
    assert times == sorted(times)
    slowest = ingress if ingress < RATE else None
    for start in range(count):
        carried = 0
        for end in range(start + 1, count):
            carried += arrivals[end][1]
            window_ns = times[end] - times[start]
            # Jitter may bunch what left the uplink earlier; the downlink's rate holds whatever happened before.
            assert carried <= ingress * window_ns // S + 9000
            if not jitter_ms and slowest is None:
                assert carried <= RATE * window_ns // S + 9000


def test_a_busy_uplink_carries_its_rate_to_the_byte() -> None:
    _, fabric = build(queue="10s")
    count, size = 400, 1500
    done = [send(fabric, 0, 1, size, 0) for _ in range(count)]
    assert done[-1] is not None
    assert done[0] is not None
    assert (count - 1) * size * S // (done[-1] - done[0]) == pytest.approx(RATE, rel=1e-5)


def test_jitter_spreads_the_delay_evenly_around_its_mean() -> None:
    _, fabric = build(link='jitter = "8ms"', seed=3)
    delays = []
    for number in range(3000):
        done_ns = send(fabric, 0, 1, 1, number * S)
        assert done_ns is not None
        delays.append(done_ns - number * S - S // RATE)
    assert min(delays) >= 12 * MS
    assert max(delays) <= 28 * MS + 1
    assert sum(delays) / len(delays) == pytest.approx(20 * MS, rel=0.02)
    assert sum(delay < 16 * MS for delay in delays) / len(delays) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5])
def test_each_packet_of_a_segment_is_lost_alone_with_the_same_chance(share: float) -> None:
    _, fabric = build(link=f'loss = "{share * 100}%"', seed=5)
    rounds, packets = 4000, 45
    lost = [fabric.lost_of(0, 1, packets) for _ in range(rounds)]
    assert all(numbers == sorted(set(numbers)) for numbers in lost)
    assert all(0 <= number < packets for numbers in lost for number in numbers)
    total = sum(map(len, lost))
    assert total / (rounds * packets) == pytest.approx(share, rel=0.25)
    assert fabric.counters[1].packets_lost == total
    firsts = sum(0 in numbers for numbers in lost)
    lasts = sum(packets - 1 in numbers for numbers in lost)
    tolerance = 6 * (rounds * share) ** 0.5 + 3
    assert abs(firsts - rounds * share) < tolerance
    assert abs(lasts - rounds * share) < tolerance


def test_a_lossless_path_loses_nothing_and_a_path_of_full_loss_everything() -> None:
    _, fabric = build()
    assert fabric.lost_of(0, 1, 1000) == []
    _, fabric = build(link='loss = "100%"')
    assert fabric.lost_of(0, 1, 4) == [0, 1, 2, 3]


def test_a_cut_takes_what_is_sent_and_what_is_on_its_way_and_heals() -> None:
    conditions, fabric = build()
    times = fabric.admit(0, 1, 499, 1, now_ns=0)
    assert times is not None
    conditions.cut(Scope("b", "", "in"))
    fabric.reload()
    assert fabric.admit(0, 1, 499, 1, now_ns=1) is None
    assert fabric.arrive(0, 1, 499, 1, first_ns=times[0], last_ns=times[1]) is None
    assert fabric.counters[1].packets_cut == 2
    assert send(fabric, 1, 0, 499, 1) is not None
    assert send(fabric, 0, 2, 499, 1) is not None
    conditions.heal(Scope("b"))
    fabric.reload()
    assert send(fabric, 0, 1, 499, S) == S + MS + HALF_RTT


def test_a_changed_delay_holds_for_new_packets_and_keeps_the_order() -> None:
    conditions, fabric = build()
    conditions.change(Scope("a", "b", "out"), PathChange(delay_ns=500 * MS))
    fabric.reload()
    slow = send(fabric, 0, 1, 499, 0)
    conditions.heal(Scope("a"))
    fabric.reload()
    quick = send(fabric, 0, 1, 499, 10 * MS)
    assert slow is not None
    assert quick is not None
    assert slow == 501 * MS
    assert quick >= slow


def test_the_same_seed_gives_the_same_fate() -> None:
    fates = []
    for _ in range(2):
        _, fabric = build(link='jitter = "5ms"\nloss = "10%"', seed=11)
        fates.append([(fabric.lost_of(0, 1, 10), send(fabric, 0, 1, 100, number * 10 * MS)) for number in range(50)])
    assert fates[0] == fates[1]
