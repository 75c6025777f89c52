"""`python hiding_script.py WAY`: a training script whose first life catches what refuses it. The next ones train.

The ways: `attach` and `attach-ever` give an optimizer that no run takes, `tokens` a wrong count, `weights-ever` other
weights in the loop. Those without `ever` end with exit code 0 after some steps; the others never look at `should_stop`.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch

import diloco_node

HIDDEN = ("attach", "attach-ever", "tokens", "weights-ever")


def main() -> None:
    """See the module."""
    way = sys.argv[1]
    assert way in HIDDEN
    mark = Path(os.environ["DILOCO_STATE"]) / "refused"
    is_first = not mark.exists()
    mark.touch()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    others = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    diloco = None
    if is_first and way.startswith("attach"):
        with contextlib.suppress(Exception):
            diloco = diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    else:
        diloco = diloco_node.attach(model, optimizer)
    steps = 0
    while steps < 30 or way.endswith("ever") if is_first else diloco is None or not diloco.should_stop:
        inputs = torch.randn(8, 16)
        model(inputs).square().mean().backward()
        with contextlib.suppress(Exception) if is_first else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if is_first and way == "weights-ever" and steps == 10:
            model.load_state_dict(others)
        with contextlib.suppress(Exception) if is_first else contextlib.nullcontext():
            if diloco is not None:
                diloco.step(tokens=0.5 if is_first and way == "tokens" and steps == 10 else 8)  # type: ignore[arg-type]
        time.sleep(0.05)
    with contextlib.suppress(Exception) if is_first else contextlib.nullcontext():
        if diloco is not None:
            diloco.close()


if __name__ == "__main__":
    main()
