"""Network namespaces, one per region, named diloco-RUN-REGION; made, furnished and removed with `ip`.

Only names of that form are ever touched. RUN has no dash, so a name tells its run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan.tun import NETNS_FOLDER, inside

PREFIX: Final = "diloco"
PROBE: Final = "probe"
"""How the run's name begins in namespaces that last for a moment, to try what the kernel can."""

COMMAND_TIMEOUT_S: Final = 30.0
BUFFER_BYTES_MAX: Final = 128 << 20
"""Largest TCP buffer in the namespaces: twice 5 Gbit/s x 100 ms. The usual 6 MiB would hold a link of 40 ms to 1.2
Gbit/s; whoever moves bulk over a WAN sets this on his hosts too."""

_RUN: Final = re.compile(r"[a-z][a-z0-9]{0,15}")
_SYSCTLS: Final = {
    "ipv4/tcp_rmem": f"4096 131072 {BUFFER_BYTES_MAX}",
    "ipv4/tcp_wmem": f"4096 65536 {BUFFER_BYTES_MAX}",
    # What one connection learnt about a path must not shape the next measurement.
    "ipv4/tcp_no_metrics_save": "1",
    "ipv6/conf/all/disable_ipv6": "1",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region lives. region: its name. namespace: of the network. address: of the region."""

    region: str
    namespace: str
    address: str


def run_name(text: str) -> str:
    """A run's name from a file's: `us-4` becomes `us4`. Raises ConfigError: nothing usable is left."""
    name = re.sub(r"[^a-z0-9]", "", text.lower())[:16]
    if _RUN.fullmatch(name) is None:
        raise ConfigError(f"{text!r} gives no name for an emulation; name it by --name with letters and digits")
    return name


def places(run: str, regions: Sequence[str]) -> tuple[Place, ...]:
    """Namespaces and addresses of a run's regions, in order: 10.77.0.1, 10.77.0.2 and so on."""
    if _RUN.fullmatch(run) is None:
        raise ConfigError(f"an emulation's name has at most 16 small letters and digits, not {run!r}")
    return tuple(
        Place(region, f"{PREFIX}-{run}-{region}", f"10.77.0.{index + 1}") for index, region in enumerate(regions)
    )


def namespaces_of(run: str) -> list[str]:
    """Namespaces of a run that exist, whether or not anything else of it is left."""
    start = f"{PREFIX}-{run}-"
    return [name for name in existing() if name.startswith(start)]


def existing() -> list[str]:
    """All namespaces of ours, of all runs."""
    try:
        names = sorted(entry.name for entry in NETNS_FOLDER.iterdir())
    except FileNotFoundError:
        return []
    return [name for name in names if run_of(name) is not None]


def run_of(namespace: str) -> str | None:
    """The run that a namespace's name tells; None when it is not one of ours."""
    prefix, _, suffix = namespace.partition("-")
    run, dash, region = suffix.partition("-")
    return run if prefix == PREFIX and dash and region and _RUN.fullmatch(run) else None


def create(namespace: str) -> None:
    """Make a namespace, with loopback up and buffers for long fat links.

    Raises DilocoError: it exists, or may not be made.
    """
    run_ip("netns", "add", namespace)
    run_ip("-n", namespace, "link", "set", "lo", "up")
    with inside(namespace):
        for name, value in _SYSCTLS.items():
            file = Path("/proc/sys/net") / name
            # A kernel without IPv6 has no such file, and needs none.
            if file.exists():
                try:
                    file.write_text(value)
                except OSError as error:
                    raise DilocoError(f"{file} can't be set in {namespace} ({error.strerror})") from error


def remove(namespace: str) -> None:
    """Remove a namespace of ours; nothing when it is gone. Raises DilocoError: it can't be removed, or is not ours."""
    if run_of(namespace) is None:
        raise DilocoError(f"network namespace {namespace} is not ours; it is left alone")
    if (NETNS_FOLDER / namespace).exists():
        run_ip("netns", "delete", namespace)


def processes_in(namespace: str) -> list[int]:
    """Process ids in a namespace; the network of a removed namespace lives until they end."""
    return [int(word) for word in run_ip("netns", "pids", namespace).split()]


def end_processes(run: str) -> list[int]:
    """SIGTERM to every process in a run's namespaces: regions of a demo that was killed. Their process ids."""
    pids = [pid for namespace in namespaces_of(run) for pid in processes_in(namespace)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return pids


def run_ip(*arguments: str, script: str | None = None) -> str:
    """`ip` with arguments (and a -batch script on its standard input); what it printed.

    Raises DilocoError: it failed, is missing or hangs; with what it said.
    """
    return run_tool("ip", *arguments, script=script)


def run_tool(tool: str, *arguments: str, script: str | None = None) -> str:
    """Like run_ip, for `ip` or `tc`."""
    try:
        process = subprocess.run(
            [tool, *arguments], input=script, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise DilocoError(f"the command {tool} is missing; install iproute2") from None
    except subprocess.TimeoutExpired:
        raise DilocoError(f"{tool} {' '.join(arguments)} took more than {COMMAND_TIMEOUT_S:.0f} s") from None
    if process.returncode != 0:
        message = process.stderr.strip() or process.stdout.strip()
        raise DilocoError(f"{tool} {' '.join(arguments)} failed: {message}")
    return process.stdout
