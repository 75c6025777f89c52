"""The first process of a region's container: shapes its link after the topology file, then runs the region.

::

    python -m diloco_node.lab.wan.container [--user NAME] -- COMMAND...

The command runs as that user; the process ends with it, with its exit code. Region and files are named by WAN_REGION,
WAN_CONFIG (run.toml, for the addresses) and WAN_TOPOLOGY. The process needs NET_ADMIN, and says loudly what the kernel
can't emulate. It follows the timetable of the topology file, counted from its own start, and shapes anew when the
network is taken away and given back (`docker network disconnect`, `connect`).
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_node.config.resolve import load_config
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan.conditions import Conditions, Timetable
from diloco_node.lab.wan.namespaces import run_ip, run_tool
from diloco_node.lab.wan.topology import Path as LinkPath
from diloco_node.lab.wan.topology import Topology, load_topology
from diloco_node.lab.wan.uplink import INGRESS_DEVICE, PARTS, Kernel, Uplink, shortcomings

POLL_S: Final = 1.0
SEGMENTS_MAX: Final = 65_535
TRY_DEVICES: Final = ("wan-try0", "wan-try1")
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a region hangs on the WAN.

    Attributes:
        region: its name. address: its IPv4 between regions. peers: those of the others. topology: the links.
    """

    region: str
    address: str
    peers: Mapping[str, str]
    topology: Topology


def load_attachment(environment: Mapping[str, str]) -> Attachment:
    """Read what the environment names.

    Raises ConfigError: a name or file is missing or wrong, a region is not in the topology, or an address is no number.
    """
    region = _required(environment, "WAN_REGION", "us-east")
    config = load_config(Path(_required(environment, "WAN_CONFIG", "/config/run.toml")))
    config.check_region(region)
    topology = load_topology(Path(_required(environment, "WAN_TOPOLOGY", "/config/netem/us-4.toml")))
    addresses = {name: _ipv4(name, settings.address) for name, settings in config.regions.items()}
    for name in addresses:
        topology.region(name)
    return Attachment(region=region, address=addresses.pop(region), peers=addresses, topology=topology)


def _required(environment: Mapping[str, str], name: str, example: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set: set it in the container's environment, for example {name}={example}")
    return value


def _ipv4(region: str, address: str | None) -> str:
    host = (address or "").rpartition(":")[0]
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ConfigError(
            f"regions.{region}.address is {address!r}: links are shaped by address, so a container needs a fixed one, "
            'for example address = "10.211.77.11:7400"'
        ) from None


def probe_kernel() -> Kernel:
    """Try every part on a pair of devices of our own, which are removed again.

    Raises DilocoError: not even those can be made: NET_ADMIN is missing.
    """
    device, peer_device = TRY_DEVICES
    with contextlib.suppress(DilocoError):
        run_ip("link", "delete", device)
    run_ip("link", "add", device, "type", "veth", "peer", "name", peer_device)
    try:
        abilities = {
            ability: all(_try_tc(line, device, peer_device) for line in lines) for ability, lines in PARTS.items()
        }
    finally:
        run_ip("link", "delete", device)
    return Kernel(**abilities, ifb=_make_ingress_device())


def _try_tc(line: str, device: str, peer_device: str) -> bool:
    try:
        run_tool("tc", *line.format(device=device, other=peer_device).split())
    except DilocoError:
        return False
    return True


def _make_ingress_device() -> bool:
    """The ifb device, up; whether there is one."""
    try:
        if INGRESS_DEVICE not in _devices():
            run_ip("link", "add", INGRESS_DEVICE, "type", "ifb")
        run_ip("link", "set", INGRESS_DEVICE, "up")
    except DilocoError:
        return False
    return True


def _devices() -> dict[str, int]:
    return {name: index for index, name in socket.if_nameindex()}


def find_device(address: str) -> tuple[str, int]:
    """The device that has an address, and the kernel's number of it; `("", 0)` when none has it."""
    devices: list[dict[str, Any]] = json.loads(run_ip("-json", "-4", "address", "show") or "[]")
    for device in devices:
        if any(entry.get("local") == address for entry in device.get("addr_info", ())):
            return str(device["ifname"]), int(device["ifindex"])
    return "", 0


class ContainerLink:
    """Keeps a region's device as the topology and its timetable want it.

    Args:
        attachment: the region. kernel: what can be done. say: takes a line for the log. now_ns: monotonic; the
            timetable counts from it.
    """

    def __init__(self, attachment: Attachment, kernel: Kernel, say: Callable[[str], None], *, now_ns: int) -> None:
        self._attachment = attachment
        self._kernel = kernel
        self._say = say
        self._conditions = Conditions(attachment.topology)
        self._timetable = Timetable(attachment.topology.outages, started_ns=now_ns)
        self._devices_before: dict[str, int] | None = None
        self._uplink: Uplink | None = None
        self._shaped = ("", 0)
        self._applied: dict[str, LinkPath | None] = {}

    @property
    def wake_at_ns(self) -> int | None:
        """When the timetable is next due."""
        return self._timetable.wake_at_ns

    def keep(self, *, now_ns: int) -> None:
        """Shape a device that is new, and carry out what the timetable has due.

        Raises DilocoError: tc or ip refused.
        """
        for line in self._timetable.advance(self._conditions, now_ns=now_ns):
            self._say(line)
        devices = _devices()
        # A device is there before it has its address, and nothing in the list of devices tells when it gets it.
        if self._uplink is None or devices != self._devices_before:
            self._attach(*find_device(self._attachment.address))
            self._devices_before = devices
        if self._uplink is not None:
            self._follow(self._uplink)

    def _attach(self, device: str, index: int) -> None:
        if not device:
            if self._shaped[0] or self._devices_before is None:
                address = self._attachment.address
                self._say(f"no device has {address}: cut off (docker network connect --ip {address} gives it back)")
            self._uplink, self._shaped = None, ("", 0)
        elif self._uplink is None or self._shaped != (device, index):
            self._shape(device)
            self._shaped = (device, index)

    def _shape(self, device: str) -> None:
        """From the start: what an earlier process of this container left is removed."""
        attachment = self._attachment
        # Set when all of it is done: a device that went away half-way is shaped at the next look.
        self._uplink = None
        for queue in (f"{device} root", f"{device} ingress", f"{INGRESS_DEVICE} root"):
            with contextlib.suppress(DilocoError):
                run_tool("tc", "qdisc", "del", "dev", *queue.split())
        uplink = Uplink(attachment.topology, attachment.region, attachment.peers, device, self._kernel)
        _tc_batch(uplink.lines() + uplink.ingress_lines())
        is_lossy = any(attachment.topology.paths[attachment.region, peer].loss_ppm for peer in attachment.peers)
        # netem loses whole segments of up to 64 KiB: where there is loss, single packets are sent.
        run_ip("link", "set", device, "gso_max_segs", str(1 if is_lossy and self._kernel.netem else SEGMENTS_MAX))
        self._applied = {peer: attachment.topology.paths[attachment.region, peer] for peer in attachment.peers}
        self._uplink = uplink
        link = attachment.topology.region(attachment.region)
        self._say(f"{attachment.region} on {device} ({attachment.address}): out {link.egress}, in {link.ingress}")

    def _follow(self, uplink: Uplink) -> None:
        """The timetable's cuts and changes, as far as they differ from what is applied."""
        attachment = self._attachment
        for peer, path_before in self._applied.items():
            path = self._conditions.path(attachment.region, peer)
            if path == path_before:
                continue
            if path is None:
                run_ip("route", "replace", "blackhole", f"{attachment.peers[peer]}/32")
            else:
                with contextlib.suppress(DilocoError):
                    run_ip("route", "delete", "blackhole", f"{attachment.peers[peer]}/32")
                _tc_batch(uplink.path_lines(peer, path))
            self._applied[peer] = path


def _tc_batch(lines: Sequence[str]) -> None:
    if lines:
        run_tool("tc", "-batch", "-", script="".join(f"{line}\n" for line in lines))


def run(attachment: Attachment, command: Sequence[str], user: str) -> int:
    """Shape the link, run the command, keep the link as it should be; the command's exit code.

    Raises ConfigError: the user is unknown. DilocoError: the link can't be shaped at all.
    """
    # Blocked from the start and waited for below, so that none is lost: a first process ignores what it doesn't handle.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_FORWARDED})
    kernel = probe_kernel()
    for line in shortcomings(kernel):
        _say(f"*** {line} ***")
    link = ContainerLink(attachment, kernel, _say, now_ns=time.monotonic_ns())
    link.keep(now_ns=time.monotonic_ns())
    child = _start(command, user)
    while child.returncode is None:
        wake_ns = link.wake_at_ns
        due_s = POLL_S if wake_ns is None else (wake_ns - time.monotonic_ns()) / 1e9
        signal_info = signal.sigtimedwait({signal.SIGCHLD, *_FORWARDED}, min(POLL_S, max(0.0, due_s)))
        if signal_info is not None and signal_info.si_signo in _FORWARDED:
            child.send_signal(signal_info.si_signo)
        _reap(child)
        try:
            link.keep(now_ns=time.monotonic_ns())
        except DilocoError as error:
            # The network may be taken away between a look and a command; the next look finds it as it is.
            _say(f"{error}; trying again")
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _start(command: Sequence[str], user: str) -> subprocess.Popen[bytes]:
    """The command, with the signals as they were; as another user it has no capabilities."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    if not user:
        return subprocess.Popen(command, preexec_fn=unblock)  # noqa: PLW1509 - this process has one thread
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"--user {user!r} is not in the image") from None
    environment = {**os.environ, "HOME": entry.pw_dir, "USER": user}
    return subprocess.Popen(
        command,
        user=entry.pw_uid,
        group=entry.pw_gid,
        extra_groups=(),
        env=environment,
        preexec_fn=unblock,  # noqa: PLW1509 - as above
    )


def _reap(child: subprocess.Popen[bytes]) -> None:
    """As the container's first process this one also inherits, and buries, what its child left behind."""
    if child.poll() is not None or os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (
            child_info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and child_info.si_pid != child.pid:
            os.waitpid(child_info.si_pid, 0)
    child.poll()


def _say(line: str) -> None:
    sys.stderr.write(f"wan: {line}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco_node.lab.wan.container", description="A container's WAN link."
    )
    parser.add_argument("--user", default="", help="run it as this user, without capabilities")
    parser.add_argument("command", nargs="+", help="after --")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The exit code; errors are one line."""
    options = _parser().parse_args(arguments)
    try:
        return run(load_attachment(os.environ), options.command, options.user)
    except DilocoError as error:
        _say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
