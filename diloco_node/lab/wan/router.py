"""The user-space router: packets from the regions' tun devices, delayed, paced and dropped as the fabric says.

A single thread keeps a heap of packets by time. Everything about *when* is in `fabric`; this is only the IO.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from diloco_node.lab.wan.conditions import Conditions
from diloco_node.lab.wan.fabric import Fabric
from diloco_node.lab.wan.namespaces import Place, run_ip
from diloco_node.lab.wan.segments import PACKET_BYTES_MAX, destination, wire_size, without
from diloco_node.lab.wan.tun import DEVICE, open_tun

READS_PER_TURN: Final = 16
"""Packets taken from one device before the others and what is due get their turn."""

IN_FLIGHT_BYTES_MAX: Final = 1 << 30
"""On their way in this process; beyond it packets are dropped as by a full queue. 5 Gbit/s x 150 ms is a tenth."""

LATE_NS: Final = 5_000_000
"""A packet this much behind its time is counted as late: the machine can't keep what the file says."""

TX_QUEUE_PACKETS: Final = 2000


@dataclass(slots=True)
class _Packet:
    """On its way. `size` and `count` as it is on the wire; `is_through`: past the downlink's queue."""

    source: int
    target: int
    size: int
    count: int
    first_ns: int
    data: bytes
    is_through: bool = False


class TunPlane:
    """The router. Give `fds` to select, the readable ones to `read`, and call `forward` when `wake_at_ns` is due.

    places: the regions, in the topology's order; their namespaces exist. seed: of jitter and loss.

    Raises DilocoError: a device can't be made.
    """

    def __init__(self, places: Sequence[Place], conditions: Conditions, *, seed: int) -> None:
        self._places = places
        self._conditions = conditions
        self._fabric = Fabric(conditions, seed=seed)
        self.fds: list[int] = []
        self._number_of_fd: dict[int, int] = {}
        self._number_of_address: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, _Packet]] = []
        self._count = 0
        self._in_flight_bytes = 0
        self._refused = 0
        self._late = 0
        self._late_most_ns = 0
        for number, place in enumerate(places):
            fd = open_tun(place.namespace)
            self.fds.append(fd)
            self._number_of_fd[fd] = number
            self._number_of_address[bytes(map(int, place.address.split(".")))] = number
        for place in places:
            run_ip("-n", place.namespace, "-batch", "-", script="\n".join(_configure(place)) + "\n")

    @property
    def wake_at_ns(self) -> int | None:
        """When the next packet is due; None: nothing is on its way."""
        return self._heap[0][0] if self._heap else None

    def apply(self) -> None:
        """The conditions changed."""
        self._fabric.reload()

    def read(self, fd: int) -> None:
        """Take packets that a region sent."""
        source = self._number_of_fd[fd]
        for _ in range(READS_PER_TURN):
            try:
                packet = os.read(fd, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                # The device was taken down from outside; the region is cut off until it is up again.
                return
            address = destination(packet)
            target = self._number_of_address.get(address) if address is not None else None
            if target is not None and target != source:
                self._take(source, target, packet)

    def _take(self, source: int, target: int, packet: bytes) -> None:
        size, count = wire_size(packet)
        if self._in_flight_bytes > IN_FLIGHT_BYTES_MAX:
            self._refused += count
            return
        now_ns = time.monotonic_ns()
        times = self._fabric.admit(source, target, size, count, now_ns=now_ns)
        if times is None:
            return
        numbers = self._fabric.lost_of(source, target, count)
        packets = without(packet, numbers) if numbers and count > 1 else [] if numbers else [packet]
        for piece in packets:
            # What is lost on the way does not load the downlink.
            if numbers:
                size, count = wire_size(piece)
            self._push(times[1], _Packet(source, target, size, count, times[0], piece))

    def _push(self, at_ns: int, packet: _Packet) -> None:
        self._count += 1
        self._in_flight_bytes += len(packet.data)
        heapq.heappush(self._heap, (at_ns, self._count, packet))

    def forward(self) -> None:
        """Hand over what is due."""
        heap = self._heap
        while heap and heap[0][0] <= time.monotonic_ns():
            at_ns, _, packet = heapq.heappop(heap)
            late_ns = time.monotonic_ns() - at_ns
            if late_ns > LATE_NS:
                self._late += packet.count
                self._late_most_ns = max(self._late_most_ns, late_ns)
            self._in_flight_bytes -= len(packet.data)
            if not packet.is_through:
                packet.is_through = True
                due_ns = self._fabric.arrive(
                    packet.source, packet.target, packet.size, packet.count, first_ns=packet.first_ns, last_ns=at_ns
                )
                if due_ns is None:
                    continue
                if due_ns > at_ns:
                    self._push(due_ns, packet)
                    continue
            # A packet that the kernel refuses (a device that is down, a malformed packet) is lost, as on any wire.
            with contextlib.suppress(OSError):
                os.write(self.fds[packet.target], packet.data)

    def status(self) -> dict[str, Any]:
        """Counters per ordered pair, and how far the processor kept up."""
        names = [place.region for place in self._places]
        pairs = [
            {"from": source_name, "to": target_name, **asdict(self._fabric.counters[source * len(names) + target])}
            for source, source_name in enumerate(names)
            for target, target_name in enumerate(names)
            if source != target
        ]
        return {
            "pairs": pairs,
            "in_flight_bytes": self._in_flight_bytes,
            "packets_refused": self._refused,
            "packets_late": self._late,
            "late_seconds_max": self._late_most_ns / 1e9,
        }

    def close(self) -> None:
        """Close the devices; with them they are gone."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def _configure(place: Place) -> list[str]:
    """`ip` commands for one region's device: address, and route to the others."""
    return [
        f"addr add {place.address}/32 dev {DEVICE}",
        f"link set {DEVICE} mtu 1500 txqueuelen {TX_QUEUE_PACKETS} up",
        f"route add 10.77.0.0/24 dev {DEVICE} src {place.address}",
    ]
