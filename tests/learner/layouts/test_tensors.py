import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diloco_node.core.merge.carry import Anchor, CarryPlan
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import LearnerError
from diloco_node.lab.sim.arithmetic import carry_over
from diloco_node.learner.layouts.names import unwrap
from diloco_node.learner.layouts.shard_map import Box, LocalFragment, ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors, memory_of
from diloco_node.learner.omissions import statistics_warning
from diloco_node.learner.pull_back import STEPS
from diloco_node.learner.revert import LOOKS_MAX, VERSIONS_REVERTED, RevertCheck
from diloco_node.learner.tensor_forms import check_not_replaced

SEED = 499


def parts(tensors: ModelTensors, fragments: int = 1) -> list[LocalFragment]:
    """The fragments, as one rank holds them that has all of the model."""
    manifest = build_manifest(tensors.specs, fragments)
    shards = ShardMap(tensors.specs, [tensors.boxes])
    return [shards.owned(fragment, 0) for fragment in manifest.fragments]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.tok.weight
        self.register_buffer("seen", torch.zeros(3))


class Layers(nn.Module):
    """Names that only look like heads or embeddings, and some that are."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"attention": nn.ModuleDict({"output": nn.Linear(2, 2)})})
        self.model = nn.ModuleDict({"embed_tokens": nn.Linear(2, 2, bias=False)})
        self.lm_head = nn.Linear(2, 3)


def rules(tensors: ModelTensors) -> dict[str, MergeRule]:
    return {spec.name: spec.merge for spec in tensors.specs}


def test_trainable_parameters_once_and_no_buffers() -> None:
    tensors = ModelTensors(Tied())
    assert rules(tensors) == {
        "tok.weight": MergeRule.AVG,  # an embedding, and tied to the head
        "inner.weight": MergeRule.RDA,
        "inner.bias": MergeRule.RDA,
    }


def test_buffers_that_train_are_merged_by_their_mean() -> None:
    model = Tied()
    model.register_buffer("router_bias", torch.arange(4.0))
    tensors = ModelTensors(model, buffers=("router_*",))
    assert rules(tensors)["router_bias"] is MergeRule.AVG
    assert "seen" not in rules(tensors)
    manifest = build_manifest(tensors.specs, 2)
    vectors = []
    for part in parts(tensors, 2):
        values = torch.empty(part.size)
        tensors.read(part, values)
        tensors.shift(part, values + 1.0, values, 1.0, torch.empty(100))
        vectors.append(values)
    assert model.router_bias.tolist() == [1.0, 2.0, 3.0, 4.0]
    full = tensors.full_state(manifest, vectors, tensors.host_state(is_whole=False, is_kept=True))
    assert full["router_bias"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert list(full) == list(model.state_dict())


def test_a_pattern_that_fits_no_buffer_is_named() -> None:
    with pytest.raises(LearnerError, match=r"'router_\*' fits no buffer.*'seen'"):
        ModelTensors(Tied(), buffers=("router_*",)).check_known(lambda own: [own])


def test_what_another_stage_of_a_pipeline_has_is_known() -> None:
    stages = [ModelTensors(model, buffers=("seen",)) for model in (Tied(), nn.Linear(2, 2))]
    said: list[bytes] = []
    for stage in stages:
        stage.check_known(lambda own: said.append(own) or [own, b"[]"])
    assert [json.loads(one) for one in said] == [[], ["buffers seen"]]
    with pytest.raises(LearnerError, match="'seen' fits no buffer"):
        stages[1].check_known(lambda own: [own, said[1]])


def test_a_buffer_that_the_loop_replaces_is_refused_for_its_old_values_would_be_merged() -> None:
    model = Tied()
    tensors = ModelTensors(model, buffers=("seen",))
    model.seen.add_(1.0)
    check_not_replaced(tensors)
    model.seen = model.seen + 1.0
    with pytest.raises(LearnerError, match=r"buffer 'seen' is another tensor.*copy_"):
        check_not_replaced(tensors)


def test_embeddings_and_heads_are_known_by_type_and_by_name() -> None:
    assert rules(ModelTensors(Layers())) == {
        "block.attention.output.weight": MergeRule.RDA,
        "block.attention.output.bias": MergeRule.RDA,
        "model.embed_tokens.weight": MergeRule.AVG,
        "lm_head.weight": MergeRule.AVG,
        "lm_head.bias": MergeRule.AVG,
    }


def test_a_rule_can_be_given() -> None:
    given = {"inner.weight": MergeRule.AVG, "lm_head.weight": MergeRule.RDA}  # the second by the tied one's other name
    assert rules(ModelTensors(Tied(), merge=given)) == {
        "tok.weight": MergeRule.RDA,
        "inner.weight": MergeRule.AVG,
        "inner.bias": MergeRule.RDA,
    }
    with pytest.raises(LearnerError, match="no parameter 'nobody'"):
        ModelTensors(Tied(), merge={"nobody": MergeRule.AVG}).check_known(lambda own: [own])


def test_a_head_that_is_said_to_be_untied_is_taken_for_no_copy() -> None:
    layers = Layers()
    assert ModelTensors(layers).marks.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert ModelTensors(layers, untied=("lm_head.weight",)).marks.keys() == {"model.embed_tokens.weight"}
    with pytest.raises(LearnerError, match="untied: the model has no parameter 'head'"):
        ModelTensors(layers, untied=("head",)).check_known(lambda own: [own])


def test_names_do_not_depend_on_torch_compile() -> None:
    model, compiled = Tied(), nn.Module()
    compiled.add_module("_orig_mod", model)  # what torch.compile wraps it in
    assert unwrap(compiled) is model
    assert ModelTensors(compiled).specs == ModelTensors(model).specs


@pytest.mark.no_device("it compares on the CPU")
@pytest.mark.parametrize("fragments", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_back(fragments: int, dtype: torch.dtype) -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    model = Tied().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = ModelTensors(model)
    manifest = build_manifest(tensors.specs, fragments)
    vectors = []
    for fragment in parts(tensors, fragments):
        vector = torch.full((fragment.size,), float("nan"))
        tensors.read(fragment, vector)
        vectors.append(vector)
        tensors.write(fragment, torch.zeros(fragment.size))
    assert not model.inner.weight.any()
    assert not model.lm_head.weight.any()
    for fragment, vector in zip(parts(tensors, fragments), vectors, strict=True):
        tensors.write(fragment, vector)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    full = tensors.full_state(manifest, vectors, tensors.host_state(is_whole=False, is_kept=True))
    assert {name: value.dtype for name, value in full.items()} == {name: value.dtype for name, value in before.items()}
    assert all(torch.equal(before[name], full[name]) for name in before)


def test_parameters_that_are_not_contiguous_and_scalars() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(12.0).view(3, 4).t())  # rows of 3, strided
    model.b = nn.Parameter(torch.tensor(5.0))
    tensors = ModelTensors(model)
    for fragment in parts(tensors, 2):
        vector = torch.empty(fragment.size)
        tensors.read(fragment, vector)
        tensors.shift(fragment, vector + 1, vector, 1.0, torch.empty(64))
    assert torch.equal(model.a, torch.arange(12.0).view(3, 4).t() + 1)
    assert model.b.item() == 6.0


@pytest.mark.no_device("the arithmetic of the host; layouts/test_device.py has the device's")
@pytest.mark.parametrize(
    "plan", [CarryPlan(Anchor.BASE, 1.0), CarryPlan(Anchor.BASE, 0.37), CarryPlan(Anchor.NONE, 0.0)]
)
@pytest.mark.parametrize("is_strided", [False, True])
def test_shift_is_bit_for_bit_the_reference(plan: CarryPlan, is_strided: bool) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    model = nn.Module()
    values = torch.from_numpy(rng.standard_normal((97, 31), np.float32))
    model.w = nn.Parameter(values.t() if is_strided else values)
    tensors = ModelTensors(model)
    fragment = parts(tensors)[0]
    theta = torch.empty(fragment.size)
    tensors.read(fragment, theta)
    new, anchor = (rng.standard_normal(fragment.size).astype(np.float32) for _ in range(2))
    reference = carry_over(plan, new=new, theta=theta.numpy(), anchor=None if plan.anchor is Anchor.NONE else anchor)
    given = None if plan.anchor is Anchor.NONE else torch.from_numpy(anchor)
    tensors.shift(fragment, torch.from_numpy(new), given, plan.carry_factor, torch.empty(0))
    tensors.read(fragment, theta)
    assert theta.numpy().tobytes() == reference.tobytes()


def test_masters_are_what_is_read_and_written_and_the_parameter_follows() -> None:
    model = nn.Linear(3, 2, bias=False).bfloat16()
    master = torch.tensor([[1.001, 2, 3], [4, 5, 6.003]])
    tensors = ModelTensors(model, masters={"weight": master})
    fragment = parts(tensors)[0]
    vector = torch.empty(6)
    tensors.read(fragment, vector)
    assert torch.equal(vector, master.view(-1))
    tensors.shift(fragment, vector + 1.0, vector, 1.0, torch.empty(6))
    assert torch.equal(master.view(-1), vector + 1.0)
    assert torch.equal(model.weight, master.bfloat16())
    held = torch.empty(6)
    tensors.held(fragment, vector, held)
    assert torch.equal(held, vector)  # not rounded: the master holds float32


@pytest.mark.parametrize("master", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3, 2)])
def test_wrong_master_is_refused(master: Tensor) -> None:
    with pytest.raises(LearnerError, match="expected float32 of shape"):
        ModelTensors(nn.Linear(3, 2), masters={"weight": master})


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.no_device("its mesh is of the CPU")
def test_a_tensor_of_a_mesh_is_known_by_its_memory_here(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for placement in (Shard(0), Replicate()):
        tensor, other = [distribute_tensor(torch.ones(4, 3), mesh, [placement]) for _ in range(2)]
        assert memory_of(tensor) == memory_of(tensor.detach()) != memory_of(other)


@pytest.mark.no_device("its mesh is of the CPU")
def test_a_dtensor_is_read_and_written_where_it_lies(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(before, mesh, [Shard(0)]))
    tensors = ModelTensors(model)
    assert tensors.boxes == {"weight": [Box((0, 0), (3, 4))], "bias": [Box((0,), (3,))]}
    (part,) = parts(tensors)
    values = torch.empty(15)
    tensors.read(part, values)
    tensors.write(part, values + 1.0)
    assert torch.equal(model.weight.full_tensor(), before + 1.0)  # type: ignore[operator]


def test_a_sum_that_was_never_made_is_refused_with_what_to_do(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Partial()]))
    with pytest.raises(LearnerError, match=r"'weight' has a Partial placement.*outside of a forward pass"):
        ModelTensors(model)


def test_old_and_wrapped_weights_are_refused_with_what_to_do() -> None:
    class FlatParameter(nn.Parameter):
        pass

    class Quantised(torch.Tensor):
        pass

    model = nn.Linear(4, 4)
    model.weight = FlatParameter(model.weight.detach())
    with pytest.raises(LearnerError, match=r"'weight' is sharded over ranks in an old way.*fully_shard"):
        ModelTensors(model)
    model.weight = nn.Parameter(model.bias.detach().as_subclass(Quantised))
    with pytest.raises(LearnerError, match=r"'weight' is a Quantised.*Freeze it"):
        ModelTensors(model)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.Sequential(torch.jit.ScriptModule()), "a TorchScript module can't be followed"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), "only float32, bfloat16 and float16"),
    ],
)
def test_parameter_that_can_not_be_merged_is_named(make: type[nn.Module], what: str) -> None:
    with pytest.raises(LearnerError, match=what):
        ModelTensors(make())


# ---- RevertCheck -----------------------------------------------------------------------------------------------------


class Checked:
    """A model of one fragment, to which versions are applied, with steps of a test's choice after them."""

    def __init__(self, size: int = 64) -> None:
        self.model = nn.Linear(size, size, bias=False)
        self.tensors = ModelTensors(self.model)
        self.fragment = parts(self.tensors)[0]
        self.check = RevertCheck(self.tensors, len(self.tensors.specs))

    def write(self, value: float | torch.Tensor) -> None:
        self.tensors.write(self.fragment, torch.zeros(self.fragment.size) + value)

    def apply(self, before: float | torch.Tensor, after: float | torch.Tensor) -> None:
        self.write(before)
        with self.check.around(self.fragment):
            self.write(after)

    def round(self, change: float, *, gradient: float | None = None) -> None:
        """A version moves each value from 0 to 1; then a step moves it by `change`."""
        self.apply(0.0, 1.0)
        self.model.weight.grad = None if gradient is None else torch.full_like(self.model.weight, gradient)
        self.write(1.0 + change)
        self.check.verify()


@pytest.mark.no_device("the verdict comes later there: layouts/test_device.py")
@pytest.mark.parametrize("gradient", [None, 0.0, -0.5])
@pytest.mark.parametrize("change", [-1.0, -1.001, -0.9])
def test_reverted_parameter_is_found_at_the_third_version(change: float, gradient: float | None) -> None:
    one = Checked()
    for _ in range(VERSIONS_REVERTED - 1):
        one.round(change, gradient=gradient)
    with pytest.raises(LearnerError, match=r"reverted 'weight'.*3 times.*masters="):
        one.round(change, gradient=gradient)


@pytest.mark.parametrize("change", [0.001, -0.3, 5.0])
def test_one_version_that_stays_ends_the_check(change: float) -> None:
    one = Checked()
    one.round(-1.0)
    one.round(change)
    for _ in range(10):
        one.round(-1.0)


def test_a_learner_at_its_optimum_is_not_called_reverted() -> None:
    """Every version takes it away from there, and one step back again, to the bit: its gradient leads there."""
    one = Checked()
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(5), device="cpu")
    optimum = ((32 * drawn).round() / 32).to(torch.get_default_device())
    optimizer = torch.optim.SGD(one.model.parameters(), lr=1.0)
    for round_ in range(10):
        one.apply(optimum.reshape(-1), optimum.reshape(-1) + 2.0 ** -(round_ % 3))
        optimizer.zero_grad()
        (0.5 * (one.model.weight - optimum).square().sum()).backward()
        optimizer.step()
        assert torch.equal(one.model.weight, optimum)
        one.check.verify()


def test_a_few_values_that_come_back_by_chance_prove_nothing() -> None:
    one = Checked(3)
    for _ in range(10):
        one.round(-1.0)


def test_values_that_the_version_left_alone_do_not_count() -> None:
    """Most of them are where they were before: no version ever took them anywhere."""
    one = Checked(8)
    before = torch.zeros(64)
    after = before.clone()
    after[:20] = 1e-3
    for _ in range(10):
        one.apply(before, after)
        one.write(after - 5e-4 * (after > 0) + 1.0 * (after == 0))
        one.check.verify()


@pytest.mark.no_device("the verdict comes later there: layouts/test_device.py")
def test_looking_ends_when_nothing_is_to_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Checked(3)
    for _ in range(LOOKS_MAX):
        one.round(-1.0)
    for _ in range(STEPS):
        one.check.verify()
    monkeypatch.setattr(one.tensors, "sample", lambda _: pytest.fail("looked again"))
    one.round(-1.0)


@pytest.mark.no_device("the verdict comes later there: layouts/test_device.py")
def test_boundary_without_an_optimizer_step_proves_nothing() -> None:
    one = Checked()
    for _ in range(VERSIONS_REVERTED - 1):
        one.round(-1.0)
    one.apply(0.0, 1.0)
    one.check.verify()
    one.check.verify()
    one.write(0.0)
    with pytest.raises(LearnerError):
        one.check.verify()


def wrapped(model: nn.Module) -> nn.Module:
    """Each block compiled, checkpointed, or both, as torchtitan does."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.first = torch.compile(model.first, backend="eager")
    model.second = checkpoint_wrapper(model.second)
    model.lm_head = torch.compile(checkpoint_wrapper(model.lm_head), backend="eager")
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.lm_head = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def test_names_and_states_are_those_without_wrappers_at_every_level() -> None:
    plain, model = Blocks(), wrapped(Blocks())
    told = {"merge": {"second._checkpoint_wrapped_module.bias": MergeRule.AVG}, "buffers": ("*.running_mean",)}
    tensors, expected = (
        ModelTensors(model, **told),
        ModelTensors(plain, merge={"second.bias": MergeRule.AVG}, buffers=told["buffers"]),
    )
    assert tensors.specs == expected.specs
    assert not tensors.unknown
    check_not_replaced(tensors)
    assert "running_mean" not in statistics_warning(tensors.model, [spec.name for spec in tensors.specs])
    own = tensors.host_state(is_whole=True, is_kept=True)
    assert list(own) == list(plain.state_dict())
    assert all(torch.equal(own[name], value.cpu()) for name, value in plain.state_dict().items())
    manifest = build_manifest(tensors.specs, 1)
    full = tensors.full_state(
        manifest, [torch.full((manifest.size,), 7.0)], tensors.host_state(is_whole=False, is_kept=True)
    )
    assert list(full) == list(plain.state_dict()), "no own weights beside the merged ones"
    assert {name for name, value in full.items() if value.eq(7.0).all()} == {spec.name for spec in tensors.specs}


class Counted(nn.Linear):
    """Gives more to its state than tensors, and its weight another name."""

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"rows": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        assert state["rows"].sum() == 2

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        state = super().state_dict(*args, **kwargs)
        return state | {"kernel": state.pop("weight"), "scale": 0.5, "parts": {"weight": self.weight.detach()}}


def test_a_state_holds_what_a_script_puts_into_it_and_no_own_weights_beside_the_merged_ones() -> None:
    tensors = ModelTensors(Counted(3, 2))
    manifest = build_manifest(tensors.specs, 1)
    remainder = tensors.host_state(is_whole=False, is_kept=True)
    full = tensors.full_state(manifest, [torch.full((manifest.size,), 7.0)], remainder)
    assert set(full) == {"weight", "bias", "_extra_state", "scale"}
    assert full["scale"] == 0.5
    assert full["weight"].eq(7.0).all()
    assert full["bias"].eq(7.0).all()
    nn.Linear.load_state_dict(model := Counted(3, 2), {name: full[name] for name in full.keys() - {"scale"}})
    assert model.weight.eq(7.0).all()


@pytest.mark.no_device("its mesh is of the CPU")
def test_a_state_is_gathered_by_all_and_stays_with_those_that_want_it(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(before, mesh, [Shard(0)]), requires_grad=False)
    gathered: list[DTensor] = []
    full_tensor = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: gathered.append(self) or full_tensor(self))
    tensors = ModelTensors(model)
    assert (tensors.host_state(is_whole=False, is_kept=False), tensors.host_state(is_whole=True, is_kept=False)) == (
        {},
        {},
    )
    assert len(gathered) == 2, "its part of each gathering"
    kept = tensors.host_state(is_whole=False, is_kept=True)["weight"]
    assert torch.equal(kept, before)
    assert kept.untyped_storage().data_ptr() != model.weight.to_local().untyped_storage().data_ptr()  # type: ignore[operator]
