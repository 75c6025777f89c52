"""Weights in a saved model's folder: which files transformers loads, and which would be passed over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from diloco_node.errors import ConfigError

LOADABLE: Final = ("*.safetensors", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
FOREIGN: Final = ("*.gguf", "*.h5", "*.msgpack", "*.ckpt*", "consolidated*.pt*")
"""Weights of other libraries: a model made from config.json beside them would be random without a word."""


def check_hub_name(name: str) -> None:
    """Refuse a model's name for which transformers would take a folder of the current one. A full path is no name.

    Raises ConfigError: there is such a folder.
    """
    if not Path(name).is_absolute() and Path(name).exists():
        raise ConfigError(
            f"model.hf is {name} of the model hub, but transformers would take the folder {Path(name).absolute()} for "
            "it: name that by its full path, or go to another folder"
        )


def has_weights(name: str) -> bool:
    """Return whether a model has weights to begin with, as every name of the hub has. Raises ConfigError: in no format
    that is read."""
    folder = Path(name)
    if not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in LOADABLE):
        return True
    foreign = sorted(file.name for pattern in FOREIGN for file in folder.glob(pattern))
    if foreign:
        raise ConfigError(f"{name} has weights in {foreign[0]}, which is not read: convert them by save_pretrained")
    return False
