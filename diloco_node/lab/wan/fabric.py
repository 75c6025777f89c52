"""When a packet arrives, and whether: uplink, path and downlink as arithmetic in integers. Pure.

A packet leaves through its region's uplink (egress rate, one queue), travels (the pair's own rate, delay, jitter,
loss), and enters through the other region's downlink (ingress rate, one queue). A large segment stands for many packets
that
follow each other, so the stages overlap: the downlink takes the first of them while the uplink still sends the last.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from diloco_node.lab.wan.conditions import Conditions
from diloco_node.lab.wan.topology import PPM
from diloco_node.numeric import NS_PER_S


@dataclass(slots=True)
class PathCounters:
    """Counters of an ordered pair, in bytes on the wire, headers included; `passed` reached the other region."""

    packets_passed: int = 0
    bytes_passed: int = 0
    packets_lost: int = 0
    packets_overflowed: int = 0
    packets_cut: int = 0


@dataclass(slots=True)
class _PathState:
    """Facts that `admit` needs of a path, without looking it up: only `reload` changes them, except free and last."""

    is_cut: bool = False
    delay_ns: int = 0
    jitter_ns: int = 0
    loss_log: float = 0.0
    rate: int = 0
    free_ns: int = 0
    last_ns: int = 0


class Fabric:
    """All queues and paths. Regions and paths go by their number: the order of `Conditions.topology`.

    Call `admit` for a packet that a region sent; `arrive` at the time it returned; the packet may be handed over at the
    time that `arrive` returned. Calls come in order of time (per region); late calls only make packets late.

    conditions: read by `reload` only. seed: of jitter and loss.
    """

    def __init__(self, conditions: Conditions, *, seed: int) -> None:
        topology = conditions.topology
        self._conditions = conditions
        self._random = random.Random(seed)
        self._count = count = len(topology.regions)
        self._queue_ns = topology.queue_ns
        self._egress = [region.egress.bytes_per_s for region in topology.regions]
        self._ingress = [region.ingress.bytes_per_s for region in topology.regions]
        self._egress_free_ns = [0] * count
        self._ingress_free_ns = [0] * count
        self._paths = [_PathState() for _ in range(count * count)]
        self.counters = [PathCounters() for _ in range(count * count)]
        self.reload()

    def reload(self) -> None:
        """Take over what the conditions say now; queues and what is on its way stay."""
        names = self._conditions.topology.names
        for source, source_name in enumerate(names):
            for target, target_name in enumerate(names):
                if source != target:
                    self._reload(source * self._count + target, source_name, target_name)

    def _reload(self, number: int, source: str, target: str) -> None:
        state, path = self._paths[number], self._conditions.path(source, target)
        state.is_cut = path is None
        if path is None:
            return
        state.delay_ns, state.jitter_ns = path.delay_ns, min(path.jitter_ns, path.delay_ns)
        state.rate = path.rate.bytes_per_s if path.rate is not None else 0
        share = path.loss_ppm / PPM
        state.loss_log = math.log1p(-share) if share < 1 else -math.inf

    def lost_of(self, source: int, target: int, packets: int) -> list[int]:
        """Draw which of some packets that follow each other are lost on the path: their numbers, rising."""
        loss_log = self._paths[source * self._count + target].loss_log
        if loss_log == 0.0:
            return []
        numbers: list[int] = []
        at = -1
        while True:
            # The gap to the next loss is geometric: one random number per loss instead of one per packet.
            at += 1 + (int(math.log(1.0 - self._random.random()) / loss_log) if loss_log > -math.inf else 0)
            if at >= packets:
                break
            numbers.append(at)
        self.counters[source * self._count + target].packets_lost += len(numbers)
        return numbers

    def admit(self, source: int, target: int, size: int, packets: int, *, now_ns: int) -> tuple[int, int] | None:
        """A packet left its region.

        source, target: numbers of the regions. size: bytes on the wire. packets: that it stands for.

        Returns: (when its first, when its last byte reaches the other region's downlink); None: it is dropped.
        """
        number = source * self._count + target
        state = self._paths[number]
        if state.is_cut:
            self.counters[number].packets_cut += packets
            return None
        start_ns = max(now_ns, self._egress_free_ns[source])
        if start_ns - now_ns > self._queue_ns:
            self.counters[number].packets_overflowed += packets
            return None
        end_ns = start_ns + size * NS_PER_S // self._egress[source]
        if state.rate:
            pair_start_ns = max(start_ns, state.free_ns)
            if pair_start_ns - start_ns > self._queue_ns:
                self.counters[number].packets_overflowed += packets
                return None
            state.free_ns = pair_start_ns + size * NS_PER_S // state.rate
            self._egress_free_ns[source] = end_ns
            start_ns, end_ns = pair_start_ns, max(end_ns, state.free_ns)
        else:
            self._egress_free_ns[source] = end_ns
        delay_ns = state.delay_ns
        if state.jitter_ns:
            delay_ns += int(self._random.uniform(-state.jitter_ns, state.jitter_ns))
        # Never before the one before it: jitter does not reorder.
        state.last_ns = max(end_ns + delay_ns, state.last_ns)
        return start_ns + delay_ns, state.last_ns

    def arrive(self, source: int, target: int, size: int, packets: int, *, first_ns: int, last_ns: int) -> int | None:
        """A packet is at the other region's downlink.

        first_ns, last_ns: what `admit` said.

        Returns: when it may be handed over; None: dropped (the queue is full, or the path was cut meanwhile).
        """
        number = source * self._count + target
        if self._paths[number].is_cut:
            self.counters[number].packets_cut += packets
            return None
        free_ns = self._ingress_free_ns[target]
        if free_ns - last_ns > self._queue_ns:
            self.counters[number].packets_overflowed += packets
            return None
        end_ns = max(last_ns, max(first_ns, free_ns) + size * NS_PER_S // self._ingress[target])
        self._ingress_free_ns[target] = end_ns
        counters = self.counters[number]
        counters.packets_passed += packets
        counters.bytes_passed += size
        return end_ns
