"""Round trips over a link, by echoes in the control lane: sends them, counts those that come back, answers a peer's."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from diloco_node.errors import LinkLost
from diloco_node.measure.gate import MeasuringGate
from diloco_node.measure.samples import Latency, summarise_rtts
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire.measure_messages import EchoReply, EchoRequest

ECHO_GAP_S: Final = 0.01
ECHO_SHARE: Final = 20
"""Echoes take at most a 20th of a budget."""

ECHO_WIRE_BYTES: Final = 180
ECHOES_SKIPPED: Final = 5
"""The first round trips pay for what is done once."""

UNANSWERED_AFTER_S: Final = 2.0


class Echoes:
    """Echoes on their way to one peer and back."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent_ns: dict[int, int] = {}
        self.back_ns: dict[int, int] = {}
        self.answers: list[EchoReply] = []
        """The first and the last."""
        self._arrived = asyncio.Event()

    def take(self, answer: EchoReply, *, now_ns: int) -> None:
        """Take an echo that came back."""
        if answer.sequence in self.sent_ns and answer.sequence not in self.back_ns:
            self.back_ns[answer.sequence] = now_ns
            self.answers[1:] = [answer]
            self._arrived.set()

    async def until_all_back(self, limit_s: float) -> None:
        """Wait for those that are still on their way, but not longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self.back_ns) < len(self.sent_ns):
                    self._arrived.clear()
                    await self._arrived.wait()


class EchoProbe:
    """Measures round trips, to one peer at a time; answers peers as far as the gate admits."""

    def __init__(self, transport: GrpcTransport, gate: MeasuringGate, *, now_ns: Callable[[], int]) -> None:
        self._transport = transport
        self._gate = gate
        self.now_ns = now_ns
        self._echoes: Echoes | None = None
        self._sequence = secrets.randbits(32)

    def answer_request(self, peer: str, message: EchoRequest) -> None:
        """A peer requests an echo."""
        if self._gate.may_echo(peer, now_ns=self.now_ns()):
            tcp = self._transport.tcp(peer)
            counters = (-1, -1) if tcp is None else (tcp.sent_bytes, tcp.retransmitted_bytes)
            self._transport.send(peer, EchoReply(message.sequence, *counters))

    def take_reply(self, peer: str, message: EchoReply) -> None:
        """An echo came back; those that nobody waits for are nothing."""
        if self._echoes is not None and self._echoes.peer == peer:
            self._echoes.take(message, now_ns=self.now_ns())

    async def measure(self, peer: str, span_s: float, *, load: asyncio.Task[Any] | None = None) -> Latency:
        """Send echoes for so long, or until the load ends. Raises LinkLost: none came back."""
        loop = asyncio.get_running_loop()
        rate = self._transport.budget_status()["peers"][peer]["egress_bytes_per_s"]
        gap_s = ECHO_GAP_S if rate is None else max(ECHO_GAP_S, ECHO_WIRE_BYTES * ECHO_SHARE / rate)
        before = self._transport.tcp(peer, is_now=True)
        echoes = self._echoes = Echoes(peer)
        try:
            started_s, count = loop.time(), ECHOES_SKIPPED + max(1, round(span_s / gap_s))
            for number in range(1, count + 1):
                self._sequence += 1
                echoes.sent_ns[self._sequence] = self.now_ns()
                self._transport.send(peer, EchoRequest(self._sequence))
                await asyncio.sleep(max(0.0, started_s + number * gap_s - loop.time()))
                if load is not None and load.done():
                    break
            await echoes.until_all_back(UNANSWERED_AFTER_S)
        finally:
            self._echoes = None
        order = sorted(echoes.sent_ns)[ECHOES_SKIPPED:]
        rtts = [echoes.back_ns[sequence] - echoes.sent_ns[sequence] for sequence in order if sequence in echoes.back_ns]
        if not rtts:
            raise LinkLost(f"{peer}: none of {len(order)} echoes came back in {UNANSWERED_AFTER_S:.0f} s")
        after = self._transport.tcp(peer, is_now=True)
        least_ns = after.rtt_min_ns if after is not None else 0
        share = share_retransmitted(before, after, echoes.answers)
        latency = summarise_rtts(rtts, lost_count=len(order) - len(rtts))
        return replace(latency, retransmitted=share, tcp_rtt_min_ns=least_ns or None)


def share_retransmitted(
    before: TcpCounters | None, after: TcpCounters | None, answers: Sequence[EchoReply]
) -> float | None:
    """Part of the bytes of both ends that was retransmitted meanwhile, 0 to 1; None where nobody knows."""
    if before is None or after is None or len(answers) < 2 or min(answer.sent_bytes for answer in answers) < 0:
        return None
    sent_bytes = after.sent_bytes - before.sent_bytes + answers[-1].sent_bytes - answers[0].sent_bytes
    again = after.retransmitted_bytes - before.retransmitted_bytes
    again += answers[-1].retransmitted_bytes - answers[0].retransmitted_bytes
    return again / sent_bytes if sent_bytes > 0 and again >= 0 else None
