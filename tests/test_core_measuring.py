"""core/measuring.py: what regions say to each other when they measure, and what bounds it."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core import measuring as g
from diloco_node.errors import ProtocolViolation
from diloco_node.wire.tables import CONTROL, HEADERS, MESSAGES

S = g.NS_PER_S
INT64 = st.integers(-(2**63), 2**63 - 1)
ASKED = g.MeasurementAsked(3, True, False, S, 5 * S, 10**9, 0, False, None)
TOKEN = b"t" * g.TOKEN_BYTES
LINK = g.LinkAsked(3, "eu", S, 0, 5 * S, 10**9, False)
KINDS = typing.get_args(g.MeasuringMessage)


def messages() -> st.SearchStrategy[g.MeasuringMessage]:
    fields: dict[object, st.SearchStrategy[object]] = {
        int: INT64,
        bool: st.booleans(),
        str: st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True),
        g.AsideOpen | None: st.none() | st.builds(g.AsideOpen, st.binary(max_size=g.TOKEN_BYTES), INT64),
    }
    return st.one_of(
        *(st.builds(kind, **{k: fields[t] for k, t in typing.get_type_hints(kind).items()}) for kind in KINDS)
    )


# ---- the wire --------------------------------------------------------------------------------------------------------


@given(messages())
def test_messages_come_back_equal(message: g.MeasuringMessage) -> None:
    encoded = CONTROL.encode(message)
    assert CONTROL.decode(encoded) == message
    assert len(encoded) < 200


@given(messages(), st.data())
def test_a_message_with_a_piece_missing_or_too_much_is_refused(
    message: g.MeasuringMessage, data: st.DataObject
) -> None:
    encoded = CONTROL.encode(message)
    cut = data.draw(st.integers(1, len(encoded) - 1))
    for wrong in (encoded[:cut], encoded + b"\x00"):
        with pytest.raises(ProtocolViolation):
            CONTROL.decode(wrong)


@given(messages(), st.data())
def test_mutated_bytes_decode_to_something_of_the_schema_or_are_refused(
    message: g.MeasuringMessage, data: st.DataObject
) -> None:
    encoded = bytearray(CONTROL.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = CONTROL.decode(bytes(encoded))
    except ProtocolViolation:
        return
    assert type(decoded) in MESSAGES.values()


@given(INT64, st.booleans())
def test_a_probe_header_comes_back_equal(measurement: int, is_compressible: bool) -> None:
    header = g.Probe(measurement, is_compressible)
    assert HEADERS.decode(HEADERS.encode(header)) == header


@pytest.mark.parametrize("name", ["../etc", "EU", "", "a" * 64, "eu\x1b[31m"])
def test_a_region_that_is_none_is_refused_on_the_wire(name: str) -> None:
    good = CONTROL.encode(LINK)
    text = good.replace(
        b"\xa2eu", bytes([0xA0 + len(name)]) + name.encode() if len(name) < 32 else b"\xd9\x40" + name.encode()
    )
    with pytest.raises(ProtocolViolation):
        CONTROL.decode(text)


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("warm_up_ns", -1),
        ("warm_up_ns", g.WARM_UP_NS_MAX + 1),
        ("span_ns", 0),
        ("span_ns", g.SPAN_NS_MAX + 1),
        ("bytes_max", 0),
        ("bytes_max", g.BYTES_MAX + 1),
        ("probes_ns", 0),
        ("probes_ns", g.PROBES_NS_MAX + 1),
    ],
)
def test_a_measurement_over_the_limits_is_refused(field: str, value: int) -> None:
    for asked in (ASKED, LINK) if hasattr(ASKED, field) else (LINK,):
        with pytest.raises(ProtocolViolation, match=rf"{field} {value}"):
            g.check_asked(dataclasses.replace(asked, **{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"connections": -1}, "connections -1; 0 to 8"),
        ({"connections": g.CONNECTIONS_MAX + 1}, "connections 9; 0 to 8"),
        ({"connections": 0, "is_plain": True}, "connections 0; 1 to 8"),
        ({"connections": 0, "aside": g.AsideOpen(TOKEN, 0)}, "its own for a measurement over the link"),
        ({"connections": 1, "aside": g.AsideOpen(TOKEN[1:], 0)}, "a token of 31 bytes"),
        ({"connections": 1, "aside": g.AsideOpen(b"", 0)}, "a token of 0 bytes"),
        ({"connections": 1, "aside": g.AsideOpen(TOKEN, 22)}, "port 22 for a measurement; 0 to 0"),
        ({"connections": 1, "is_plain": True, "aside": g.AsideOpen(TOKEN, 0)}, "port 0 for a measurement; 1 to 65535"),
        ({"connections": 1, "is_plain": True, "aside": g.AsideOpen(TOKEN, 65_536)}, "port 65536"),
    ],
)
def test_connections_that_cannot_be_are_refused(changes: dict[str, typing.Any], text: str) -> None:
    with pytest.raises(ProtocolViolation, match=text):
        g.check_asked(dataclasses.replace(ASKED, **changes))


def test_connections_at_the_limits_are_taken() -> None:
    for is_plain, port in ((False, 0), (True, 1), (True, g.PORT_MAX)):
        for connections in (1, g.CONNECTIONS_MAX):
            for aside in (None, g.AsideOpen(TOKEN, port)):
                g.check_asked(dataclasses.replace(ASKED, connections=connections, is_plain=is_plain, aside=aside))


def test_a_link_with_plain_tcp_beside_it_may_take_twice_the_bytes() -> None:
    assert g.all_bytes_max(LINK) == g.all_bytes_max(ASKED) == 10**9
    assert g.all_bytes_max(dataclasses.replace(LINK, is_plain_too=True)) == 2 * 10**9


def test_a_measurement_at_the_limits_is_taken() -> None:
    most = {"warm_up_ns": g.WARM_UP_NS_MAX, "span_ns": g.SPAN_NS_MAX, "bytes_max": g.BYTES_MAX}
    g.check_asked(dataclasses.replace(ASKED, **most))  # type: ignore[arg-type]
    g.check_asked(dataclasses.replace(LINK, probes_ns=g.PROBES_NS_MAX, **most))
    g.check_asked(dataclasses.replace(LINK, warm_up_ns=0, span_ns=1, bytes_max=1, probes_ns=1))


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_one_measurement_at_a_time_and_the_refusal_says_which() -> None:
    gate = g.MeasuringGate(("b", "c"), now_ns=0)
    assert gate.describe(now_ns=0) == ""
    assert gate.begin("bandwidth to b", asker=None, bytes_max=0, now_ns=0) == ""
    for asker in ("b", "c", None):
        reason = gate.begin("latency", asker=asker, bytes_max=1, now_ns=7 * S)
        assert reason == "busy with another measurement: bandwidth to b (since 7 s); try again"
    gate.end(used_bytes=0)
    assert gate.begin("bandwidth from c", asker="c", bytes_max=1, now_ns=8 * S) == ""
    assert gate.describe(now_ns=9 * S) == "bandwidth from c (asked by c, since 1 s)"


def test_a_refused_request_costs_the_peer_nothing() -> None:
    gate = g.MeasuringGate(("b",), now_ns=0)
    gate.begin("mine", asker=None, bytes_max=0, now_ns=0)
    for _ in range(100):
        assert gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=0)
    gate.end(used_bytes=0)
    assert gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=0) == ""


def test_a_peer_may_have_so_many_bytes_measured_and_then_has_to_wait() -> None:
    gate = g.MeasuringGate(("b", "c"), now_ns=0)
    for _ in range(g.ASKED_BYTES_SAVED_MAX // g.BYTES_MAX):
        assert gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=0) == ""
        gate.end(used_bytes=g.BYTES_MAX)
    assert "b has asked for too many bytes lately" in gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=0)
    assert gate.begin("x", asker="c", bytes_max=g.BYTES_MAX, now_ns=0) == "", "each peer has its own"
    gate.end(used_bytes=0)
    later_ns = g.BYTES_MAX * S // g.ASKED_BYTES_PER_S
    assert gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=later_ns) == ""


def test_what_was_not_used_is_given_back() -> None:
    gate = g.MeasuringGate(("b",), now_ns=0)
    for _ in range(1000):
        assert gate.begin("x", asker="b", bytes_max=g.BYTES_MAX, now_ns=0) == ""
        gate.end(used_bytes=1000)


def test_the_operator_is_not_limited_by_bytes_over_time() -> None:
    gate = g.MeasuringGate(("b",), now_ns=0)
    for _ in range(1000):
        assert gate.begin("x", asker=None, bytes_max=g.BYTES_MAX, now_ns=0) == ""
        gate.end(used_bytes=g.BYTES_MAX)


def test_echoes_of_a_peer_are_limited_but_twice_what_a_measurement_sends_passes() -> None:
    gate = g.MeasuringGate(("b", "c"), now_ns=0)
    assert sum(gate.may_echo("b", now_ns=0) for _ in range(10_000)) == g.ECHOES_SAVED_MAX
    assert gate.may_echo("c", now_ns=0)
    assert sum(gate.may_echo("b", now_ns=S) for _ in range(10_000)) == g.ECHOES_PER_S
    steady = g.MeasuringGate(("b",), now_ns=0)
    assert all(steady.may_echo("b", now_ns=number * S // 100) for number in range(6000))


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_probes_nobody_agreed_to_are_a_violation() -> None:
    expected = g.ProbesExpected()
    with pytest.raises(ProtocolViolation, match="not agreed to"):
        expected.arrive(7, 1)


def test_probes_stop_at_what_was_agreed_to() -> None:
    expected = g.ProbesExpected()
    expected.expect(7, 100_000)
    expected.arrive(7, 60_000)
    with pytest.raises(ProtocolViolation, match="40000 are left"):
        expected.arrive(7, 40_001)
    expected.arrive(7, 40_000)
    with pytest.raises(ProtocolViolation):
        expected.arrive(7, 1)


def test_a_probe_is_no_longer_than_a_body() -> None:
    expected = g.ProbesExpected()
    expected.expect(7, g.BYTES_MAX)
    expected.arrive(7, g.BODY_BYTES_MAX)
    with pytest.raises(ProtocolViolation, match="fit into one"):
        expected.arrive(7, g.BODY_BYTES_MAX + 1)
    with pytest.raises(ProtocolViolation, match="fit into one"):
        expected.arrive(7, 0)  # any number of them would be within what was agreed to


def test_late_probes_of_the_last_few_measurements_are_welcome_and_older_ones_are_forgotten() -> None:
    expected = g.ProbesExpected()
    for measurement in range(g.PROBED_MAX + 1):
        expected.expect(measurement, 10)
    for measurement in range(1, g.PROBED_MAX + 1):
        expected.arrive(measurement, 10)
    with pytest.raises(ProtocolViolation):
        expected.arrive(0, 1)
