"""The pure parts of the benchmarks budget_link, budget and control_wan: what samples add up to; the reports."""

import budget
import control_wan
import pytest
from budget_link import Found, RoundTrips, Sample, quantile

from diloco_node.config.units import parse_rate
from diloco_node.lab.wan.topology import parse_topology
from tests.kit.wan_probe import rate_of, rtt_ns_of


def found(samples: list[Sample], *, settle_s: float = 0.0) -> Found:
    return Found(samples, settle_s, control_s=[0.05] * 99 + [0.5], idle_s=[0.04] * 100)


def steady(rate: int, *, seconds: int = 10, late_s: float = 0.0) -> list[Sample]:
    """A sample each 100 ms, each read within `late_s`; twice as much goes out as comes in."""
    return [Sample(at / 10, at / 10 + late_s, at * rate // 10, 2 * at * rate // 10) for at in range(10 * seconds + 1)]


def test_a_steady_rate_is_seen_as_such_in_every_window() -> None:
    one = found(steady(1_000_000))
    for way, rate in (("in", 1_000_000), ("out", 2_000_000)):
        assert one.used_per_s(way) == pytest.approx(rate)
        assert one.most_per_s(way, 2.0) == pytest.approx(rate)
        assert one.ahead_s(way, rate) == pytest.approx(0.0, abs=1e-6)
        assert one.ahead_s(way, rate // 2) == pytest.approx(10.0)
    assert one.most_per_s("in", 11.0) == 0.0, "there is no window so long"
    assert one.gap_s() == pytest.approx(0.1)


def test_what_was_not_there_before_settling_does_not_count_as_unused() -> None:
    samples = steady(1_000_000, seconds=4)
    slow = [Sample(one.before_s, one.after_s, max(0, one.bytes_in - 1_000_000), 0) for one in samples]
    assert found(slow).used_per_s("in") == pytest.approx(750_000)
    assert found(slow, settle_s=1.0).used_per_s("in") == pytest.approx(1_000_000)


def test_a_burst_is_the_most_of_a_window_and_ahead_of_the_rate_only_if_nothing_was_saved() -> None:
    late = steady(1_000_000)
    late[50] = Sample(5.0, 5.0, late[49].bytes_in + 400_000, late[50].bytes_out)
    assert found(late).most_per_s("in", 0.09) == pytest.approx(4_000_000)
    assert found(late).ahead_s("in", 1_000_000) == pytest.approx(0.3)
    assert found(late).ahead_s("in", 1_100_000) == pytest.approx(0.0), "half a second had been saved up by then"


def test_a_reader_that_stands_still_never_makes_a_rate_look_higher_than_it_was() -> None:
    """Between the two clocks of a sample anything may have passed: the time counts from the first to the last."""
    late = found(steady(1_000_000, late_s=0.09))
    assert late.most_per_s("in", 1.0) < 1_000_000
    assert late.ahead_s("in", 1_000_000) < 0.0


def test_round_trips_without_an_answer_have_lasted_as_long_as_they_waited() -> None:
    trips = RoundTrips()
    for number in range(3):
        trips.asked(number)
    trips.answered(1)
    trips.answered(1)
    trips.answered(7)
    took = trips.since(0.0)
    assert len(took) == 3
    assert all(took_s >= 0 for _, took_s in took)
    answered_s, *waiting_s = (took_s for _, took_s in took)
    assert waiting_s[0] >= answered_s


def test_quantiles_are_by_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.0), quantile(values, 0.5), quantile(values, 0.99)) == (1.0, 51.0, 100.0)
    assert quantile([3.0], 0.99) == 3.0


def test_reports_show_each_arm_and_what_it_is_measured_beside() -> None:
    figures = control_wan.figures(found(steady(1_000_000)))
    assert figures["control_p50_seconds"] == 0.05
    assert figures["control_p99_seconds"] == 0.5
    assert figures["idle_link_p50_seconds"] == 0.04
    assert figures["mbit_s"] == {"in": pytest.approx(8.0), "out": pytest.approx(16.0)}
    arms = {"no_budget": figures | {"load_average": 1.0}}
    shown = control_wan.lines({"line_mbit_s": 10.0, "rtt_seconds": 0.04, "cpus": 2, "arms": arms})
    assert shown[-1].split() == ["no_budget", "50.0", "500.0", "40.0", "40.0", "8.00", "16.00", "1.0"]
    arm = budget.arm(found(steady(1_000_000, seconds=12)), 1_000_000)
    assert arm["in"]["used"] == pytest.approx(1.0)
    assert arm["out"]["most_in_10_seconds"] == pytest.approx(2.0)
    text = budget.lines({"budget_mbit_s": 8.0, "cpus": 2, **dict.fromkeys(budget.ARMS, arm)})
    assert "used 1.0000, ahead by" in text[1]


def test_the_slow_lines_of_the_benchmark_are_valid() -> None:
    topology = parse_topology(control_wan.TOPOLOGY, name="slow")
    assert topology.names == ("a", "b", "idle-a", "idle-b")
    assert rate_of(topology, "a", "b") == rate_of(topology, "idle-a", "idle-b") == parse_rate("10Mbit/s")
    assert rtt_ns_of(topology, "a", "b") == rtt_ns_of(topology, "idle-b", "idle-a") == 40_000_000
