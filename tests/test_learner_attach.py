"""`diloco_node.attach` against a daemon that speaks the real protocol over the real socket and memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_daemon import PATIENCE_S, FakeDaemon, in_background
from torch import nn

import diloco_node
from diloco_node.codec import kernels
from diloco_node.core.schedule import next_news_step
from diloco_node.core.types import CarryMode, Codec
from diloco_node.errors import LearnerError
from diloco_node.learner import attach as attach_module
from diloco_node.learner.attach import Diloco
from diloco_node.learner.checkpoint import read_checkpoint
from diloco_node.learner.revert import VERSIONS_REVERTED
from diloco_node.learner.session import StepTimer
from diloco_node.memory import MemoryStore, Trained, TrainedCounter, read_trained
from diloco_node.wire.learner_link import (
    Applied,
    Attach,
    Done,
    Failed,
    InitialState,
    Refuse,
    Report,
    SnapshotDenied,
    SnapshotReady,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A region's folder with its memory store; the environment points to it."""
    monkeypatch.setenv("DILOCO_SOCKET", str(tmp_path / "learner.sock"))
    monkeypatch.setenv("DILOCO_SUPERVISOR", str(tmp_path / "memory.sock"))
    with MemoryStore(tmp_path / "memory.sock"):
        yield tmp_path


class Toy:
    """A model whose every step moves every parameter by the same known amount."""

    def __init__(self, seed: int = 0, *, lr: float = 0.25) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, diloco: Diloco, *, tokens: int = 7, loss: float | torch.Tensor | None = None) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        diloco.step(tokens=tokens, loss=loss)

    def steps_until(self, diloco: Diloco, daemon: FakeDaemon, kind: type, count: int) -> None:
        """Train until the daemon has heard `count` messages of a kind."""
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(isinstance(message, kind) for message in list(daemon.said)) < count:
            assert time.monotonic() < deadline_s
            self.step(diloco)
            time.sleep(0.001)

    def flat(self) -> list[float]:
        return [float(x) for p in self.model.parameters() for x in p.detach().reshape(-1)]


def vector(diloco: Diloco, fragment: int) -> np.ndarray:
    assert diloco._session is not None
    return diloco._session.island.vector(fragment).numpy()


def test_without_a_daemon_it_warns_once_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    toy = Toy()
    before = toy.flat()
    with pytest.warns(UserWarning, match="DILOCO_SOCKET is not set") as caught:
        diloco = diloco_node.attach(toy.model)
    with diloco:
        assert toy.flat() == before
        toy.step(diloco, tokens=3, loss=1.0)
        assert (diloco.should_stop, diloco.is_attached, diloco.region) == (False, False, "")
        assert (diloco.region_index, diloco.regions, diloco.global_step, diloco.tokens) == (0, 1, 1, 3)
        assert torch.equal(diloco.global_state_dict()["0.weight"], toy.model[0].weight)
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight)
        diloco.evaluated(val_loss=1.0)
    assert len(caught) == 1


def test_first_learner_gives_theta_0_and_is_told_where_it_is(folder: Path) -> None:
    toy = Toy()
    before = toy.flat()
    with FakeDaemon(folder, global_step=40) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert toy.flat() == before
        assert sorted(np.concatenate(daemon.theta)) == sorted(np.float32(before))
        assert (diloco.region, diloco.region_index, diloco.regions) == ("us-east", 1, 3)
        assert diloco.region_names == ("eu-west", "us-east", "us-west")
        assert diloco.global_step == 40
        toy.step(diloco)
        assert diloco.global_step == 41


def test_parameters_are_overwritten_before_the_first_step(folder: Path) -> None:
    toy, other = Toy(1), Toy(2)
    theta = []
    with FakeDaemon(folder) as daemon, diloco_node.attach(other.model):
        theta = daemon.theta
    with FakeDaemon(folder, theta=theta, versions=[5, 9]) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            assert toy.flat() == other.flat()
            assert [daemon.wait_for(Applied, n).version for n in (1, 2)] == [5, 9]
            toy.step(diloco, tokens=7)
            held, own = diloco.global_state_dict(), diloco.own_state_dict()
        assert torch.equal(held["1.bias"], other.model[1].bias)
        assert torch.equal(own["1.bias"], toy.model[1].bias)
        assert not torch.equal(own["1.bias"], held["1.bias"])
        assert daemon.incarnation == 2


def test_round_by_hand_with_carry_over(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        start = vector(diloco, 0).copy()
        toy.step(diloco)
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        ready = daemon.wait_for(SnapshotReady).contribution
        gradient = daemon.decoded(0)
        np.testing.assert_allclose(gradient, 0.25 * ready.step_to, rtol=1e-5)
        assert (ready.learner, ready.incarnation, ready.base_version, ready.tokens) == (
            "us-east",
            1,
            0,
            7 * ready.step_to,
        )
        new = start - np.float32(0.5) * gradient
        daemon.commit(0, new, ready.snapshot)
        toy.steps_until(diloco, daemon, Applied, 3)
        applied = daemon.wait_for(Applied, 3)
        assert applied.position.included_step == ready.step_to
        assert applied.carried_steps >= 1
        carried = 0.25 * (diloco.steps - ready.step_to)
        np.testing.assert_allclose(vector(diloco, 0), new - carried, rtol=1e-4, atol=1e-5)
        held = diloco.global_state_dict()
        assert sorted(np.concatenate([v.numpy().ravel() for v in held.values()])) == sorted(
            np.concatenate([new, daemon.theta[1]])
        )


def test_bytes_in_the_outbox_are_the_codecs(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.INT4) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        base = vector(diloco, 1).copy()
        daemon.want(1)
        time.sleep(0.05)
        toy.step(diloco)
        theta = vector(diloco, 1).copy()
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        ready = daemon.wait_for(SnapshotReady).contribution
        theta = base - np.float32(0) if ready.step_to == 0 else theta
        expected = np.zeros(daemon.blocks(1).encoded_bytes, np.uint8)
        if ready.step_to == 1:
            norms = kernels.encode(daemon.blocks(1), base - theta, expected)
            assert daemon.encoded(1) == expected.tobytes()
            assert ready.squared_norms == tuple(norms)
        else:  # the request came later than the first boundary: all moved by the same amount
            np.testing.assert_allclose(daemon.decoded(1), 0.25 * ready.step_to, rtol=1e-2)


def test_reports_carry_what_the_loop_knows(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.tensor(2.5, requires_grad=True))
        toy.step(diloco, loss=torch.tensor(float("nan")))
        toy.step(diloco, loss=1.5)
        diloco.evaluated(val_loss=3.0, val_loss_global=2.0)
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            last = [message for message in list(daemon.said) if isinstance(message, Report)][-1:]
            if last and last[0].val_loss is not None:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        report = last[0]
        assert (report.step, report.tokens, report.loss, report.val_loss, report.val_loss_global) == (
            3,
            21,
            1.5,
            3.0,
            2.0,
        )
        assert report.step_time_ns > 0
        assert report.blocked_ns == round(diloco.blocked_seconds * 1e9)


def test_of_fast_steps_those_are_reported_that_a_round_may_wait_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "REPORT_EVERY_NS", 10**15)
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert diloco._session is not None
        positions = diloco._session.island.positions
        assert diloco._session.welcome is not None
        sync_every = diloco._session.welcome.sync_every
        expected, told = [], 0
        while (step := next_news_step(positions, told, sync_every=sync_every)) is not None:
            expected.append(step)
            told = step
        for step in range(1, expected[-1] + 6):
            toy.step(diloco)
            if step in expected:  # a report that waits gives way to a newer one
                daemon.wait_for(Report, expected.index(step) + 1)
    reported = [message.step for message in daemon.said if isinstance(message, Report)]
    assert reported == expected
    assert len(reported) < expected[-1] + 5


def test_stop_ends_the_loop_and_done_is_said(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner("the run is finished")
            deadline_s = time.monotonic() + PATIENCE_S
            while not diloco.should_stop:
                assert time.monotonic() < deadline_s
                toy.step(diloco)
            assert diloco.stop_reason == "the run is finished"
            diloco.evaluated(val_loss=1.25, val_loss_global=1.0)
        done = daemon.wait_for(Done)
        assert (done.step, done.tokens) == (diloco.steps, 7 * diloco.steps)
        assert (done.val_loss, done.val_loss_global) == (1.25, 1.0)


def test_exception_in_the_loop_is_told(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ZeroDivisionError), diloco_node.attach(toy.model, toy.optimizer):
            raise ZeroDivisionError("out of data")
        assert daemon.wait_for(Failed).reason == "ZeroDivisionError: out of data"


def test_non_finite_parameters_are_denied_and_stop_the_learner(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:

        def train() -> None:
            with diloco_node.attach(toy.model, toy.optimizer) as diloco:
                toy.step(diloco)
                with torch.no_grad():
                    for parameter in toy.model.parameters():
                        parameter.reshape(-1)[0] = float("nan")
                daemon.want(0)
                toy.steps_until(diloco, daemon, Done, 1)  # never: step raises

        with pytest.raises(LearnerError, match=r"NaN, infinite.*takes the global parameters"):
            train()
        assert "NaN" in daemon.wait_for(SnapshotDenied).reason
        assert "LearnerError" in daemon.wait_for(Failed).reason


def test_version_waits_until_the_encoder_is_done_with_the_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(TrainedCounter, "flush", lambda _self: gate.wait(PATIENCE_S))
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert diloco._session is not None
        island = diloco._session.island
        toy.step(diloco)
        daemon.want(0)
        deadline_s = time.monotonic() + PATIENCE_S
        while not island.is_busy(0):
            assert time.monotonic() < deadline_s
            toy.step(diloco)
        taken_at, start = diloco.steps, daemon.theta[0].copy()
        daemon.commit(0, start + 1, -1)  # a round that passed without it
        daemon.commit(1, daemon.theta[1] + 1, -1)
        toy.steps_until(diloco, daemon, Applied, 3)
        assert daemon.wait_for(Applied, 3).fragment == 1
        assert island.positions[0].base_version == 0
        gate.set()
        toy.steps_until(diloco, daemon, Applied, 4)
        assert daemon.wait_for(Applied, 4).version == 1
        np.testing.assert_allclose(daemon.decoded(0), 0.25 * taken_at, rtol=1e-5)  # against the old base


def test_learner_in_mid_run_is_never_taken_for_theta_0(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        diloco = diloco_node.attach(toy.model, toy.optimizer)
    with diloco, FakeDaemon(folder) as second:  # its disk is lost: it asks for the initial state
        second.wait_attached()
        toy.steps_until(diloco, second, Report, 3)
        assert not [message for message in second.said if isinstance(message, InitialState)]


# ---- the daemon dies -------------------------------------------------------------------------------------------------


def test_learner_goes_on_without_a_daemon_and_tells_the_next_one_where_it_is(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as first:
        attached = in_background(lambda: diloco_node.attach(toy.model, toy.optimizer))
        diloco = attached.result(PATIENCE_S)
        toy.step(diloco)
        first.want(0)
        toy.steps_until(diloco, first, SnapshotReady, 1)
        ready = first.wait_for(SnapshotReady)
        bytes_before = first.encoded(0)
        theta, versions = first.theta, first.versions
    with diloco:
        for _ in range(20):
            toy.step(diloco)  # nobody is there
        steps = diloco.steps
        with FakeDaemon(folder, codec=Codec.FP32, theta=theta, versions=versions) as second:
            attach = second.wait_attached()
            assert (attach.incarnation, attach.run_id, attach.step, attach.tokens) == (1, "run-1", steps, 7 * steps)
            assert [position.base_version for position in attach.positions] == [0, 0]
            assert attach.snapshots == (ready.contribution.snapshot, -1)
            # The new daemon opens the round again: the same snapshot, the same bytes.
            second.want(0)
            toy.steps_until(diloco, second, SnapshotReady, 1)
            assert second.wait_for(SnapshotReady) == ready
            assert second.encoded(0) == bytes_before
            second.commit(0, theta[0] - second.decoded(0), ready.contribution.snapshot)
            toy.steps_until(diloco, second, Applied, 1)
            assert second.wait_for(Applied).position.included_step == ready.contribution.step_to
            assert read_trained(folder)[-1].steps == diloco.steps
            diloco.close()


def test_offer_of_a_dead_daemon_is_void(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        assert diloco._session is not None
        link = diloco._session._link
        first.commit(0, first.theta[0] + 1, -1)
        deadline_s = time.monotonic() + PATIENCE_S
        while not link._commands:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        theta = [part.copy() for part in first.theta]
    with diloco, FakeDaemon(folder, theta=[theta[0] + 2, theta[1]], versions=[3, 0]) as second:
        second.wait_attached()
        toy.steps_until(diloco, second, Applied, 1)
        applied = [message for message in second.said if isinstance(message, Applied)]
        assert [(message.fragment, message.version) for message in applied] == [(0, 3)]


def test_daemon_of_another_run_stops_the_learner(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        theta = first.theta

    class OtherRun(FakeDaemon):
        def learner_attached(self, attach: Attach) -> None:
            super().learner_attached(Attach(**{**_fields(attach), "incarnation": 77}))

    with diloco, OtherRun(folder, theta=theta) as second:
        second.wait_attached()
        with pytest.raises(LearnerError, match="restart the learner"):
            toy.steps_until(diloco, second, Done, 1)


def _fields(attach: Attach) -> dict[str, object]:
    return {name: getattr(attach, name) for name in Attach.__slots__}


def test_refused_learner_raises_with_the_reason(folder: Path) -> None:
    class Refusing(FakeDaemon):
        def learner_attached(self, attach: Attach) -> None:
            self._server.send(Refuse("this is not the run's model", True))

    toy = Toy()
    with Refusing(folder), pytest.raises(LearnerError, match="refused this learner: this is not the run's model"):
        diloco_node.attach(toy.model)


def test_newer_process_ends_the_older_one(folder: Path) -> None:
    older, newer = Toy(1), Toy(2)
    with FakeDaemon(folder) as daemon:
        first = diloco_node.attach(older.model, older.optimizer)
        with diloco_node.attach(newer.model, newer.optimizer) as second:
            with pytest.raises(LearnerError, match="a newer learner process"), first:
                older.steps_until(first, daemon, Done, 1)
            newer.step(second)
        assert daemon.incarnation == 2


# ---- masters ---------------------------------------------------------------------------------------------------------


class WithMasters:
    """An optimizer with float32 masters of its own, as in mixed-precision training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name] -= 0.001
            parameter.detach().copy_(self.masters[name])


@pytest.mark.parametrize("are_given", [False, True])
def test_optimizer_that_undoes_a_version_is_found_unless_masters_are_given(folder: Path, are_given: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40).bfloat16()
    optimizer = WithMasters(model)

    def train(daemon: FakeDaemon) -> None:
        masters = optimizer.masters if are_given else None
        with diloco_node.attach(model, masters=masters) as diloco:
            deadline_s = time.monotonic() + PATIENCE_S
            for version in range(VERSIONS_REVERTED):
                daemon.commit(0, daemon.theta[0] + np.float32(0.5), -1)
                left = 3  # steps after the apply was heard of
                while left:
                    assert time.monotonic() < deadline_s
                    left -= sum(isinstance(message, Applied) for message in list(daemon.said)) >= 3 + version
                    optimizer.step()
                    diloco.step(tokens=1)

    with FakeDaemon(folder) as daemon:
        if are_given:
            train(daemon)
        else:
            with pytest.raises(LearnerError, match=r"reverted.*masters="):
                train(daemon)


# ---- processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time, torch
from torch import nn
import diloco_node
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
class Data:
    position = 0
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
data = Data()
with diloco_node.attach(model, optimizer, stateful={"data": data}, checkpoint_every_s=EVERY) as diloco:
    print("attached", diloco.global_step, data.position, len(optimizer.state), flush=True)
    while not diloco.should_stop:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        data.position += 3
        diloco.step(tokens=11)
        time.sleep(0.001)
print("stopped", diloco.steps, flush=True)
"""


def start(every_s: float = 0.0) -> subprocess.Popen[str]:
    script = textwrap.dedent(SCRIPT).replace("EVERY", str(every_s))
    return subprocess.Popen([sys.executable, "-W", "error", "-c", script], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_killed_learner_leaves_its_counter_and_the_next_one_its_checkpoint(folder: Path) -> None:
    with FakeDaemon(folder) as daemon:
        with start(every_s=0.01) as process:
            assert line(process) == ["attached", "0", "0", "0"]
            deadline_s = time.monotonic() + PATIENCE_S
            while not list((folder / "learner" / "checkpoints").glob("*.safetensors")):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            daemon.wait_for(Report)
            process.kill()
            process.wait(PATIENCE_S)
        (trained,) = read_trained(folder)
        reports = [message for message in daemon.said if isinstance(message, Report)]
        assert trained.incarnation == 1
        assert trained.steps >= reports[-1].step > 0
        assert trained.tokens == 11 * trained.steps
        with start(every_s=0.01) as process:
            word, global_step, position, states = line(process)
            assert word == "attached"
            assert 0 < int(global_step) <= trained.steps
            assert int(position) == 3 * int(global_step)
            assert int(states) == 4  # moments of two weights and two biases
            process.terminate()
            assert line(process)[0] == "stopped"
            assert process.wait(PATIENCE_S) == 0
        assert daemon.incarnation == 2
        assert read_trained(folder)[0] == trained
        assert not [message for message in daemon.said if isinstance(message, Done)]  # it was interrupted, not done


def test_sigterm_before_the_daemon_is_there_ends_quietly(folder: Path) -> None:
    with start() as process:
        time.sleep(3.0)  # importing torch takes a while; too early is only a weaker test
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        assert code in (0, -signal.SIGTERM)


def test_a_loop_that_was_asked_to_stop_before_the_daemon_was_there_may_still_use_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(attach_module.TerminateFlag):
        def install(self) -> None:
            self.is_set = True

    monkeypatch.setattr(attach_module, "TerminateFlag", Asked)
    toy = Toy()
    with diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert diloco.should_stop
        assert (diloco.is_attached, diloco.versions) == (False, ())
        toy.step(diloco)
        diloco.evaluated(val_loss=1.0)
        diloco.settle(0.01)
        diloco.checkpoint()
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight)


class NoJson:
    def state_dict(self) -> dict[str, float]:
        return {"position": float("nan")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        raise AssertionError(state)


class Broken(NoJson):
    def state_dict(self) -> dict[str, float]:
        raise ZeroDivisionError("no position")


def test_state_that_no_checkpoint_can_keep_does_not_spoil_the_end(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer, stateful={"data": NoJson()}) as diloco:
            toy.step(diloco)
        assert daemon.wait_for(Done).step == 1


def test_exception_in_the_last_checkpoint_is_told_and_lets_go_of_everything(folder: Path) -> None:
    toy = Toy()
    before = signal.getsignal(signal.SIGTERM)
    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer, stateful={"data": Broken()})
        toy.step(diloco)
        with pytest.raises(ZeroDivisionError):
            diloco.close()
        assert daemon.wait_for(Failed).reason == "ZeroDivisionError: no position"
        assert signal.getsignal(signal.SIGTERM) == before
        diloco.close()


@pytest.mark.parametrize("tokens", [7, 7.0, np.int64(7), torch.tensor(7), torch.tensor([7])])
def test_tokens_may_be_any_whole_number(folder: Path, tokens: object) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco, tokens=tokens)  # type: ignore[arg-type]
            assert diloco.tokens == 7
        assert daemon.wait_for(Done).tokens == 7


@pytest.mark.parametrize("tokens", [-1, None, torch.tensor([1, 2]), float("nan")])
def test_tokens_that_are_no_number_are_refused_in_words(folder: Path, tokens: object) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        with pytest.raises(LearnerError, match="tokens="):
            toy.step(diloco, tokens=tokens)  # type: ignore[arg-type]
        assert diloco.steps == 0


@pytest.mark.parametrize("loss", [torch.tensor([1.0, 2.0]), torch.tensor([[1.5]]), torch.tensor(1.5), np.float32(1.5)])
def test_a_loss_of_several_values_is_reported_as_their_mean(folder: Path, loss: torch.Tensor) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=loss)
        assert daemon.wait_for(Report).loss == 1.5


def test_a_step_after_the_end_is_refused_in_words(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight)
        with pytest.raises(LearnerError, match="after close"):
            toy.step(diloco)


def test_environment_without_supervisor_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SUPERVISOR")
    with pytest.raises(diloco_node.errors.ConfigError, match="start through diloco-node start"):  # type: ignore[attr-defined]
        diloco_node.attach(Toy().model)


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    """What scripts set so that a large model is made on its device in its type; here one that holds no values."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_torchs_defaults_are_not_the_runs(folder: Path, request: pytest.FixtureRequest) -> None:
    toy = Toy()
    toy.optimizer = torch.optim.AdamW(toy.model.parameters(), lr=0.125)
    request.getfixturevalue("odd_defaults")
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.tensor([1.25, 1.5], dtype=torch.float32, device="cpu"))
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        merged = daemon.theta[0] + np.float32(1 + 2**-20)
        daemon.commit(0, merged, daemon.wait_for(SnapshotReady).contribution.snapshot)
        toy.steps_until(diloco, daemon, Applied, 3)
        diloco.checkpoint()
        own, everybodys = diloco.own_state_dict(), diloco.global_state_dict()
        assert diloco._session is not None
        found = [
            everybodys[piece.name].reshape(-1)[piece.value_start : piece.value_stop]
            for piece in diloco._session.manifest.fragments[0].pieces
        ]
        np.testing.assert_array_equal(torch.cat(found).numpy(), merged)
        assert {(one.dtype, one.device.type) for one in own.values()} == {(torch.float32, "cpu")}
        assert all(torch.equal(one, toy.model.state_dict()[name]) for name, one in own.items())
    (path,) = (folder / "learner" / "checkpoints").glob("*.safetensors")
    kept = read_checkpoint(path)
    assert {one.device.type for one in kept.tensors.values()} == {"cpu"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_process_that_the_loop_forks_ends_with_sigterm(folder: Path) -> None:
    """`multiprocessing.Pool` ends its workers so, and waits for them."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with FakeDaemon(folder), diloco_node.attach(Toy().model) as diloco:
        fork = multiprocessing.get_context("fork")
        is_running = fork.Event()

        def work() -> None:
            is_running.set()  # what comes before this is forgotten in the fork itself
            time.sleep(PATIENCE_S)

        child = fork.Process(target=work, daemon=True)
        child.start()
        assert is_running.wait(PATIENCE_S / 2)
        child.terminate()
        child.join(PATIENCE_S / 2)
        assert child.exitcode == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        Toy().step(diloco)
        assert diloco.should_stop


def test_overwrite_mode_keeps_nothing(folder: Path) -> None:
    toy = Toy()
    with (
        FakeDaemon(folder, carry=CarryMode.OVERWRITE) as daemon,
        diloco_node.attach(toy.model, toy.optimizer) as diloco,
    ):
        daemon.commit(0, np.full_like(daemon.theta[0], 3.0), -1)
        toy.steps_until(diloco, daemon, Applied, 3)
        later = diloco.steps - daemon.wait_for(Applied, 3).position.included_step
        np.testing.assert_allclose(vector(diloco, 0), 3.0 - 0.25 * later, rtol=1e-5)


def test_settle_applies_without_stepping(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        daemon.commit(1, daemon.theta[1] + 1, -1)
        deadline_s = time.monotonic() + PATIENCE_S
        while len([message for message in list(daemon.said) if isinstance(message, Applied)]) < 3:
            assert time.monotonic() < deadline_s
            diloco.settle(0.01)
        np.testing.assert_array_equal(vector(diloco, 1), daemon.theta[1])
        assert diloco.steps == 0
        assert read_trained(folder) == (Trained(1, 0, 0),)


def test_step_time_is_a_moving_average() -> None:
    timer = StepTimer()
    timer.stepped(1000)
    assert timer.average_ns == 0
    timer.stepped(1500)
    assert timer.average_ns == 500
    timer.stepped(3000)
    assert timer.average_ns == 600  # 500 + 0.1 (1500 - 500)


def test_learner_without_a_checkpoint_folder_writes_none(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=0) as diloco:
        toy.step(diloco)
    assert [path.name for path in (folder / "learner").iterdir()] == ["trained-1"]
