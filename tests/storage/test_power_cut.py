"""The power may go at any moment: whatever the disk has then, a start from it keeps all promises."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.kit.power_cut import CrashPoint, Killed, RecordedDisk, Site, crash_states, lay_out, outline, sync_sites
from tests.kit.power_cut_scenarios import SCENARIOS

SAMPLES = 6
"""Random crash states at each moment."""


MEASURED = {"cli/doctor/machine_facts.py:fsync_seconds"}
"""Syncs whose time is asked for and whose bytes are thrown away: no promise is made of them."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: nothing here waits for a real disk."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dl-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def record(name: str, *, without: Site | None = None, kill_at: int = -1) -> RecordedDisk:
    """Run a scenario; if its process is killed, then what the next one does. Points are those with promises, and after
    a kill the last one."""
    scenario = SCENARIOS[name]()
    with scratch() as root, RecordedDisk(root, without, kill_at) as disk:
        try:
            scenario.run(root, disk)
        except Killed:
            disk.kill()
            scenario.restart(root, disk)
            del disk.points[:-1]
    disk.points = [point for point in disk.points if point.note is not None]
    return disk


def fault(name: str, points: list[CrashPoint], *, samples: int = SAMPLES) -> str:
    """The first crash state from which the scenario's promises are not kept, and how; empty if there is none."""
    scenario = SCENARIOS[name]()
    with scratch() as folder:
        for number, (point, tree) in enumerate(crash_states(points, seed=0, samples=samples)):
            root = folder / str(number)
            root.mkdir()
            lay_out(tree, root)
            try:
                scenario.check(root, point.note)
            except Exception as error:  # noqa: BLE001 - also what a start must not raise
                return f"after {point.where}: {error!r}\npromised: {point.note}\non the disk:\n{outline(tree)}"
            shutil.rmtree(root)
    return ""


@cache
def undisturbed(name: str) -> RecordedDisk:
    return record(name)


def kills(name: str) -> list[int]:
    """Moments to be killed at: just before each sync."""
    return undisturbed(name).sync_calls


@pytest.fixture(autouse=True)
def _no_real_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("os.fdatasync", lambda _: None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_at_any_moment_breaks_no_promise(name: str) -> None:
    found = fault(name, undisturbed(name).points)
    assert not found, found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_after_a_kill_at_any_moment_breaks_no_promise(name: str) -> None:
    for kill_at in kills(name):
        found = fault(name, record(name, kill_at=kill_at).points)
        assert not found, f"killed at call {kill_at}: {found}"


def findings(site: Site) -> Iterator[tuple[str, str]]:
    """(scenario, what a power cut breaks) of the ways to run a scenario without this sync, cheap ones first.

    What a scenario reaches without a kill is looked for in no other one.
    """
    names = [name for name in SCENARIOS if site in undisturbed(name).sites]
    for name in names:
        yield name, fault(name, record(name, without=site).points, samples=0)
    for name in names or SCENARIOS:
        for kill_at in kills(name):
            disk = record(name, without=site, kill_at=kill_at)
            if site in disk.sites:
                yield f"{name}, killed at call {kill_at}", fault(name, disk.points, samples=0)


def place(site: Site) -> str:
    return f"{site.module}:{site.function}"


@pytest.mark.parametrize(
    "site",
    [pytest.param(site, id=str(site)) for site in sync_sites() if place(site) not in MEASURED],
)
def test_each_sync_is_needed(site: Site) -> None:
    """Without it some crash state breaks a promise."""
    tried, found = 0, ""
    for name, breach in findings(site):
        tried += 1
        if breach:
            found = f"{name}: {breach}"
            break
    assert tried, f"no scenario reaches {site}: add what it is for to tests/kit/power_cut_scenarios.py"
    assert found, f"{site} is not needed in any of {tried} runs: take it away"


def test_every_exception_is_a_sync_that_there_is() -> None:
    assert {place(site) for site in sync_sites()} >= MEASURED
