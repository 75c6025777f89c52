"""`attach(..., step="auto")`: the optimizer's steps are the boundaries, tokens and loss come from the model's calls."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.forward_watch import ForwardWatch, count_tokens
from diloco_node.learner.several_optimizers import parameters_of
from diloco_node.wire.learner_link import Report
from tests.kit.fake_daemon import FakeDaemon

IDS = torch.zeros(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (IDS, 15),
        ({"labels": torch.zeros(9, dtype=torch.long), "input_ids": IDS}, 15),
        (UserDict(input_ids=IDS), 15),
        ({"inputs_embeds": torch.zeros(2, 7, 16)}, 14),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)), 4),
        ([{"tokens": IDS}], 15),
        (torch.tensor(1.0), 1),
        ({}, 0),
        ("text", 0),
        ([[[[[IDS]]]]], 0),
    ],
)
def test_a_batch_counts_by_its_shapes(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


class Language(nn.Module):
    """As models of transformers: takes ids by name, returns an output with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        ids = input_ids.to(self.embedding.weight.device)
        return {"loss": self.embedding(ids).square().mean(), "logits": torch.zeros(1)}


def test_what_is_no_training_does_not_count() -> None:
    model = Language()
    watch = ForwardWatch(model)
    model(input_ids=IDS)
    model(IDS)
    tokens, loss = watch.take()
    assert tokens == 30
    assert loss is not None
    assert not loss.requires_grad
    with torch.no_grad():
        model(input_ids=IDS)
    model.eval()(input_ids=IDS)
    assert watch.take() == (0, None)
    model.train()(input_ids=IDS)
    watch.close()
    model(input_ids=IDS)
    assert watch.take()[0] == 15


class Masked(nn.Module):
    """Takes what it trains on by place, or by a name, and a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        return self.embedding(ids).sum()


def test_a_mask_that_is_given_by_name_is_no_batch() -> None:
    model, mask = Masked(), torch.ones(40, 40, dtype=torch.bool)
    watch = ForwardWatch(model)
    for given, tokens in (
        (((IDS,), {"mask": mask}), 15),
        (((mask.long(),), {"mask": None, "tokens": IDS}), 15),
        (((), {"ids": IDS, "mask": mask}), 15),
    ):
        args, kwargs = given
        model(*args, **kwargs)
        assert watch.take()[0] == tokens


def train(model: Language, optimizer: torch.optim.Optimizer, *, micro_batches: int = 1) -> float:
    """One step of a loop that knows nothing of us; the last loss."""
    for _ in range(micro_batches):
        loss = model(input_ids=IDS)["loss"]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def lack_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("for gradients")


def lose_backward(model: Language) -> None:
    """A batch whose backward pass lacks memory, as a script that goes on with a smaller one has it."""
    hook = model.embedding.weight.register_hook(lack_memory)
    with pytest.raises(torch.OutOfMemoryError):
        model(input_ids=IDS)["loss"].backward()
    hook.remove()
    model.zero_grad()


def leave_out(model: Language) -> None:
    """A batch whose loss is not finite, or a rollout."""
    model(input_ids=IDS)


@pytest.mark.parametrize("waste", [lose_backward, leave_out])
def test_tokens_of_a_step_are_those_that_were_trained(folder: Path, waste: Callable[[Language], None]) -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer, step="auto") as diloco:
        for number in range(3):
            waste(model)
            for rows in (IDS[:2], IDS[2:]):
                model(input_ids=rows)["loss"].backward()
            waste(model)
            optimizer.step()
            assert (diloco.steps, diloco.tokens) == (number + 1, 15 * (number + 1))
            optimizer.zero_grad()


@dataclass
class Output:
    parts: tuple[Tensor, ...]


@pytest.mark.parametrize(
    ("wrap", "is_seen"),
    [
        (lambda loss, _: loss, True),
        (lambda loss, weight: {"weight": weight, "none": None, "loss": loss}, True),
        (lambda loss, _: Output((loss.detach(), loss)), True),
        (lambda loss, _: lambda: loss, False),
    ],
)
def test_a_backward_pass_is_seen_from_an_output_of_any_form(wrap: Callable[..., Any], is_seen: bool) -> None:
    """Once, however often it goes through one output; where none is seen, all calls count."""

    class Wrapping(Language):
        loss: Tensor

        def forward(self, input_ids: Tensor) -> Any:
            self.loss = self.embedding(input_ids).square().mean()
            return wrap(self.loss, self.embedding.weight)

    model = Wrapping().cpu()
    watch = ForwardWatch(model)
    model(IDS)
    model(IDS)
    model.loss.backward(retain_graph=True)
    model.loss.backward()
    assert watch.take()[0] == (15 if is_seen else 30)
    model(IDS)
    assert watch.take()[0] == 15, "no backward pass was seen"
    assert not model.embedding.weight._backward_hooks
    watch.close()


class Container(torch.optim.Optimizer):
    """Optimizers as one, as torchtitan's container: with hooks of its own, and no wrapper of one."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        super().__init__([parameter for member in members for parameter in parameters_of(member)], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step(closure)


def test_the_container_of_the_optimizer_that_counts_is_none_in_its_place(folder: Path) -> None:
    model = Language()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    container = Container(first)
    with FakeDaemon(folder), diloco_node.attach(model, first, step="auto") as diloco:
        for _ in range(3):
            train(model, container)
        assert diloco.steps == 3


def test_another_optimizer_whose_steps_nobody_would_count_is_refused(folder: Path) -> None:
    model = Language()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, first, step="auto"):
        train(model, first)
        second = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            LearnerError, match=r"AdamW makes a step, and attach\(step=\"auto\"\) counts those of another"
        ):
            train(model, second)


def test_a_step_that_a_library_makes_to_have_the_states_is_none(folder: Path) -> None:
    """Distributed checkpoints make one at a rate of zero, where an optimizer has no state yet."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer, step="auto") as diloco:
        assert get_optimizer_state_dict(model, optimizer)["state"]
        assert diloco.steps == 0
        train(model, optimizer)
        assert (diloco.steps, diloco.tokens) == (1, 15)
        with pytest.raises(LearnerError, match="made a step, but the model that was attached was not called"):
            optimizer.step()


@pytest.mark.no_device("the loss comes later there: test_loss.py")
def test_each_step_of_the_optimizer_is_a_boundary(folder: Path) -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer, step="auto") as diloco:
        loss = train(model, optimizer)
        assert (diloco.steps, diloco.tokens) == (1, 15)
        # Before the next step: a slow link takes the newest report only.
        assert daemon.wait_for(Report).loss == pytest.approx(loss)
        train(model, optimizer, micro_batches=3)
        assert (diloco.steps, diloco.tokens) == (2, 60)
        with pytest.raises(LearnerError, match="do not call step"):
            diloco.step(tokens=1)
    train(model, optimizer)
    assert diloco.steps == 2, "it has left the loop"


@pytest.mark.no_device("its gradient scaler is the CPU's")
@pytest.mark.parametrize(("is_fused", "tokens"), [(False, 45), (True, 30)])
@pytest.mark.filterwarnings("ignore:DILOCO_SOCKET is not set")
def test_a_step_that_a_gradient_scaler_skips_is_none(
    is_fused: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer is called all the same, and finds out by itself. Of another nobody hears, and tokens add up."""
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    diloco = diloco_node.attach(model, optimizer, step="auto")
    counted = []
    for factor in (1.0, float("inf"), 1.0):
        before = model.embedding.weight.detach().clone()
        scaler.scale(model(input_ids=IDS)["loss"] * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counted.append((diloco.steps, not torch.equal(before, model.embedding.weight)))
    assert counted == [(1, True), (1, False), (2, True)]
    assert diloco.tokens == tokens
    diloco.close()


def test_the_loop_may_call_another_module_than_the_one_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    model, other = Language(), Language()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.warns(UserWarning, match="training alone"):
        diloco = diloco_node.attach(other, optimizer, step="auto")
    with pytest.raises(
        LearnerError, match=r"was not called in training mode: .* attach the module that the loop calls"
    ):
        train(model, optimizer)
    optimizer.param_groups[0]["lr"] = None  # as with rates that an optimizer finds itself
    with pytest.raises(
        LearnerError, match=r"was not called in training mode: .* attach the module that the loop calls"
    ):
        diloco._auto_step._stepped()  # type: ignore[union-attr]
    diloco.close()


def test_another_word_is_refused() -> None:
    with pytest.raises(LearnerError, match='give "call", or "auto"'):
        diloco_node.attach(Language(), step="sometimes")  # type: ignore[arg-type]


def test_without_an_optimizer_there_is_nothing_to_follow() -> None:
    with pytest.raises(LearnerError, match="give it one"):
        diloco_node.attach(Language(), step="auto")


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by class only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_a_wrapped_optimizer_counts_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    model = Language()
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="training alone"):
        diloco = diloco_node.attach(model, optimizer, step="auto")
    train(model, optimizer)
    assert (diloco.steps, diloco.tokens) == (1, 15)
    diloco.close()


@pytest.mark.no_device("compiled for the CPU")
@pytest.mark.filterwarnings("default")  # of dynamo
def test_steps_that_are_compiled_are_counted_and_nothing_of_a_boundary_is_compiled(folder: Path) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=note)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer, step="auto") as diloco:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            step()
        assert diloco.steps == 4
    assert len(graphs) <= 2
