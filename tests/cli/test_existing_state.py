"""`start` on a folder in which a run has begun: another run, other settings, a run that is over."""

import socket
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import RunSettings
from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.manifest_file import MANIFEST_NAME
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import SupersededError
from diloco_node.main import main
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage.store import RegionStore
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
from diloco_node.transport.authority import init_run
from tests.kit.begun_kit import begin_run
from tests.kit.node_kit import MANIFEST

REGIONS = ("eu", "us-east", "us-west")


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = [f'[regions.{name}]\naddress = "10.0.0.{at}:7400"' for at, name in enumerate(REGIONS[:2])]
    (tmp_path / "run.toml").write_text("\n".join(['[run]\nid = "new"', *tables, "[regions.us-west]"]))
    init_run(tmp_path / "certs", "new", list(REGIONS))


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[SupervisorSpec]:
    calls: list[SupervisorSpec] = []

    def fake(spec: SupervisorSpec) -> int:
        calls.append(spec)
        return 0

    monkeypatch.setattr("diloco_node.supervisor.supervisor.run_supervisor", fake)
    return calls


def start(*more: str) -> int:
    return main(["start", "--region", "us-west", *more])


def test_a_new_run_id_with_an_old_folder_is_refused_and_nothing_is_touched(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state" / "us-west"
    begin_run(folder, "old", REGIONS, finished="run.steps is reached")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert start() == 2
    error = capsys.readouterr().err
    assert "holds run old, but run.id is new" in error
    assert "--state-dir" in error
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert specs == []
    assert start("--state-dir", "elsewhere") == 0
    assert len(specs) == 1


def test_a_start_names_what_run_toml_has_otherwise_than_the_run_and_goes_on(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    first = SettingsBody.of(RunSettings())
    change = replace(first, sync_every=32, outer_lr=0.25)
    begin_run(tmp_path / "state" / "us-west", "new", REGIONS, settings=(first,), changes=(change,))
    assert start() == 0
    assert len(specs) == 1
    told = capsys.readouterr().err
    words = "is 24 by default here, 32 in the run, which counts: write sync_every = 32 under [rounds]"
    assert f"diloco-node: rounds.sync_every {words}\n" in told
    assert "rounds.outer_lr is 0.5 by default here, 0.25 in the run" in told
    assert start("--set", "rounds.sync_every=16") == 0
    assert "rounds.sync_every is 16 in run.toml here" in capsys.readouterr().err
    assert start("--set", "rounds.sync_every=32", "--set", "rounds.outer_lr=0.25") == 0
    assert "in the run, which counts" not in capsys.readouterr().err


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "manifest.json is damaged"])
def test_a_ledger_of_another_version_is_refused_and_left_as_it_is(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str], *, is_damaged: bool
) -> None:
    ledger = tmp_path / "state" / "us-west" / LEDGER_NAME
    begin_run(ledger.parent, "new", REGIONS)
    data = b"DLLEDGER" + struct.pack("<II", 1, zlib.crc32(b"DLLEDGER\x01")) + ledger.read_bytes()[16:]
    ledger.write_bytes(data)
    if is_damaged:
        (ledger.parent / MANIFEST_NAME).write_text("{")
    assert start() == 7
    error = capsys.readouterr().err
    assert "is of ledger version 1, and this diloco-node reads version 3: nothing was changed" in error
    assert "run.init takes its final model into a new run" in error
    with pytest.raises(SupersededError, match="ledger version 1"):
        RegionStore(ledger.parent).load(len(MANIFEST.fragments))
    assert ledger.read_bytes() == data
    assert specs == []


SUPERVISED = """
import sys
from diloco_node.main import main
from diloco_node.supervisor import supervisor

def run_supervisor(spec):
    heavy = {"torch", "numpy", "numba", "grpc", "aiohttp", "rich", "structlog"} & set(sys.modules)
    print(f"supervises with {sorted(heavy)}")
    return 0

supervisor.run_supervisor = run_supervisor
sys.exit(main(["start", "--region", "us-west"]))
"""


def test_a_supervisor_that_comes_back_has_imported_little(tmp_path: Path) -> None:
    """It stays as small as it is then, and each restart of a region waits for its imports."""
    begin_run(tmp_path / "state" / "us-west", "new", REGIONS)
    process = subprocess.run(
        [sys.executable, "-c", SUPERVISED], capture_output=True, text=True, timeout=300, check=False
    )
    assert (process.returncode, process.stdout) == (0, "supervises with []\n"), process.stderr


def test_a_finished_run_says_so_and_where_the_model_lies(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "us-west"
    begin_run(folder, "new", REGIONS, finished="run.steps is reached\x1b[2J")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert start() == 0
        assert manager.recv(100, socket.MSG_DONTWAIT) == b"READY=1"
    output = capsys.readouterr()
    assert output.out == (
        f"run new is finished in us-west: run.steps is reached\\x1b[2J. The model is {folder / 'final.safetensors'}. "
        "To hand the end to a region that lacks it: start --serve. "
        "To go on: more run.steps or run.tokens in run.toml, in all regions, and start\n"
    )
    assert output.err == ""
    assert specs == []


def test_a_finished_run_whose_model_was_moved_away_does_not_train_again(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state" / "us-west"
    begin_run(folder, "new", REGIONS, finished="asked")
    write_report(folder, {"state": "finished", "end": {"is_written": True}})
    (folder / "final.safetensors").rename(tmp_path / "model.safetensors")
    assert start() == 0
    assert f"{folder / 'final.safetensors'} is gone. If nobody has moved it" in capsys.readouterr().out
    assert specs == []
    assert start("--serve") == 0
    assert len(specs) == 1


def test_a_region_that_was_stopped_before_its_model_was_written_starts_again(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state" / "us-west"
    begin_run(folder, "new", REGIONS, finished="asked")
    (folder / "final.safetensors").unlink()
    for report in (
        {"state": "finishing", "end": {"reason": "asked", "is_written": False}},
        {"state": "finished", "finished": "asked"},  # of an older daemon, which said so at once
    ):
        write_report(folder, report)
        assert start() == 0
        assert "is finished" not in capsys.readouterr().out
    assert len(specs) == 2


def test_a_finished_run_is_served_without_a_learner_when_that_is_wanted(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--serve") == 2
    assert "--serve is for a run that is finished in us-west" in capsys.readouterr().err
    begin_run(tmp_path / "state" / "us-west", "new", REGIONS, finished="asked")
    assert start("--serve") == 0
    assert [(spec.learner_command, spec.preload) for spec in specs] == [(None, ())]
    assert NodeSpec.load(tmp_path / "state" / "us-west" / "node.json").is_serving
    assert "serves until all other regions have told it that they have the end; Ctrl-C" in capsys.readouterr().err


def test_a_setting_that_may_change_is_named_with_both_values(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    begin_run(tmp_path / "state" / "us-west", "new", REGIONS)
    words = 'rounds.carry changes from "carry" to "overwrite": all regions must start with the same'
    assert start() == 0
    assert capsys.readouterr().err == ""
    assert start("--set", "rounds.carry=overwrite") == 0
    assert words in capsys.readouterr().err
    assert start("--set", "rounds.carry=overwrite") == 0
    assert capsys.readouterr().err == ""
    assert len(specs) == 3


def test_first_parameters_are_never_taken_silently_for_those_of_a_run_that_has_begun(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    """As of somebody who wants to go back, and names a version of the very run."""
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "first.safetensors")
    assert start("--init", "first.safetensors") == 0
    begin_run(tmp_path / "state" / "us-west", "new", REGIONS)
    assert start("--init", "first.safetensors") == 0, "as it began"
    assert start() == 0
    for init in ("state/us-west@3", "other.safetensors"):
        assert start("--init", init) == 2
        error = capsys.readouterr().err
        assert f"run.init is {init} (--init), but run new has begun, and its last start had none" in error
        assert "begin a new run with another run.id" in error
    assert len(specs) == 3


def test_a_version_that_cannot_be_had_stops_the_start(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    begin_run(tmp_path / "old" / "us-west", "old", REGIONS)
    for init, text in (
        ("old/us-west@7", "run.init: "),
        ("gone@7", "no manifest.json there"),
        ("old/us-west", "is a region's state folder: add a version"),
        ("old/us-west@x", "the number of a version comes after the @"),
    ):
        assert start("--init", init) == 2
        assert text in capsys.readouterr().err
    assert specs == []


@pytest.mark.parametrize("change", ["rounds.fragments=12", "rounds.codec_up=int8", "rounds.summary_entries=64"])
def test_a_setting_that_is_in_the_files_of_a_run_is_refused(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    folder = tmp_path / "state" / "us-west"
    assert start() == 0
    assert start("--set", change) == 0, "nothing has begun"
    assert start() == 0
    begin_run(folder, "new", REGIONS)
    before = (folder / "node.json").read_bytes()
    assert start("--set", change) == 2
    key, value = change.split("=")
    error = capsys.readouterr().err
    assert f"{key} is " in error
    assert value in error
    assert "run new began with" in error
    assert (folder / "node.json").read_bytes() == before
    assert (folder / LEDGER_NAME).exists()
    assert len(specs) == 3
