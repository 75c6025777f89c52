"""Bringing a WAN up and down: its namespaces, and the keeper process."""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan.emulation_state import EmulationState, remove_all, runs, start_ticks, state_file, stop_keeper
from diloco_node.lab.wan.namespaces import (
    PREFIX,
    PROBE,
    create,
    end_processes,
    namespaces_of,
    processes_in,
    remove,
)
from diloco_node.lab.wan.topology import load_topology
from diloco_node.lab.wan.tun import open_tun

READY_S: Final = 30.0
NEED_ROOT: Final = "network namespaces need root: run it with sudo"


def emulation_fault() -> str:
    """Why this machine can't emulate a WAN, which is tried, not looked up; empty if it can."""
    return NEED_ROOT if os.geteuid() != 0 else _probe_tun()


def up(
    file: Path,
    *,
    run: str,
    regions: int | None = None,
    owner_pid: int = 0,
    starts_timetable: bool = True,
    seed: int = 0,
) -> EmulationState:
    """Make the namespaces and start the keeper; when this returns, packets pass.

    Args:
        file: the topology. run: the name.
        regions: how many, from the file's first; None: all. owner_pid: a process to end with; 0: none.
        starts_timetable: whether the file's outages begin to count now. seed: of jitter and loss.

    Raises ConfigError: the file is wrong, the run is there already, or this machine can't. DilocoError: something
    failed; everything made is removed again.
    """
    topology = load_topology(file)
    if fault := emulation_fault():
        raise ConfigError(f"no WAN can be emulated here: {fault}")
    count = len(topology.regions) if regions is None else regions
    state = EmulationState(
        run=run,
        topology_name=topology.first(count).name,
        topology_text=file.read_text(),
        regions=count,
        seed=seed,
        starts_timetable=starts_timetable,
        owner_pid=owner_pid,
    )
    places = state.places()
    sweep()
    if namespaces_of(run):
        raise ConfigError(f"namespaces of an emulation named {run} are there: diloco-node wan down {run}")
    state.save(is_new=True)
    try:
        for place in places:
            create(place.namespace)
        return _start_keeper(state)
    except BaseException:
        remove_all(run)
        raise


def _start_keeper(state: EmulationState) -> EmulationState:
    with state.log.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco_node.lab.wan.keeper", str(state.file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        is_ready = _is_ready(process.stdout)
    if not is_ready:
        process.kill()
        process.wait()
        log_text = state.log.read_text(errors="replace").strip()
        raise DilocoError(f"the emulation's keeper did not start: {log_text or f'no word in {READY_S:.0f} s'}")
    kept_state = dataclasses.replace(state, keeper_pid=process.pid, keeper_start_ticks=start_ticks(process.pid))
    kept_state.save()
    # The keeper outlives this process on purpose; Popen must not warn that it still runs.
    process.returncode = 0
    return kept_state


def _is_ready(stream: IO[str]) -> bool:
    readable, _, _ = select.select([stream], [], [], READY_S)
    return bool(readable) and stream.readline().strip() == "ready"


def down(run: str) -> list[str]:
    """End an emulation and remove everything of it, also when it crashed.

    Returns: lines on what was done, and on processes that still run in its namespaces (they are left alone).

    Raises ConfigError: there is nothing of that name. DilocoError: something can't be removed.
    """
    if run not in runs():
        raise ConfigError(f"no emulation {run}; there are: {', '.join(runs()) or 'none'}")
    lines = []
    for namespace in namespaces_of(run):
        inside = processes_in(namespace)
        if inside:
            pids = " ".join(map(str, inside))
            lines.append(f"{namespace}: processes {pids} still run in it, without a network now")
    names = namespaces_of(run)
    if state_file(run).exists():
        state = EmulationState.load(state_file(run))
        if not state.is_kept:
            lines.append(f"the keeper of {run} was gone; cleaned up after it")
        stop_keeper(state)
    remove_all(run)
    return [*lines, f"removed {len(names)} namespaces of {run}"]


def sweep() -> list[str]:
    """Clean up after emulations whose owner and keeper are both gone (a demo that was killed); their names."""
    names = []
    for run in runs():
        if not state_file(run).exists():
            continue
        try:
            state = EmulationState.load(state_file(run))
        except DilocoError:
            continue
        if state.owner_pid and not state.is_kept and start_ticks(state.owner_pid) == 0:
            end_processes(run)
            remove_all(run)
            names.append(run)
    return names


def find(run: str | None) -> EmulationState:
    """The emulation of that name, or the only one.

    Raises ConfigError: there is none, or there are several and none was named.
    """
    run_names = [run_name for run_name in runs() if state_file(run_name).exists()]
    if run is None:
        if len(run_names) != 1:
            there = ", ".join(run_names) or "none"
            hint = "name one with --name" if run_names else "start one: diloco-node wan up netem/us-4.toml"
            raise ConfigError(f"emulations on this machine: {there}; {hint}")
        run = run_names[0]
    if run not in run_names:
        raise ConfigError(f"no emulation {run}; there are: {', '.join(run_names) or 'none'}")
    return EmulationState.load(state_file(run))


def _probe_tun() -> str:
    """Try a tun device in a namespace of its own; "" when it works, else why not."""
    namespace = f"{PREFIX}-{PROBE}{os.getpid() % 10**6}-try"
    try:
        create(namespace)
        try:
            os.close(open_tun(namespace))
        finally:
            remove(namespace)
    except DilocoError as error:
        return " ".join(str(error).split())
    return ""
