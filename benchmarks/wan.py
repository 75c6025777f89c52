"""This system against torch DDP and synchronous DiLoCo over the same WAN: step time, bytes, time to a given loss.

    python benchmarks/wan.py [--arms alone,ours,ddp,sync_diloco] [--steps 250] [--json]

Root: four network namespaces, joined by the user-space router of `diloco_node.lab.wan`. A target (5 B parameters, 1 s a
step, 2 Gbit/s and 40 ms between regions) is scaled down to a small model by the formulas in `wan_scale`; the figures
are shown as measured, and scaled back.

| arm | what runs |
|---|---|
| alone | four learners that never talk: what no network at all would give |
| ours | four regions by `diloco-node start`, daemons and learners, mutual TLS, ledger on disk |
| ddp | torch's DistributedDataParallel over Gloo, an all-reduce of float32 gradients in each step |
| sync_diloco | the same learners, an all-reduce of the whole model in float32 over Gloo every H steps |

A step computes for some 30 ms and then sleeps until `--step-seconds`: the sleep stands for an accelerator, and leaves
the two cores of a small machine to the network. Every learner trains on the data of its own region.

`ddp` and `sync_diloco` give the same parameters at the same step on any network, so only a few of their steps go over
the WAN, for the step time, and the loss by step comes from the same program on loopback, without pacing. That both
trained the same way is checked by their losses. Their time to the loss is steps x step time; ours is a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from wan_learner import Spec
from wan_scale import Scale, Target, comparison, lines, ring_bytes, same_losses, step_figures, steps_to

from diloco_node.config.resolve import default_outer
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.namespaces import Place, run_ip
from diloco_node.lab.wan.tun import DEVICE
from diloco_node.transport.authority import init_run

LEARNER = Path(__file__).resolve().with_name("wan_learner.py")
ARMS = ("alone", "ours", "ddp", "sync_diloco")
REGIONS = ("us-east", "us-central", "us-south", "us-west")
MODEL = {"layers": 2, "dim": 384, "heads": 4, "context": 32}
BATCH = 2
LR = 3e-3
WARM_UP_STEPS = 5
ALONE_STEPS = 150
SNAPSHOT_EVERY = 20
HELD_OUT_WINDOWS = 128
QUEUE_MS = 100
"""Of the emulated lines. Not scaled: in packets of 1500 bytes the scaled one would have room for two or three."""

BUDGET_SHARE = 0.9
"""Of the line's rate, as docs/measure-and-budget.md advises."""

START_S = 120.0
PORTS = (7400, 7401)
GLOO_PORT = 29_500

RUN_TOML = """\
[run]
id = "wan"
state_dir = "."
certs_dir = "certs"

[rounds]
fragments = {fragments}
sync_every = {sync_every}
outer_lr = {outer_lr}
outer_momentum = {outer_momentum}

[budget]
egress = "{budget}bit/s"
ingress = "{budget}bit/s"
"""

TOPOLOGY = """\
[wan]
queue = "{queue_ms}ms"

[default_link]
rtt = "{rtt_us}us"
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all arms share.

    Attributes:
        folder: of logs. places: a network namespace per region. scale: see `wan_scale`.
    """

    options: argparse.Namespace
    folder: Path
    places: Sequence[Place]
    scale: Scale

    def spec(self, arm: str, **changes: Any) -> Path:
        """Write the specification of an arm; its log folder is made beside it."""
        options = self.options
        name = changes.pop("name", arm)
        log = self.folder / name
        log.mkdir()
        lr, momentum = default_outer(options.steps // options.sync_every)
        values: dict[str, Any] = {
            "arm": arm,
            "regions": len(self.places),
            "steps": 0,
            "step_s": options.step_seconds,
            "sync_every": options.sync_every,
            "outer_lr": lr,
            "outer_momentum": momentum,
            "interface": DEVICE,
            "master": f"{self.places[0].address}:{GLOO_PORT}",
            "log": str(log),
            "snapshot_every": 0,
            "waits": False,
            **MODEL,
            "batch": BATCH,
            "lr": LR,
            "warmup": 50,
            "schedule_steps": options.steps,
            "seed": options.seed,
        }
        path = log / "spec.json"
        path.write_text(json.dumps(asdict(Spec(**(values | changes)))))
        return path


def read_logs(folder: Path, regions: int, *, steps: int | None = None) -> list[list[dict[str, Any]]]:
    """The whole records of each region, in order; at most `steps` of each."""
    logs = []
    for rank in range(regions):
        path = folder / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        logs.append([json.loads(line) for line in whole.splitlines()[:steps]])
    return logs


# ---- arms of plain processes -----------------------------------------------------------------------------------------


def run_learners(spec: Path, ranks: Sequence[int], places: Sequence[Place] | None) -> None:
    """Start a learner per rank, in its region's namespace or on loopback, and wait for all of them."""
    running = []
    for rank in ranks:
        # What is not paced takes one core only: nothing of it is timed.
        prefix = ["ip", "netns", "exec", places[rank].namespace] if places is not None else ["taskset", "-c", "0"]
        output = (spec.parent / f"{rank}.out").open("wb")
        with output:
            running.append(
                subprocess.Popen(
                    [*prefix, sys.executable, str(LEARNER), str(spec), str(rank)], stdout=output, stderr=output
                )
            )
    try:
        for rank, process in zip(ranks, running, strict=True):
            if process.wait(timeout=1200) != 0:
                raise SystemExit(f"learner {rank} failed:\n{(spec.parent / f'{rank}.out').read_text()[-2000:]}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def run_alone(bench: Bench) -> dict[str, Any]:
    """Four learners at the same time, none of which talks."""
    spec = bench.spec("alone", steps=ALONE_STEPS)
    run_learners(spec, range(len(bench.places)), bench.places)
    figures = step_figures(read_logs(spec.parent, len(bench.places)), warm_up=WARM_UP_STEPS)
    return with_curve(bench, "alone", figures, ranks=[0])


def run_gloo(bench: Bench, arm: str, steps: int) -> dict[str, Any]:
    """DDP or synchronous DiLoCo: some steps over the WAN; the first one is for warming up."""
    spec = bench.spec(arm, steps=steps)
    run_learners(spec, range(len(bench.places)), bench.places)
    logs = read_logs(spec.parent, len(bench.places))
    figures = step_figures(logs, warm_up=1)
    result = with_curve(bench, arm, figures, ranks=range(len(bench.places)))
    curve = read_logs(bench.folder / f"{arm}-loopback", 1)[0]
    result["same_losses_as_on_loopback"] = same_losses(
        [record["loss"] for record in logs[0]], [record["loss"] for record in curve]
    )
    return result


def with_curve(bench: Bench, arm: str, figures: dict[str, float], *, ranks: Sequence[int]) -> dict[str, Any]:
    """Add the loss by step, from the same program on loopback without pacing, and the time to the loss."""
    spec = bench.spec(
        arm,
        name=f"{arm}-loopback",
        steps=bench.options.steps + 1,  # parameters after step n are written at the beginning of step n + 1
        step_s=0.0,
        interface="lo",
        master=f"127.0.0.1:{free_ports(1)[0]}",
        snapshot_every=SNAPSHOT_EVERY,
    )
    run_learners(spec, ranks, None)
    curve = held_out_curve(spec.parent, bench)
    steps = steps_to(curve, bench.options.loss)
    seconds = steps * figures["step_seconds"] if steps is not None else None
    return {**figures, "steps_to_loss": steps, "seconds_to_loss": seconds, "curve": curve}


def held_out_curve(folder: Path, bench: Bench) -> list[tuple[int, float]]:
    """(step, held-out loss in nats per byte) of the parameters that an arm wrote."""
    import torch
    from torch.nn.utils import vector_to_parameters

    from diloco_node.learner.builtin.data import load_corpus
    from diloco_node.learner.builtin.model import ByteGPT
    from diloco_node.learner.builtin.shape import ModelSettings
    from diloco_node.learner.builtin.trainer import held_out_loss

    shape = ModelSettings(**MODEL)
    model = ByteGPT(shape, seed=bench.options.seed)
    windows = load_corpus().held_out_windows(HELD_OUT_WINDOWS, shape.context)
    curve = []
    for path in sorted(folder.glob("*.npy"), key=lambda one: int(one.stem)):
        vector_to_parameters(torch.from_numpy(np.load(path)), model.parameters())
        curve.append((int(path.stem), held_out_loss(model, windows)))
        path.unlink()
    return curve


# ---- ours ------------------------------------------------------------------------------------------------------------


async def run_ours(bench: Bench) -> dict[str, Any]:
    """Four regions with real daemons, until every learner has made its steps."""
    options, folder = bench.options, bench.folder / "regions"
    spec = bench.spec("ours", snapshot_every=SNAPSHOT_EVERY, waits=True)
    names = [place.region for place in bench.places]
    init_run(folder / "certs", "wan", names)
    lr, momentum = default_outer(options.steps // options.sync_every)
    text = RUN_TOML.format(
        fragments=options.fragments,
        sync_every=options.sync_every,
        outer_lr=lr,
        outer_momentum=momentum,
        budget=int(BUDGET_SHARE * bench.scale.rate_bits_per_s),
    )
    regions = []
    for place in bench.places:
        text += f'\n[regions.{place.region}]\naddress = "{place.address}:{PORTS[0]}"\nadmin_port = {PORTS[1]}\n'
        regions.append(RegionProcess(place.region, PORTS[1], folder / place.region, place.namespace))
    (folder / "run.toml").write_text(text)
    try:
        for rank, region in enumerate(regions):
            await region.start(folder / "run.toml", [sys.executable, str(LEARNER), str(spec), str(rank)])
        await _until(regions, lambda: _is_ready(regions, spec.parent), START_S)
        (spec.parent / "go").touch()
        await _until(
            regions, lambda: _is_trained(bench, spec.parent), START_S + 5 * bench.options.steps * bench.scale.step_s
        )
        status = [await region.poll() for region in regions]
    finally:
        await asyncio.gather(*(region.stop() for region in regions))
    return _ours_figures(bench, spec.parent, status)


def _is_ready(regions: Sequence[RegionProcess], logs: Path) -> bool:
    """Every learner holds the first parameters, every region too, and nothing of them is on its way any more."""
    has_all = all(region.status.get("versions") and not region.status["fetching"] for region in regions)
    return has_all and all((logs / f"{rank}.ready").exists() for rank in range(len(regions)))


def _is_trained(bench: Bench, logs: Path) -> bool:
    return min(len(log) for log in read_logs(logs, len(bench.places))) > bench.options.steps


async def _until(regions: Sequence[RegionProcess], is_so: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        gone = [region for region in regions if region.has_exited]
        if gone or time.monotonic() > deadline_s:
            one = gone[0] if gone else regions[0]
            raise SystemExit(f"region {one.name} ended or hangs:\n{one.last_lines()}")
        await asyncio.sleep(1.0)
        await asyncio.gather(*(region.poll() for region in regions))


def _ours_figures(bench: Bench, folder: Path, status: Sequence[dict[str, Any]]) -> dict[str, Any]:
    options = bench.options
    logs = read_logs(folder, len(bench.places), steps=options.steps)
    curve = [(step, loss) for step, loss in held_out_curve(folder, bench) if step <= options.steps]
    steps = steps_to(curve, options.loss)
    used = {"control": 0, "all": 0}
    for one in status:
        for peer in one["budget"]["peers"].values():
            used["control"] += peer["lanes"]["control"]["used_bytes"]
            used["all"] += peer["correction_bytes"] + sum(lane["used_bytes"] for lane in peer["lanes"].values())
    return {
        **step_figures(logs, warm_up=WARM_UP_STEPS),
        "steps_to_loss": steps,
        "seconds_to_loss": logs[0][steps - 1]["seconds"] - logs[0][0]["started"] if steps is not None else None,
        "curve": curve,
        "rounds_committed": max(one["rounds_committed"] for one in status),
        "rounds_possible": status[0]["inner_steps"] * options.fragments / options.sync_every,
        "participation": min(one["participation"] for one in status),
        "control_share": used["control"] / used["all"] if used["all"] else None,
    }


# ---- all of it -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shaped(scale: Scale, folder: Path) -> Iterator[Sequence[Place]]:
    """The WAN of the small run, by the user-space router."""
    text = TOPOLOGY.format(queue_ms=QUEUE_MS, rtt_us=round(scale.rtt_s * 1e6))
    for region in REGIONS:
        text += f'\n[regions.{region}]\negress = "{int(scale.rate_bits_per_s)}bit/s"\n'
    file = folder / "scaled.toml"
    file.write_text(text)
    state = emulation.up(file, run=f"bench{os.getpid()}", owner_pid=os.getpid())
    try:
        for place in state.places():
            # Without segmentation offload the interface counts packets as they would be on a wire.
            run_ip("-n", place.namespace, "link", "set", DEVICE, "gso_max_segs", "1")
        yield state.places()
    finally:
        emulation.down(state.run)


def parameters_of_model() -> int:
    """How many the small model has."""
    from math import prod

    from diloco_node.learner.builtin.shape import ModelSettings, parameter_shapes

    return sum(prod(shape) for shape in parameter_shapes(ModelSettings(**MODEL)).values())


def measure(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Run the arms; the result as plain values."""
    scale = Scale(Target(), parameters_of_model(), options.step_seconds)
    runs = {
        "alone": run_alone,
        "ours": lambda bench: asyncio.run(run_ours(bench)),
        "ddp": lambda bench: run_gloo(bench, "ddp", options.ddp_steps + 1),
        "sync_diloco": lambda bench: run_gloo(bench, "sync_diloco", options.sync_cycles * options.sync_every + 1),
    }
    arms: dict[str, dict[str, Any]] = json.loads(options.earlier.read_text())["arms"] if options.earlier else {}
    with tempfile.TemporaryDirectory(prefix="wan-", dir=options.folder) as name:
        folder = Path(name)
        with shaped(scale, folder) as places:
            for arm in options.arms.split(","):
                started_s = time.monotonic()
                arms[arm] = runs[arm](Bench(options, folder, places, scale))
                arms[arm]["load_average"] = os.getloadavg()[0]
                say(f"{arm}: {time.monotonic() - started_s:.0f} s")
    return {
        "target": asdict(scale.target),
        "parameters": scale.parameters,
        "paced_step_seconds": scale.step_s,
        "rate_bits_per_s": scale.rate_bits_per_s,
        "rtt_seconds": scale.rtt_s,
        "regions": len(REGIONS),
        "sync_every": options.sync_every,
        "fragments": options.fragments,
        "loss": options.loss,
        "ring_seconds": ring_bytes(scale.parameters, len(REGIONS)) * 8 / scale.rate_bits_per_s,
        "cpus": os.cpu_count(),
        "arms": {arm: arms[arm] for arm in ARMS if arm in arms},
        "comparison": comparison(arms),
        "notes": notes(options, arms),
    }


def notes(options: argparse.Namespace, arms: dict[str, dict[str, Any]]) -> list[str]:
    """What a reader must know beside the figures."""
    found = [
        f"paced: a step computes on one of {os.cpu_count()} cores and sleeps until {options.step_seconds:g} s; "
        "the sleep stands for an accelerator",
        f"the lines' queue is {QUEUE_MS} ms and packets are 1500 B in both: neither scales",
    ]
    for arm in ("ddp", "sync_diloco"):
        if arm in arms:
            same = "are the same" if arms[arm]["same_losses_as_on_loopback"] else "DIFFER"
            found.append(
                f"{arm}: {arms[arm]['steps']:.0f} steps over the WAN; loss by step from the same program on loopback "
                f"(losses of the common steps {same}), time to the loss = steps x step time"
            )
    if "ours" in arms:
        ours = arms["ours"]
        found.append(
            f"ours: by the clock, {ours['rounds_committed']} of {ours['rounds_possible']:.0f} rounds committed, "
            f"participation at least {ours['participation']:.0%}, control messages (not scaled) "
            f"{ours['control_share']:.1%} of the bytes, budget {BUDGET_SHARE:.0%} of the line"
        )
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="which, in this order [all]")
    parser.add_argument("--steps", type=int, default=250, help="inner steps of ours, and of the loss curves [250]")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="the pace of an inner step [0.2]")
    parser.add_argument("--sync-every", type=int, default=48, help="H, also of sync_diloco [48]")
    parser.add_argument("--fragments", type=int, default=12, help="P of ours [12]")
    parser.add_argument("--ddp-steps", type=int, default=2, help="steps of DDP over the WAN, after one [2]")
    parser.add_argument("--sync-cycles", type=int, default=1, help="cycles of sync_diloco over the WAN [1]")
    parser.add_argument("--loss", type=float, default=2.6, help="held-out loss to reach, nats per byte [2.6]")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data [0]")
    parser.add_argument("--folder", type=Path, help="where the runs' files lie meanwhile [the system's]")
    parser.add_argument("--earlier", type=Path, help="a --json of the same settings: its arms are shown, too")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    unknown = sorted(set(options.arms.split(",")) - set(ARMS))
    if unknown:
        parser.error(f"arm {unknown[0]!r} is unknown; there are {', '.join(ARMS)}")
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/wan.py makes network namespaces: run it as root\n")
        return 2
    result = measure(options, lambda line: sys.stderr.write(line + "\n"))
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
