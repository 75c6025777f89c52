"""`python hiding_script.py WAY`: a training script whose first life catches what refuses it. The next ones train.

The ways: `attach` and `attach-ever` give an optimizer that no run takes, `tokens` a wrong count, `rank-ever` that on
rank 1 alone, `weights-ever` other weights in the loop. Those without `ever` end with exit code 0 after some steps; the
others never look at `should_stop`.

`python hiding_script.py start ...` is a region's supervisor with less patience.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

PATIENCE_S = 10.0
WAYS = ("attach", "attach-ever", "tokens", "rank-ever", "weights-ever")


def supervise(arguments: list[str]) -> int:
    """Be the supervisor of a demo's region."""
    from diloco_node.lab.demo.faulty_region import run_start
    from diloco_node.supervisor import learner_watch

    learner_watch.REFUSED_S = PATIENCE_S  # type: ignore[misc]
    return run_start(arguments, ("-m", "diloco_node.lab.demo.faulty_region", "daemon"))


def learn(way: str) -> None:
    """Train, in the first life as the way says."""
    import torch

    import diloco_node

    assert way in WAYS
    mark = Path(os.environ["DILOCO_STATE"]) / "refused"
    is_first = not mark.exists()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    rank = int(os.environ.get("RANK", "0"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    others = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    diloco = None
    if is_first and way.startswith("attach"):
        with contextlib.suppress(Exception):
            diloco = diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    else:
        diloco = diloco_node.attach(model, optimizer)
    mark.touch()  # behind attach(), where ranks have met
    counts_wrongly = is_first and (way == "tokens" or (way == "rank-ever" and rank == 1))
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
                diloco.step(tokens=0.5 if counts_wrongly and steps == 10 else 8)  # type: ignore[arg-type]
        time.sleep(0.05)
    with contextlib.suppress(Exception) if is_first else contextlib.nullcontext():
        if diloco is not None:
            diloco.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        sys.exit(supervise(sys.argv[1:]))
    learn(sys.argv[1])
