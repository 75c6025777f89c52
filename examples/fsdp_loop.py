"""A loop with FSDP2 as a region's learner: the line that joins the run is `attach`, after `fully_shard`.

    diloco-node start --region us-east -- torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py
    diloco-node start --region eu-west -- python examples/fsdp_loop.py

A small transformer learns Python's standard library byte by byte. The regions may have any numbers of ranks: each rank
of a region has a part of the model, and its own part of the region's text.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import diloco_node

BATCH, CONTEXT, WIDTH = 8, 64, 48


class NextByte(nn.Module):
    """Guesses each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=windows.device)
        stream = self.embedding(windows[:, :-1]) + self.places
        for layer in self.layers:
            stream = layer(stream, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(stream).flatten(0, 1), windows[:, 1:].flatten())


def own_windows(rank: int, ranks: int) -> torch.Tensor:
    """Windows of text. `place()` says which part is this region's; its ranks share that."""
    index, count = diloco_node.place()
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return values[: len(values) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[index::count][rank::ranks]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = 0, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        rank = dist.get_rank()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)  # the first parameters are the same in every region
    model = NextByte().to(device)
    if ranks > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = own_windows(rank, ranks)
    draw = torch.Generator().manual_seed(rank)
    with diloco_node.attach(model, optimizer, stateful={"draw": draw}) as diloco:
        while not diloco.should_stop:
            batch = windows[torch.randint(len(windows), (BATCH,), generator=draw)].to(device)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step(tokens=BATCH * CONTEXT, loss=loss)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
