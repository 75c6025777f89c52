"""Fakes for tests of the shell: executors without threads, a transport that records, tasks that a test can wait for."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.digest import fragment_digest
from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.core.types import Contribution, MergeRule, RunSettings
from diloco_node.daemon.parameters import Parameters
from diloco_node.errors import LinkLost, PeerError
from diloco_node.storage.store import RegionStore

SETTINGS = RunSettings(fragments=2, sync_every=4, checkpoint_versions=2, payload_versions=3)
MANIFEST: Manifest = build_manifest(
    [TensorSpec("a.weight", (70, 90)), TensorSpec("b.embed", (41, 100), MergeRule.AVG), TensorSpec("c.bias", (499,))], 2
)


class InlineExecutor(Executor):
    """Runs each call at once, in the caller's thread: the same order in every run."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as the real ones do
            future.set_exception(error)
        return future


class HeldExecutor(Executor):
    """Keeps calls until the test lets them go, oldest first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    async def let_go(self, count: int = 1) -> None:
        """Carry out the oldest calls, and let everything follow that they were waited for by."""
        for _ in range(count):
            future, call = self.calls.pop(0)
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            await settle()


async def settle(turns: int = 20) -> None:
    """Let everything happen on the loop that can happen without waiting."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Tasks:
    """`spawn` of the daemon, and the errors that would have ended it."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self.errors.append(error)

    async def finish(self) -> None:
        """Wait for all of them, those that they start too."""
        async with asyncio.timeout(120):
            while self.running:
                await asyncio.wait(set(self.running))
                await asyncio.sleep(0)


@dataclass
class FakeTransport:
    """Records what is sent; transfers end when the test says so, or at once.

    Attributes:
        sent: control messages. transfers: (peer, header, bytes) as they end; the bytes are read
            when the transfer ends, as those of a slow link are.
        is_slow: transfers wait for `deliver`. is_down: they fail. rejected: peers that did wrong, each time.
    """

    is_slow: bool = False
    is_down: bool = False
    sent: list[tuple[str, Message]] = field(default_factory=list)
    transfers: list[tuple[str, BulkHeader, bytes]] = field(default_factory=list)
    waiting: list[tuple[str, BulkHeader, asyncio.Event]] = field(default_factory=list)
    cancelled: list[tuple[str, BulkHeader]] = field(default_factory=list)
    rejected: list[tuple[str, PeerError]] = field(default_factory=list)

    def send(self, peer: str, message: Message) -> bool:
        """Record."""
        if self.is_down:
            return False
        self.sent.append((peer, message))
        return True

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """Record when it is over."""
        if self.is_down:
            raise LinkLost(f"{peer}: down")
        if self.is_slow:
            gate = asyncio.Event()
            self.waiting.append((peer, header, gate))
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append((peer, header))
                raise
        self.transfers.append((peer, header, bytes(body)))

    def reject(self, peer: str, error: PeerError) -> None:
        """Record."""
        self.rejected.append((peer, error))

    async def deliver(self) -> None:
        """Let all waiting transfers end."""
        waiting, self.waiting = self.waiting, []
        for _, _, gate in waiting:
            gate.set()
        await settle()


def theta_of(fragment: int, seed: int = 1) -> np.ndarray:
    """Parameters of a fragment, shape (n,), float32."""
    rng = np.random.default_rng(1000 * seed + fragment)
    return rng.standard_normal(MANIFEST.fragments[fragment].size).astype(np.float32)


async def make_parameters(
    folder: Path, pool: Executor | None = None, settings: RunSettings = SETTINGS
) -> tuple[Parameters, RegionStore]:
    """Parameters at version 0 with its store."""
    store = RegionStore(folder)
    store.load(len(MANIFEST.fragments))
    parameters = Parameters(MANIFEST, settings, store, InlineExecutor())
    for fragment in range(len(MANIFEST.fragments)):
        theta = theta_of(fragment)
        store.store_state(fragment, 0, theta, np.zeros_like(theta), fragment_digest(theta, np.zeros_like(theta)))
        await parameters.adopt(fragment, 0)
    if pool is not None:
        parameters._pool = parameters._background = pool
    return parameters, store


def contribution_of(
    learner: str, fragment: int = 0, *, base: int = 0, incarnation: int = 1, snapshot: int = 1
) -> Contribution:
    """The name of a contribution."""
    norms = (1.0,) * len(MANIFEST.fragments[fragment].pieces)
    return Contribution(learner, incarnation, fragment, base, snapshot, 0, 4, 400, norms)


def encoded(blocks: Any, values: np.ndarray) -> np.ndarray:
    """A whole fragment, encoded."""
    out = np.zeros(blocks.encoded_bytes, np.uint8)
    kernels.encode(blocks, values, out)
    return out


NO_BUDGET: dict[str, Any] = {
    "egress_bytes_per_s": None,
    "ingress_bytes_per_s": None,
    "allowed_bytes": 0,
    "used_bytes": 0,
    "share_used": None,
    "peers": {},
}
"""The budget part of a status without any limit."""
