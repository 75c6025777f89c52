"""A machine of its own for a test, in namespaces: systemd as service manager of a user.

Run as `python -m tests.kit.service_host FOLDER COMMAND...` inside `unshare` (`command_in` says how). /run, the user's
home, processes and the network are the machine's own; programs and libraries are those of this one.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.kit.repository import module_command

SYSTEMD: Final = "/lib/systemd/systemd"
PATIENCE_S: Final = 120.0
CGROUPS: Final = Path("/sys/fs/cgroup")


def missing() -> str:
    """Why this machine can't have one; empty if it can."""
    if os.geteuid():
        return "needs root for its namespaces"
    programs = [name for name in (SYSTEMD, "unshare") if shutil.which(name) is None]
    return f"not installed: {', '.join(programs)} (.ci/system installs them)" if programs else ""


def command_in(folder: Path, words: list[str]) -> list[str]:
    """What runs words on such a machine; everything in it dies with the first process."""
    apart = ["unshare", "--fork", "--pid", "--mount", "--net", "--cgroup", "--kill-child=KILL"]
    return [*apart, *module_command(main), str(folder), *words]


def main(arguments: list[str]) -> int:
    """The first process of the machine: set it up, run the command, end with its code."""
    folder, words = Path(arguments[0]), arguments[1:]
    set_up(folder)
    runtime = Path("/run/user/0")
    env = {**os.environ, "HOME": str(folder / "home"), "XDG_RUNTIME_DIR": str(runtime)}
    env.pop("DBUS_SESSION_BUS_ADDRESS", None)
    with (folder / "machine.log").open("wb") as log:
        manager = {**env, "SYSTEMD_LOG_TARGET": "console"}
        subprocess.Popen([SYSTEMD, "--user", "--unit=basic.target"], env=manager, stdout=log, stderr=log)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (runtime / "systemd" / "private").exists():
            if time.monotonic() > deadline_s:
                sys.stderr.write("no service manager: " + (folder / "console").read_text(errors="replace")[-500:])
                return 77
            time.sleep(0.05)
        return subprocess.run(words, env=env, check=False).returncode


def set_up(folder: Path) -> None:
    """Set up mounts and loopback."""
    (folder / "home").mkdir(mode=0o700)
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for name in ("systemd/system", "user/0"):
        Path("/run", name).mkdir(parents=True, mode=0o700)
    make_inaccessible(Path("/run/systemd/inaccessible"))
    (folder / "console").touch()
    with contextlib.suppress(subprocess.CalledProcessError):  # where systemd says why it does not start
        run("mount", "--bind", str(folder / "console"), "/dev/console")
    run("ip", "link", "set", "lo", "up")


def make_inaccessible(folder: Path) -> None:
    """What systemd puts in the place of files that a service must not see; made at boot, of which there was none."""
    folder.mkdir(mode=0o755)
    (folder / "dir").mkdir(mode=0)
    (folder / "reg").touch(mode=0)
    os.mkfifo(folder / "fifo", 0)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "sock"))
    for name, kind in (("chr", stat.S_IFCHR), ("blk", stat.S_IFBLK)):
        with contextlib.suppress(PermissionError):
            os.mknod(folder / name, kind, os.makedev(0, 0))


def run(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def cgroups_kept() -> Iterator[None]:
    """The control groups that a service manager made are gone at the end; its processes are, before."""
    before = set(_cgroups())
    try:
        yield
    finally:
        for path in sorted(set(_cgroups()) - before, reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def _cgroups() -> list[Path]:
    tops = [CGROUPS / "systemd", CGROUPS / "unified"] if (CGROUPS / "unified").exists() else [CGROUPS]
    return [path for top in tops if top.is_dir() for path in top.rglob("*") if path.is_dir()]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
