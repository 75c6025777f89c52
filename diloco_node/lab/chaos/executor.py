"""Carries faults out on a running demo: one, or a whole plan at its times."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos.demo_processes import DemoFile, ProcessHandle, hold_all
from diloco_node.lab.chaos.fault_files import fault_file, switch_off, switch_on
from diloco_node.lab.chaos.fault_plan import (
    DAEMON_ONLY,
    ORDERS,
    REGION,
    FaultPlan,
    FaultTarget,
    PlannedFault,
    check_fault,
)
from diloco_node.numeric import NS_PER_S
from diloco_node.unix_sockets import Process

SLOW_RUN_S: Final = 0.05
SLOW_STOP_S: Final = 0.15
"""A slow process runs so long, and is stopped so long, in turn: a quarter of its time is left."""

SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "notice": signal.SIGTERM}

GONE_POLL_S: Final = 0.1
"""Between two looks whether a machine that got notice has stopped by itself."""

UNDONE: Final = "it was not done when the storm ended"
"""Refusal of an order that goes on."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StruckFault:
    """Outcome of a fault.

    Attributes:
        at_ns: when it was carried out, on the plan's clock. pids: the processes that it struck; none: nobody was there.
        stopped_ns: of a notice, how long the machine took to stop, of an order how long it took; 0 of others.
        kills: processes left at a notice's end. refusal: why an order was not carried out.
    """

    at_ns: int
    fault: PlannedFault
    pids: tuple[int, ...]
    stopped_ns: int = 0
    kills: int = 0
    refusal: str = ""

    @property
    def is_order(self) -> bool:
        """Whether it is an order, which strikes no process."""
        return self.fault.kind in ORDERS

    @property
    def is_missed(self) -> bool:
        """Whether nobody was there, dead of an earlier fault for example."""
        return not self.pids and not self.is_order

    def document(self) -> dict[str, Any]:
        """As it stands in a report."""
        return {
            "at_seconds": self.at_ns / NS_PER_S,
            "do": self.fault.kind,
            "target": str(self.fault.target),
            "seconds": self.fault.lasts_ns / NS_PER_S,
            "pids": list(self.pids),
            "missed": self.is_missed,
            **({"took_seconds": self.stopped_ns / NS_PER_S, "refused": self.refusal} if self.is_order else {}),
            **(
                {"stopped_after_seconds": self.stopped_ns / NS_PER_S, "killed": self.kills}
                if self.fault.kind == "notice"
                else {}
            ),
        }


class FaultExecutor:
    """Strikes the processes of one demo.

    Args:
        load: reads the demo's file; anew for each fault, for supervisors come and go.
        now_ns: the plan's clock: 0 is the beginning of the training. told: called with each fault when it begins.
        learner_pid: the process that a region's daemon names as its learner; None: it names none just now.
        carry_out: an order; returns when it is done, or the reason why it was not.

    Attributes:
        strikes: what was carried out so far, in the order of its beginning.
    """

    def __init__(
        self,
        load: Callable[[], DemoFile],
        *,
        now_ns: Callable[[], int],
        on_strike: Callable[[StruckFault], None] = lambda _: None,
        learner_pid: Callable[[str], int | None] = lambda _: None,
        carry_out: Callable[[PlannedFault], Awaitable[str]] | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.strikes: list[StruckFault] = []
        self._load = load
        self._now_ns = now_ns
        self._on_strike = on_strike
        self._attached = learner_pid
        self._carry_out = carry_out
        self._sleep = sleep
        self._stops: Counter[Process] = Counter()

    async def run(self, plan: FaultPlan) -> None:
        """Every fault at its time; returns when the last one is over. Cancelled, it ends those that still last."""
        async with asyncio.TaskGroup() as group:
            for fault in plan.faults:
                wait_ns = fault.at_ns - self._now_ns()
                if wait_ns > 0:
                    await self._sleep(wait_ns / NS_PER_S)
                group.create_task(self.strike(fault))

    async def strike(self, fault: PlannedFault) -> StruckFault:
        """Carry out one fault now; returns when it is over.

        Raises ConfigError: it can't be carried out, or the demo has no such region.
        """
        check_fault(fault)
        if fault.kind in ORDERS:
            return await self._order(fault)
        demo = await asyncio.to_thread(self._load)
        learner_pid = await asyncio.to_thread(self._attached, fault.target.region)
        processes = await asyncio.to_thread(demo.find, _struck_target(fault), learner_pid=learner_pid)
        with hold_all(processes) as handles:
            number = SIGNALS.get(fault.kind)
            victims = [handle for handle in handles if number is None or handle.send(number)]
            strike = self._note(fault, tuple(victim.process.pid for victim in victims))
            if victims and fault.kind in DAEMON_ONLY:
                await self._switch(fault_file(demo.faults, fault.target.region, fault.kind), fault.lasts_ns)
            elif victims and number is None:
                await self._hold_up(victims, fault)
        if victims and fault.kind == "notice":
            strike = await self._take_away(demo, strike)
        return strike

    async def _order(self, fault: PlannedFault) -> StruckFault:
        if self._carry_out is None:
            raise ConfigError(f"{fault.kind} is an order of a script: write it into a file for `demo --script`")
        strike = self._note(fault, (), refusal=UNDONE)
        refusal = await self._carry_out(fault)
        return self._replace(strike, replace(strike, stopped_ns=self._now_ns() - strike.at_ns, refusal=refusal))

    async def _take_away(self, demo: DemoFile, strike: StruckFault) -> StruckFault:
        """Wait for the end of the notice, or until the machine has stopped; then kill what is left of it."""
        target, end_ns = strike.fault.target, strike.at_ns + strike.fault.lasts_ns
        survivors = await asyncio.to_thread(demo.find, target)
        while survivors and self._now_ns() < end_ns:
            await self._sleep(GONE_POLL_S)
            survivors = await asyncio.to_thread(demo.find, target)
        with hold_all(survivors) as handles:
            kills = sum(handle.send(signal.SIGKILL) for handle in handles)
        return self._replace(strike, replace(strike, stopped_ns=self._now_ns() - strike.at_ns, kills=kills))

    def _replace(self, strike: StruckFault, outcome: StruckFault) -> StruckFault:
        self.strikes[self.strikes.index(strike)] = outcome
        return outcome

    async def _switch(self, file: Path, lasts_ns: int) -> None:
        until_ns = switch_on(file, lasts_ns)
        try:
            await self._sleep(lasts_ns / NS_PER_S)
        finally:
            switch_off(file, until_ns)

    async def _hold_up(self, handles: Sequence[ProcessHandle], fault: PlannedFault) -> None:
        """Stop and continue them: once, or in turns that leave a slow one a part of its time."""
        turns, stop_s, run_s = 1, fault.lasts_ns / NS_PER_S, 0.0
        if fault.kind == "slow":
            turns, stop_s, run_s = max(1, round(stop_s / (SLOW_STOP_S + SLOW_RUN_S))), SLOW_STOP_S, SLOW_RUN_S
        for _ in range(turns):
            with self._hold_stopped(handles):
                await self._sleep(stop_s)
            await self._sleep(run_s)

    @contextlib.contextmanager
    def _hold_stopped(self, handles: Sequence[ProcessHandle]) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end: of a process that several faults stop, at the end of the last one."""
        for handle in handles:
            self._stops[handle.process] += 1
            handle.send(signal.SIGSTOP)
        try:
            yield
        finally:
            for handle in handles:
                self._stops[handle.process] -= 1
                if not self._stops[handle.process]:
                    handle.send(signal.SIGCONT)

    def _note(self, fault: PlannedFault, pids: tuple[int, ...], *, refusal: str = "") -> StruckFault:
        strike = StruckFault(self._now_ns(), fault, pids, refusal=refusal)
        self.strikes.append(strike)
        self._on_strike(strike)
        return strike


def _struck_target(fault: PlannedFault) -> FaultTarget:
    """Return the processes to look for."""
    region = fault.target.region
    if fault.kind in DAEMON_ONLY:
        return FaultTarget(region, "daemon")
    if fault.kind in ("stop", "notice") and fault.target.part == REGION:
        return FaultTarget(region, "supervisor")  # it stops the other two, in order
    return fault.target
