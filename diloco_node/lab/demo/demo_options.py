"""The options of a demo, as the user gave them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SECONDS_DEFAULT: Final = 90.0

CONTEXT: Final = 64
"""Bytes in a sequence, which is a row of the data."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `diloco-node demo`; its help describes each one. Empty texts and None are as if not given."""

    regions: int | None = None
    seconds: float = SECONDS_DEFAULT
    tokens: int = 0
    folder: Path | None = None
    data: tuple[str, ...] = ()
    is_json: bool = False
    seed: int = 0
    wan: Path | None = None
    has_outage: bool = False
    budget: str = ""
    has_chaos: bool = False
    mtbf: str = ""
    notice: str = ""
    script: Path | None = None
    baseline: Path | None = None
    step_time: str = ""
    speeds: str = ""
    batches: str = ""
    ranks: str = ""
    shards: str = ""
    command: tuple[str, ...] = ()
