"""Host's time in `diloco.step()` and its hooks of the optimizer, by what the step did: microseconds, lower quartiles.

    python benchmarks/step_host.py [--steps 400] [--against CHECKOUT] [--import tests.kit.fakecuda.installed]

A model with GPT-2's 148 tensors, each small, so that hardly anything but the calls themselves takes time; P = H = 24,
an order each step. It is on the CPU, or on a device in software (--import) or in the machine. What waits for other
threads is not counted. What these take by themselves is, for it holds up a loop that launches kernels. With --against
another checkout's learner is measured in turns with this one's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

TURNS: Final = 3
FRAGMENTS: Final = 24
WARM_UP: Final = 2 * FRAGMENTS


def measure(steps: int) -> dict[str, list[float]]:
    """Microseconds of each step, by its kind."""
    import torch
    from gpu_daemon import DaemonProcess
    from gpu_model import GPT, Size

    import diloco_node

    class Adder(torch.optim.Optimizer):
        """Writes to its parameters, and does nothing else; the times at which that began and ended."""

        began_ns = ended_ns = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Add a little to all."""
            self.began_ns = time.thread_time_ns()
            torch._foreach_add_(self.param_groups[0]["params"], 1e-6)
            self.ended_ns = time.thread_time_ns()

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(Size(12, 32, 2, 16, 2, 128, FRAGMENTS, 0, 0, 0, 0)).to(device)
    optimizer = Adder(model.parameters(), {})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    loss = torch.ones((), device=device)

    def optimize() -> float:
        started_ns = time.thread_time_ns()
        optimizer.step()
        return (time.thread_time_ns() - optimizer.ended_ns + optimizer.began_ns - started_ns) / 1e3

    times: dict[str, list[float]] = defaultdict(list)
    with (
        DaemonProcess(FRAGMENTS) as daemon,
        diloco_node.attach(model, optimizer, checkpoint_every_s=0) as diloco,
    ):
        fragments: Any = diloco._fragments

        def train() -> None:
            hooks = optimize()
            if diloco.steps % 3:
                daemon.order()
            before = fragments._next_snapshot, sum(diloco.versions)
            started_ns = time.thread_time_ns()
            diloco.step(tokens=8, loss=loss, grad_norm=loss)
            took = (time.thread_time_ns() - started_ns) / 1e3
            snapshots, versions = fragments._next_snapshot - before[0], sum(diloco.versions) - before[1]
            kind = " and ".join(
                f"{count} {name}{'s' * (count > 1)}"
                for count, name in ((snapshots, "snapshot"), (versions, "version"))
                if count
            )
            times["around the optimizer's step"].append(hooks)
            times[kind or "nothing asked for"].append(took)
            time.sleep(0.002)

        while sum(diloco.versions) < WARM_UP:
            train()
        first, times = times, defaultdict(list)
        while not fragments.revert._pull_back.is_done:
            train()
        first, times = times, defaultdict(list)
        others_ns, own_ns = time.process_time_ns(), time.thread_time_ns()
        for _ in range(steps):
            train()
        others_ns, own_ns = time.process_time_ns() - others_ns, time.thread_time_ns() - own_ns
        times["of other threads, a step"].append((others_ns - own_ns) / 1e3 / steps)
    return times | {f"{kind}, in the first 64 versions": many for kind, many in first.items()}


def quartile(values: list[float]) -> float:
    """The lower one: others use this machine as well."""
    return sorted(values)[len(values) // 4]


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="to measure [400]")
    parser.add_argument("--against", type=Path, default=None, help="another checkout, measured in turns")
    parser.add_argument("--import", dest="module", default="", help="before torch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.module:
            importlib.import_module(options.module)
        print(json.dumps(measure(options.steps)))
        return 0
    here = Path(__file__).resolve().parents[1]
    arms = {"this": here} | ({"other": options.against.resolve()} if options.against else {})
    results: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in arms}
    for _ in range(TURNS if len(arms) > 1 else 1):
        for name, checkout in arms.items():
            command = [sys.executable, __file__, "--child", "--steps", str(options.steps), "--import", options.module]
            path = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
            environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
            text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
            for kind, many in json.loads(text).items():
                results[name][kind] += many
    for kind, many in sorted(results["this"].items()):
        line = f"{kind:45} {quartile(many):7.0f} us ({len(many)} steps)"
        if other := results.get("other", {}).get(kind):
            line += f"; other {quartile(other):7.0f} us: {quartile(many) / quartile(other):.2f}"
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
