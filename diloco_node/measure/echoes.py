"""Round trips over a link, by echoes in the control lane: sends them, counts those that come back, answers a peer's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

from diloco_node.adapters.probe import UNANSWERED_AFTER_S, LatencyMeasured
from diloco_node.core import measuring as msg
from diloco_node.errors import LinkLost
from diloco_node.measure.exchange import Echoes, share_sent_again
from diloco_node.measure.measured_links import MeasuringTransport
from diloco_node.measure.samples import summarise_rtts

ECHO_GAP_S: Final = 0.01
ECHO_SHARE: Final = 20
"""Echoes take at most a 20th of a budget."""

ECHO_WIRE_BYTES: Final = 180
ECHOES_SKIPPED: Final = 5


class EchoProbe:
    """Measures round trips, to one peer at a time; answers peers as far as the gate lets it."""

    def __init__(self, transport: MeasuringTransport, gate: msg.MeasuringGate, *, now_ns: Callable[[], int]) -> None:
        self._transport = transport
        self._gate = gate
        self._now_ns = now_ns
        self._echoes: Echoes | None = None
        self._sequence = secrets.randbits(32)

    def wanted(self, peer: str, message: msg.EchoWanted) -> None:
        """A peer asks for an echo."""
        if self._gate.may_echo(peer, now_ns=self._now_ns()):
            tcp = self._transport.tcp(peer)
            counted = (-1, -1) if tcp is None else (tcp.sent_bytes, tcp.retransmitted_bytes)
            self._transport.send(peer, msg.EchoAnswered(message.sequence, *counted))

    def answered(self, peer: str, message: msg.EchoAnswered) -> None:
        """An echo came back; those that nobody waits for are nothing."""
        if self._echoes is not None and self._echoes.peer == peer:
            self._echoes.heard(message, now_ns=self._now_ns())

    async def measure(self, peer: str, span_s: float, *, load: asyncio.Task[Any] | None = None) -> LatencyMeasured:
        """Send echoes for so long, or until the load ends. Raises LinkLost: none came back."""
        loop, gap_s = asyncio.get_running_loop(), self._gap_s(peer)
        here = self._transport.tcp(peer)
        echoes = self._echoes = Echoes(peer)
        try:
            started_s, count = loop.time(), ECHOES_SKIPPED + max(1, round(span_s / gap_s))
            for number in range(1, count + 1):
                self._sequence += 1
                echoes.sent_ns[self._sequence] = self._now_ns()
                self._transport.send(peer, msg.EchoWanted(self._sequence))
                await asyncio.sleep(max(0.0, started_s + number * gap_s - loop.time()))
                if load is not None and load.done():
                    break
            await echoes.until_all_back(UNANSWERED_AFTER_S)
        finally:
            self._echoes = None
        order = sorted(echoes.sent_ns)[ECHOES_SKIPPED:]
        rtts = [echoes.back_ns[one] - echoes.sent_ns[one] for one in order if one in echoes.back_ns]
        if not rtts:
            raise LinkLost(f"{peer}: none of {len(order)} echoes came back in {UNANSWERED_AFTER_S:.0f} s")
        now = self._transport.tcp(peer)
        least_ns = now.rtt_min_ns if now is not None else 0
        share = share_sent_again(here, now, echoes.told)
        return LatencyMeasured(summarise_rtts(rtts, unanswered=len(order) - len(rtts)), share, least_ns or None)

    def _gap_s(self, peer: str) -> float:
        rate = self._transport.budget_status()["peers"][peer]["egress_bytes_per_s"]
        return ECHO_GAP_S if rate is None else max(ECHO_GAP_S, ECHO_WIRE_BYTES * ECHO_SHARE / rate)
