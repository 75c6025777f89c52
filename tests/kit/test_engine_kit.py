"""What the gate does on a machine that lacks things, and that nothing of it is left: .ci/system and engine_kit.py."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import engine_kit
from tests.kit.engine_kit import NAMESPACES, SKIPPED, Skipped, attempt, locked, missing, work_folder
from tests.kit.repository import ROOT
from tests.kit.waiting import until

pytestmark = pytest.mark.system

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*NAMESPACES, "true"], check=False, stderr=subprocess.DEVNULL).returncode != 0,
    reason="namespaces need root: that an engine leaves nothing is NOT tested here",
)


def processes(mark: str) -> list[int]:
    """Those that have the text in their command line, zombies not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


HOLDER = """
import subprocess
subprocess.run([*{namespaces!r}, "sh", "-c", "ip link set lo up; iptables -A FORWARD -j DROP; (sleep 600.{mark} &) ; "
                "touch {ready}; sleep 601.{mark}"])
"""


@needs_namespaces
def test_all_that_was_started_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    mark, ready = f"{os.getpid():07d}", tmp_path / "ready"
    code = HOLDER.format(namespaces=NAMESPACES, mark=mark, ready=ready)
    (tmp_path / "holder.py").write_text(code)
    started = [f"sleep\x00{seconds}.{mark}" for seconds in (600, 601)]
    with subprocess.Popen([sys.executable, str(tmp_path / "holder.py")], stderr=subprocess.DEVNULL) as holder:
        try:
            until(ready.exists, within_s=240)
            until(lambda: [len(processes(words)) for words in started] == [1, 1], within_s=240)
        finally:
            os.kill(holder.pid, signal.SIGKILL)
    until(lambda: [len(processes(words)) for words in started] == [0, 0], within_s=240)


@needs_namespaces
def test_the_containers_group_weighs_more_and_is_removed_with_what_is_in_it() -> None:
    name = f"engine-try{os.getpid()}"
    engine_kit.come_first(name)
    groups = [*Path("/sys/fs/cgroup").glob(f"*/{name}"), *Path("/sys/fs/cgroup").glob(name)]
    if not groups:
        pytest.skip("control groups can't be made here: the weight of the containers is NOT tested")
    for group in groups:
        (group / "container").mkdir()
        weight = group / ("cpu.weight" if (group / "cgroup.controllers").exists() else "cpu.shares")
        assert int(weight.read_text()) in (6400, 65536)
    engine_kit.remove_cgroups(name)
    assert not any(group.exists() for group in groups)


def test_a_folder_is_removed_and_so_is_one_whose_process_is_gone(tmp_path: Path) -> None:
    left, busy = tmp_path / "engine-left", tmp_path / "engine-busy"
    for folder in (left, busy):
        folder.mkdir()
        (folder / "layer").write_text("1")
    with locked(busy / "lock", fcntl.LOCK_EX), work_folder(tmp_path) as own:
        assert own.is_dir()
        assert sorted(tmp_path.iterdir()) == sorted([busy, own])
    assert list(tmp_path.iterdir()) == [busy]


def test_what_was_cached_for_other_versions_is_forgotten_after_a_week(tmp_path: Path) -> None:
    old_s = time.time() - engine_kit.KEPT_S - 60
    for name in ("wheels-old", "wheels-new", "docker-old", "other-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in ("base-old.tar", "base-new.tar"):
        (tmp_path / name).touch()
    for made in tmp_path.glob("*-old*"):
        os.utime(made, (old_s, old_s))
    engine_kit.forget_old(tmp_path)
    assert sorted(made.name for made in tmp_path.iterdir()) == ["base-new.tar", "other-old", "wheels-new"]


def test_what_the_network_refuses_is_tried_again_and_then_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(engine_kit, "pause", naps.append)
    count = tmp_path / "count"
    refuse = f"echo x >> {count}; echo no route >&2; exit 1"
    with pytest.raises(Skipped, match=r"it: failed 3 times, the registry can't be reached: no route"):
        attempt("it", "sh", "-c", refuse, timeout=240)
    assert count.read_text() == "x\n" * 3
    assert naps == [5.0, 10.0, 15.0]
    count.unlink()
    attempt("it", "sh", "-c", f"test -e {count} || {{ touch {count}; exit 1; }}", timeout=240)
    with pytest.raises(Skipped, match="did not end within 0 s"):
        attempt("it", "sleep", "60", timeout=0.01)


def test_an_engine_without_root_or_programs_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "it needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("dockerd", "iptables") else "/bin/" + tool)
    assert missing() == "dockerd, iptables is missing: .ci/system installs it"


def test_a_skip_is_an_exit_code_and_a_reason_and_never_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> dict[str, object]:
        raise Skipped("no bridge")

    assert engine_kit.finish(work) == SKIPPED
    out, err = capsys.readouterr()
    assert out == '{"skipped": "no bridge"}\n'
    assert "NOT TESTED on an engine: no bridge" in err


def run_system(folder: Path, user: int, apt_get: str, *kinds: str) -> subprocess.CompletedProcess[str]:
    """.ci/system where none of the programs is there, with this apt-get."""
    for tool in ("seq", "timeout", "env", "bash", "cat", "rm", "chmod", "mktemp", "tail"):
        (folder / tool).symlink_to(shutil.which(tool) or "")
    for name, text in (("sleep", "exit 0"), ("id", f"echo {user}"), ("apt-get", apt_get)):
        (folder / name).write_text(f"#!{shutil.which('sh')}\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / ".ci" / "system"), *kinds],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_packages_that_can_t_be_had_are_said_loudly_and_stop_nothing(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = run_system(tmp_path, 0, f'echo "$@" >> {calls}; exit 100')
    assert done.returncode == 0
    assert "*** Debian's packages can't be reached ***" in done.stdout
    assert "docker-compose" in done.stdout
    assert "the compose file: NOT TESTED ***" in done.stdout
    asked = calls.read_text().splitlines()
    assert sum(" update" in line for line in asked) == 3
    assert sum(" install " in line and "docker.io" in line for line in asked) == 3


def test_packages_are_installed_at_the_first_try_and_without_root_not_at_all(tmp_path: Path) -> None:
    other = tmp_path / "user"
    other.mkdir()
    packages = ("docker-compose", "shellcheck", "chromium")
    for kinds, wanted in ((), packages), (("deploy", "page"), packages[1:]):
        folder = tmp_path / str(len(kinds))
        folder.mkdir()
        done = run_system(folder, 0, f'echo "$@" >> {folder}/calls', *kinds)
        assert done.returncode == 0
        assert "NOT" not in done.stdout
        update, *installs = (folder / "calls").read_text().splitlines()
        assert update.endswith(" update")
        assert [package for package, line in zip(wanted, installs, strict=True) if f" {package}" in line] == [*wanted]
    done = run_system(other, 1000, f'echo "$@" >> {other}/calls')
    assert done.returncode == 0
    assert "can't be installed without root and apt-get: what needs them is NOT TESTED" in done.stdout
    assert not (other / "calls").exists()
