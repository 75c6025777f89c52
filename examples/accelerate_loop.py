"""A loop with Accelerate as a region's learner. The line that joins the run is `attach`, after `prepare`.

    pip install 'diloco-node[hf]'
    diloco-node start --region us-east -- python examples/accelerate_loop.py

A small network learns Python's standard library byte by byte, four micro-batches a step. Each region has its own part.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

import diloco_node
from diloco_node.integrations.prepared_loader import PreparedLoader

CONTEXT = 64


class NextByte(nn.Module):
    """Guesses a byte from the sixteen before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.Sequential(nn.Conv1d(32, 64, 16), nn.GELU(), nn.Conv1d(64, 256, 1))

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(self.embedding(batch[:, :-1]).transpose(1, 2))
        return {"loss": nn.functional.cross_entropy(logits, batch[:, 16:])}


def own_part() -> torch.Tensor:
    """Windows of text. `place()` says which part is this region's."""
    index, count = diloco_node.place()
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return values[: len(values) // CONTEXT * CONTEXT].view(-1, CONTEXT)[index::count]


def main() -> None:
    torch.manual_seed(0)  # the first parameters are the same in every region
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)  # a restart finds the same order
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True, dataloader_config=configuration)
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(own_part(), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    data = PreparedLoader(loader)
    with diloco_node.attach(model, optimizer, step="auto", stateful={"data": data}) as diloco:
        for batch in data:  # without end: the run says when it is over
            with accelerator.accumulate(model):
                accelerator.backward(model(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if diloco.should_stop:
                break


if __name__ == "__main__":
    main()
