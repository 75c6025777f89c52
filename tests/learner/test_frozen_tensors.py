"""learner/frozen_tensors.py: what `attach` tells of frozen parameters and buffers, and what of it must differ."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import diloco_node
from diloco_node.learner import frozen_tensors
from diloco_node.learner.frozen_tensors import _figures
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.wire.frozen_listing import frozen_difference
from tests.kit.fake_daemon import FakeDaemon

REGIONS = ("eu", "us")


class Adapted(nn.Module):
    """A frozen base with a trained adapter, buffers, and layers whose buffers run."""

    position_ids: Tensor

    def __init__(self, seed: int = 0, theta: float = 10_000.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 32).requires_grad_(False)
        self.embed = nn.Embedding(500, 64).requires_grad_(False)
        self.adapter = nn.Linear(64, 4, bias=False)
        self.norm = nn.BatchNorm1d(32)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(6, 5))
        self.register_buffer("inv_freq", theta ** -(torch.arange(16) / 16), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("position_ids", torch.arange(16))
        self.register_buffer("scale", torch.tensor(2.0))


@torch.no_grad()
def changed(change: Callable[[Adapted], object] = lambda _: None, seed: int = 0) -> Adapted:
    model = Adapted(seed)
    change(model)
    return model


def listing_of(folder: Path, model: nn.Module) -> bytes:
    with FakeDaemon(folder) as daemon:
        diloco_node.attach(model, checkpoint_every_s=0).close()
        return daemon.wait_attached().listing


def difference(folder: Path, here: nn.Module, there: nn.Module) -> str:
    return frozen_difference(listing_of(folder, here), listing_of(folder, there), REGIONS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.base.weight.normal_(), "1 hold other values (base.weight)"),
        (lambda model: model.base.weight.copy_(model.base.weight.flip(0)), "1 hold other values (base.weight)"),
        (lambda model: model.base.weight.mul_(1.001), "1 hold other values (base.weight)"),
        (lambda model: model.base.bias.neg_(), "1 hold other values (base.bias)"),
        (lambda model: model.embed.weight[-3:].normal_(), "1 hold other values (embed.weight)"),  # new words
        (lambda model: model.embed.weight[[7, 9]].copy_(model.embed.weight[[9, 7]]), ""),  # a copy: nothing changed
        (lambda model: model.scale.fill_(3.0), "1 hold other values (scale)"),
        (lambda model: model.inv_freq.copy_(5e5 ** -(torch.arange(16) / 16)), "1 hold other values (inv_freq)"),
        (lambda model: model.base.to(torch.bfloat16), "2 are of another type (base.weight (bfloat16 here, float32"),
        (lambda model: setattr(model, "embed", nn.Embedding(501, 64).requires_grad_(False)), "1 have another shape"),
    ],
)
def test_a_base_that_differs_is_named(folder: Path, change: Callable[[Adapted], object], words: str) -> None:
    text = difference(folder, changed(change), Adapted())
    assert words in text
    assert bool(text) is bool(words)
    assert text.count(" hold other values") <= 1


@torch.no_grad()
def test_what_runs_counts_or_was_drawn_in_a_region_is_no_news(folder: Path) -> None:
    model = Adapted()
    for _ in range(3):
        model.norm(torch.randn(8, 32) * 3 + 1)
        model.spectral(torch.randn(2, 6))
        model.old_spectral(torch.randn(2, 6))
    model.position_ids.add_(5)
    model.adapter.weight.normal_()
    assert difference(folder, model, Adapted()) == ""


def test_all_that_is_trained_or_has_no_values_is_left_out(folder: Path) -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, device="meta").requires_grad_(False))
        models.append(model)
    assert difference(folder, *models) == ""


def test_an_observer_is_left_out(folder: Path) -> None:
    class Scheme(nn.Module):
        def __init__(self, seen: float) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.observer = torch.ao.quantization.MinMaxObserver()
            self.observer(torch.full((3,), seen))

    assert difference(folder, Scheme(1.0), Scheme(9.0)) == ""


def test_a_tensor_that_ranks_share_has_the_figures_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_tensors, "CHUNK_VALUES", 64)  # several chunks
    torch.manual_seed(3)
    for shape in ((40,), (23, 9), (12, 7, 3)):
        whole = torch.randn(shape)
        expected = _figures(whole, (0,) * len(shape))
        assert expected[1] == pytest.approx(float(whole.double().square().sum()), rel=1e-5)
        by_rows = [_figures(whole[a:b], (a, *(0,) * (len(shape) - 1))) for a, b in ((0, 5), (5, 11), (11, shape[0]))]
        assert [sum(column) for column in zip(*by_rows, strict=True)] == pytest.approx(expected, rel=1e-4)
        if len(shape) > 1:
            tail = (0,) * (len(shape) - 2)
            halves = [_figures(whole[:, :4], (0, 0, *tail)), _figures(whole[:, 4:], (0, 4, *tail))]
            assert [sum(column) for column in zip(*halves, strict=True)] == pytest.approx(expected, rel=1e-4)
    square = torch.randn(16, 16)
    assert _figures(square, (0, 0))[0] != pytest.approx(_figures(square.T, (0, 0))[0], rel=1e-3)
    projection, square_length = _figures(torch.tensor(-3.0), ())
    assert (abs(projection), square_length) == (3.0, 9.0)


def test_a_type_that_nobody_knows_is_not_compared(folder: Path) -> None:
    class Packed(torch.Tensor):
        pass

    model, other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(torch.randn(2, 3).as_subclass(Packed), requires_grad=False)
    model[1].bias.requires_grad_(False)
    other[1].requires_grad_(False)
    assert difference(folder, model, other) == ""


def test_a_frozen_weight_that_is_somewhere_else_has_no_values_in_a_state() -> None:
    """As where a library holds the base on a disk between two forward passes."""
    model = nn.Sequential(nn.Linear(2, 2, device="meta").requires_grad_(False), nn.Linear(2, 2))
    state = ModelTensors(model).host_state(is_whole=False, is_kept=True)
    assert {name: value.is_meta for name, value in state.items()} == {"0.weight": True, "0.bias": True}
