"""The daemon of benchmarks/gpu.py: the real server and memory for learners, and a region of one.

`ScriptedDaemon` runs in a thread and does what a check says. `DaemonProcess` runs a process of its own, so that what it
decodes takes nothing from the training thread: for each order it asks for a snapshot of the next fragment, and offers
the version that the oldest snapshot became.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Contribution
from diloco_node.numeric import F32
from diloco_node.shared_memory import MemoryStore, request_area
from diloco_node.wire.learner_link import (
    CONTRIBUTION_AREA,
    NO_SNAPSHOT,
    Attach,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    ToDaemon,
)
from tests.kit.fake_daemon import FakeDaemon

PATIENCE_S: Final = 60.0
POLL_S: Final = 0.002
READY: Final = "ready\n"


@contextlib.contextmanager
def region(folder: Path) -> Iterator[None]:
    """Memory for a learner of this process or its children, and the variables by which it finds the daemon."""
    os.environ["DILOCO_SOCKET"] = str(folder / "learner.sock")
    os.environ["DILOCO_SUPERVISOR"] = str(folder / "memory.sock")
    try:
        with MemoryStore(folder / "memory.sock"):
            yield
    finally:
        del os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"]


class ScriptedDaemon(FakeDaemon):
    """A daemon that a check leads step by step, so that two runs of it do the same."""

    def until_ready(self, diloco: Any, fragment: int) -> Contribution:
        """Ask for a snapshot and go through boundaries without a step until it is encoded."""
        before = self.heard(SnapshotReady)
        self.want(fragment)
        self._settle(diloco, lambda: self.heard(SnapshotReady) > before)
        return self.wait_for(SnapshotReady, before + 1).contribution

    def until_applied(self, diloco: Any, fragment: int, theta: F32, snapshot: int = NO_SNAPSHOT) -> None:
        """Offer a version and go through boundaries without a step until it is applied."""
        self.commit(fragment, theta, snapshot)
        version = self.versions[fragment]
        self._settle(diloco, lambda: diloco.versions[fragment] == version)

    def until_heard(self, diloco: Any, kind: type, count: int) -> None:
        """Go through boundaries without a step until the learner has sent so many messages of a kind."""
        self._settle(diloco, lambda: self.heard(kind) >= count)

    def heard(self, kind: type) -> int:
        """How many messages of a kind the learner has sent."""
        return sum(isinstance(message, kind) for message in list(self.said))

    @staticmethod
    def _settle(diloco: Any, is_done: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_done():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the learner did not answer its daemon")
            diloco.settle(POLL_S)


class OrderingDaemon(FakeDaemon):
    """See the module: one snapshot and one version for each order."""

    def __init__(self, folder: Path, fragments: int) -> None:
        super().__init__(folder, fragments=fragments)
        self._memory = folder / "memory.sock"
        self._ready: queue.SimpleQueue[Contribution] = queue.SimpleQueue()
        self._merged: queue.SimpleQueue[tuple[int, F32, int]] = queue.SimpleQueue()
        # Fragments with a snapshot or a version under way; the others may be asked for.
        self._busy: set[int] = set()
        self._next = 0
        # Both mapped once: a new mapping of half a gigabyte for each order would take longer than the order.
        self._places: list[F32] = []
        self._encoded: list[tuple[FragmentBlocks, Any]] = []

    def learner_attached(self, attach: Attach) -> None:
        """Begin anew: what another learner was asked is void."""
        self._ready, self._merged, self._busy = queue.SimpleQueue(), queue.SimpleQueue(), set()
        super().learner_attached(attach)

    def on_learner_message(self, message: ToDaemon) -> None:
        """Take in what a learner says."""
        super().on_learner_message(message)
        self.said.clear()
        if isinstance(message, SnapshotReady):
            self._ready.put(message.contribution)
        elif isinstance(message, OfferApplied | SnapshotDenied):
            self._busy.discard(message.fragment)

    def merge(self) -> None:
        """Make versions of snapshots, for ever."""
        while True:
            try:
                contribution = self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
            index = contribution.fragment
            blocks, place = self._contribution_parts()[index]
            gradient = np.empty(blocks.values, np.float32)
            kernels.decode(blocks, bytes(place), gradient)
            self._merged.put((index, self.theta[index] - gradient, contribution.snapshot))

    def order(self) -> None:
        """Offer a version if there is one, and ask for the next snapshot."""
        if not self.theta:
            return
        with contextlib.suppress(queue.Empty):
            index, theta, snapshot = self._merged.get_nowait()
            self.commit(index, theta, snapshot)
        for step in range(self.fragments):
            index = (self._next + step) % self.fragments
            if index not in self._busy:
                self._busy.add(index)
                self._next = index + 1
                self.want(index)
                return

    def _contribution_parts(self) -> list[tuple[FragmentBlocks, Any]]:
        if not self._encoded:
            assert self.manifest is not None
            every = [FragmentBlocks(fragment.piece_sizes, self.codec) for fragment in self.manifest.fragments]
            ends = np.cumsum([blocks.encoded_bytes for blocks in every])
            area = np.frombuffer(request_area(self._memory, CONTRIBUTION_AREA, int(ends[-1])), np.uint8)
            self._encoded = list(zip(every, np.split(area, ends[:-1]), strict=True))
        return self._encoded

    def _version_parts(self) -> list[F32]:
        if not self._places:
            self._places = super()._version_parts()
        return self._places


class DaemonProcess:
    """An `OrderingDaemon` in a process of its own, as context manager; the environment names it meanwhile."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[str] | None = None
        self._orders = -1

    def __enter__(self) -> DaemonProcess:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        self._stack.enter_context(region(folder))
        command = [sys.executable, __file__, str(folder), "--fragments", str(self._fragments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin.fileno()
        if self._process.stdout.readline() != READY:
            self.__exit__()
            raise RuntimeError("the daemon's process did not start")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()

    def order(self) -> None:
        """One snapshot and one version, soon."""
        os.write(self._orders, b"o")


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fragments", type=int, required=True)
    options = parser.parse_args()
    with OrderingDaemon(options.folder, options.fragments) as daemon:
        threading.Thread(target=daemon.merge, daemon=True).start()
        sys.stdout.write(READY)
        sys.stdout.flush()
        while orders := os.read(0, 64):
            for _ in orders:
                daemon.order()


if __name__ == "__main__":
    main()
