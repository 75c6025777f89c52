"""One region's daemon: builds the parts, joins them, runs until the run is finished or it is told to stop.

Before the model is known (first start: until the learner lists its tensors) there is only the learner's socket and the
admin port. Then `Node` is built: ledger, rounds, replica, links.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry

from diloco_node.adapters.series import Keep
from diloco_node.codec.golden import check_golden
from diloco_node.codec.kernels import warm_up
from diloco_node.core.budget_plan import BudgetPlan
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.daemon.admin.server import AdminHandlers, AdminServer
from diloco_node.daemon.admin.status import NoteBook, StatusCollector, write_report
from diloco_node.daemon.budget import changed_plan, plan_of_file
from diloco_node.daemon.learner.admission import LearnerOrder
from diloco_node.daemon.learner.server import LearnerServer
from diloco_node.daemon.manifest_file import load_manifest, save_manifest
from diloco_node.daemon.node import Node
from diloco_node.daemon.spec import NODE_FILE, NodeSpec
from diloco_node.errors import ConfigError, PeersUnreachable, StorageError, SupersededError
from diloco_node.memory import Process
from diloco_node.storage.durable import replace_file
from diloco_node.storage.store import RegionStore
from diloco_node.transport.certs import load_identity
from diloco_node.wire.learner_link import Attach, Failed, ToDaemon, merge_rules

ADMIN_PORT_NAME: Final = "admin.port"
WORKERS: Final = 6
"""Threads for what a round waits for; some of them wait for the disk."""

BACKGROUND_NICENESS: Final = 5
"""What the thread for digests and the like adds to its own: rounds and the learner go first."""

log = structlog.get_logger()


class MonotonicClock:
    """The clock of the real world."""

    def now_ns(self) -> int:
        """See ports.Clock."""
        return time.monotonic_ns()


def _lower_priority() -> None:
    """For the calling thread: Linux keeps the niceness per thread."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness + BACKGROUND_NICENESS)


class Daemon:
    """Owns everything in the process; `run` is its life."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.clock = MonotonicClock()
        self.notes = NoteBook()
        self.pool = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="work")
        self.background = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="background", initializer=_lower_priority
        )
        self.disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self.learner_server = LearnerServer(spec.learner_socket, self)
        self._tasks: set[asyncio.Task[None]] = set()
        self.budget = spec.budget
        self._ended: asyncio.Future[int] | None = None
        self._store: RegionStore | None = None
        self._manifest: Manifest | None = None
        self._node: Node | None = None
        self._building = False
        self._learner_order = LearnerOrder(spec.state_dir)
        self._waiting_attach: Attach | None = None

    async def run(self) -> int:
        """Start, serve, stop; the exit code.

        Raises:
            DilocoError: it could not start (its `exit_code` says why), or broke.
        """
        self._ended = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, None)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.spawn(self._reload_budget(), "reload budget"))
        registry = CollectorRegistry()
        registry.register(StatusCollector(self.status))
        admin = AdminServer(
            AdminHandlers(
                status=self.status,
                not_ready_reason=self._not_ready_reason,
                finish=self._finish,
                set_budget=self._set_budget,
                measure=self._measure,
                pardon=self._pardon,
            ),
            registry,
            port=self.spec.admin_port,
            state_dir=self.spec.state_dir,
            host=self.spec.admin_host,
        )
        self._store = RegionStore(self.spec.state_dir)
        is_clean = False
        try:
            await admin.start()
            replace_file(self.spec.state_dir / ADMIN_PORT_NAME, [f"{admin.port}\n".encode()])
            load_identity(self.spec.identity_dir, region=self.spec.region, run_id=self.spec.run_id)
            await loop.run_in_executor(self.pool, check_golden)
            await loop.run_in_executor(self.pool, warm_up)
            await self.learner_server.start()
            manifest = load_manifest(self.spec.state_dir)
            if manifest is not None:
                await self._build(manifest)
            log.info("started", region=self.spec.region, admin_port=admin.port, run=self.spec.run_id)
            code = await self._ended
            is_clean = True
            return code
        finally:
            await self._stop(admin, is_clean=is_clean)

    async def _stop(self, admin: AdminServer, *, is_clean: bool) -> None:
        if self._node is not None:
            if is_clean:  # else nobody knows what state the core is in
                await self._node.drain()
            self._leave_report()
            await self._node.stop()
        await self.learner_server.stop()
        await admin.stop()
        # Who reads it later must not talk to whatever has the port then.
        (self.spec.state_dir / ADMIN_PORT_NAME).unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.background.shutdown(wait=True, cancel_futures=True)
        self.disk.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def _leave_report(self) -> None:
        try:
            write_report(self.spec.state_dir, self.status())
        except StorageError as error:
            log.warning("no report", region=self.spec.region, reason=str(error))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a named task; when it breaks, the daemon breaks with it (bad code is a crash, bad peers are not)."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task broke", task=task.get_name(), error=repr(error))
            self._end(error)

    def broke(self, error: Exception) -> None:
        """The core or an effect raised what it never should: end, so that a new process starts from the disk."""
        log.error("core broke", region=self.spec.region, exc_info=error)
        self._end(error)

    def superseded(self, error: SupersededError) -> None:
        """A newer process has our certificate and the others follow it: two of one region must not vote."""
        log.error("superseded", region=self.spec.region, reason=str(error))
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(0)
        else:
            self._ended.set_exception(error)

    def note(self, note: Note) -> None:
        """A decision and its reason: to the log and the status."""
        self.notes.add(note, self.clock.now_ns())
        write = log.warning if note.is_alarm else log.info
        where = {} if note.fragment < 0 else {"fragment": note.fragment, "version": note.version}
        write(note.kind, region=self.spec.region, **where, reason=note.text)

    async def _build(self, manifest: Manifest) -> None:
        assert self._store is not None
        # A learner that attaches from now on waits until the node is there: it must not build a second one.
        self._building = True
        self._manifest = manifest
        # In a thread: recovery reads and checks whole states.
        recovered = await asyncio.get_running_loop().run_in_executor(
            self.pool, self._store.load, len(manifest.fragments)
        )
        node = Node(self, manifest, self._store, recovered)
        await node.start()
        self._node = node
        attach, self._waiting_attach = self._waiting_attach, None
        if attach is not None:
            node.learner_attached(attach)

    # ---- the learner -------------------------------------------------------------------------------------------------

    def objection(self, attach: Attach, process: Process | None) -> str:
        """Why this process may not be the learner; empty if it may, and then it is the one."""
        known, reason = 0, ""
        if self._node is not None:
            known, reason = self._node.known_incarnation, self._node.objection(attach)
        reason = reason or self._learner_order.objection(attach, process, known_incarnation=known)
        if reason:
            self.note(Note("learner", f"refused process {attach.pid}: {reason}", is_alarm=True))
        else:
            self._learner_order.let_in(process)
        return reason

    def learner_attached(self, attach: Attach) -> None:
        """The first learner of a fresh region tells what the model is; every later one must have the same."""
        if self._node is not None:
            self._node.learner_attached(attach)
            return
        self._waiting_attach = attach
        if not self._building:
            self._building = True
            self.spawn(self._build_for(attach.tensors), "build")

    async def _build_for(self, tensors: tuple[TensorSpec, ...]) -> None:
        settings = self.spec.settings
        try:
            manifest = build_manifest(merge_rules(tensors, settings.merge), settings.fragments)
        except ConfigError as error:
            self.learner_server.refuse(str(error), is_final=True)
            raise
        save_manifest(self.spec.state_dir, manifest)
        await self._build(manifest)

    def learner_said(self, message: ToDaemon) -> None:
        """Anything but Attach."""
        if isinstance(message, Failed):
            self.note(Note("learner", f"the learner failed: {message.reason}", is_alarm=True))
        elif self._node is not None:
            self._node.learner_said(message)

    def learner_detached(self, reason: str) -> None:
        """Its connection is gone."""
        self._waiting_attach = None
        if self._node is not None:
            log.info("learner detached", region=self.spec.region, reason=reason)
            self._node.learner.detached()

    # ---- the operator ------------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """The run is over and nobody needs this process any more."""
        self._end(None)

    def status(self) -> dict[str, Any]:
        """The status document (docs/operate.md); also what report.json holds at the end."""
        if self._node is not None:
            return self._node.status()
        return {"region": self.spec.region, "run_id": self.spec.run_id, "state": "starting"}

    def _not_ready_reason(self) -> str:
        return "waits for the learner to list its tensors" if self._node is None else self._node.not_ready_reason()

    def _set_budget(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change it until the region starts again or reads its settings again. Raises ConfigError."""
        self._follow_budget(changed_plan(self.budget, document, self.spec.peers), "an operator")
        return self.budget.to_plain()

    async def _reload_budget(self) -> None:
        path = self.spec.config_file
        if path is None:
            self.note(Note("budget", "SIGHUP: this region was started without a run.toml", is_alarm=True))
            return
        try:
            loop = asyncio.get_running_loop()
            plan = await loop.run_in_executor(self.pool, plan_of_file, path, self.spec.region)
        except ConfigError as error:
            self.note(Note("budget", f"SIGHUP: the budget stays as it is: {error}", is_alarm=True))
        else:
            self._follow_budget(plan, str(path))

    def _follow_budget(self, plan: BudgetPlan, why: str) -> None:
        self.budget = plan
        # A daemon that dies and starts again must not go back to an older, perhaps larger budget.
        dataclasses.replace(self.spec, budget=plan).save(self.spec.state_dir / NODE_FILE)
        if self._node is not None:
            self._node.transport.set_budget(plan)
        self.note(Note("budget", f"set by {why}: {plan}"))

    def _pardon(self, peer: str) -> bool:
        """End a peer's quarantine. Raises ConfigError."""
        if peer not in self.spec.peers:
            raise ConfigError(f"{peer!r} is none of this region's peers: {', '.join(sorted(self.spec.peers))}")
        was = self._node is not None and self._node.transport.pardon(peer)
        if was:
            self.note(Note("peer", f"{peer} is pardoned by an operator"))
        return was

    async def _measure(self, document: Mapping[str, Any], say: Callable[[str], None], keep: Keep) -> Mapping[str, Any]:
        """Measure links over themselves. Raises DilocoError."""
        if self._node is None:
            raise PeersUnreachable(f"{self.spec.region} has no links yet: it {self._not_ready_reason()}")
        return await self._node.measure(document, say, keep)

    def _finish(self, reason: str) -> None:
        if self._node is not None:
            self._node.finish(reason)
