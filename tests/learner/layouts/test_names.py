"""Names of parameters are those without wrappers, whatever is wrapped in what: regions may compile as they like."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import replicas_in, unwrap
from diloco_node.learner.layouts.tensors import ModelTensors


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class Block(nn.Module):
    """`module` is a name of its own, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.lora = weight_norm(nn.Linear(4, 4))


class Nested(nn.Module):
    """Lists in lists, a tied pair, a weight-norm and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.embed = nn.Embedding(5, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def in_the_middle(model: Nested) -> nn.Module:
    model.stages[1] = compiled(model.stages[1])
    model.stages[0][1] = compiled(model.stages[0][1])
    return model


def in_each_other(model: Nested) -> nn.Module:
    block = model.stages[0][0]
    block.norm, block.lora = checkpoint_wrapper(compiled(block.norm)), compiled(block.lora)
    model.stages[0][0] = compiled(checkpoint_wrapper(block))
    return compiled(model)


def at_the_ends(model: Nested) -> nn.Module:
    model.embed, model.lm_head = compiled(model.embed), checkpoint_wrapper(model.lm_head)
    return model


def replicas_inside(model: Nested) -> nn.Module:
    """As where a part of the model alone is given to DistributedDataParallel, below another wrapper."""
    model.stages[1] = DistributedDataParallel(model.stages[1])
    model.stages[0][0] = compiled(DistributedDataParallel(model.stages[0][0]))
    model.stages[0][1].module = nn.DataParallel(model.stages[0][1].module)
    return compiled(model)


def replicas_in_shards(model: Nested) -> nn.Module:
    """DistributedDataParallel inside FSDP2, each block sharded by itself as torchtitan does."""
    from torch.distributed.fsdp import fully_shard

    model.stages[1] = DistributedDataParallel(model.stages[1])
    for block in model.stages[0]:
        fully_shard(block)
    return compiled(model)


def in_fabric(model: Nested) -> nn.Module:
    """Lightning's Fabric holds what it is given twice."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model.stages[0] = fabric.setup(DistributedDataParallel(model.stages[0]))
    model.stages[1][0] = fabric.setup(compiled(model.stages[1][0]))
    return fabric.setup(compiled(model))


def in_stubs(model: Nested) -> nn.Module:
    """As eager quantisation wraps what it is to convert; the stubs hold nothing."""
    from torch.ao.quantization import QuantWrapper

    model.stages[0][1] = checkpoint_wrapper(QuantWrapper(model.stages[0][1]))
    model.stages[1] = QuantWrapper(compiled(model.stages[1]))
    return QuantWrapper(model)


@pytest.fixture
def _ranks() -> Iterator[None]:
    """One of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.no_device("its ranks are of the CPU")
@pytest.mark.usefixtures("_ranks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "wrap", [in_the_middle, in_each_other, at_the_ends, replicas_inside, replicas_in_shards, in_fabric, in_stubs]
)
def test_specs_and_states_are_those_of_the_model_without_wrappers(wrap: Callable[[Nested], nn.Module]) -> None:
    plain, model = Nested(), wrap(Nested())
    raw_names = {name for name, _ in model.named_parameters()}
    tensors, expected = (
        ModelTensors(model, buffers=("*.running_mean",)),
        ModelTensors(plain, buffers=("*.running_mean",)),
    )
    assert raw_names != {name for name, _ in plain.named_parameters()}, "there is something to leave out"
    assert tensors.specs == expected.specs
    assert {spec.name for spec in tensors.specs} >= {
        "stages.1.0.module.weight",
        "stages.0.0.lora.parametrizations.weight.original1",
        "stages.0.0.norm.running_mean",
    }
    assert sorted(tensors.host_state(is_whole=True, is_kept=True)) == sorted(plain.state_dict())
    manifest = build_manifest(tensors.specs, 2)
    vectors = [torch.full((fragment.size,), 7.0) for fragment in manifest.fragments]
    full = tensors.full_state(manifest, vectors, tensors.host_state(is_whole=False, is_kept=True))
    second = Nested()
    second.load_state_dict(full)
    assert all(
        bool(second.get_parameter(name).eq(7.0).all())
        for name, value in plain.named_parameters()
        if value.requires_grad
    )
    assert torch.equal(second.frozen, plain.frozen)


@pytest.mark.no_device("its ranks are of the CPU")
@pytest.mark.usefixtures("_ranks")
def test_masters_and_rules_may_have_the_names_of_either_model() -> None:
    model = replicas_inside(Nested())
    raw = next(name for name, _ in model.named_parameters() if name.endswith("stages.1.module.0.module.bias"))
    master = torch.full((4,), 2.0)
    for name in (raw.removeprefix("_orig_mod."), "stages.1.0.module.bias"):
        tensors = ModelTensors(model, masters={name: master})
        assert not tensors.unknown
        assert tensors.names[master] == "stages.1.0.module.bias"


@pytest.mark.no_device("torch.nn.DataParallel asks for properties of real ones")
def test_a_module_of_that_name_is_no_wrapper() -> None:
    model = Nested()
    assert replicas_in(model) == ()
    assert unwrap(nn.DataParallel(compiled(model))) is model
    assert "stages.0.0.module.weight" in {spec.name for spec in ModelTensors(model).specs}


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_block_that_stands_beside_its_compiled_form_is_merged_as_ever(*, is_listed: bool) -> None:
    """It has two names and one owner: nothing is tied."""
    plain, model = Nested(), Nested()
    model.fast = compiled(model.stages[1][0])
    if is_listed:
        model.all = nn.ModuleList([model.stages[0], model.stages[1][1]])
    assert ModelTensors(model).specs == ModelTensors(plain).specs
    model.lora = nn.Linear(4, 4)
    model.lora.weight = model.stages[0][0].module.weight
    (spec,) = [spec for spec in ModelTensors(model).specs if spec.name == "stages.0.0.module.weight"]
    assert spec.merge is MergeRule.AVG, "and that is tied"


def test_two_parameters_of_one_name_are_refused() -> None:
    model = nn.Sequential(DistributedLike(nn.Linear(4, 4)))
    model[0].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(LearnerError, match=r"two parameters are called '0\.weight' .* one of them '0\.module\.weight'"):
        ModelTensors(model)


class DistributedLike(nn.DataParallel):
    """A wrapper with a layer of its own beside the module."""

    def __init__(self, module: nn.Module) -> None:
        super(nn.DataParallel, self).__init__()
        self.module = module
