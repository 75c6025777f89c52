"""Rates as they are written in run.toml and on the command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.config.units import RATE_BYTES_PER_S_MAX, Rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("2Gbit/s", 250_000_000),
        ("1.5 Gbit/s", 187_500_000),
        ("499Mbit/s", 62_375_000),
        ("25MB/s", 25_000_000),
        ("1MiB/s", 1_048_576),
        ("0.1kB/s", 100),
        ("17bit/s", 2),
        (" 100Tbit/s ", RATE_BYTES_PER_S_MAX),
    ],
)
def test_rates_are_exact_and_a_part_of_a_byte_is_dropped(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text).bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (2, 'no unit; write "2Mbit/s" or "2MB/s"'),
        ("2", "no unit"),
        (0, "no unit"),
        ("0.0", "no unit"),
        (2.5, "no unit"),
        (True, "must be a rate"),
        (None, "must be a rate"),
        ("2Gbps", "unit 'Gbps' is unknown \\(capitals count\\); use one of bit/s, kbit/s"),
        ("2mbit/s", "capitals count"),
        ("2 Gbit", "unit 'Gbit' is unknown"),
        ("-2Gbit/s", "must be a rate"),
        ("", "must be a rate"),
        ("0Gbit/s", "less than a byte per second"),
        ("7bit/s", "less than a byte per second"),
        ("101Tbit/s", "more than 100Tbit/s"),
    ],
)
def test_bad_rates_say_what_to_write(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_rate(value)


@given(st.integers(1, RATE_BYTES_PER_S_MAX))
def test_a_rate_reads_back_as_it_is_shown(bytes_per_s: int) -> None:
    assert parse_rate(str(Rate(bytes_per_s))) == Rate(bytes_per_s)


def test_rates_are_shown_in_bits_and_the_largest_whole_unit() -> None:
    texts = [str(Rate(count)) for count in (1, 125, 250_000_000, 612_500_000, 25_000_000)]
    assert texts == ["8bit/s", "1kbit/s", "2Gbit/s", "4900Mbit/s", "200Mbit/s"]


def test_a_rate_is_handed_through() -> None:
    assert parse_rate(Rate(7)) == Rate(7)
