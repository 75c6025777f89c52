"""Buffers that follow the data, and that no merge includes, are named once: at attach, with what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.omissions import restart_warning, statistics_warning
from diloco_node.wire.learner_link import Done, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import make, net, train


def test_batch_normalisation_is_named_with_counts_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(5)))
    text = statistics_warning(model, ["0.weight"])
    assert "10 of BatchNorm1d, such as '1.running_mean'. attach(buffers=['*running_mean', '*running_var'])" in text
    assert "update_bn" in text


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    assert statistics_warning(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), []) == ""
    assert statistics_warning(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), []) == ""
    assert statistics_warning(nn.Sequential(nn.BatchNorm1d(4)), ["0.running_mean", "0.running_var"]) == ""


def test_a_merged_average_over_all_batches_is_named_for_each_start_begins_it_anew() -> None:
    names = ["1.running_mean", "1.running_var", "2.running_mean"]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4))
    text = restart_warning(model, names)
    assert "1 merged averages, such as '1.running_mean', have momentum=None" in text
    assert restart_warning(model, []) == "", "what is not merged is named by the other warning"
    assert restart_warning(nn.Sequential(nn.BatchNorm1d(4)), ["0.running_mean"]) == ""
    untracked = nn.BatchNorm1d(4, momentum=None, track_running_stats=False)
    assert restart_warning(nn.Sequential(untracked), ["0.running_mean"]) == ""


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_directions_have_no_mean(norm: object) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    norm(model[0])  # type: ignore[operator]
    text = statistics_warning(model, [])
    assert ": 2 of " in text
    assert "attach(buffers" not in text
    assert "Make them anew for the merged model" in text


def normalised() -> nn.Sequential:
    model = net()
    return nn.Sequential(model[0], nn.BatchNorm1d(8), *model[1:])


def quantised() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

        model = net()
        model.qconfig = get_default_qat_qconfig("x86")  # type: ignore[assignment]
        model = prepare_qat(model.train())
    model(torch.randn(4, 6))
    return model


@pytest.mark.no_device("quantisation is for the host")
@pytest.mark.parametrize(
    ("build", "patterns", "count"),
    [
        (normalised, ["*running_mean", "*running_var"], "2 of BatchNorm1d"),
        (quantised, ["*min_val", "*max_val"], "6 of MovingAverageMinMaxObserver"),
    ],
)
def test_what_attach_has_named_is_named_once_and_what_it_offers_merges_it(
    folder: Path, build: Callable[[], nn.Sequential], patterns: list[str], count: str
) -> None:
    model = build()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer) as diloco:
            for _ in range(4):
                train(model, optimizer, diloco, 3)
                diloco.checkpoint()
        daemon.wait_for(Done)
        (text,) = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert count in text
        assert f"attach(buffers={patterns})" in text
    model = build()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, buffers=patterns) as diloco:
            train(model, optimizer, diloco, 3)
            diloco.checkpoint()
            for fragment, theta in enumerate(daemon.theta):
                daemon.commit(fragment, theta + 0.25, -1)
            diloco.settle(0.2)
            buffers, count = dict(model.named_buffers()), 0
            for theta, fragment in zip(daemon.theta, daemon.manifest.fragments, strict=True):  # type: ignore[union-attr]
                for piece in fragment.pieces:
                    if piece.name in buffers:
                        values = diloco.global_state_dict()[piece.name].reshape(-1)
                        size = piece.value_stop - piece.value_start
                        part = torch.from_numpy(theta[piece.offset : piece.offset + size])
                        assert torch.equal(values[piece.value_start : piece.value_stop], part)
                        count += 1
            assert count >= len(patterns)
        daemon.wait_for(Done)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize("signed", [False, True])
def test_a_variance_that_falls_fast_never_becomes_negative(folder: Path, signed: bool) -> None:
    """An evaluation would have its root."""
    model = net()
    model.register_buffer("running_var", torch.tensor([4.0, 4.0, -4.0 if signed else 4.0]))
    optimizer = make(model)
    with (
        FakeDaemon(folder, fragments=1) as daemon,
        diloco_node.attach(model, optimizer, buffers=["running_var"]) as diloco,
    ):
        train(model, optimizer, diloco)
        variance = model.get_buffer("running_var")
        with torch.no_grad():
            variance.copy_(torch.tensor([0.25, 0.0625, 1.0]))
        assert daemon.manifest is not None
        (place,) = (piece for piece in daemon.manifest.fragments[0].pieces if piece.name == "running_var")
        theta = daemon.theta[0].copy()
        theta[place.offset : place.offset + 3] = [0.125, 0.5, -1.0 if signed else 3.0]
        daemon.commit(0, theta, -1)
        diloco.settle(0.3)
        assert diloco.versions == (1,)
        if signed:
            assert (variance[:2] < 0.0).all()
        else:
            assert variance[:2].tolist() == [0.125, 0.0625]
            assert 0.0 <= float(variance[2]) < 3.0


def test_a_buffer_without_a_mean_is_refused_with_what_to_do(folder: Path) -> None:
    model = normalised()
    with pytest.raises(LearnerError, match=r"num_batches_tracked' has type torch.int64.*leave it out of attach"):
        diloco_node.attach(model, make(model), buffers=["*"])


def test_observers_without_values_are_no_beginning(folder: Path) -> None:
    model = net()
    model.register_buffer("min_val", torch.tensor(float("inf")))
    with FakeDaemon(folder), pytest.raises(LearnerError, match=r"in 'min_val'.*once a batch went through"):
        diloco_node.attach(model, make(model), buffers=["min_val"])


def test_a_scripts_own_spectral_norm_with_one_vector_is_named_by_it() -> None:
    class SpectralNorm:
        name = "weight"

        def __call__(self, *_: object) -> None: ...

    layer = nn.Linear(2, 2)
    layer.register_buffer("weight_u", torch.ones(2))
    layer.register_forward_pre_hook(SpectralNorm())
    assert "1 of Linear, such as 'weight_u'" in statistics_warning(layer, [])


def test_an_optimizer_that_holds_nothing_of_the_model_is_named(folder: Path) -> None:
    model = net()
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, torch.optim.SGD(copies, lr=0.1)):
        assert "6 parameters (584 bytes) that the optimizer holds are not in the model" in daemon.wait_for(Warned).text
