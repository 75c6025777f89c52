"""From the death of a learner to its next step: SIGKILL, again and again, with `[learner] preload` and without.

Two models: the demo's, trained by the built-in trainer, and GPT-2 with 124 M parameters from `transformers`, with
random weights, trained by a script of its own (benchmarks/restart_gpt2.py). The clock runs from just before the SIGKILL
until the next process has counted its first step in the memory that the supervisor keeps. That is looked at every 2 ms.

    python benchmarks/restart.py [--kills 10] [--seconds 12] [--models demo,gpt2] [--json]

The second model needs `pip install transformers`; without it that arm is left out, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_node.lab.demo.demo_report import build_report
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.shared_memory import COUNTERS_AREA, request_area
from diloco_node.state_names import MEMORY_SOCKET_NAME
from diloco_node.storage.trained import AREA_BYTES, Trained
from diloco_node.transport.authority import init_run
from diloco_node.unix_sockets import process_of, socket_path

HERE: Final = Path(__file__).resolve().parent
LOOK_S: Final = 0.002
POLL_S: Final = 0.1
PATIENCE_S: Final = 900.0
STEPS_BETWEEN: Final = 3
"""A learner is not killed before it has made so many: it is a learner that runs well."""

RUN_TOML: Final = """\
[run]
id = "restart"
state_dir = "."
certs_dir = "certs"

[model]
layers = 2
dim = 64
heads = 4
context = 64
batch = 8
schedule_steps = 100000
step_time_min = "50ms"

[rounds]
fragments = {fragments}
sync_every = 16
overlap_steps = 2
"""


@dataclass(frozen=True, slots=True)
class Model:
    """One model and how it is trained.

    Attributes:
        regions: so many run beside each other. fragments: P.
        command: () for the built-in trainer. preload: what "on" means; None: its default.
        needs: a module.
    """

    regions: tuple[str, ...]
    fragments: int
    command: tuple[str, ...] = ()
    preload: str | None = None
    needs: str = ""


GPT2_SCRIPT: Final = str(HERE / "restart_gpt2.py")
MODELS: Final = {
    "demo": Model(("us-east", "us-west"), fragments=4),
    # One region: two of them need 10 GB, and would measure how they share two cores.
    "gpt2": Model(
        ("us-east",),
        fragments=12,
        command=(sys.executable, GPT2_SCRIPT),
        preload="transformers.models.gpt2.modeling_gpt2",
        needs="transformers",
    ),
}


def main() -> int:
    """Run the arms and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each arm; the median counts [10]")
    parser.add_argument("--seconds", type=float, default=12.0, help="from one kill to the next, at least [12]")
    parser.add_argument("--models", default=",".join(MODELS), help=f"which to run [{','.join(MODELS)}]")
    parser.add_argument("--preload", default="on,off", help="which to run [on,off]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    models, preloads = arguments.models.split(","), arguments.preload.split(",")
    for option, given, known in (("--models", models, [*MODELS]), ("--preload", preloads, ["on", "off"])):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{option} has no {unknown[0]!r}: {', '.join(known)}")
    result: dict[str, Any] = {"cpus": os.cpu_count(), "kills": arguments.kills, "seconds": arguments.seconds}
    code = 0
    for name in models:
        model = MODELS[name]
        if model.needs and importlib.util.find_spec(model.needs) is None:
            sys.stderr.write(f"{name} is NOT measured: pip install {model.needs}\n")
            code = 1
            continue
        for preload in preloads:
            arm = asyncio.run(measure(model, arguments.kills, arguments.seconds, is_preloading=preload == "on"))
            result[f"{name}_{preload}"] = arm
            if not arguments.json:
                show(f"{name}, preload {preload}", arm)
    if arguments.json:
        print(json.dumps(result))
    return code


def show(name: str, arm: dict[str, Any]) -> None:
    """The figures for people."""
    print(
        f"{name:<18} median {arm['median_s']:.2f} s, min {arm['min_s']:.2f}, max {arm['max_s']:.2f}, "
        f"of {len(arm['seconds'])}; load {arm['load_before']:.1f} to {arm['load_after']:.1f}; "
        f"{arm['discarded_tokens_per_kill']:.0f} tokens discarded per kill, a step has {arm['step_tokens']}",
        flush=True,
    )


async def measure(model: Model, kills: int, seconds: float, *, is_preloading: bool) -> dict[str, Any]:
    """One arm: seconds from each death to the next step, and what the deaths cost."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="restart-", dir=Path.cwd()) as name:
        folder = Path(name)
        regions = write_run(folder, model, is_preloading=is_preloading)
        try:
            for region in regions:
                await region.start(folder / "run.toml", model.command)
            for region in regions:
                await wait_for_steps(region)
            victim = Victim(regions[0])
            taken = [await victim.kill(seconds) for _ in range(kills)]
            if not await regions[0].finish():
                raise SystemExit(f"the run does not end:\n{regions[0].last_lines(40)}")
            for region in regions:
                assert region.process is not None
                await asyncio.wait_for(region.process.wait(), PATIENCE_S)
            report = build_report(folder, sorted(model.regions), wan=None)
        finally:
            await asyncio.gather(*(region.stop() for region in regions))
    if not report["tokens"]["balanced"]:
        raise SystemExit(f"tokens are missing from the account: {report['tokens']['faults']}")
    return {
        "median_s": statistics.median(taken),
        "min_s": min(taken),
        "max_s": max(taken),
        "seconds": taken,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "step_tokens": victim.step_tokens,
        "tokens": report["tokens"],
        "discarded_tokens_per_kill": report["tokens"]["discarded"] / kills,
    }


def write_run(folder: Path, model: Model, *, is_preloading: bool) -> list[RegionProcess]:
    """Certificates, settings, and the regions, not started."""
    init_run(folder / "certs", "restart", model.regions)
    ports = free_ports(2 * len(model.regions))
    text = RUN_TOML.format(fragments=model.fragments)
    if not is_preloading:
        text += "\n[learner]\npreload = []\n"
    elif model.preload is not None:
        text += f"\n[learner]\npreload = {json.dumps(model.preload.split(','))}\n"
    regions = []
    for name, port, admin_port in zip(model.regions, ports[::2], ports[1::2], strict=True):
        text += f'\n[regions.{name}]\naddress = "127.0.0.1:{port}"\nadmin_port = {admin_port}\n'
        regions.append(RegionProcess(name, admin_port, folder / name))
    (folder / "run.toml").write_text(text)
    return regions


async def wait_for_steps(region: RegionProcess) -> int:
    """Until its learner runs well. Returns the learner's process."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not region.has_exited:
        status = await region.poll()
        if (status.get("learner") or {}).get("step", 0) >= STEPS_BETWEEN:
            return int(status["pids"]["learner"])
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"{region.name} does not train:\n{region.last_lines(40)}")


class Victim:
    """A region whose learner is killed, seen through its counters in shared memory."""

    def __init__(self, region: RegionProcess) -> None:
        self.step_tokens = 0
        self._region = region
        self._area = request_area(socket_path(region.state_dir, MEMORY_SOCKET_NAME), COUNTERS_AREA, AREA_BYTES)

    def _read(self) -> Trained:
        """What the newest incarnation has counted."""
        slots = struct.Struct("<QQQ").iter_unpack(self._area[:AREA_BYTES])
        return max((Trained(*slot) for slot in slots), key=lambda one: one.incarnation)

    async def kill(self, seconds: float) -> float:
        """Kill the learner once it runs well. Returns the seconds until the next one has made a step.

        Args:
            seconds: how long the call takes, at least.
        """
        pid = await wait_for_steps(self._region)
        process = process_of(pid)
        started_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while process is not None and process_of(pid) == process:  # noqa: ASYNC110 - the kernel's
            await asyncio.sleep(LOOK_S)
        dead = self._read()
        self.step_tokens = dead.tokens // dead.steps
        # The next one may go on with the same incarnation, where this one stood.
        while (now := self._read()) == dead or not now.steps:
            if self._region.has_exited or time.monotonic() - started_s > PATIENCE_S:
                raise SystemExit(f"no learner came back:\n{self._region.last_lines(40)}")
            await asyncio.sleep(LOOK_S)
        taken_s = time.monotonic() - started_s
        await asyncio.sleep(max(0.0, seconds - taken_s))
        return taken_s


if __name__ == "__main__":
    sys.exit(main())
