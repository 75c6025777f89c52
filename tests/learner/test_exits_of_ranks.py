"""A handler of the script's that exits in the middle of a step, of its own rank or of the others."""

import json
import signal
import sys
from pathlib import Path

import pytest

import diloco_node
from diloco_node.learner.checkpoint import newest_first
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, MemoryStore, PlaceMark, request_area
from diloco_node.wire.learner_link import Failed
from tests.kit.fake_daemon import Done, FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program
from tests.kit.watched_model import make, net, train

pytestmark = pytest.mark.e2e

LOOP = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
import diloco_node
code, victims, is_looking = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "looks"
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[4:]
dist.init_process_group("gloo")
rank = dist.get_rank()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
torch.manual_seed(7)
model = nn.Linear(6, 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
end = ""
try:
    with diloco_node.attach(model, optimizer) as diloco:
        while not (is_looking and diloco.should_stop):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if diloco.steps == 3 + rank % 2 and str(rank) in victims:
                signal.raise_signal(signal.SIGTERM)
            optimizer.step()
            diloco.step(tokens=3)
except BaseException as error:
    end = f"{type(error).__name__} {error}"
print(json.dumps({"steps": diloco.steps, "end": end, "is_interrupted": diloco.is_interrupted}), flush=True)
"""


@pytest.mark.no_device("signals are for the host")
@pytest.mark.parametrize(("code", "victims"), [(0, "1"), (0, "0"), (143, "1"), (143, "01")])
def test_all_ranks_leave_at_one_boundary_with_their_checkpoint(tmp_path: Path, code: int, victims: str) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path) as daemon,
        Ranks(2, run_program, LOOP, str(code), victims, "looks", *place) as ranks,
    ):
        answers = [json.loads(answer) for answer in ranks.answers()]  # type: ignore[arg-type]
        steps = 5 if victims == "1" else 4
        ends = [f"SystemExit {code}" * (str(rank) == victims[0]) for rank in range(2)]  # once it has left in order
        assert answers == [{"steps": steps, "end": end, "is_interrupted": True} for end in ends]
        assert {(name.step, name.place.rank) for name in newest_first(tmp_path / "learner" / "checkpoints")} >= {
            (steps, 0),
            (steps, 1),
        }
        mark = PlaceMark.decode(request_area(tmp_path / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        assert (mark.is_interrupted, mark.has_left) == (True, False)
        assert not [message for message in daemon.said if isinstance(message, Done)]


@pytest.mark.no_device("signals are for the host")
def test_a_loop_that_does_not_look_exits_at_its_next_step_and_no_rank_waits(tmp_path: Path) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path),
        Ranks(2, run_program, LOOP, "0", "1", "goes on", *place) as ranks,
    ):
        assert json.loads(ranks.answer(1))["end"] == "SystemExit 0"  # type: ignore[arg-type]
        ranks.processes[1].kill()
        assert "another rank of this region has ended" in json.loads(ranks.answer(0))["end"]  # type: ignore[arg-type]


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
