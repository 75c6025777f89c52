"""A conversation with a peer about one measurement, and tasks that end together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

from diloco_node.errors import DilocoError, LinkLost, PeerError, ProtocolViolation
from diloco_node.escaping import escaped
from diloco_node.wire.measure_messages import MeasurementDeclined, MeasureMessage

T = TypeVar("T")

ANSWERS_MAX: Final = 8


class Exchange:
    """A peer's answers to one request of ours."""

    def __init__(self, peer: str, measurement: int) -> None:
        self.peer = peer
        self.measurement = measurement
        self._answers: asyncio.Queue[MeasureMessage | DilocoError] = asyncio.Queue(ANSWERS_MAX)

    def take(self, message: MeasureMessage) -> None:
        """The peer answered. Raises ProtocolViolation: more than was requested."""
        try:
            self._answers.put_nowait(message)
        except asyncio.QueueFull:
            raise ProtocolViolation(f"{self.peer} says more than it was asked in a measurement") from None

    def fail(self, error: DilocoError) -> None:
        """No further answer will come."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(error)

    async def answer(self, kind: type[T], limit_s: float) -> T:
        """The next answer, which must be of a kind. Raises PeerError."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise LinkLost(f"{self.peer} said nothing for {limit_s:.0f} s ({kind.__name__} was due)") from None
        if isinstance(answer, DilocoError):
            raise answer
        if isinstance(answer, MeasurementDeclined):
            raise PeerError(f"{self.peer} can't: {escaped(answer.reason)}")
        if not isinstance(answer, kind):
            raise PeerError(f"{self.peer} said {type(answer).__name__}; expected {kind.__name__}")
        return answer


@contextlib.asynccontextmanager
async def ending(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Tasks that are over when this is."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
