"""The torchft arm of benchmarks/round.py: two replica groups of one rank each, DiLoCo over Gloo, one fragment.

Run as a program it starts the lighthouse and two workers (itself, with a rank) and prints one JSON line.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


def worker(address: str, rank: int, rounds: int, warm_up: int) -> None:
    """Synchronise `warm_up + rounds` times; print the seconds of each of the last `rounds`."""
    import torch
    from torch import nn, optim
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(5)))
    noise = [1e-3 * torch.randn_like(parameter) for parameter in model.parameters()]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"round_{rank}_",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=60),
    )
    inner = optim.SGD(model.parameters(), lr=0.0)
    outer = optim.SGD(model.parameters(), lr=0.4, momentum=0.8, nesterov=True)
    seconds: list[float] = []
    begun: dict[str, float] = {}
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        for number in range(warm_up + rounds):
            with torch.no_grad():
                for parameter, one in zip(model.parameters(), noise, strict=True):
                    parameter.add_(one)
            time.sleep(0.3)  # as ours: the machine comes to rest between rounds
            if number == warm_up:
                begun = {"cpu": _cpu_seconds(), "bytes": _interface_bytes()}
            started = time.perf_counter()
            inner.step()  # no gradients: all it does is to synchronise
            if number >= warm_up:
                seconds.append(time.perf_counter() - started)
    report = {
        "seconds": seconds,
        "cpu_seconds": (_cpu_seconds() - begun["cpu"]) / rounds,
        "wire_bytes": (_interface_bytes() - begun["bytes"]) / rounds,
    }
    print(json.dumps(report), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads do not all end by themselves


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _interface_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def lead(rounds: int, warm_up: int) -> int:
    """Lighthouse and two workers; one JSON line with the slower worker's seconds and the sum of CPU seconds."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=10)
    address = lighthouse.address()
    command = [sys.executable, __file__, "worker", address]
    workers = [
        subprocess.Popen([*command, str(rank), str(rounds), str(warm_up)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    reports: list[dict[str, Any]] = []
    for process in workers:
        output, _ = process.communicate(timeout=500)
        if process.returncode != 0:
            return 1
        reports.append(json.loads(output.strip().splitlines()[-1]))
    seconds = [max(pair) for pair in zip(*(report["seconds"] for report in reports), strict=True)]
    merged = {
        "seconds": seconds,
        "cpu_seconds": sum(report["cpu_seconds"] for report in reports),
        "wire_bytes": max(report["wire_bytes"] for report in reports),
    }
    print(json.dumps(merged), flush=True)
    lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(lead(int(sys.argv[1]), int(sys.argv[2])))
