"""Values that carry their unit: `200ms`, `2Gbit/s`. A bare number is refused: half of its readers would guess wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_TEXT: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{1,16}(?:/[A-Za-z]{1,8})?)")
_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "min": 60_000_000_000,
    "h": 3_600_000_000_000,
}
DURATION_NS_MAX: Final = 365 * 24 * _UNITS_NS["h"]

_PREFIXES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_RATE_UNITS_BITS: Final = (
    {f"{prefix}bit/s": size for prefix, size in _PREFIXES.items()}
    | {f"{prefix}B/s": 8 * size for prefix, size in _PREFIXES.items() if prefix != "T"}
    | {"KiB/s": 8 << 10, "MiB/s": 8 << 20, "GiB/s": 8 << 30}
)
"""Bits per second of each unit, as it is written: `Mb` and `mB` are read both ways, so capitals count."""

RATE_BYTES_PER_S_MAX: Final = 10**14 // 8
"""100 Tbit/s: more than any line between datacenters."""


def _split(value: object, kind: str, units: Mapping[str, int], *, examples: tuple[str, str]) -> tuple[str, str]:
    """Number and unit of a text. Raises ValueError: it has none of these units; with two that are often meant."""
    text = "" if isinstance(value, bool) else str(value).strip()
    match = _TEXT.fullmatch(text)
    if match is not None and match[2] in units:
        return match[1], match[2]
    if match is not None:
        raise ValueError(f"unit {match[2]!r} is unknown (capitals count); use one of {', '.join(units)}")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f'it has no unit; write "{value}{examples[0]}" or "{value}{examples[1]}"')
    raise ValueError(f'it must be a {kind}, such as "20{examples[0]}" or "2{examples[1]}"')


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
    number, unit = _split(value, "duration", _UNITS_NS, examples=("ms", "s"))
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
    """`"2Gbit/s"`, `"25MB/s"`; a fraction of a byte is dropped. Raises ValueError: as `parse_duration`."""
    if isinstance(value, Rate):
        return value
    number, unit = _split(value, "rate", _RATE_UNITS_BITS, examples=("Mbit/s", "MB/s"))
    bytes_per_s = int(Decimal(number) * _RATE_UNITS_BITS[unit] / 8)
    if bytes_per_s < 1:
        raise ValueError("it is less than a byte per second")
    if bytes_per_s > RATE_BYTES_PER_S_MAX:
        raise ValueError(f"it is more than {Rate(RATE_BYTES_PER_S_MAX)}")
    return Rate(bytes_per_s)
