"""Names of LoRA adapters' tensors: as they train, and as PEFT's file has them.

Parameters are `....lora_A.NAME.weight` while they train; in `adapter_model.safetensors` the adapter's name is left out,
and a layer that is trained whole (`modules_to_save`) has the name of the layer that it stands for. Rows of an embedding
may train beside them (`trainable_token_indices`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NAMED: Final = re.compile(
    r"\.(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|modules_to_save|trainable_tokens_delta)\.([^.]+)(?=\.|$)"
)


def has_adapters(names: Iterable[str]) -> bool:
    """Whether the tensors of a run are LoRA adapters."""
    return any(match and "lora_" in match[0] for match in map(_NAMED.search, names))


def adapters_of(names: Iterable[str]) -> list[str]:
    """Return the names of the adapters, sorted."""
    return sorted({match[1] for match in map(_NAMED.search, names) if match})


def is_of_base(name: str) -> bool:
    """Whether a tensor of PEFT's file is the base model's: an embedding below an adapter is written along."""
    return ".base_layer." in name


def is_layer(name: str) -> bool:
    """Whether a tensor of PEFT's file is a layer's own weight, and no adapter's."""
    return name.endswith(".weight") and ".lora_" not in name


def saved_name(name: str) -> str:
    """Return the name of a training parameter in PEFT's file."""
    match = _NAMED.search(name)
    if match is None:
        return name  # as a bias that trains beside the adapters
    head, tail = name[: match.start(1) - 1], name[match.end() :]
    if head.endswith(".modules_to_save"):
        return head.removesuffix(".modules_to_save") + tail
    return head if head.endswith(".lora_magnitude_vector") else head + tail
