"""lab/demo/keeping.py: supervisors that die are started again, and what they left is gone before that."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from diloco_node.errors import DilocoError, StorageError
from diloco_node.lab.chaos.demo_processes import DemoFile, find_left_behind
from diloco_node.lab.chaos.fault_plan import FaultTarget
from diloco_node.lab.demo.keeping import RegionKeeper
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.state_names import FINAL_NAME
from tests.kit.waiting import eventually

CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
SUPERVISOR = f"""
import os, signal, subprocess, sys
env = {{**os.environ, "DILOCO_STATE": sys.argv[1], "DILOCO_CHILD": f"daemon-{{os.getpid()}}"}}
child = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}], env=env)
def end(*_):
    child.kill()
    child.wait()
    sys.exit(int(open(sys.argv[1] + "/code").read()))
signal.signal(signal.SIGTERM, end)
file = open(sys.argv[1] + "/ready", "a")
file.write(f"{{os.getpid()}}\\n")
file.flush()
while True:
    signal.pause()
"""
"""Leaves a child behind when it is killed, ends with the code in its folder at SIGTERM."""


class MadeUpRegion(RegionProcess):
    async def start(self, config: Path, command: Sequence[str] = ()) -> None:
        self.state_dir.mkdir(exist_ok=True)
        (self.state_dir / "code").touch()
        with (self.state_dir / "commands").open("a") as file:
            file.write(" ".join(command) + "\n")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", SUPERVISOR, str(self.state_dir.resolve())
        )

    def lives(self) -> list[int]:
        path = self.state_dir / "ready"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[RegionKeeper]:
    regions = [MadeUpRegion(name, 0, tmp_path / name) for name in ("a", "b")]
    made = RegionKeeper(
        tmp_path, tmp_path / "run.toml", regions, lambda _: None, (), ("python", "loop.py"), is_starting=False
    )
    try:
        await made.start()
        await eventually(lambda: all(len(region.lives()) == 1 for region in regions))
        yield made
    finally:
        await made.stop()
        for region in regions:
            for one in find_left_behind(region.state_dir):
                os.kill(one.pid, signal.SIGKILL)


def region_of(keeper: RegionKeeper, number: int = 0) -> MadeUpRegion:
    region = keeper.regions[number]
    assert isinstance(region, MadeUpRegion)
    return region


async def test_a_killed_supervisor_is_started_again_without_what_it_left(keeper: RegionKeeper) -> None:
    region, other = region_of(keeper), region_of(keeper, 1)
    target = FaultTarget("a", "daemon")
    await eventually(lambda: len(DemoFile.load(keeper.folder).find(target)) == 1)
    [child] = DemoFile.load(keeper.folder).find(target)
    for count in (2, 3):
        os.kill(region.lives()[-1], signal.SIGKILL)
        await eventually(lambda count=count: len(region.lives()) == count)  # type: ignore[misc]
        keeper.check()
    assert child not in find_left_behind(region.state_dir)
    supervisor = DemoFile.load(keeper.folder).supervisors["a"]
    assert supervisor is not None
    assert supervisor.pid == region.lives()[-1]
    await eventually(lambda: len(find_left_behind(region.state_dir)) == 1)
    assert len(region.lives()) == 3
    assert len(other.lives()) == 1
    assert (region.state_dir / "commands").read_text() == 3 * "python loop.py\n"
    assert not keeper.is_over


async def test_one_that_ends_in_order_is_started_again_unless_it_has_finished(keeper: RegionKeeper) -> None:
    region, other = region_of(keeper), region_of(keeper, 1)
    (region.state_dir / "code").write_text("0")
    os.kill(region.lives()[-1], signal.SIGTERM)
    await eventually(lambda: len(region.lives()) == 2)
    for one in (region, other):
        (one.state_dir / FINAL_NAME).touch()
    (other.state_dir / "code").write_text("1")
    os.kill(other.lives()[-1], signal.SIGTERM)
    await eventually(lambda: len(other.lives()) == 2)  # it failed, and has to end in order
    (other.state_dir / "code").write_text("0")
    for one in (region, other):
        assert not keeper.is_over
        os.kill(one.lives()[-1], signal.SIGTERM)
        await eventually(lambda one=one: one.name in keeper.end_reasons)  # type: ignore[misc]
    assert keeper.is_over
    keeper.check()


async def test_one_that_another_start_would_not_cure_ends_the_demo(keeper: RegionKeeper) -> None:
    region = region_of(keeper)
    (region.state_dir / "code").write_text("4")
    os.kill(region.lives()[-1], signal.SIGTERM)
    await eventually(lambda: "a" in keeper.end_reasons)
    with pytest.raises(DilocoError, match="region a: it ended with 4"):
        keeper.check()
    assert len(region.lives()) == 1


async def test_before_all_have_trained_nothing_is_started_again(keeper: RegionKeeper) -> None:
    keeper.is_starting = True
    os.kill(region_of(keeper).lives()[-1], signal.SIGKILL)
    await eventually(lambda: "a" in keeper.end_reasons)
    with pytest.raises(DilocoError, match="too early"):
        keeper.check()


async def test_a_stopped_keeper_starts_nobody(keeper: RegionKeeper) -> None:
    for region in keeper.regions:
        (region.state_dir / "code").write_text("0")
    os.kill(region_of(keeper).lives()[-1], signal.SIGKILL)  # it leaves a child behind
    await keeper.stop()
    assert all(region.has_exited for region in keeper.regions)
    assert not any(find_left_behind(region.state_dir) for region in keeper.regions)
    assert DemoFile.load(keeper.folder).supervisors == {"a": None, "b": None}
    assert all(len(region_of(keeper, number).lives()) == 1 for number in (0, 1))


async def test_every_region_is_cleared_also_when_the_file_can_not_be_written(
    keeper: RegionKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: DemoFile) -> None:
        raise StorageError("no room")

    for region in keeper.regions:
        (region.state_dir / "code").write_text("0")
    keeper.is_starting = True  # what dies now is not started again
    for number in (0, 1):
        os.kill(region_of(keeper, number).lives()[-1], signal.SIGKILL)
    await eventually(lambda: keeper.is_over)
    with monkeypatch.context() as patch:
        patch.setattr(DemoFile, "save", refuse)
        with pytest.raises(StorageError, match="no room"):
            await keeper.stop()
    assert not any(find_left_behind(region.state_dir) for region in keeper.regions)


async def test_every_region_is_stopped_before_the_first_error_is_raised(
    keeper: RegionKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, stop = region_of(keeper, 1), MadeUpRegion.stop
    (other.state_dir / "code").write_text("0")

    async def stop_or_not(region: MadeUpRegion) -> None:
        if region.name == "a":
            raise DilocoError("a does not end")
        await stop(region)

    with monkeypatch.context() as patch:
        patch.setattr(MadeUpRegion, "stop", stop_or_not)
        with pytest.raises(DilocoError, match="a does not end"):
            await keeper.stop()
    assert other.has_exited
    assert not find_left_behind(other.state_dir)


async def test_one_that_leaves_the_run_is_not_started_again(keeper: RegionKeeper) -> None:
    region = region_of(keeper)
    keeper.leaving.add("a")
    os.kill(region.lives()[-1], signal.SIGKILL)
    await eventually(lambda: len(region.lives()) == 2)  # it is told at its next start
    (region.state_dir / "code").write_text("0")
    os.kill(region.lives()[-1], signal.SIGTERM)
    await eventually(lambda: keeper.end_reasons == {"a": ""})
    assert len(region.lives()) == 2


async def test_one_that_joins_is_kept_like_the_others(keeper: RegionKeeper) -> None:
    keeper.joiners = ("c", "d")
    region = MadeUpRegion("c", 0, keeper.folder / "c")
    await keeper.add(region)
    await eventually(lambda: len(region.lives()) == 1)
    os.kill(region.lives()[-1], signal.SIGKILL)
    await eventually(lambda: len(region.lives()) == 2)
    supervisors = DemoFile.load(keeper.folder).supervisors
    assert list(supervisors) == ["a", "b", "c", "d"], "a storm finds also who has not joined yet"
    assert supervisors["d"] is None


async def test_a_folder_is_put_aside_before_the_next_start(keeper: RegionKeeper) -> None:
    region = region_of(keeper)
    for count in (1, 2):
        (region.state_dir / "mark").write_text(str(count))
        keeper.emptied.add("a")
        os.kill(region.lives()[-1], signal.SIGKILL)
        await eventually(lambda: not keeper.emptied and len(region.lives()) == 1)
        assert not (region.state_dir / "mark").exists()
        assert (keeper.folder / "lost" / "a" / str(count) / "mark").read_text() == str(count)
