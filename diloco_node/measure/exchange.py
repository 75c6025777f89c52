"""What measuring needs beside `measuring`: a conversation with a peer, echoes on their way, tasks that end together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, TypeVar

from diloco_node.core import measuring as msg
from diloco_node.core.measuring import MeasuringMessage
from diloco_node.errors import DilocoError, LinkLost, PeerError, ProtocolViolation
from diloco_node.transport.kernel.tcp_info import TcpCounters

T = TypeVar("T")

ANSWERS_MAX: Final = 8


class Talk:
    """What a peer answers to one question of ours."""

    def __init__(self, peer: str, measurement: int) -> None:
        self.peer = peer
        self.measurement = measurement
        self._answers: asyncio.Queue[MeasuringMessage | DilocoError] = asyncio.Queue(ANSWERS_MAX)

    def heard(self, message: MeasuringMessage) -> None:
        """The peer said something."""
        try:
            self._answers.put_nowait(message)
        except asyncio.QueueFull:
            raise ProtocolViolation(f"{self.peer} says more than it was asked in a measurement") from None

    def fail(self, error: DilocoError) -> None:
        """It will not say anything any more."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(error)

    async def answer(self, kind: type[T], limit_s: float) -> T:
        """The next answer, which must be of a kind. Raises PeerError."""
        try:
            async with asyncio.timeout(limit_s):
                found = await self._answers.get()
        except TimeoutError:
            raise LinkLost(f"{self.peer} said nothing for {limit_s:.0f} s ({kind.__name__} was due)") from None
        if isinstance(found, DilocoError):
            raise found
        if isinstance(found, msg.MeasurementDeclined):
            raise PeerError(f"{self.peer} can't: {printable(found.reason)}")
        if not isinstance(found, kind):
            raise PeerError(f"{self.peer} said {type(found).__name__}; expected {kind.__name__}")
        return found


class Echoes:
    """Echoes on their way to one peer and back."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent_ns: dict[int, int] = {}
        self.back_ns: dict[int, int] = {}
        self.told: list[msg.EchoAnswered] = []
        self._came = asyncio.Event()

    def heard(self, answer: msg.EchoAnswered, *, now_ns: int) -> None:
        """One came back."""
        if answer.sequence in self.sent_ns and answer.sequence not in self.back_ns:
            self.back_ns[answer.sequence] = now_ns
            self.told[1:] = [answer]  # the first and the last are enough
            self._came.set()

    async def until_all_back(self, limit_s: float) -> None:
        """Wait for those that are still on their way, but not longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self.back_ns) < len(self.sent_ns):
                    self._came.clear()
                    await self._came.wait()


def printable(text: str) -> str:
    """What a peer says in its own words, for a terminal: on one line, and without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


@contextlib.asynccontextmanager
async def ended(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Tasks that are over when this is."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def share_sent_again(
    before: TcpCounters | None, after: TcpCounters | None, told: Sequence[msg.EchoAnswered]
) -> float | None:
    """Part of the bytes of both ends that was sent again meanwhile, 0 to 1; None where nobody knows."""
    if before is None or after is None or len(told) < 2 or min(one.sent_bytes for one in told) < 0:
        return None
    sent = after.sent_bytes - before.sent_bytes + told[-1].sent_bytes - told[0].sent_bytes
    again = after.retransmitted_bytes - before.retransmitted_bytes
    again += told[-1].retransmitted_bytes - told[0].retransmitted_bytes
    return again / sent if sent > 0 and again >= 0 else None
