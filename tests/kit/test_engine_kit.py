"""What the gate does on a machine that lacks things, and that nothing of it is left: .ci/system and engine_kit.py."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.engine_kit import NAMESPACES
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
