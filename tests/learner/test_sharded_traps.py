"""What goes wrong around sharding, seen from one rank of four; the process group is torch's fake one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from diloco_node.errors import LearnerError
from diloco_node.learner.attach import attach
from diloco_node.learner.checkpoint import CheckpointWriter, TrainingProgress
from diloco_node.learner.layouts.shard_map import Box, ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors, is_sharded, local_part
from diloco_node.learner.loop_state import LoopState
from diloco_node.learner.model_watch import ModelWatch
from diloco_node.learner.optimizer_parts import Kept, OptimizerParts
from diloco_node.learner.tensor_forms import check_not_replaced
from tests.kit.learner_kit import read_newest

RANKS, RANK = 4, 3


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def build() -> nn.Module:
    """On the last rank nothing of the first layer, two rows of the second."""
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 8))


def shard(model: nn.Module) -> nn.Module:
    # Here: it takes seconds to import, and each worker imports this file.
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))


def sharded() -> nn.Module:
    return shard(build())


def like(parameter: Any, local: torch.Tensor, **shape: Any) -> torch.Tensor:
    """A tensor that is cut as the parameter is, of which this rank has `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **shape)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for one in model.parameters():
        parameter: Any = one
        ones = torch.ones(parameter.to_local().shape)
        parameter.grad = like(parameter, ones, shape=parameter.shape, stride=parameter.stride())
    optimizer.step()


def shards_of(tensors: ModelTensors) -> ShardMap:
    held: list[dict[str, list[Box]]] = [{} for _ in range(RANKS)]
    for spec in tensors.specs:
        each = -(-spec.rows // RANKS)
        for rank in range(RANKS):
            low, high = min(spec.rows, rank * each), min(spec.rows, (rank + 1) * each)
            rest = spec.shape[1:]
            held[rank][spec.name] = [Box((low, *(0 for _ in rest)), (high - low, *rest))] if high > low else []
    return ShardMap(tensors.specs, held)


def read_again(kept: Kept) -> Kept:
    return Kept.from_document(
        json.loads(json.dumps(kept.document())), {name: one.clone() for name, one in kept.tensors.items()}
    )


def test_a_rank_with_empty_shards_trains_on_after_a_restart() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tensors = ModelTensors(model)
    assert tensors.boxes["0.weight"] == []
    parts = OptimizerParts(optimizer, tensors, shards_of(tensors), RANK)
    step(model, optimizer)
    kept = read_again(parts.keep())
    assert parts.missing({RANK: kept}, RANK) == {RANK}
    parts.restore([kept])
    assert all(is_sharded(state["exp_avg"]) for state in optimizer.state.values())
    step(model, optimizer)


def test_an_empty_shard_gets_its_state_where_the_rank_had_none_before() -> None:
    """As after DistributedDataParallel, where only rank 0 keeps moments."""
    whole = build()
    own = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    tensors = ModelTensors(whole)
    copies = ShardMap(tensors.specs, [tensors.boxes for _ in range(RANKS)])
    kept = {rank: read_again(OptimizerParts(own, tensors, copies, rank).keep()) for rank in range(RANKS)}

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = OptimizerParts(optimizer, ModelTensors(model), None, RANK)
    needed = parts.missing(kept, RANK)
    parts.restore([kept[RANK], *(kept[rank] for rank in sorted(needed - {RANK}))])
    step(model, optimizer)


def test_a_state_that_is_cut_in_another_shape_is_not_kept() -> None:
    """As of an optimizer that keeps a mean of each row."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    for parameter, state in optimizer.state.items():
        sharded_parameter: Any = parameter
        if parameter.dim() == 2:
            rows = sharded_parameter.to_local()[:, :1].clone()
            state["row_mean"] = like(sharded_parameter, rows, shape=(parameter.shape[0], 1), stride=(1, 1))
    with pytest.raises(LearnerError, match=r"row_mean of '0.weight' is cut over ranks and has the shape \(3, 1\)"):
        OptimizerParts(optimizer, ModelTensors(model)).keep()


def test_a_parameter_is_found_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is compared, not by the clock: 300 parameters of which two ranks keep parts."""
    looked = 0

    def common(box: Box, other: Box) -> Box | None:
        nonlocal looked
        looked += 1
        return box if box == other else None

    monkeypatch.setattr(Box, "common", common)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, 2)) for _ in range(300)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names: list[str] = []

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            names.append(self)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    parts = OptimizerParts(optimizer, ModelTensors(model))
    kept = read_again(parts.keep())
    counted = Kept(kept.tensors, kept.rest, [Counted(name) for name in kept.names], kept.boxes)
    assert parts.missing({0: counted, 1: counted}, 0) == {0, 1}
    parts.restore([counted])
    assert looked <= 2 * 300
    assert len(names) <= 10 * 300, "names compared with one another"


def test_what_has_no_name_does_not_take_the_state_of_what_has_one() -> None:
    model = nn.Linear(2, 2)
    extra = nn.Parameter(torch.zeros(7))
    first = torch.optim.AdamW([model.weight, extra])
    model.weight.grad, extra.grad = torch.ones(2, 2), torch.ones(7)
    first.step()
    kept = read_again(OptimizerParts(first, ModelTensors(model)).keep())
    other = torch.optim.AdamW([extra, model.weight])
    OptimizerParts(other, ModelTensors(model)).restore([kept])
    assert other.state[model.weight]["exp_avg"].shape == (2, 2)
    assert extra not in other.state


@pytest.mark.no_device("its mesh is of the CPU")
def test_a_model_that_an_evaluation_has_left_unsharded_is_attached_by_its_shards() -> None:
    model = sharded()
    with torch.no_grad():
        model(torch.zeros(2, 5))
    tensors = ModelTensors(model)
    assert all(is_sharded(one) for one in tensors.names)
    assert tensors.boxes["1.weight"] == [Box((6, 0), (2, 3))]


@pytest.mark.no_device("its mesh is of the CPU")
def test_a_second_model_in_parts_that_evaluates_the_merged_one_is_not_named() -> None:
    warnings: list[str] = []
    model, second = sharded(), sharded()
    watch = LoopState(ModelTensors(model), {}, warnings.append)
    for number in (1.0, 2.0, 3.0):
        merged = {name: torch.full(value.shape, number) for name, value in build().state_dict().items()}
        watch.give(merged)
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.to_local().fill_(number)  # type: ignore[attr-defined]
        watch.look()
        watch.look()
    assert warnings == []
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.to_local().fill_(9.0)  # type: ignore[attr-defined]
    for _ in range(16):
        watch.look()
    assert "outside of what attach() was given" in "".join(warnings)


def test_an_optimizer_that_was_made_before_the_model_was_sharded() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model)
    with pytest.raises(LearnerError, match="none of the model"):
        attach(model, optimizer)


def test_a_model_that_is_sharded_after_it_was_attached() -> None:
    model = build()
    tensors = ModelTensors(model)
    check_not_replaced(tensors)
    shard(model)
    with pytest.raises(LearnerError, match="sharded after attach"):
        check_not_replaced(tensors)


@pytest.mark.no_device("its mesh is of the CPU")
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_that_keeps_the_parameters_and_cuts_them_after_attach_is_named() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = build()
    watch = ModelWatch(ModelTensors(model), print)
    watch.check(has_orders=True)
    FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(LearnerError, match=r"'0\.weight' is torch\.float32 of shape \(.*\) now, at attach\(\) it was"):
        watch.check(has_orders=True)
    watch.close()


@pytest.mark.no_device("its mesh is of the CPU")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused(use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(build(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with pytest.raises(LearnerError, match="fully_shard"):
        ModelTensors(nn.Sequential(model))


def test_a_sharded_module_in_stateful_comes_back_where_the_same_part_of_it_lies(tmp_path: Path) -> None:
    average = sharded()
    kept = [local_part(one).clone() for one in average.parameters()]
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("m", 1, 3, 3, 9), None, {"average": average}, is_waiting=True)
    for one in average.parameters():
        local_part(one).zero_()
    writer.wait()
    found = read_newest(tmp_path, "m")
    assert found is not None
    again = sharded()
    found.restore(None, {"average": again}, rng=False)
    for one, values in zip(again.parameters(), kept, strict=True):
        assert torch.equal(local_part(one), values)
    wider = shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 12)))
    for other, now in ((build(), "it is not cut over ranks"), (wider, r"this rank has .* of \[12\]")):
        with pytest.raises(LearnerError, match=rf"of stateful\.average\.\S+ the part .* was kept .*, now {now}: start"):
            found.restore(None, {"average": other}, rng=False)


def test_a_sharded_average_that_a_checkpoint_keeps_is_not_named() -> None:
    model = sharded()
    average = sharded()
    average.load_state_dict(model.state_dict())
    warnings: list[str] = []
    state = LoopState(ModelTensors(model), {"average": average}, warnings.append)
    for _ in range(4):
        with torch.no_grad():
            for one in average.parameters():
                local_part(one).add_(0.0001)
        state.look()
    assert not [text for text in warnings if "copies of the parameters" in text]
