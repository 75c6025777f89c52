"""The back-end `netem`: the kernel's own qdiscs on veth pairs around a routing namespace in the middle.

A region's uplink is a token bucket (tbf) on its own end of the pair. In the middle, the device towards a region has a
class per source (htb, below the region's ingress rate). Each class has a netem with delay, jitter and loss, and in that
a queue limited in bytes. Cuts are a loss of 100 %. Unlike the router, netem lets packets with jitter overtake each
other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from diloco_node.errors import DilocoError
from diloco_node.lab.wan.conditions import Conditions
from diloco_node.lab.wan.namespaces import CORE, PREFIX, PROBE, Place, create, remove, run_ip, run_tool
from diloco_node.lab.wan.topology import PPM, Pair, Path, Topology
from diloco_node.lab.wan.tun import DEVICE, inside

GATEWAY: Final = "169.254.77.1"
NETEM_PACKETS_MAX: Final = 1_000_000
"""netem's own limit, so that only the queues in bytes drop."""

BURST_NS: Final = 2 * 10**6
BURST_BYTES_MIN: Final = 131_072
"""A whole segment of 64 KiB and one more must fit into a bucket."""

QUEUE_BYTES_MIN: Final = 131_072


class NetemPlane:
    """The back-end `netem`; the kernel does the work, so there is nothing to read and nothing ever due.

    Args:
        run: the emulation's name. places: the regions; their namespaces exist.

    Raises DilocoError: the kernel lacks a part; `probe_netem` says which before.
    """

    name = "netem"
    wake_at_ns: int | None = None

    def __init__(self, run: str, places: Sequence[Place], conditions: Conditions) -> None:
        self._places = places
        self._conditions = conditions
        self._core = core_namespace(run)
        self.fds: list[int] = []
        create(self._core)
        with inside(self._core):
            _write("/proc/sys/net/ipv4/ip_forward", "1")
        topology = conditions.topology
        run_ip("-n", self._core, "-batch", "-", script=_lines(core_commands(places)))
        for place in places:
            run_ip("-n", place.namespace, "-batch", "-", script=_lines(region_commands(place)))
            run_tool("tc", "-n", place.namespace, "-batch", "-", script=_lines(uplink_commands(topology, place.region)))
        run_tool("tc", "-n", self._core, "-batch", "-", script=_lines(downlink_commands(topology, places)))
        self._applied: dict[Pair, Path | None] = {}
        self.apply()

    def read(self, fd: int) -> None:
        """Nothing to read."""

    def forward(self) -> None:
        """Nothing is due."""

    def apply(self) -> None:
        """The conditions changed: tell the kernel what differs."""
        names = self._conditions.topology.names
        paths = self._conditions.paths()
        lines = []
        for pair, path in paths.items():
            if pair not in self._applied or self._applied[pair] != path:
                lines += path_commands(self._conditions.topology, names, pair, path)
        if lines:
            run_tool("tc", "-n", self._core, "-batch", "-", script=_lines(lines))
        for place in self._places:
            self._limit_segments(place, paths)
        self._applied = paths

    def _limit_segments(self, place: Place, paths: dict[Pair, Path | None]) -> None:
        """netem loses whole segments of up to 64 KiB: where there is loss, new connections send single packets."""
        is_lossy = any(path is not None and path.loss_ppm for pair, path in paths.items() if pair[0] == place.region)
        was_lossy = any(
            path is not None and path.loss_ppm for pair, path in self._applied.items() if pair[0] == place.region
        )
        if is_lossy != was_lossy:
            segments = 1 if is_lossy else 65_535
            run_ip("-n", place.namespace, "link", "set", DEVICE, "gso_max_segs", str(segments))

    def status(self) -> dict[str, Any]:
        """Return tc's counters, as it prints them."""
        return {"qdiscs": run_tool("tc", "-n", self._core, "-s", "qdisc", "show")}

    def close(self) -> None:
        """Remove the namespace in the middle; the veth pairs go with it."""
        remove(self._core)


def core_namespace(run: str) -> str:
    """The namespace in the middle."""
    return f"{PREFIX}-{run}-{CORE}"


def core_commands(places: Sequence[Place]) -> list[str]:
    """`ip` commands in the middle: a veth pair to each region, and the way to its address."""
    lines = []
    for number, place in enumerate(places):
        lines += [
            f"link add {_device(number)} type veth peer name {DEVICE} netns {place.namespace}",
            f"addr add {GATEWAY}/32 dev {_device(number)}",
            f"link set {_device(number)} up",
            f"route add {place.address}/32 dev {_device(number)}",
        ]
    return lines


def region_commands(place: Place) -> list[str]:
    """`ip` commands in a region: its address, and the way to the others' through the middle."""
    return [
        f"addr add {place.address}/32 dev {DEVICE}",
        f"link set {DEVICE} mtu 1500 up",
        f"route add 10.77.0.0/24 via {GATEWAY} dev {DEVICE} onlink src {place.address}",
    ]


def uplink_commands(topology: Topology, region: str) -> list[str]:
    """`tc` commands for what a region may send."""
    return [bucket_line(DEVICE, topology.region(region).egress.bytes_per_s, topology)]


def downlink_commands(topology: Topology, places: Sequence[Place]) -> list[str]:
    """`tc` commands in the middle: per region its ingress rate, and below it a class per source with a netem."""
    lines = []
    for number, place in enumerate(places):
        device, rate = _device(number), topology.region(place.region).ingress.bytes_per_s
        # htb gives every class its own rate whatever the sum: the shares must add up to the region's rate.
        share = max(1, rate // (len(places) - 1))
        lines += root_lines(device, rate)
        for other_number, source in enumerate(places):
            if source is place:
                continue
            minor = minor_of(other_number)
            lines += [
                class_line("add", device, minor, share=share, ceiling=rate),
                f"qdisc add dev {device} parent 1:{minor} handle {minor}: netem limit {NETEM_PACKETS_MAX}",
                f"qdisc add dev {device} parent {minor}:1 bfifo limit {queue_bytes(topology, rate)}",
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
                f"match ip src {source.address}/32 flowid 1:{minor}",
            ]
    return lines


def path_commands(topology: Topology, names: Sequence[str], pair: Pair, path: Path | None) -> list[str]:
    """`tc` commands in the middle that make one path what it is to be; None: cut."""
    source, target = names.index(pair[0]), names.index(pair[1])
    device, minor = _device(target), minor_of(source)
    path_now = path or topology.paths[pair]
    loss_ppm = path_now.loss_ppm if path is not None else PPM
    ingress = topology.region(pair[1]).ingress.bytes_per_s
    ceiling = min(ingress, path_now.rate.bytes_per_s) if path_now.rate is not None else ingress
    share = min(ceiling, max(1, ingress // (len(names) - 1)))
    return [
        netem_line("change", device, minor, path_now, loss_ppm=loss_ppm),
        class_line("change", device, minor, share=share, ceiling=ceiling),
    ]


def probe_netem() -> str:
    """Try every part in a namespace of its own; "" when all are there, else the first that is not."""
    namespace = f"{PREFIX}-{PROBE}{os.getpid() % 10**6}-try"
    try:
        create(namespace)
        try:
            run_ip("-n", namespace, "link", "add", "wan0", "type", "veth", "peer", "name", "wan1")
            for feature, line in _PARTS:
                try:
                    run_tool("tc", "-n", namespace, *line.split())
                except DilocoError as error:
                    return f"{feature}: {' '.join(str(error).split()).rpartition('failed: ')[2]}"
        finally:
            remove(namespace)
    except DilocoError as error:
        return " ".join(str(error).split())
    return ""


_PARTS: Final = (
    ("netem", "qdisc add dev wan1 root netem delay 1ms"),
    ("netem", "qdisc del dev wan1 root"),
    ("tbf", "qdisc add dev wan0 root tbf rate 1gbit burst 131072 limit 1000000"),
    ("htb", "qdisc add dev wan1 root handle 1: htb"),
    ("htb", "class add dev wan1 parent 1: classid 1:1 htb rate 1gbit"),
    ("netem", "qdisc add dev wan1 parent 1:1 handle 10: netem delay 1ms"),
    ("bfifo", "qdisc add dev wan1 parent 10:1 bfifo limit 1000000"),
    ("u32", "filter add dev wan1 parent 1: protocol ip prio 1 u32 match ip src 10.77.0.1/32 flowid 1:1"),
)
"""Parts of the kernel that the back-end needs, each with a command that tries it; most kernels lack netem."""


def _lines(commands: Sequence[str]) -> str:
    return "".join(f"{command}\n" for command in commands)


def _device(number: int) -> str:
    return f"to{number}"


def minor_of(number: int) -> str:
    """A class's minor number and its netem's handle: hexadecimal, away from 1:1."""
    return f"{16 + number:x}"


def bucket_line(device: str, rate: int, topology: Topology) -> str:
    """A token bucket on a whole device; rate in bytes per second."""
    limit = queue_bytes(topology, rate)
    return f"qdisc add dev {device} root tbf rate {8 * rate}bit burst {burst_bytes(rate)} limit {limit}"


def root_lines(device: str, rate: int) -> list[str]:
    """The tree of a device, and the class that holds it to `rate` bytes per second."""
    burst = burst_bytes(rate)
    return [
        f"qdisc add dev {device} root handle 1: htb",
        f"class add dev {device} parent 1: classid 1:1 htb rate {8 * rate}bit burst {burst} cburst {burst} "
        "quantum 65536",
    ]


def class_line(verb: str, device: str, minor: str, *, share: int, ceiling: int) -> str:
    """Class of a path: `share` bytes per second for sure, `ceiling` at the most."""
    return (
        f"class {verb} dev {device} parent 1:1 classid 1:{minor} htb rate {8 * share}bit ceil {8 * ceiling}bit "
        f"burst {burst_bytes(share)} cburst {burst_bytes(ceiling)} quantum 65536"
    )


def netem_line(verb: str, device: str, minor: str, path: Path, *, loss_ppm: int) -> str:
    """Delay, jitter and loss of one path, in its class."""
    jitter = f" {path.jitter_ns // 1000}us" if path.jitter_ns else ""
    return (
        f"qdisc {verb} dev {device} parent 1:{minor} handle {minor}: netem limit {NETEM_PACKETS_MAX} "
        f"delay {path.delay_ns // 1000}us{jitter} loss {loss_ppm / (PPM // 100):.6f}%"
    )


def burst_bytes(rate: int) -> int:
    """A bucket for a rate in bytes per second."""
    return max(BURST_BYTES_MIN, rate * BURST_NS // 10**9)


def queue_bytes(topology: Topology, rate: int) -> int:
    """A queue for a rate in bytes per second."""
    return max(QUEUE_BYTES_MIN, rate * topology.queue_ns // 10**9)


def _write(file: str, value: str) -> None:
    try:
        with open(file, "w") as stream:  # noqa: PTH123 - /proc, in whatever namespace this thread is
            stream.write(value)
    except OSError as error:
        raise DilocoError(f"{file} can't be set ({error.strerror})") from error
