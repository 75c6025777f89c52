"""Lightning's trainer on two ranks that are asked to stop, under a fake daemon."""

import json
from pathlib import Path

import pytest

from diloco_node.learner.checkpoint import newest_first
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, MemoryStore, PlaceMark, request_area
from tests.kit.fake_daemon import Done, FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program

pytestmark = [pytest.mark.e2e, pytest.mark.no_device("signals are for the host")]

LOOP = """
import json, os, signal, sys
victims, folder = sys.argv[1:]
os.environ |= {"DILOCO_SOCKET": f"{folder}/learner.sock", "DILOCO_SUPERVISOR": f"{folder}/memory.sock"}
os.environ |= {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
import torch
from lightning.pytorch import LightningModule
from diloco_node.integrations.lightning import LightningDiloco
from tests.kit.lightning_kit import quiet_trainer
from tests.kit.trainer_kit import BATCH, Language, Rows

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = Language()

    def training_step(self, batch, _):
        return self.inner(**batch)["loss"]

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 2 + self.global_rank and str(self.global_rank) in victims:
            signal.raise_signal(signal.SIGTERM)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def validation_step(self, batch, batch_idx):
        self.evaluated = batch_idx

callback = LightningDiloco()
end = ""
try:
    trainer = quiet_trainer(folder, callback, devices=2, strategy="ddp", max_steps=200, num_sanity_val_steps=0)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    trainer.fit(Module(), loader, loader)
except BaseException as error:
    end = f"{type(error).__name__} {error}"
print(json.dumps({"steps": callback.diloco.steps, "end": end, "is_interrupted": callback.diloco.is_interrupted}))
"""


@pytest.mark.parametrize("victims", ["01", "0", "1"])
def test_ranks_that_are_asked_to_stop_leave_at_one_boundary(tmp_path: Path, victims: str) -> None:
    pytest.importorskip("lightning.pytorch")
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path) as daemon,
        Ranks(2, run_program, LOOP, victims, str(tmp_path)) as ranks,
    ):
        answers = [json.loads(answer.splitlines()[-1]) for answer in ranks.answers()]  # type: ignore[attr-defined]
        steps = 4 if victims == "1" else 3
        assert answers == [{"steps": steps, "end": "SIGTERMException ", "is_interrupted": True}] * 2
        names = newest_first(tmp_path / "learner" / "checkpoints")
        assert {(name.step, name.place.rank) for name in names} >= {(steps, 0), (steps, 1)}
        mark = PlaceMark.decode(request_area(tmp_path / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        assert mark.is_interrupted
        assert not [message for message in daemon.said if isinstance(message, Done)]
