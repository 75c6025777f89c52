"""The page as one file: of live regions, and of what finished ones have left."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli.page.page_report import run_snapshot
from diloco_node.daemon.run_history import COLUMNS, HISTORY_NAME
from diloco_node.errors import ConfigError, StorageError
from diloco_node.main import main
from tests.kit.page_kit import NAMES, SETTINGS, history, status

TWO_HOURS = 7_200


def finished_run(folder: Path, *, names: tuple[str, ...] = NAMES, run_id: str = "run") -> None:
    """Write what the regions of a run of two hours leave behind."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "report.json").write_text(json.dumps(status(TWO_HOURS, name)))
        (folder / name / "node.json").write_text(
            json.dumps({"region": name, "run_id": run_id, "settings_shown": SETTINGS})
        )
        document = history(TWO_HOURS, name)
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in document["rows"]]
        lines = [{"period_s": document["period_s"]}, *rows]
        (folder / name / HISTORY_NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def embedded(page: Path) -> dict[str, Any]:
    match = re.search(r'id="snapshot">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    document: dict[str, Any] = json.loads(match[1])
    return document


def test_a_finished_run_is_one_small_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    tokens = {"trained": 9, "merged": 8, "carried": 1, "discarded": 0, "balanced": True}
    (tmp_path / "report.json").write_text(json.dumps({"regions": [], "tokens": tokens}))
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    assert str(page) in capsys.readouterr().out
    assert page.stat().st_size < 5_000_000
    document = embedded(page)
    assert [entry["status"]["region"] for entry in document["regions"]] == list(NAMES)
    assert {len(entry["history"]["rows"]) for entry in document["regions"]} == {TWO_HOURS // 8}
    assert document["regions"][0]["settings"] == SETTINGS
    assert document["summary"] == {"tokens": tokens}


def test_one_region_and_another_place(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run/us-east"), "--out", str(tmp_path / "x.html")]) == 0
    document = embedded(tmp_path / "x.html")
    assert [entry["status"]["region"] for entry in document["regions"]] == ["us-east"]
    assert document["summary"] == {"tokens": None}, "a region's report is no account of the run"


def test_terminal_escapes_of_a_file_are_escaped(tmp_path: Path) -> None:
    finished_run(tmp_path, names=("eu-west",))
    (tmp_path / "eu-west/report.json").write_text(json.dumps({"region": "eu-west", "reason": "a\x1b[2Jb\u202e"}))
    assert run_snapshot(tmp_path)["regions"][0]["status"]["reason"] == "a\\x1b[2Jb\\u202e"


DAMAGE = ["", "[1]", "{", "\x00", "3", "[" * 100_000, '{"region": "eu-west", "x": ' + "[" * 800 + "]" * 800 + "}"]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_region_without_a_report_is_shown_with_what_it_has_left(tmp_path: Path, text: str) -> None:
    finished_run(tmp_path, names=("eu-west", "us-east"))
    (tmp_path / "eu-west/report.json").write_text(text)
    broken, whole = run_snapshot(tmp_path)["regions"]
    assert whole["status"]["region"] == "us-east"
    assert broken["status"]["region"] == "eu-west"
    assert "did not end in order" in broken["status"]["error"]
    assert len(broken["history"]["rows"]) == TWO_HOURS // 8
    assert broken["settings"] == SETTINGS


def test_the_report_of_an_earlier_start_is_not_taken_for_the_end(tmp_path: Path) -> None:
    finished_run(tmp_path, names=("eu-west", "us-east"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (tmp_path / "eu-west/admin.port").write_text(str(port))
    broken, whole = run_snapshot(tmp_path)["regions"]
    assert broken["status"] == {"region": "eu-west", "error": broken["status"]["error"]}
    assert str(port) in broken["status"]["error"]
    assert "error" not in whole["status"]


@pytest.mark.parametrize("text", ["", "[1]", '{"region": 3}', "[" * 100_000])
def test_a_folder_that_names_no_region_is_none(tmp_path: Path, text: str) -> None:
    finished_run(tmp_path, names=("eu-west", "us-east"))
    for name in ("report.json", "node.json"):
        (tmp_path / "eu-west" / name).write_text(text)
    assert [entry["status"]["region"] for entry in run_snapshot(tmp_path)["regions"]] == ["us-east"]


def test_a_folder_whose_name_is_a_number_is_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path, names=("us-east",))
    (tmp_path / "us-east").rename(tmp_path / "1")
    monkeypatch.chdir(tmp_path)
    assert run_snapshot(Path("1"))["regions"][0]["status"]["state"] == "training", "nothing was asked"


def test_the_report_of_a_demo_leaves_out_the_folders_that_were_set_aside(tmp_path: Path) -> None:
    finished_run(tmp_path)
    finished_run(tmp_path / "lost", names=NAMES[:1], run_id="other")
    (tmp_path / "lost" / NAMES[0]).rename(tmp_path / "lost" / "1")
    (tmp_path / "lost" / NAMES[0]).mkdir()
    (tmp_path / "lost" / "1").rename(tmp_path / "lost" / NAMES[0] / "1")
    assert main(["report", str(tmp_path)]) == 0
    assert [region["status"]["region"] for region in embedded(tmp_path / "report.html")["regions"]] == sorted(NAMES)


def test_a_folder_with_two_runs_of_the_same_regions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever went back to a version has the old run's folder beside the new one's."""
    finished_run(tmp_path / "new-state", run_id="new")
    finished_run(tmp_path / "state")
    assert main(["report", str(tmp_path)]) == 2
    assert "a page shows one run, and these are 2 (new in " in capsys.readouterr().err
    assert main(["report", str(tmp_path / "state")]) == 0


def test_a_folder_without_regions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no region"):
        run_snapshot(tmp_path)


def test_a_place_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    finished_run(tmp_path)
    out = tmp_path / "nowhere/x.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == StorageError.exit_code
