"""The command line as a whole: in its own process, as a user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diloco_node import __version__
from diloco_node.cli.application import GROUPS
from diloco_node.main import app, main
from tests.kit.commands import run_command

RUN_TOML = """
[run]
id = "try"
[regions.eu]
address = "127.0.0.1:7400"
[regions.us-east]
address = "127.0.0.1:7401"
"""
GROUP_EXAMPLES = ({"init", "start", "doctor"}, {"status", "why", "ledger"}, {"finish", "budget"}, {"demo", "wan"})
HEAVY = ("torch", "numpy", "numba", "grpc", "aiohttp", "cryptography", "pydantic", "rich", "asyncio")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_TOML)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from diloco_node.main import main\n"
        "main(['--help'])\n"
        f"heavy = sorted(set({HEAVY}) & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    for command in ("start", "demo", "status", "certs", "config", "simulate"):
        assert f"\n  {command} " in process.stdout


def test_help_lists_every_command_in_its_group() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    places = [output.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    groups = [set(re.findall(r"^  (\S+)  ", section, re.M)) for section in re.split(r"^\S.*:$", output, flags=re.M)[2:]]
    assert set.union(*groups) == set(typer.main.get_command(app).commands)
    assert [group >= names for group, names in zip(groups, GROUP_EXAMPLES, strict=True)] == [True] * len(GROUPS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["start", "--help"],
        ["demo", "-h"],
        ["status", "-h"],
        ["certs", "init", "-h"],
        ["config", "show", "-h"],
    ],
)
def test_every_command_has_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Usage: " in result.output


def test_version() -> None:
    process = run_command("--version")
    assert (process.returncode, process.stdout) == (0, f"diloco-node {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["strt"], "No such command 'strt'. Did you mean 'start'"),
        (["start"], "Missing option '--region'"),
        (["start", "--regin", "eu"], "No such option: --regin"),
        (["start", "--region", "eu", "--admin-port", "x"], "admin-port"),
        (["simulate", "run"], "Missing option '--seed'"),
        (["demo", "--regions", "0"], "--regions"),
    ],
)
def test_wrong_usage_ends_with_2_and_no_traceback(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert hint in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_an_error_is_one_line_and_debug_shows_the_traceback() -> None:
    process = run_command("config", "show", "--set", "rounds.sync_evry=3")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.count("\n") == 1
    assert process.stderr.startswith(
        "diloco-node: rounds.sync_evry (--set rounds.sync_evry) is not a setting, did you mean"
    )
    for arguments in (["--debug", "config", "show"], ["config", "show", "--debug"]):
        process = run_command(*arguments, "--set", "rounds.sync_evry=3")
        assert process.returncode == 1
        assert "Traceback" in process.stderr
        assert "ConfigError" in process.stderr


def test_debug_behind_two_dashes_belongs_to_the_users_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--region", "nowhere", "--", "train.py", "--debug"]) == 2
    assert "'nowhere' is not in [regions]" in capsys.readouterr().err


def test_an_empty_word_behind_two_dashes_belongs_to_the_users_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--region", "nowhere", "--", "train.py", ""]) == 2
    assert "'nowhere' is not in [regions]" in capsys.readouterr().err


def test_without_run_toml_the_error_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").unlink()
    assert main(["config", "show"]) == 2
    assert capsys.readouterr().err == (
        "diloco-node: run.toml does not exist: name the run's settings with --config run.toml, or let `init` write "
        "them, or `start --join` (E-CONFIG; diloco-node help E-CONFIG)\n"
    )


# ---- config show -----------------------------------------------------------------------------------------------------


def test_config_show_tells_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_ROUNDS__SYNC_EVERY", "32")
    result = CliRunner().invoke(app, ["config", "show", "--origin", "--set", "run.steps=9"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert lines["run.id"].endswith("# run.toml:3")
    assert lines["run.steps"].endswith("# --set run.steps")
    assert lines["rounds.sync_every"].endswith("# DILOCO_ROUNDS__SYNC_EVERY")
    assert lines["rounds.fragments"].endswith("# default")


def test_config_show_as_json() -> None:
    plain = json.loads(CliRunner().invoke(app, ["config", "show", "--json"]).output)
    assert plain["settings"]["run.id"] == '"try"'
    assert len(plain["settings_digest"]) == 64
    full = json.loads(CliRunner().invoke(app, ["config", "show", "--json", "--origin"]).output)
    assert full["settings"]["run.id"] == {"value": '"try"', "origin": "run.toml:3"}


def test_config_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_file = tmp_path / "other.toml"
    other_file.write_text(RUN_TOML.replace('"try"', '"other"'))
    monkeypatch.setenv("DILOCO_CONFIG", str(other_file))
    assert '"other"' in CliRunner().invoke(app, ["config", "show"]).output


@pytest.mark.parametrize("assignment", ["rounds.sync_every", "sync_every=3", "=3"])
def test_a_malformed_assignment_is_refused(assignment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", assignment]) == 2
    assert "write KEY=VALUE" in capsys.readouterr().err


# ---- certs init ------------------------------------------------------------------------------------------------------


def test_certs_init_takes_the_names_of_run_toml_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", "init"]) == 0
    assert "certs/us-east" in capsys.readouterr().out
    paths = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("certs/**/*.*"))
    assert paths == [
        "certs/ca.key",
        "certs/ca.pem",
        *(f"certs/{region}/{name}" for region in ("eu", "us-east") for name in ("ca.pem", "node.key", "node.pem")),
    ]
    assert main(["certs", "init"]) == 2
    assert "is there already, and is not overwritten" in capsys.readouterr().err


def test_certs_init_works_without_run_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").unlink()
    assert main(["certs", "init", "a", "b", "--run-id", "r", "--out", "here"]) == 0
    assert (tmp_path / "here" / "b" / "node.key").exists()
    assert main(["certs", "init", "a", "b"]) == 2
    assert "--run-id NAME and --out FOLDER" in capsys.readouterr().err
    assert main(["certs", "init", "A", "--run-id", "r", "--out", "there"]) == 2
    assert not (tmp_path / "there").exists()
