"""A daemon that is told to stop while its learner is attached: whoever stops a job tells all its processes at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diloco_node.daemon import node as node_module
from diloco_node.daemon import stopping
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.stopping import STOP_VARIABLE
from diloco_node.supervisor.process_file import write_process
from diloco_node.supervisor.supervisor_spec import LEARNER_SHARE
from diloco_node.wire.learner_link import Done, Report, Welcome
from tests.kit.daemon_kit import Learner
from tests.kit.waiting import eventually


class Stopped:
    """A daemon with a learner, from before the first signal."""

    def __init__(self, spec: NodeSpec) -> None:
        write_process(spec.state_dir, {"state": "running", "reason": "", "crashes": 0, "hangs": 0})
        self.limits: list[tuple[int, float]] = []
        self.daemon = Daemon(spec, lambda code, limit_s: self.limits.append((code, limit_s)))
        self.running = asyncio.create_task(self.daemon.run())
        self.spec = spec

    async def begin(self) -> Learner:
        learner = await Learner.attach(self.spec)
        assert isinstance(await learner.hear(), Welcome)
        await eventually(lambda: bool(self.daemon.learner_process), "the supervisor's word about its learner")
        return learner

    async def ended(self) -> int:
        return await asyncio.wait_for(self.running, 120)


@pytest.fixture
async def keeper() -> AsyncIterator[asyncio.subprocess.Process]:
    """Stands in for a supervisor, and ends with the first signal."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@pytest.fixture
async def stopped(
    spec: NodeSpec,
    nodes: list[node_module.Node],
    keeper: asyncio.subprocess.Process,
    monkeypatch: pytest.MonkeyPatch,
) -> Stopped:
    monkeypatch.setattr(stopping, "supervisor", lambda: keeper.pid)
    return Stopped(spec)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_it_goes_on_until_its_learner_has_left(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "7.5")
    learner = await stopped.begin()
    for number in numbers:  # one stop may come twice
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)
    learner.say(_report(step=3))
    await eventually(lambda: stopped.daemon.status()["learner"]["step"] == 3, "its last steps")
    assert not stopped.running.done()
    monkeypatch.setattr(stopping, "BACK_S", 1000.0)
    learner.say(Done(3, 3, None, None, 1, None))
    await learner.close()
    assert await stopped.ended() == 0
    assert stopped.limits == [(0, 7.5)], "counted from the learner's end"


async def test_a_link_that_drops_and_comes_back_ends_no_wait(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "1000")
    learner = await stopped.begin()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    await learner.close()
    learner = await stopped.begin()
    await asyncio.sleep(stopping.BACK_S + 0.2)
    assert not stopped.running.done()
    await learner.close()
    assert await stopped.ended() == 0, "it does not come back"


@pytest.mark.parametrize("keeps", ["nothing", "only the daemon"])
async def test_it_does_not_wait_for_a_learner_that_nobody_tells(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, keeps: str
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "1000")
    learner = await stopped.begin()
    if keeps == "nothing":
        monkeypatch.setattr(stopping, "supervisor", lambda: None)
    else:
        stopped.daemon.learner_process = {}
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stopped.ended() == 0
    await learner.close()


async def test_it_waits_for_no_more_than_the_learners_share_of_the_stop(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, str(0.5 * (1 - LEARNER_SHARE) / LEARNER_SHARE))
    learner = await stopped.begin()
    began_s = asyncio.get_running_loop().time()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stopped.ended() == 0
    assert asyncio.get_running_loop().time() - began_s >= 0.5
    await learner.close()


async def test_who_insists_is_not_kept_waiting(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "1000")
    monkeypatch.setattr(stopping, "AGAIN_S", 0.1)
    learner = await stopped.begin()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert not stopped.running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stopped.ended() == 0
    await learner.close()


async def test_the_supervisor_hears_of_it_for_the_learner_may_not_have_been_told(
    stopped: Stopped, keeper: asyncio.subprocess.Process
) -> None:
    learner = await stopped.begin()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(keeper.wait(), 120) == -signal.SIGTERM
    await learner.close()
    assert await stopped.ended() == 0


def _report(**fields: Any) -> Report:
    rest = {"tokens": 3, "loss": None, "step_time_ns": 1, "blocked_ns": 0, "val_loss": None, "val_loss_global": None}
    return Report(**rest | {"global_step": 1, "val_step": None} | fields)
