"""Memory and disk of one region whose learner has 124 M parameters, beside what `plan` says of it.

A region alone, with its real daemon and learner, merges with itself. The learner moves one value a step, so the machine
is busy with merges. Its own model and moments, 12 bytes a parameter, are subtracted, and so is what the same region
takes with hardly any parameters. Memory is the proportional set size of all processes of the region: what two of them
share counts once. Disk are the blocks of the state folder, which is looked at every half second.

    python benchmarks/memory.py [--seconds 150] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from diloco_node.core.types import RunSettings
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.planning.plan import Workload, even_sizes, storage
from diloco_node.transport.authority import init_run

FRAGMENTS: Final = 24
PARAMETERS: Final = 124_000_000
FEW: Final = 240_000
OWN_BYTES: Final = 12
LOOK_S: Final = 0.5

SCRIPT: Final = f"""
import sys, time, torch, diloco_node
torch.set_num_threads(1)
rows = int(sys.argv[1]) // {FRAGMENTS} // 1000
model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(rows, 1000)) for _ in range({FRAGMENTS}))
model.append(torch.nn.Parameter(torch.zeros(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for parameter in model:
    parameter.grad = torch.full_like(parameter, 1e-3)
optimizer.step()
with diloco_node.attach(model, optimizer, checkpoint_every_s=40) as diloco:
    while not diloco.should_stop:
        optimizer.zero_grad()
        model[-1].grad = torch.randn(8)
        optimizer.step()
        time.sleep(0.1)
        diloco.step(tokens=8)
"""

RUN_TOML: Final = """\
[run]
id = "memory"
state_dir = "."
certs_dir = "certs"
[rounds]
fragments = {fragments}
sync_every = {fragments}
overlap_steps = 2
[learner]
preload = []
[regions.us-east]
address = "127.0.0.1:{port}"
admin_port = {admin_port}
"""


def main() -> int:
    """Run both sizes and print bytes a parameter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="of the large model, from its first merge on [150]"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    few = asyncio.run(measure(FEW, 15.0))
    many = asyncio.run(measure(PARAMETERS, arguments.seconds))
    settings = RunSettings(fragments=FRAGMENTS)
    plan = storage(Workload(even_sizes(PARAMETERS, FRAGMENTS), ("us-east",), settings, step_time_ns=10**8))
    own = OWN_BYTES * PARAMETERS

    def more(rows: list[dict[str, Any]], name: str) -> list[float]:
        base = statistics.median(row[name] for row in few)
        return [(row[name] - base - (own if name == "memory" else 0)) / PARAMETERS for row in rows]

    before = [row for row in many if not row["copies"]]
    result = {
        "versions": many[-1]["version"],
        "checkpoints": many[-1]["copies"],
        "memory_without_copies": statistics.median(more(before, "memory")) if before else None,
        "memory": statistics.median(more(many[-60:], "memory")),
        "memory_most": max(more(many, "memory")),
        "disk": statistics.median(more(many[-60:], "disk")),
        "disk_most": max(more(many, "disk")),
        "planned_memory_without_copies": (plan.memory - plan.copies) / PARAMETERS,
        "planned_memory": plan.memory / PARAMETERS,
        "planned_disk": plan.disk / PARAMETERS,
    }
    if arguments.json:
        print(json.dumps(result | {"rows": many}))
    else:
        print("\n".join(f"{name:<32}{value or 0:8.2f}" for name, value in result.items()), flush=True)
    return 0


async def measure(parameters: int, seconds: float) -> list[dict[str, Any]]:
    """What one region takes, time after time, from its first merges on."""
    with tempfile.TemporaryDirectory(prefix="memory-", dir=Path.cwd()) as name:
        folder = Path(name)
        init_run(folder / "certs", "memory", ("us-east",))
        port, admin_port = free_ports(2)
        (folder / "run.toml").write_text(RUN_TOML.format(fragments=FRAGMENTS, port=port, admin_port=admin_port))
        (folder / "train.py").write_text(SCRIPT)
        region = RegionProcess("us-east", admin_port, folder / "us-east")
        try:
            await region.start(folder / "run.toml", (sys.executable, str(folder / "train.py"), str(parameters)))
            rows: list[dict[str, Any]] = []
            begun_s, patience_s = None, time.monotonic() + 240.0
            while begun_s is None or time.monotonic() < begun_s + seconds:
                if region.has_exited or (begun_s is None and time.monotonic() > patience_s):
                    raise SystemExit(f"it does not train:\n{region.last_lines(40)}")
                await asyncio.sleep(LOOK_S)
                status = await region.poll()
                version = min(status.get("versions") or [-1])
                if version >= 1:
                    begun_s = begun_s or time.monotonic()
                    assert region.process is not None
                    rows.append(look(region.state_dir, region.process.pid) | {"version": version})
            return rows
        finally:
            await region.stop()


def look(folder: Path, pid: int) -> dict[str, Any]:
    """Memory of a process and all under it, and blocks of a folder."""
    blocks = copies = 0
    for path in folder.rglob("*"):
        try:
            blocks += path.stat().st_blocks
        except OSError:
            continue  # it was pruned meanwhile
        copies += path.parent.name == "checkpoints"
    return {"memory": sum(map(proportional, family(pid))), "disk": 512 * blocks, "copies": copies}


def family(pid: int) -> list[int]:
    """A process, its children, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def proportional(pid: int) -> int:
    """Proportional set size in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    raise SystemExit(main())
