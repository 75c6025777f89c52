"""The daemon of a region: builds the parts, joins them, runs until the run is finished or it is told to stop.

Before the model is known (first start: until the learner lists its tensors) there is only the learner's socket and the
admin port. Then `Node` is built: ledger, rounds, parameters, links.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry

from diloco_node.codec.golden import check_golden
from diloco_node.codec.kernels import warm_up
from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.rounds.extension import extension
from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.daemon.admin.metrics import StatusCollector
from diloco_node.daemon.admin.status_document import NoteBook, write_report
from diloco_node.daemon.console import LINES_POLL_S, Console, console_line
from diloco_node.daemon.learner.admission import Admission
from diloco_node.daemon.learner.learner_server import LearnerServer
from diloco_node.daemon.manifest_file import recover_manifest, save_manifest
from diloco_node.daemon.node import Node
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.region_budget import changed_plan, plan_of_file
from diloco_node.daemon.run_history import RunHistory
from diloco_node.daemon.run_record import has_final_report, is_complete, run_record, set_final_aside
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.stopping import STOP_S_DEFAULT, StopSignals, limit_to_kill_s, supervisor
from diloco_node.daemon.work import Threads, in_thread
from diloco_node.errors import ConfigError, PeersUnreachable, ProtocolViolation, StorageError
from diloco_node.escaping import escaped_document
from diloco_node.health.alerts import learner_fault
from diloco_node.health.health_summary import health_of
from diloco_node.measure.measurement import OnPartial
from diloco_node.state_names import ADMIN_PORT_NAME, NODE_NAME
from diloco_node.storage.durable import disk_errors, replace_file
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import set_damaged_aside
from diloco_node.supervisor.process_file import read_process
from diloco_node.ticks import to_tick_s
from diloco_node.transport.certificates import load_identity
from diloco_node.unix_sockets import Process
from diloco_node.wire.learner_link import Attach, ToDaemon, merge_rules

LEARNER_PROCESS_POLL_S: Final = 1.0
"""Between two looks at what the supervisor says of the learner's process."""

TIMER_GRAIN_S: Final = 0.01
"""A timer may fire so much early: what is due by then is done with it."""

LOADS_KERNELS: Final = "loads its kernels, which the first start compiles"
WAITS_FOR_TENSORS: Final = "waits for the learner to list its tensors"

log = structlog.get_logger()


class Daemon:
    """Owns everything in the process; `run` is its life.

    on_stop: called when it begins to stop, with the exit code and the seconds that it has.
    """

    def __init__(self, spec: NodeSpec, on_stop: Callable[[int, float], None] = lambda _, __: None) -> None:
        # As on disk in the state folder: an operator's changes are saved before they count.
        self.spec = spec
        self.notes = NoteBook(spec.region, time.monotonic_ns, lambda text: console_line(spec.region, f"ALARM: {text}"))
        self._console = Console(spec.run_id, spec.state_dir, spec.settings, now_s=time.monotonic())
        self._history = RunHistory(spec.state_dir, sample_s=spec.history_every_s)
        self.learner_server = LearnerServer(spec.learner_socket, self)
        self._on_stop = on_stop
        # From the first reason to end on, if that is a signal: until a supervisor may kill this process.
        self._stop_s = STOP_S_DEFAULT
        self._stop_signals = StopSignals(spec.region, self._is_learning, self._end_in_time)
        # The ledger, files and sums have threads of their own: a slow disk holds up no sum.
        self._threads = Threads.start()
        self._admission = Admission(spec.state_dir, self._threads.disk)
        # All that run; a task that ends with an error ends the daemon.
        self._tasks: set[asyncio.Task[None]] = set()
        # Resolved once, by the first reason to end; None before `run`.
        self._ended: asyncio.Future[int] | None = None
        # Open from `run` until the end of `_stop`.
        self._store: RegionStore | None = None
        # None until the model is known and the core has recovered; then for good.
        self.node: Node | None = None
        # Whether a node is being built, or was: there is never a second one.
        self._is_building = False
        # Whether the folder's run was over when this daemon came: then its last report stays.
        self._was_finished = False
        # The health as of the last status, and since when, in seconds since 1970.
        self._health = ("", 0.0)
        # Why there is no node.
        self._starting_reason = LOADS_KERNELS
        # The learner that attached before there was a node, if it is still there.
        self.waiting_attach: Attach | None = None
        # The supervisor's facts about the learner's process; empty where it is started by somebody else.
        self.learner_process: dict[str, Any] = {}

    async def run(self) -> int:
        """Start, serve, stop; the exit code. Raises DilocoError: it could not start (which `exit_code`), or broke."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signals.take)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.spawn(self._reload(), "reload"))
        registry = CollectorRegistry()
        registry.register(StatusCollector(self.status))
        admin = AdminServer(
            self, registry, port=self.spec.admin_port, state_dir=self.spec.state_dir, host=self.spec.admin_host
        )
        self._store = RegionStore(self.spec.state_dir, is_archive=self.spec.payload_archive)
        code = 1
        try:
            await admin.start()
            replace_file(self.spec.state_dir / ADMIN_PORT_NAME, [f"{admin.port}\n".encode()])
            load_identity(self.spec.identity_dir, region=self.spec.region, run_id=self.spec.run_id)
            await in_thread(self._threads.pool, check_golden)
            await in_thread(self._threads.pool, warm_up)
            self._starting_reason = WAITS_FOR_TENSORS
            await self.learner_server.start()
            self.spawn(self._watch_run(), "console and history")
            if not self.spec.is_serving:  # what is on disk is of the learner that there was
                self.spawn(self._watch_learner_process(), "learner process")
            manifest, damage = recover_manifest(self.spec.state_dir)
            if damage:
                self.notes.add(Note("disk", damage, is_alarm=True))
            if manifest is not None:
                await self._build(manifest)
            log.info("started", region=self.spec.region, admin_port=admin.port, run=self.spec.run_id)
            code = await self._ended
            return code
        finally:
            self._on_stop(code, self._stop_s)
            await self._stop(admin, is_clean=code == 0)

    async def _stop(self, admin: AdminServer, *, is_clean: bool) -> None:
        if self.node is not None:
            if is_clean:  # else nobody knows what state the core is in
                await self.node.drain(self._stop_s)
            self._look_at_run()
            if not self.spec.is_serving and self._history.take(self.status()):
                await in_thread(self._threads.background, self._history.save)
            try:
                if not (self._was_finished and has_final_report(self.spec.state_dir)):
                    write_report(self.spec.state_dir, self.status())
            except StorageError as error:
                log.warning("no report", region=self.spec.region, reason=str(error))
            await self.node.stop()
        await self.learner_server.stop()
        await admin.stop()
        # Who reads it later must not talk to whatever has the port then.
        with contextlib.suppress(OSError):  # a disk that refuses takes no exit code away
            (self.spec.state_dir / ADMIN_PORT_NAME).unlink()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.stop()
        if self._store is not None:
            self._store.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a named task; when it breaks, the daemon breaks with it (bad code is a crash, bad peers are not)."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task broke", task=task.get_name())
            self.end(error)

    def _is_learning(self) -> bool:
        """Whether a learner of the supervisor's is attached, and this daemon does not end anyway."""
        is_attached = bool(self.learner_process) and self.learner_server.is_attached
        return is_attached and not (self._ended is None or self._ended.done())

    def _end_in_time(self) -> None:
        """End the process: who sent the signal may kill it soon."""
        self._stop_s = limit_to_kill_s()
        if self._ended is not None and self._ended.done():  # its own end was to have more time
            self._on_stop(int(self._ended.exception() is not None), self._stop_s)
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the process. error: None: the run is over, or somebody asked for it.

        Else what a task, an effect or the core should never raise, or a newer process of this region runs.
        """
        if error is not None:
            log.error("ends", region=self.spec.region, error=repr(error))
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(0)
        else:
            self._ended.set_exception(error)

    async def _build(self, manifest: Manifest, *, is_listed: bool = False) -> None:
        """Build the node. is_listed: the learner has listed the tensors; the manifest is not on disk yet."""
        assert self._store is not None
        # A learner that attaches from now on waits until the node is there: it must not build a second one.
        self._is_building = True
        # In a thread: recovery reads and checks whole states.
        recovery = await in_thread(self._threads.files, self._store.load, len(manifest.fragments))
        counters = await in_thread(self._threads.files, set_damaged_aside, self.spec.state_dir)
        self._note_damage(self._store, counters)
        runtime = NodeRuntime(
            self.spec,
            self._store,
            self._threads,
            self.learner_server,
            self.notes,
            self.spawn,
            time.monotonic_ns,
            self.end,
        )
        record = None
        try:
            record = run_record(recovery.base, recovery.entries, len(manifest.fragments))
            if record is not None:  # before the node, for which another run's ledger would be a damaged one
                founders = record.genesis.regions if self.spec.joined else self.spec.regions
                record.check(self.spec.state_dir, run_id=self.spec.run_id, founders=founders)
                record.check_model(self.spec.state_dir, manifest.digest, is_listed=is_listed)
            self._was_finished = is_complete(self.spec.state_dir, record)
            node = Node(runtime, manifest, recovery)
        except (StorageError, ProtocolViolation) as error:  # whole frames, but what they say can't be
            begin_again = self._store.begin_again
            recovery = await in_thread(self._threads.files, begin_again, str(error), len(manifest.fragments))
            node, record = Node(runtime, manifest, recovery), None
        if is_listed:  # a disk that refuses ends the daemon, and is no reason to begin again
            await in_thread(self._threads.disk, save_manifest, self.spec.state_dir, manifest)
        if record is not None and extension(record.end, self.spec.settings) is not None:
            self._was_finished = False
            await in_thread(self._threads.files, set_final_aside, self.spec.state_dir)
        if self._store.lost:
            text = f"{self._store.lost}. What is left is set aside; the region comes back with another folder id"
            self.notes.add(Note("disk", text, is_alarm=True))
        await node.start()
        self.notes.add(Note("start", "this daemon has started"))
        self.node = node
        attach, self.waiting_attach = self.waiting_attach, None
        if attach is not None:
            node.reception.on_message(attach)

    def _note_damage(self, store: RegionStore, counters: tuple[str, ...]) -> None:
        """Note the damage that recovery has worked around: a disk that loses data once may do it again."""
        for name in store.set_aside:
            text = (
                f"{name} was damaged: it is set aside as {name}.damaged, and fetched if it is needed. Look at the disk"
            )
            self.notes.add(Note("disk", text, is_alarm=True))
        for name in counters:
            text = f"{name} was damaged: it is set aside, and begins with no steps. Look at the disk"
            self.notes.add(Note("disk", text, is_alarm=True))
        if store.cut_bytes:
            # After a power cut this is what is to be expected: nothing of it was ever acknowledged.
            self.notes.add(Note("disk", f"{store.cut_bytes} bytes of an interrupted write were cut off the ledger"))

    def rejection_reason(self, attach: Attach, process: Process | None) -> str:
        """Why this process may not be the learner; empty if it may, and then it is the one."""
        reception = None if self.node is None else self.node.reception
        known, reason = (reception.known_incarnation, reception.rejection_reason(attach)) if reception else (0, "")
        is_attached = self.learner_server.is_attached
        reason = reason or self._admission.rejection_reason(attach, process, known, is_attached=is_attached)
        if reason:
            self.notes.add(Note("learner", f"refused process {attach.pid}: {reason}", is_alarm=True))
        else:
            self._admission.let_in(process)
        return reason

    def on_learner_message(self, message: ToDaemon) -> None:
        """The first learner of a fresh region says what the model is; every later one must have the same."""
        if isinstance(message, Attach):
            log.info("learner attached", region=self.spec.region, pid=message.pid)
        if self.node is not None:
            self.node.reception.on_message(message)
        elif not isinstance(message, Attach):
            self.notes.add(Note("learner", f"before its welcome: {message}", is_alarm=True))
        else:
            self.waiting_attach = message
            if not self._is_building:
                self._is_building = True
                self.spawn(self._build_for(message.tensors), "build")

    async def _build_for(self, tensors: tuple[TensorSpec, ...]) -> None:
        settings = self.spec.settings
        try:
            await self._build(build_manifest(merge_rules(tensors, settings.merge), settings.fragments), is_listed=True)
        except ConfigError as error:
            self.learner_server.refuse(str(error), is_final=True)
            raise

    def learner_detached(self, reason: str) -> None:
        """Its connection is gone."""
        self.waiting_attach = None
        is_final = self.node is None or self.node.learner.has_left
        if self.node is not None:
            log.info("learner detached", region=self.spec.region, reason=reason)
            self.node.reception.on_detach()
        self._stop_signals.learner_left(is_final=is_final)

    def status(self) -> dict[str, Any]:
        """The status document (docs/operate.md); also what report.json holds at the end."""
        document = self._facts()
        health = health_of(document)
        if health["state"] != self._health[0]:
            self._health = health["state"], document["clock"]["unix"]
        return {**document, "health": health | {"since_unix": self._health[1]}}

    def _facts(self) -> dict[str, Any]:
        process = escaped_document(self.learner_process)
        # What a note's time (`at_ns`) is for people, who may read it on another machine.
        clock = {"unix": time.time(), "monotonic_ns": time.monotonic_ns()}  # noqa: TID251 - shown, decides nothing
        if self.node is not None:
            return {**self.node.status.document(), "learner_process": process, "clock": clock}
        document = {
            "region": self.spec.region,
            "run_id": self.spec.run_id,
            "state": "starting",
            "state_dir": str(self.spec.state_dir.resolve()),
            "learner_process": process,
            "clock": clock,
        }
        return {**document, "reason": self.not_ready_reason(document)}  # a script that crashes is why it waits

    def snapshot(self) -> dict[str, Any]:
        """The status, the history, and the settings with their origins: what the page begins with."""
        return {
            "status": self.status(),
            "history": self._history.document(),
            "settings": escaped_document(self.spec.settings_shown if self.node is None else self.node.settings.shown),
        }

    def not_ready_reason(self, document: Mapping[str, Any] | None = None) -> str:
        """Why the region does not train; first what the learner's process lacks, for the rest waits for it."""
        fault = learner_fault(self._facts() if document is None else document)
        reason = self._starting_reason if self.node is None else self.node.status.not_ready_reason()
        if fault is None:
            return reason
        return fault[1] if fault[1].startswith(reason) else f"{fault[1]}; {reason}"

    async def _watch_learner_process(self) -> None:
        """Follow the supervisor's file about the learner's process: note each new fault, and show it."""
        last_fault: tuple[Any, ...] | None = None
        while True:
            now = await in_thread(self._threads.background, read_process, self.spec.state_dir)
            self.learner_process = now
            is_stopped = now.get("state") == "stopped"
            fault = (now.get("reason", ""), now.get("crashes"), now.get("hangs"), is_stopped)
            # What was there when this daemon began was told by the one before, but for what still holds.
            if fault != last_fault and fault[0] and (last_fault is not None or is_stopped):
                verb = "is stopped" if is_stopped else "has ended"
                self.notes.add(Note("learner", f"the learner's process {verb}: {fault[0]}", is_alarm=True))
            last_fault = fault
            await asyncio.sleep(to_tick_s(LEARNER_PROCESS_POLL_S))

    async def _watch_run(self) -> None:
        """Show lines about the run while it goes on, and keep its history: both of one document."""
        loop = asyncio.get_running_loop()
        # What is on the disk of a region that only serves is the history of the run.
        point_at_s = math.inf if self.spec.is_serving else loop.time() + self._history.period_s
        while True:
            document = self._look_at_run()
            if loop.time() >= point_at_s - TIMER_GRAIN_S:
                point_at_s = loop.time() + self._history.period_s
                if self._history.take(document):
                    await in_thread(self._threads.background, self._history.save)
            await asyncio.sleep(min(to_tick_s(LINES_POLL_S), max(TIMER_GRAIN_S, point_at_s - loop.time())))

    def _look_at_run(self) -> dict[str, Any]:
        document = self.status()
        for line in self._console.look(document, self.not_ready_reason(document), now_s=time.monotonic()):
            console_line(self.spec.region, line)
        return document

    def start_learner(self) -> str:
        """Have the supervisor start a learner that it has stopped, or that waits. Raises ConfigError."""
        pid = supervisor()
        if pid is None or not self.learner_process:
            raise ConfigError("this region's learner is not started by `diloco-node start`: start it where it runs")
        state = str(self.learner_process["state"])
        if state == "running":
            raise ConfigError("the learner runs already; a process that hangs is found and started again by itself")
        os.kill(pid, signal.SIGUSR1)
        self.notes.add(Note("learner", f"an operator starts the learner, which was {state}"))
        return state

    def drain(self) -> None:
        """Stop this region in order: its learner first, with its last steps merged; then this daemon."""
        self.notes.add(Note("learner", "an operator stops this region"))
        pid = supervisor()
        if pid is None:
            self.end()
        else:
            os.kill(pid, signal.SIGTERM)

    def set_budget(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change it until the region starts again or reads its settings again. Raises ConfigError, StorageError."""
        self._follow_budget(changed_plan(self.spec.budget, document, self._peers), "an operator")
        return self.spec.budget.to_plain()

    async def _reload(self) -> None:
        await self._reload_budget()
        if self.node is not None:
            await self.node.renew_identity()

    async def _reload_budget(self) -> None:
        path = self.spec.config_file
        if path is None:
            self.notes.add(Note("budget", "SIGHUP: this region was started without a run.toml", is_alarm=True))
            return
        try:
            plan, source = await in_thread(self._threads.files, plan_of_file, path, self.spec.region)
            self._follow_budget(plan, source)
        except (ConfigError, StorageError) as error:
            self.notes.add(Note("budget", f"SIGHUP: the budget stays as it is: {error}", is_alarm=True))

    def _follow_budget(self, plan: BudgetPlan, why: str) -> None:
        spec = dataclasses.replace(self.spec, budget=plan)
        # A daemon that dies and starts again must not go back to an older, perhaps larger budget.
        path = spec.state_dir / NODE_NAME
        with disk_errors("write", path):
            spec.save(path)
        self.spec = spec
        if self.node is not None:
            self.node.transport.pacer.set_plan(plan)
        self.notes.add(Note("budget", f"set by {why}: {plan}"))

    @property
    def _peers(self) -> Mapping[str, str | None]:
        return self.spec.peers if self.node is None else self.node.transport.addresses

    def _check_peer(self, peer: str) -> None:
        if peer not in self._peers:
            raise ConfigError(f"{peer!r} is none of this region's peers: {', '.join(sorted(self._peers))}")

    def expel(self, peer: str) -> None:
        """Have the ledger expel a peer. Raises ConfigError."""
        if peer == self.spec.region:
            raise ConfigError(f"{peer} can't expel itself: stop it, or give the order to another region")
        self._check_peer(peer)
        self.running_node(f"expel {peer} from").expel(peer, is_lifted=False)

    def revoke(self, region: str, pem: str) -> str:
        """Have the ledger revoke a certificate; the beginning of its fingerprint. pem: empty: the one in use."""
        if region != self.spec.region:
            self._check_peer(region)
        return self.running_node(f"revoke the certificate of {region} in").revoke(region, pem.encode())

    def running_node(self, purpose: str) -> Node:
        """The node, once there is a run. Raises ConfigError: there is none yet to do this with."""
        if self.node is None:
            raise ConfigError(
                f"there is no run yet to {purpose}: {self.spec.region} {self._facts()['reason']}. Ask again when it is "
                "there, or stop the region"
            )
        return self.node

    def lift_quarantine(self, peer: str) -> bool:
        """Readmit a peer; whether it was expelled, in quarantine, or had strikes. Raises ConfigError."""
        self._check_peer(peer)
        if self.node is not None and peer in self.node.core.history.roster.expelled:
            self.node.expel(peer, is_lifted=True)
            return True
        was = self.node is not None and self.node.transport.lift_quarantine(peer)
        if was:
            self.notes.add(Note("peer", f"an operator lifted the quarantine of {peer}"))
        return was

    async def measure(
        self, document: Mapping[str, Any], on_progress: Callable[[str], None], on_partial: OnPartial
    ) -> Mapping[str, Any]:
        """Measure links over themselves (`MeasureCommand`); cancelled when the caller goes away. Raises DilocoError."""
        if self.node is None:
            raise PeersUnreachable(f"{self.spec.region} has no links yet: it {self._facts()['reason']}")
        return await self.node.measure(document, on_progress, on_partial)
