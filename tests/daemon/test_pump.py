"""The pump: one event at a time, effects in order, one timer."""

import asyncio

import pytest

from diloco_node.core.events import Effect, Event, FinishOrdered, Note, TimerFired
from diloco_node.daemon.pump import Pump
from diloco_node.errors import ProtocolViolation


class ScriptedCore:
    """Answers each FinishOrdered with notes; wants to be woken at `wake_at_ns`."""

    def __init__(self) -> None:
        self.wake_at_ns = 10**18
        self.handled: list[Event] = []
        self.is_inside = False

    def handle(self, event: Event, *, now_ns: int) -> list[Effect]:
        assert not self.is_inside
        self.is_inside = True
        self.handled.append(event)
        self.is_inside = False
        if isinstance(event, TimerFired):
            self.wake_at_ns = 10**18
            return []
        assert isinstance(event, FinishOrdered)
        return [Note("first", event.reason), Note("second", event.reason)]


class ManualClock:
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


async def test_events_posted_from_inside_an_effect_wait_for_their_turn() -> None:
    core, effects = ScriptedCore(), []

    def perform(effect: Effect) -> None:
        assert isinstance(effect, Note)
        effects.append((effect.kind, effect.text))
        if effect == Note("first", "a"):
            pump.post(FinishOrdered("b"))

    pump = Pump(core, perform, ManualClock().now_ns)
    pump.post(FinishOrdered("a"))
    assert effects == [("first", "a"), ("second", "a"), ("first", "b"), ("second", "b")]
    pump.close()


async def test_the_timer_fires_when_the_core_wants_it_and_not_before() -> None:
    core, clock = ScriptedCore(), ManualClock()
    core.wake_at_ns = 5_000_000
    pump = Pump(core, lambda effect: None, clock.now_ns)
    pump.start()
    for _ in range(50):
        await asyncio.sleep(0)
    assert core.handled == []
    clock.ns = 5_000_000
    for _ in range(5000):
        if core.handled:
            break
        await asyncio.sleep(0.001)
    assert core.handled == [TimerFired()]
    pump.close()


class Broken(ScriptedCore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def handle(self, event: Event, *, now_ns: int) -> list[Effect]:
        self.handled.append(event)
        if len(self.handled) == 1:
            raise self.error
        return []


async def test_a_fault_of_the_core_closes_the_pump_and_is_told() -> None:
    """Half of what an event asked for may be missing: nothing may go on from there."""
    faults: list[Exception] = []
    core = Broken(AssertionError("impossible"))
    pump = Pump(core, lambda effect: None, ManualClock().now_ns, on_fault=faults.append)
    with pytest.raises(AssertionError):
        pump.post(FinishOrdered("a"))
    assert [str(fault) for fault in faults] == ["impossible"]
    pump.post(FinishOrdered("b"))
    assert core.handled == [FinishOrdered("a")]


async def test_a_fault_in_an_effect_is_told_too() -> None:
    faults: list[Exception] = []

    def perform(effect: Effect) -> None:
        raise KeyError("no such thing")

    pump = Pump(ScriptedCore(), perform, ManualClock().now_ns, on_fault=faults.append)
    with pytest.raises(KeyError):
        pump.post(FinishOrdered("a"))
    assert len(faults) == 1


async def test_a_peers_fault_is_the_callers_and_the_pump_goes_on() -> None:
    faults: list[Exception] = []
    core = Broken(ProtocolViolation("b: nonsense"))
    core.wake_at_ns = 0
    pump = Pump(core, lambda effect: None, ManualClock().now_ns, on_fault=faults.append)
    with pytest.raises(ProtocolViolation):
        pump.post(FinishOrdered("a"))
    assert faults == []
    await asyncio.sleep(0.01)
    assert TimerFired() in core.handled, "the timer is armed again"
    pump.close()


async def test_a_closed_pump_takes_nothing_and_fires_nothing() -> None:
    core, clock = ScriptedCore(), ManualClock()
    core.wake_at_ns = 0
    pump = Pump(core, lambda effect: None, clock.now_ns)
    pump.start()
    pump.close()
    pump.post(FinishOrdered("late"))
    await asyncio.sleep(0.01)
    assert core.handled == []
