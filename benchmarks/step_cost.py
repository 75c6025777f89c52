"""What a region costs its training loop: a step of GPT-2 (124 M parameters, P = H = 24) alone, and attached.

    python benchmarks/step_cost.py [--ranks 1,2] [--steps 10] [--json]
    python benchmarks/step_cost.py --model '{"n_layer": 4, "n_embd": 384, "n_head": 6}'  # 26 M parameters

The learner is pinned to one core, with all its ranks, and supervisor and daemon to the other. It makes its steps alone
first, then attached, then alone again, in the same process. With P = H each step has a snapshot of one fragment and a
version of another one. Two ranks are cut by FSDP2 under torchrun.

`inside` is the part of a step that `diloco.step()` takes, on the slowest rank. `slower` compares the attached steps
with those before and after them; `drift`, these two with one another, is what the machine alone does to such a figure.
`bytes a parameter` is the private memory that all ranks together take more when they are attached: the median of all
steps, and the most. Below it a line for each rank:

- `held`: bytes in tensors and arrays of ours, counted, the most of all steps. `base` is a part of it, `shared` is not:
  that lies in the memory which learner and daemon share.
- `limit`: five bytes for each parameter that the rank owns, and two fragments in float32.
- `resident`: the median of all steps, beside that of a control run, which has no daemon. Shared memory is in it, and
  code that only a run with a daemon loads.

There are no checkpoints: a copy of the optimizer's state would be counted with it.

Needs `pip install transformers`, and two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from restart import PATIENCE_S, POLL_S, Model, write_run

LEARNER: Final = str(Path(__file__).resolve().parent / "step_cost_learner.py")
FRAGMENTS: Final = 24


def control(launcher: list[str], ranks: int) -> list[dict[str, Any]]:
    """What each rank measures without a daemon."""
    with tempfile.TemporaryDirectory(prefix="step-cost-", dir=Path.cwd()) as name:
        subprocess.run(
            [sys.executable, *launcher, LEARNER],
            env={**os.environ, "STEP_COST_FOLDER": name, "DILOCO_SOCKET": ""},
            check=True,
        )
        return [json.loads((Path(name) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def memory_of(one: dict[str, Any], alone: dict[str, Any]) -> dict[str, int]:
    """Bytes of one rank, beside the same rank of the control."""
    held = one["held"]
    return {
        "owned": held["share"],
        "base": held["base"],
        "held": held["own"],
        "shared": held["shared"],
        "limit": 5 * held["share"] + held["two_fragments"],
        "resident": statistics.median(one["resident"]) - statistics.median(alone["resident"]),
    }


async def measure(ranks: int, steps: int) -> dict[str, Any]:
    """The figures of a learner with so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    os.environ["STEP_COST_STEPS"] = str(steps)
    alone_runs = control(launcher, ranks)
    model = Model(("us-east",), fragments=FRAGMENTS, command=(sys.executable, *launcher, LEARNER))
    with tempfile.TemporaryDirectory(prefix="step-cost-", dir=Path.cwd()) as name:
        folder = Path(name)
        (region,) = write_run(folder, model, is_preloading=False)
        settings = (folder / "run.toml").read_text().replace("sync_every = 16", f"sync_every = {FRAGMENTS}")
        (folder / "run.toml").write_text(settings)
        os.environ["STEP_COST_FOLDER"] = name
        files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
        try:
            await region.start(folder / "run.toml", model.command)
            async with asyncio.timeout(PATIENCE_S):
                while not all(one.exists() for one in files):
                    if region.has_exited:
                        raise SystemExit(f"the region ended:\n{region.last_lines(40)}")
                    await asyncio.sleep(POLL_S)
            rounds = (await region.poll())["rounds_committed"]
        finally:
            await region.stop()
        found = [json.loads(one.read_text()) for one in files]
    before, attached, after = (statistics.median(found[0][arm]) for arm in ("before_s", "attached_s", "after_s"))
    alone = (before + after) / 2
    return {
        "ranks": ranks,
        "steps": steps,
        "rounds": rounds,
        "alone_s": alone,
        "attached_s": attached,
        "slower": attached / alone - 1,
        "drift": after / before - 1,
        "inside": max(sum(one["inside_s"]) / sum(one["attached_s"]) for one in found),
        "bytes_a_parameter": sum(statistics.median(one["more_bytes"]) for one in found) / found[0]["parameters"],
        "bytes_at_most": sum(max(one["more_bytes"]) for one in found) / found[0]["parameters"],
        "memory": [memory_of(*pair) for pair in zip(found, alone_runs, strict=True)],
        "parameters": found[0]["parameters"],
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="of the learners to measure [1,2]")
    parser.add_argument("--steps", type=int, default=10, help="of each arm [10]")
    parser.add_argument("--model", default="{}", help="changes to GPT2Config, as JSON [GPT-2 as it is]")
    parser.add_argument("--json", action="store_true", help="one JSON object for each learner")
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("it needs: pip install transformers")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("it needs two cores: one for the learner, one for the daemon")
    os.environ |= {"STEP_COST_CORE": str(cores[0]), "STEP_COST_MODEL": arguments.model}
    os.sched_setaffinity(0, {cores[1]})
    for ranks in map(int, arguments.ranks.split(",")):
        result = asyncio.run(measure(ranks, arguments.steps))
        if arguments.json:
            print(json.dumps(result), flush=True)
            continue
        print(
            f"{ranks} rank(s): a step {result['alone_s']:.2f} s alone, {result['attached_s']:.2f} s attached "
            f"({result['slower']:+.2%}, drift {result['drift']:+.2%}); "
            f"{result['inside']:.2%} of it inside diloco.step(); "
            f"{result['bytes_a_parameter']:.2f} bytes a parameter, at most {result['bytes_at_most']:.2f}; "
            f"{result['rounds']} rounds; "
            f"load {result['load']:.1f}",
            flush=True,
        )
        whole = result["parameters"]
        for rank, one in enumerate(result["memory"]):
            figures = ", ".join(f"{name} {one[name] / whole:.2f}" for name in one if name != "owned")
            print(f"  rank {rank} owns {one['owned']:,} of {whole:,}; bytes a parameter of the model: {figures}")
        print(
            f"  all ranks: held {sum(one['held'] for one in result['memory']) / whole:.2f} bytes a parameter",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
