"""What an exported folder is made of: config.json, the tensors, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_node.core.merge.fragments import Manifest
from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.encoding import END_TOKENS, TOKENIZER_FILE
from diloco_node.learner.builtin.hf_settings import HfModelSettings, model_from
from diloco_node.learner.builtin.shape import ModelSettings, parameter_shapes
from diloco_node.numeric import F32
from diloco_node.state_names import TRAINER_NAME
from diloco_node.storage.model_files import CONFIG_NAME, StoredTensor, read_json

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_NAMES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        TOKENIZER_FILE,
        "tokenizer.model",
        TOKENIZER_CONFIG,
        "vocab.json",
        "vocab.txt",
    }
)
_CONSTANT_BYTES: Final = 4096
"""Of a tensor, to tell whether it is all zeros or all ones."""


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """The tensors of the export.

    Attributes:
        kept: names that are not merged, taken from the base. tied: names of the base that are left out, for they are
            tied to a merged one.
    """

    tensors: dict[str, StoredTensor]
    kept: tuple[str, ...]
    tied: tuple[str, ...]


def trained_model(folder: Path, manifest: Manifest) -> ModelSettings | HfModelSettings | None:
    """The model that the built-in trainer of a region trains; None: a script of the user's trains its own.

    Raises:
        ConfigError: the trainer's settings can't be read.
    """
    path = folder / TRAINER_NAME
    if not path.is_file():
        return None
    model = model_from(read_json(path).get("model", {}))
    if isinstance(model, ModelSettings) and {spec.name: spec.shape for spec in manifest.tensors} != parameter_shapes(
        model
    ):
        return None
    return model


def trainer_seed(folder: Path) -> int:
    """Of the built-in trainer's parameters."""
    return int(read_json(folder / TRAINER_NAME).get("seed", 0))


def trainer_tokenizer(folder: Path) -> str:
    """What the built-in trainer reads text with: a `tokenizer.json`, or a folder that has one; "": bytes."""
    return str(read_json(folder / TRAINER_NAME).get("tokenizer", ""))


def model_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises ConfigError: it is none."""
    config = read_json(path / CONFIG_NAME if path.is_dir() else path)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} has no model_type: give the config.json that save_pretrained writes")
    return config


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The same, of another type: `from_pretrained` would else round to the one it was made with."""
    rest = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    return rest | {"dtype": dtype}


def stripped(tensors: Mapping[str, F32], prefix: str) -> dict[str, F32]:
    """Without a prefix of the names. Raises ConfigError: one has it not."""
    for name in tensors:
        if not name.startswith(prefix) or name == prefix:
            raise ConfigError(f"--strip {prefix}: tensor {name} does not begin with it")
    return {name.removeprefix(prefix): values for name, values in tensors.items()}


def unjoined(merged: Mapping[str, F32], others: Mapping[str, StoredTensor], *, dtype: str) -> JoinedTensors:
    """Merged tensors, and others as they are."""
    tensors = {name: StoredTensor.of(values, dtype) for name, values in merged.items()}
    return JoinedTensors(tensors | dict(others), tuple(sorted(others)), ())


def joined(
    merged: Mapping[str, F32], base: Mapping[str, StoredTensor], *, ties_embeddings: bool, dtype: str
) -> JoinedTensors:
    """Merged tensors, and of the base what is not merged: frozen parameters and buffers.

    Args:
        ties_embeddings: config.json says so. Then a name of the base whose values there are those of a merged tensor
            is the other name of it, and would be out of date.

    Raises:
        ConfigError: a merged tensor is not in the base, or of another shape there.
    """
    tensors = {name: StoredTensor.of(values, dtype) for name, values in merged.items()}
    for name, one in tensors.items():
        if name not in base:
            raise ConfigError(f"tensor {name} of the run is not in --base{_prefix_hint(merged, base)}")
        if base[name].shape != one.shape:
            raise ConfigError(f"tensor {name} is {base[name].shape} in --base, the run's is {one.shape}")
    others = sorted(set(base) - set(merged))
    tied = {name for name in others if ties_embeddings and _is_tied(base[name], base, merged)}
    kept = {name: base[name] for name in others if name not in tied}
    return JoinedTensors(tensors | kept, tuple(kept), tuple(sorted(tied)))


def _prefix_hint(merged: Mapping[str, F32], base: Mapping[str, StoredTensor]) -> str:
    first = next(iter(merged))
    for at in (index + 1 for index, letter in enumerate(first) if letter == "."):
        if all(name.startswith(first[:at]) and name[at:] in base for name in merged):
            return f": add --strip {first[:at]}"
    return ": is it a model of the same kind, and saved under the names that the training script attached?"


def _is_tied(one: StoredTensor, base: Mapping[str, StoredTensor], merged: Mapping[str, F32]) -> bool:
    """Whether it is a matrix, not all one value, that the base has under a merged name as well."""
    if len(one.shape) < 2 or len(set(one.data[:_CONSTANT_BYTES].tobytes())) <= 4:
        return False
    return any(one.is_same(base[name]) for name in merged)


def tokenizer_files(place: Path) -> list[Path]:
    """The tokenizer's files in a folder; a file is itself. Raises ConfigError: there are none."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"--tokenizer {place} does not exist: give a folder with a tokenizer, or its tokenizer.json")
    found = sorted(path for path in place.iterdir() if path.name in TOKENIZER_NAMES and path.is_file())
    if not found:
        raise ConfigError(f"--tokenizer {place}: no tokenizer.json or another file of a tokenizer in it")
    return found


def trained_tokenizer(place: Path, context: int) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Files to write and files to copy, so that `AutoTokenizer` reads text as the built-in trainer did.

    Args:
        place: a `tokenizer.json` under any name, or a folder that has one. context: of the model.

    Raises:
        ConfigError: there is none.
    """
    file = place / TOKENIZER_FILE if place.is_dir() else place
    read = read_json(file)
    files, copies = {TOKENIZER_FILE: read}, []
    if file.name == TOKENIZER_FILE:
        files, copies = {}, tokenizer_files(file.parent)
    if TOKENIZER_CONFIG not in {path.name for path in copies}:
        # Without it the model's own class would be taken, which may cut text into words in another way.
        added = [one.get("content") for one in read.get("added_tokens") or ()]
        ends = [{"eos_token": name} for name in END_TOKENS if name in added]
        files[TOKENIZER_CONFIG] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            **(ends[0] if ends else {}),
        }
    return files, copies
