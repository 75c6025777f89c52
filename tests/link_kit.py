"""A link in virtual time, for tests of `core.delay`: a bottleneck with a queue, a socket that sends like BBR, pings.

Fluid, in steps of a millisecond, without randomness: loss is an even part of what passes. What the pacer would see is
what `DelayCut` gets: counters every tenth of a second, the kernel's round trip, and the queue of our own direction from
pings every twentieth, echoed a round trip later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diloco_node.core.delay import DelayCut
from diloco_node.core.oneway import RECENT_NS, OneWayQueue, hasty_ns
from diloco_node.transport.pacing.budget import NS_PER_S, burst_bytes

MS: Final = 1_000_000
STEP_NS: Final = MS
SAMPLE_STEPS: Final = (100, 50)
PING_STEPS: Final = (50, 20)
"""Usually, and while the rate changes fast."""


STARTUP_GAIN: Final = 2.89
CYCLE: Final = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
WINDOW_GAIN: Final = 2.0
BANDWIDTH_ROUNDS: Final = 10
BELIEF: Final = 1.04
"""Acknowledgements come unevenly, and it takes the most of ten rounds: a few percent more than the link has."""

FULL_ROUNDS: Final = 3
FULL_GROWTH: Final = 1.25
FIRST_WINDOW_BYTES: Final = 14_480
SOCKET_BYTES: Final = 4 * 2**20
PACE_SHARE: Final = 0.99
"""Of the limit, headers included: `adapters.link_watch.PACE_PPM` without them."""


class BbrSocket:
    """How fast a BBR socket lets go what it holds: start-up, drain, then a probe in every eighth round."""

    def __init__(self, rtt_ns: int) -> None:
        self.rtt_ns = rtt_ns
        self.in_flight = 0.0
        self.is_starting = True
        self._rates: deque[float] = deque(maxlen=BANDWIDTH_ROUNDS)
        self._full, self._full_rounds = 0.0, 0
        self._round_ns = self._delivered = 0.0
        self._rounds = 0
        self._is_app_limited = False

    @property
    def bandwidth(self) -> float:
        """Bytes/s, as it believes."""
        return BELIEF * max(self._rates, default=FIRST_WINDOW_BYTES * NS_PER_S / self.rtt_ns)

    def allowed(self, step_ns: int) -> float:
        """Bytes that may leave in a step."""
        gain = STARTUP_GAIN if self.is_starting else CYCLE[self._rounds % len(CYCLE)]
        window = max(WINDOW_GAIN, gain) * self.bandwidth * self.rtt_ns / NS_PER_S + FIRST_WINDOW_BYTES
        return max(0.0, min(gain * self.bandwidth * step_ns / NS_PER_S, window - self.in_flight))

    def sent(self, size: float, *, is_all: bool) -> None:
        """So much left; `is_all`: there was no more."""
        self.in_flight += size
        self._is_app_limited = self._is_app_limited or is_all

    def acked(self, size: float, *, rtt_ns: int) -> None:
        """A step's acknowledgements, with what was found lost."""
        self.in_flight -= size
        self._delivered += size
        self._round_ns += STEP_NS
        if self._round_ns < rtt_ns:
            return
        rate = self._delivered * NS_PER_S / self._round_ns
        if not self._is_app_limited or rate > self.bandwidth:
            self._rates.append(rate)
        if self.is_starting and not self._is_app_limited:
            if rate >= self._full * FULL_GROWTH:
                self._full, self._full_rounds = rate, 0
            else:
                self._full_rounds += 1
                self.is_starting = self._full_rounds < FULL_ROUNDS
        self._round_ns = self._delivered = 0.0
        self._rounds += 1
        self._is_app_limited = False


@dataclass(slots=True)
class Seen:
    """What a test asks about, one row per sample: (seconds, value)."""

    carried: list[tuple[float, int]] = field(default_factory=list)
    queues_ns: list[tuple[float, int]] = field(default_factory=list)
    limits: list[tuple[float, int | None]] = field(default_factory=list)


class VirtualLink:
    """One direction of a link with bulk to send. Change `capacity`, `greedy` or `other_ns` at any time.

    Args:
        capacity: bytes/s. rtt_ns: without queues. queue_ns_max: of drop-tail. loss: part of what passes that is lost.
        greedy: what there is to send, bytes/s.
    """

    def __init__(
        self, capacity: int, rtt_ns: int, *, queue_ns_max: int = 50 * MS, loss: float = 0.0, greedy: int = 10**10
    ) -> None:
        self.capacity, self.rtt_ns, self.queue_ns_max, self.loss, self.greedy = (
            capacity,
            rtt_ns,
            queue_ns_max,
            loss,
            greedy,
        )
        self.other_ns = 0
        self.cut = DelayCut()
        self.one_way = OneWayQueue()
        self.seen = Seen()
        self.now_ns = 0
        self.standstill_until_ns = 0
        self._socket = BbrSocket(rtt_ns)
        self._held = self._queue = self._tokens = 0.0
        self._again = 0.0  # lost, to be sent once more
        steps = max(1, rtt_ns // STEP_NS)
        self._acks: deque[tuple[float, float]] = deque([(0.0, 0.0)] * steps)  # (acknowledged, lost) per step
        self._echoes: deque[tuple[int, int, int]] = deque()  # (when it is back, sent, arrived)
        self._sent = self._carried = 0.0
        self._sent_before = self._carried_before = 0.0
        self._smoothed_rtt = float(rtt_ns)
        self._steps = 0
        self._sampled_ns = 0
        self._pace: float | None = None

    @property
    def queue_ns(self) -> int:
        """Of our own direction, in the bottleneck."""
        return int(self._queue * NS_PER_S / self.capacity)

    def begin(self) -> None:
        """Work begins."""
        self.cut.begin(rtt_min_ns=self.rtt_ns, now_ns=self.now_ns)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(int(seconds * NS_PER_S) // STEP_NS):
            self._step()

    def carried_share(self, start_s: float, end_s: float) -> float:
        """Of the capacity, on average from one moment to another."""
        rates = [rate for at_s, rate in self.seen.carried if start_s < at_s <= end_s]
        return sum(rates) / len(rates) / self.capacity

    def queue_quantile_ns(self, share: float, start_s: float) -> int:
        """The queue, in the bottleneck, in so many of the samples after a moment."""
        found = sorted(queue for at_s, queue in self.seen.queues_ns if at_s > start_s)
        return found[min(int(len(found) * share), len(found) - 1)]

    def _step(self) -> None:
        self.now_ns += STEP_NS
        self._steps += 1
        self._hand_over()
        self._send()
        self._acknowledge()
        self._echo()
        if self._steps % SAMPLE_STEPS[self.cut.is_hasty] == 0 and self.now_ns >= self.standstill_until_ns:
            self._sample()

    def _hand_over(self) -> None:
        if self.now_ns < self.standstill_until_ns:
            return
        limit = self.cut.rate_bytes_per_s
        offered = self.greedy * STEP_NS / NS_PER_S
        if limit is not None:
            self._tokens = min(self._tokens + limit * STEP_NS / NS_PER_S, burst_bytes(limit))
            offered = min(offered, self._tokens)
        offered = min(offered, max(0.0, max(SOCKET_BYTES, self.capacity * 2 * self.rtt_ns / NS_PER_S) - self._held))
        self._tokens = self._tokens - offered if limit is not None else 0.0
        self._held += offered

    def _send(self) -> None:
        size = min(self._held + self._again, self._socket.allowed(STEP_NS))
        if self._pace is not None:
            size = min(size, self._pace * STEP_NS / NS_PER_S)
        again = min(size, self._again)
        self._again -= again
        self._held -= size - again
        self._sent += size - again
        self._socket.sent(size, is_all=self._held + self._again < 1.0)
        room = self.capacity * self.queue_ns_max / NS_PER_S + self.capacity * STEP_NS / NS_PER_S - self._queue
        dropped = max(0.0, size - room)
        self._queue += size - dropped
        passed = min(self._queue, self.capacity * STEP_NS / NS_PER_S)
        self._queue -= passed
        lost = passed * self.loss
        self._acks.append((passed - lost, dropped + lost))

    def _acknowledge(self) -> None:
        acked, lost = self._acks.popleft()
        self._carried += acked
        self._again += lost
        rtt_ns = self.rtt_ns + self.queue_ns + self.other_ns
        self._smoothed_rtt += (rtt_ns - self._smoothed_rtt) / 50
        self._socket.acked(acked + lost, rtt_ns=rtt_ns)

    def _echo(self) -> None:
        if self._steps % PING_STEPS[self.cut.is_hasty] == 0:
            arrived_ns = self.now_ns + self.rtt_ns // 2 + self.queue_ns
            self._echoes.append((arrived_ns + self.rtt_ns // 2 + self.other_ns, self.now_ns, arrived_ns))
        while self._echoes and self._echoes[0][0] <= self.now_ns:
            _, sent_ns, arrived_ns = self._echoes.popleft()
            self.one_way.echoed(sent_ns=sent_ns, arrived_ns=arrived_ns, now_ns=self.now_ns)

    def _sample(self) -> None:
        elapsed_ns = self.now_ns - self._sampled_ns
        sent = int((self._sent - self._sent_before) * NS_PER_S / elapsed_ns)
        carried = int((self._carried - self._carried_before) * NS_PER_S / elapsed_ns)
        self._sent_before, self._carried_before, self._sampled_ns = self._sent, self._carried, self.now_ns
        self.cut.measured(
            rtt_ns=int(self._smoothed_rtt),
            rtt_min_ns=self.rtt_ns,
            queue_ns=self.one_way.queue_ns(
                now_ns=self.now_ns, recent_ns=hasty_ns(self.rtt_ns) if self.cut.is_hasty else RECENT_NS
            ),
            sent_bytes_per_s=sent,
            carried_bytes_per_s=carried,
            now_ns=self.now_ns,
        )
        if self.cut.is_in_vain:
            self.one_way.reset()
            self.cut.begin_again()
        limit = self.cut.rate_bytes_per_s
        self._pace = limit * PACE_SHARE if limit is not None and not self.cut.is_searching else None
        at_s = self.now_ns / NS_PER_S
        self.seen.carried.append((at_s, carried))
        self.seen.queues_ns.append((at_s, self.queue_ns))
        self.seen.limits.append((at_s, limit))
