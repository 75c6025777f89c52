"""The regions that a command is about: a name of run.toml, a state folder, or a folder of several."""

from pathlib import Path

import pytest

from diloco_node.cli.places import CONVENTION, find_targets, region_folder, run_folder
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.main import main

FILE = "ledger.log"


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three regions, two of which have run here."""
    monkeypatch.chdir(tmp_path)
    regions = "".join(f'[regions.{name}]\naddress = "{name}:1"\n' for name in ("eu", "us", "asia"))
    (tmp_path / "run.toml").write_text(f'run.id = "try"\n{regions}')
    for name in ("eu", "us"):
        folder = tmp_path / "state" / name
        folder.mkdir(parents=True)
        for file in (FILE, "admin.port"):
            (folder / file).write_text("7\n")
    return tmp_path


def test_a_name_a_folder_and_a_file_in_it_mean_the_same_region(run: Path) -> None:
    for place in ("eu", "state/eu", str(run / "state/eu"), f"state/eu/{FILE}"):
        assert region_folder(place, None, file=FILE) == run / "state/eu"


def test_without_a_place_the_only_region_here_is_meant(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 regions are here \(eu, us\), and this is about one: give a region of"):
        region_folder(None, None, file=FILE)
    (run / "state/us" / FILE).unlink()
    assert region_folder(None, None, file=FILE) == run / "state/eu"
    assert region_folder("state", None, file=FILE) == run / "state/eu"


def test_the_folder_of_all_regions_that_init_has_made_on_one_machine_is_a_place(run: Path) -> None:
    for name in ("eu", "us"):
        (run / "machines" / name).mkdir(parents=True)
        (run / "state").rename(run / "machines" / name / "state")
        (run / "state" / "us").mkdir(parents=True)
        (run / "state" / "us" / "admin.port").write_text("8\n")
    assert {target.port for target in find_targets(["machines"], None)} == {7, 8}


def test_a_folder_that_is_called_as_a_region_is_no_state_folder(run: Path) -> None:
    (run / "eu").mkdir()
    assert region_folder("eu", None, file=FILE) == run / "state/eu"


@pytest.mark.parametrize("place", ["mars", "state/asia", "x" * 300])
def test_a_place_that_is_no_region_is_refused_with_the_convention(place: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"and no region of run.toml, which has asia, eu, us: ") as refusal:
        region_folder(place, None, file=FILE)
    assert CONVENTION in str(refusal.value)
    with pytest.raises(ConfigError, match=r"is no region of run.toml that has run here") as refusal:
        find_targets([place], None)
    assert CONVENTION in str(refusal.value)
    (run / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"and there is no run\.toml here: give a region of run\.toml, as us-east"):
        region_folder(place, None, file=FILE)


def test_a_region_that_has_not_run_here_can_not_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"no region of run try has run here: state/asia holds no ledger.log"):
        region_folder("asia", None, file=FILE)
    with pytest.raises(PeersUnreachable):
        region_folder("asia", None)


def test_several_places_are_asked_in_the_order_in_which_they_are_given(run: Path) -> None:
    targets = find_targets(["us", "state/eu", "7401", "state"], None)
    assert [target.name for target in targets] == ["us", "eu", "port 7401", "eu", "us"]
    assert [target.name for target in find_targets([], None)] == ["eu", "us"]


def test_a_report_is_about_the_run_a_region_or_a_folder(run: Path) -> None:
    assert run_folder(None, None) == Path("state")
    assert run_folder("us", None) == Path("state/us")
    assert run_folder("state", None) == Path("state")
    with pytest.raises(ConfigError, match="'mars' is no folder"):
        run_folder("mars", None)


def test_only_processes_that_are_a_region_have_the_option_region(capsys: pytest.CaptureFixture[str]) -> None:
    looking = ["status", "why", "dashboard", "report", "ledger", "replay", "plan", "finish"]
    for words in (*([word] for word in looking), ["budget", "set"], ["budget", "show"], ["quarantine", "lift"]):
        assert main([*words, "--help"]) == 0
        output = capsys.readouterr().out
        assert "[REGION|STATE-FOLDER]" in output, words
        assert "--region " not in output, words
    for words in (["start"], ["doctor"], ["measure", "serve"]):
        assert main([*words, "--help"]) == 0
        assert "--region " in capsys.readouterr().out
