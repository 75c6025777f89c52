"""Lines of benchmarks/gpu.py: what a check says."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from gpu_model import HAS_DRIVER


@dataclass(frozen=True, slots=True)
class Line:
    """What a check says: PASS, FAIL, SKIP or INFO, the figures as text, and as numbers."""

    name: str
    verdict: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def verdict(is_right: bool) -> str:
    """PASS or FAIL."""
    return "PASS" if is_right else "FAIL"


def in_time(is_right: bool) -> str:
    """The same for what takes time; on a device in software that says nothing."""
    return verdict(is_right) if HAS_DRIVER else "INFO"


def fake() -> Any:
    """The device in software that was imported, or None."""
    return sys.modules.get("tests.kit.fakecuda.fake_device")
