"""`[model] hf`: a model of Hugging Face's in place of the built-in one, known without torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.shape import ModelSettings, model_settings_from

INITS: Final = ("random", "weights")
CONTEXT_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class HfModelSettings:
    """Any model that `AutoModelForCausalLM` makes.

    Attributes:
        hf: a config.json, or a folder with one. Never a name on the hub: all regions must hold the same model.
        init: "random": weights drawn from the run's seed, the same in all regions; "weights": those in the folder.
        context: tokens that a prediction may look at.

    Raises:
        ConfigError: a value is out of range.
    """

    hf: str
    init: str = "random"
    context: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.hf, str) or not self.hf:
            raise ConfigError(f"model.hf is {self.hf!r}: name a config.json, or a folder with one")
        if self.init not in INITS:
            raise ConfigError(f'model.init is {self.init!r}: use "random", or "weights" for those in the folder')
        is_whole = isinstance(self.context, int) and not isinstance(self.context, bool)
        if not is_whole or not 2 <= self.context <= CONTEXT_MAX:
            raise ConfigError(f"model.context is {self.context!r}: use a whole number from 2 to {CONTEXT_MAX}")

    @property
    def folder(self) -> Path:
        """Where config.json lies."""
        path = Path(self.hf)
        return path.parent if path.suffix == ".json" else path

    @property
    def config_file(self) -> Path:
        """The config.json."""
        path = Path(self.hf)
        return path if path.suffix == ".json" else path / "config.json"


def model_from(values: Mapping[str, Any]) -> ModelSettings | HfModelSettings:
    """What the trainer's `model` setting means: with `hf` a model of Hugging Face's, else the built-in one.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    if "hf" not in values:
        return model_settings_from(values)
    known = [one.name for one in fields(HfModelSettings)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown model settings {', '.join(unknown)}: beside model.hf there are {', '.join(known[1:])}"
        )
    return HfModelSettings(**values)
