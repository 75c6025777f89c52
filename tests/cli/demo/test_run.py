"""cli/demo/run.py: what a demo does when something goes wrong beside the training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_node.chaos.fault_files import FAULTS_VARIABLE
from diloco_node.chaos.processes import DemoFile
from diloco_node.cli.demo import region as demo_region
from diloco_node.cli.demo import run as run_module
from diloco_node.cli.demo.command import DemoOptions
from diloco_node.cli.demo.live import LiveView
from diloco_node.cli.demo.run import Demo
from diloco_node.errors import DilocoError, StorageError
from diloco_node.unix_sockets import Process

NOBODY = Process(2, 1, "")


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(DemoOptions(regions=2, seconds=5, is_json=True), tmp_path / "run")


async def test_the_wan_is_removed_also_when_a_region_can_not_be_stopped(demo: Demo) -> None:
    done: list[str] = []

    async def up(_: object) -> None:
        raise DilocoError("no namespaces")

    async def stop() -> None:
        raise DilocoError("it does not end")

    async def down() -> None:
        done.append("down")

    demo.wan = SimpleNamespace(up=up, down=down)  # type: ignore[assignment]
    demo.keeper = SimpleNamespace(stop=stop)  # type: ignore[assignment]
    with pytest.raises(DilocoError, match="it does not end"):
        await demo.run()
    assert done == ["down"]


async def test_what_fails_beside_the_training_ends_the_demo_at_once(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours, when the training is over."""

    async def fail() -> None:
        raise StorageError("the folder is full")

    async def no_answer(_: object, *, wait_s: float) -> None:
        await asyncio.sleep(0)

    demo.keeper = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(run_module, "POLL_S", 0.001)
    monkeypatch.setattr(run_module, "poll_all", no_answer)
    with pytest.raises(StorageError, match="the folder is full"):
        async with asyncio.timeout(60), demo._beside(fail(), "storm"):
            await demo._watch(LiveView("", is_quiet=True), 0.0, until=lambda: False, limit_s=None)


async def test_what_failed_beside_the_training_is_raised_also_after_its_end(demo: Demo) -> None:
    async def fail() -> None:
        raise StorageError("the folder is full")

    with pytest.raises(StorageError, match="the folder is full"):
        async with demo._beside(fail(), "storm"):
            await asyncio.sleep(0)


async def test_what_goes_on_beside_the_training_ends_with_it(demo: Demo) -> None:
    async with demo._beside(asyncio.sleep(600), "storm"):  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert [task.cancelled() for task in demo._tasks] == [True]


def test_every_region_of_a_demo_looks_for_faults_in_its_folder(demo: Demo) -> None:
    demo._prepare()
    assert [region.name for region in demo.regions] == demo.names
    for region in demo.regions:
        assert region.program == ("-m", demo_region.__name__)
        assert region.env == {FAULTS_VARIABLE: str(DemoFile(demo.folder, NOBODY).faults.resolve())}
