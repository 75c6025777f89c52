"""The tensors of a run as files that other libraries load: a saved model, PEFT's adapter, a distributed checkpoint."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco_node.core.merge.adapter_names import adapters_of, is_layer, is_of_base, saved_name
from diloco_node.errors import ConfigError
from diloco_node.numeric import F32

CONFIG_NAME: Final = "config.json"
WEIGHTS_NAME: Final = "model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """How a model was saved. is_plain: by names and values alone, as transformers is not installed or does not know it.
    unmerged: frozen parameters and buffers, which the run does not have. random: those of them that nothing was known
    of."""

    is_plain: bool
    unmerged: tuple[str, ...] = ()
    random: tuple[str, ...] = ()


def save_model(
    folder: Path,
    tensors: Mapping[str, F32],
    config: Mapping[str, Any],
    *,
    base: str | None,
    tokenizer: str | None,
    dtype: str,
) -> SavedModel:
    """Write weights, `config.json` and the tokenizer: by `save_pretrained`, or plain where transformers is no help.

    tensors: merged ones, by `model.named_parameters()`. config: what config.json says; empty: not known. base: folder
    or name of a saved model, for frozen parameters and buffers; None: as the config makes them. tokenizer: folder or
    name of a model that may have one. dtype: such as "bfloat16".

    Raises ConfigError: the tensors do not fit the config, or the base can't be loaded.
    """
    plain = {name: torch.from_numpy(values) for name, values in tensors.items()}
    kind: torch.dtype = getattr(torch, dtype)
    # With another type, to which `from_pretrained` would else round.
    document = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")} | {"dtype": dtype}
    if config:
        (folder / CONFIG_NAME).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    if not config or not is_known(config):
        if base is not None:
            raise ConfigError(f"--base wants a model that transformers knows, not {config['model_type']}: leave it out")
        contiguous = {name: value.to(kind).contiguous() for name, value in plain.items()}
        save_file(contiguous, folder / WEIGHTS_NAME, {"format": "pt"})
        return SavedModel(is_plain=True)
    model, random_names = _model(folder, base)
    try:
        lacking = model.load_state_dict(plain, strict=False)
    except RuntimeError as error:  # another shape
        raise ConfigError(f"the run's tensors do not fit config.json: {one_line(error)}") from error
    if lacking.unexpected_keys:
        raise ConfigError(
            f"tensor {lacking.unexpected_keys[0]} of the run is not in the model of config.json: is it of the same "
            "kind, and saved under the names that the training script attached?"
        )
    values = model.state_dict()
    for name, tensor in plain.items():
        if not torch.equal(values[name], tensor):
            raise ConfigError(
                f"tensor {name} of the run shares its memory with another one in the model of config.json, and their "
                "values differ: set tie_word_embeddings in config.json as the training script did"
            )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    merged_ids = {id(parameters[name]) for name in plain if name in parameters}
    other_names = sorted(name for name in lacking.missing_keys if id(parameters.get(name)) not in merged_ids)
    model.to(kind).save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    random = tuple(name for name in other_names if name in parameters and (base is None or name in random_names))
    return SavedModel(False, tuple(other_names), random)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether transformers is installed and knows the model."""
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import CONFIG_MAPPING

    return config["model_type"] in CONFIG_MAPPING


def _model(folder: Path, base: str | None) -> tuple[Any, Set[str]]:
    """Make the model of the folder's config in float32, with the base's values, and name those that the base lacks."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        if base is not None:
            kind = architecture or transformers.AutoModelForCausalLM
            model, report = kind.from_pretrained(base, config=config, dtype=torch.float32, output_loading_info=True)
            return model, frozenset(report["missing_keys"])
        if architecture is not None:
            model = architecture(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.to(torch.float32), frozenset()
    except Exception as error:  # the library has no common class of errors
        place = CONFIG_NAME if base is None else f"--base {base}"
        raise ConfigError(f"{place} makes no model: {one_line(error)}") from error


def _save_tokenizer(place: str | None, folder: Path) -> None:
    from transformers import AutoTokenizer

    if place is None:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError, AttributeError):  # there is none
        return
    tokenizer.save_pretrained(folder)


def one_line(error: BaseException) -> str:
    """A library's error in a line of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def save_adapter(folder: Path, tensors: Mapping[str, F32], source: Path | None, *, dtype: str) -> SavedModel:
    """Write `adapter_model.safetensors` and a copy of `adapter_config.json`, from `source` or the folder with it.

    Frozen layers that PEFT has saved there, such as an embedding of another size than the base model's, are copied.

    Raises ConfigError: there is no such config, or the folder's adapter has other tensors; several adapters train.
    """
    config = None if source is None else source / ADAPTER_CONFIG if source.is_dir() else source
    if config is None or not config.is_file():
        raise ConfigError(
            f"the run trains LoRA adapters, and their {ADAPTER_CONFIG} is not known here: add --base FOLDER with what "
            "PEFT's save_pretrained wrote"
        )
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
        is_lora, has_layers = document["peft_type"] == "LORA", bool(document.get("modules_to_save"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{config} can't be read as PEFT's {ADAPTER_CONFIG}: {error}") from error
    if not is_lora:
        raise ConfigError(f"{config} is of another kind of adapter, and the run has tensors of LORA")
    adapters = adapters_of(tensors)
    if len(adapters) > 1:
        raise ConfigError(f"the run trains the adapters {', '.join(adapters)}: PEFT keeps each in files of its own")
    kind: torch.dtype = getattr(torch, dtype)
    values = {saved_name(name): torch.from_numpy(value).to(kind).contiguous() for name, value in tensors.items()}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    values |= _frozen_beside(config.parent / ADAPTER_WEIGHTS, shapes, has_layers=has_layers)
    save_file(values, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copyfile(config, folder / ADAPTER_CONFIG)
    return SavedModel(is_plain=False)


def _frozen_beside(path: Path, shapes: Mapping[str, tuple[int, ...]], *, has_layers: bool) -> dict[str, torch.Tensor]:
    """Return layers in PEFT's file that the run does not train. Raises ConfigError: it has another adapter.

    has_layers: the adapter trains whole layers, which have such names.
    """
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            file_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            strangers = [name for name in file_shapes if name not in shapes and not is_of_base(name)]
            layers = [name for name in strangers if not has_layers and is_layer(name)]
            frozen = {name: file.get_tensor(name) for name in layers}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    for name in sorted({*shapes, *strangers} - frozen.keys()):
        if file_shapes.get(name) != shapes.get(name):
            there, here = file_shapes.get(name, "not there"), shapes.get(name, "not there")
            raise ConfigError(f"{path} is another adapter than the run's: {name} is {there}, in the run {here}")
    return frozen


def save_dcp(folder: Path, tensors: Mapping[str, F32], *, dtype: str) -> SavedModel:
    """Write the merged tensors, by `model.named_parameters()`, under their names, without a process group."""
    from torch.distributed.checkpoint.state_dict_saver import save

    kind: torch.dtype = getattr(torch, dtype)
    values = {name: torch.from_numpy(value).to(kind) for name, value in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        save(values, checkpoint_id=folder)
    return SavedModel(is_plain=False)
