"""cli/measure/measure_view.py: what people read of a document of `measure`."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_node.cli.measure.measure_view import _mbit, _ms, _share, bandwidth_title, failure_lines, short_lines

ENDS = {"from": "eu", "to": "us"}


def row(connections: int, counted_seconds: float | None, body: str = "random") -> dict[str, Any]:
    return {**ENDS, "body": body, "connections": connections, "counted_seconds": counted_seconds}


def test_tests_that_counted_much_less_than_their_time_are_named() -> None:
    rows = [row(1, 5.0), row(1, 4.6, "int4"), row(2, 0.0171), row(4, 4.4, "int4")]
    assert short_lines({"seconds": 5.0, "tests": rows}) == [
        "the bytes of a test (--most) were used up early, and less was counted: TLS, random (2) 0.017 s; "
        "TLS, int4+zstd (4) 4.4 s"
    ]
    assert short_lines({"seconds": 5.0, "tests": rows[:2]}) == []


def test_tests_that_failed_for_one_reason_are_one_line() -> None:
    failures = [
        {**row(0, None), "error": "busy"},
        {**row(8, None, "int4"), "error": "gone"},
        {**row(8, None), "error": "gone"},
    ]
    assert failure_lines({"failures": failures}) == [
        "not measured: TLS, random: busy",
        "not measured: TLS, int4+zstd (8); TLS, random (8): gone",
    ]
    assert failure_lines({}) == [], "a daemon of before tells none"


@pytest.mark.parametrize(("there", "text"), [("cubic", "cubic there"), (None, "? there"), ("", "? there")])
def test_what_is_not_known_of_the_peer_is_a_question_mark(there: str | None, text: str) -> None:
    document = {
        **ENDS,
        "rtt_seconds": 0.04,
        "seconds": 5.0,
        "warm_up_seconds": 1.0,
        "congestion_control": {"here": "bbr", "there": there},
    }
    assert f"TCP: bbr here, {text}." in bandwidth_title(document)


def test_numbers_have_three_digits_or_so() -> None:
    assert [_ms(seconds) for seconds in (0.00004, 0.04128, 0.1234)] == ["0.04 ms", "41.28 ms", "123.4 ms"]
    assert [_mbit(rate) for rate in (125_000, 12_500_000, 1_250_000_000)] == ["1.00", "100", "10000"]
    assert [_share(share) for share in (None, 0.0, 0.0123)] == ["?", "0.00 %", "1.23 %"]
