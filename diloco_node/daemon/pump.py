"""The single writer of the region core: events go in one at a time, effects come out in order, one timer is armed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from diloco_node.core.events import Effect, Event, TimerFired
from diloco_node.core.region import RegionCore
from diloco_node.errors import PeerError

WAKE_SLACK_NS = 1_000_000
"""asyncio's clock and ours may differ by a rounding: a timer that fires this much early counts as due."""


class Pump:
    """Feeds events to the core and its effects to `perform`.

    `post` is called on the event loop, also from inside `perform`: the event then waits, so the core never runs inside
    itself. The queue is bounded by what can be in flight: effects with answers, links with queues.

    perform: starts an effect. now_ns: monotonic, what the core's times are on.
    on_fault: takes what core or `perform` raise, but PeerErrors. An event may be half done then: the pump is closed.
    observe: called with each event and its effects before these are performed; it changes nothing.
    """

    def __init__(
        self,
        core: RegionCore,
        perform: Callable[[Effect], None],
        now_ns: Callable[[], int],
        *,
        on_fault: Callable[[Exception], None] = lambda _: None,
        observe: Callable[[Event, list[Effect]], None] = lambda _event, _effects: None,
    ) -> None:
        self._core = core
        self._perform = perform
        self._now_ns = now_ns
        self._on_fault = on_fault
        self._observe = observe
        self._events: deque[Event] = deque()
        self._is_running = False
        # Armed for `_due_ns`, which is no later than the core's next time: None while it fires, and before the start.
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0
        self._is_closed = False
        self.events_total = 0

    def start(self) -> None:
        """Arm the timer; events may be posted before."""
        self._arm()

    def post(self, event: Event) -> None:
        """Hand a fact to the core, now or right after the one it is busy with."""
        if self._is_closed:
            return
        self._events.append(event)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._events:
                event = self._events.popleft()
                self.events_total += 1
                effects = self._core.handle(event, now_ns=self._now_ns())
                self._observe(event, effects)
                for effect in effects:
                    self._perform(effect)
        except PeerError:
            raise
        except Exception as error:
            self.close()
            self._on_fault(error)
            raise
        finally:
            self._is_running = False
            self._arm()

    def close(self) -> None:
        """Drop the timer and everything that comes from now on."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._events.clear()

    def _arm(self) -> None:
        if self._is_closed:
            return
        wake_at_ns = self._core.wake_at_ns
        if self._timer is not None:
            if self._due_ns <= wake_at_ns:
                return  # most events put off a time, and a timer that finds it too early is set again
            self._timer.cancel()
        self._due_ns = wake_at_ns
        delay_ns = max(0, wake_at_ns - self._now_ns())
        self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._core.wake_at_ns - self._now_ns() > WAKE_SLACK_NS:
            self._arm()
            return
        self.post(TimerFired())
