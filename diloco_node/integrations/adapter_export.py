"""A run's LoRA adapters as PEFT's own two files, for `PeftModel.from_pretrained`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco_node.core.merge.adapter_names import adapters_of, is_of_base, saved_name
from diloco_node.errors import ConfigError
from diloco_node.integrations.hf_export import SavedModel
from diloco_node.numeric import F32

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"


def save_adapter(folder: Path, tensors: Mapping[str, F32], source: Path | None, *, dtype: str) -> SavedModel:
    """Write `adapter_model.safetensors` and a copy of `adapter_config.json`.

    Args:
        folder: empty. tensors: merged ones, by `model.named_parameters()`.
        source: the adapter's config, or a folder with it, as PEFT's `save_pretrained` writes.
        dtype: such as "bfloat16".

    Raises ConfigError: there is no such config, or the folder's adapter has other tensors; several adapters train.
    """
    config = None if source is None else source / ADAPTER_CONFIG if source.is_dir() else source
    if config is None or not config.is_file():
        raise ConfigError(
            f"the run trains LoRA adapters, and their {ADAPTER_CONFIG} is not known here: add --base FOLDER with what "
            "PEFT's save_pretrained wrote"
        )
    try:
        is_lora = json.loads(config.read_text(encoding="utf-8"))["peft_type"] == "LORA"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{config} can't be read as PEFT's {ADAPTER_CONFIG}: {error}") from error
    if not is_lora:
        raise ConfigError(f"{config} is of another kind of adapter, and the run has tensors of LORA")
    adapters = adapters_of(tensors)
    if len(adapters) > 1:
        raise ConfigError(f"the run trains the adapters {', '.join(adapters)}: PEFT keeps each in files of its own")
    kind: torch.dtype = getattr(torch, dtype)
    values = {saved_name(name): torch.from_numpy(value).to(kind).contiguous() for name, value in tensors.items()}
    _check_same(config.parent / ADAPTER_WEIGHTS, {name: tuple(value.shape) for name, value in values.items()})
    save_file(values, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copyfile(config, folder / ADAPTER_CONFIG)
    return SavedModel(is_plain=False)


def _check_same(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare with the adapter that the config lies beside, if one does. Raises ConfigError: it is another one."""
    if not path.is_file():
        return
    try:
        with safe_open(path, framework="np") as file:
            file_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    for name in sorted(file_shapes.keys() | shapes.keys()):
        if name not in shapes and is_of_base(name):
            continue
        if file_shapes.get(name) != shapes.get(name):
            there, here = file_shapes.get(name, "not there"), shapes.get(name, "not there")
            raise ConfigError(f"{path} is another adapter than the run's: {name} is {there}, in the run {here}")
