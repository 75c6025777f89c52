"""Pauses that a loop announces: an evaluation, a save. The supervisor waits for their end, and `status` shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from diloco_node.errors import LearnerError
from diloco_node.learner.daemon_session import LearnerSession
from diloco_node.shared_memory import BUSY_MAX_S


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
    @property
    def _is_closed(self) -> bool: ...

    @property
    def _session(self) -> LearnerSession | None: ...

    def busy(self, activity: str) -> AbstractContextManager[None]: ...


class CallbackPause:
    """The pauses of a trainer that tells its callbacks when something begins, and when it ends."""

    def __init__(self) -> None:
        self._pause = ExitStack()

    def begin(self, diloco: _Busy | None, activity: str, *, is_saving: bool = True) -> None:
        """Announce a pause; the one before is over. is_saving: `busy` saves a checkpoint before it, which costs."""
        self.end()
        if diloco is None:
            return
        session = None if diloco._is_closed else diloco._session
        unsaved = announce_pause(session, activity, BUSY_MAX_S, before=lambda: None)
        self._pause.enter_context(diloco.busy(activity) if is_saving else unsaved)

    def end(self) -> None:
        """End the pause, if there is one."""
        self._pause.close()
