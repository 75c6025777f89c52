"""A loop of your own with a `transformers` model of any size, for a run of some length.

    pip install 'diloco-node[hf]'
    diloco-node demo --seconds 600 -- python examples/llama.py --size 10m --steps 600
    diloco-node start --region us-east -- python examples/llama.py --size 1b --data corpus/ --batch 16 --context 2048

A Llama with random weights learns text byte by byte, each region its own rows. Where the run names no end, the schedule
falls over `--steps` of the run. Without a daemon the same loop trains alone, up to `--steps`: with `--batch 32` it is
what four regions with batch 8 are compared with.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import diloco_node
from diloco_node.integrations.shards import ShardLoader

SIZES = {  # layers, width, heads
    "1m": (4, 144, 4),
    "10m": (8, 320, 8),
    "30m": (9, 512, 8),
    "1b": (24, 1_920, 16),
}
HELD_OUT = 128  # rows at the end of the text
WARM_UP = 100


def rows_of(paths: list[Path], context: int) -> torch.Tensor:
    """Return the text of files and folders, as rows of bytes."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    text = b"".join(file.read_bytes() for file in files if "site-packages" not in file.parts)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // context * context].view(-1, context)


def build(size: str) -> LlamaForCausalLM:
    """Return the model, on the GPU where there is one."""
    layers, width, heads = SIZES[size]
    torch.manual_seed(0)  # the first parameters are the same in every region
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return nats per byte of the held-out rows."""
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.long().to(model.device).split(16)]
    return sum(losses) / len(losses)


def epochs(loader: ShardLoader) -> Iterator[torch.Tensor]:
    """Return batches without end: the run, or `--steps`, says when it is over."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama on bytes.")
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--data", type=Path, nargs="+", default=[Path(os.__file__).parent])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--evaluate-every", type=int, default=100)
    options = parser.parse_args()

    is_alone = "DILOCO_SOCKET" not in os.environ
    rows = rows_of(options.data, options.context)
    rows, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    model = build(options.size)
    merged = build(options.size).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.99), weight_decay=0.1)
    loader = ShardLoader(rows, batch_size=options.batch, seed=1)
    evaluate_at = options.evaluate_every
    with diloco_node.attach(model, optimizer, stateful={"data": loader}) as diloco:
        for numbers in epochs(loader):
            done = diloco.progress if diloco.progress is not None else min(1.0, diloco.global_step / options.steps)
            factor = min(1.0, (diloco.global_step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = options.rate * factor
            batch = numbers.long().to(model.device)
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            diloco.step(tokens=batch.numel(), loss=loss.detach(), grad_norm=norm)
            if diloco.should_stop or (is_alone and diloco.global_step >= options.steps):
                break
            if diloco.region_index == 0 and diloco.global_step >= evaluate_at:
                evaluate_at = diloco.global_step + options.evaluate_every
                with diloco.busy("evaluation"):
                    merged.load_state_dict(diloco.global_state_dict())
                    diloco.evaluated(
                        val_loss=held_out_loss(model, held_out), val_loss_global=held_out_loss(merged, held_out)
                    )
        if not diloco.is_interrupted:  # the run is over, so the model holds its final parameters
            loss = held_out_loss(model, held_out)
            diloco.evaluated(val_loss_global=loss)
            sys.stdout.write(f"step {diloco.global_step}: held-out loss {loss:.4f}\n")


if __name__ == "__main__":
    main()
