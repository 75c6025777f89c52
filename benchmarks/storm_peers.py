"""The storm of `diloco-node demo --chaos`, over other systems: torchft's DiLoCo, and torchrun's elastic DDP.

    python benchmarks/storm_peers.py [--arms torchft,torchft_quick,elastic] [--seconds 300] [--mtbf 5] [--json]

Each arm trains the demo's model twice for the same time: undisturbed, and with SIGKILLs at the times of the demo's
plan. Goodput is the tokens that ended in the model in the storm, over those of the undisturbed run. The plan is that of
`demo --chaos` with the same seed, regions, seconds and mean time. Theirs has one process for each region of ours, so
whatever part the plan strikes, that process is killed. It is started again at once.

What was chosen for them:

- Lighthouse, TCP stores and torchrun's agent are never killed; ours has no process that is spared.
- torchft: the demo's four fragments and H = 16, no overlap; its heal from peers over HTTP. `torchft` has the times of
  its README and of its example train_diloco.py, `torchft_quick` much shorter ones.
- elastic: one agent for all ranks, so that no rendezvous over nodes is waited for; a checkpoint every half second.
- Synchronisation and checkpoints count to the minimal time of a step, so they are free while a step has time left.

Needs `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from storm_figures import Kill, commits_kept, events_of, return_s, steps_kept
from storm_learner import CORPUS_NAME, StormSpec

from diloco_node.config.resolve import default_outer
from diloco_node.lab.chaos.fault_plan import FaultPlan, storm
from diloco_node.lab.chaos.fault_script import read_script
from diloco_node.lab.chaos.story import longest_gap
from diloco_node.lab.demo.demo_run import NAMES, STEP_SECONDS, SYNC_EVERY
from diloco_node.lab.demo.region_processes import free_ports
from diloco_node.lab.demo.storm import CALM_S
from diloco_node.learner.builtin.data import load_corpus
from diloco_node.numeric import NS_PER_S

HERE = Path(__file__).resolve().parent
START_S = 240.0
"""Until every group has made a step: as the demo's own limit."""

CHECKPOINT_EVERY = round(0.5 / STEP_SECONDS)
"""Half a second of steps: a tenth of the time between two deaths. A save takes some ms of a step's free time."""

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    # Else torchrun's ranks find the addresses of dead ones in the agent's store, and fail once after each restart
    # (pytorch issue 135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

TORCHFT = {
    # join, tick: README.md; heartbeat: the lighthouse's default; the others: train_diloco.py
    "torchft": {"join_ms": 10_000, "tick_ms": 100, "heartbeat_ms": 5000, "timeout_s": 30.0, "gloo_timeout_s": 10.0},
    # Ten of the manager's heartbeats. Not a shorter time to join: a group that was left out waits from then on, so as
    # soon as enough others ask, the quorum is closed without the slowest, and so on for ever.
    "torchft_quick": {"join_ms": 10_000, "tick_ms": 20, "heartbeat_ms": 1000, "timeout_s": 5.0, "gloo_timeout_s": 2.0},
}

ARMS = (*TORCHFT, "elastic")


def main() -> int:
    """Run the arms and print the result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit in order ends the trainers too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="which to run")
    parser.add_argument("--groups", type=int, default=4, help="replica groups, or ranks of DDP [4]")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, of each run [300]")
    parser.add_argument("--mtbf", type=float, default=5.0, help="seconds between two kills, on average [5]")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data and storm [0]")
    parser.add_argument(
        "--script", type=Path, help="the kills of this file, as `demo --chaos` leaves it, and no others"
    )
    parser.add_argument("--keep", type=Path, help="leave the logs in this new folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    if unknown := sorted(set(arms) - set(ARMS)):
        parser.error(f"there is no arm {unknown[0]!r}: {', '.join(ARMS)}")
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep {arguments.keep} is there already: name a new folder")
    names = sorted(NAMES[: arguments.groups])
    calm_ns = int((arguments.seconds - CALM_S) * NS_PER_S)
    if arguments.script is not None:
        plan = read_script(arguments.script, names).until(calm_ns)
    else:
        plan = storm(names, seed=arguments.seed, mtbf_ns=int(arguments.mtbf * NS_PER_S), end_ns=calm_ns)
    result: dict[str, Any] = {
        "groups": arguments.groups,
        "seconds": arguments.seconds,
        "mtbf_seconds": arguments.mtbf,
        "seed": arguments.seed,
        "kills_planned": len(plan.faults),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "torchft")},
    }
    for arm in arms:
        runs = {}
        for title, faults in (("undisturbed", FaultPlan(())), ("storm", plan)):
            runs[title] = measure(arm, title, names, faults, arguments)
            if not arguments.json:
                print(f"{arm} {title}: {json.dumps(runs[title])}", flush=True)
        goodput = runs["storm"]["tokens"] / runs["undisturbed"]["tokens"]
        result[arm] = {"goodput": goodput, **runs}
        if not arguments.json:
            print(f"{arm} goodput: {goodput:.3f}", flush=True)
    if arguments.json:
        print(json.dumps(result))
    return 0


def measure(
    arm: str, title: str, names: Sequence[str], plan: FaultPlan, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One run of an arm; its figures within the time asked for."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        np.save(folder / CORPUS_NAME, load_corpus().train)
        spec = StormSpec(
            groups=arguments.groups,
            step_s=STEP_SECONDS,
            seed=arguments.seed,
            layers=2,
            dim=64,
            heads=4,
            context=64,
            batch=8,
            lr=6e-3,
            warmup=100,
            schedule_steps=max(50, int(arguments.seconds / STEP_SECONDS)),
            folder=name,
        )
        load = os.getloadavg()[0]
        try:
            with torchft_arm(arm, spec) if arm in TORCHFT else elastic_arm(spec) as (strike, trains):
                wait(trains, START_S)
                begun_s = time.monotonic()
                kills = list(strike_all(plan, names, strike, begun_s))
                end_s = begun_s + arguments.seconds
                time.sleep(max(0.0, end_s - time.monotonic()))
        finally:
            if arguments.keep is not None:
                shutil.copytree(folder, arguments.keep / f"{arm}-{title}")
        events = events_of(folder, spec.groups)
    if arm in TORCHFT:
        tokens, progress = commits_kept(events, begun_s, end_s)
    else:
        steps, progress = steps_kept(events, kills, begun_s, end_s)
        tokens = float(steps * spec.groups * spec.batch * spec.context)
    back_s = return_s(events, kills, end_s)
    return {
        "tokens": round(tokens),
        "kills": len(kills),
        "kills_that_met_nobody": len(plan.faults) - len(kills),
        "longest_gap_seconds": longest_gap(progress, begun_s, end_s),
        "back_seconds_median": float(np.median(back_s)) if back_s else None,
        "refused": sum(one["kind"] == "refused" and begun_s < one["at"] <= end_s for one in events),
        "load": [load, os.getloadavg()[0]],
    }


def strike_all(plan: FaultPlan, names: Sequence[str], strike: Callable[[int], bool], begun_s: float) -> Iterator[Kill]:
    """Every fault of the plan at its time; those that met somebody."""
    for fault in plan.faults:
        time.sleep(max(0.0, begun_s + fault.at_ns / NS_PER_S - time.monotonic()))
        rank = names.index(fault.target.region)
        if strike(rank):
            yield Kill(time.monotonic(), rank)


def wait(until: Callable[[], bool], limit_s: float) -> None:
    """Poll until something is so.

    Raises:
        SystemExit: it takes longer than the limit.
    """
    deadline_s = time.monotonic() + limit_s
    while not until():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not all groups train after {limit_s:.0f} s: see the logs (--keep)")
        time.sleep(0.1)


class Keeper:
    """Keeps one command running: starts it again at once whenever it ends, until it is stopped."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._command = list(command)
        self._output = output
        self._lock = threading.Lock()
        self._is_stopping = False
        self.process = self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **ENVIRONMENT}
        with self._output.open("ab") as output:
            return subprocess.Popen(self._command, stdout=output, stderr=output, env=environment)

    def _keep(self) -> None:
        while True:
            self.process.wait()
            with self._lock:
                if self._is_stopping:
                    return
                self.process = self._start()

    def kill(self) -> bool:
        """SIGKILL; whether there was anybody."""
        with self._lock:
            if self.process.poll() is not None:
                return False
            self.process.kill()
            return True

    def stop(self) -> None:
        """End it and its children, and start it no more."""
        with self._lock:
            self._is_stopping = True
            children = family(self)
            self.process.kill()
        for one in children:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._thread.join()


def family(keeper: Keeper) -> list[psutil.Process]:
    """The children of what it keeps, and theirs."""
    try:
        return psutil.Process(keeper.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


Arm = tuple[Callable[[int], bool], Callable[[], bool]]
"""Kill the process of a rank: whether there was one. And: whether every rank has made a step."""


@contextmanager
def torchft_arm(arm: str, spec: StormSpec) -> Iterator[Arm]:
    """A lighthouse, the stores in this process, and one kept trainer for each group."""
    from torch.distributed import TCPStore

    times = TORCHFT[arm]
    folder = Path(spec.folder)
    (port,) = free_ports(1)
    lighthouse = Keeper(
        [
            str(Path(sys.executable).with_name("torchft_lighthouse")),
            f"--bind=127.0.0.1:{port}",
            f"--min_replicas={spec.min_replicas}",
            f"--join_timeout_ms={times['join_ms']}",
            f"--quorum_tick_ms={times['tick_ms']}",
            f"--heartbeat_timeout_ms={times['heartbeat_ms']}",
        ],
        folder / "lighthouse.log",
    )
    # In the launcher, as torchrun has it: a group's store outlives its trainer.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(spec.groups)]
    outer_lr, outer_momentum = default_outer(spec.schedule_steps // SYNC_EVERY)
    spec = dataclasses.replace(
        spec,
        sync_every=SYNC_EVERY,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        timeout_s=times["timeout_s"],
        gloo_timeout_s=times["gloo_timeout_s"],
        lighthouse=f"http://127.0.0.1:{port}",
        stores=tuple(store.port for store in stores),
    )
    file = write(spec)
    script = str(HERE / "storm_torchft.py")
    keepers = [
        Keeper([sys.executable, script, str(file), str(rank)], folder / f"{rank}.log") for rank in range(spec.groups)
    ]
    try:
        yield lambda rank: keepers[rank].kill(), lambda: all_train(folder, range(spec.groups))
    finally:
        for keeper in [*keepers, lighthouse]:
            keeper.stop()


@contextmanager
def elastic_arm(spec: StormSpec) -> Iterator[Arm]:
    """One agent of torchrun for all ranks."""
    spec = dataclasses.replace(spec, checkpoint_every=CHECKPOINT_EVERY)
    folder = Path(spec.folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={spec.groups}", "--max-restarts=100000", "--monitor-interval=0.1"]
    keeper = Keeper([*command, str(HERE / "storm_elastic.py"), str(write(spec))], folder / "torchrun.log")

    def strike(rank: int) -> bool:
        for process in family(keeper):
            # A process that is just ending has no environment any more.
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    process.kill()
                    return True
        return False

    try:
        yield strike, lambda: all_train(folder, range(spec.groups))
    finally:
        keeper.stop()


def all_train(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether every rank has made a step, now or in an earlier life."""
    logs = [folder / f"{rank}.jsonl" for rank in ranks]
    return all(log.exists() and '"trains"' in log.read_text() for log in logs)


def write(spec: StormSpec) -> Path:
    """The specification as the learners read it."""
    file = Path(spec.folder) / "spec.json"
    file.write_text(json.dumps(dataclasses.asdict(spec)))
    return file


if __name__ == "__main__":
    sys.exit(main())
