"""Pauses that a loop announces: an evaluation, a save. The supervisor waits for their end, and `status` shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, Protocol

from diloco_node.errors import LearnerError
from diloco_node.learner.daemon_session import LearnerSession

BUSY_MAX_S: Final = 3600.0
"""A longer pause counts as a hang: a device that is stuck in an evaluation must not keep its region for ever."""


@contextmanager
def announce_pause(
    session: LearnerSession | None, activity: str, limit_s: float, *, before: Callable[[], None]
) -> Iterator[None]:
    """Announce a pause for the time of the block; in one inside another, the inner one counts.

    limit_s: the longest time without a step. before: called on the way in. Raises LearnerError: the limit is no time.
    """
    if not 0.0 < limit_s < math.inf:
        raise LearnerError(f"busy({activity!r}, at_most_s={limit_s!r}): give the seconds after which it hangs")
    before()
    if session is None:
        yield
        return
    outer = session.place
    # Without a word there would be no pause.
    session.pause(str(activity).strip("\0 ") or "a pause", since_s=time.monotonic(), limit_s=limit_s)
    try:
        yield
    finally:
        session.pause(outer.activity, since_s=outer.since_s, limit_s=outer.limit_s)


class _Busy(Protocol):
    def busy(self, activity: str) -> AbstractContextManager[None]: ...


class CallbackPause:
    """The pauses of a trainer that tells its callbacks when something begins, and when it ends."""

    def __init__(self) -> None:
        self._pause = ExitStack()

    def begin(self, diloco: _Busy | None, activity: str) -> None:
        """Announce a pause; the one before is over."""
        self.end()
        if diloco is not None:
            self._pause.enter_context(diloco.busy(activity))

    def end(self) -> None:
        """End the pause, if there is one."""
        self._pause.close()
