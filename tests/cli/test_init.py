"""`init`: flags or answers become a run that `start` takes, and nothing is overwritten."""

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_node.cli.init import admin_ports
from diloco_node.config.resolve import load_config
from diloco_node.main import app, main
from diloco_node.transport.certificates import load_identity

REGIONS = "east=10.99.0.1:7400,west=10.99.0.2:7400,south"
NAMES = ["east", "west", "south"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_make_a_run_with_certificates_and_the_next_commands(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print()")
    flags = ["--regions", REGIONS, "--script", "train.py", "--steps", "50", "--budget", "2Gbit/s", "--out", "lab"]
    assert main(["init", *flags, "--yes"]) == 0
    config = load_config(Path("lab/run.toml"))
    assert (config.run.id, config.run.steps) == ("my-run", 50)
    assert {name: section.address for name, section in config.regions.items()} == {
        "east": "10.99.0.1:7400",
        "south": None,
        "west": "10.99.0.2:7400",
    }
    assert {section.admin_port for section in config.regions.values()} == {7401}
    assert config.budget_plan("east").least().egress == 250_000_000
    for name in config.regions:
        assert load_identity(config.identity_dir(name), region=name, run_id="my-run").region == name
    assert Path("lab/train.py").read_text() == "print()"
    out = capsys.readouterr().out.splitlines()
    assert "  tar c run.toml train.py certs/west | ssh 10.99.0.2 'mkdir -p my-run && tar x -C my-run'" in out
    assert "  diloco-node doctor --region west -- python train.py" in out
    assert out[-3:-1] == ["  diloco-node start --region south -- python train.py", ""]


def test_regions_of_one_machine_get_admin_ports_of_their_own() -> None:
    """All names of loopback are one machine: an admin port is at 127.0.0.1, whatever the region listens on."""
    regions = "a=127.0.0.1:7400,b=localhost:7401,c=[::1]:7400,d=127.0.0.2:7403,e"
    assert main(["init", "--regions", regions, "--yes"]) == 0
    ports = {name: section.admin_port for name, section in load_config(Path("run.toml")).regions.items()}
    assert ports == {"a": 7402, "b": 7404, "c": 7405, "d": 7406, "e": 7407}


def test_regions_of_one_machine_get_folders_of_their_own_and_no_ssh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--regions", "a=127.0.0.1:7400,b=[2001:db8::1]:7400,c", "--yes", "--out", "lab"]) == 0
    out = capsys.readouterr().out.splitlines()
    copies = [line for line in out if " tar c " in line]
    assert copies == [
        "  tar c run.toml certs/a | (mkdir -p machines/a && tar x -C machines/a)",
        "  tar c run.toml certs/b | ssh 2001:db8::1 'mkdir -p my-run && tar x -C my-run'",
        "  tar c run.toml certs/c | (mkdir -p machines/c && tar x -C machines/c)",
    ]
    machines = Path("lab/machines").resolve()
    assert [line for line in out if " cd " in line] == [
        "  cd lab",
        f"  cd {machines}/a",
        "  cd my-run",
        f"  cd {machines}/c",
    ]
    subprocess.run(["sh", "-ec", "\n".join(["cd lab", copies[0]])], check=True)
    assert Path("lab/machines/a/certs/a").is_dir()


@pytest.mark.parametrize(
    "host",
    ["LOCALHOST.", "a.localhost", "localhost.localdomain", "ip6-loopback", "[::ffff:127.0.0.9]", "0.0.0.0", "[::]"],
)
def test_each_name_of_loopback_is_this_machine(host: str) -> None:
    assert admin_ports({"a": "127.0.0.1:7400", "b": f"{host}:7500"}) == {"a": 7401, "b": 7402}


def test_the_own_name_of_this_machine_is_one_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Vm-1.lan")
    for name in ("vm-1", "VM-1.example.org."):
        assert admin_ports({"a": "127.0.0.1:7400", "b": f"{name}:7500"}) == {"a": 7401, "b": 7402}
    assert admin_ports({"a": "127.0.0.1:7400", "b": "vm-12:7500"}) == {"a": 7401, "b": 7401}


def test_regions_of_several_machines_have_the_same_admin_port() -> None:
    regions = "a=10.0.0.1:7400,b=host-b:7401,c=[fd00::1]:7400,e"
    assert main(["init", "--regions", regions, "--yes"]) == 0
    ports = {name: section.admin_port for name, section in load_config(Path("run.toml")).regions.items()}
    assert ports == {"a": 7401, "b": 7402, "c": 7401, "e": 7401}


def test_it_says_how_regions_join_later(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--regions", REGIONS, "--yes"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    for command in ("certs add NAME", "start --join HOST:PORT --region NAME", "members add NAME"):
        assert f"`diloco-node {command}`" in last


def test_questions_are_asked_for_what_no_flag_says() -> None:
    result = CliRunner().invoke(app, ["init", "--budget", ""], input="try\neu=10.0.0.1:7400\n\n7\n")
    assert result.exit_code == 0, result.output
    assert "Name of the run [my-run]: " in result.output
    assert "Bandwidth" not in result.output
    config = load_config(Path("run.toml"))
    assert (config.run.id, config.run.steps, list(config.regions)) == ("try", 7, ["eu"])


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--regions", REGIONS, "--yes"]) == 0
    first = Path("run.toml").read_text()
    assert main(["init", "--regions", "eu=10.0.0.1:7400", "--yes"]) == 2
    assert "run.toml is there already" in capsys.readouterr().err
    assert Path("run.toml").read_text() == first


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--yes"], "--yes asks nothing, so give --regions"),
        (["--yes", "--regions", ","], "no regions"),
        (["--yes", "--regions", "a=1.1.1.1:1,a=1.1.1.1:2"], "names a twice"),
        (["--yes", "--regions", "a=1.1.1.1"], "regions.a.address"),
        (["--yes", "--regions", "a,b"], "have no address"),
        (["--yes", "--regions", "a=1.1.1.1:1", "--script", "no.py"], "there is no such file"),
        (["--yes", "--regions", "a=1.1.1.1:1", "--budget", "fast"], "--budget"),
        (["--yes", "--regions", "a=1.1.1.1:1", "--run-id", "A B"], "run.id"),
        (["--yes", "--regions", "a=1.1.1.1:1", "--run-id", 'a"#'], "run.id"),
        (["--yes", "--regions", 'a=1.1.1.1:1"#'], "regions.a.address"),
        (["--yes", "--regions", "a.address=1.1.1.1:1"], "--regions names 'a.address'"),
        (["--yes", "--regions", "a=1.1.1.1:1", "--steps", "9" * 30], "run.steps"),
        (["--yes", "--regions", 'a=1.1.1.1:1"\n[x]'], "run.toml"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *flags]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "/tmp" not in err
    assert list(Path().iterdir()) == []


def test_another_script_of_that_name_is_not_taken_for_the_one_that_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("my train.py").write_text("new")
    Path("lab").mkdir()
    Path("lab/my train.py").write_text("old")
    words = ["init", "--regions", REGIONS, "--yes", "--out", "lab", "--script", "my train.py"]
    assert main(words) == 2
    assert "lab/my train.py is there already" in capsys.readouterr().err
    assert [path.name for path in Path("lab").iterdir()] == ["my train.py"]
    Path("lab/my train.py").unlink()
    assert main(words) == 0
    assert Path("lab/my train.py").read_text() == "new"
    tars = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if " tar c " in line]
    assert [words[:5] for words in tars] == [["tar", "c", "run.toml", "my train.py", f"certs/{line}"] for line in NAMES]


def test_a_script_that_lies_there_already_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print()")
    assert main(["init", "--regions", REGIONS, "--yes", "--script", "train.py"]) == 0
    assert "tar c run.toml train.py" in capsys.readouterr().out


def test_keys_are_for_their_owner_only_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        assert main(["init", "--regions", REGIONS, "--yes"]) == 0
    finally:
        os.umask(before)
    keys = [*Path("certs").rglob("*.key")]
    assert len(keys) == 1 + len(NAMES)
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
