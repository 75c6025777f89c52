"""The parts of a region once its model is known: core, pump, effects, links; and how what comes in finds its way."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

import structlog

from diloco_node.core.events import (
    BudgetChanged,
    Event,
    FinalWritten,
    FinishAsked,
    InitialStateStored,
    LinkChanged,
    MessageArrived,
    Note,
)
from diloco_node.core.measuring import MeasuringMessage, Probe
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.messages import BulkHeader, Message, PayloadWanted, Refused, StateWanted
from diloco_node.core.region import RegionCore
from diloco_node.core.types import NO_LIMITS, RateLimits, Recovered
from diloco_node.core.view import RegionView
from diloco_node.daemon.admin.status import region_status
from diloco_node.daemon.budget_watch import LOOK_S, BudgetWatch
from diloco_node.daemon.effects import STORAGE_RETRY_S, Effects
from diloco_node.daemon.fetch import Fetcher
from diloco_node.daemon.initial import InitialStates, read_initial
from diloco_node.daemon.learner.proxy import LearnerSide
from diloco_node.daemon.linger import Linger
from diloco_node.daemon.manifest_file import describe_difference
from diloco_node.daemon.parameters import Replica
from diloco_node.daemon.pump import Pump
from diloco_node.errors import PeerError, ProtocolViolation, StorageError
from diloco_node.measure.command import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.memory import allot_incarnation, read_trained
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore
from diloco_node.transport.certs import load_identity
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire.learner_link import (
    NEW_PROCESS,
    Applied,
    Attach,
    Done,
    InitialState,
    Report,
    SnapshotDenied,
    SnapshotReady,
    ToDaemon,
    Welcome,
    merge_rules,
)

if TYPE_CHECKING:
    from diloco_node.daemon.daemon import Daemon

DRAIN_S: Final = 5.0
"""What a stopping leader waits for another region to take over."""

LINGER_POLL_S: Final = 0.1

log = structlog.get_logger()


class Node:
    """One region, assembled. All methods run on the event loop."""

    def __init__(self, daemon: Daemon, manifest: Manifest, store: RegionStore, recovered: Recovered) -> None:
        spec = daemon.spec
        self._daemon = daemon
        self._spec = spec
        self._manifest = manifest
        self.replica = Replica(manifest, spec.settings, store, daemon.pool, daemon.background)
        self.core = RegionCore(
            region=spec.region,
            regions=spec.regions,
            run_id=spec.run_id,
            settings_digest=spec.settings_digest,
            manifest=manifest,
            settings=spec.settings,
            recovered=recovered,
            seed=spec.seed,
            now_ns=daemon.clock.now_ns(),
        )
        self.learner = LearnerSide(
            manifest=manifest,
            settings=spec.settings,
            replica=self.replica,
            memory_socket=spec.supervisor_socket,
            send=daemon.learner_server.send,
            post=self._post,
            spawn=daemon.spawn,
            now_ns=daemon.clock.now_ns,
        )
        self.transport = GrpcTransport(
            region=spec.region,
            run_id=spec.run_id,
            epoch=0,
            settings_digest=spec.settings_digest,
            manifest_digest=manifest.digest,
            identity=load_identity(spec.identity_dir, region=spec.region, run_id=spec.run_id),
            listen=(spec.listen_host, spec.listen_port),
            peers=spec.peers,
            handler=self,
            executor=daemon.pool,
            is_advertised=spec.is_advertised,
            seed=spec.seed,
            budget=daemon.budget,
            superseded=daemon.superseded,
            measure_port=spec.measure_port,
        )
        self._measuring = Measuring(
            region=spec.region,
            peers=tuple(sorted(spec.peers)),
            transport=self.transport,
            spawn=daemon.spawn,
            executor=daemon.background,
            now_ns=daemon.clock.now_ns,
        )
        self.measure = MeasureCommand(self._measuring, self._limit_to).run
        self._initial = InitialStates(len(manifest.fragments), store, daemon.pool)
        self._initial_turn = asyncio.Lock()
        fetcher = Fetcher(
            replica=self.replica,
            store=store,
            transport=self.transport,
            pool=daemon.pool,
            post=self._post,
            spawn=daemon.spawn,
            initial=self._initial,
        )
        self._fetcher = fetcher
        self.effects = Effects(
            region=spec.region,
            settings=spec.settings,
            state_dir=spec.state_dir,
            replica=self.replica,
            store=store,
            learner=self.learner,
            transport=self.transport,
            fetcher=fetcher,
            pool=daemon.pool,
            disk=daemon.disk,
            post=self._post,
            spawn=daemon.spawn,
            note=daemon.note,
        )
        self._pump = Pump(self.core, self.effects.perform, daemon.clock, on_fault=daemon.broke)
        self._budget_watch = BudgetWatch(manifest, spec.settings)
        self._told_budget = NO_LIMITS
        self._is_lingering = False
        self._no_longer_leader = asyncio.Event()
        self._learner_pid = 0
        self.rounds_in_flight_max = 0

    async def start(self) -> None:
        """Bind the port between regions and start the core's clockwork.

        Raises:
            BindError, IdentityError, StorageError: as named.
        """
        await self.transport.start()
        self._pump.start()
        self._tell_budget()
        self._daemon.spawn(self._watch_budget(), "budget watch")

    async def drain(self) -> None:
        """Hand leadership over if this region has it, and give the others a moment to elect another."""
        if not self.core.is_leader:
            return
        self._no_longer_leader.clear()
        for effect in self.core.hand_over(now_ns=self._daemon.clock.now_ns()):
            self.effects.perform(effect)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._no_longer_leader.wait()

    async def stop(self) -> None:
        """Close the links, drop the timer."""
        self._pump.close()
        await self.transport.stop()
        self.learner.close()

    def _post(self, event: Event) -> None:
        self._pump.post(event)
        self.rounds_in_flight_max = max(self.rounds_in_flight_max, len(self.core.leader.rounds))
        if not self.core.is_leader:
            self._no_longer_leader.set()
        if isinstance(event, FinalWritten) and not self._is_lingering:
            self._is_lingering = True
            self._daemon.spawn(self._linger(), "linger")

    def _tell_budget(self) -> None:
        """The core tells the others what this region may send and receive: stripes are cut by that."""
        budget = self.transport.budget_status()
        limits = RateLimits(budget["egress_bytes_per_s"], budget["ingress_bytes_per_s"])
        if limits != self._told_budget:
            self._told_budget = limits
            self._post(BudgetChanged(limits))

    async def _watch_budget(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tell_budget()
            facts = (self.view(), self.transport.budget_status())
            look = self._budget_watch.look
            note = await asyncio.get_running_loop().run_in_executor(self._daemon.background, look, *facts)
            if note is not None:
                self._daemon.note(note)

    async def _linger(self) -> None:
        """Stay until the learner has said its last figures and no other region needs this one."""
        loop = asyncio.get_running_loop()
        linger = Linger(self.view().applied_index, now_s=loop.time())
        while True:
            if linger.is_over(
                [peer.applied_index for peer in self.view().peers],
                learner_is_done=self.learner.status is None or self.learner.done is not None,
                serves=self._fetcher.serves,
                now_s=loop.time(),
            ):
                break
            await asyncio.sleep(LINGER_POLL_S)
        # The last heartbeat that says so must have left before the links go.
        await asyncio.sleep(2 * self._spec.settings.heartbeat_ns / 1e9)
        self._daemon.finished()

    def view(self) -> RegionView:
        """What the core knows now."""
        return self.core.view()

    # ---- what the transport hands in ---------------------------------------------------------------------------------

    def control_arrived(self, peer: str, message: Message) -> None:
        """Wants are the shell's business, everything else the core's."""
        match message:
            case PayloadWanted() | StateWanted():
                self._fetcher.wanted(peer, message)
            case Refused():
                self._fetcher.refused(peer, message)
            case _ if isinstance(message, MeasuringMessage):
                self._measuring.heard(peer, message)
            case _:
                try:
                    self._post(MessageArrived(peer, message))
                except PeerError as error:
                    self._daemon.note(Note("peer", f"{peer}: {error}", is_alarm=True))

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Both connections to a peer are there, or one is gone."""
        # The core first: it must not ask this peer again for what has just failed.
        self._post(LinkChanged(peer, is_up))
        if not is_up:
            self._fetcher.peer_lost(peer)
            self._measuring.link_lost(peer)

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        """See ports.TransportHandler."""
        if isinstance(header, Probe):
            return self._measuring.ends.transfer_opened(peer, header, raw_bytes)
        return self.effects.transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """See ports.TransportHandler."""
        if isinstance(header, Probe):
            self._measuring.ends.transfer_closed(peer, header, buffer.nbytes, is_whole=is_whole)
            return
        self.effects.transfer_closed(peer, header, buffer, is_whole=is_whole)

    # ---- what the learner says ---------------------------------------------------------------------------------------

    @property
    def known_incarnation(self) -> int:
        """The newest life of the own learner that the ledger knows of; -1 if none."""
        return self.core.history.incarnation(self._spec.region)

    def objection(self, attach: Attach) -> str:
        """Why a process with this model can't be this region's learner; empty if it can."""
        difference = describe_difference(self._manifest, merge_rules(attach.tensors, self._spec.settings.merge))
        if difference:
            return f"this is not the run's model: {difference}"
        try:
            attach.in_fragments(len(self._manifest.fragments))
        except ProtocolViolation as error:
            return str(error)
        return ""

    def learner_attached(self, attach: Attach) -> None:
        """Welcome it, or say why not."""
        server = self._daemon.learner_server
        objection = self.objection(attach)  # again: the node may not have been there when it was let in
        if objection:
            server.refuse(objection, is_final=True)
            return
        attach = attach.in_fragments(len(self._manifest.fragments))
        try:
            incarnation = self._incarnation(attach)
            before = tuple(life for life in read_trained(self._spec.state_dir) if life.incarnation < incarnation)
        except StorageError as error:
            self._daemon.note(Note("disk", f"no counters for a new learner: {error}", is_alarm=True))
            server.refuse(str(error), is_final=False)
            return
        # A learner in mid-run has nothing to write, and would leave the inbox to itself for ever.
        is_placed = min(position.base_version for position in attach.positions) >= 0
        wants_initial_state = self.core.wants_initial_state and not is_placed
        settings = self._spec.settings
        server.send(
            Welcome(
                region=self._spec.region,
                region_index=self._spec.regions.index(self._spec.region),
                regions=self._spec.regions,
                incarnation=incarnation,
                run_id=self._spec.run_id,
                fragments=settings.fragments,
                sync_every=settings.sync_every,
                merge=settings.merge,
                codec_up=settings.codec_up,
                carry=settings.carry,
                carry_steps_limit=settings.carry_steps_limit,
                global_step=sum(life.steps for life in before),
                manifest_digest=self._manifest.digest,
                wants_initial_state=wants_initial_state,
                state_dir=str(self._spec.state_dir.resolve()),
            )
        )
        self._learner_pid = attach.pid
        self.learner.attached(
            attach,
            incarnation,
            tuple((life.incarnation, life.steps, life.tokens) for life in before),
            writes_initial=wants_initial_state,
        )

    def _incarnation(self, attach: Attach) -> int:
        """The life of the learner that attaches: a new one for a new process. Raises StorageError."""
        if attach.incarnation != NEW_PROCESS:
            return attach.incarnation
        return allot_incarnation(self._spec.state_dir, incarnation_min=self.known_incarnation + 1)

    def learner_said(self, message: ToDaemon) -> None:
        """Anything but Attach and Failed."""
        match message:
            case Report():
                self.learner.reported(message)
            case SnapshotReady():
                self.learner.snapshot_ready(message)
            case SnapshotDenied():
                self.learner.snapshot_denied(message)
            case Applied():
                self.learner.applied(message)
            case InitialState():
                self._daemon.spawn(self._store_initial_state(), "initial state")
            case Done():
                self.learner.finished(message)
            case _:
                self._daemon.note(Note("learner", f"unexpected {type(message).__name__}", is_alarm=True))

    async def _store_initial_state(self) -> None:
        """Theta_0 from the learner, or from the file that `--init` named, to disk: this region can propose genesis."""
        async with self._initial_turn:
            inbox, init = self.learner.inbox, self._spec.init
            life = inbox.life
            named: list[F32] | None = None
            if init is not None:
                named = await asyncio.get_running_loop().run_in_executor(
                    self._daemon.pool, read_initial, init, self._manifest
                )
            digests = []
            for fragment in range(len(self._manifest.fragments)):
                # The learner's own is read where it lies: nothing is offered there before `initial_taken`.
                theta = inbox.place(fragment) if named is None else named[fragment]
                digests.append(await self._store_own(fragment, theta))
            if inbox.life != life:
                return  # it may have been written over while it was read; the next learner lays down its own
            self._post(InitialStateStored(self._manifest.digest, tuple(digests)))
            inbox.initial_taken()

    async def _store_own(self, fragment: int, theta: F32) -> bytes:
        while True:
            try:
                return await self._initial.store_own(fragment, theta)
            except StorageError as error:
                self._daemon.note(Note("disk", f"Theta_0 not written, trying again: {error}", is_alarm=True))
                await asyncio.sleep(STORAGE_RETRY_S)

    # ---- the operator ------------------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """Ask the run to end."""
        self._post(FinishAsked(reason))

    def _limit_to(self, peer: str) -> tuple[int | None, str]:
        """What limits sending to a peer now: wire bytes per second (None: nothing), and by what."""
        row = self.transport.budget_status()["peers"][peer]
        rate = row["egress_bytes_per_s"]
        return rate, "" if rate is None else row["limited_by"] or "region"

    def not_ready_reason(self) -> str:
        """Empty when this region trains in step with a leader, or has finished; else why not."""
        view = self.view()
        if view.is_final:
            return ""
        if not view.leader:
            return view.ledger_reason
        if min(view.versions) < 0:
            return "waits for the first parameters (genesis)"
        return "" if view.learner is not None else "no learner is attached"

    def status(self) -> dict[str, Any]:
        """The status document."""
        return region_status(
            self.view(),
            run_id=self._spec.run_id,
            state=self._state(),
            learner=self.learner,
            transport=self.transport,
            notes=self._daemon.notes,
            now_ns=self._daemon.clock.now_ns(),
            extra={
                "pids": {"supervisor": os.getppid(), "daemon": os.getpid(), "learner": self._learner_pid},
                "rounds_in_flight_max": self.rounds_in_flight_max,
                "budget_warning": self._budget_watch.text,
                "buffered_bytes": self.effects.stripes.buffered_bytes(),
                "events": self._pump.events_total,
                "manifest_digest": self._manifest.digest,
                "measurement": self._measuring.describe(),
                "parameters": self._manifest.size,
            },
        )

    def _state(self) -> str:
        view = self.view()
        if view.is_final or view.finished:
            return "finished"
        if view.is_ending:
            return "finishing"
        return "waiting" if self.not_ready_reason() else "training"
