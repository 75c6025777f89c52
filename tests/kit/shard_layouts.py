"""One model, and the ways that PyTorch has to cut it over ranks."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.kit.fakecuda import fake_device

TRAINED_BUFFER: Final = "experts.load"

STAGES: Final = (("embed_tokens", "lm_head"), ("up", "experts"), ("down",), ("small", "frozen"))


def build() -> Any:
    """Uneven and empty shards, a tied and a frozen weight, three experts, buffers of which one trains."""
    import torch
    from torch import nn

    model = nn.Module()
    model.embed_tokens = nn.Embedding(11, 6)
    model.up = nn.Linear(6, 42)
    model.down = nn.Linear(42, 6, bias=False)
    model.small = nn.Linear(5, 3)
    model.frozen = nn.Linear(6, 6).requires_grad_(False)
    model.lm_head = nn.Linear(6, 11, bias=False)
    model.lm_head.weight = model.embed_tokens.weight
    model.experts = nn.Module()
    model.experts.weight = nn.Parameter(torch.randn(3, 4, 5))
    model.experts.register_buffer("load", torch.zeros(3))
    model.register_buffer("seen", torch.zeros(3))
    return model


def cut(layout: str) -> tuple[Any, dict[str, Any]]:
    """The model in one of these ways, and the masters of its parameters."""
    model = build().to("cpu" if layout.startswith("whole") else _device_type())
    if layout.endswith("masters"):
        model = model.bfloat16()
    model = _WAYS[layout](model)
    masters = {}
    if layout.endswith("masters"):
        masters = {name: one.detach().float() for name, one in model.named_parameters() if one.requires_grad}
    return model, masters


def _mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(_device_type(), sizes, mesh_dim_names=names)


def _device_type() -> str:
    return "cuda" if fake_device.is_installed() else "cpu"


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def _fully_sharded(model: Any, mesh: Any, **policy: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in (model.up, model.down, model.small, model):
        fully_shard(part, mesh=mesh, **policy)
    return model


def _ddp(model: Any) -> Any:
    import torch

    model.forward = lambda: None
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp(model: Any) -> Any:
    return _fully_sharded(model, _mesh(_world()))


def _offload(model: Any) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fully_sharded(model, _mesh(_world()), offload_policy=CPUOffloadPolicy(pin_memory=False))


def _hsdp(model: Any) -> Any:
    return _fully_sharded(model, _mesh(2, _world() // 2, names=("replicate", "shard")))


def _parallel(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "lm_head": ColwiseParallel()}
    parallelize_module(model, mesh, {**plan, "embed_tokens": RowwiseParallel()})
    model.lm_head.weight = model.embed_tokens.weight  # parallelize_module has untied them
    return model


def _tp(model: Any) -> Any:
    return _parallel(model, _mesh(_world()))


def _fsdp_tp(model: Any) -> Any:
    mesh = _mesh(_world() // 2, 2, names=("dp", "tp"))
    return _fully_sharded(_parallel(model, mesh["tp"]), mesh["dp"])


def _experts(model: Any, *, is_cut_again: bool = False) -> Any:
    """Experts on a mesh of their own, two ranks wide; the rest on all ranks."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh(_world() // 2, 2, names=("dp", "ep"))
    held = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(held)
    if is_cut_again:  # as torchtitan does
        fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
        return _fully_sharded(model, _mesh(_world()))
    return _fully_sharded(model, _mesh(_world()), ignored_params={model.experts.weight})


def _fsdp_experts(model: Any) -> Any:
    return _experts(model, is_cut_again=True)


def _tied_stages(model: Any) -> Any:
    return _pipeline(model, [["embed_tokens"], ["up", "experts"], ["down"], ["lm_head"]])


def _frozen_stage(model: Any) -> Any:
    """The first rank has nothing that trains."""
    return _pipeline(model, [["frozen"], ["embed_tokens", "lm_head", "up", "experts", "down", "small"]])


def _pipeline(model: Any, stages: Sequence[Sequence[str]] = STAGES) -> Any:
    import torch.distributed as dist

    own = [name for at in range(dist.get_rank(), len(stages), _world()) for name in stages[at]]
    for name, _ in list(model.named_children()):
        if name not in own:
            del model._modules[name]
    return model


_WAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "whole": lambda model: model,
    "whole-masters": lambda model: model,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "fsdp-masters": _fsdp,
    "offload": _offload,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp-tp": _fsdp_tp,
    "experts": _experts,
    "fsdp-experts": _fsdp_experts,
    "pipeline": _pipeline,
    "tied stages": _tied_stages,
    "frozen stage": _frozen_stage,
}
