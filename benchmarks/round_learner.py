"""The learner of benchmarks/round.py: 20 Mparam that move between rounds, steps that cost nothing."""

from __future__ import annotations

import time

import torch

import diloco_node

STEP_S = 0.002


def main() -> None:
    """Step until told to stop; after each applied version the parameters move once, as training would move them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(5)))
    noise = [1e-3 * torch.randn_like(parameter) for parameter in model.parameters()]
    seen = None
    with diloco_node.attach(model) as diloco:
        while not diloco.should_stop:
            time.sleep(STEP_S)
            diloco.step(tokens=1, loss=0.0)
            if seen != diloco.versions:
                seen = diloco.versions
                with torch.no_grad():
                    for parameter, one in zip(model.parameters(), noise, strict=True):
                        parameter.add_(one)


if __name__ == "__main__":
    main()
