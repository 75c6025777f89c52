"""Durations as they are written in run.toml."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.config.units import Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("200ms", 200_000_000),
        ("1.5s", 1_500_000_000),
        ("0s", 0),
        ("10 min", 600_000_000_000),
        ("7us", 7_000),
        ("0.1s", 100_000_000),
    ],
)
def test_durations_are_exact(text: str, ns: int) -> None:
    assert parse_duration(text).ns == ns


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (200, 'no unit; write "200ms" or "200s"'),
        ("200", "no unit"),
        (1.5, "no unit"),
        (True, "must be a duration"),
        (None, "must be a duration"),
        ("2 fortnights", r"unit 'fortnights' is unknown \(capitals count\); use one of ns, us, ms, s, min, h"),
        ("-2s", "must be a duration"),
        ("", "must be a duration"),
        ("9000h", "longer than a year"),
    ],
)
def test_bad_durations_say_what_to_write(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(value)


@given(st.integers(0, 10**15))
def test_a_duration_reads_back_as_it_is_shown(ns: int) -> None:
    assert parse_duration(str(Duration(ns))) == Duration(ns)


def test_durations_are_shown_in_the_largest_whole_unit() -> None:
    assert [str(Duration(ns)) for ns in (0, 999, 1500, 60 * 10**9, 90 * 10**9)] == [
        "0s",
        "999ns",
        "1500ns",
        "1min",
        "90s",
    ]
