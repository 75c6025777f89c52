"""The paper's bandwidth table, from its formulas, beside what is printed; and what H = 24 really takes.

Source: Decoupled DiLoCo (arXiv 2604.21428), table 13: Gbit/s that a model of 5 B parameters needs, M = 8 learners. Its
DiLoCo rows follow only with a cycle of 100 steps, while its experiments merge every fragment every 24 steps; `honest`
says what that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diloco_node.planning.rates import data_parallel_bits_per_s, hidden_bits_per_s, paper_bits_per_s

VALUES: Final = 5_000_000_000
UTILISATIONS: Final = (0.50, 0.75, 0.90, 0.95, 0.99)
SYNC_EVERY: Final = 24
GIGA: Final = 1e9
DATA_PARALLEL: Final = "data-parallel"
DATA_PARALLEL_UTILISATION_MAX: Final = 0.95
"""The formula for data-parallel holds up to here."""

BLOCK_BITS: Final = {4: 4.125, 8: 8.125, 16: 16.0}
"""Bits per value with a float32 scale per 256."""

OVERHEAD: Final = 1.06


@dataclass(frozen=True, slots=True)
class Setting:
    """One block of the table."""

    name: str
    step_s: float
    datacenters: int


SETTINGS: Final = (Setting("a", 1.0, 2), Setting("b", 5.0, 2), Setting("c", 1.0, 8), Setting("d", 5.0, 8))

# As printed, as text: how many digits are printed says how exact a cell is.
PRINTED: Final = {
    ("a", DATA_PARALLEL): "49 81 104 113 195",
    ("a", "bf16"): "0.58 1.2 1.7 1.9 2.2",
    ("a", "int4"): "0.15 0.29 0.43 0.49 0.53",
    ("b", DATA_PARALLEL): "9.5 16 21 23 49",
    ("b", "bf16"): "0.12 0.23 0.34 0.39 0.43",
    ("b", "int4"): "0.03 0.06 0.08 0.10 0.11",
    ("c", DATA_PARALLEL): "85 140 183 198 391",
    ("c", "bf16"): "1.0 2.0 3.0 3.3 3.8",
    ("c", "int4"): "0.26 0.51 0.75 0.84 0.94",
    ("d", DATA_PARALLEL): "17 28 37 40 49",
    ("d", "bf16"): "0.21 0.40 0.59 0.68 0.75",
    ("d", "int4"): "0.05 0.10 0.15 0.17 0.19",
}
_BITS: Final = {"bf16": 16, "int4": 4}


@dataclass(frozen=True, slots=True)
class BandwidthCell:
    """One printed number.

    Attributes:
        setting: "a" to "d". method: "data-parallel", "bf16" or "int4".
        utilisation: part of the time that is compute.
        printed: as in the paper, in Gbit/s.
        computed: by formula, in Gbit/s.
        is_covered: the formula is meant to give this cell (not so the 99 % column of data-parallel).
    """

    setting: str
    method: str
    utilisation: float
    printed: str
    computed: float
    is_covered: bool

    @property
    def deviation(self) -> float:
        """Of the computed number from the printed one, as a part of it."""
        return self.computed / float(self.printed) - 1

    @property
    def is_rounding(self) -> bool:
        """The computed number, rounded to as many places as are printed, is the printed one."""
        places = len(self.printed.partition(".")[2])
        return abs(self.computed - float(self.printed)) <= 0.5 / 10.0**places


@dataclass(frozen=True, slots=True)
class Honest:
    """What hides all transfer behind compute, with P = H = 24 and links that are never idle, in Gbit/s.

    Attributes:
        bf16, int4: by the paper's count: bits of values only.
        here: of this program's defaults, int4 up and int8 down: with scales and 6 % wire overhead.
        here_int4: the same with int4 both ways.
    """

    setting: Setting
    bf16: float
    int4: float
    here: float
    here_int4: float


def table() -> tuple[BandwidthCell, ...]:
    """All 60 cells, in the paper's order."""
    return tuple(_cells())


def _cells() -> Iterator[BandwidthCell]:
    for setting in SETTINGS:
        for method in (DATA_PARALLEL, *_BITS):
            printed = PRINTED[setting.name, method].split()
            for utilisation, text in zip(UTILISATIONS, printed, strict=True):
                is_covered = method != DATA_PARALLEL or utilisation <= DATA_PARALLEL_UTILISATION_MAX
                yield BandwidthCell(
                    setting.name, method, utilisation, text, _rate(setting, method, utilisation), is_covered
                )


def _rate(setting: Setting, method: str, utilisation: float) -> float:
    if method == DATA_PARALLEL:
        return data_parallel_bits_per_s(VALUES, setting.datacenters, setting.step_s, utilisation) / GIGA
    return paper_bits_per_s(VALUES, _BITS[method], setting.datacenters, setting.step_s, utilisation) / GIGA


def honest() -> tuple[Honest, ...]:
    """For each block of the table, the rate at which H = 24 costs no compute."""
    return tuple(
        Honest(
            setting,
            bf16=_hidden(setting, 16),
            int4=_hidden(setting, 4),
            here=OVERHEAD * _hidden(setting, (BLOCK_BITS[4] + BLOCK_BITS[8]) / 2),
            here_int4=OVERHEAD * _hidden(setting, BLOCK_BITS[4]),
        )
        for setting in SETTINGS
    )


def _hidden(setting: Setting, bits: float) -> float:
    return hidden_bits_per_s(VALUES, bits, setting.datacenters, setting.step_s, SYNC_EVERY) / GIGA
