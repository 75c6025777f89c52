"""The built-in trainer's optimizers: AdamW, Muon for matrices with AdamW for the rest, and AdamW with 8-bit moments.

Muon and AdamW together stand behind one optimizer, as the trainer's loop wants.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from diloco_node.errors import ConfigError
from diloco_node.learner.several_optimizers import SeveralOptimizers

KINDS: Final = ("adamw", "muon", "adamw8bit")
MUON_MOMENTUM: Final = 0.95
_NOT_FOR_MUON: Final = frozenset({"embed_tokens", "lm_head"})
"""Embedding and head of the built-in model, which has no modules of its own for them."""


def build_optimizer(
    model: nn.Module, kind: str, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """An optimizer of all trainable parameters, with weight decay on matrices only.

    Args:
        kind: one of `KINDS`.

    Raises:
        ConfigError: what it needs is not installed.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    if kind == "muon":
        return _muon(model, trained, lr=lr, weight_decay=weight_decay, betas=betas)
    groups = _groups(trained, weight_decay)
    if kind == "adamw8bit":
        made: torch.optim.Optimizer = _adamw8bit(trained)(groups, lr=lr, betas=betas)
        made.register_load_state_dict_post_hook(_in_8_bit_again)
        return made
    return _eager_adamw()(groups, lr=lr, betas=betas, fused=True)


@functools.cache
def _eager_adamw() -> type[torch.optim.AdamW]:
    """Torch's AdamW without what torch.compile wants of it: the same updates.

    Torch wraps some of its methods so that their first call imports torch._dynamo. That is a second of processor time
    at each start of a region, and nothing here compiles an optimizer.
    """
    kind = torch.optim.AdamW
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    return type(kind.__name__, (kind,), {**plain, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def _groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() <= 1]
    pairs = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": part, "weight_decay": decay} for part, decay in pairs if part]


def _muon(
    model: nn.Module, trained: Sequence[nn.Parameter], *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Muon for the matrices inside the model; embeddings, head, vectors and stacks of matrices get AdamW.

    Muon's steps are scaled to the size that AdamW's have (`match_rms_adamw`), so one learning rate serves both.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"trainer.optimizer muon needs torch 2.9 or newer, found {torch.__version__}")
    others = _embeddings(model)
    inner = [one for one in trained if one.dim() == 2 and id(one) not in others]
    rest = [one for one in trained if one.dim() != 2 or id(one) in others]
    parts: list[torch.optim.Optimizer] = []
    if inner:
        parts.append(
            torch.optim.Muon(
                inner, lr=lr, weight_decay=weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
        )
    if rest:
        parts.append(torch.optim.AdamW(_groups(rest, weight_decay), lr=lr, betas=betas, fused=True))
    return SeveralOptimizers(parts)


def _embeddings(model: nn.Module) -> set[int]:
    """Ids of the parameters of embeddings and head."""
    found = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        found |= {id(one) for one in head.parameters()}
    return found | {id(one) for name, one in model.named_parameters() if _NOT_FOR_MUON & set(name.split("."))}


def _adamw8bit(trained: Sequence[nn.Parameter]) -> Callable[..., torch.optim.Optimizer]:
    """The class: bitsandbytes' on a GPU, else torchao's, whichever is installed."""
    is_cuda = any(one.is_cuda for one in trained)
    for name in ("bitsandbytes", "torchao") if is_cuda else ("torchao",):
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(f"{name}.optim")
            made: Callable[..., torch.optim.Optimizer] = module.AdamW8bit
            return made
    wanted = "bitsandbytes or torchao" if is_cuda else "torchao (bitsandbytes' needs a GPU)"
    raise ConfigError(
        f"trainer.optimizer adamw8bit needs {wanted}, which is not installed: "
        "pip install 'diloco-node[adamw8bit]', or use adamw"
    )


def _in_8_bit_again(optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint holds torchao's moments as float32: what was loaded goes into buffers of its own kind."""
    fresh: Any = getattr(optimizer, "_new_buffer", None)
    if fresh is None:
        return
    for parameter, state in optimizer.state.items():
        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if name in state:
                state[name] = fresh(parameter, is_signed).copy_(state[name])


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups this learning rate; torchao keeps it in a tensor, which has to stay the same one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
