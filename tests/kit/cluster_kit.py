"""A run of real processes under a test's hands: regions by name, waiting for facts, killing by process id."""

import asyncio
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_node.core.ledger.summary import decode_summary
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import Entry, LedgerBase
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.lab.demo.account_check import AccountReport, check_account
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_report import build_report, learner_status, longest_ledger, read_region_report
from diloco_node.lab.demo.demo_run import EVALUATION, Demo
from diloco_node.lab.demo.region_processes import order_finish
from diloco_node.storage.trained import read_trained

SMALL = {"dim = 64": "dim = 16", "heads = 4": "heads = 2", "batch = 8": "batch = 2", EVALUATION: "eval_windows = 8\n"}
"""A step takes a quarter of a demo's: nobody asks here how well a model learns."""

WAIT_S = 300.0
Statuses = dict[str, dict[str, Any]]

PACE_STEPS = 64
"""Four times `sync_every`: 16 rounds are due."""

PACE_WINDOWS = 5
"""Steps of a demo are paced at ten a second, so these are the 30 s for which a process may stand still."""

FAILED_BALLOT_WINDOWS = 2
"""As long as one failed ballot, and an election, may be in the way: they take some 30 steps of the first window."""

PACE_SHARE = 0.6


class Cluster:
    """Several regions, each a `diloco-node start` with daemon and learner; the model is a small one.

    Args:
        folder: of the run; made by `prepare`.
        changes: texts of run.toml, each with what stands there instead.
        has_fork_servers: whether learners that are started again are forks of a process that has imported torch.

    Attributes:
        lost: of each region, the folders that were taken from it, oldest first.
        has_kernels: whether this process has seen them compiled; they stay on the disk.
    """

    has_kernels = False

    def __init__(
        self, folder: Path, count: int, *, changes: Mapping[str, str] | None = None, has_fork_servers: bool = False
    ) -> None:
        self.folder = folder
        self.demo = Demo(DemoOptions(regions=count, seconds=60.0, folder=folder, is_json=True), folder)
        self.demo.prepare()
        self.config = folder / "run.toml"
        text = self.config.read_text()
        for old, new in (changes or {}).items():
            assert old in text, f"run.toml has no {old!r}"
            text = text.replace(old, new)
        for old, new in SMALL.items():
            text = text.replace(old, new)
        self.config.write_text(text if has_fork_servers else f"{text}\n[learner]\npreload = []\n")
        self.names = list(self.demo.names)
        self.regions = {region.name: region for region in self.demo.regions}
        self.lost: dict[str, list[Path]] = {name: [] for name in self.names}

    async def start(self, *names: str) -> None:
        """Start some regions, or all of them."""
        if not Cluster.has_kernels:
            await self.demo.compile()
            Cluster.has_kernels = True
        for name in names or self.names:
            self.regions[name].status = {}  # what a life before has said
            await self.regions[name].start(self.config)

    async def stop(self, *names: str) -> None:
        """SIGTERM and wait; or all of them."""
        await asyncio.gather(*(self.regions[name].stop() for name in names or self.names))

    async def kill(self, name: str) -> None:
        """SIGKILL a region's supervisor, and wait until its children are gone as well."""
        region = self.regions[name]
        assert region.process is not None
        pids = [pid for pid in region.status.get("pids", {}).values() if pid]
        if not region.has_exited:
            region.process.kill()
            await region.process.wait()
        deadline_s = time.monotonic() + WAIT_S
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline_s, f"children of {name} outlive their supervisor"
            await asyncio.sleep(0.05)

    def wipe(self, name: str) -> None:
        """Empty a region's folder. What was in it is kept beside the run, for the account."""
        taken = self.folder.parent / "lost" / f"{name}-{len(self.lost[name])}"
        taken.parent.mkdir(exist_ok=True)
        folder = self.regions[name].state_dir
        folder.rename(taken)
        folder.mkdir()
        self.lost[name].append(taken)

    def others(self, name: str) -> list[str]:
        """All regions but one."""
        return [one for one in self.names if one != name]

    def running(self) -> list[str]:
        """Regions whose supervisor lives."""
        return [name for name in self.names if (one := self.regions[name]).process is not None and not one.has_exited]

    async def statuses(self, names: Iterable[str] = ()) -> Statuses:
        """Of some regions, or all that run; one that has ended by itself fails the test."""
        chosen = list(names) or self.running()
        for name in chosen:
            region = self.regions[name]
            assert not region.has_exited, f"{name} has ended:\n{region.last_lines(20)}"
        await asyncio.gather(*(self.regions[name].poll() for name in chosen))
        return {name: self.regions[name].status for name in chosen}

    async def until(
        self, what: str, is_so: Callable[[Statuses], Any], names: Iterable[str] = (), *, wait_s: float = WAIT_S
    ) -> Statuses:
        """Ask again and again until a condition holds for the statuses."""
        deadline_s = time.monotonic() + wait_s
        while True:
            statuses = await self.statuses(names)
            if all("learner" in status for status in statuses.values()) and is_so(statuses):
                return statuses
            assert time.monotonic() < deadline_s, (
                f"not within {wait_s:.0f} s: {what}\n{brief(statuses) or self.last_words()}"
            )
            await asyncio.sleep(0.3)

    def last_words(self) -> str:
        """What each region said last, where none runs any more."""
        return "\n".join(f"{name}: {region.last_lines(4)}" for name, region in self.regions.items())

    async def until_trains(self, names: Iterable[str] = ()) -> Statuses:
        """Until every learner steps, with a leader known."""
        return await self.until("everybody trains", all_train, names)

    async def until_commits(self, rounds: int, names: Iterable[str] = (), *, why: str = "") -> Statuses:
        """Until so many more rounds are committed in each of these regions."""
        before = await self.until("they answer", lambda _: True, names)
        return await self.until(
            f"{rounds} more rounds {why}",
            lambda now: all(now[name]["rounds_committed"] >= before[name]["rounds_committed"] + rounds for name in now),
            names,
        )

    async def rounds_per_step(self, names: Iterable[str] = (), *, why: str = "at first") -> float:
        """Rounds for each inner step, of the slowest of these regions, over PACE_STEPS steps of each from now on.

        A round is due every so many steps, so this says whether rounds wait for somebody, on a slow machine as well.
        """
        # Not `all_train`: who waits for a leader makes steps, too, and these count.
        before = await self.until("they step", all_step, names)
        now = await self.until(
            f"{PACE_STEPS} more steps {why}",
            lambda now: all_step(now) and all(gain(before, now, name)[1] >= PACE_STEPS for name in now),
            names,
        )
        gains = {name: gain(before, now, name) for name in now}
        print(f"rounds and steps {why}: {gains}")
        return min(rounds / steps for rounds, steps in gains.values())

    async def until_paced(
        self, usual: float, names: Iterable[str], *, why: str, windows: int = PACE_WINDOWS
    ) -> Statuses:
        """Until these regions wait for nobody: they have at least 0.6 of their usual rounds per step.

        That must be so within `windows` times PACE_STEPS of their steps. What waits for somebody in each round never
        has it. The first of these steps may go by until another region counts as gone, or until another one leads.
        """
        names = list(names)
        rates: list[float] = []
        while len(rates) < windows:
            rates.append(await self.rounds_per_step(names, why=why))
            if rates[-1] >= PACE_SHARE * usual:
                return await self.statuses(names)
        raise AssertionError(f"{usual:.3f} rounds per step before; {why}: {rates}")

    async def until_merged(self, name: str, *, why: str = "", wait_s: float = WAIT_S) -> Statuses:
        """Until merges of every fragment have steps that this region's learner makes from now on."""
        learner = (await self.until("it trains", all_train, [name], wait_s=wait_s))[name]["learner"]

        def is_so(now: Statuses) -> bool:
            after = now[name]["learner"]
            if after is None:
                return False
            mark = learner["step"] if after["incarnation"] == learner["incarnation"] else 0
            return all(position["included_step"] > mark for position in after["positions"])

        return await self.until(f"{name} is in merges {why}", is_so, [name], wait_s=wait_s)

    async def until_leader(self, names: Iterable[str] = ()) -> str:
        """The leader that all of these name."""
        statuses = await self.until("one leader", lambda now: len({one["leader"] for one in now.values()} - {""}) == 1)
        (leader,) = {one["leader"] for one in statuses.values()} - {""}  # a region may know none just now
        return str(leader)

    async def end(self) -> None:
        """Order the end of the run, and see every region end with 0."""
        first = self.regions[self.names[0]]
        await order_finish([first], limit_s=WAIT_S, is_given_up=lambda: first.has_exited)
        for region in self.regions.values():
            assert region.process is not None
            assert await asyncio.wait_for(region.process.wait(), WAIT_S) == 0, region.last_lines(20)

    def reports(self) -> Statuses:
        """What each daemon left."""
        return {name: read_region_report(self.folder / name) for name in self.names}

    def ledger(self) -> tuple[LedgerBase, tuple[Entry, ...]]:
        """What the ledger begins with, and its entries, after all regions have ended; they agree in each region."""
        return longest_ledger([self.folder / name for name in self.names], len(self._manifest().fragments))

    def _manifest(self) -> Manifest:
        manifest = load_manifest(self.folder / self.names[0])
        assert manifest is not None
        return manifest

    def account(self) -> AccountReport:
        """The token account of the ended run, lost folders counted in.

        Of an incarnation whose counter was lost with its folder nobody in the run can know the last steps: that they
        are not booked is no fault. Everything else of it is held to what the counter said.
        """
        sizes = [fragment.size for fragment in self._manifest().fragments]
        trained = self._trained(self.folder)
        lost: set[tuple[str, int]] = set()
        for name, folders in self.lost.items():
            for one in (counted for folder in folders for counted in read_trained(folder)):
                assert (name, one.incarnation) not in trained, "an incarnation was handed out twice"
                trained[name, one.incarnation] = (one.steps, one.tokens)
                lost.add((name, one.incarnation))
        positions = {
            name: learner_status(report["learner"]) for name, report in self.reports().items() if report.get("learner")
        }
        base, entries = self.ledger()
        summary = decode_summary(base.summary, fragments=len(sizes)) if base.index else None
        account = check_account(entries, trained, fragment_sizes=sizes, positions=positions, summary=summary)
        unknown = tuple(f"{name} incarnation {incarnation} fragment" for name, incarnation in sorted(lost))
        faults = tuple(
            fault for fault in account.faults if not (fault.startswith(unknown) and ": dead, but only " in fault)
        )
        return replace(account, faults=faults, balanced=not faults)

    def _trained(self, folder: Path) -> dict[tuple[str, int], tuple[int, int]]:
        found = ((name, one) for name in self.names for one in read_trained(folder / name))
        return {(name, one.incarnation): (one.steps, one.tokens) for name, one in found}

    def report(self) -> dict[str, Any]:
        """The demo's report of the ended run."""
        return build_report(self.folder, self.names)

    def check_equal(self, *, differences_max: int | None = 0) -> None:
        """Every region ended with the same bytes; nobody was told of more different digests on the way than this."""
        reports = self.reports()
        assert len({report["digest"] for report in reports.values()}) == 1, brief(reports)
        told = [report["digest_differences"] for report in reports.values()]
        assert differences_max is None or max(told) <= differences_max, told
        finals = [(self.folder / name / "final.safetensors").read_bytes() for name in self.names]
        assert len({hashlib.sha256(final).hexdigest() for final in finals}) == 1

    async def clear(self) -> None:
        """Stop all that runs, and remove the lost folders."""
        await self.stop(*self.running())
        shutil.rmtree(self.folder.parent / "lost", ignore_errors=True)


def gain(before: Statuses, now: Statuses, name: str) -> tuple[int, int]:
    """How many rounds a region has committed meanwhile, and how many steps its learner has made."""
    old, new = before[name], now[name]
    assert old["learner"]["incarnation"] == new["learner"]["incarnation"], f"the learner of {name} was started again"
    return new["rounds_committed"] - old["rounds_committed"], new["learner"]["step"] - old["learner"]["step"]


def children(pid: int) -> list[int]:
    """Processes that are its children now."""
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def all_train(statuses: Statuses) -> bool:
    """Whether every learner steps in step with a leader. Not where no region runs."""
    return bool(statuses) and all(
        status["state"] == "training" and status["learner"] is not None and status["learner"]["step"] > 0
        for status in statuses.values()
    )


def all_step(statuses: Statuses) -> bool:
    """Whether every region has a learner that has begun."""
    return all(status["learner"] is not None and status["learner"]["step"] > 0 for status in statuses.values())


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not only waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def end_process(pid: int) -> None:
    """SIGKILL one process."""
    os.kill(pid, signal.SIGKILL)


def brief(statuses: Mapping[str, Mapping[str, Any]], keys: Sequence[str] = ()) -> str:
    """What matters of some statuses, a line each."""
    shown = keys or ("state", "role", "leader", "term", "reason", "rounds_committed", "versions", "pids")
    return "\n".join(f"{name}: { {key: status.get(key) for key in shown} }" for name, status in statuses.items())
