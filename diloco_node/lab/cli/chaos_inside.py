"""`python -m diloco_node.lab.cli.chaos_inside FAULT TARGET NANOSECONDS`: one fault, from within a region's container.

`diloco-node chaos --compose` runs it by `docker exec`. It prints what it struck, as JSON. It ends when its standard
input does, so a fault is over when whoever asked for it is gone. A partition wants root, for NET_ADMIN; all other
faults want the region's own user, whose processes they strike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diloco_node.config.resolve import load_config
from diloco_node.errors import INTERRUPTED_CODE, ConfigError, DilocoError
from diloco_node.lab.chaos.containers import FIRST_PROCESS, REGION_VARIABLE
from diloco_node.lab.chaos.demo_processes import DemoFile, command_line, supervisor_of
from diloco_node.lab.chaos.executor import FaultExecutor, StruckFault
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault, parse_target
from diloco_node.lab.cli.chaos import attached
from diloco_node.lab.wan.container import cut_off, load_attachment
from diloco_node.numeric import NS_PER_S
from diloco_node.unix_sockets import process_of

FAULTY_DAEMON = "diloco_node.lab.demo.faulty_region"
"""In the command line of a daemon that looks for faults."""

T = TypeVar("T")


def main(arguments: Sequence[str]) -> int:
    """The exit code; errors are one line."""
    kind, target, lasts_ns = arguments
    region = os.environ[REGION_VARIABLE]
    try:
        fault = PlannedFault(0, kind, parse_target(target, [region]), int(lasts_ns))
        done = asyncio.run(_until_left(_strike(fault, os.environ)))
    except DilocoError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except asyncio.CancelledError:
        return INTERRUPTED_CODE
    sys.stdout.write(json.dumps(done.document()) + "\n")
    return 0


async def _strike(fault: PlannedFault, environment: Mapping[str, str]) -> StruckFault:
    if fault.kind == "partition":
        with cut_off(load_attachment(environment)):
            await asyncio.sleep(fault.lasts_ns / NS_PER_S)
        return StruckFault(0, fault, (FIRST_PROCESS,))
    state_dir = load_config(Path(environment["WAN_CONFIG"])).state_dir(fault.target.region)
    if fault.kind == "disk":
        _check_looks_for_faults(_region(state_dir), fault)
    executor = FaultExecutor(
        lambda: _region(state_dir), now_ns=time.monotonic_ns, attached=lambda _: attached(state_dir)
    )
    return await executor.strike(fault)


def _region(state_dir: Path) -> DemoFile:
    """As of a demo with this one region."""
    first = process_of(FIRST_PROCESS)
    assert first is not None
    return DemoFile(state_dir.parent, first, {state_dir.name: supervisor_of(state_dir)})


def _check_looks_for_faults(here: DemoFile, fault: PlannedFault) -> None:
    for daemon in here.find(FaultTarget(fault.target.region, "daemon")):
        if FAULTY_DAEMON not in command_line(daemon.pid):
            raise ConfigError(
                f"the daemon of {fault.target.region} looks for no faults: docker compose --file docker-compose.yml "
                "--file docker/chaos.yml up starts one that does"
            )


async def _until_left(work: Coroutine[Any, Any, T]) -> T:
    """Cancelled when standard input ends, if that is a pipe: a file or /dev/null tells nothing."""
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()

    def look() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            task.cancel()

    with contextlib.suppress(PermissionError):
        loop.add_reader(0, look)
    try:
        return await task
    finally:
        loop.remove_reader(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
