"""`diloco_node.attach` when something ends: the daemon, the learner's process, the loop."""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.learner import attach as attach_module
from diloco_node.learner.attach import Diloco
from diloco_node.learner.process_signals import LEARNER_VARIABLE, LearnerPlace
from diloco_node.shared_memory import (
    COUNTERS_AREA,
    PLACE_AREA,
    PLACE_BYTES,
    MemoryStore,
    PlaceMark,
    request_area,
)
from diloco_node.storage.trained import AREA_BYTES, read_trained
from diloco_node.unix_sockets import process_of
from diloco_node.wire.learner_link import (
    Attach,
    Done,
    EndWanted,
    Failed,
    OfferApplied,
    Refuse,
    Report,
    SnapshotReady,
    Warned,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, in_background
from tests.kit.learner_kit import Toy, session_of
from tests.kit.waiting import until

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
            toy.steps_until(diloco, second, OfferApplied, 1)
            assert second.wait_for(OfferApplied).position.included_step == ready.contribution.step_to
            diloco.close()
            assert read_trained(folder)[-1].steps == diloco.steps


def test_offer_of_a_dead_daemon_is_void(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        link = session_of(diloco).link
        first.commit(0, first.theta[0] + 1, -1)
        until(lambda: link.waiting_commands)
        theta = [part.copy() for part in first.theta]
    with diloco, FakeDaemon(folder, theta=[theta[0] + 2, theta[1]], versions=[3, 0]) as second:
        second.wait_attached()
        toy.steps_until(diloco, second, OfferApplied, 1)
        applied = [message for message in second.said if isinstance(message, OfferApplied)]
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
        LearnerPlace.pid = None  # as if the newer one were in another process
        with diloco_node.attach(newer.model, newer.optimizer) as second:
            with pytest.raises(LearnerError, match="a newer learner process"), first:
                older.steps_until(first, daemon, Done, 1)
            newer.step(second)
        assert daemon.incarnation == 2


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


@pytest.mark.e2e
def test_killed_learner_leaves_its_counter_and_the_next_one_its_checkpoint(folder: Path) -> None:
    with FakeDaemon(folder) as daemon:
        with start(every_s=0.01) as process:
            assert line(process) == ["attached", "0", "0", "0"]
            until(lambda: list((folder / "learner" / "checkpoints").glob("*.safetensors")), "a checkpoint")
            daemon.wait_for(Report)
            process.kill()
            process.wait(PATIENCE_S)
        area = request_area(folder / "memory.sock", COUNTERS_AREA, AREA_BYTES)
        (trained,) = read_trained(folder, area)  # as the next daemon, or this one, does
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


def place_of(folder: Path) -> PlaceMark:
    """Where the learner stands, as the supervisor reads it."""
    mark = PlaceMark.decode(request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
    assert mark is not None
    return mark


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("way", ["exit", "break", "no block"])
def test_a_script_that_leaves_after_a_signal_of_its_own_handler_is_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    toy, before, asked = Toy(), signal.getsignal(number), []

    def theirs(*_: object) -> None:
        asked.append(True)
        if way != "break":
            sys.exit(0)

    signal.signal(number, theirs)
    try:
        with FakeDaemon(folder) as daemon:
            diloco = diloco_node.attach(toy.model, toy.optimizer)
            toy.step(diloco)
            assert not place_of(folder).is_interrupted
            ends = contextlib.nullcontext() if way == "break" else pytest.raises(SystemExit)
            with ends, contextlib.nullcontext() if way == "no block" else diloco:
                while not asked:
                    signal.raise_signal(number)
            assert place_of(folder).is_interrupted
            diloco.close()
            assert place_of(folder).is_interrupted
            assert not [message for message in daemon.said if isinstance(message, Done | Failed)]
            assert signal.getsignal(number) is theirs
    finally:
        signal.signal(number, before)


def test_a_script_that_leaves_after_the_runs_end_is_done_whatever_signal_came(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner(versions=(0, 0))
            while not diloco.should_stop:
                toy.step(diloco)
            signal.raise_signal(signal.SIGTERM)
        daemon.wait_for(Done)
        assert not place_of(folder).is_interrupted
        assert not diloco.is_interrupted


@pytest.mark.e2e
def test_sigterm_before_the_daemon_is_there_ends_quietly(folder: Path) -> None:
    with start() as process:
        time.sleep(3.0)  # importing torch takes a while; too early is only a weaker test
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        assert code in (0, -signal.SIGTERM)
        assert code or place_of(folder).is_interrupted


def test_a_loop_that_is_stopped_before_a_daemon_is_there_may_still_use_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(attach_module.TerminateFlag):
        def install(self) -> None:
            self.is_set = True

    monkeypatch.setattr(attach_module, "TerminateFlag", Asked)
    toy = Toy()
    with diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert diloco.should_stop
        assert diloco.is_interrupted, "a script that saves its result must not take this for one"
        assert (diloco.is_attached, diloco.versions, len(diloco.shards)) == (False, (), 1024)
        toy.step(diloco)
        diloco.evaluated(val_loss=1.0)
        diloco.settle(0.01)
        diloco.checkpoint()
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight.cpu())


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
        assert diloco.is_interrupted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", ["step", "exit", "close"])
def test_a_forked_child_that_uses_the_learner_leaves_the_true_one_alone(folder: Path, call: str) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:

        def work() -> None:
            if call == "step":
                with pytest.raises(LearnerError, match="or in a child: no learner is here"):
                    diloco.step(tokens=1)
            elif call == "exit":
                diloco.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            else:
                diloco.close()

        toy.step(diloco)
        child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        child.start()
        child.join(PATIENCE_S / 2)
        assert child.exitcode == 0
        toy.step(diloco)
        assert daemon.detached == []
        assert not [message for message in daemon.said if isinstance(message, Failed | Done)]
    assert daemon.wait_for(Done).step == 2


# ---- the loop --------------------------------------------------------------------------------------------------------


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
            assert not diloco.is_interrupted
            diloco.evaluated(val_loss=1.25, val_loss_global=1.0)
        done = daemon.wait_for(Done)
        assert (done.step, done.tokens) == (diloco.steps, 7 * diloco.steps)
        assert (done.val_loss, done.val_loss_global, done.val_step) == (1.25, 1.0, diloco.global_step)


def test_an_evaluation_is_told_at_once_with_its_step_and_what_is_not_finite_is_a_warning(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        diloco.evaluated(val_loss=torch.tensor([2.0, 3.0], requires_grad=True), val_loss_global=np.float32(1.5))
        evaluation = (2.5, 1.5, diloco.global_step)

        def evaluations() -> set[tuple[float | None, float | None, int | None]]:
            reports = [message for message in daemon.said if isinstance(message, Report)]
            return {(report.val_loss, report.val_loss_global, report.val_step) for report in reports}

        until(lambda: evaluation in evaluations())
        for _ in range(3):
            toy.step(diloco)
        diloco.evaluated(val_loss_global=math.nan)
        until(lambda: (None, None, diloco.global_step) in evaluations())
        text = f"evaluated(val_loss_global=nan) at step {diloco.global_step}: not finite, so the last one that was is"
        until(lambda: any(isinstance(message, Warned) and text in message.text for message in daemon.said))
        for wrong in ("low", [1.0, 2.0], 10**400):
            with pytest.raises(LearnerError, match=r"evaluated\(val_loss=.*is no number: give a float or a tensor"):
                diloco.evaluated(val_loss=wrong)  # type: ignore[arg-type]
    diloco.evaluated(val_loss=1.0)


def test_exception_in_the_loop_is_told(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ZeroDivisionError), diloco_node.attach(toy.model, toy.optimizer):
            raise ZeroDivisionError("out of data")
        assert daemon.wait_for(Failed).reason == "ZeroDivisionError: out of data"


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("caf\udce9"), "RuntimeError: caf?"),
        (Textless(), "Textless, whose text fails with a ValueError"),
        (RuntimeError("\N{GRINNING FACE}" * 5000), "RuntimeError: \N{GRINNING FACE}"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (SystemExit("no data"), "SystemExit: no data"),
    ],
)
def test_an_exception_of_any_text_is_told_and_stays_itself(folder: Path, error: BaseException, told: str) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(type(error)) as caught, diloco_node.attach(toy.model, toy.optimizer):
            raise error
        assert caught.value is error
        assert daemon.wait_for(Failed).reason.startswith(told)


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_that_exits_without_a_fault_has_left_in_order(folder: Path, code: int | None) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(SystemExit), diloco_node.attach(toy.model, toy.optimizer):
            sys.exit(code)
        assert daemon.wait_for(Done).step == 0


def test_a_generator_that_nobody_asks_any_more_has_left_in_order(folder: Path) -> None:
    toy = Toy()

    def losses() -> Iterator[int]:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            while True:
                toy.step(diloco)
                yield diloco.steps

    with FakeDaemon(folder) as daemon:
        training = losses()
        assert next(training) == 1
        training.close()  # type: ignore[attr-defined]
        assert daemon.wait_for(Done).step == 1


def test_a_wish_for_the_end_is_told_though_an_exception_follows(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        diloco.finish("flat")
        diloco.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        daemon.wait_for(Failed)
        assert daemon.wait_for(EndWanted).reason == "flat"


def test_what_a_loop_does_while_it_evaluates_in_inference_mode_is_usable_outside(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with torch.inference_mode():
            diloco = diloco_node.attach(toy.model, torch.optim.AdamW(toy.model.parameters()))
        for _ in range(2):
            toy.step(diloco)
            with torch.inference_mode(), diloco.busy("evaluation"):
                daemon.commit(0, daemon.theta[0] + 1, -1)
                diloco.settle(0.1)
                diloco.checkpoint()
            daemon.commit(0, daemon.theta[0] + 1, -1)
            diloco.settle(0.1)
            diloco.checkpoint()
        with torch.inference_mode():
            diloco.close()
    assert not any(parameter.is_inference() for parameter in toy.model.parameters())


def in_fabric(model: nn.Module) -> Any:
    return pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1).setup(model)


class Pretrained(nn.Linear):
    """As a model of Hugging Face is known."""

    def save_pretrained(self) -> dict[str, torch.Tensor]:
        return self.state_dict()


def test_a_model_inside_a_trainers_module_saves_the_merged_weights_by_itself_too(folder: Path) -> None:
    module = nn.ModuleDict({"model": Pretrained(6, 5), "judge": nn.Linear(5, 2)})
    inner: Any = module["model"]
    with FakeDaemon(folder) as daemon, diloco_node.attach(module, torch.optim.SGD(module.parameters())) as diloco:
        diloco.save_merged(module)
        with torch.no_grad():
            inner.weight.zero_()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        merged = diloco.global_state_dict()
        assert torch.equal(inner.save_pretrained()["weight"], merged["model.weight"])
        assert all(torch.equal(value, merged[name]) for name, value in module.state_dict().items())
    assert torch.equal(inner.save_pretrained()["weight"], inner.weight)


@pytest.mark.no_device("torch.nn.DataParallel asks for properties of real ones")
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager"), in_fabric])
def test_a_wrapped_model_saves_the_merged_weights_from_each_level(folder: Path, wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    wrapped = wrap(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(wrapped, torch.optim.SGD(model.parameters())) as diloco:
        diloco.save_merged(wrapped)
        with torch.no_grad():
            model[0].weight.zero_()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        merged = diloco.global_state_dict()
        assert set(merged) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        for module in (wrapped, model):
            for name, value in module.state_dict().items():
                assert torch.equal(value, merged[name.removeprefix("module.").removeprefix("_orig_mod.")])
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight)


def test_a_copy_of_a_model_whose_saves_are_merged_saves_itself(folder: Path) -> None:
    model = nn.Linear(6, 5)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, torch.optim.SGD(model.parameters())) as diloco:
        diloco.save_merged(model)
        average, before = torch.optim.swa_utils.AveragedModel(model), model.weight.detach().clone()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        assert not torch.equal(model.weight, before)
        assert torch.equal(model.state_dict()["weight"], diloco.global_state_dict()["weight"])
        assert torch.equal(average.state_dict()["module.weight"], average.module.weight)
        assert torch.equal(average.module.state_dict()["weight"], before)


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


def test_a_step_after_the_end_is_refused_in_words(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight.cpu())
        with pytest.raises(LearnerError, match="after close"):
            toy.step(diloco)


def test_learner_without_a_checkpoint_folder_writes_none(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=0) as diloco:
        toy.step(diloco)
    assert [path.name for path in (folder / "learner").iterdir()] == ["trained-1"]


SPAWNING = """
import multiprocessing, os, torch
from torch import nn
import diloco_node
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def work():
    pass
with diloco_node.attach(model, optimizer) as diloco:
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    print("worker", worker.exitcode, flush=True)
    for _ in range(3):
        optimizer.step()
        diloco.step(tokens=1)
    print("steps", diloco.steps, flush=True)
"""


@pytest.mark.e2e
def test_a_spawned_worker_that_imports_the_script_is_refused_and_the_learner_goes_on(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(SPAWNING)
    with FakeDaemon(folder) as daemon:
        process = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert process.stdout.split() == ["worker", "1", "steps", "3"]
        assert "attach() was called in a child of the learner" in process.stderr
        assert daemon.incarnation == 1


BESIDE = """
import torch
import diloco_node
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_node.attach(model, optimizer) as diloco:
    for _ in range(3):
        optimizer.step()
        diloco.step(tokens=1)
"""


@pytest.mark.e2e
def test_a_learner_of_a_second_run_on_this_machine_leaves_the_first_alone(folder: Path) -> None:
    beside = folder / "beside"
    beside.mkdir()
    # As from another shell.
    environment = {name: value for name, value in os.environ.items() if name != LEARNER_VARIABLE}
    environment |= {"DILOCO_SOCKET": str(beside / "learner.sock"), "DILOCO_SUPERVISOR": str(beside / "memory.sock")}
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        with MemoryStore(beside / "memory.sock"), FakeDaemon(beside) as second:
            subprocess.run([sys.executable, "-c", BESIDE], env=environment, timeout=PATIENCE_S, check=True)
            assert second.wait_for(Done).step == 3
        toy.step(diloco)
        diloco.checkpoint()
        assert (daemon.incarnation, daemon.detached) == (1, [])
        assert len(list((folder / "learner" / "checkpoints").iterdir())) == 1


def test_a_second_attach_in_a_process_is_refused_until_the_first_has_left(folder: Path) -> None:
    first, second = Toy(1), Toy(2)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(first.model, first.optimizer) as diloco:
            with pytest.raises(LearnerError, match="a second time in this process"):
                diloco_node.attach(second.model, second.optimizer)
            first.step(diloco)
            assert daemon.incarnation == 1
        with diloco_node.attach(second.model, second.optimizer) as diloco:
            second.step(diloco)
        assert daemon.incarnation == 2


def test_a_process_below_a_learner_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = process_of(os.getppid())
    assert parent is not None
    start = f"{parent.start_ticks} {parent.boot}"
    monkeypatch.setenv(LEARNER_VARIABLE, f"{parent.pid} {start}")
    with FakeDaemon(folder), pytest.raises(LearnerError, match="in a child of the learner"):
        diloco_node.attach(Toy().model)
    # Of a learner that is gone, and whose number another process has; and what is nobody's.
    for old in (f"{parent.pid} 0{start}", "4194305", f"4194305 {start}", f"{parent.pid}", "?", ""):
        monkeypatch.setenv(LEARNER_VARIABLE, old)
        with FakeDaemon(folder), diloco_node.attach(Toy().model):
            pass


ALONE = """
import os, sys, time, torch
import diloco_node
from diloco_node.errors import LearnerError
if len(sys.argv) > 1:  # what the shell has left behind
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
model = torch.nn.Linear(2, 2)
try:
    diloco_node.attach(model).close()
    print("attached", flush=True)
except LearnerError as error:
    print(error, flush=True)
"""


@pytest.mark.e2e
def test_a_program_that_a_shell_has_left_in_the_background_is_refused(folder: Path) -> None:
    script, out = folder / "evaluate.py", folder / "out"
    script.write_text(ALONE)
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        subprocess.run([f"{sys.executable} {script} $$ > {out} &"], shell=True, check=True)
        until(lambda: out.exists() and out.read_text())
        assert "in a child of the learner" in out.read_text()
        toy.step(diloco)
        assert (daemon.incarnation, daemon.detached) == (1, [])


def test_of_two_threads_that_attach_at_once_one_is_the_learner(folder: Path) -> None:
    toys, barrier = [Toy(seed) for seed in range(4)], threading.Barrier(4)

    def work(toy: Toy) -> Diloco | LearnerError:
        barrier.wait(PATIENCE_S)
        try:
            return diloco_node.attach(toy.model, toy.optimizer)
        except LearnerError as error:
            return error

    with FakeDaemon(folder) as daemon, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, toys))
        (diloco,) = [result for result in results if isinstance(result, Diloco)]
        assert all("a second time" in str(result) for result in results if result is not diloco)
        toys[results.index(diloco)].step(diloco)
        diloco.close()
        assert daemon.incarnation == 1


def test_a_learner_of_the_main_thread_may_be_closed_in_another(folder: Path) -> None:
    toy, before = Toy(), signal.getsignal(signal.SIGTERM)
    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        in_background(lambda: (toy.step(diloco), diloco.close())).result(PATIENCE_S)
        assert daemon.wait_for(Done).step == 1
        signal.signal(signal.SIGTERM, before)  # a thread can't


def test_a_handler_that_the_script_sets_after_attach_stays(folder: Path) -> None:
    toy, before = Toy(), signal.getsignal(signal.SIGTERM)

    def theirs(*_: object) -> None:
        pass

    try:
        with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
            signal.signal(signal.SIGTERM, theirs)
            toy.step(diloco)
            signal.raise_signal(signal.SIGTERM)
            toy.step(diloco)
            assert diloco.is_interrupted
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
