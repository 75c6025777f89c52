"""The random generators of a process, as a checkpoint keeps them: Python's, NumPy's, and torch's of each device.

Those that a script makes for itself go into `attach(stateful=...)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from diloco_node.errors import LearnerError

DEVICES: Final = ("cuda", "xpu")
"""Modules of torch with a generator for each device; ROCm's is `cuda`."""


def generator_states() -> dict[str, Any]:
    """Return the states by name: nested values, copies. Waits for no device."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for kind in DEVICES:
        module = getattr(torch, kind)
        generators = module.default_generators if module.is_initialized() else ()
        states |= {f"{kind}{number}": generator.get_state() for number, generator in enumerate(generators)}
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put them back, on devices that are here. Raises ValueError, TypeError, KeyError: they are none of ours."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    for kind in DEVICES:
        module = getattr(torch, kind)
        for number in range(module.device_count() if module.is_available() else 0):
            if f"{kind}{number}" in states:
                module.set_rng_state(states[f"{kind}{number}"], number)
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads a generator's state, and what sets it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return partial(generator.get_state, legacy=False), generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, partial(setattr, bits, "state")


class KeptGenerator:
    """A generator of the script's own, as a part of `stateful`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator  # by which `loop_state` knows that it is kept
        self._read, self._set = _access(generator)

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return {"state": self._read()}

    def text(self) -> str:
        """Return its state as a text, to compare."""
        state = self._read()
        return str(state.tolist() if isinstance(state, torch.Tensor) else state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises ValueError, TypeError: it is of another kind of generator."""
        self._set(state["state"])


def as_stateful(name: str, component: object) -> Any:
    """Return a part of `stateful` with `state_dict` and `load_state_dict`. Raises LearnerError: it can't be kept."""
    if isinstance(component, random.SystemRandom):
        raise LearnerError(f"attach(stateful={{{name!r}: ...}}): a SystemRandom has no state to keep: leave it out")
    if isinstance(component, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        return KeptGenerator(component)
    if not all(callable(getattr(component, method, None)) for method in ("state_dict", "load_state_dict")):
        raise LearnerError(
            f"attach(stateful={{{name!r}: ...}}): a {type(component).__name__} has no state_dict() and "
            "load_state_dict(): give it both, or give something that has them, or a random generator"
        )
    return component
