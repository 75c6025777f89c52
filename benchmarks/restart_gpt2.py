"""The second learner of benchmarks/restart.py: GPT-2 with 124 M parameters, random weights, random tokens."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import diloco_node

BATCH, CONTEXT = 1, 64
"""Small: what is measured is the way to the first step, on few cores."""


def main() -> None:
    """Train until told to stop."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config()
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with diloco_node.attach(model, optimizer) as diloco:
        while not diloco.should_stop:
            tokens = torch.randint(config.vocab_size, (BATCH, CONTEXT), device=device)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diloco.step(tokens=tokens.numel(), loss=loss.detach())


if __name__ == "__main__":
    main()
