"""The orders of a demo's script: regions join and leave, lose their folder, get a vote and lose it.

They go the way of an operator's: a certificate, `start --join`, signed changes of the members, `drain`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.admin_client import order
from diloco_node.cli.members import change_members
from diloco_node.config.resolve import load_config
from diloco_node.errors import DilocoError
from diloco_node.lab.chaos.demo_processes import FAULTS_FOLDER, DemoFile, hold_all
from diloco_node.lab.chaos.fault_files import FAULTS_VARIABLE
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.demo.keeping import RegionKeeper
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.transport.authority import add_regions
from diloco_node.transport.certificates import CA_KEY

PROGRAM: Final = ("-m", "diloco_node.lab.demo.faulty_region")
ORDER_S: Final = 60.0
"""For so long an order is given again and again: in a storm there may be no leader just now."""

JOIN_S: Final = 120.0
"""From the start of a region that joins to its first step, on few cores."""

POLL_S: Final = 0.5


def faults_env(folder: Path) -> dict[str, str]:
    """The variable by which the daemons of a demo in this folder look for faults."""
    return {FAULTS_VARIABLE: str((folder / FAULTS_FOLDER).resolve())}


class ScriptedMembers:
    """Carries orders out; each returns why it was not done, or nothing.

    Args:
        folder: of the demo. regions: its members, each of them polled by somebody else; joiners are added.
        data: paths of text, as given to the demo.
    """

    def __init__(
        self, folder: Path, regions: list[RegionProcess], keeper: RegionKeeper, data: Sequence[str] = ()
    ) -> None:
        self._folder = folder.resolve()
        self._regions = regions
        self._keeper = keeper
        self._data = tuple(word for path in data for word in ("--data", str(Path(path).resolve())))
        self._addresses: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carry_out(self, fault: PlannedFault) -> str:
        """Carry out an order of `ORDERS`, behind the earlier ones of its region; returns why it was not done."""
        name = fault.target.region
        async with self._locks[name]:
            if fault.kind == "promote":
                return await self._change(name, "voter")
            if fault.kind == "demote":
                return await self._change(name, "contributor")
            return await {"join": self._join, "leave": self._leave, "wipe": self._wipe}[fault.kind](name)

    async def _join(self, name: str) -> str:
        certs = self._folder / "certs"
        await asyncio.to_thread(add_regions, certs, [name])
        port, admin_port = free_ports(2)
        address = self._addresses[name] = f"127.0.0.1:{port}"
        if refusal := await self._change(name, "contributor", address):
            return refusal
        words = {
            "--join": self._member_address(),
            "--advertise": address,
            "--admin-port": str(admin_port),
            "--state-dir": str(self._folder),
            "--certs": str(certs),
        }
        region = RegionProcess(
            name,
            admin_port,
            self._folder / name,
            program=PROGRAM,
            env=faults_env(self._folder),
            options=(*(word for pair in words.items() for word in pair), *self._data),
            config=self._folder / f"{name}.toml",
        )
        self._regions.append(region)
        await self._keeper.add(region)
        return await _until(lambda: _step(region) > 0, JOIN_S, "it made no step")

    async def _leave(self, name: str) -> str:
        region = next((region for region in self._regions if region.name == name), None)
        if region is None:
            return "it is not there"
        self._keeper.leaving.add(name)
        try:
            await asyncio.to_thread(order, region.state_dir, "drain", {})
        except DilocoError:
            pass  # its daemon was just killed: it leaves without its last steps
        else:
            await _until(lambda: name in self._keeper.end_reasons, ORDER_S, "it did not stop")
        if refusal := await self._change(name, "former"):
            return refusal
        if refusal := await _until(lambda: name in self._keeper.end_reasons, ORDER_S, "it goes on"):
            return refusal
        self._regions.remove(region)
        return ""

    async def _wipe(self, name: str) -> str:
        self._keeper.emptied.add(name)

        def kill() -> None:
            with hold_all(DemoFile.load(self._folder).find(FaultTarget(name))) as handles:
                for handle in handles:
                    handle.send(signal.SIGKILL)

        end_s = time.monotonic() + ORDER_S
        while name in self._keeper.emptied:
            if time.monotonic() > end_s:
                self._keeper.emptied.discard(name)
                return f"nothing of it ran within {ORDER_S:.0f} s"
            await asyncio.to_thread(kill)  # again, where its supervisor was just being started
            await asyncio.sleep(POLL_S)
        return ""

    async def _change(self, name: str, kind: str, address: str | None = None) -> str:
        """Have the leader change the members, until the ledger says so."""
        refusal, end_s = "no region names a leader", time.monotonic() + ORDER_S
        key = self._folder / "certs" / CA_KEY
        while (before := self._kind_of(name)) != kind and time.monotonic() < end_s:
            if (leader := self._leader()) is not None:
                change = partial(change_members, is_forced=kind != "voter", address=address)
                try:
                    await asyncio.to_thread(change, leader.state_dir, name, kind, key)
                    refusal = "the order was taken, and no majority agreed"
                except DilocoError as error:
                    refusal = str(error)
            await asyncio.sleep(POLL_S)
        return "" if before == kind else refusal

    def _kind_of(self, name: str) -> str:
        """The kind of a region by the newest list of the members that any region shows."""
        lists = [region.status.get("members") or {} for region in self._regions]
        newest: dict[str, Any] = max(lists, key=lambda members: members.get("changes", -1), default={})
        return next((str(row["kind"]) for row in newest.get("rows", ()) if row["region"] == name), "")

    def _leader(self) -> RegionProcess | None:
        """The region that most name as the leader."""
        names = Counter(str(region.status.get("leader") or "") for region in self._regions)
        leaders = (name for name, _ in names.most_common() if name)
        return next((region for name in leaders for region in self._regions if region.name == name), None)

    def _member_address(self) -> str:
        """The address of a region that answers, the leader if there is one."""
        region = self._leader() or self._regions[0]
        founders = load_config(self._folder / "run.toml").regions
        return self._addresses.get(region.name) or str(founders[region.name].address)


def _step(region: RegionProcess) -> int:
    return int((region.status.get("learner") or {}).get("step", 0))


async def _until(is_so: Callable[[], bool], limit_s: float, fault: str) -> str:
    """Wait until something is so; what is at fault if it is not within the limit."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            return f"{fault} within {limit_s:.0f} s"
        await asyncio.sleep(POLL_S)
    return ""
