"""The regions of a demo kept running: a supervisor that has died is started again, nearly as systemd does.

Two things differ from the unit in deploy/systemd, so that a storm can kill and stop as often as it likes:

- systemd counts every start against its limit; here only failures count, which are exit codes above 0.
- The unit leaves exit code 0 and SIGTERM alone. Here they are final only when the region has finished the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diloco_node.errors import DilocoError
from diloco_node.lab.chaos.demo_processes import DemoFile, find_left_behind, hold_all
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.numeric import NS_PER_S
from diloco_node.state_names import FINAL_NAME
from diloco_node.supervisor.supervisor_spec import FINAL_CODES, SCRIPT_CODE
from diloco_node.unix_sockets import Process, process_of

RESTART_NS: Final = NS_PER_S // 10
FAILURES_MAX: Final = 5
FAILURES_WITHIN_NS: Final = 10 * NS_PER_S
"""RestartSec, StartLimitBurst and StartLimitIntervalSec of the unit, which are systemd's own defaults."""

GONE_S: Final = 10.0
"""Limit for a killed process to leave the machine."""

GONE_POLL_S: Final = 0.02
LOST_NAME: Final = "lost"


@dataclass(slots=True)
class RestartPolicy:
    """Decides whether a region's supervisor that has ended is started again. Pure."""

    _failures_ns: list[int] = field(default_factory=list)

    def final_reason(self, code: int, *, has_finished: bool, now_ns: int) -> str | None:
        """Return why it stays ended, empty where it ended as it should; None: start it again.

        Args:
            code: as in subprocess: negative for a signal. has_finished: the region has left the final model. A daemon
                that was stopped by an order also ends with 0.
        """
        if code in (0, SCRIPT_CODE) and has_finished:
            return ""
        if code in FINAL_CODES:
            return f"it ended with {code}, which another start would only repeat"
        if code > 0:
            recent_ns = [failed_ns for failed_ns in self._failures_ns if now_ns - failed_ns < FAILURES_WITHIN_NS]
            self._failures_ns = [*recent_ns, now_ns]
            if len(self._failures_ns) >= FAILURES_MAX:
                within_s = FAILURES_WITHIN_NS // NS_PER_S
                return f"it failed {FAILURES_MAX} times within {within_s} s, the last time with {code}"
        return None


@dataclass(slots=True)
class RegionKeeper:
    """Starts regions, and starts them again when they die.

    Attributes:
        folder: of the demo. config: its run.toml.
        end_reasons: of each region that has ended for good, why; empty when it ended as it should.
        is_starting: not all have trained yet: who ends then is not started again, for its settings may be wrong.
        joiners: regions that may be added later. command: of their learners; empty: the built-in trainer.
        leaving: regions that leave the run: one of them that ends with 0 has left.
        emptied: regions whose folder is put aside before their next start, into `lost` of the demo's folder.
    """

    folder: Path
    config: Path
    regions: list[RegionProcess]
    say: Callable[[str], None]
    joiners: Sequence[str] = ()
    command: Sequence[str] = ()
    leaving: set[str] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)
    end_reasons: dict[str, str] = field(default_factory=dict)
    is_starting: bool = True
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _supervisors: dict[str, Process | None] = field(default_factory=dict)

    async def start(self) -> None:
        """All regions; from the first to the last, for each one wants the whole machine at first."""
        for region in self.regions:
            await self._begin(region)

    async def add(self, region: RegionProcess) -> None:
        """Start another region, and keep it like the first ones."""
        self.regions.append(region)
        await self._begin(region)

    async def _begin(self, region: RegionProcess) -> None:
        await self._start(region)
        self._tasks[region.name] = asyncio.create_task(self._keep(region), name=f"keep {region.name}")

    async def stop(self) -> None:
        """No more restarts; then every region is stopped in order, with its children, and what is left of any.

        Raises DilocoError: of the first region that did not end, or the file could not be written. All were stopped.
        """
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        started_regions = [region for region in self.regions if region.process is not None]
        results = await asyncio.gather(*(self._end(region) for region in started_regions), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    @property
    def is_over(self) -> bool:
        """Whether every region has ended for good."""
        return len(self.end_reasons) == len(self.regions)

    def check(self) -> None:
        """Raise what ended a region that should run.

        Raises DilocoError: a region ended and is not started again; or the keeping itself failed.
        """
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        for region in self.regions:
            if why := self.end_reasons.get(region.name):
                raise DilocoError(f"region {region.name}: {why}\n{region.last_lines()}")

    async def _keep(self, region: RegionProcess) -> None:
        policy = RestartPolicy()
        while True:
            assert region.process is not None
            code = await region.process.wait()
            has_finished = region.name in self.leaving or (region.state_dir / FINAL_NAME).exists()
            why = policy.final_reason(code, has_finished=has_finished, now_ns=time.monotonic_ns())
            if self.is_starting:
                why = "it ended too early"
            if why is not None:
                if code == SCRIPT_CODE:
                    self.say(f"region {region.name}: its script failed after the run: see {region.state_dir}/logs")
                self.end_reasons[region.name] = why
                return
            self.say(f"region {region.name}: its supervisor ended with {code}; started again")
            await self._clear(region)
            if region.name in self.emptied:
                await asyncio.to_thread(self._put_aside, region.state_dir)
                self.emptied.discard(region.name)
            await asyncio.sleep(RESTART_NS / NS_PER_S)
            await self._start(region)

    def _put_aside(self, state_dir: Path) -> None:
        """Rename a folder, and make an empty one in its place."""
        place = self.folder / LOST_NAME / state_dir.name
        place.mkdir(parents=True, exist_ok=True)
        state_dir.rename(place / f"{len(list(place.iterdir())) + 1}")
        state_dir.mkdir()

    async def _end(self, region: RegionProcess) -> None:
        await region.stop()
        await self._clear(region)

    async def _clear(self, region: RegionProcess) -> None:
        """As systemd's KillMode=mixed: what a dead supervisor left is killed, and gone before the next start."""
        self._supervisors[region.name] = None
        try:
            await self._kill_left(region)
        finally:
            self._save()

    async def _kill_left(self, region: RegionProcess) -> None:
        until_s = time.monotonic() + GONE_S
        while processes := await asyncio.to_thread(find_left_behind, region.state_dir):
            if time.monotonic() > until_s:
                pids = ", ".join(str(process.pid) for process in processes)
                raise DilocoError(f"region {region.name}: processes {pids} do not end; look at what holds them up")
            with hold_all(processes) as children:
                for child in children:
                    child.send(signal.SIGKILL)
            await asyncio.sleep(GONE_POLL_S)

    async def _start(self, region: RegionProcess) -> None:
        await region.start(self.config, self.command)
        assert region.process is not None
        self._supervisors[region.name] = process_of(region.process.pid)
        self._save()

    def _save(self) -> None:
        demo = process_of(os.getpid())
        assert demo is not None
        names = [*(region.name for region in self.regions), *self.joiners]
        DemoFile(self.folder, demo, {name: self._supervisors.get(name) for name in names}).save()
