"""Rates as people read them, and as they are written in settings."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

_UNITS: Final = ((10**12, "Tbit/s"), (10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s"), (1, "bit/s"))
_DIGITS: Final = 3


def format_rate(bytes_per_s: float | Fraction) -> str:
    """Three digits in bits: `2.03 Gbit/s`."""
    bits = 8 * float(bytes_per_s)
    # 999.6 Mbit/s would be shown as "1e+03": a unit begins where three digits of the one below end.
    size, unit = next((pair for pair in _UNITS if bits >= 0.9995 * pair[0]), _UNITS[-1])
    number = bits / size
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"


def rate_setting(bytes_per_s: int) -> str:
    """A rate of at least this much as it is written in settings, rounded up to three digits: `2.04Gbit/s`."""
    bits = 8 * bytes_per_s
    size, unit = next((pair for pair in _UNITS if bits >= pair[0]), _UNITS[-1])
    step = Fraction(max(1, 10 ** (len(str(bits)) - _DIGITS)))
    ceiling = -(-bits // step) * step / size
    return f"{float(ceiling):.{_DIGITS - 1}f}".rstrip("0").rstrip(".") + unit
