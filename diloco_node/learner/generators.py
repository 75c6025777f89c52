"""The random generators of a process, as a checkpoint keeps them: Python's, NumPy's, and torch's of each device.

Those that a script makes for itself go into `attach(stateful=...)`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
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
    """Put them back; devices that are not here are passed over.

    Raises ValueError, TypeError, KeyError: they are none of `generator_states`.
    """
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


class KeptGenerator:
    """A generator of the script's own, as a part of `stateful`."""

    def __init__(
        self, generator: torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    ) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        if isinstance(generator, np.random.RandomState):
            return {"state": generator.get_state(legacy=False)}
        return {"state": generator.bit_generator.state}

    def text(self) -> str:
        """Return its state as a text, to compare."""
        state = self.state_dict()["state"]
        return str(state.tolist() if isinstance(state, torch.Tensor) else state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises ValueError, TypeError: it is of another kind of generator."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state["state"])
        elif isinstance(generator, random.Random):
            generator.setstate(state["state"])
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state["state"])
        else:
            generator.bit_generator.state = state["state"]


def as_stateful(name: str, component: object) -> Any:
    """Return a part of `stateful` as one that has `state_dict` and `load_state_dict`.

    Raises LearnerError: it can't be kept.
    """
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
