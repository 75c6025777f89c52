"""A fifth of each merge that is taken back is found within ten merges; ordinary training is not called that."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.pull_back import VERSIONS, VERSIONS_MAX, PullBackCheck, StepAfter, fault_of, judge_version
from diloco_node.learner.revert import RevertCheck
from tests.learner.layouts.test_tensors import parts

SIZE = 24
Step = Callable[[], None]


class Training:
    """A least-squares model of one region among others: versions move it towards another region's data."""

    def __init__(self, make: Callable[[nn.Module], Step], *, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Linear(SIZE, SIZE, bias=False)
        self.goals = [self.draw(SIZE, SIZE) for _ in range(2)]
        self.tensors = ModelTensors(self.model)
        self.fragment = parts(self.tensors)[0]
        self.check = RevertCheck(self.tensors, len(self.tensors.specs))
        self.step = make(self.model)
        self.warning = ""

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device="cpu").to(torch.get_default_device())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            rows = self.draw(8, SIZE)
            self.model.weight.grad = None
            (self.model(rows) - rows @ self.goals[0]).square().mean().backward()
            self.step()
            if self.model.weight.is_cuda:
                torch.cuda.synchronize()  # the numbers of the boundary before have come
            self.check.verify()
            self.warning = self.warning or self.check.take_warning()

    def merge(self, way: float) -> None:
        """A version half the way between this region and another one, which stands at a distance of about `way`."""
        before = self.model.weight.detach().clone()
        move = way * (0.7 * (self.goals[1].T - before) / SIZE + 0.05 * self.draw(SIZE, SIZE))
        with self.check.around(self.fragment), torch.no_grad():
            self.model.weight.copy_(before + move)

    def merges_until_found(self, merges: int, *, every: int, way: float) -> int | None:
        for merge in range(merges):
            self.train(every)
            self.merge(way)
            if self.warning:
                return merge
        self.train(every)
        return merges if self.warning else None


def plain(kind: str, lr: float) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        optimizer: torch.optim.Optimizer
        if kind == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if kind == "momentum" else 0.0)
        return optimizer.step  # type: ignore[return-value]

    return make


def taking_back(part: float, *, every: int = 1, kind: str = "adamw") -> Callable[[nn.Module], Step]:
    """A wrapper that knows nothing of merges: each so many steps it goes a part of the way back to what it had."""

    def make(model: nn.Module) -> Step:
        inner = plain(kind, 1e-3)(model)
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        count = 0

        def step() -> None:
            nonlocal count
            inner()
            count += 1
            if count % every == 0:
                with torch.no_grad():
                    for parameter, copy in zip(model.parameters(), copies, strict=True):
                        parameter.lerp_(copy, part)
                        copy.copy_(parameter)

        return step

    return make


def pulling(follow: float, *, kind: str = "adamw") -> Callable[[nn.Module], Step]:
    """Each step goes a fifth of the way to a copy, which follows by a share of it: less is taken back at each step."""

    def make(model: nn.Module) -> Step:
        inner = plain(kind, 1e-3)(model)
        copies = [parameter.detach().clone() for parameter in model.parameters()]

        def step() -> None:
            inner()
            with torch.no_grad():
                for parameter, copy in zip(model.parameters(), copies, strict=True):
                    parameter.lerp_(copy, 0.2)
                    copy.lerp_(parameter, follow)

        return step

    return make


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("follow", [0.0, 0.01, 0.1])
def test_a_fifth_of_the_way_to_a_copy_that_follows_slowly_is_found_within_ten_merges(kind: str, follow: float) -> None:
    training = Training(pulling(follow, kind=kind))
    assert training.merges_until_found(10, every=12, way=1.0) is not None
    assert "takes back" in training.warning


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("every", [3, 6, 12, pytest.param(40, marks=pytest.mark.no_device("as long as all others"))])
def test_a_fifth_that_is_taken_back_at_once_is_found_within_ten_merges(kind: str, every: int) -> None:
    training = Training(taking_back(0.2, kind=kind))
    found = training.merges_until_found(10, every=every, way=1.0)
    assert found is not None
    assert "takes back" in training.warning
    assert "masters=" in training.warning


@pytest.mark.parametrize("part", [0.2, 0.5])
@pytest.mark.parametrize(("back", "every"), [(6, 30), (6, 6), (3, 4), (5, 6), (5, 5)])
def test_one_that_goes_back_each_few_steps_is_found(part: float, back: int, every: int) -> None:
    training = Training(taking_back(part, every=back))
    assert training.merges_until_found(10, every=every, way=1.0) is not None
    assert "one step takes back" in training.warning or "first step" in training.warning


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [4, 12, 24])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_short_memories_of_an_optimizer_are_no_copies(beta: float, every: int, seed: int) -> None:
    def make(model: nn.Module) -> Step:
        return torch.optim.AdamW(model.parameters(), lr=0.1, betas=(beta, 0.9)).step

    training = Training(make, seed=seed)
    assert training.merges_until_found(24, every=every, way=1.0) is None, training.warning


@pytest.mark.no_device("180 trainings; what is taken back is found there by the other tests")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [3, 5, 8, 30])
@pytest.mark.parametrize("way", [1.0, 0.1, 0.01])
@pytest.mark.parametrize(
    ("kind", "lr"), [("adamw", 1e-3), ("adamw", 3e-2), ("sgd", 1e-2), ("sgd", 1.0), ("momentum", 0.1)]
)
def test_training_alone_is_never_called_that(kind: str, lr: float, way: float, every: int, seed: int) -> None:
    training = Training(plain(kind, lr), seed=seed)
    assert training.merges_until_found(24, every=every, way=way) is None, training.warning


def test_it_is_told_once_and_nothing_is_looked_at_for_ever() -> None:
    training = Training(taking_back(0.2))
    training.merges_until_found(10, every=6, way=1.0)
    training.merge(1.0)
    training.train(12)
    assert training.check.take_warning() == ""
    quiet = Training(plain("adamw", 1e-3))
    quiet.merges_until_found(VERSIONS_MAX, every=2, way=1.0)
    assert quiet.check._pull_back.is_done


def test_numbers_that_are_none_say_nothing() -> None:
    assert judge_version([]) is None
    assert judge_version([StepAfter(-0.2)]) is None
    assert judge_version([StepAfter(math.nan), StepAfter(0.0), StepAfter(0.0)]) is None
    assert judge_version([StepAfter(math.inf), StepAfter(0.0)]) is None
    assert fault_of([]) == ""


def test_what_the_gradient_leads_back_is_training() -> None:
    led = judge_version([StepAfter(-0.3, 0.9)] + [StepAfter(0.0)] * 9)
    pulled = judge_version([StepAfter(-0.3, 0.1)] + [StepAfter(0.0)] * 9)
    assert led is not None
    assert pulled is not None
    assert fault_of([led] * VERSIONS) == ""
    assert fault_of([pulled] * VERSIONS) == "the first step after a version takes back 30% of it"


def test_a_version_that_moved_nothing_is_passed_over() -> None:
    model = nn.Linear(SIZE, SIZE)
    tensors = ModelTensors(model)
    check, fragment = PullBackCheck(tensors, len(tensors.specs)), parts(tensors)[0]
    for _ in range(VERSIONS):
        check.begin(fragment, tensors.sample(fragment), tensors.sample(fragment))
        for _ in range(12):
            check.look()
    assert check.fault == ""
