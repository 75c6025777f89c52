"""Processes around a learner: killed, forked, spawned, a second run's, in the background."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner import attach as attach_module
from diloco_node.learner.attach import Diloco
from diloco_node.learner.daemon_session import LearnerSession
from diloco_node.learner.process_signals import LEARNER_VARIABLE
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
    Done,
    Failed,
    Report,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, in_background
from tests.kit.learner_kit import Toy
from tests.kit.waiting import until

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


def test_a_script_that_has_had_its_part_says_so_until_it_attaches_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor lets it do what it wants, but not wait in `attach` for a daemon that comes no more."""
    toy, marks, hear = Toy(), [], LearnerSession.hear

    def mark_first(session: LearnerSession) -> bool:
        marks.append(place_of(folder).has_left)
        return hear(session)

    with FakeDaemon(folder):
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            assert not place_of(folder).has_left
        assert place_of(folder).has_left
        monkeypatch.setattr(LearnerSession, "hear", mark_first)
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        assert not any(marks)
        toy.step(diloco)
        diloco.__exit__(RuntimeError, RuntimeError("sizes differ"), None)
        assert not place_of(folder).has_left, "a crash is no part that is over"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("way", ["exit", "exit 143", "interrupt", "break", "no block"])
def test_a_script_that_leaves_after_a_signal_of_its_own_handler_is_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    toy, before, asked = Toy(), signal.getsignal(number), []

    def theirs(*_: object) -> None:
        asked.append(True)
        if way == "interrupt":
            raise KeyboardInterrupt
        if way != "break":
            sys.exit(143 if way == "exit 143" else 0)

    signal.signal(number, theirs)
    try:
        with FakeDaemon(folder) as daemon:
            diloco = diloco_node.attach(toy.model, toy.optimizer)
            toy.step(diloco)
            assert not place_of(folder).is_interrupted
            error = KeyboardInterrupt if way == "interrupt" else SystemExit
            ends = contextlib.nullcontext() if way == "break" else pytest.raises(error)
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
