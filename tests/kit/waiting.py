"""Wait for what comes true elsewhere, with a deadline: in a thread, on the loop, or woken by a callback."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""A condition that is not true by then never will be; a machine of ours may stand still for most of it."""


def until(
    condition: Callable[[], object], subject: str = "it", *, within_s: float = PATIENCE_S, every_s: float = 0.01
) -> float:
    """Look again and again until a condition holds. Return the seconds that it took.

    Args:
        subject: what is waited for, in the words of a failure.
    """
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() < begun_s + within_s, f"waited {within_s:.0f} s in vain for: {subject}"
        time.sleep(every_s)
    return time.monotonic() - begun_s


async def eventually(
    condition: Callable[[], object], subject: str = "it", *, within_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """Do the same while the loop goes on."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, f"waited {within_s:.0f} s in vain for: {subject}"
        await asyncio.sleep(every_s)


class Changing:
    """A thing whose callbacks set `changed`, so that nobody needs to look again and again."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that some callback makes true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()
