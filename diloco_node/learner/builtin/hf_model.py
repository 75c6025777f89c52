"""Models of Hugging Face's for the built-in trainer: made from a config.json, trained, and loaded again as a check.

transformers is imported when the first of them is made: `pip install 'diloco-node[hf]'`. Nothing is ever fetched, and
no code that comes with a model is run.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.hf_settings import HfModelSettings
from diloco_node.storage.model_files import StoredTensor

NAMES_SHOWN: Final = 3
_DTYPES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class HfCausalLM:
    """A model of Hugging Face's, and its loss on windows of tokens.

    Args:
        settings: which one. seed: of random weights. vocabulary: token ids of the data are below it.
        checkpoint_activations: keep no activations inside its blocks, compute them again. device: of the module.

    Attributes:
        module: what is trained; its names are those of the checkpoint. FSDP2 may cut it later.

    Raises:
        ConfigError: transformers is not installed, there is no such model, or it does not fit the data.
    """

    def __init__(
        self,
        settings: HfModelSettings,
        *,
        seed: int,
        vocabulary: int,
        checkpoint_activations: bool = False,
        device: torch.device | None = None,
    ) -> None:
        config = _config(settings)
        self.vocabulary = _check(config, settings, vocabulary)
        self.module = _made(settings, config, seed).to(device)
        self._shell = _shell(self.module)
        self.module.train()
        if checkpoint_activations:
            _checkpoint_activations(self.module)
        self._aux_factor = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token over windows of shape (B, T + 1), an integer type; a scalar.

        What the model itself adds to balance its experts is in it, where config.json has `output_router_logits`.
        """
        tokens = windows.long()
        output = self.module(input_ids=tokens[:, :-1], use_cache=False)
        loss = functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        aux = getattr(output, "aux_loss", None)
        return loss if aux is None else loss + self._aux_factor * aux

    def summed_loss(self, tokens: Tensor, parameters: Mapping[str, Tensor] | None) -> Tensor:
        """Sum of the cross-entropy over windows of shape (B, T + 1), int64, without dropout; a scalar.

        Args:
            parameters: by name, all of them, and the buffers that are saved; its own if None.
        """
        state = self.module.state_dict() if parameters is None else parameters
        # A tied tensor once, under its first name: `functional_call` ties the others to it.
        named = chain(self._shell.named_parameters(), self._shell.named_buffers())
        given = {name: state[name].to(tokens.device, one.dtype) for name, one in named if name in state}
        output = functional_call(self._shell, given, (), {"input_ids": tokens[:, :-1], "use_cache": False})
        return functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _library() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model.hf needs transformers, which is not installed: pip install 'diloco-node[hf]'")
    import transformers

    return transformers


def _errors() -> tuple[type[Exception], ...]:
    """What the library raises for a config or weights that make no model."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    own: tuple[type[Exception], ...] = (StrictDataclassError, SafetensorError)
    return (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, *own)


def _config(settings: HfModelSettings) -> Any:
    if not settings.config_file.is_file():
        raise ConfigError(f"model.hf: {settings.config_file} does not exist; name a config.json, or a folder with one")
    auto = _library().AutoConfig
    try:
        return auto.from_pretrained(str(settings.config_file), local_files_only=True)
    except _errors() as error:
        raise ConfigError(f"model.hf: {settings.config_file}: {_line(error)}") from error


def _check(config: Any, settings: HfModelSettings, vocabulary: int) -> int:
    """The model's vocabulary, if model and data fit."""
    text = config.get_text_config()
    found = int(getattr(text, "vocab_size", 0) or 0)
    if found < vocabulary:
        raise ConfigError(f"model.hf: vocab_size is {found}, the data has token ids up to {vocabulary - 1}")
    longest = getattr(text, "max_position_embeddings", None)
    if isinstance(longest, int) and settings.context > longest:
        raise ConfigError(f"model.context is {settings.context}, {settings.config_file} has {longest} positions")
    return found


def _made(settings: HfModelSettings, config: Any, seed: int) -> nn.Module:
    """In float32 on the CPU. Random weights take nothing from torch's own generator."""
    auto = _library().AutoModelForCausalLM
    try:
        if settings.init == "weights":
            module: nn.Module = auto.from_pretrained(
                str(settings.folder), config=config, dtype=torch.float32, local_files_only=True
            )
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = auto.from_config(config, dtype=torch.float32)
    except _errors() as error:
        raise ConfigError(f"model.hf: {settings.hf} makes no model: {_line(error)}") from error
    return module


def _shell(module: nn.Module) -> nn.Module:
    """The module for evaluation: no parameters, buffers of its own, and none of the hooks that come later.

    FSDP2's hooks gather parameters from all ranks. Rank 0, which evaluates alone, would wait there for ever.
    """
    bare = {id(one): nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in module.parameters()}
    return copy.deepcopy(module, bare).eval()


def _checkpoint_activations(module: Any) -> None:
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise ConfigError(f"trainer.checkpoint_activations: {type(module).__name__} has no support for it")
    if hasattr(module, "activation_checkpointing_enable"):  # the newer name of the same
        module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def unmerged_state(settings: HfModelSettings, *, seed: int, merged: Collection[str]) -> dict[str, StoredTensor]:
    """Of a model with random weights, what its run does not merge: frozen parameters and buffers, as they began.

    Args:
        merged: names of the run's tensors.

    Raises:
        ConfigError: as for `HfCausalLM`.
    """
    config = _config(settings)
    with torch.device("meta"):
        shell = _library().AutoModelForCausalLM.from_config(config)
    if not _others(shell, merged):
        return {}
    module = _made(settings, config, seed)
    state = module.state_dict()
    return {name: _stored(state[name].detach().contiguous()) for name in _others(module, merged)}


def _others(module: nn.Module, merged: Collection[str]) -> list[str]:
    """Names in the state that are neither merged nor another name of something that is."""
    named = list(module.named_parameters(remove_duplicate=False))
    tied = {id(value) for name, value in named if name in merged}
    known = {name for name, value in named if id(value) in tied}
    return sorted(set(module.state_dict()) - known - set(merged))


def _stored(value: Tensor) -> StoredTensor:
    data = value.reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(_DTYPES[value.dtype], tuple(value.shape), data)


def loaded_state(folder: Path) -> dict[str, StoredTensor]:
    """A saved model's tensors under the names of its module; empty if it does not load whole.

    Those in the files may be other ones: `save_pretrained` writes each expert by itself, and a module has them as one.
    """
    try:
        module, info = _loaded(folder)
    except _errors():
        return {}
    if any(info.values()):
        return {}
    return {name: _stored(value.detach().contiguous()) for name, value in module.state_dict().items()}


def _loaded(folder: Path) -> tuple[nn.Module, Mapping[str, Any]]:
    transformers = _library()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found: tuple[nn.Module, Mapping[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), output_loading_info=True, local_files_only=True
    )
    return found


def load_faults(folder: Path) -> list[str]:
    """Why `AutoModelForCausalLM.from_pretrained` does not give the folder's model; empty if it does."""
    try:
        _, info = _loaded(folder)
    except _errors() as error:
        return [f"{folder} does not load: {_line(error)}"]
    faults = []
    for key, what in (
        ("missing_keys", "are lacking, and would be random: give --base, a model saved by the training script"),
        ("unexpected_keys", "are of no use to this model: is it the right config.json, or --strip a prefix?"),
        ("mismatched_keys", "have another shape in this model: is it the right config.json?"),
    ):
        names = sorted(str(one[0] if isinstance(one, tuple) else one) for one in info.get(key) or ())
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            faults.append(f"{', '.join(names[:NAMES_SHOWN])}{more} {what}")
    return faults


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
