"""The parts of a region once its model is known: core, pump, effects, links; and how what comes in finds its way."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, assert_never

from diloco_node.core import events as ev
from diloco_node.core.bounds import STEP_MAX
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.core.region import RegionCore
from diloco_node.core.rounds.progress import RunPosition
from diloco_node.core.types import NO_LIMITS, RateLimits, Recovered
from diloco_node.core.view import RegionView
from diloco_node.daemon.admin.run_facts import RunFacts
from diloco_node.daemon.admin.status_document import NoteBook, region_status
from diloco_node.daemon.effects import build_effects
from diloco_node.daemon.final_model import Linger, write_final
from diloco_node.daemon.learner.learner_server import LearnerServer
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.manifest_file import describe_difference
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.pump import Pump
from diloco_node.daemon.region_budget import LOOK_S, BudgetWatch
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.work import Spawn, Threads, in_thread
from diloco_node.errors import ProtocolViolation, StorageError
from diloco_node.measure.measurement import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.shared_memory import request_area
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import Trained, allot_incarnation, read_trained, save_trained, set_damaged_aside
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.intake import messages_per_s
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import learner_link

DRAIN_S: Final = 5.0
"""What a stopping leader waits for another region to take over."""

POLL_S: Final = 0.1

POSITION_NS: Final = 250_000_000
"""The learner is told at most so often how far the run is: in between it goes on at its own share."""

COUNTERS_S: Final = 5.0
"""Between two times that the learner's counters are saved. Rounds save them, too."""


@dataclass(frozen=True, slots=True)
class NodeRuntime:
    """What a node needs of the process that it runs in.

    Attributes:
        store: the region's folder, open.
        learner_server: the socket to the learner.
        notes: takes decisions for the log and the status.
        now_ns: monotonic.
        end: ends the process: with None when nobody needs it any more, else with what broke.
    """

    spec: NodeSpec
    store: RegionStore
    threads: Threads
    learner_server: LearnerServer
    notes: NoteBook
    spawn: Spawn
    now_ns: Callable[[], int]
    end: Callable[[BaseException | None], None]


class Node:
    """One region, assembled. All methods run on the event loop."""

    def __init__(self, runtime: NodeRuntime, manifest: Manifest, recovered: Recovered) -> None:
        spec, threads, now_ns, spawn = runtime.spec, runtime.threads, runtime.now_ns, runtime.spawn
        self._runtime = runtime
        self._spec = spec
        self._note = runtime.notes.add
        self._manifest = manifest
        self.parameters = Parameters(
            manifest,
            spec.settings,
            runtime.store,
            threads.pool,
            files=threads.files,
            background=threads.background,
        )
        self.core = RegionCore(
            region=spec.region,
            regions=spec.regions,
            run_id=spec.run_id,
            settings_digest=spec.settings_digest,
            manifest=manifest,
            settings=spec.settings,
            recovered=recovered,
            seed=spec.seed,
            now_ns=now_ns(),
        )
        self.learner = LearnerProxy(
            manifest=manifest,
            settings=spec.settings,
            parameters=self.parameters,
            memory=partial(request_area, spec.supervisor_socket),
            send=runtime.learner_server.send,
            post=self._post,
            spawn=spawn,
            now_ns=now_ns,
            save_counters=self._save_counters,
            region=spec.region,
            note=self._note,
        )
        identity = load_identity(spec.identity_dir, region=spec.region, run_id=spec.run_id)
        self.transport = GrpcTransport(
            region=spec.region,
            run_id=spec.run_id,
            epoch=0,
            settings_digest=spec.settings_digest,
            manifest_digest=manifest.digest,
            identity=identity,
            listen=(spec.listen_host, spec.listen_port),
            peers=spec.peers,
            handler=self,
            executor=threads.pool,
            is_advertised=spec.is_advertised,
            seed=spec.seed,
            budget=spec.budget,
            on_superseded=runtime.end,
            settings=spec.shared_settings,
            messages_per_s=messages_per_s(
                len(spec.regions),
                rounds_in_flight=spec.settings.rounds_in_flight_max,
                heartbeat_ns=spec.settings.heartbeat_ns,
            ),
        )
        self._measuring = Measuring(
            region=spec.region,
            peers=tuple(sorted(spec.peers)),
            transport=self.transport,
            spawn=spawn,
            executor=threads.background,
            now_ns=now_ns,
        )
        self.measure = MeasureCommand(
            spec.region, self._measuring.peers, lambda _peers, _connections: self._measuring.own_links(), self._limit_to
        ).run
        self.effects = build_effects(
            region=spec.region,
            settings=spec.settings,
            init=spec.init,
            parameters=self.parameters,
            store=runtime.store,
            transport=self.transport,
            learner=self.learner,
            threads=threads,
            spawn=spawn,
            post=self._post,
            note=self._note,
            write_final_file=partial(write_final, spec.state_dir),
            save_counter_file=partial(save_trained, spec.state_dir),
        )
        refusals = self.effects.disk.refusals
        self._facts = RunFacts(self.core, spec, expires=identity.not_after, refusals=lambda: refusals, now_ns=now_ns)
        observe = self._facts.rounds.observe
        self._pump = Pump(self.core, self.effects.perform, now_ns, on_fault=runtime.end, observe=observe)
        self._budget_watch = BudgetWatch(manifest, spec.settings)
        self._posted_limits = NO_LIMITS
        self._is_lingering = False
        self._waiting_attach: learner_link.Attach | None = None
        self._attaches = 0
        self._is_welcomed = False
        self._welcome_lock = asyncio.Lock()
        self._told = RunPosition(0, None)
        self._told_ns = 0
        self.rounds_in_flight_max = 0

    async def start(self) -> None:
        """Bind the port between regions and start the core's clockwork.

        Raises:
            BindError, IdentityError, StorageError: as named.
        """
        await self.transport.start()
        self._pump.start()
        self._post_limits()
        self._runtime.spawn(self._watch_budget(), "budget watch")
        self._runtime.spawn(self._keep_counters(), "counters")

    async def drain(self) -> None:
        """Hand leadership over if this region has it; others that are heard get a moment to elect one of them."""
        if not self.core.is_leader:
            return
        for effect in self.core.hand_over(now_ns=self._runtime.now_ns()):
            self.effects.perform(effect)
        polls = round(DRAIN_S / POLL_S)
        while polls and self.core.is_leader and self.core.liveness.alive(now_ns=self._runtime.now_ns()):
            polls -= 1
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Close the links, drop the timer."""
        self._pump.close()
        await self.transport.stop()
        with contextlib.suppress(StorageError):  # the memory outlives this daemon, if not its supervisor
            await in_thread(self._runtime.threads.disk, read_trained, self._spec.state_dir, self.learner.counters)
        self.learner.close()

    def _post(self, event: ev.Event) -> None:
        self._pump.post(event)
        self.rounds_in_flight_max = max(self.rounds_in_flight_max, len(self.core.leader.rounds))
        if self._waiting_attach is not None and self.core.may_allot_incarnation:
            attach, self._waiting_attach = self._waiting_attach, None
            self._runtime.spawn(self._welcome(attach, self._attaches), "welcome")
        if isinstance(event, ev.FinalWritten) and not self._is_lingering:
            self._is_lingering = True
            self._runtime.spawn(self._linger(), "linger")

    def _post_limits(self) -> None:
        """The core tells the others what this region may send and receive: stripes are cut by that."""
        budget = self.transport.budget_status()
        limits = RateLimits(budget["egress_bytes_per_s"], budget["ingress_bytes_per_s"])
        if limits != self._posted_limits:
            self._posted_limits = limits
            self._post(ev.BudgetChanged(limits))

    async def _watch_budget(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._post_limits()
            self._facts.mark()
            await in_thread(self._runtime.threads.background, self._facts.look)
            look, budget = self._budget_watch.look, self.transport.budget_status()
            note = await in_thread(self._runtime.threads.background, look, self.view(), budget)
            if note is not None:
                self._note(note)

    async def _linger(self) -> None:
        """Stay until the learner has said its last figures and no other region needs this one."""
        loop = asyncio.get_running_loop()
        linger = Linger(self.view().applied_index, now_s=loop.time(), is_patient=self._spec.is_serving)
        while not linger.is_over(  # noqa: ASYNC110 - most of what it looks at announces no change
            [peer.applied_index for peer in self.view().peers],
            learner_is_done=self.learner.status is None or self.learner.done is not None,
            serves=self.effects.fetcher.serves,
            now_s=loop.time(),
        ):
            await asyncio.sleep(POLL_S)
        # The last heartbeat that says so must have left before the links go.
        await asyncio.sleep(2 * self._spec.settings.heartbeat_ns / 1e9)
        self._runtime.end(None)

    def view(self) -> RegionView:
        """What the core knows now."""
        return self.core.view()

    def control_arrived(self, peer: str, message: Message) -> None:
        """See TransportHandler."""
        self.effects.control_arrived(peer, message)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """See TransportHandler."""
        self.effects.link_changed(peer, is_up=is_up)

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        """See TransportHandler."""
        return self.effects.transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """See TransportHandler."""
        self.effects.transfer_closed(peer, header, buffer, is_whole=is_whole)

    @property
    def known_incarnation(self) -> int:
        """The newest incarnation of the own learner that the ledger knows of; -1 if none."""
        return self.core.history.incarnation(self._spec.region)

    def rejection_reason(self, attach: learner_link.Attach) -> str:
        """Why a process with this model can't be this region's learner; empty if it can."""
        difference = describe_difference(
            self._manifest, learner_link.merge_rules(attach.tensors, self._spec.settings.merge)
        )
        if difference:
            return f"this is not the run's model: {difference}"
        try:
            whole = attach.in_fragments(len(self._manifest.fragments))
        except ProtocolViolation as error:
            return str(error)
        fault = self.learner.attach_fault(whole, run_id=self._spec.run_id)
        return f"what it says of itself can't be: {fault}" if fault else ""

    def on_learner_message(self, message: learner_link.ToDaemon) -> None:
        """What follows from each message of the learner."""
        if isinstance(message, learner_link.Attach):
            self._attaches += 1
            self._is_welcomed = False
            self._runtime.spawn(self._welcome(message, self._attaches), "welcome")
            return
        if not self._is_welcomed:
            # None does that: it knows neither its incarnation nor which versions are there.
            self._note(ev.Note("learner", f"{type(message).__name__} before its welcome: ignored", is_alarm=True))
            return
        match message:
            case learner_link.Report():
                self.learner.reported(message)
                self._tell_position()
            case learner_link.SnapshotReady():
                self.learner.snapshot_ready(message)
            case learner_link.SnapshotDenied():
                self.learner.snapshot_denied(message)
            case learner_link.OfferApplied():
                self.learner.applied(message)
            case learner_link.InitialState():
                area = self.learner.version_area
                if not area.is_lent:  # what it wrote over is no Theta_0, and the run has one
                    self._note(ev.Note("learner", "Theta_0 that nobody asked for: ignored", is_alarm=True))
                    return
                work = self.effects.disk.store_initial_state(area, area.generation)
                self._runtime.spawn(work, "initial state")
            case learner_link.Done():
                self.learner.finished(message)
            case learner_link.Failed():
                self.learner.warned(f"the learner failed: {message.reason}", has_failed=True)
                self._note(ev.Note("learner", f"the learner failed: {message.reason}", is_alarm=True))
            case learner_link.Warned():
                self.learner.warned(message.text)
                self._note(ev.Note("learner", f"the learner warns: {message.text}", is_alarm=True))
            case _:
                assert_never(message)

    async def _save_counters(self, incarnation: int) -> None:
        await self.effects.disk.save_counters(incarnation, self.learner.counters)

    async def _keep_counters(self) -> None:
        """So that little is forgotten when all processes of the region die at once."""
        while True:
            await asyncio.sleep(COUNTERS_S)
            if self.learner.status is not None:
                await self._save_counters(self.learner.incarnation)

    def learner_detached(self) -> None:
        """Its connection is gone, whether or not it was welcomed."""
        self._attaches += 1
        self._is_welcomed = False
        self._waiting_attach = None
        self.learner.detached()

    async def _welcome(self, attach: learner_link.Attach, number: int) -> None:
        """Welcome the learner, or say why not. Nothing is done for one that went, or was replaced, meanwhile."""
        server = self._runtime.learner_server
        async with self._welcome_lock:  # one at a time, so that a later one has the greater incarnation
            if number != self._attaches:
                return
            # Again: the node may not have been there when it was let in.
            rejection_reason = self.rejection_reason(attach)
            if rejection_reason:
                server.refuse(rejection_reason, is_final=True)
                return
            attach = attach.in_fragments(len(self._manifest.fragments))
            if attach.incarnation == learner_link.NEW_PROCESS and not self.core.may_allot_incarnation:
                # A folder that was lost does not know which incarnations there were; the others tell it.
                self._waiting_attach = attach
                return
            try:
                incarnation, before, damaged = await in_thread(
                    self._runtime.threads.disk, self._counters_of, attach, self.core.incarnation_min
                )
            except StorageError as error:
                self._note(ev.Note("disk", f"no counters for a new learner: {error}", is_alarm=True))
                if number == self._attaches:
                    server.refuse(str(error), is_final=False)
                return
            for name in damaged:
                self._note(ev.Note("disk", f"{name} was damaged: it is set aside. Look at the disk", is_alarm=True))
            if number == self._attaches:
                self._welcome_as(attach, incarnation, before)

    def _counters_of(
        self, attach: learner_link.Attach, incarnation_min: int
    ) -> tuple[int, tuple[Trained, ...], tuple[str, ...]]:
        """In the disk's thread: its incarnation, what those before it trained, and what is set aside. StorageError."""
        damaged = set_damaged_aside(self._spec.state_dir)
        incarnation = attach.incarnation
        if incarnation == learner_link.NEW_PROCESS:
            incarnation = allot_incarnation(self._spec.state_dir, incarnation_min=incarnation_min)
        trained = read_trained(self._spec.state_dir, self.learner.counters)
        return incarnation, tuple(one for one in trained if one.incarnation < incarnation), damaged

    def _welcome_as(self, attach: learner_link.Attach, incarnation: int, before: tuple[Trained, ...]) -> None:
        """The answer, and from here on what it says counts."""
        # A learner in mid-run has nothing to write, and would leave the version area to itself for ever.
        is_placed = min(position.base_version for position in attach.positions) >= 0
        wants_initial_state = self.core.wants_initial_state and not is_placed
        settings = self._spec.settings
        self._is_welcomed = True
        position = self.core.leader.progress.position(now_ns=self._runtime.now_ns())
        self._runtime.learner_server.send(
            learner_link.Welcome(
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
                global_step=min(position.steps, STEP_MAX),
                manifest_digest=self._manifest.digest,
                wants_initial_state=wants_initial_state,
                state_dir=str(self._spec.state_dir.resolve()),
            )
        )
        self._send_position(position)
        self.learner.attached(
            attach,
            incarnation,
            tuple((one.incarnation, one.steps, one.tokens) for one in before),
            writes_initial=wants_initial_state,
        )

    def _tell_position(self) -> None:
        """Tell the learner how far the run is, when that is news."""
        now_ns = self._runtime.now_ns()
        if now_ns - self._told_ns < POSITION_NS:
            return
        position = self.core.leader.progress.position(now_ns=now_ns)
        if position != self._told:
            self._send_position(position)

    def _send_position(self, position: RunPosition) -> None:
        self._told, self._told_ns = position, self._runtime.now_ns()
        message = learner_link.RunAdvanced(min(position.steps, STEP_MAX), position.part)
        self._runtime.learner_server.send(message)

    def finish(self, reason: str) -> None:
        """Ask the run to end."""
        self._post(ev.FinishOrdered(reason))

    def _limit_to(self, peer: str) -> tuple[int | None, str]:
        """What limits sending to a peer now: wire bytes per second (None: nothing), and by what."""
        row = self.transport.budget_status()["peers"][peer]
        rate = row["egress_bytes_per_s"]
        return rate, "" if rate is None else row["limited_by"] or "region"

    def not_ready_reason(self) -> str:
        """Empty when this region trains in step with a leader, or has finished; else why not."""
        view = self.view()
        if view.is_final or (silence := self.learner.silence()):
            return "" if view.is_final else silence
        if not view.leader or (self._waiting_attach is not None and not self.core.may_allot_incarnation):
            return view.ledger_reason
        if min(view.versions) < 0:
            return "waits for the first parameters (genesis)"
        return "" if view.learner is not None else "no learner is attached"

    def status(self) -> dict[str, Any]:
        """The status document."""
        facts = self._facts.document(self.learner)
        return region_status(
            self.view(),
            run_id=self._spec.run_id,
            state=self._state(),
            learner=self.learner,
            transport=self.transport,
            notes=self._runtime.notes,
            now_ns=self._runtime.now_ns(),
            extra={
                "pids": {"supervisor": os.getppid(), "daemon": os.getpid(), "learner": self.learner.pid},
                "rounds_in_flight_max": self.rounds_in_flight_max,
                "budget_warning": self._budget_watch.text,
                "buffered_bytes": self.effects.stripes.table.buffered_bytes(),
                "events": self._pump.events_total,
                "tasks": len(asyncio.all_tasks()),
                "manifest_digest": self._manifest.digest,
                **facts,
                "disk": facts["disk"]
                | {
                    "files_set_aside": len(self._runtime.store.set_aside),
                    "ledger_cut_bytes": self._runtime.store.cut_bytes,
                },
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
