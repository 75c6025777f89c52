"""`deploy ssh` against machines that are folders: ssh and scp are programs that do the same here."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

from diloco_node import __version__
from diloco_node.cli.deploy import remote
from diloco_node.cli.deploy.hosts import SshHost
from diloco_node.cli.deploy.remote import Shipment
from diloco_node.main import main
from diloco_node.transport.certificates import init_run

RUN_TOML = """
[run]
id = "try"
[regions.eu]
address = "127.0.0.1:7400"
[regions.us]
address = "127.0.0.1:7401"
"""
HOSTS = '[hosts.{}]\naddress = "{}"\nuser = "t"\n'

# The machine's name is its folder; what runs there has its folder as home and its own `systemctl`.
SSH = """#!/bin/bash
for word; do at=$script; script=$word; done
cd "{place}/${{at#*@}}" 2> /dev/null || {{ echo "ssh: Could not resolve hostname" >&2; exit 255; }}
HOME=$PWD PATH=$PWD/bin:/usr/bin:/bin exec bash -c "$script"
"""
SCP = """#!/bin/bash
files=()
while [ $# -gt 1 ]; do
    case $1 in -o | -F | -P) shift ;; -*) ;; *) files+=("$1") ;; esac
    shift
done
machine=${{1#*@}}
cp -p "${{files[@]}}" "{place}/${{machine%%:*}}/${{machine#*:}}"
"""
SYSTEMCTL = """#!/bin/bash
echo "$*" >> calls
case $* in *restart*|*" start "*) [ ! -e broken ] || { echo "Job failed" >&2; exit 1; } ;; esac
case $* in *--property=ActiveState*) echo ActiveState=active ;; esac
"""
NODE = f"""#!/bin/bash
case $1 in --version) echo "diloco-node {__version__}" ;; status) echo "row of $2 in $PWD" ;; esac
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all machines; this one's is `here`."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "run.toml").write_text(RUN_TOML)
    init_run(here / "certs", "try", ["eu", "us"])
    (here / "hosts.toml").write_text(HOSTS.format("eu", "m-eu") + HOSTS.format("us", "m-us"))
    programs(tmp_path / "bin", {"ssh": SSH.format(place=tmp_path), "scp": SCP.format(place=tmp_path)})
    for name in ("m-eu", "m-us"):
        programs(tmp_path / name / "bin", {"systemctl": SYSTEMCTL, "diloco-node": NODE})
        # A login shell sets PATH anew, and then reads this.
        (tmp_path / name / ".profile").write_text(f"PATH={tmp_path / name / 'bin'}:/usr/bin:/bin\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def programs(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def test_each_machine_gets_its_own_certificate_its_unit_and_is_started(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "ssh", "hosts.toml"]) == 0
    for region in ("eu", "us"):
        machine = place / f"m-{region}"
        folder = machine / "diloco" / "try"
        assert (folder / "run.toml").read_text() == RUN_TOML
        assert sorted(path.name for path in (folder / "certs").iterdir()) == [region]
        assert sorted(path.name for path in (folder / "certs" / region).iterdir()) == ["ca.pem", "node.key", "node.pem"]
        assert (folder / "certs" / region / "node.key").stat().st_mode & 0o077 == 0
        unit = (machine / ".config/systemd/user" / f"diloco-node-try-{region}.service").read_text()
        assert f" start --region {region} --certs certs --state-dir state\n" in unit
        assert "WorkingDirectory=%h/diloco/try\n" in unit
        calls = (machine / "calls").read_text().splitlines()
        assert f"--user enable --quiet diloco-node-try-{region}.service" in calls
        assert f"--user start diloco-node-try-{region}.service" in calls
    said = capsys.readouterr().out
    assert "eu on t@m-eu: diloco-node-try-eu.service is started" in said
    assert f"row of state/us in {place / 'm-us' / 'diloco' / 'try'}" in said


def test_a_dry_run_shows_commands_that_a_shell_can_run_and_changes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "ssh", "hosts.toml", "--dry-run", "--region", "us"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines} == {"ssh", "scp"}
    assert all("t@m-us" in " ".join(line) and "m-eu" not in " ".join(line) for line in lines)
    assert not (place / "m-us" / "diloco").exists()
    assert not (place / "m-us" / "calls").exists()


def test_the_same_again_changes_nothing(place: Path) -> None:
    def files(region: str) -> dict[str, bytes]:
        found = [path for path in (place / f"m-{region}").rglob("*") if path.is_file() and path.name != "calls"]
        return {str(path): path.read_bytes() for path in found}

    assert main(["deploy", "ssh", "hosts.toml"]) == 0
    first = files("eu"), files("us")
    assert main(["deploy", "ssh", "hosts.toml"]) == 0
    assert (files("eu"), files("us")) == first
    assert not any("certs/us" in name for name in first[0])


def test_folders_and_keys_that_were_open_to_others_are_closed(place: Path) -> None:
    folder = place / "m-eu" / "diloco" / "try"
    (folder / "certs" / "eu").mkdir(parents=True, mode=0o755)
    (place / "here" / "certs" / "eu" / "node.key").chmod(0o644)
    before = os.umask(0o022)
    try:
        assert main(["deploy", "ssh", "hosts.toml"]) == 0
    finally:
        os.umask(before)
    closed = [folder / "certs", folder / "certs" / "eu", place / "m-us" / "diloco" / "try"]
    assert [path.stat().st_mode & 0o777 for path in closed] == [0o700] * 3
    assert (folder / "certs" / "eu" / "node.key").stat().st_mode & 0o777 == 0o600


def test_nobody_is_asked_for_a_password_and_the_configuration_is_the_given_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "ssh", "hosts.toml", "--dry-run", "--ssh-config", "mine"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all("BatchMode=yes" in line and line[line.index("-F") + 1] == "mine" for line in lines)


def test_every_word_of_a_command_reaches_the_program_as_it_is() -> None:
    words = ("sh", "-c", 'echo "$HOME" %h a\\b\n;', ";")
    host = SshHost(address="a", user="t", program="/bin/d", command=words)
    unit = Shipment("eu", "try", host, Path("run.toml"), Path("certs")).unit()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert line.partition(" -- ")[2] == r'"sh" "-c" "echo \"$$HOME\" %%h a\\b\n;" ";"'


def test_a_number_with_colons_is_in_brackets_for_scp_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("fd00::1", "[fd00::1]"):
        (place / "here" / "hosts.toml").write_text(HOSTS.format("eu", address))
        assert main(["deploy", "ssh", "hosts.toml", "--dry-run"]) == 0
        lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        assert {line[-2] for line in lines if line[0] == "ssh"} == {"t@fd00::1"}
        assert {line[-1].rpartition(":")[0] for line in lines if line[0] == "scp"} == {"t@[fd00::1]"}


def test_a_machine_that_hangs_is_not_taken_for_one_that_is_not_there(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CALL_MAX_S", 0.5)
    (place / "m-eu" / "bin" / "diloco-node").write_text("#!/bin/sh\nexec sleep 60 > /dev/null 2>&1\n")
    assert main(["deploy", "ssh", "hosts.toml"]) == 2
    said = capsys.readouterr().err
    assert "eu: m-eu did not end" in said
    assert "ssh-copy-id" not in said


def test_a_region_that_runs_is_restarted_only_when_asked_for(place: Path) -> None:
    assert main(["deploy", "ssh", "hosts.toml", "--region", "eu", "--restart"]) == 0
    assert "--user restart diloco-node-try-eu.service" in (place / "m-eu" / "calls").read_text()


def test_nothing_is_copied_anywhere_when_one_machine_is_not_fit(place: Path) -> None:
    (place / "m-us" / "bin" / "diloco-node").unlink()
    assert main(["deploy", "ssh", "hosts.toml"]) == 2
    assert not (place / "m-eu" / "diloco").exists()


def test_each_fault_says_what_to_do(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(code: int, *parts: str) -> None:
        assert main(["deploy", "ssh", "hosts.toml"]) == code
        said = capsys.readouterr().err
        assert all(part in said for part in parts), said
        assert "Traceback" not in said

    machine = place / "m-eu"
    (machine / "broken").touch()
    says(2, "eu: m-eu the service did not start (Job failed)", "journalctl --user -u diloco-node-try-eu.service")
    (machine / "bin" / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    says(2, "no service manager for t", "loginctl enable-linger t")
    (machine / "bin" / "diloco-node").write_text("#!/bin/sh\necho diloco-node 0.0.0\n")
    (machine / "bin" / "systemctl").write_text("#!/bin/sh\n")
    says(2, f"has diloco-node 0.0.0, this machine {__version__}: install the same")
    (machine / "bin" / "diloco-node").unlink()
    says(2, "has no diloco-node: install it there")
    shutil.rmtree(machine)
    says(5, "eu: t@m-eu is not reached: ssh: Could not resolve hostname", "ssh -p 22 t@m-eu", "ssh-copy-id")
    (place / "here" / "hosts.toml").write_text(HOSTS.format("ap", "m"))
    says(2, "ap is no region of run try, which has eu, us")
    (place / "here" / "hosts.toml").write_text(HOSTS.format("eu", "m"))
    assert main(["deploy", "ssh", "hosts.toml", "--region", "us"]) == 2
    assert "add [hosts.us]" in capsys.readouterr().err
    shutil.rmtree(place / "here" / "certs" / "eu")
    says(4, "eu")
