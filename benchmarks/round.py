"""One round of 20 Mparam (80 MiB float32) between two regions on loopback, beside torchft's DiLoCo over Gloo.

Ours is timed from the leader opening the round until both learners can read the new parameters: two supervisors, two
daemons, two learners, mutual TLS, ledger and payloads fsynced. torchft is timed around its synchronisation: two
processes, no TLS, nothing on disk. Both run here and now, one after the other; the figures to quote are the ratios.

    python benchmarks/round.py [--rounds 20] [--json]

Bytes are those of the loopback interface (in a network namespace of our own where that is allowed), CPU seconds those
of all processes of an arm. Needs `pip install torchft==0.2.0` for the comparison (make bench does that).
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
import time
from pathlib import Path
from typing import Any

import psutil

from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.transport.authority import init_run

HERE = Path(__file__).resolve().parent
REGIONS = ("east", "west")
PARAMETERS = 5 * 2048 * 2048
IN_NAMESPACE = "ROUND_IN_NAMESPACE"
WARM_UP_ROUNDS = 3
PERIOD_S = 0.2

RUN_TOML = """\
[run]
id = "round"
state_dir = "."
certs_dir = "certs"

[rounds]
fragments = 1
sync_every = 800
rounds_in_flight_max = 1
checkpoint_versions = 10000
codec_up = "{up}"
codec_down = "{down}"
"""


def main() -> int:
    """Run the arms and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds per arm; the median counts [20]")
    parser.add_argument("--arms", default="ours,ours_fp32,torchft", help="which to run")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    if os.geteuid() == 0 and not os.environ.get(IN_NAMESPACE):
        # The interface's counters then hold nothing but this benchmark.
        script = 'ip link set lo up && exec "$@"'
        command = ["unshare", "-n", "sh", "-c", script, "sh", sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, IN_NAMESPACE: "1"}, check=False).returncode
    arms = arguments.arms.split(",")
    result: dict[str, Any] = {"parameters": PARAMETERS, "rounds": arguments.rounds, "cpus": os.cpu_count()}
    if "ours" in arms:
        result["ours"] = asyncio.run(measure_ours("int4", "int8", arguments.rounds))
    if "ours_fp32" in arms:
        result["ours_fp32"] = asyncio.run(measure_ours("fp32", "fp32", arguments.rounds))
    if "torchft" in arms:
        if importlib.util.find_spec("torchft") is None:
            sys.stderr.write("torchft is not installed: pip install torchft==0.2.0 -c constraints.txt\n")
            return 1
        result["torchft"] = measure_torchft(arguments.rounds)
        for name, ratio in (("ours", "ratio"), ("ours_fp32", "ratio_fp32")):
            if name in result:
                result[ratio] = result["torchft"]["seconds"] / result[name]["seconds"]
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    for name in ("ours", "ours_fp32", "torchft"):
        if name in result:
            arm = result[name]
            print(
                f"{name:<10} {arm['seconds'] * 1e3:7.1f} ms a round (min {arm['seconds_min'] * 1e3:.1f}, "
                f"max {arm['seconds_max'] * 1e3:.1f}), {arm['wire_bytes'] / 1e6:.1f} MB on the wire, "
                f"{arm['cpu_seconds']:.3f} CPU-s"
            )
    for name in ("ratio", "ratio_fp32"):
        if name in result:
            print(f"{name:<10} {result[name]:.2f}")


# ---- ours ------------------------------------------------------------------------------------------------------------


async def measure_ours(up: str, down: str, rounds: int) -> dict[str, Any]:
    """Two regions with real processes; seconds from open to both offers, per round."""
    with tempfile.TemporaryDirectory(prefix="round-", dir=Path.cwd()) as name:
        folder = Path(name)
        init_run(folder / "certs", "round", REGIONS)
        ports = free_ports(2 * len(REGIONS))
        text = RUN_TOML.format(up=up, down=down)
        regions = []
        for index, region in enumerate(REGIONS):
            port, admin_port = ports[2 * index : 2 * index + 2]
            text += f'\n[regions.{region}]\naddress = "127.0.0.1:{port}"\nadmin_port = {admin_port}\n'
            regions.append(RegionProcess(region, admin_port, folder / region))
        (folder / "run.toml").write_text(text)
        try:
            for one in regions:
                await one.start(folder / "run.toml", [sys.executable, str(HERE / "round_learner.py")])
            return await _watch_ours(regions, rounds)
        finally:
            await asyncio.gather(*(one.stop() for one in regions))


async def _watch_ours(regions: list[RegionProcess], rounds: int) -> dict[str, Any]:
    opened: dict[int, int] = {}
    offered: dict[int, dict[str, int]] = {}
    deadline_s = time.monotonic() + 60 + 5 * rounds
    start: tuple[int, int, float] | None = None
    while time.monotonic() < deadline_s:
        for region in regions:
            if region.has_exited:
                raise SystemExit(f"{region.name} ended:\n{region.last_lines()}")
            status = await region.poll()
            for note in status.get("notes", ()):
                if note["kind"] == "open":
                    opened.setdefault(note["version"], note["at_ns"])
            for _, version, at_ns in status.get("offers", ()):
                offered.setdefault(version, {})[region.name] = at_ns
        whole = sorted(v for v, at in offered.items() if v in opened and len(at) == len(regions))
        if start is None and len(whole) >= WARM_UP_ROUNDS:
            start = (whole[-1], _interface_bytes(), _cpu_seconds(regions))
        if start is not None and whole[-1] - start[0] >= rounds:
            break
        await asyncio.sleep(PERIOD_S)
    else:
        raise SystemExit(f"only rounds {sorted(offered)} within the time:\n{regions[0].last_lines()}")
    done = [version for version in whole if version > start[0]]
    seconds = [(max(offered[version].values()) - opened[version]) / 1e9 for version in done]
    return _figures(
        seconds, (_interface_bytes() - start[1]) / len(done), (_cpu_seconds(regions) - start[2]) / len(done)
    )


def _cpu_seconds(regions: list[RegionProcess]) -> float:
    total = 0.0
    for region in regions:
        assert region.process is not None
        top = psutil.Process(region.process.pid)
        for process in [top, *top.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total


# ---- torchft ---------------------------------------------------------------------------------------------------------


def measure_torchft(rounds: int) -> dict[str, Any]:
    """Two worker processes and a lighthouse; the slower worker's seconds, per round."""
    command = [sys.executable, str(HERE / "round_torchft.py"), str(rounds), str(WARM_UP_ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"the torchft arm failed:\n{done.stderr[-3000:]}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return _figures(report["seconds"], report["wire_bytes"], report["cpu_seconds"])


def _figures(seconds: list[float], wire_bytes: float, cpu_seconds: float) -> dict[str, Any]:
    return {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "rounds": len(seconds),
        "wire_bytes": round(wire_bytes),
        "cpu_seconds": cpu_seconds,
    }


def _interface_bytes() -> int:
    """Bytes sent over loopback so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise SystemExit("no loopback interface")


if __name__ == "__main__":
    sys.exit(main())
