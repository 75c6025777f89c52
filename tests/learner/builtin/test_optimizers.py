"""Which parameters get which optimizer, and that several behave as one: rates, checkpoints, refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import optimizers as module
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.optimizers import SeveralOptimizers, build_optimizer, set_rate
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.checkpoint import Checkpoint, CheckpointWriter, TrainingProgress, read_newest
from diloco_node.learner.optimizer_parts import OptimizerParts

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)
WIDE = ModelSettings(layers=1, dim=64, heads=2, context=16)
BETAS = (0.9, 0.99)


def made(model: nn.Module, kind: str = "muon") -> torch.optim.Optimizer:
    return build_optimizer(model, kind, lr=0.01, weight_decay=0.3, betas=BETAS)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for one in model.parameters():
            one.grad = torch.randn(one.shape, generator=generator)
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def test_muon_gets_the_matrices_inside_and_adamw_the_rest() -> None:
    model = ByteGPT(TINY, seed=0)
    optimizer = made(model)
    assert isinstance(optimizer, SeveralOptimizers)
    names = {id(one): name for name, one in model.named_parameters()}
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    inner = {names[id(one)] for group in muon.param_groups for one in group["params"]}
    assert inner == {name for name in names.values() if "_proj" in name}
    matrices, vectors = ({names[id(one)] for one in group["params"]} for group in adamw.param_groups)
    assert matrices == {"model.embed_tokens.weight", "lm_head.weight"}
    assert vectors == {name for name in names.values() if "norm" in name}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]


def test_adamw_makes_the_bits_of_torchs_own() -> None:
    ours, theirs = ByteGPT(TINY, seed=0), ByteGPT(TINY, seed=0)
    own = torch.optim.AdamW(module._groups([*theirs.parameters()], 0.3), lr=0.01, betas=BETAS, fused=True)
    pairs = zip(stepped(ours, made(ours, "adamw"), 3), stepped(theirs, own, 3), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_embeddings_that_are_modules_and_tied_heads_are_not_for_muon() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.inner = nn.Linear(4, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.words.weight
            self.stack = nn.Parameter(torch.ones(2, 4, 4))
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

    model = Tied()
    optimizer = made(model)
    assert isinstance(optimizer, SeveralOptimizers)
    (inner,) = optimizer.parts[0].param_groups
    assert [id(one) for one in inner["params"]] == [id(model.inner.weight)]
    everything = [id(one) for group in optimizer.param_groups for one in group["params"]]
    assert sorted(everything) == sorted(id(one) for one in model.parameters() if one.requires_grad)


def test_a_rate_that_is_set_on_all_groups_is_used_by_each() -> None:
    model = ByteGPT(TINY, seed=0)
    optimizer = made(model)
    before = [one.detach().clone() for one in model.parameters()]
    set_rate(optimizer, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, stepped(model, optimizer, 2), strict=True))
    set_rate(optimizer, 0.01)
    assert not any(torch.equal(a, b) for a, b in zip(before, stepped(model, optimizer, 1), strict=True))


needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: adamw8bit is NOT tested (pip install 'diloco-node[adamw8bit]')",
)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_on_disk_brings_it_back(kind: str, tmp_path: Path) -> None:
    model = ByteGPT(TINY, seed=0)
    optimizer = made(model, kind)
    stepped(model, optimizer, 3)
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("digest", 1, 3, 3, 30), OptimizerParts(optimizer), {})
    writer.wait()
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    expected = stepped(model, optimizer, 2)
    other = ByteGPT(TINY, seed=9)
    other.load_state_dict(values, strict=False)
    fresh = made(other, kind)
    found = read_newest(tmp_path, "digest")
    assert isinstance(found, Checkpoint)
    found.restore(OptimizerParts(fresh), {}, rng=False)
    set_rate(fresh, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(expected, stepped(other, fresh, 2), strict=True))


@needs_torchao
@pytest.mark.filterwarnings("ignore::Warning")
def test_8_bit_moments_come_back_as_8_bit_moments(tmp_path: Path) -> None:
    """Of 4096 values on: torchao keeps smaller tensors as they are."""
    model = ByteGPT(WIDE, seed=0)
    optimizer = made(model, "adamw8bit")
    before = [one.detach().clone() for one in model.parameters()]
    stepped(model, optimizer, 3)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    moments = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].numel() >= 4096]
    assert moments
    assert all(type(one) is not torch.Tensor for one in moments)
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("digest", 1, 3, 3, 30), OptimizerParts(optimizer), {})
    writer.wait()
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    other = ByteGPT(WIDE, seed=9)
    other.load_state_dict(values, strict=False)
    fresh = made(other, "adamw8bit")
    found = read_newest(tmp_path, "digest")
    assert isinstance(found, Checkpoint)
    found.restore(OptimizerParts(fresh), {}, rng=False)
    again = [state["exp_avg"] for state in fresh.state.values() if state["exp_avg"].numel() >= 4096]
    assert [type(one) for one in again] == [type(one) for one in moments]
    for one, two in zip(map(plain_values, moments), map(plain_values, again), strict=True):
        # torchao makes 8 bits of what it made of 8 bits with an error of one step of its scale.
        assert torch.allclose(one, two, rtol=0.0, atol=float(one.abs().max()) / 100)
    for one, two in zip(stepped(model, optimizer, 2), stepped(other, fresh, 2), strict=True):
        assert torch.allclose(one, two, atol=0.1 * 0.01), "two steps of at most 0.01 each"


def plain_values(moments: torch.Tensor) -> torch.Tensor:
    return torch.zeros(moments.shape).copy_(moments)


def test_a_state_of_another_optimizer_is_refused() -> None:
    plain = made(ByteGPT(TINY, seed=0), "adamw")
    with pytest.raises(ValueError, match="2 groups of parameters, here there are 3"):
        made(ByteGPT(TINY, seed=0)).load_state_dict(plain.state_dict())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="adamw8bit needs torchao"):
        made(ByteGPT(TINY, seed=0), "adamw8bit")
    monkeypatch.delattr(module.torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"needs torch 2\.9"):
        made(ByteGPT(TINY, seed=0))


def test_a_rate_that_is_kept_in_a_tensor_stays_in_it() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    kept = optimizer.param_groups[0]["lr"]
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == 0.25
