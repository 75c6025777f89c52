"""Whose parameters a run begins with: told before the first step, with both norms."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.codec.digest import fragment_digest
from diloco_node.errors import LearnerError
from diloco_node.wire.learner_link import Failed, Warned
from tests.kit.fake_daemon import FakeDaemon


def net(seed: int = 0, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    return model


def norm(model: nn.Module) -> float:
    return float(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm())


def first_of(folder: Path, model: nn.Module) -> list[np.ndarray]:
    """Theta_0 of a run whose first learner has this model."""
    with FakeDaemon(folder) as daemon, diloco_node.attach(model):
        assert not [message for message in daemon.said if isinstance(message, Warned)], "its own are the run's"
        return [theta.copy() for theta in daemon.theta]


def warnings_of(folder: Path, model: nn.Module, theta: list[np.ndarray], version: int = 0) -> list[str]:
    with FakeDaemon(folder, theta=theta, versions=[version, version]) as daemon:
        diloco_node.attach(model, checkpoint_every_s=0).close()
        daemon.wait_detached()
        return [message.text for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize(
    "other",
    [
        lambda: net(7),  # another seed
        lambda: net(0, scale=4.0),  # trained weights: in the run there are random ones
        lambda: net(0, scale=0.0),
        lambda: net(7).to(torch.bfloat16),
    ],
)
def test_a_region_whose_script_begins_elsewhere_is_told_both_norms(
    folder: Path, other: Callable[[], nn.Module]
) -> None:
    run, own = net(), other()
    run_norm, own_norm = norm(run), norm(own)
    (text,) = warnings_of(folder, own, first_of(folder, run))
    assert f"the norm of all is {run_norm:.3g}"[:-1] in text
    assert f"here it was {own_norm:.3g}"[:-1] in text
    assert "run.init" in text


class Deep(nn.Module):
    """Forty norms of ones and a small head: nearly all of its length is in the norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(40))
        self.head = nn.Linear(16, 4)
        nn.init.normal_(self.head.weight, std=0.02)


@torch.no_grad()
def _changed(change: Callable[[Deep], object]) -> Deep:
    model = Deep()
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: nn.init.normal_(model.head.weight, std=0.02), "head.weight"),
        (lambda model: model.head.weight.neg_(), "head.weight"),  # of the same norm
        (lambda model: model.head.weight.copy_(model.head.weight.flip(0)), "head.weight"),  # classes in another order
        (lambda model: model.head.bias.zero_(), "head.bias"),
        (lambda model: model.norms[7].bias.fill_(1e-4), "norms.7.bias"),  # zero in the run
        (lambda model: model.norms[3].weight.mul_(1.01), "norms.3.weight"),
    ],
)
def test_one_small_tensor_that_begins_elsewhere_is_named(
    folder: Path, change: Callable[[Deep], object], name: str
) -> None:
    (text,) = warnings_of(folder, _changed(change), first_of(folder, Deep()))
    assert f"other parameters than this script's, in {name!r}: the norm" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.head.weight.mul_(1 + 1e-5),  # another library's rounding
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to(torch.float16),
    ],
)
def test_rounding_of_a_small_tensor_is_no_news(folder: Path, change: Callable[[Deep], object]) -> None:
    assert warnings_of(folder, _changed(change), first_of(folder, Deep())) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_parameters_are_no_news(folder: Path, dtype: torch.dtype) -> None:
    theta = first_of(folder, net())
    assert warnings_of(folder, net().to(dtype), theta) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_were_never_drawn_are_told(folder: Path, value: float) -> None:
    """As `to_empty` leaves them."""
    own = net()
    with torch.no_grad():
        own.get_parameter("1.weight")[0, 3] = value
    (text,) = warnings_of(folder, own, first_of(folder, net()))
    assert f"in '1.weight': the norm of all is {norm(net()):.4g}, here it was {value:.4g}" in text


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3e38])
def test_no_run_begins_with_parameters_that_were_never_drawn(folder: Path, value: float) -> None:
    own = net()
    with torch.no_grad():
        own.get_parameter("0.weight")[4, 5] = own.get_parameter("1.bias")[1] = value
    with FakeDaemon(folder) as daemon:
        with pytest.raises(LearnerError, match=r"NaN, infinite or huge values are in '0\.weight', '1\.bias': load"):
            diloco_node.attach(own)
        assert daemon.wait_for(Failed).reason.startswith("LearnerError: the run would begin with this model")
        assert daemon.theta == []
        with diloco_node.attach(net()):
            assert daemon.theta


def digests_of(theta: list[np.ndarray]) -> tuple[bytes, ...]:
    return tuple(fragment_digest(part, np.zeros_like(part)) for part in theta)


@pytest.mark.parametrize(("changes", "named"), [((), ()), (("1.bias",), ("1.bias",)), (None, ("0.weight", "1.bias"))])
def test_a_region_that_joins_later_is_told_which_tensors_began_elsewhere(
    folder: Path, changes: tuple[str, ...] | None, named: tuple[str, ...]
) -> None:
    theta = first_of(folder, net())
    own = net() if changes is not None else net(7)
    with torch.no_grad():
        for name in changes or ():
            own.get_parameter(name).add_(0.01)
    later = [part + 1 for part in theta]
    with FakeDaemon(folder, theta=later, versions=[3, 3], fragment_digests=digests_of(theta)) as daemon:
        diloco_node.attach(own, checkpoint_every_s=0).close()
        daemon.wait_detached()
        assert daemon.manifest is not None
        names = [{piece.name for piece in fragment.pieces} for fragment in daemon.manifest.fragments]
        texts = [message.text for message in daemon.said if isinstance(message, Warned)]
    assert len(texts) == bool(named)
    for text in texts:
        told = {piece for pieces in names for piece in pieces if repr(piece) in text}
        assert told >= set(named)
        if changes:
            assert told == next(pieces for pieces in names if pieces >= set(named)), "the others are equal"
        assert "This region goes on from the run's" in text


def test_a_run_that_is_further_is_no_news(folder: Path) -> None:
    assert warnings_of(folder, net(7), first_of(folder, net()), version=3) == []


@pytest.mark.parametrize("version", [0, 3])
def test_a_model_that_is_attached_again_begins_with_what_it_has_trained(folder: Path, version: int) -> None:
    model = net()
    theta = first_of(folder, model)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    digests = tuple(fragment_digest(part, np.zeros_like(part)) for part in theta)
    with FakeDaemon(folder, theta=theta, versions=[version] * 2, fragment_digests=digests) as daemon:
        diloco_node.attach(model, checkpoint_every_s=0).close()
        daemon.wait_detached()
        assert not [message for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize("is_in_run", [True, False])
def test_tensors_of_a_model_may_be_swapped_as_where_dtensors_go_to_another_device(
    folder: Path, is_in_run: bool, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = net()
    with FakeDaemon(folder), diloco_node.attach(model):
        if is_in_run:
            model.double()
            model.float()
    model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
