"""Faults to plant into simulated regions."""

from tests.kit.planted.cheat_faults import CHEAT_FAULTS
from tests.kit.planted.core_faults import CORE_FAULTS
from tests.kit.planted.effect_faults import EFFECT_FAULTS

__all__ = ["CHEAT_FAULTS", "CORE_FAULTS", "EFFECT_FAULTS"]
