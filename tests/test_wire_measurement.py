"""wire/measurement.py: frames of a measurement come back equal, anything else is refused."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.errors import ProtocolViolation
from diloco_node.wire import measurement as w

TOKEN = b"t" * w.TOKEN_BYTES
FLOW = w.FlowAsked(3, True, w.FlowPath.PLAIN, w.FlowBody.INT4, 4, 1_000_000_000, 5_000_000_000)
EXAMPLES: list[w.MeasurementMessage] = [
    w.SessionAsked(1),
    w.SessionOpened(1, TOKEN, 7401, "cubic"),
    w.StreamJoined(TOKEN, 3, 1),
    FLOW,
    w.FlowReady(3),
    w.FlowReceived(3, 10, 9, 8, 11, 500, 1000),
    w.FlowSent(3, 500, 1000, -1, -1),
    w.FlowStopped(3),
    w.Declined("busy"),
    w.SocketAsked(),
    w.SocketTold(1000, 10),
    w.PairAsked("eu", "10.0.0.1:7400", 1, 0, 2, False),
    w.PairMeasured(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
]


def test_the_examples_cover_every_message() -> None:
    assert [type(message) for message in EXAMPLES] == list(w.MEASUREMENT_MESSAGES.values())
    assert set(typing.get_args(w.MeasurementMessage)) == set(w.MEASUREMENT_MESSAGES.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_come_back_equal(message: w.MeasurementMessage) -> None:
    assert w.decode_session(w.encode_message(message)) == message


def test_frozen_bytes_of_version_1_decode() -> None:
    """A change here is another `MEASUREMENT_VERSION`."""
    assert w.MEASUREMENT_VERSION == 1
    assert w.decode_session(bytes.fromhex("20920101")) == w.SessionAsked(1)
    assert w.encode_message(FLOW).hex() == "20980403c3a5706c61696ea4696e743404ce3b9aca00cf000000012a05f200"
    assert w.encode_echo(w.KIND_ECHO, 258).hex() == "210201000000000000"


def test_echoes_carry_their_sequence() -> None:
    assert w.decode_session(w.encode_echo(w.KIND_ECHO, 2**64 - 1)) == (w.KIND_ECHO, 2**64 - 1)
    assert w.decode_session(w.encode_echo(w.KIND_ECHOED, 0)) == (w.KIND_ECHOED, 0)


@pytest.mark.parametrize(
    "frame", [b"", b"\x21", b"\x21" + bytes(9), b"\x20", b"\x20\x91\x63", b"\x02\x91\x01", b"\x11"]
)
def test_other_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        w.decode_session(frame)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        w.decode_session(data)
    except ProtocolViolation:
        return


def test_a_preamble_comes_back_equal() -> None:
    joined = w.StreamJoined(TOKEN, 2**40, 15)
    assert w.decode_preamble(w.encode_preamble(joined)) == joined
    assert len(w.encode_preamble(joined)) == w.PREAMBLE_BYTES
    with pytest.raises(ProtocolViolation, match="27 bytes"):
        w.decode_preamble(w.encode_preamble(joined)[:-1])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"connections": 0}, "connections"),
        ({"connections": w.CONNECTIONS_MAX + 1}, "connections"),
        ({"warm_up_ns": -1}, "warm_up_ns"),
        ({"warm_up_ns": w.WARM_UP_NS_MAX + 1}, "warm_up_ns"),
        ({"span_ns": 0}, "span_ns"),
        ({"span_ns": w.SPAN_NS_MAX + 1}, "span_ns"),
    ],
)
def test_a_flow_over_the_limits_is_refused(change: dict[str, int], field: str) -> None:
    with pytest.raises(ProtocolViolation, match=field):
        w.check_flow(dataclasses.replace(FLOW, **change))  # type: ignore[arg-type]


def test_a_flow_at_the_limits_is_taken() -> None:
    w.check_flow(
        dataclasses.replace(FLOW, connections=w.CONNECTIONS_MAX, warm_up_ns=w.WARM_UP_NS_MAX, span_ns=w.SPAN_NS_MAX)
    )
    w.check_flow(dataclasses.replace(FLOW, connections=1, warm_up_ns=0, span_ns=1))


@given(st.binary(min_size=w.ASIDE_TOKEN_BYTES, max_size=w.ASIDE_TOKEN_BYTES), st.integers(0, 2**32 - 1))
def test_what_a_connection_of_a_daemon_begins_with_comes_back_equal(token: bytes, index: int) -> None:
    data = w.encode_aside(token, index)
    assert len(data) == w.ASIDE_BYTES
    assert w.decode_aside(data) == (token, index)
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(ProtocolViolation, match=f"began with {len(wrong)} bytes"):
            w.decode_aside(wrong)
