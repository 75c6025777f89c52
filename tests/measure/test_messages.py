"""wire/measure_messages.py: what measuring ends say to each other, and the limits of it."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.shapes import Whole, bound_of
from diloco_node.errors import ProtocolViolation
from diloco_node.numeric import NS_PER_S
from diloco_node.wire import measure_messages as g
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_tables import CONTROL, HEADERS, MESSAGES

S = NS_PER_S
ASKED = g.MeasurementRequested(3, True, S, 5 * S, 10**9)
LINK = g.LinkTestRequested(3, "eu", S, 0, 5 * S, 10**9)
KINDS = typing.get_args(g.MeasureMessage)


def numbers(kind: type, name: str) -> st.SearchStrategy[int]:
    bound = bound_of(BOUNDS, kind.__name__, name)
    assert isinstance(bound, Whole)
    return st.integers(bound.lowest, bound.highest)


def messages() -> st.SearchStrategy[g.MeasureMessage]:
    fields: dict[object, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        str: st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True),
    }
    return st.one_of(
        *(
            st.builds(
                kind, **{k: numbers(kind, k) if t is int else fields[t] for k, t in typing.get_type_hints(kind).items()}
            )
            for kind in KINDS
        )
    )


# ---- the wire --------------------------------------------------------------------------------------------------------


@given(messages())
def test_messages_come_back_equal(message: g.MeasureMessage) -> None:
    encoded = CONTROL.encode(message)
    assert CONTROL.decode(encoded) == message
    assert len(encoded) < 200


@given(messages(), st.data())
def test_a_message_with_a_piece_missing_or_too_much_is_refused(message: g.MeasureMessage, data: st.DataObject) -> None:
    encoded = CONTROL.encode(message)
    cut = data.draw(st.integers(1, len(encoded) - 1))
    for wrong in (encoded[:cut], encoded + b"\x00"):
        with pytest.raises(ProtocolViolation):
            CONTROL.decode(wrong)


@given(messages(), st.data())
def test_mutated_bytes_decode_to_something_of_the_schema_or_are_refused(
    message: g.MeasureMessage, data: st.DataObject
) -> None:
    encoded = bytearray(CONTROL.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = CONTROL.decode(bytes(encoded))
    except ProtocolViolation:
        return
    assert type(decoded) in MESSAGES.values()


@given(numbers(g.Probe, "measurement"))
def test_a_probe_header_comes_back_equal(measurement: int) -> None:
    header = g.Probe(measurement)
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
    for request in (ASKED, LINK) if hasattr(ASKED, field) else (LINK,):
        with pytest.raises(ProtocolViolation, match=rf"{field} {value}"):
            g.check_request(dataclasses.replace(request, **{field: value}), is_daemon=False)  # type: ignore[arg-type]


def test_a_measurement_at_the_limits_is_taken() -> None:
    most = {"warm_up_ns": g.WARM_UP_NS_MAX, "span_ns": g.SPAN_NS_MAX, "bytes_max": g.BYTES_MAX}
    flow = dataclasses.replace(ASKED, **most)  # type: ignore[arg-type]
    link = dataclasses.replace(LINK, probes_ns=g.PROBES_NS_MAX, **most)
    least = dataclasses.replace(LINK, warm_up_ns=0, span_ns=1, bytes_max=1, probes_ns=1)
    for asked in (flow, link, least):
        g.check_request(asked, is_daemon=False)
    for asked in (flow, link):
        g.check_request(dataclasses.replace(asked, bytes_max=g.DAEMON_BYTES_MAX), is_daemon=True)
        with pytest.raises(ProtocolViolation, match="bytes_max"):
            g.check_request(dataclasses.replace(asked, bytes_max=g.DAEMON_BYTES_MAX + 1), is_daemon=True)
