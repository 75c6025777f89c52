"""Host's time in `diloco.step()` and its hooks of the optimizer, by what the step did: microseconds, lower quartiles.

    python benchmarks/step_host.py [--steps 400] [--layers 12] [--counts] [--against CHECKOUT]
        [--import tests.kit.fakecuda.installed]

A model with GPT-2's 148 tensors, each small, so that hardly anything but the calls themselves takes time; P = H = 24,
an order each step. It is on the CPU, or on a device in software (--import) or in the machine. What waits for other
threads is not counted. What these take by themselves is, for it holds up a loop that launches kernels. With --against
another checkout's learner is measured in turns with this one's.

With --counts it is the calls that the training thread makes, of Python's and C's functions, and on a device in software
launches and waits: figures that do not hang on the machine. 24 layers have the 290 tensors of Llama 8B, and two more.
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


class Meter:
    """What the training thread does in a stretch of its way: microseconds, or the counts of things.

    Attributes:
        figures: of each stretch, by its kind.
    """

    def __init__(self, *, is_counting: bool) -> None:
        self.figures: dict[str, list[float]] = defaultdict(list)
        self._is_counting = is_counting
        self._device = sys.modules.get("tests.kit.fakecuda.fake_device")
        self._calls = 0

    def now(self) -> dict[str, float]:
        """Totals so far, by what is counted."""
        if not self._is_counting:
            return {"": time.thread_time_ns() / 1e3}
        profile = sys.getprofile()
        sys.setprofile(None)  # what this makes of calls is not the learner's
        totals: dict[str, float] = {"calls, ": self._calls}
        if self._device is not None:
            totals |= {"launches, ": self._device.counts()["launches"], "waits, ": len(self._device.own_waits())}
        sys.setprofile(profile)
        return totals

    def note(self, kind: str, *stretches: tuple[dict[str, float], dict[str, float]]) -> None:
        """Note stretches of one kind, each from its begin to its end."""
        for name in stretches[0][0]:
            self.figures[name + kind].append(sum(end[name] - begin[name] for begin, end in stretches))

    def count_calls(self) -> None:
        """Count calls of functions in this thread from now on, which takes time."""
        if self._is_counting:
            sys.setprofile(self._note_call)

    def _note_call(self, _: Any, event: str, __: Any) -> None:
        self._calls += event in ("call", "c_call")


def measure(steps: int, layers: int, *, is_counting: bool) -> dict[str, list[float]]:
    """Figures of each step, by its kind."""
    import torch
    from gpu_daemon import DaemonProcess
    from gpu_model import GPT, Size

    import diloco_node

    meter = Meter(is_counting=is_counting)

    class Adder(torch.optim.Optimizer):
        """Writes to its parameters, and does nothing else; the totals when that began and ended."""

        began: dict[str, float]
        ended: dict[str, float]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Add a little to all."""
            self.began = meter.now()
            torch._foreach_add_(self.param_groups[0]["params"], 1e-6)
            self.ended = meter.now()

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(Size(layers, 32, 2, 16, 2, 128, FRAGMENTS, 0, 0, 0, 0)).to(device)
    optimizer = Adder(model.parameters(), {})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    loss = torch.ones((), device=device)

    with (
        DaemonProcess(FRAGMENTS) as daemon,
        diloco_node.attach(model, optimizer, checkpoint_every_s=0) as diloco,
    ):
        fragments: Any = diloco._fragments

        def train() -> None:
            began = meter.now()
            optimizer.step()
            meter.note("around the optimizer's step", (began, optimizer.began), (optimizer.ended, meter.now()))
            if diloco.steps % 3:
                daemon.order()
            before, began = (fragments._next_snapshot, sum(diloco.versions)), meter.now()
            diloco.step(tokens=8, loss=loss, grad_norm=loss)
            ended = meter.now()
            snapshots, versions = fragments._next_snapshot - before[0], sum(diloco.versions) - before[1]
            kind = " and ".join(
                f"{count} {name}{'s' * (count > 1)}"
                for count, name in ((snapshots, "snapshot"), (versions, "version"))
                if count
            )
            meter.note(kind or "nothing asked for", (began, ended))
            time.sleep(0.002)

        while sum(diloco.versions) < WARM_UP:
            train()
        meter.figures.clear()
        while not fragments.revert._pull_back.is_done:
            train()
        first, meter.figures = meter.figures, defaultdict(list)
        others_ns, own_ns = time.process_time_ns(), time.thread_time_ns()
        meter.count_calls()
        for _ in range(steps):
            train()
        sys.setprofile(None)
        others_ns, own_ns = time.process_time_ns() - others_ns, time.thread_time_ns() - own_ns
    if is_counting:
        return meter.figures
    meter.figures["of other threads, a step"].append((others_ns - own_ns) / 1e3 / steps)
    return meter.figures | {f"{kind}, in the first 64 versions": many for kind, many in first.items()}


def quartile(values: list[float]) -> float:
    """The lower one: others use this machine as well."""
    return sorted(values)[len(values) // 4]


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="to measure [400]")
    parser.add_argument("--layers", type=int, default=12, help="of the model; 12 tensors each, and 4 more [12]")
    parser.add_argument("--counts", action="store_true", help="calls, launches and waits in place of microseconds")
    parser.add_argument("--against", type=Path, default=None, help="another checkout, measured in turns")
    parser.add_argument("--import", dest="module", default="", help="before torch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.module:
            importlib.import_module(options.module)
        print(json.dumps(measure(options.steps, options.layers, is_counting=options.counts)))
        return 0
    here = Path(__file__).resolve().parents[1]
    arms = {"this": here} | ({"other": options.against.resolve()} if options.against else {})
    results: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in arms}
    for _ in range(TURNS if len(arms) > 1 and not options.counts else 1):
        for name, checkout in arms.items():
            command = [sys.executable, __file__, "--child", "--steps", str(options.steps), "--import", options.module]
            command += ["--layers", str(options.layers), *(["--counts"] if options.counts else [])]
            path = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
            environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
            text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
            for kind, many in json.loads(text).items():
                results[name][kind] += many
    for kind, many in sorted(results["this"].items()):
        unit = "" if options.counts else " us"
        line = f"{kind:45} {quartile(many):7.0f}{unit} ({len(many)} steps)"
        if other := results.get("other", {}).get(kind):
            ratio = quartile(many) / quartile(other) if quartile(other) else 1.0
            line += f"; other {quartile(other):7.0f}{unit}: {ratio:.2f}"
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
