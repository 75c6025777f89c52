"""A Lightning `Trainer` as a region's learner. The line that joins the run is the callback.

    pip install 'diloco-node[lightning]'
    diloco-node start --region us-east -- python examples/lightning_fit.py

The README beside it has all commands of a run in two regions, one of them with two ranks.

A small network learns Python's standard library byte by byte. Each region reads its own part of it.
"""

import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import diloco_node
from diloco_node.integrations.lightning import LightningDiloco

CONTEXT = 64


class NextByte(LightningModule):
    """Guesses a byte from the sixteen before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.Sequential(nn.Conv1d(32, 64, 16), nn.GELU(), nn.Conv1d(64, 256, 1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        logits = self.layers(self.embedding(batch[:, :-1]).transpose(1, 2))
        return nn.functional.cross_entropy(logits, batch[:, 16:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def own_part() -> torch.Tensor:
    """Windows of text. `place()` says which part is this region's."""
    index, count = diloco_node.place()
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return values[: len(values) // CONTEXT * CONTEXT].view(-1, CONTEXT)[index::count]


def main() -> None:
    torch.manual_seed(0)  # the first parameters are the same in every region
    trainer = Trainer(
        max_epochs=-1,  # the run says when it is over
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # of torchrun; with several, the strategy is ddp
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningDiloco()],
    )
    trainer.fit(NextByte(), StatefulDataLoader(own_part(), batch_size=8, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
