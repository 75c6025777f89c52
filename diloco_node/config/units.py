"""Values that carry their unit: `200ms`, `2Gbit/s`. A bare number is refused: half of its readers would guess wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_TEXT: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]+)")
_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "min": 60_000_000_000,
    "h": 3_600_000_000_000,
}
DURATION_NS_MAX: Final = 365 * 24 * _UNITS_NS["h"]

_RATE_TEXT: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{1,8}(?:/[A-Za-z]{1,8})?)")
_RATE_UNITS_BITS: Final = {
    "bit/s": 1,
    "kbit/s": 10**3,
    "Mbit/s": 10**6,
    "Gbit/s": 10**9,
    "Tbit/s": 10**12,
    "B/s": 8,
    "kB/s": 8 * 10**3,
    "MB/s": 8 * 10**6,
    "GB/s": 8 * 10**9,
    "KiB/s": 8 << 10,
    "MiB/s": 8 << 20,
    "GiB/s": 8 << 30,
}
"""Bits per second of each unit, as it is written: `Mb` and `mB` are read both ways, so capitals count."""

RATE_BYTES_PER_S_MAX: Final = 10**14 // 8
"""100 Tbit/s: more than any line between datacenters."""


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A length of time; `ns` is an integer."""

    ns: int

    def __str__(self) -> str:
        """As it is written in run.toml, in the largest unit that needs no fraction."""
        if self.ns == 0:
            return "0s"
        unit = max((unit for unit, size in _UNITS_NS.items() if self.ns % size == 0), key=lambda u: _UNITS_NS[u])
        return f"{self.ns // _UNITS_NS[unit]}{unit}"


def parse_duration(value: object) -> Duration:
    """`"200ms"`, `"1.5s"`, `"10min"`. Raises ValueError: with a text that completes "SETTING is VALUE: ..."."""
    if isinstance(value, Duration):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError('it must be a duration, such as "200ms" or "2s"')
    match = _TEXT.fullmatch(str(value).strip())
    if match is None:
        bare = re.fullmatch(r"\d+(\.\d+)?", str(value).strip())
        hint = (
            f'it has no unit; write "{value}ms" or "{value}s"' if bare else 'it is no duration; write "200ms" or "2s"'
        )
        raise ValueError(hint)
    number, unit = match.groups()
    if unit not in _UNITS_NS:
        raise ValueError(f"unit {unit!r} is unknown; use one of {', '.join(_UNITS_NS)}")
    exact = Decimal(number) * _UNITS_NS[unit]
    if exact > DURATION_NS_MAX:
        raise ValueError("it is longer than a year")
    return Duration(int(exact))


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Bytes in a second, a positive integer."""

    bytes_per_s: int

    def __str__(self) -> str:
        """As it is written in run.toml, in bits and the largest unit that needs no fraction."""
        bits = 8 * self.bytes_per_s
        sizes = {unit: size for unit, size in _RATE_UNITS_BITS.items() if unit.endswith("bit/s")}
        unit = max((unit for unit, size in sizes.items() if bits % size == 0), key=lambda u: sizes[u])
        return f"{bits // sizes[unit]}{unit}"


def parse_rate(value: object) -> Rate:
    """`"2Gbit/s"`, `"25MB/s"`, `"1.5Gbit/s"`; a fraction of a byte is dropped.

    Raises ValueError: with a text that completes "SETTING is VALUE: ...".
    """
    if isinstance(value, Rate):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError('it must be a rate, such as "2Gbit/s" or "25MB/s"')
    match = _RATE_TEXT.fullmatch(str(value).strip())
    if match is None:
        bare = re.fullmatch(r"\d+(\.\d+)?", str(value).strip())
        hint = (
            f'it has no unit; write "{value}Mbit/s" or "{value}MB/s"'
            if bare and float(bare[0])
            else 'it is no rate; write "2Gbit/s" or "25MB/s"'
        )
        raise ValueError(hint)
    number, unit = match.groups()
    if unit not in _RATE_UNITS_BITS:
        raise ValueError(f"unit {unit!r} is unknown (capitals count); use one of {', '.join(_RATE_UNITS_BITS)}")
    bytes_per_s = int(Decimal(number) * _RATE_UNITS_BITS[unit] / 8)
    if bytes_per_s < 1:
        raise ValueError("it is less than a byte per second")
    if bytes_per_s > RATE_BYTES_PER_S_MAX:
        raise ValueError(f"it is more than {Rate(RATE_BYTES_PER_S_MAX)}")
    return Rate(bytes_per_s)
