"""Many seeds in several processes, and the command that hunts with them."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_node.errors import ConfigError
from diloco_node.lab.cli.simulate import app
from diloco_node.lab.sim.hunt import reports, seed_range
from diloco_node.lab.sim.simulation import simulate
from tests.kit.cluster_kit import is_running
from tests.kit.commands import COMMAND
from tests.kit.planted import CORE_FAULTS
from tests.kit.planted import __main__ as planted_table

SHORT = {"regions": 3, "events": 300}


def test_seeds_are_given_as_first_and_last() -> None:
    assert seed_range("3..7") == (3, 7)
    assert seed_range("5") == (5, 5)
    for wrong in ("", "7..3", "a..b", "1..", "..2", "-1..2", "1...2"):
        with pytest.raises(ConfigError):
            seed_range(wrong)


def test_several_processes_find_what_one_does() -> None:
    hunt = reports(range(1, 4), jobs=2, **SHORT, fault=CORE_FAULTS["step-less"])
    found = {report.seed: report for report in hunt}
    assert sorted(found) == [1, 2, 3]
    for seed, report in found.items():
        assert report == simulate(seed, **SHORT, fault=CORE_FAULTS["step-less"])  # type: ignore[arg-type]


def test_a_hunt_that_finds_something_prints_how_to_run_it_again_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_node.lab.sim import hunt

    monkeypatch.setattr(
        hunt, "simulate", lambda seed, **how: simulate(seed, **how | {"fault": CORE_FAULTS["step-less"]})
    )
    asked = ["hunt", "--seeds", "1..9", "--regions", "3", "--events", "300", "--failures-max", "2"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1
    assert "VIOLATION" in done.stdout
    assert "diloco-node simulate run --seed 1 --regions 3 --events 300" in done.stdout
    assert "2 of 9 seeds run, 2 failed" in done.stdout
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert (found["done"], [report["seed"] for report in found["failed"]]) == (2, [1, 2])
    assert "--seed 1 " in found["failed"][0]["command"]


def test_a_hunt_that_finds_nothing_ends_well() -> None:
    done = CliRunner().invoke(app, ["hunt", "--seeds", "1..2", "--regions", "3", "--events", "300"])
    assert done.exit_code == 0, done.stdout
    assert "2 of 2 seeds run, 0 failed" in done.stdout


def spawned(pid: int) -> list[int]:
    """Processes that a hunt runs seeds in; Python's resource tracker is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_hunt_that_is_told_to_end_leaves_no_process_and_says_how_far_it_came() -> None:
    asked = [*COMMAND, "simulate", "hunt", "--seeds", "1..9999", "--jobs", "2"]
    with subprocess.Popen([*asked, "--regions", "3"], stdout=subprocess.PIPE, text=True) as hunting:
        try:
            until_s = time.monotonic() + 120
            while len(jobs := spawned(hunting.pid)) < 2:
                assert hunting.poll() is None, "it has ended by itself"
                assert time.monotonic() < until_s, "its processes do not come"
                time.sleep(0.05)
        finally:
            hunting.terminate()
        said, _ = hunting.communicate(timeout=120)
    assert hunting.returncode == 130
    assert "of 9999 seeds run, 0 failed" in said
    until_s = time.monotonic() + 60
    while any(is_running(job) for job in jobs):
        assert time.monotonic() < until_s, "its processes outlive it"
        time.sleep(0.05)


def test_the_table_of_planted_faults_says_which_seed_finds_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["planted", "step-less", "two-owners", "--seeds", "0..9", "--first"])
    planted_table.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["fault"] for row in rows] == ["step-less", "two-owners"]
    for row in rows:
        assert (row["found"], row["first"]) == (1, row["seeds"] - 1)
        assert row["words"]
