"""A handler of the script's that exits in the middle of a step, of its own rank or of the others."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import diloco_node
from diloco_node.learner import boundary as boundary_module
from diloco_node.learner.checkpoint import newest_first
from diloco_node.learner.process_signals import STOP_VARIABLE
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, MemoryStore, PlaceMark, request_area
from diloco_node.wire.learner_link import Failed, Leaving
from tests.kit.fake_daemon import Done, FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program
from tests.kit.watched_model import make, net, train

pytestmark = pytest.mark.e2e

LOOP = """
import contextlib, json, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
import diloco_node
code, victims, is_looking = int(sys.argv[1]), sys.argv[2], sys.argv[3] != "goes on"
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[4:]
dist.init_process_group("gloo")
rank = dist.get_rank()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
torch.manual_seed(7)
model = nn.Linear(6, 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
end = ""
try:
    diloco = diloco_node.attach(model, optimizer)
    with diloco if sys.argv[3] != "closes" else contextlib.nullcontext():
        while not (is_looking and diloco.should_stop):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if diloco.steps == 3 + rank % 2 and str(rank) in victims:
                signal.raise_signal(signal.SIGTERM)
            optimizer.step()
            diloco.step(tokens=3)
    diloco.close()
    dist.barrier()
except BaseException as error:
    end = f"{type(error).__name__} {error}"
print(json.dumps({"steps": diloco.steps, "end": end, "is_interrupted": diloco.is_interrupted}), flush=True)
"""


@pytest.mark.no_device("signals are for the host")
@pytest.mark.parametrize(("code", "victims"), [(0, "1"), (0, "0"), (143, "1"), (143, "01")])
@pytest.mark.parametrize("loop", ["looks", "closes", "goes on"])
def test_all_ranks_leave_at_one_boundary_with_their_checkpoint(
    tmp_path: Path, code: int, victims: str, loop: str
) -> None:
    """Also where the loop has no `with` block, and where it does not look at `should_stop`. A barrier follows."""
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path) as daemon,
        Ranks(2, run_program, LOOP, str(code), victims, loop, *place) as ranks,
    ):
        answers = [json.loads(answer) for answer in ranks.answers()]  # type: ignore[arg-type]
        steps = (5 if victims == "1" else 4) + (loop == "goes on")
        exits = victims if loop == "goes on" else victims[0]
        ends = [f"SystemExit {code}" if str(rank) in exits else "SystemExit " for rank in range(2)]
        assert any(isinstance(message, Leaving) for message in daemon.said), "its last steps were offered"
        assert answers == [{"steps": steps, "end": end, "is_interrupted": True} for end in ends]
        assert {(name.step, name.place.rank) for name in newest_first(tmp_path / "learner" / "checkpoints")} >= {
            (steps, 0),
            (steps, 1),
        }
        mark = PlaceMark.decode(request_area(tmp_path / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        assert (mark.is_interrupted, mark.has_left) == (True, False)
        assert not [message for message in daemon.said if isinstance(message, Done)]


INSISTS = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import diloco_node
from diloco_node.learner import process_signals
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[1:]
process_signals.AGAIN_S = 0.01
dist.init_process_group("gloo")
rank = dist.get_rank()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
torch.manual_seed(7)
model = nn.Linear(6, 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
diloco = diloco_node.attach(model, optimizer)
end = ""
try:
    for step in range(9):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if step == 3 or (step == 4 and rank == 0):
            time.sleep(0.05)
            signal.raise_signal(signal.SIGTERM)
        optimizer.step()
        diloco.step(tokens=3)
except BaseException as error:
    end = f"{type(error).__name__} {error}"
print(json.dumps({"end": end}), flush=True)
"""


@pytest.mark.no_device("signals are for the host")
def test_an_exit_that_waits_is_not_lost_where_another_rank_has_exited_at_once(tmp_path: Path) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path),
        Ranks(2, run_program, INSISTS, *place) as ranks,
    ):
        assert json.loads(ranks.answer(0)) == {"end": "SystemExit 143"}  # type: ignore[arg-type]
        ranks.processes[0].kill()
        assert json.loads(ranks.answer(1)) == {"end": "SystemExit 143"}  # type: ignore[arg-type]


def test_an_exit_that_waits_does_not_replace_the_error_of_the_loop(folder: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = net()
    optimizer = make(model)

    def learn() -> None:
        diloco = diloco_node.attach(model, optimizer)
        try:
            train(model, optimizer, diloco, 2)
            diloco._terminate.is_holding = True  # as where there are other ranks
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("of the loop")
        finally:
            diloco.close()

    try:
        with FakeDaemon(folder), pytest.raises(ValueError, match="of the loop"):
            learn()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("code", [0, 143])
def test_an_exit_within_a_step_waits_for_its_end(folder: Path, code: int) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(code))
    model = net()
    optimizer = make(model)
    steps: list[int] = []

    def learn() -> None:
        with diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco, 2)
            session = diloco._session
            assert session is not None
            count = session.count

            def count_and_exit() -> None:
                steps.append(diloco.steps)
                signal.raise_signal(signal.SIGUSR1)
                count()

            session.count = count_and_exit  # type: ignore[method-assign]
            train(model, optimizer, diloco, 2)

    try:
        with FakeDaemon(folder) as daemon:
            with pytest.raises(SystemExit):
                learn()
            daemon.wait_detached()
            assert not [message for message in daemon.said if isinstance(message, Done | Failed)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps == [3]
    assert newest_first(folder / "learner" / "checkpoints")[0].step == 3, "it left in order"


@pytest.mark.timeout(60)
def test_a_stop_that_comes_once_more_while_the_last_steps_are_merged_ends_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the group, and passed on by the supervisor: the script's handler exits each time."""
    monkeypatch.setenv(STOP_VARIABLE, "100")
    monkeypatch.setattr(boundary_module, "LEAVE_PATIENCE_S", 1.5)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = net()
    optimizer = make(model)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))

    def learn() -> None:
        with diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco, 2)
            timer.start()
            signal.raise_signal(signal.SIGTERM)

    try:
        with FakeDaemon(folder) as daemon:
            with pytest.raises(SystemExit) as caught:
                learn()
            timer.join()
            assert caught.value.code == 143
            daemon.wait_detached()
            assert not [message for message in daemon.said if isinstance(message, Done | Failed)]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert newest_first(folder / "learner" / "checkpoints")[0].step == 2, "it left in order"
