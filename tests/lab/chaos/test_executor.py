"""lab/chaos/executor.py, demo_processes.py: the right processes are struck, for as long as asked, and no others.

A made-up demo: `demo.json` names a process that sleeps as a supervisor, and others carry the marks of its children.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos import demo_processes as processes
from diloco_node.lab.chaos import fault_files
from diloco_node.lab.chaos.demo_processes import (
    DEMO_FILE,
    DemoFile,
    ProcessHandle,
    find_left_behind,
    hold_all,
    is_alive,
)
from diloco_node.lab.chaos.executor import FaultExecutor, StruckFault
from diloco_node.lab.chaos.fault_plan import FaultPlan, FaultTarget, PlannedFault
from diloco_node.numeric import NS_PER_S
from diloco_node.supervisor.preload import FORK_SERVER
from diloco_node.unix_sockets import Process, process_of
from tests.kit.chaos_kit import MadeUpDemo, identity
from tests.kit.waiting import until


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[MadeUpDemo]:
    made = MadeUpDemo(tmp_path)
    try:
        yield made
    finally:
        made.clear()


async def no_wait(_: float) -> None:
    await asyncio.sleep(0)


def executor(demo: MadeUpDemo, sleep: object = no_wait) -> FaultExecutor:
    return FaultExecutor(lambda: DemoFile.load(demo.folder), now_ns=lambda: 0, sleep=sleep)  # type: ignore[arg-type]


def strike(
    demo: MadeUpDemo, kind: str, target: FaultTarget, lasts_s: float = 0, sleep: object = no_wait
) -> StruckFault:
    fault = PlannedFault(0, kind, target, int(lasts_s * NS_PER_S))
    return asyncio.run(executor(demo, sleep).strike(fault))


@pytest.mark.parametrize("part", ["daemon", "learner", "supervisor"])
@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGTERM)])
def test_only_the_process_that_is_named_is_struck(demo: MadeUpDemo, kind: str, number: int, part: str) -> None:
    done = strike(demo, kind, FaultTarget("a", part))
    assert done.pids == (demo.pid(f"a.{part}"),)
    demo.until_ended(f"a.{part}")
    assert demo.ended() == {f"a.{part}": number}


def test_a_region_is_killed_as_a_whole(demo: MadeUpDemo) -> None:
    done = strike(demo, "kill", FaultTarget("b"))
    names = ("b.supervisor", "b.daemon", "b.learner")
    assert done.pids == tuple(map(demo.pid, names))
    demo.until_ended(*names)
    assert demo.ended() == dict.fromkeys(names, signal.SIGKILL)


def test_a_region_is_stopped_by_its_supervisor(demo: MadeUpDemo) -> None:
    assert strike(demo, "stop", FaultTarget("b")).pids == (demo.pid("b.supervisor"),)
    demo.until_ended("b.supervisor")
    assert demo.ended() == {"b.supervisor": signal.SIGTERM}


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_a_machine_with_notice_is_told_and_what_is_left_at_the_end_is_killed(
    demo: MadeUpDemo, is_stubborn: bool
) -> None:
    clock = iter(range(0, 1000 * NS_PER_S, NS_PER_S))
    if is_stubborn:  # a process that stands still takes no SIGTERM
        os.kill(demo.pid("b.supervisor"), signal.SIGSTOP)
    struck = FaultExecutor(lambda: DemoFile.load(demo.folder), now_ns=lambda: next(clock), sleep=asyncio.sleep)
    monkey = PlannedFault(0, "notice", FaultTarget("b"), 5 * NS_PER_S)
    done = asyncio.run(struck.strike(monkey))
    assert done.pids == (demo.pid("b.supervisor"),)
    assert struck.strikes == [done]
    demo.until_ended("b.supervisor")
    assert demo.ended()["b.supervisor"] == (signal.SIGKILL if is_stubborn else signal.SIGTERM)
    assert (done.kills > 0) == is_stubborn
    assert done.document()["killed"] == done.kills
    assert 0 < done.stopped_ns < 20 * NS_PER_S


def test_of_a_learner_and_what_started_it_the_learner_is_struck(demo: MadeUpDemo) -> None:
    """A launcher, or a parent that forks: both carry the marks, and the child is what trains."""
    first = demo.children.pop("a.learner")
    first.kill()
    first.wait()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])"
    demo.start_child("a", "learner", demo.pid("a.supervisor"), [sys.executable, "-S", "-c", code])
    target = FaultTarget("a", "learner")
    until(lambda: [one.pid for one in DemoFile.load(demo.folder).find(target)] not in ([], [demo.pid("a.learner")]))
    done = strike(demo, "kill", target)
    assert len(done.pids) == 1
    demo.until_ended("a.learner")  # its child has ended, so it has too, by itself
    assert demo.ended() == {"a.learner": 0}


def test_the_learner_that_is_attached_is_struck_and_not_what_it_was_forked_from(demo: MadeUpDemo) -> None:
    """Both are children of the supervisor with the same marks, and either may be the newer one."""
    attached = demo.pid("a.learner")
    demo.children["a.attached"] = demo.children.pop("a.learner")
    demo.start_child("a", "learner", demo.pid("a.supervisor"))
    file, target = DemoFile.load(demo.folder), FaultTarget("a", "learner")
    assert [one.pid for one in file.find(target)] == [demo.pid("a.learner")]
    assert [one.pid for one in file.find(target, learner_pid=attached)] == [attached]
    # What the daemon names is no learner of this region: an old number, or nonsense.
    for other in (demo.pid("b.learner"), demo.pid("a.daemon"), os.getpid(), 0, -1):
        assert [one.pid for one in file.find(target, learner_pid=other)] == [demo.pid("a.learner")]
    made = FaultExecutor(lambda: file, now_ns=lambda: 0, learner_pid={"a": attached}.get, sleep=no_wait)
    assert asyncio.run(made.strike(PlannedFault(0, "kill", target))).pids == (attached,)
    demo.until_ended("a.attached")
    assert demo.ended() == {"a.attached": signal.SIGKILL}


def test_what_learners_are_forked_from_is_not_struck_in_place_of_one(demo: MadeUpDemo) -> None:
    """While a region's learner is dead its fork server is the only process with a learner's marks."""
    first = demo.children.pop("a.learner")
    first.kill()
    first.wait()
    target = FaultTarget("a", "learner")
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)", str(FORK_SERVER)]
    demo.start_child("a", "learner", demo.pid("a.supervisor"), command)
    until(lambda: str(FORK_SERVER).encode() in Path(f"/proc/{demo.pid('a.learner')}/cmdline").read_bytes())
    assert strike(demo, "kill", target).is_missed
    # A learner that was forked has the command line of what it was forked from.
    code = "import os, signal, time; os.fork() and (signal.pause(), 1); time.sleep(600)"
    demo.children["a.idle"] = demo.children.pop("a.learner")
    demo.start_child("a", "learner", demo.pid("a.supervisor"), [sys.executable, "-S", "-c", code, str(FORK_SERVER)])
    servers = {demo.pid("a.idle"), demo.pid("a.learner")}
    until(lambda: bool(DemoFile.load(demo.folder).find(target)))
    [forked] = strike(demo, "kill", target).pids
    assert forked not in servers
    assert demo.ended() == {}


def test_who_has_died_is_missed_and_nobody_else_is_struck(demo: MadeUpDemo) -> None:
    strike(demo, "kill", FaultTarget("a", "learner"))
    demo.until_ended("a.learner")
    done = strike(demo, "kill", FaultTarget("a", "learner"))
    assert done.is_missed
    assert demo.ended() == {"a.learner": signal.SIGKILL}


def test_a_number_that_was_given_to_another_process_is_not_struck(demo: MadeUpDemo) -> None:
    """The supervisor of the file was another process that had the same number, earlier or before a boot."""
    file = DemoFile.load(demo.folder)
    real = file.supervisors["a"]
    assert real is not None
    for wrong in (replace(real, start_ticks=real.start_ticks - 1), replace(real, boot="another")):
        replace(file, supervisors={"a": wrong}).save()
        for part in ("supervisor", "daemon", "region"):
            assert strike(demo, "kill", FaultTarget("a", part)).is_missed
    replace(file, supervisors={"a": None}).save()
    assert strike(demo, "kill", FaultTarget("a")).is_missed
    assert demo.ended() == {}


def test_a_paused_process_goes_on_after_its_time(demo: MadeUpDemo) -> None:
    seen: list[tuple[float, str]] = []

    async def sleep(seconds: float) -> None:
        until(lambda: demo.state("a.learner") in "Tt")
        seen.append((seconds, demo.state("a.daemon")))

    async def slept(seconds: float) -> None:
        if seconds:
            await sleep(seconds)

    strike(demo, "pause", FaultTarget("a", "learner"), 3.0, slept)
    assert [seconds for seconds, _ in seen] == [3.0]
    assert seen[0][1] not in "Tt"
    until(lambda: demo.state("a.learner") not in "Tt")


def test_a_slow_process_has_a_quarter_of_its_time(demo: MadeUpDemo) -> None:
    spent: list[float] = []

    async def sleep(seconds: float) -> None:
        is_stopped = len(spent) % 2 == 0
        until(lambda: (demo.state("a.learner") in "Tt") == is_stopped)
        spent.append(seconds)

    strike(demo, "slow", FaultTarget("a", "learner"), 4.0, sleep)
    assert sum(spent[::2]) == pytest.approx(3.0)
    assert sum(spent[1::2]) == pytest.approx(1.0)
    until(lambda: demo.state("a.learner") not in "Tt")


@pytest.mark.parametrize("kind", ["pause", "slow"])
def test_a_process_that_two_faults_stop_goes_on_when_the_longer_one_is_over(demo: MadeUpDemo, kind: str) -> None:
    """The shorter one begins later and ends first."""
    target, is_over = FaultTarget("a", "learner"), asyncio.Event()

    async def sleep(seconds: float) -> None:
        await (is_over.wait() if seconds == 60 else asyncio.sleep(0))

    async def run() -> None:
        made = executor(demo, sleep)
        longer = asyncio.create_task(made.strike(PlannedFault(0, "pause", target, 60 * NS_PER_S)))
        await asyncio.to_thread(until, lambda: demo.state("a.learner") in "Tt")
        await made.strike(PlannedFault(0, kind, target, NS_PER_S))
        assert demo.state("a.learner") in "Tt"
        is_over.set()
        await longer

    asyncio.run(run())
    until(lambda: demo.state("a.learner") not in "Tt")


@pytest.mark.parametrize("kind", ["pause", "slow"])
def test_who_gives_up_lets_the_process_go_on(demo: MadeUpDemo, kind: str) -> None:
    async def give_up(_: float) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        strike(demo, kind, FaultTarget("a", "daemon"), 5.0, give_up)
    until(lambda: demo.state("a.daemon") not in "Tt")


@pytest.mark.parametrize("kind", ["partition", "disk"])
@pytest.mark.parametrize("part", ["daemon", "region"])
def test_a_fault_within_the_daemon_is_on_for_its_time(demo: MadeUpDemo, kind: str, part: str) -> None:
    seen = []

    async def sleep(seconds: float) -> None:
        folder = DemoFile.load(demo.folder).faults
        seen.append((seconds, fault_files.is_on(folder / f"a.{kind}"), fault_files.is_on(folder / f"b.{kind}")))

    done = strike(demo, kind, FaultTarget("a", part), 2.5, sleep)
    assert seen == [(2.5, True, False)]
    assert done.pids == (demo.pid("a.daemon"),)
    assert not fault_files.is_on(demo.folder / "faults" / f"a.{kind}")
    assert demo.ended() == {}


def test_a_plan_strikes_at_its_times_and_what_lasts_holds_nothing_up(demo: MadeUpDemo) -> None:
    now = [0.0]
    told: list[StruckFault] = []

    async def sleep(seconds: float) -> None:
        until_s = now[0] + seconds
        while now[0] < until_s:  # noqa: ASYNC110 - a clock that the test moves
            await asyncio.sleep(0.001)

    async def run() -> None:
        made = FaultExecutor(
            lambda: DemoFile.load(demo.folder),
            now_ns=lambda: int(now[0] * NS_PER_S),
            on_strike=told.append,
            sleep=sleep,
        )
        target, at_s = FaultTarget("a", "daemon"), (1.0, 2.0, 3.0)
        plan = FaultPlan(
            (
                PlannedFault(int(at_s[0] * NS_PER_S), "pause", target, 100 * NS_PER_S),
                PlannedFault(int(at_s[1] * NS_PER_S), "kill", FaultTarget("b", "learner")),
                PlannedFault(int(at_s[2] * NS_PER_S), "kill", FaultTarget("b", "learner")),
            )
        )
        running = asyncio.create_task(made.run(plan))
        for moment in (1.0, 2.0, 3.0):
            assert len(told) == moment - 1
            now[0] = moment
            while len(told) < moment:
                assert not running.done(), running
                await asyncio.sleep(0.005)
            await asyncio.to_thread(demo.until_ended, *(["b.learner"] if moment >= 2 else []))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert [one.is_missed for one in told] == [False, False, True]
    assert [one.at_ns for one in told] == [NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S]
    until(lambda: demo.state("a.daemon") not in "Tt")
    assert demo.ended() == {"b.learner": signal.SIGKILL}


def test_a_region_that_is_not_there_is_refused(demo: MadeUpDemo) -> None:
    with pytest.raises(ConfigError, match="no region 'c'"):
        strike(demo, "kill", FaultTarget("c"))


def test_what_a_supervisor_has_left_is_found_by_its_folder(demo: MadeUpDemo) -> None:
    names = ("a.daemon", "a.learner")
    assert {one.pid for one in find_left_behind(demo.folder / "a")} == set(map(demo.pid, names))
    with hold_all(find_left_behind(demo.folder / "a")) as found:
        assert all(one.send(signal.SIGKILL) for one in found)
        demo.until_ended(*names)
        assert not any(one.send(signal.SIGKILL) for one in found)
    assert find_left_behind(demo.folder / "a") == []


def test_a_number_that_changes_hands_while_it_is_looked_at_is_left_out(
    demo: MadeUpDemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = f"DILOCO_STATE={(demo.folder / 'a').resolve()}"
    assert {one.pid for one in processes.find_marked(state)} == {demo.pid("a.daemon"), demo.pid("a.learner")}
    looks: list[int] = []

    def other_each_time(pid: int) -> Process | None:
        looks.append(pid)
        found = process_of(pid)
        return replace(found, start_ticks=len(looks)) if found is not None and pid == demo.pid("a.daemon") else found

    monkeypatch.setattr(processes, "process_of", other_each_time)
    assert [one.pid for one in processes.find_marked(state)] == [demo.pid("a.learner")]


def test_a_process_that_waits_to_be_reaped_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    known = identity(child)
    until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert process_of(child.pid) == known
    assert not is_alive(known)
    assert ProcessHandle.hold(known) is None
    child.wait()
    assert not is_alive(known)
    assert ProcessHandle.hold(known) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "demo": {"pid": 5, "start_ticks": 1, "boot": "x"}, "regions": {}}',
        '{"format": 1, "demo": {"pid": 1, "start_ticks": 1, "boot": "x"}, "regions": {}}',
        '{"format": 1, "demo": {"pid": -5, "start_ticks": 1, "boot": "x"}, "regions": {}}',
        '{"format": 1, "demo": {"pid": 5, "start_ticks": 1, "boot": "x"}, "regions": {"a": {"pid": 0}}}',
        '{"format": 1, "demo": {"pid": 5, "start_ticks": 1, "boot": "x"}, "regions": []}',
    ],
)
def test_a_file_that_is_none_of_a_demo_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / DEMO_FILE).write_text(text)
    with pytest.raises(ConfigError, match="can't be read"):
        DemoFile.load(tmp_path)


def test_a_fault_ends_by_itself_and_nonsense_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fault_files.fault_file(tmp_path / "faults", "a", "disk")
    assert not fault_files.is_on(file)
    now_ns = time.monotonic_ns()
    fault_files.switch_on(file, 10 * NS_PER_S)
    assert fault_files.is_on(file)
    monkeypatch.setattr(fault_files.time, "monotonic_ns", lambda: now_ns + 11 * NS_PER_S)
    assert not fault_files.is_on(file)
    for text in ("", "soon", "-1", str(now_ns + 86_400 * NS_PER_S), "9" * 5000):
        file.write_text(text)
        assert not fault_files.is_on(file), text
    monkeypatch.undo()
    first, second = fault_files.switch_on(file, NS_PER_S), fault_files.switch_on(file, 10 * NS_PER_S)
    fault_files.switch_off(file, first)
    assert fault_files.is_on(file)
    for _ in range(2):
        fault_files.switch_off(file, second)
        assert not fault_files.is_on(file)
    assert list(file.parent.iterdir()) == []
    assert processes.FAULTS_FOLDER == "faults"


def test_an_order_is_carried_out_by_somebody_else_and_its_refusal_is_kept(demo: MadeUpDemo) -> None:
    refusals = {"a": "", "b": "no leader"}

    async def carry_out(fault: PlannedFault) -> str:
        assert [strike.refusal for strike in orders.strikes][-1], "until it is done it counts as not done"
        return refusals[fault.target.region]

    orders = FaultExecutor(lambda: DemoFile.load(demo.folder), now_ns=lambda: 7, carry_out=carry_out)
    plan = FaultPlan(tuple(PlannedFault(at, "wipe", FaultTarget(name)) for at, name in enumerate("ab")))
    asyncio.run(orders.run(plan))
    assert [(strike.refusal, strike.is_missed, strike.is_order) for strike in orders.strikes] == [
        ("", False, True),
        ("no leader", False, True),
    ]
    assert orders.strikes[1].document()["refused"] == "no leader"
    assert demo.ended() == {}
