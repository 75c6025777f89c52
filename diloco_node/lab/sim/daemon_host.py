"""A region of the fake world whose daemon is the real one: pump, effects, fetches and parameters of `daemon`.

Its surroundings are fakes: the event loop (`lab.sim.loop`), the folder (`lab.sim.fake_store`), the links
(`lab.sim.fake_transport`) and the learner, which speaks `wire.learner_link` here.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import fragment_digest
from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.region import RegionCore
from diloco_node.daemon.effects.effects import Effects, build_effects
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.pump import Pump
from diloco_node.daemon.work import FILE_THREADS, POOL_THREADS, Threads
from diloco_node.errors import DilocoError, PeerError
from diloco_node.lab.sim.fake_learner import FakeLearner, FakeSnapshot, Offer
from diloco_node.lab.sim.fake_store import DiskTime, FakeStore, FolderDisk
from diloco_node.lab.sim.fake_transport import FakeTransport
from diloco_node.lab.sim.host import RUN_ID, Host
from diloco_node.lab.sim.loop import VirtualLoop, VirtualThreads
from diloco_node.lab.sim.world import LOCAL_NS, MS, SECOND, Life
from diloco_node.numeric import F32
from diloco_node.wire import learner_link
from diloco_node.wire.envelope import decode_control

CALL_NS_MAX = 2 * MS
BACKGROUND_NS_MAX = 20 * MS
RESTART_NS = SECOND
"""A daemon that ends by itself is started again by its supervisor."""


class LinkedLearner(FakeLearner):
    """A learner that takes versions out of the version area and says so."""

    def _apply(self, offer: Offer) -> None:
        port = cast(DaemonHost, self._port)
        port.check_lent()
        before = self.parts[offer.fragment].position
        super()._apply(replace(offer, theta=offer.theta.copy()))
        position = self.parts[offer.fragment].position
        slot = port.hold_base(offer.fragment, is_new=position != before)
        port.say(learner_link.OfferApplied(offer.fragment, position.base_version, position, 1.0, 0, slot))


class ObservedCore:
    """A region core, and who watches it: the pump has no place for them."""

    def __init__(self, core: Any, host: DaemonHost) -> None:
        self.core = core
        self._host = host

    @property
    def wake_at_ns(self) -> int:
        """The core's."""
        wake_at_ns: int = self.core.wake_at_ns
        return wake_at_ns

    def handle(self, event: ev.Event, *, now_ns: int) -> Iterator[ev.Effect]:
        """The core's effects, each shown to the observer before it is performed."""
        host = self._host
        host.world.events += 1
        if isinstance(event, ev.TimerFired):
            host.count_wake()
        host.observer.event_given(host, event)
        for effect in self.core.handle(event, now_ns=now_ns):
            host.observer.effect_seen(host, effect)
            yield effect
        host.settle()


class RealPlane:
    """View of the daemon's parameters for checkers."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    @property
    def versions(self) -> list[int]:
        """Per fragment the version in memory."""
        return self._parameters.versions

    def digest(self, fragment: int) -> bytes:
        """Digest of parameters and momentum in memory."""
        return fragment_digest(self._parameters.theta[fragment], self._parameters.momentum[fragment])


class DaemonHost(Host):
    """A region with the real effects.

    Attributes:
        loop, hands, transport: of the daemon's current life.
        spoil_effects: plants a fault into the effects of each daemon.
        break_chance: of each transfer, to break half-way. drop_chance: of each control message, to find the queue full.
    """

    learner_type = LinkedLearner
    loop: VirtualLoop
    hands: Effects
    transport: FakeTransport

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self.disk = FolderDisk(id=self.disk.id)
        self.break_chance = self.drop_chance = 0.0
        self.spoil_effects: Callable[[Effects], None] = lambda _: None
        # By fragment the slot of what the learner was offered, and of its base, and what is to be there.
        self._lent: dict[int, tuple[int, bytes]] = {}
        self._bases: dict[int, tuple[int, bytes]] = {}
        manifest, settings = self.setup.manifest, self.setup.settings
        up = [FragmentBlocks(fragment.piece_sizes, settings.codec_up) for fragment in manifest.fragments]
        self._contribution_offsets = list(accumulate((blocks.encoded_bytes for blocks in up), initial=0))
        self._memory: dict[str, mmap.mmap] = {}
        slots, values = learner_link.version_slots(manifest)
        area = self._area(learner_link.VERSION_AREA, 4 * slots * values)
        self._versions = np.frombuffer(area, np.float32).reshape(slots, values)
        self._contributions = np.frombuffer(
            self._area(learner_link.CONTRIBUTION_AREA, self._contribution_offsets[-1]), np.uint8
        )
        self._unwelcome: FakeLearner | None = None
        self._pump: Pump
        self._proxy: LearnerProxy

    @property
    def folder_disk(self) -> FolderDisk:
        """The disk, with the faults that it can have."""
        # Never kept beside `disk`, which checkers look at: an empty one may take its place.
        assert isinstance(self.disk, FolderDisk), self.disk
        return self.disk

    def _area(self, name: str, size_bytes: int) -> mmap.mmap:
        """Memory of the supervisor: it outlives daemons and learners."""
        if name not in self._memory:
            self._memory[name] = mmap.mmap(-1, size_bytes)
        return self._memory[name]

    def stall(self, for_ns: int) -> None:
        """See Host: here it is the daemon's own loop."""
        if self._life is not None:
            self.loop.stall(for_ns)

    def start_daemon(self) -> None:
        """Start a daemon from what the disk holds."""
        if self._life is not None or self.is_absent:
            return
        life = self._begin_life()
        self._unwelcome = None
        manifest, settings = self.setup.manifest, self.setup.settings
        time = DiskTime()
        # What of a loop the daemon does not use is not there.
        self.loop = VirtualLoop(self.world, life, partial(self._end_broken, life))  # type: ignore[abstract]
        store: Any = FakeStore(self.folder_disk, time, self.fsync_ns, self.after)
        store.lies_ns = SECOND // 2 if self.fsync_is_late else 0

        def threads(count: int, ns_max: int) -> VirtualThreads:
            return VirtualThreads(self.world, life, self.loop, time, count=count, ns_max=ns_max)

        pools = Threads(
            pool=threads(POOL_THREADS, CALL_NS_MAX),
            files=threads(FILE_THREADS, CALL_NS_MAX),
            background=threads(1, BACKGROUND_NS_MAX),
            disk=threads(1, MS // 10),
        )
        recovery = store.load(len(self.setup.layouts))
        parameters = Parameters(manifest, settings, store, pools.pool, files=pools.files, background=pools.background)
        self.plane = cast(Any, RealPlane(parameters))
        self.core = self.make_core(self.name, self.setup, recovery, self.world.rng.getrandbits(63), self.world.now_ns)
        self.transport = FakeTransport(self, life, self._lives)
        self._proxy = LearnerProxy(
            region=self.name,
            manifest=manifest,
            settings=settings,
            parameters=parameters,
            memory=self._area,
            send=partial(self._to_learner, life),
            post=self._post,
            spawn=self._spawn,
            now_ns=self._now_ns,
            save_counters=self._save_counters,
            store_initial_state=self._store_theta_0,
            note=self._noted,
        )
        self.hands = build_effects(
            region=self.name,
            settings=settings,
            init=None,
            parameters=parameters,
            store=store,
            transport=self.transport,
            learner=self._proxy,
            threads=pools,
            spawn=self._spawn,
            post=self._post,
            note=self._noted,
            write_final_file=lambda _: store.write_final(partial(setattr, self, "has_final", True)),
            save_counter_file=lambda incarnation, _: store.save_counters(incarnation, self._counted(incarnation)),
        )
        self.spoil_effects(self.hands)
        core = cast(RegionCore, ObservedCore(self.core, self))
        self._pump = Pump(core, self.hands.perform, self._now_ns, on_fault=partial(self._end_broken, life))
        self.world.note(self.name, f"daemon {self._lives} started", b"start")
        self.observer.daemon_started(self)
        self.network.daemon_changed(self.name)
        self.loop.enter(self._pump.start)
        self._attach_learner()

    def kill_daemon(self, *, is_power_cut: bool = False) -> None:
        """See Host."""
        loop = self.loop if self._life is not None else None
        super().kill_daemon(is_power_cut=is_power_cut)
        if loop is not None:
            loop.abandon()

    def stop_daemon(self) -> None:
        """See Host."""
        if self._life is not None:
            self.world.note(self.name, "daemon is asked to stop", b"stop")
            self.loop.enter(self._drain)
            self.after(self.world.draw_ns(50 * MS, 600 * MS), self.kill_daemon)

    def _drain(self) -> None:
        for effect in self.core.hand_over(now_ns=self.world.now_ns):
            self.observer.effect_seen(self, effect)
            self.hands.perform(effect)

    def _end_broken(self, life: Life, error: BaseException | None) -> None:
        """The daemon ends with this; its supervisor starts another."""
        if life.is_over or life is not self._life:
            return
        if not isinstance(error, DilocoError) or isinstance(error, PeerError):
            self.complain(f"the daemon broke: {error!r}")
        self.world.note(self.name, f"the daemon ends: {error}", b"broke")
        self.world.after(0, life, self._end)

    def _end(self) -> None:
        self.kill_daemon()
        self.world.after(RESTART_NS, None, self.start_daemon)

    def _now_ns(self) -> int:
        return self.world.now_ns

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(work, name=name)
        task.add_done_callback(partial(self._task_done, self._life))
        return task

    def _task_done(self, life: Life | None, task: asyncio.Task[None]) -> None:
        if life is not None and not task.cancelled() and task.exception() is not None:
            self._end_broken(life, task.exception())

    def post(self, event: ev.Event) -> None:
        """A fact from outside the daemon."""
        if self._life is not None:
            self.loop.enter(self._post, event)

    def _post(self, event: ev.Event) -> None:
        if isinstance(event, ev.ReductionDone):
            self.world.note(self.name, event, event.digest)
        elif isinstance(event, ev.DigestComputed):
            self.world.note(self.name, f"version {event.fragment}/{event.version}", event.digest)
        self._pump.post(event)
        if self._unwelcome is not None and self.core.may_allot_incarnation:
            learner, self._unwelcome = self._unwelcome, None
            self._welcome(learner)

    def frame_arrived(self, peer: str, frame: bytes) -> None:
        """An encoded control message."""
        message = decode_control(frame)
        self.world.note(self.name, message, frame)
        assert isinstance(message, msg.Message), "only the cores speak here"
        self.loop.enter(self.hands.control_arrived, peer, message)

    def transfer_begun(self, peer: str, number: int, frame: bytes) -> None:
        """A transfer begins to come."""
        self.loop.enter(self.transport.begun, peer, number, frame)

    def transfer_ended(self, peer: str, number: int, body: bytes | None) -> None:
        """It is whole, or broke off."""
        self.loop.enter(self.transport.ended, peer, number, body)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """The connection to a peer came up or went down."""
        self.world.note(self.name, f"link to {peer} {'up' if is_up else 'down'}", b"link%d" % is_up)
        self.loop.enter(partial(self.transport.link_changed, peer, is_up=is_up))

    def _noted(self, note: ev.Note) -> None:
        self.world.note(self.name, note, note.kind.encode())

    def start_learner(self) -> None:
        """A new process, which is told by the daemon which incarnation it is."""
        if self.learner is not None or self.is_absent:
            return
        self.learner = self.make_learner(learner_link.NEW_PROCESS)
        self.world.note(self.name, "learner started", b"learner")
        self._attach_learner()

    def persist_counters(self, incarnation: int, steps: int, tokens: int, on_done: Callable[[], None] | None) -> None:
        """See Host. A process that was not welcomed has no counters."""
        if incarnation != learner_link.NEW_PROCESS:
            super().persist_counters(incarnation, steps, tokens, on_done)

    async def _save_counters(self, incarnation: int) -> None:
        await self.hands.disk.save_counters(incarnation, self._proxy.counters)

    def _counted(self, incarnation: int) -> tuple[int, int]:
        """Steps and tokens, as the memory that the learner writes at each step says them."""
        learner = self.learner
        is_living = learner is not None and learner.incarnation == incarnation
        return (learner.step, learner.tokens) if learner is not None and is_living else (0, 0)

    def _attach_learner(self) -> None:
        if self.learner is not None and self._life is not None:
            self.after(LOCAL_NS, self.loop.enter, self._welcome, self.learner)

    def _welcome(self, learner: FakeLearner) -> None:
        """As `daemon.learner.reception` welcomes a learner, with counters that are in memory."""
        if learner is not self.learner:
            return
        if learner.incarnation == learner_link.NEW_PROCESS:
            if not self.core.may_allot_incarnation:
                self._unwelcome = learner
                return
            learner.incarnation = self.core.incarnation_rule(max(self.disk.counters, default=0))
            self.disk.counters[learner.incarnation] = (0, 0)
            self._bases.clear()
        self._lent.clear()
        current, status = learner.incarnation, learner.status()
        before = self.trained_before(current)
        is_placed = min(position.base_version for position in status.positions) >= 0
        writes_initial = self.core.wants_initial_state and not is_placed
        attach = learner_link.Attach(
            learner_link.LINK_PROTOCOL,
            1,
            self.setup.manifest.tensors,
            current,
            RUN_ID,
            status.step,
            status.tokens,
            status.step_time_ns,
            status.positions,
            learner.snapshot_numbers(),
            slots=tuple(
                self._bases.get(fragment, (learner_link.NO_SLOT, b""))[0] for fragment in range(len(status.positions))
            ),
        )
        self._proxy.on_attach(attach, current, before, writes_initial=writes_initial)
        if writes_initial:
            self.world.after(LOCAL_NS, learner.life, self._write_initial, self._life)

    def _write_initial(self, life: Life) -> None:
        """The learner lays its own parameters into the version area."""
        if not life.is_over:
            for fragment, theta in enumerate(self.theta_0):
                self._place(fragment, fragment)[:] = theta
            self.say(learner_link.InitialState())

    def _store_theta_0(self, area: VersionArea, generation: int) -> Coroutine[Any, Any, None]:
        return self.hands.disk.store_initial_state(area, generation)

    def _store_initial(self) -> None:
        """The daemon asks for it: see `_welcome`."""

    def say(self, message: learner_link.ToDaemon) -> None:
        """The learner speaks."""
        if self._life is not None:
            self.after(LOCAL_NS, self.loop.enter, self._deliver_message, message)

    def _deliver_message(self, message: learner_link.ToDaemon) -> None:
        self.world.note(self.name, message, type(message).__name__.encode())
        if isinstance(message, learner_link.SnapshotReady) and self.has_refused(ev.SnapshotTaken(message.contribution)):
            return
        self._proxy.on_message(message)

    def tell_daemon(self, event: ev.Event) -> None:
        """Carry the fake learner's words to its daemon, in the messages of the link."""
        match event:
            case ev.LearnerReported(status=status) if status.incarnation == learner_link.NEW_PROCESS:
                return
            case ev.LearnerReported(status=status) if status.finished:
                self.say(learner_link.Done(status.step, status.tokens, None, None, 0, None))
            case ev.LearnerReported(status=status):
                step = status.step
                self.say(learner_link.Report(step, status.tokens, None, status.step_time_ns, 0, None, None, step, None))
            case ev.SnapshotTaken():
                self.say(learner_link.SnapshotReady(event.contribution))
            case ev.SnapshotRefused():
                self.say(learner_link.SnapshotDenied(event.fragment, event.version, event.reason))
            case ev.LearnerDetached():
                if self._life is not None:
                    self.after(LOCAL_NS, self.loop.enter, self._proxy.on_detach)
            case _:
                raise AssertionError(event)

    def offer_contribution(self, snapshot: FakeSnapshot) -> None:
        """The learner encodes its contribution into the contribution area."""
        fragment = snapshot.contribution.fragment
        start, stop = self._contribution_offsets[fragment : fragment + 2]
        self._contributions[start:stop] = np.frombuffer(snapshot.encoded, np.uint8)
        super().offer_contribution(snapshot)

    def _to_learner(self, life: Life, message: learner_link.ToLearner) -> bool:
        if self.learner is None:
            return False
        if isinstance(message, learner_link.VersionOffered):
            self._lent[message.fragment] = (message.slot, self._place(message.fragment, message.slot).tobytes())
        self.world.after(LOCAL_NS, self.learner.life, self._learner_hears, self.learner, life, message)
        return True

    def check_lent(self) -> None:
        """Nobody writes over what the learner was offered and has not taken, nor over its base."""
        for lent in (self._lent, self._bases):
            for fragment, (slot, expected) in lent.items():
                if self._place(fragment, slot).tobytes() != expected:
                    self.complain(
                        f"version area: {fragment} in slot {slot} was written over while the learner reads it"
                    )

    def hold_base(self, fragment: int, *, is_new: bool) -> int:
        """The slot of the learner's base, now that it has taken what it was offered, or has it already."""
        lent = self._lent.pop(fragment, None)
        if is_new and lent is not None:
            self._bases[fragment] = lent
        return self._bases[fragment][0] if fragment in self._bases else learner_link.NO_SLOT

    def _place(self, fragment: int, slot: int) -> F32:
        return self._versions[slot, : self.setup.manifest.fragments[fragment].size]

    def _learner_hears(self, learner: FakeLearner, life: Life, message: learner_link.ToLearner) -> None:
        if life.is_over:
            return
        match message:
            case learner_link.SnapshotRequested():
                learner.ask_snapshot(ev.TakeSnapshot(message.fragment, message.version, message.base_version))
            case learner_link.VersionOffered():
                place = self._place(message.fragment, message.slot)
                learner.offer(Offer(message.fragment, message.version, message.included_snapshot, place))
            case learner_link.Stop():
                learner.stop(message.reason)
            case _:
                raise AssertionError(message)
