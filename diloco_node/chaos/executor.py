"""Carries faults out on a running demo: one, or a whole plan at its times."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.chaos.fault_files import fault_file, switch_off, switch_on
from diloco_node.chaos.plan import DAEMON_ONLY, REGION, FaultPlan, FaultTarget, PlannedFault, check_fault
from diloco_node.chaos.processes import DemoFile, held
from diloco_node.numeric import NS_PER_S

SLOW_RUN_S: Final = 0.05
SLOW_STOP_S: Final = 0.15
"""A slow process runs so long, and is stopped so long, in turn: a quarter of its time is left."""

SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StruckFault:
    """What became of a fault.

    Attributes:
        at_ns: when it was carried out, on the plan's clock.
        pids: the processes that it struck; none: nobody was there.
    """

    at_ns: int
    fault: PlannedFault
    pids: tuple[int, ...]

    @property
    def is_missed(self) -> bool:
        """Whether nobody was there, dead of an earlier fault for example."""
        return not self.pids

    def document(self) -> dict[str, Any]:
        """As it stands in a report."""
        return {
            "at_seconds": self.at_ns / NS_PER_S,
            "do": self.fault.kind,
            "target": str(self.fault.target),
            "seconds": self.fault.lasts_ns / NS_PER_S,
            "pids": list(self.pids),
            "missed": self.is_missed,
        }


class FaultExecutor:
    """Strikes the processes of one demo.

    Args:
        load: reads the demo's file; anew for each fault, for supervisors come and go.
        now_ns: the plan's clock: 0 is the beginning of the training.
        told: called with each fault when it begins.
        attached: the process that a region's daemon names as its learner; None: it names none just now.

    Attributes:
        struck: what was carried out so far, in the order of its beginning.
    """

    def __init__(
        self,
        load: Callable[[], DemoFile],
        *,
        now_ns: Callable[[], int],
        told: Callable[[StruckFault], None] = lambda _: None,
        attached: Callable[[str], int | None] = lambda _: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.struck: list[StruckFault] = []
        self._load = load
        self._now_ns = now_ns
        self._told = told
        self._attached = attached
        self._sleep = sleep

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

        Raises:
            ConfigError: it can't be carried out, or the demo has no such region.
        """
        check_fault(fault)
        demo = await asyncio.to_thread(self._load)
        attached = await asyncio.to_thread(self._attached, fault.target.region)
        processes = await asyncio.to_thread(demo.find, _whom(fault), attached=attached)
        with held(processes) as found:
            lasts_s = fault.lasts_ns / NS_PER_S
            done = self._note(fault, tuple(one.process.pid for one in found))
            if not found:
                return done
            if fault.kind in SIGNALS:
                for one in found:
                    one.send(SIGNALS[fault.kind])
            elif fault.kind in DAEMON_ONLY:
                file = fault_file(demo.faults, fault.target.region, fault.kind)
                switch_on(file, fault.lasts_ns)
                try:
                    await self._sleep(lasts_s)
                finally:
                    switch_off(file)
            else:
                turns = max(1, round(lasts_s / (SLOW_STOP_S + SLOW_RUN_S))) if fault.kind == "slow" else 1
                stop_s, run_s = (SLOW_STOP_S, SLOW_RUN_S) if fault.kind == "slow" else (lasts_s, 0.0)
                try:
                    for _ in range(turns):
                        for one in found:
                            one.send(signal.SIGSTOP)
                        await self._sleep(stop_s)
                        for one in found:
                            one.send(signal.SIGCONT)
                        await self._sleep(run_s)
                finally:
                    for one in found:
                        one.send(signal.SIGCONT)
        return done

    def _note(self, fault: PlannedFault, pids: tuple[int, ...]) -> StruckFault:
        done = StruckFault(self._now_ns(), fault, pids)
        self.struck.append(done)
        self._told(done)
        return done


def _whom(fault: PlannedFault) -> FaultTarget:
    """Whose processes are looked for."""
    region = fault.target.region
    if fault.kind in DAEMON_ONLY:
        return FaultTarget(region, "daemon")
    if fault.kind == "stop" and fault.target.part == REGION:
        return FaultTarget(region, "supervisor")  # it stops the other two, in order
    return fault.target
