"""cli/measure/measure_view.py: what people read of a document of `measure`."""

import pytest

from diloco_node.cli.measure.measure_view import _mbit, _ms, _share, bandwidth_title, show

ENDS = {"from": "eu", "to": "us"}


def test_a_flow_that_counted_much_less_than_its_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        **ENDS,
        "rtt_seconds": 0.04,
        "seconds": 5.0,
        "warm_up_seconds": 1.0,
        "congestion_control": {"here": "bbr", "there": "bbr"},
        "connections": 2,
        "bytes_per_second": 10**7,
        **{f"bytes_per_second_{name}": 10**7 for name in ("median", "p10", "p90")},
        "cpu_seconds_per_gb": {"sender": 1.0, "receiver": 2.0},
        "sent_bytes": None,
        "retransmitted_bytes": None,
    }
    show({**document, "counted_seconds": 4.6})
    assert "used up early" not in capsys.readouterr().out
    show({**document, "counted_seconds": 0.0171})
    assert "its bytes (--most) were used up early: 0.017 s were counted" in capsys.readouterr().out


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
