"""Waits that end together: what a process looks at now and then, it looks at in one wake-up.

The first thing that a process does after it slept costs many times what follows, for its memory has left the caches. A
dozen tasks with a second each, begun at different times, wake a daemon a dozen times a second.
"""

from __future__ import annotations

import time
from typing import Final

_BEGAN_S: Final = time.monotonic()
"""When this process began: not the clock's zero, at which all daemons of a machine would wake at once."""

GRAIN_S: Final = 0.005
"""A timer may fire so much early: then it is the tick that it was set for."""


def to_tick_s(period_s: float) -> float:
    """Return the seconds to the next multiple of a period since this process began: about so long at most."""
    wait_s = period_s - (time.monotonic() - _BEGAN_S) % period_s
    return wait_s if wait_s > GRAIN_S else wait_s + period_s
