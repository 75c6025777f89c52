"""The settings of a run and a region for a learner's fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from diloco_node.core.types import CarryMode, Codec

Encoder = Literal["host", "device"]

ENCODER_VARIABLE: Final = "DILOCO_ENCODER"
"""`[learner] encode`, as `diloco-node start` tells it."""


@dataclass(frozen=True, slots=True)
class FragmentSettings:
    """Facts that the Welcome of the daemon fixes, by its names, and which processor encodes."""

    region: str
    incarnation: int
    codec_up: Codec
    carry: CarryMode
    carry_steps_limit: int
    encode: Encoder = "host"
