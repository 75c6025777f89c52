"""Three whole regions in one process: real nodes, stores, codecs and wire encodings, in-memory links, virtual time.

Nothing sleeps: the loop's clock jumps to the next timer when there is nothing to do. Executors run at once, so a seed
gives the same run again.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.carry import Anchor, carry_plan, position_after
from diloco_node.core.types import Contribution, FragmentPosition, RunSettings
from diloco_node.daemon.admin.status_document import NoteBook
from diloco_node.daemon.node import Node
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.work import Threads
from diloco_node.lab.sim.arithmetic import carry_over
from diloco_node.shared_memory import COUNTERS_AREA, MemoryStore, request_area
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import AREA_BYTES, TrainedCounter
from diloco_node.wire.learner_link import (
    CONTRIBUTION_AREA,
    LINK_PROTOCOL,
    VERSION_AREA,
    Attach,
    Done,
    InitialState,
    Leaving,
    OfferApplied,
    Report,
    RunAdvanced,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    Stop,
    ToLearner,
    VersionOffered,
    Welcome,
    version_slots,
)
from tests.kit.node_kit import MANIFEST, InlineExecutor

F32 = np.ndarray
SOME_IDENTITY = SimpleNamespace(not_after=datetime(2100, 1, 1, tzinfo=UTC))
"""Nobody checks it: links are in memory."""


class VirtualSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Where a loop would sleep, its clock jumps instead."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "nothing will ever happen again"
        self.now_s += max(timeout, 1e-9)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


@dataclass
class _Snapshot:
    values: F32
    contribution: Contribution
    version: int


class FakeLearner:
    """Steps by adding noise and follows the protocol of the learner's link, with the shared memory."""

    def __init__(self, region: Region, seed: int, step_s: float) -> None:
        self.region = region
        self.step_s = step_s
        self.paused = asyncio.Event()
        self.paused.set()
        self.incarnation = 0
        self.step = self.tokens = 0
        settings = region.settings
        self._settings = settings
        self._rng = np.random.default_rng(seed)
        self._blocks = [FragmentBlocks(fragment.piece_sizes, settings.codec_up) for fragment in MANIFEST.fragments]
        self._contribution_offsets = [0]
        for blocks in self._blocks:
            self._contribution_offsets.append(self._contribution_offsets[-1] + blocks.encoded_bytes)
        slots, values = version_slots(MANIFEST)
        area = request_area(region.memory.path, VERSION_AREA, 4 * slots * values)
        self._versions = np.frombuffer(area, np.float32).reshape(slots, values)
        self._contributions = np.frombuffer(
            request_area(region.memory.path, CONTRIBUTION_AREA, self._contribution_offsets[-1]), np.uint8
        )
        self.theta = [self._rng.standard_normal(fragment.size).astype(np.float32) for fragment in MANIFEST.fragments]
        self.base: list[F32] = [np.zeros(0, np.float32)] * len(self.theta)
        self.positions = [FragmentPosition(-1, 0, 0, 0)] * len(self.theta)
        self._snapshots: dict[int, _Snapshot] = {}
        self.snapshots = 0
        self._orders: list[ToLearner] = []
        self.told: list[tuple[int, RunAdvanced]] = []
        self._counter: TrainedCounter | None = None
        self.is_done = self.is_leaving = False

    def attach(self) -> None:
        fragments = len(self.theta)
        numbers = tuple(
            self._snapshots[f].contribution.snapshot if f in self._snapshots else -1 for f in range(fragments)
        )
        is_new = self.incarnation == 0
        self._say(
            Attach(
                LINK_PROTOCOL,
                1,
                MANIFEST.tensors,
                self.incarnation,
                "",
                self.step,
                self.tokens,
                0,
                () if is_new else tuple(self.positions),
                () if is_new else numbers,
            )
        )

    def take(self, message: ToLearner) -> None:
        if isinstance(message, Welcome):
            self.incarnation = message.incarnation
            self._orders.clear()
            if self._counter is None:
                area = request_area(self.region.memory.path, COUNTERS_AREA, AREA_BYTES)
                self._counter = TrainedCounter(Path(message.state_dir), message.incarnation, area)
            if message.wants_initial_state and min(position.base_version for position in self.positions) < 0:
                for fragment, values in enumerate(self.theta):
                    self._versions[fragment, : values.size] = values
                self._say(InitialState())
        else:
            self._orders.append(message)

    async def live(self) -> None:
        """Step until told to stop."""
        while not self.is_done:
            await asyncio.sleep(self.step_s)
            await self.paused.wait()
            if self.is_leaving:
                self._say(Leaving())
            elif min(position.base_version for position in self.positions) >= 0:
                self._train()
            orders, self._orders = self._orders, []
            for order in orders:
                self._carry_out(order)
            if self.incarnation and not self.is_done:
                self._say(Report(self.step, self.tokens, 1.0, int(self.step_s * 1e9), 0, None, None, self.step, None))

    def _train(self) -> None:
        self.step += 1
        self.tokens += 100
        assert self._counter is not None
        self._counter.write(self.step, self.tokens)
        for values in self.theta:
            values += self._rng.standard_normal(values.size).astype(np.float32) * np.float32(0.01)

    def _carry_out(self, order: ToLearner) -> None:
        match order:
            case SnapshotRequested():
                self._say(self._snapshot(order))
            case VersionOffered():
                self._say(self._apply(order))
            case RunAdvanced():
                self.told.append((self.step, order))
            case Stop():
                self.is_done = True
                if self._counter is not None:
                    self._counter.close()
                self._say(Done(self.step, self.tokens, None, None, 0, None))

    def _snapshot(self, request: SnapshotRequested) -> SnapshotReady | SnapshotDenied:
        fragment, position = request.fragment, self.positions[request.fragment]
        pending = self._snapshots.get(fragment)
        if pending is not None and pending.version == request.version:
            return SnapshotReady(pending.contribution)
        if request.base_version != position.base_version or self.step <= position.included_step:
            return SnapshotDenied(fragment, request.version, "another base, or no steps")
        first = self._contribution_offsets[fragment]
        out = self._contributions[first : self._contribution_offsets[fragment + 1]]
        norms = kernels.encode_delta(self._blocks[fragment], self.base[fragment], self.theta[fragment], out)
        self.snapshots += 1
        contribution = Contribution(
            self.region.name,
            self.incarnation,
            fragment,
            position.base_version,
            self.snapshots,
            position.included_step,
            self.step,
            self.tokens - position.included_tokens,
            tuple(norms.tolist()),
        )
        self._snapshots[fragment] = _Snapshot(self.theta[fragment].copy(), contribution, request.version)
        return SnapshotReady(contribution)

    def _apply(self, offer: VersionOffered) -> OfferApplied:
        fragment, position = offer.fragment, self.positions[offer.fragment]
        if offer.version <= position.base_version:
            return OfferApplied(fragment, position.base_version, position, 1.0, 0)
        new = self._versions[offer.slot, : MANIFEST.fragments[fragment].size].copy()
        pending, snapshot = self._snapshots.pop(fragment, None), None
        if offer.included_snapshot >= 0:
            snapshot = pending
            assert snapshot is not None, f"{self.region.name}: {offer} names a snapshot that is resolved"
            assert snapshot.contribution.snapshot == offer.included_snapshot, (offer, snapshot)
        if position.base_version < 0:
            self.theta[fragment] = new.copy()
        else:
            plan = carry_plan(
                self._settings.carry,
                is_included=snapshot is not None,
                versions_missed=offer.version - (position.base_version if snapshot is None else snapshot.version),
                steps_since_inclusion=self.step
                - (position.included_step if snapshot is None else snapshot.contribution.step_to),
                carry_steps_limit=self._settings.carry_steps_limit,
            )
            anchors = {Anchor.BASE: self.base[fragment], Anchor.NONE: None}
            anchor = (
                snapshot.values if plan.anchor is Anchor.SNAPSHOT and snapshot is not None else anchors.get(plan.anchor)
            )
            self.theta[fragment] = carry_over(plan, new=new, theta=self.theta[fragment], anchor=anchor)
        self.base[fragment] = new
        self.positions[fragment] = position_after(
            position,
            inclusion=None
            if snapshot is None
            else (snapshot.contribution.step_to, position.included_tokens + snapshot.contribution.tokens),
            step=self.step,
            tokens=self.tokens,
            version=offer.version,
            mode=self._settings.carry,
        )
        return OfferApplied(fragment, offer.version, self.positions[fragment], 1.0, 0)

    def _say(self, message: Any) -> None:
        self.region.node.reception.on_message(message)


def _now_ns() -> int:
    return int(asyncio.get_running_loop().time() * 1e9)


class Region:
    """A node, and as much of `Daemon` around it as it needs."""

    def __init__(
        self,
        name: str,
        names: tuple[str, ...],
        folder: Path,
        settings: RunSettings,
        seed: int,
        *,
        is_archive: bool = False,
        init: Path | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.settings = settings
        folder.mkdir(exist_ok=True)
        self.memory = MemoryStore(folder / "m.sock")
        self.spec = NodeSpec(
            region=name,
            run_id="run",
            regions=names,
            listen_host="",
            listen_port=0,
            peers={peer: None for peer in names if peer != name},
            address="127.0.0.1:7400",
            state_dir=folder,
            identity_dir=folder,
            admin_port=0,
            learner_socket=folder / "l.sock",
            supervisor_socket=self.memory.path,
            settings=settings,
            settings_digest="settings",
            seed=seed,
            payload_archive=is_archive,
            init=None if init is None else str(init),
        )
        self.notes = NoteBook(name, _now_ns)
        self.errors: list[BaseException] = []
        self.has_finished = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.store = RegionStore(folder, is_archive=is_archive)
        self.node = self._build()
        self.learner = FakeLearner(self, seed, 0.05)

    def _build(self) -> Node:
        threads = InlineExecutor()
        runtime = NodeRuntime(
            spec=self.spec,
            store=self.store,
            threads=Threads(threads, threads, threads, threads),
            learner_server=SimpleNamespace(send=self._send, refuse=self._refuse),  # type: ignore[arg-type]
            notes=self.notes,
            spawn=self.spawn,
            now_ns=_now_ns,
            end=self.end,
        )
        return Node(runtime, MANIFEST, self.store.load(len(MANIFEST.fragments)))

    async def start(self) -> None:
        await self.node.start()
        self.learner.attach()
        self.spawn(self.learner.live(), "learner")

    async def stop(self) -> None:
        await self.node.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.store.close()
        self.memory.close()

    async def stop_daemon(self) -> None:
        """Only the learner goes on, and what is on disk stays."""
        await self.node.stop()
        tasks = [task for task in self._tasks if task.get_name() != "learner"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    async def start_daemon(self, *, is_serving: bool = False) -> None:
        """Another daemon, from what the disk holds; the learner attaches to it, unless it only serves others."""
        self.store = RegionStore(self.folder, is_archive=self.spec.payload_archive)
        self.spec, self.has_finished = replace(self.spec, is_serving=is_serving), False
        self.node = self._build()
        await self.node.start()
        if not is_serving:
            self.learner.attach()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.end(task.exception())

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self.has_finished = True
        else:
            self.errors.append(error)

    def _send(self, message: ToLearner) -> bool:
        asyncio.get_running_loop().call_soon(self.learner.take, message)
        return True

    def _refuse(self, reason: str, *, is_final: bool) -> None:
        raise AssertionError(f"{self.name} refuses its learner: {reason} ({is_final})")
