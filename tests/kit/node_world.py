"""Three whole regions in one process: real nodes, stores, codecs and wire encodings, in-memory links, virtual time.

Nothing sleeps: the loop's clock jumps to the next timer when there is nothing to do. Executors run at once, so a seed
gives the same run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.carry import Anchor, carry_over, carry_plan, position_after
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.core.types import Contribution, FragmentPosition, RunSettings
from diloco_node.daemon.admin.status_document import NoteBook
from diloco_node.daemon.node import Node
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.work import Threads
from diloco_node.errors import LinkLost, PeerError
from diloco_node.shared_memory import COUNTERS_AREA, MemoryStore, request_area
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import AREA_BYTES, TrainedCounter
from diloco_node.transport.kernel.wire_meter import PeerTraffic
from diloco_node.wire.envelope import TransferBegin, decode_bulk, decode_control, encode_begin, encode_control
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
from tests.kit.node_kit import MANIFEST, NO_BUDGET, InlineExecutor

F32 = np.ndarray
SOME_IDENTITY = SimpleNamespace(not_after=datetime(2100, 1, 1, tzinfo=UTC))
"""Nobody checks it: links are in memory."""

DELAY_S = 0.02
RATE_BYTES_PER_S = 500_000


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
class Network:
    """Links between all regions: a delay, a rate for bulk, and cuts."""

    handlers: dict[str, MemoryTransport] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)
    transfers: int = 0
    under_way: Counter[frozenset[str]] = field(default_factory=Counter)
    broken_transfers: int = 0

    def is_up(self, region_a: str, region_b: str) -> bool:
        return frozenset((region_a, region_b)) not in self.cuts and {region_a, region_b} <= self.handlers.keys()

    def connect(self, transport: MemoryTransport) -> None:
        self.handlers[transport.region] = transport
        for peer in sorted(self.handlers):
            if peer != transport.region and self.is_up(peer, transport.region):
                self._change(peer, transport.region, is_up=True)

    def disconnect(self, region: str) -> None:
        for peer in sorted(self.handlers):
            if peer != region and self.is_up(peer, region):
                self._change(peer, region, is_up=False)
        self.handlers.pop(region, None)

    def cut(self, region_a: str, region_b: str) -> None:
        if self.is_up(region_a, region_b):
            self._change(region_a, region_b, is_up=False)
        self.cuts.add(frozenset((region_a, region_b)))

    def heal(self, region_a: str, region_b: str) -> None:
        self.cuts.discard(frozenset((region_a, region_b)))
        if self.is_up(region_a, region_b):
            self._change(region_a, region_b, is_up=True)

    def _change(self, region_a: str, region_b: str, *, is_up: bool) -> None:
        for here, there in ((region_a, region_b), (region_b, region_a)):
            if here in self.handlers:
                self.handlers[here].changed(there, is_up=is_up)


class MemoryTransport:
    """GrpcTransport over a Network."""

    network: Network

    def __init__(self, *, region: str, handler: Any, peers: dict[str, Any], **_: Any) -> None:
        self.region = region
        self.rejections: dict[tuple[str, str], int] = {}
        self.handler = handler
        self._peers = sorted(peers)
        self._turns = {peer: asyncio.Lock() for peer in peers}
        self._lost: dict[str, asyncio.Event] = {}
        self.credentials = SimpleNamespace(document=dict, revocations=frozenset())
        self.pacer = SimpleNamespace()  # of a witness in a bucket: these worlds have none

    def register(self, handler: Any, kinds: frozenset[type]) -> None:
        """Nobody measures in these worlds."""

    async def start(self) -> None:
        self.network.connect(self)

    async def stop(self) -> None:
        self.network.disconnect(self.region)

    def expel(self, regions: frozenset[str]) -> None:
        """Here links of an expelled region stay: the core ignores what it says."""

    @property
    def addresses(self) -> dict[str, str | None]:
        return dict.fromkeys(self._peers)

    def follow(self, *_: Any, **__: Any) -> None:
        """Nor do peers come and go."""

    def begin_run(self, _: tuple[str, ...]) -> None:
        """Nobody greets."""

    def changed(self, peer: str, *, is_up: bool) -> None:
        if is_up:
            self._lost[peer] = asyncio.Event()
        else:
            self._lost[peer].set()
        self.handler.link_changed(peer, is_up=is_up)

    def send(self, peer: str, message: Message) -> bool:
        is_up = self.network.is_up(self.region, peer)
        if is_up:
            frame = encode_control(message)
            asyncio.get_running_loop().call_later(DELAY_S, self._arrive, peer, frame, self._lost[peer])
        return is_up

    def _arrive(self, peer: str, frame: bytes, lost: asyncio.Event) -> None:
        # With its link goes what is on the way: nothing of a process that ended comes behind the next one's words.
        if not lost.is_set():
            self.network.handlers[peer].take(self.region, decode_control(frame))

    def take(self, peer: str, message: Message) -> None:
        self.handler.control_arrived(peer, message)

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        async with self._turns[peer]:
            if not self.network.is_up(self.region, peer):
                raise LinkLost(f"{peer}: down")
            self.network.transfers += 1
            there, loss = self.network.handlers[peer], self._lost[peer]
            begin = decode_bulk(encode_begin(self.network.transfers, header, body.nbytes))
            assert isinstance(begin, TransferBegin)
            buffer = there.handler.transfer_opened(self.region, begin.header, begin.raw_bytes)
            half = body.nbytes // 2
            pair = frozenset((self.region, peer))
            self.network.under_way[pair] += 1
            for start, stop in ((0, half), (half, body.nbytes)):
                # Read when it is sent, as gRPC does.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((stop - start) / RATE_BYTES_PER_S + DELAY_S / 2):
                        await loss.wait()
                if buffer is not None and not loss.is_set():
                    buffer[start:stop] = body[start:stop]
            self.network.under_way[pair] -= 1
            if buffer is not None:
                there.handler.transfer_closed(self.region, begin.header, buffer, is_whole=not loss.is_set())
            if loss.is_set():
                self.network.broken_transfers += 1
                raise LinkLost(f"{peer}: lost on the way")

    def traffic(self) -> dict[str, PeerTraffic]:
        return {peer: PeerTraffic(0, 0, False) for peer in self._peers}

    def budget_status(self) -> dict[str, Any]:
        return NO_BUDGET

    def quarantine_reason(self, peer: str) -> str:
        return ""

    other_models: dict[str, str] = {}  # noqa: RUF012 - nobody writes it

    def reject(self, peer: str, error: PeerError) -> None:
        raise AssertionError(f"{self.region} strikes {peer}, which is honest: {error}")

    def peer_status(self) -> dict[str, Any]:
        status = SimpleNamespace(
            state=SimpleNamespace(value="up"), address=None, error="", connections=1, certificate=None
        )
        return dict.fromkeys(self._peers, status)


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
