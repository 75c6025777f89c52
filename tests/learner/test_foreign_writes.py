"""Writes that no optimizer made: those by data are refused or told once, a constraint is no load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.wire.learner_link import Failed, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import arrive, load, load_by_hand, make, net, train


def _triple_without_a_count(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(3)


def _triple_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def _triple_as_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 3
    nn.utils.vector_to_parameters(vector, model.parameters())


@pytest.mark.parametrize("change", [_triple_without_a_count, _triple_by_data, _triple_as_vector])
def test_weights_that_are_put_in_place_by_data_in_mid_run_are_refused(
    folder: Path, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # as model.to() does
        train(model, optimizer, diloco)
        change(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            train(model, optimizer, diloco)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_what_a_loop_writes_by_data_is_told_once_and_hidden_steps_are_not(folder: Path) -> None:
    model = net()
    optimizer = make(model, lr=0.1)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(2):
            train(model, optimizer, diloco)
            for _ in range(20):  # as a captured graph makes them: no hook tells of a step, and nothing is counted
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
                diloco.step(tokens=4)
        train(model, optimizer, diloco, 2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        for _ in range(2):
            model[1].weight.data.mul_(0.99)  # type: ignore[operator, union-attr]
            train(model, optimizer, diloco)
        text = daemon.wait_for(Warned).text
        assert text.startswith("'1.weight' was written to by something else than its optimizer")
        assert len([message for message in daemon.said if isinstance(message, Warned)]) == 1


def _shift_bias(model: nn.Module) -> None:
    model[0].bias.data.add_(0.1)  # type: ignore[index, operator, union-attr]


def _load_small_layer(model: nn.Module) -> None:
    for parameter, other in zip(model[0].parameters(), net(7)[0].parameters(), strict=True):  # type: ignore[index]
        parameter.data.copy_(other.data)


def _put_small_layer(model: nn.Module) -> None:
    for parameter, other in zip(model[0].parameters(), net(7)[0].parameters(), strict=True):  # type: ignore[index]
        parameter.data = other.data.t().contiguous().t()


def _zero_through_numpy(model: nn.Module) -> None:
    model[0].bias.detach().numpy()[:] = 0.0  # type: ignore[index, union-attr]


@pytest.mark.parametrize("moment", ["before the step", "before the boundary"])
@pytest.mark.parametrize(
    "change",
    [
        _shift_bias,
        _load_small_layer,
        _put_small_layer,
        pytest.param(_zero_through_numpy, marks=pytest.mark.no_device("NumPy sees the host's memory alone")),
    ],
)
def test_a_write_by_data_to_small_tensors_alone_is_told_by_name(
    folder: Path, change: Callable[[nn.Module], None], moment: str
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        if moment == "before the boundary":
            optimizer.step()
        change(model)
        if moment == "before the boundary":
            diloco.step(tokens=4)
        train(model, optimizer, diloco, 2)
        text = daemon.wait_for(Warned).text
        assert text.startswith(("'0.bias' was written to by something else", "'0.weight' was written to by something"))


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def _clamp_counted(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(min=0.0)


def _prune(model: nn.Module) -> None:
    weight = model[1].weight  # type: ignore[index]
    weight.data.mul_(weight.data.abs() > weight.data.abs().median())  # type: ignore[operator, union-attr]


def _limit_norms(model: nn.Module) -> None:
    weight = model[1].weight  # type: ignore[index]
    weight.data = torch.renorm(weight.data, 2, 0, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("constraint", [_clamp, _clamp_counted, _prune, _limit_norms])
def test_a_constraint_far_from_the_first_weights_is_told_and_no_load(
    folder: Path, constraint: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        for _ in range(3):
            constraint(model)
            train(model, optimizer, diloco)
        daemon.wait_for(Warned)
        assert len([message for message in daemon.said if isinstance(message, Warned)]) == 1
        load_by_hand(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            train(model, optimizer, diloco, 2)


def test_a_clamp_before_the_first_step_is_told_and_no_load(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        _clamp(model)
        train(model, optimizer, diloco, 2)
        assert "'0.weight' was written to by something else" in daemon.wait_for(Warned).text
        assert diloco.steps == 2


def test_a_climb_that_the_loop_takes_back_by_arithmetic_is_no_load(folder: Path) -> None:
    """As sharpness-aware loops make it: what is left of it is rounding, from the first step on."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            with torch.no_grad():
                ways = [0.05 * (parameter.grad + 1.0) for parameter in model.parameters()]  # type: ignore[operator]
                for sign in (1, -1):
                    for parameter, way in zip(model.parameters(), ways, strict=True):
                        parameter.add_(way, alpha=sign)
            train(model, optimizer, diloco)
        assert diloco.steps == 4
        assert not [message for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize("step", ["call", "auto"])
def test_a_loop_that_catches_all_exceptions_merges_nothing_that_was_refused(folder: Path, step: Any) -> None:
    model = net()
    optimizer = make(model)
    caught: list[str] = []
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, step=step) as diloco:
            for number in range(20):
                try:
                    if number == 5:
                        load(model)
                    optimizer.zero_grad()
                    model(torch.randn(4, 6)).square().mean().backward()
                    optimizer.step()
                    arrive(model)
                    if step == "call":
                        diloco.step(tokens=4)
                except Exception as error:  # noqa: BLE001 - as loops have it
                    caught.append(str(error))
                    assert diloco.should_stop
                    assert "this learner has failed" in diloco.stop_reason
            with pytest.raises(LearnerError, match=r"settle\(\) after an error that the loop has caught"):
                diloco.settle(0.0)
            written = diloco._checkpoints.written_step
            diloco.checkpoint()
            assert diloco._checkpoints.written_step == written, "no checkpoint holds what was refused"
            other = net()
            probe = make(other)
            other(torch.randn(4, 6)).square().mean().backward()
            before = [parameter.detach().clone() for parameter in other.parameters()]
            probe.step()  # of a model that is not the run's
            assert any(not torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
        assert "were changed between two steps" in daemon.wait_for(Failed).reason
    assert len(caught) >= 14, "it is refused again at each step"
    assert all("were changed between two steps" in text for text in caught)
    assert diloco.steps <= 6


@pytest.mark.parametrize("width", [8, 2])
def test_an_embedding_with_a_greatest_norm_is_shortened_by_its_own_forward_pass(folder: Path, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, width, max_norm=1.0), nn.Linear(width, 64), nn.Linear(64, 64))
    optimizer = make(model)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (16,))).square().mean().backward()
            optimizer.step()
            arrive(model)
            diloco.step(tokens=16)

    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        steps(3)
        daemon.commit(0, daemon.theta[0] + 0.01, -1)
        diloco.settle(0.1)
        steps(9)
        model(torch.randint(0, 50, (50,)))
        diloco.close()
        assert not [message for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize("width", [8, 512])
def test_averages_beside_an_embedding_with_a_greatest_norm_are_no_news(folder: Path, width: int) -> None:
    """Swapped in and out around an evaluation: what its forward passes shorten is no write of the loop's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, width, max_norm=0.5), nn.Linear(width, 64), nn.Linear(64, 64))
    optimizer = make(model)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (16,))).square().mean().backward()
            optimizer.step()
            arrive(model)
            diloco.step(tokens=16)
            own = {name: value.clone() for name, value in model.state_dict().items()}
            for name, value in own.items():
                averages[name].lerp_(value, 0.1)
            model.load_state_dict(averages)
            model(torch.randint(0, 50, (16,)))
            model.load_state_dict(own)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_a_load_of_an_embedding_with_a_greatest_norm_is_refused(folder: Path) -> None:
    model = nn.Sequential(nn.Embedding(200, 8, max_norm=1.0), nn.Linear(8, 8))
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        for number in range(3):
            optimizer.zero_grad()
            model(torch.arange(200)).square().mean().backward()
            if number == 2:
                with torch.no_grad():
                    model[0].weight.copy_(torch.randn(200, 8))  # type: ignore[operator]
                with pytest.raises(LearnerError, match=r"'0\.weight', and others, were changed between two steps"):
                    optimizer.step()
            else:
                optimizer.step()
                diloco.step(tokens=16)


def test_memory_without_values_is_a_load_whatever_is_in_it(folder: Path) -> None:
    """As `to_empty` leaves it: no distance from there is a number."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        model[1].weight.data = torch.full((8, 8), 1e30)
        with pytest.raises(LearnerError, match=r"'1\.weight', and others, were changed between two steps"):
            train(model, optimizer, diloco, 2)


def _normalize(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in (parameter for parameter in model.parameters() if parameter.dim() > 1):
            weight.div_(weight.norm(dim=1, keepdim=True))


def test_weights_of_length_one_are_refused_until_they_are_so_before_attach(folder: Path) -> None:
    for is_first in (False, True):
        model = net()
        if is_first:
            _normalize(model)
        optimizer = make(model)
        with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco)
            for number in range(20):
                _normalize(model)
                if not is_first:
                    with pytest.raises(LearnerError, match=r"bring them within their constraints, before attach\(\)"):
                        train(model, optimizer, diloco)
                    break
                train(model, optimizer, diloco)
                if number == 10:
                    for fragment, theta in enumerate(daemon.theta):
                        daemon.commit(fragment, theta + 1e-3, -1)
                    diloco.settle(0.1)
        if is_first:
            assert len([message for message in daemon.said if isinstance(message, Warned)]) == 1


def test_a_script_that_goes_back_by_itself_goes_on_from_the_merged_weights_when_it_does_not(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco, 40)
            for fragment, theta in enumerate(daemon.theta):
                daemon.commit(fragment, theta + 0.5, -1)
            diloco.settle(0.1)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
            with pytest.raises(LearnerError, match="the learner's next start takes the merged ones"):
                train(model, optimizer, diloco)
        optimizer = make(model := net(3))
        with diloco_node.attach(model, optimizer) as diloco:
            values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).sort().values
            merged = torch.cat([torch.from_numpy(theta) for theta in daemon.theta]).sort().values
            assert torch.equal(values.cpu(), merged)
            train(model, optimizer, diloco, 3)
