"""lab/chaos/daemon_faults.py: what it puts into a daemon's process, tried in processes of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from diloco_node.lab.chaos.fault_files import fault_file, switch_on
from diloco_node.numeric import NS_PER_S
from tests.kit.repository import ROOT


def run(code: str, folder: Path) -> str:
    """Runs code in another process, for a fault changes whole modules; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


SYNCS = """
import os, sys
from pathlib import Path
from diloco_node.lab.chaos.daemon_faults import install
folder = Path(sys.argv[1])
install(folder / "faults", "a")
for name in ("fsync", "fdatasync"):
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    try:
        getattr(os, name)(descriptor)
        print(name, "done")
    except OSError as error:
        print(name, os.strerror(error.errno))
"""


def test_syncs_fail_while_the_disks_fault_is_on(tmp_path: Path) -> None:
    assert run(SYNCS, tmp_path) == "fsync done\nfdatasync done\n"
    for region, kind in (("b", "disk"), ("a", "partition")):
        switch_on(fault_file(tmp_path / "faults", region, kind), 600 * NS_PER_S)
    assert run(SYNCS, tmp_path) == "fsync done\nfdatasync done\n"
    switch_on(fault_file(tmp_path / "faults", "a", "disk"), 600 * NS_PER_S)
    assert run(SYNCS, tmp_path) == "fsync Input/output error\nfdatasync Input/output error\n"


LINKS = """
import asyncio, sys
from diloco_node.lab.chaos import daemon_faults
from diloco_node.transport.link import PeerLink
from diloco_node.errors import LinkLost

is_cut, dropped = [False], []

async def run_dialer(self):
    dropped.append("dialer")

async def connect(self, number, old):
    return f"session {number}"

async def accept(self, hello, stream):
    return None

PeerLink.run_dialer, PeerLink._connect, PeerLink.accept = run_dialer, connect, accept
daemon_faults.CUT_POLL_S = 0.001
daemon_faults.install_partition(lambda: is_cut[0])

class Link(PeerLink):
    def __init__(self):
        self.peer = "b"

    def drop(self, reason):
        dropped.append(reason)

async def main():
    link = Link()
    running = asyncio.create_task(link.run_dialer())
    assert await link._connect(3, None) == "session 3"
    assert await link.accept(None, None) is None
    await asyncio.sleep(0.02)
    assert dropped == ["dialer"], dropped
    is_cut[0] = True
    while len(dropped) < 3:
        await asyncio.sleep(0.001)
    assert set(dropped[1:]) == {daemon_faults.CUT}
    for refused in (link._connect(4, None), link.accept(None, None)):
        try:
            await refused
            raise AssertionError("it was let through")
        except LinkLost:
            pass
    is_cut[0] = False
    await asyncio.sleep(0.02)
    count = len(dropped)
    await asyncio.sleep(0.02)
    assert len(dropped) == count
    assert await link._connect(5, None) == "session 5"
    running.cancel()
    print("good")

asyncio.run(main())
"""


def test_a_cut_link_is_dropped_and_refused_until_the_cut_is_over(tmp_path: Path) -> None:
    """Also of a peer that only it can dial: there the dialer returns at once, and the link is watched all the same."""
    assert run(LINKS, tmp_path) == "good\n"


@pytest.mark.parametrize("module", ["diloco_node.daemon.program", "diloco_node.cli.start"])
def test_a_production_daemon_knows_nothing_of_faults(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('diloco_node.lab.chaos')])"
    assert run(code, tmp_path) == "[]\n"
