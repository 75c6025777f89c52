"""Traffic of a region, shaped at its own device: the commands for `tc` where every region is a container. Pure.

Each container shapes the way out, per destination, so that each path is shaped once. The device gets a tree (htb) with
the region's rate at its root and a class per destination, as fast as the slowest part of that path. Each class has a
netem with delay, jitter and loss, and in that a queue limited in bytes. A token bucket on an `ifb` device holds
incoming traffic of all regions to the region's ingress rate. Cuts are routes into the void, which needs no qdisc.

A kernel that lacks a part gets what the others give, and `shortcomings` says aloud what is then not emulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diloco_node.lab.wan.topology import PPM, Path, Topology

INGRESS_DEVICE: Final = "wan-in"
NETEM_PACKETS_MAX: Final = 1_000_000
"""netem's own limit, so that only the queues in bytes drop."""

BURST_NS: Final = 2 * 10**6
BURST_BYTES_MIN: Final = 131_072
"""A whole segment of 64 KiB and one more must fit into a bucket."""

QUEUE_BYTES_MIN: Final = 131_072

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "netem": ("qdisc add dev {device} root netem delay 1ms", "qdisc del dev {device} root"),
    "htb": (
        "qdisc add dev {device} root handle 1: htb",
        "class add dev {device} parent 1: classid 1:1 htb rate 1gbit",
        "qdisc add dev {device} parent 1:1 handle 10: bfifo limit 1000000",
        "filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dst 192.0.2.1/32 flowid 1:1",
        "qdisc del dev {device} root",
    ),
    "tbf": ("qdisc add dev {device} root tbf rate 1gbit burst 131072 limit 1000000", "qdisc del dev {device} root"),
    "redirect": (
        "qdisc add dev {device} handle ffff: ingress",
        "filter add dev {device} parent ffff: protocol ip u32 match u32 0 0 action mirred egress redirect dev {other}",
    ),
}
"""`tc` commands that try each part on a device nobody uses."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Parts that the kernel has: each was tried. `ifb` is a kind of device, `redirect` fills it."""

    netem: bool
    htb: bool
    tbf: bool
    redirect: bool
    ifb: bool

    @property
    def limits_ingress(self) -> bool:
        """The rate of what comes in can be held."""
        return self.tbf and self.redirect and self.ifb


def shortcomings(kernel: Kernel) -> list[str]:
    """Say what is not emulated on this kernel, for a person to read; empty when everything is."""
    lines = []
    if not kernel.htb:
        limit = "only the region's rate is, for all destinations together" if kernel.tbf else "nor is any other"
        lines.append(f"PER-PAIR RATE IS NOT EMULATED: this kernel has no sch_htb; {limit}")
    if not (kernel.htb and kernel.netem):
        why = "sch_netem" if not kernel.netem else "sch_htb, which it hangs in"
        lines.append(
            f"DELAY, JITTER AND LOSS ARE NOT EMULATED: this kernel has no {why}; round trips are those of the host"
        )
    if not kernel.limits_ingress:
        lines.append("INGRESS RATE IS NOT EMULATED: this kernel lacks ifb, act_mirred or sch_tbf")
    return lines


@dataclass(frozen=True, slots=True)
class Uplink:
    """The commands for one region's device.

    Attributes:
        topology: the links. region: whose device it is. addresses: IPv4 of every other region. device: its name.
        kernel: what may be used.
    """

    topology: Topology
    region: str
    addresses: Mapping[str, str]
    device: str
    kernel: Kernel

    def lines(self) -> list[str]:
        """`tc` commands for what the region sends; the device has no qdisc of ours yet."""
        device, rate = self.device, self.topology.region(self.region).egress.bytes_per_s
        limit = _queue_bytes(self.topology, rate)
        if not self.kernel.htb:
            return [_bucket_line(device, rate, self.topology)] if self.kernel.tbf else []
        burst = _burst_bytes(rate)
        lines = [
            f"qdisc add dev {device} root handle 1: htb",
            f"class add dev {device} parent 1: classid 1:1 htb rate {8 * rate}bit burst {burst} cburst {burst} "
            "quantum 65536",
        ]
        for peer, address in sorted(self.addresses.items()):
            minor, path = self._minor(peer), self.topology.paths[self.region, peer]
            lines.append(self._class_line("add", peer, path))
            if self.kernel.netem:
                lines.append(self._netem_line("add", peer, path))
                lines.append(f"qdisc add dev {device} parent {minor}:1 bfifo limit {limit}")
            else:
                lines.append(f"qdisc add dev {device} parent 1:{minor} handle {minor}: bfifo limit {limit}")
            lines.append(
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dst {address}/32 flowid 1:{minor}"
            )
        return lines

    def path_lines(self, peer: str, path: Path) -> list[str]:
        """`tc` commands that change one path of a shaped device, when the timetable degrades or restores it."""
        if not self.kernel.htb:
            return []
        lines = [self._class_line("change", peer, path)]
        return [*lines, self._netem_line("change", peer, path)] if self.kernel.netem else lines

    def ingress_lines(self) -> list[str]:
        """`tc` commands that hold what comes in to the region's ingress rate. The ifb device exists and is up."""
        if not self.kernel.limits_ingress:
            return []
        return [
            _bucket_line(INGRESS_DEVICE, self.topology.region(self.region).ingress.bytes_per_s, self.topology),
            f"qdisc add dev {self.device} handle ffff: ingress",
            f"filter add dev {self.device} parent ffff: protocol ip u32 match u32 0 0 "
            f"action mirred egress redirect dev {INGRESS_DEVICE}",
        ]

    def _class_line(self, verb: str, peer: str, path: Path) -> str:
        """Class of a path: its share of the region's rate for sure, as fast as its slowest part at the most."""
        egress = self.topology.region(self.region).egress.bytes_per_s
        ceiling = min(egress, self.topology.region(peer).ingress.bytes_per_s)
        if path.rate is not None:
            ceiling = min(ceiling, path.rate.bytes_per_s)
        # htb gives every class its own rate whatever the sum: the shares must add up to the region's rate.
        share = min(ceiling, max(1, egress // (len(self.topology.names) - 1)))
        return (
            f"class {verb} dev {self.device} parent 1:1 classid 1:{self._minor(peer)} "
            f"htb rate {8 * share}bit ceil {8 * ceiling}bit "
            f"burst {_burst_bytes(share)} cburst {_burst_bytes(ceiling)} quantum 65536"
        )

    def _netem_line(self, verb: str, peer: str, path: Path) -> str:
        minor = self._minor(peer)
        jitter = f" {path.jitter_ns // 1000}us" if path.jitter_ns else ""
        return (
            f"qdisc {verb} dev {self.device} parent 1:{minor} handle {minor}: netem limit {NETEM_PACKETS_MAX} "
            f"delay {path.delay_ns // 1000}us{jitter} loss {path.loss_ppm / (PPM // 100):.6f}%"
        )

    def _minor(self, peer: str) -> str:
        """A class's minor number and its netem's handle: hexadecimal, away from 1:1."""
        return f"{16 + self.topology.names.index(peer):x}"


def _bucket_line(device: str, rate: int, topology: Topology) -> str:
    """A token bucket on a whole device; rate in bytes per second."""
    limit = _queue_bytes(topology, rate)
    return f"qdisc add dev {device} root tbf rate {8 * rate}bit burst {_burst_bytes(rate)} limit {limit}"


def _burst_bytes(rate: int) -> int:
    return max(BURST_BYTES_MIN, rate * BURST_NS // 10**9)


def _queue_bytes(topology: Topology, rate: int) -> int:
    return max(QUEUE_BYTES_MIN, rate * topology.queue_ns // 10**9)
