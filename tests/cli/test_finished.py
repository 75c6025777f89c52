"""`status` of a run that is finished, from its state folders alone; `start` that goes on with it."""

import json
import os
from pathlib import Path

import pytest

from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.run_record import read_run_record, set_final_aside
from diloco_node.main import main
from diloco_node.state_names import ADMIN_PORT_NAME, FINAL_NAME, NODE_NAME
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
from diloco_node.transport.authority import init_run
from tests.kit.begun_kit import begin_run

REGIONS = ("eu", "us")
NOON = 1_764_158_400  # 2025-11-26T12:00:00Z


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = [f'[regions.{name}]\naddress = "10.0.0.{at}:7400"' for at, name in enumerate(REGIONS)]
    (tmp_path / "run.toml").write_text("\n".join(['[run]\nid = "new"\nsteps = 400', *tables]))
    init_run(tmp_path / "certs", "new", list(REGIONS))


def finished_region(folder: Path, *, reason: str = "the median learner made 400 of 400 steps") -> Path:
    """A folder whose daemon has ended in order."""
    begin_run(folder, "new", REGIONS, finished=reason)
    (folder / NODE_NAME).write_text("{}")
    os.utime(folder / FINAL_NAME, (NOON, NOON))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["status", *words])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


@pytest.mark.parametrize("words", [(), ("us",), ("state/us",), ("state",)])
def test_status_says_since_when_and_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    folder = finished_region(tmp_path / "state" / "us")
    write_report(folder, {"state": "finished", "region": "us", "inner_steps": 412, "run": {"id": "new", "step": 400}})
    code, text = shown(capsys, *words)
    assert code == 0, text
    where = f"since 2025-11-26T12:00:00Z, the model is {folder / FINAL_NAME}"
    assert f"finished: the median learner made 400 of 400 steps; {where}" in text
    assert "run new: step 400" in text
    assert "412" in text


def test_a_daemon_that_died_after_the_end_left_its_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished_region(tmp_path / "state" / "us")
    (folder / ADMIN_PORT_NAME).write_text("1\n")
    code, text = shown(capsys, "state/us")
    assert (code, "finished: the median learner" in text) == (0, True)


@pytest.mark.parametrize("report", ["", "{", "[]", '{"state": 3}', '{"state": "training", "run": 5}', "[" * 10**5])
def test_a_report_of_any_kind_does_not_hide_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str
) -> None:
    folder = finished_region(tmp_path / "state" / "us", reason="enough\x1b[2J")
    (folder / "report.json").write_text(report)
    code, text = shown(capsys, "us")
    assert (code, r"finished: enough\x1b[2J; since" in text) == (0, True)


def test_a_model_that_was_moved_is_not_said_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished_region(tmp_path / "state" / "us")
    (folder / FINAL_NAME).unlink()
    write_report(folder, {"state": "finished", "end": {"is_written": True}})
    assert f"the model was {folder / FINAL_NAME}" in shown(capsys, "us")[1]


def test_regions_that_have_not_finished_do_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "state" / "us"
    begin_run(folder, "new", REGIONS)
    (folder / NODE_NAME).write_text("{}")
    write_report(folder, {"state": "finished"})
    assert shown(capsys, "us")[0] != 0
    finished_region(tmp_path / "state" / "eu")
    document = json.loads(_json(capsys))["regions"]
    assert [(region["region"], region.get("state")) for region in document] == [("eu", "finished")]


def _json(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["status", "--json", "state"]) == 0
    return capsys.readouterr().out


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[SupervisorSpec]:
    calls: list[SupervisorSpec] = []
    monkeypatch.setattr("diloco_node.supervisor.supervisor.run_supervisor", lambda spec: calls.append(spec) or 0)
    return calls


@pytest.mark.parametrize(
    ("limits", "is_going_on"), [(("400", "0"), False), (("300", "0"), False), (("800", "0"), True)]
)
def test_start_goes_on_with_a_finished_run_when_the_limits_are_wider(
    tmp_path: Path,
    specs: list[SupervisorSpec],
    capsys: pytest.CaptureFixture[str],
    limits: tuple[str, str],
    is_going_on: bool,
) -> None:
    begin_run(tmp_path / "state" / "us", "new", REGIONS, finished="enough", limits=(400, 0))
    steps, tokens = limits
    assert main(["start", "--region", "us", "--set", f"run.steps={steps}", "--set", f"run.tokens={tokens}"]) == 0
    out, err = capsys.readouterr()
    assert len(specs) == int(is_going_on)
    assert ("run new was finished and goes on once a majority starts with these limits" in err) is is_going_on
    assert ("To go on: more run.steps or run.tokens in run.toml, in all regions, and start" in out) is not is_going_on
    assert main(["start", "--region", "us", "--set", f"run.steps={steps}", "--set", f"run.tokens={tokens}"]) == 0
    assert len(specs) == 2 * int(is_going_on), "the second start says the same"


def test_the_model_of_the_first_end_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "us"
    begin_run(folder, "new", REGIONS, finished="enough")
    (folder / "final-1.safetensors").write_bytes(b"older")
    for name in ("report.json", "end.json"):
        (folder / name).write_text("{}")
    set_final_aside(folder)
    set_final_aside(folder)
    assert not (folder / "report.json").exists(), "it is of that end"
    assert (folder / "end.json").exists(), "an order may be for the end of the extension"
    assert {path.name: path.read_bytes() for path in folder.glob("final*")} == {
        "final-1.safetensors": b"older",
        "final-2.safetensors": b"model",
    }


def test_an_extended_run_is_not_over(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "us"
    begin_run(folder, "new", REGIONS, finished="enough", limits=(400, 0), extended=(800, 0))
    record = read_run_record(folder)
    assert record is not None
    assert record.finished is None


ORDERS = (
    ("members", "list"),
    ("members", "promote", "eu"),
    ("drain",),
    ("finish",),
    ("quarantine", "add", "eu"),
    ("config", "set", "rounds.sync_every=32"),
    ("budget", "show"),
)


@pytest.mark.parametrize("words", ORDERS)
@pytest.mark.parametrize("place", ["us", "state/us"])
@pytest.mark.parametrize("has_died", [False, True])
def test_an_order_says_that_the_run_is_over_and_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], place: str, has_died: bool
) -> None:
    folder = finished_region(tmp_path / "state" / "us")
    if has_died:
        (folder / ADMIN_PORT_NAME).write_text("1\n")
    assert main([*words, place]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "us takes no orders: its run is over (finished: the median learner made 400 of 400 steps; since" in text
    assert "raise run.steps or run.tokens in run.toml, and start its regions" in text


@pytest.mark.parametrize("words", ORDERS)
@pytest.mark.parametrize("place", ["us", "state/us"])
@pytest.mark.parametrize("has_died", [False, True])
def test_an_order_to_a_region_that_is_down_says_how_it_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], place: str, has_died: bool
) -> None:
    folder = tmp_path / "state" / "us"
    begin_run(folder, "new", REGIONS)
    (folder / NODE_NAME).write_text("{}")
    if has_died:
        (folder / ADMIN_PORT_NAME).write_text("1\n")
    assert main([*words, place]) == 5
    text = " ".join(capsys.readouterr().err.split())
    assert "the daemon of us does not run, or does not answer: " in text
    assert "`diloco-node start --region us` starts it; " in text
    assert "state/us/logs/daemon.log says why it ended" in text
