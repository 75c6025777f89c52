"""The built-in trainer's AdamW: the updates of torch's own, weight decay on matrices only, and checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_node.learner.builtin.adamw import BETAS, WEIGHT_DECAY, build_adamw
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.checkpoint import Checkpoint, CheckpointWriter, TrainingProgress
from diloco_node.learner.optimizer_parts import OptimizerParts
from tests.kit.learner_kit import read_newest

pytestmark = pytest.mark.no_device("its model is made on the host; test_optimizer_parts.py has the device's")

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_adamw_makes_the_bits_of_torchs_own() -> None:
    ours, reference = ByteGPT(TINY, seed=0), ByteGPT(TINY, seed=0)
    matrices = [parameter for parameter in reference.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=BETAS, fused=True)
    pairs = zip(stepped(ours, build_adamw(ours, lr=0.01), 3), stepped(reference, plain, 3), strict=True)
    assert all(torch.equal(value, reference_value) for value, reference_value in pairs)


def test_a_checkpoint_on_disk_brings_it_back(tmp_path: Path) -> None:
    model = ByteGPT(TINY, seed=0)
    optimizer = build_adamw(model, lr=0.01)
    stepped(model, optimizer, 3)
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("digest", 1, 3, 3, 30), OptimizerParts(optimizer), {})
    writer.wait()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    later_values = stepped(model, optimizer, 2)
    second_model = ByteGPT(TINY, seed=9)
    second_model.load_state_dict(values, strict=False)
    fresh = build_adamw(second_model, lr=0.01)
    checkpoint = read_newest(tmp_path, "digest")
    assert isinstance(checkpoint, Checkpoint)
    checkpoint.restore(OptimizerParts(fresh), {}, rng=False)
    assert all(torch.equal(a, b) for a, b in zip(later_values, stepped(second_model, fresh, 2), strict=True))


def test_only_matrices_decay() -> None:
    matrices, vectors = build_adamw(ByteGPT(TINY, seed=0), lr=0.01).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (WEIGHT_DECAY, 0.0)
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
