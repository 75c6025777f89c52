"""Rates as people read them, and what published formulas say a model needs between datacenters.

Compute utilisation is `compute time / (compute time + time that compute waits for the network)`. The ring factor
`2 (D - 1) / D` is how often each byte of an all-reduce among D places leaves, and enters, each of them.

Source: Decoupled DiLoCo (arXiv 2604.21428), table 13. The paper prints rates without the formula; the constant below
is fitted to its cells. It gives the data-parallel ones up to 95 % within 2.1 %. The 99 % column does not follow (the
last layers' gradients, which nothing hides, decide there).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

BITS_BF16: Final = 16

DATA_PARALLEL_HIDDEN_STEPS: Final = 0.65
"""Part of a step, the backward pass, behind which an all-reduce of gradients hides."""

_UNITS: Final = ((10**12, "Tbit/s"), (10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s"), (1, "bit/s"))
_DIGITS: Final = 3


def ring_factor(places: int) -> Fraction:
    """`2 (D - 1) / D`; 0 for one place."""
    return Fraction(2 * (places - 1), places)


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


def data_parallel_bits_per_s(values: int, places: int, step_s: float, utilisation: float) -> float:
    """Rate that each place must send and receive for data-parallel training at this compute utilisation.

    Args:
        values: parameters; gradients travel in bf16.
        places: datacenters in the ring.
        step_s: seconds of compute per step.
        utilisation: above 0, below 1.
    """
    waits = 1 / utilisation - 1 + DATA_PARALLEL_HIDDEN_STEPS  # steps of waiting per step of compute
    return BITS_BF16 * values * float(ring_factor(places)) / (step_s * waits)


def data_parallel_utilisation(values: int, places: int, step_s: float, bits_per_s: float) -> float:
    """The inverse: the compute utilisation of data-parallel training over links of this rate; at most 1."""
    transfer_steps = BITS_BF16 * values * float(ring_factor(places)) / (bits_per_s * step_s)
    return 1 / (1 + max(0.0, transfer_steps - DATA_PARALLEL_HIDDEN_STEPS))
