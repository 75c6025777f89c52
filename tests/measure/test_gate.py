"""measure/gate.py: what bounds the measurements that an end agrees to."""

import pytest

from diloco_node.errors import ProtocolViolation
from diloco_node.measure.gate import (
    ECHOES_PER_S,
    ECHOES_SAVED_MAX,
    PROBED_MAX,
    REQUEST_BYTES_PER_S,
    REQUEST_BYTES_SAVED_MAX,
    MeasuringGate,
    ProbesExpected,
)
from diloco_node.numeric import NS_PER_S
from diloco_node.wire.measure_messages import BODY_BYTES_MAX

S = NS_PER_S
TEST_BYTES = 4 * 2**30


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_one_measurement_at_a_time_and_the_refusal_says_which() -> None:
    gate = MeasuringGate(is_bounded=True)
    assert gate.describe(now_ns=0) == ""
    assert gate.begin("bandwidth to b", requester=None, bytes_max=0, now_ns=0) == ""
    for requester in ("b", "c", None):
        reason = gate.begin("latency", requester=requester, bytes_max=1, now_ns=7 * S)
        assert reason == "busy with another measurement: bandwidth to b (since 7 s); try again"
    gate.end(used_bytes=0)
    assert gate.begin("bandwidth from c", requester="c", bytes_max=1, now_ns=8 * S) == ""
    assert gate.describe(now_ns=9 * S) == "bandwidth from c (asked by c, since 1 s)"


def test_a_refused_request_costs_the_peer_nothing() -> None:
    gate = MeasuringGate(is_bounded=True)
    gate.begin("mine", requester=None, bytes_max=0, now_ns=0)
    for _ in range(100):
        assert gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=0)
    gate.end(used_bytes=0)
    assert gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=0) == ""


def test_a_peer_may_have_so_many_bytes_measured_and_then_has_to_wait() -> None:
    gate = MeasuringGate(is_bounded=True)
    for _ in range(REQUEST_BYTES_SAVED_MAX // TEST_BYTES):
        assert gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=0) == ""
        gate.end(used_bytes=TEST_BYTES)
    assert "b has asked for too many bytes lately" in gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=0)
    assert gate.begin("x", requester="c", bytes_max=TEST_BYTES, now_ns=0) == "", "each peer has its own"
    gate.end(used_bytes=0)
    later_ns = TEST_BYTES * S // REQUEST_BYTES_PER_S
    assert gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=later_ns) == ""


def test_what_was_not_used_is_given_back() -> None:
    gate = MeasuringGate(is_bounded=True)
    for _ in range(1000):
        assert gate.begin("x", requester="b", bytes_max=TEST_BYTES, now_ns=0) == ""
        gate.end(used_bytes=1000)


def test_the_operator_is_not_limited_by_bytes_over_time() -> None:
    gate = MeasuringGate(is_bounded=True)
    for _ in range(1000):
        assert gate.begin("x", requester=None, bytes_max=TEST_BYTES, now_ns=0) == ""
        gate.end(used_bytes=TEST_BYTES)


def test_more_at_once_than_may_be_saved_is_refused_whatever_is_there() -> None:
    gate = MeasuringGate(is_bounded=True)
    for now_ns in (0, 10**6 * S):
        reason = gate.begin("x", requester="b", bytes_max=REQUEST_BYTES_SAVED_MAX + 1, now_ns=now_ns)
        assert "too many bytes" in reason
    assert gate.begin("x", requester="b", bytes_max=REQUEST_BYTES_SAVED_MAX, now_ns=0) == ""


def test_an_end_that_only_measures_has_no_limit_of_bytes() -> None:
    gate = MeasuringGate(is_bounded=False)
    for _ in range(1000):
        assert gate.begin("x", requester="b", bytes_max=REQUEST_BYTES_SAVED_MAX + 1, now_ns=0) == ""
        gate.end(used_bytes=REQUEST_BYTES_SAVED_MAX)


def test_echoes_of_a_peer_are_limited_but_twice_what_a_measurement_sends_passes() -> None:
    gate = MeasuringGate(is_bounded=True)
    assert sum(gate.may_echo("b", now_ns=0) for _ in range(10_000)) == ECHOES_SAVED_MAX
    assert gate.may_echo("c", now_ns=0)
    assert sum(gate.may_echo("b", now_ns=S) for _ in range(10_000)) == ECHOES_PER_S
    steady = MeasuringGate(is_bounded=True)
    assert all(steady.may_echo("b", now_ns=number * S // 100) for number in range(6000))


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_probes_nobody_agreed_to_are_a_violation() -> None:
    expected = ProbesExpected()
    with pytest.raises(ProtocolViolation, match="not agreed to"):
        expected.arrive(7, 1)


def test_probes_stop_at_what_was_agreed_to() -> None:
    expected = ProbesExpected()
    expected.expect(7, 100_000)
    expected.arrive(7, 60_000)
    with pytest.raises(ProtocolViolation, match="40000 are left"):
        expected.arrive(7, 40_001)
    expected.arrive(7, 40_000)
    with pytest.raises(ProtocolViolation):
        expected.arrive(7, 1)


def test_a_probe_is_no_longer_than_a_body() -> None:
    expected = ProbesExpected()
    expected.expect(7, TEST_BYTES)
    expected.arrive(7, BODY_BYTES_MAX)
    with pytest.raises(ProtocolViolation, match="fit into one"):
        expected.arrive(7, BODY_BYTES_MAX + 1)
    with pytest.raises(ProtocolViolation, match="fit into one"):
        expected.arrive(7, 0)  # any number of them would be within what was agreed to


def test_late_probes_of_the_last_measurements_are_welcome_and_older_ones_are_not() -> None:
    expected = ProbesExpected()
    for measurement in range(PROBED_MAX + 1):
        expected.expect(measurement, 10)
    for measurement in range(1, PROBED_MAX + 1):
        expected.arrive(measurement, 10)
    with pytest.raises(ProtocolViolation):
        expected.arrive(0, 1)
