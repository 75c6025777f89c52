"""Hugging Face's trainer on two ranks whose script has a handler for SIGTERM, under a fake daemon."""

import json
from pathlib import Path

import pytest

from diloco_node.learner.checkpoint import newest_first
from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import Leaving
from tests.kit.fake_daemon import Done, FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program

pytestmark = [pytest.mark.e2e, pytest.mark.no_device("signals are for the host")]

LOOP = """
import json, os, pathlib, signal, sys
victims, folder = sys.argv[1:]
rank = os.environ["LOCAL_RANK"] = os.environ["RANK"]
os.environ |= {"DILOCO_SOCKET": f"{folder}/learner.sock", "DILOCO_SUPERVISOR": f"{folder}/memory.sock"}
from tests.integrations.test_hf_callback import hf_trainer
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
trainer, callback, seen = hf_trainer(pathlib.Path(folder), max_steps=50)

def stop(*_, **__):
    if callback.diloco.steps == 2 and rank in victims:
        signal.raise_signal(signal.SIGTERM)

seen.callback.on_pre_optimizer_step = stop
end = "trained on"
try:
    trainer.train()
except BaseException as error:
    end = f"{type(error).__name__} {error}"
print()
print(json.dumps({"steps": callback.diloco.steps, "end": end, "is_interrupted": callback.diloco.is_interrupted}))
"""


@pytest.mark.parametrize("victims", ["01", "1"])
def test_ranks_leave_in_order_and_exit_as_their_handler_wants(tmp_path: Path, victims: str) -> None:
    pytest.importorskip("transformers")
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path) as daemon,
        Ranks(2, run_program, LOOP, victims, str(tmp_path)) as ranks,
    ):
        answers = [json.loads(answer.splitlines()[-1]) for answer in ranks.answers()]  # type: ignore[attr-defined]
        ends = ["SystemExit 3" if str(rank) in victims else "SystemExit " for rank in range(2)]
        assert answers == [{"steps": 3, "end": end, "is_interrupted": True} for end in ends]
        assert {(name.step, name.place.rank) for name in newest_first(tmp_path / "learner" / "checkpoints")} >= {
            (3, 0),
            (3, 1),
        }
        assert any(isinstance(message, Leaving) for message in daemon.said), "its last steps were offered"
        assert not [message for message in daemon.said if isinstance(message, Done)]
