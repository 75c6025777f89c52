"""The daemon around its node: one node however attaches and recovery meet, and what it leaves when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.core.data_shards import SHARDS
from diloco_node.core.genesis import Genesis
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import FinishedBody, LeaderBody, Recovered, RunSettings
from diloco_node.daemon import daemon as daemon_module
from diloco_node.daemon import node as node_module
from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.learner import reception as reception_module
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.daemon.run_history import HISTORY_NAME
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.work import in_thread
from diloco_node.errors import ConfigError, StorageError, SupersededError
from diloco_node.shared_memory import MemoryStore
from diloco_node.state_names import ADMIN_PORT_NAME, LEDGER_NAME
from diloco_node.storage.store import RegionStore
from diloco_node.supervisor.process_file import PROCESS_FILE, write_process
from diloco_node.transport.authority import init_run
from diloco_node.wire.learner_link import (
    LENGTH_BYTES,
    LINK_PROTOCOL,
    NEW_PROCESS,
    NO_SNAPSHOT,
    TO_DAEMON,
    TO_LEARNER,
    UNATTACHED,
    Attach,
    InitialState,
    Refuse,
    Report,
    RunAdvanced,
    ShardsGiven,
    ToLearner,
    Warned,
    Welcome,
    frame,
    frame_length,
)
from tests.kit.begun_kit import begin_run
from tests.kit.node_kit import MANIFEST
from tests.kit.waiting import eventually


@pytest.fixture
def spec() -> Iterator[NodeSpec]:
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    init_run(folder / "certs", "run", ["a", "b", "c"])
    state = folder / "a"
    state.mkdir()
    with MemoryStore(folder / "m.sock") as memory:
        yield NodeSpec(
            region="a",
            run_id="run",
            regions=("a",),
            listen_host="127.0.0.1",
            listen_port=0,
            peers={},
            address="127.0.0.1:7400",
            state_dir=state,
            identity_dir=folder / "certs" / "a",
            admin_port=0,
            learner_socket=folder / "l.sock",
            supervisor_socket=memory.path,
            settings=RunSettings(fragments=2, heartbeat_ns=20_000_000, election_timeout_ns=60_000_000),
            settings_digest="settings",
        )
    shutil.rmtree(folder)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[node_module.Node]:
    """Every node that is built."""
    built: list[node_module.Node] = []

    class Counted(node_module.Node):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            built.append(self)

    monkeypatch.setattr(daemon_module, "Node", Counted)
    monkeypatch.setattr(daemon_module, "check_golden", lambda: None)
    monkeypatch.setattr(daemon_module, "warm_up", lambda: None)
    return built


class Learner:
    """A connection to the daemon's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def attach(
        cls, spec: NodeSpec, incarnation: int = NEW_PROCESS, tensors: tuple[TensorSpec, ...] = MANIFEST.tensors
    ) -> Learner:
        async with asyncio.timeout(120):
            while True:
                try:
                    learner = cls(*await asyncio.open_unix_connection(str(spec.learner_socket)))
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        count = 0 if incarnation == NEW_PROCESS else 2
        positions, snapshots = (UNATTACHED,) * count, (NO_SNAPSHOT,) * count
        learner.say(Attach(LINK_PROTOCOL, 1, tensors, incarnation, "", 0, 0, 0, positions, snapshots))
        return learner

    def say(self, message: Any) -> None:
        self.writer.write(frame(TO_DAEMON.encode(message)))

    async def hear(self) -> ToLearner:
        async with asyncio.timeout(120):
            length = frame_length(await self.reader.readexactly(LENGTH_BYTES))
            return TO_LEARNER.decode(await self.reader.readexactly(length))

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def end(daemon: Daemon, running: asyncio.Task[int]) -> int:
    daemon.end()
    async with asyncio.timeout(120):
        return await running


async def test_a_learner_that_attaches_during_recovery_waits_for_the_one_node(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was restarted: its learner redials at once, while the states are still being read."""
    save_manifest(spec.state_dir, MANIFEST)
    gate, loads = threading.Event(), []
    real = RegionStore.load

    def slow_load(store: RegionStore, fragments: int) -> Recovered:
        loads.append(fragments)
        gate.wait(120)
        return real(store, fragments)

    monkeypatch.setattr(RegionStore, "load", slow_load)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await eventually(lambda: daemon.waiting_attach is not None)
    gate.set()
    assert isinstance(await learner.hear(), Welcome)
    assert len(nodes) == len(loads) == 1
    await learner.close()
    assert await end(daemon, running) == 0


async def test_the_first_learner_tells_the_model_and_a_second_process_gets_the_same_node(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    first = await Learner.attach(spec)
    welcome = await first.hear()
    assert isinstance(welcome, Welcome)
    assert (welcome.incarnation, welcome.wants_initial_state) == (1, True)
    await first.close()
    second = await Learner.attach(spec)
    welcome = await second.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation == 2
    assert len(nodes) == 1
    await second.close()
    assert await end(daemon, running) == 0


async def test_an_older_life_that_finds_a_new_daemon_first_or_last_does_not_displace_the_newest(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    lives = []
    for _ in range(2):
        learner = await Learner.attach(spec)
        welcome = await learner.hear()
        assert isinstance(welcome, Welcome)
        lives.append(welcome.incarnation)
        await learner.close()
    assert await end(daemon, running) == 0

    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    for life, other_life in (lives, reversed(lives)):
        learner = await Learner.attach(spec, life)
        answer = await learner.hear()
        late = await Learner.attach(spec, other_life)
        refusal = await late.hear()
        if life < other_life:
            answer, refusal = refusal, answer
        assert isinstance(refusal, Refuse)
        assert refusal.is_final
        assert isinstance(answer, Welcome)
        assert answer.incarnation == max(lives)
        await learner.close()
        await late.close()
    assert await end(daemon, running) == 0


async def test_a_process_with_another_model_does_not_displace_the_learner(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    other_life = await Learner.attach(spec, tensors=MANIFEST.tensors[:1])
    answer = await other_life.hear()
    assert isinstance(answer, Refuse)
    assert "not the run's model" in answer.reason
    assert daemon.learner_server.is_attached
    await other_life.close()
    await learner.close()
    assert await end(daemon, running) == 0


async def test_theta_0_without_a_genesis_is_asked_for_again_after_a_restart(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk, but no ledger says that it counts: without it this region could never propose a genesis."""
    monkeypatch.setattr(Genesis, "propose", lambda _: None)  # the daemon ends before it does
    for _ in range(2):
        daemon = Daemon(spec)
        running = asyncio.create_task(daemon.run())
        learner = await Learner.attach(spec)
        welcome = await learner.hear()
        assert isinstance(welcome, Welcome)
        assert welcome.wants_initial_state
        learner.say(InitialState())
        await eventually(lambda: nodes[-1].core.versions.initial_digests is not None)
        await learner.close()
        assert await end(daemon, running) == 0
    store = RegionStore(spec.state_dir)
    assert store.state_versions(0) == (0,)
    store.close()


async def test_a_newer_process_with_our_certificate_ends_this_one(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    on_superseded = nodes[0].transport.on_superseded
    assert on_superseded is not None
    on_superseded(SupersededError("a newer process of a runs"))
    with pytest.raises(SupersededError) as caught:
        async with asyncio.timeout(120):
            await running
    assert caught.value.exit_code == 7
    await learner.close()


async def test_a_new_learner_gets_no_incarnation_from_a_folder_that_was_emptied(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    """The others know which incarnations there were: the welcome waits until the ledger names the folder."""
    save_manifest(spec.state_dir, MANIFEST)
    daemon = Daemon(dataclasses.replace(spec, regions=("a", "b", "c"), peers={"b": None, "c": None}))
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await eventually(lambda: bool(nodes) and nodes[0].reception.waiting_attach is not None)
    assert not list(spec.state_dir.glob("learner/trained-*"))
    assert "needs every region: waits for b, c" in daemon.status()["reason"]
    await learner.close()
    await eventually(lambda: nodes[0].reception.waiting_attach is None)
    assert await end(daemon, running) == 0


async def test_a_ledger_that_makes_no_sense_is_set_aside_and_the_region_begins_again(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    """Its entries follow each other and their hashes are right; a round before genesis can't be."""
    save_manifest(spec.state_dir, MANIFEST)
    store = RegionStore(spec.state_dir)
    before = store.load(len(MANIFEST.fragments)).disk
    first = seal(1, 1, ZERO_HASH, LeaderBody("a"))
    store.persist(1, "", 0, [first, seal(2, 1, first.hash, FinishedBody((0, 0), "no run"))])
    store.close()
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: bool(nodes) and nodes[-1].core.ledger.is_leader)
    assert nodes[-1].core.ledger.founders["a"] not in (before, b"")
    assert any("makes no sense: entry 2" in note["text"] for note in daemon.notes.last)
    assert (spec.state_dir / "ledger.log.damaged-1").exists()
    assert await end(daemon, running) == 0


async def test_a_ledger_of_another_run_ends_the_daemon_and_is_left_as_it_is(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    """For the node its genesis is one that can't be, and what can't be is set aside."""
    begin_run(spec.state_dir, "old", ("a",))
    before = (spec.state_dir / LEDGER_NAME).read_bytes()
    with pytest.raises(ConfigError, match=r"holds run old, but run\.id is run") as caught:
        async with asyncio.timeout(120):
            await Daemon(spec).run()
    assert caught.value.exit_code == 2
    assert (spec.state_dir / LEDGER_NAME).read_bytes() == before
    assert nodes == []


async def test_settings_may_have_changed_since_the_run_began(spec: NodeSpec, nodes: list[node_module.Node]) -> None:
    begin_run(spec.state_dir, "run", ("a",))
    daemon = Daemon(dataclasses.replace(spec, settings_digest="others"))
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: bool(nodes) and daemon.node is not None)
    assert not (spec.state_dir / "ledger.log.damaged-1").exists(), "before, it was taken for damaged, and set aside"
    assert nodes[0].core.ledger.last_index >= 2
    assert daemon.notes.alarms == 0
    assert await end(daemon, running) == 0


async def test_a_finished_region_that_is_started_again_keeps_its_report(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    begin_run(spec.state_dir, "run", ("a",), finished="run.steps is reached")
    write_report(spec.state_dir, {"state": "finished", "what": "it was"})
    before = (spec.state_dir / REPORT_NAME).read_bytes()
    daemon = Daemon(dataclasses.replace(spec, regions=("a",)))
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: bool(nodes))
    assert await end(daemon, running) == 0
    assert (spec.state_dir / REPORT_NAME).read_bytes() == before


async def test_a_region_that_serves_says_nothing_of_its_former_learner(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    names = ("a", "b", "c")
    begin_run(spec.state_dir, "run", names, finished="run.steps is reached")
    write_process(spec.state_dir, {"state": "done", "reason": "", "crashes": 0, "hangs": 0, "exit_code": 0})
    settings = ("rounds.fragments=24", "rounds.sync_every=24")
    peers = dict.fromkeys(names[1:])
    daemon = Daemon(dataclasses.replace(spec, regions=names, peers=peers, is_serving=True, shared_settings=settings))
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: bool(nodes) and daemon.node is not None)
    await in_thread(daemon._threads.background, bool)
    assert nodes[0].transport._env.hello.settings == settings[:1], "peers are told what the ledger does not hold"
    status = daemon.status()
    assert status["learner_process"] == {}
    assert [learner["code"] for learner in status["health"]["alerts"] if "LEARNER" in learner["code"]] == []
    since_unix = status["health"]["since_unix"]
    assert 0 < since_unix <= status["clock"]["unix"]
    assert daemon.status()["health"]["since_unix"] == since_unix, "the state is the same"
    assert "this daemon has started" in {note["text"] for note in status["notes"]}
    assert await end(daemon, running) == 0
    assert not (spec.state_dir / HISTORY_NAME).exists()


async def test_what_is_left_behind(spec: NodeSpec, nodes: list[node_module.Node]) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    assert (spec.state_dir / ADMIN_PORT_NAME).read_text().strip().isdigit()
    assert await end(daemon, running) == 0
    assert not (spec.state_dir / ADMIN_PORT_NAME).exists(), "whoever has the port next is not this daemon"
    assert not spec.learner_socket.exists()
    assert (spec.state_dir / REPORT_NAME).exists()
    await learner.close()
    assert [path.name for path in spec.state_dir.glob(".*")] == []
    RegionStore(spec.state_dir).close()  # the lock is free


async def test_a_learner_that_is_still_there_at_the_end_is_no_fault(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    assert isinstance(await learner.hear(), Welcome)
    assert await learner.hear() == ShardsGiven(0, tuple(range(SHARDS)), (0,) * SHARDS)
    assert await learner.hear() == RunAdvanced(0, None)
    assert await end(daemon, running) == 0
    assert await learner.reader.read() == b""
    assert faults == []
    assert daemon.status()["offers"] == [], "an operator may ask to the last"
    await learner.close()


async def test_a_full_disk_refuses_a_new_learner_for_now_and_the_daemon_goes_on(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise StorageError("the disk is full")

    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    with monkeypatch.context() as patch:
        patch.setattr(reception_module, "allot_incarnation", refuse)
        learner = await Learner.attach(spec)
        answer = await learner.hear()
    assert isinstance(answer, Refuse)
    assert not answer.is_final
    await learner.close()
    assert daemon.notes.alarms == 1
    again = await Learner.attach(spec)
    assert isinstance(await again.hear(), Welcome)
    await again.close()
    assert await end(daemon, running) == 0


async def test_an_attach_waits_for_the_disk_and_the_loop_does_not(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fsync on the loop's thread, none of the learners that come meanwhile is welcomed out of turn."""
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    first = await Learner.attach(spec)
    await first.hear()
    await first.close()
    loop_thread, gate, waiting = threading.get_ident(), threading.Event(), threading.Event()
    on_loop: list[str] = []

    def slow(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            if threading.get_ident() == loop_thread:
                on_loop.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            elif "trained" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                waiting.set()
                gate.wait(120)
            real(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", slow(os.fsync))
    monkeypatch.setattr(os, "fdatasync", slow(os.fdatasync))
    second = await Learner.attach(spec)
    await eventually(waiting.is_set)
    assert daemon.status()["learner"] is None, "the loop answers"
    third = await Learner.attach(spec)  # a newer process: the second is refused, with its number allotted
    answer = await second.hear()
    assert isinstance(answer, Refuse)
    third.say(Report(5, 50, None, 1, 0, None, None, 5, None))
    await eventually(lambda: daemon.notes.last[-1]["text"] == "Report before its welcome: ignored")
    assert daemon.status()["learner"] is None
    gate.set()
    welcome = await third.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation == 3, "the second one's is used up"
    await eventually(lambda: daemon.status()["learner"] is not None)
    assert daemon.status()["learner"]["incarnation"] == 3
    assert on_loop == []
    for learner in (second, third):
        await learner.close()
    assert await end(daemon, running) == 0


async def test_a_learner_that_goes_while_the_disk_is_slow_is_not_attached(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, waiting = threading.Event(), threading.Event()
    real = reception_module.read_trained

    def slow(*args: Any) -> Any:
        waiting.set()
        gate.wait(120)
        return real(*args)

    monkeypatch.setattr(reception_module, "read_trained", slow)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await eventually(waiting.is_set)
    await learner.close()
    await eventually(lambda: not daemon.learner_server.is_attached)
    gate.set()
    await eventually(lambda: not any(task.get_name() == "welcome" for task in daemon._tasks))
    assert nodes[0].learner.status is None
    assert await end(daemon, running) == 0


async def test_a_region_that_lost_its_disk_uses_no_incarnation_that_the_ledger_knows(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "newest_incarnation", lambda _, region: 41 if region == "a" else 99)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    welcome = await learner.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation == 42
    await learner.close()
    assert await end(daemon, running) == 0


async def test_what_recovery_found_damaged_is_an_alarm_and_in_the_status(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    save_manifest(spec.state_dir, MANIFEST)
    store = RegionStore(spec.state_dir)
    store.load(2)
    theta = np.zeros(MANIFEST.fragments[0].size, np.float32)
    store.store_state(0, 0, theta, theta, b"d" * 32)
    store.close()
    (state_file,) = spec.state_dir.glob("state/f000*")
    state_file.write_bytes(state_file.read_bytes()[:-1] + b"x")
    with (spec.state_dir / "ledger.log").open("ab") as file:
        file.write(b"half")
    (spec.state_dir / "learner").mkdir()
    (spec.state_dir / "learner" / "trained-1").write_bytes(b"half")
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: "disk" in daemon.status())
    disk = daemon.status()["disk"]
    assert (disk["files_set_aside"], disk["ledger_cut_bytes"], disk["refused"]) == (1, 4, "")
    notes = [note for note in daemon.notes.last if note["kind"] == "disk"]
    assert [note["is_alarm"] for note in notes] == [True, True, False]
    assert f"{state_file.name}.damaged" in notes[0]["text"]
    assert "trained-1" in notes[1]["text"]
    assert "4 bytes" in notes[2]["text"]
    learner = await Learner.attach(spec)
    welcome = await learner.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation == 2
    await learner.close()
    assert await end(daemon, running) == 0


async def test_a_fault_of_the_core_ends_the_daemon_with_it(spec: NodeSpec, nodes: list[node_module.Node]) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    core = nodes[0].core

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("impossible")

    core.handle = broken  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="impossible"):
        async with asyncio.timeout(120):
            await running  # the next heartbeat's timer finds out
    await learner.close()
    assert not (spec.state_dir / ADMIN_PORT_NAME).exists()
    RegionStore(spec.state_dir).close()


def test_an_order_to_finish_before_there_is_a_run_is_refused_with_a_reason(spec: NodeSpec) -> None:
    daemon = Daemon(spec)
    with pytest.raises(ConfigError, match="no run to finish yet: a loads its kernels"):
        daemon.finish("asked by the operator")


async def test_what_the_supervisor_finds_wrong_with_the_learner_is_told_and_shown(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "LEARNER_PROCESS_POLL_S", 0.01)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    fault = {"state": "running", "reason": "hung: no step for 301 s", "crashes": 0, "hangs": 1}
    await eventually(lambda: (spec.state_dir / ADMIN_PORT_NAME).exists())
    assert daemon.status()["learner_process"] == {}
    write_process(spec.state_dir, {"state": "running", "reason": "", "crashes": 0, "hangs": 0})
    await eventually(lambda: daemon.status()["learner_process"] != {})
    assert daemon.status()["reason"] == "waits for the learner to list its tensors", "the kernels are there"
    with pytest.raises(ConfigError, match=r"no run to finish yet.*learner"):
        daemon.finish("asked by the operator")
    assert daemon.notes.last == []
    write_process(spec.state_dir, fault)
    await eventually(lambda: daemon.notes.last)
    assert daemon.notes.last[0]["text"] == "the learner's process has ended: hung: no step for 301 s"
    assert daemon.notes.alarms == 1
    write_process(spec.state_dir, {"state": "stopped", "reason": "crashed \x1b[2J", "crashes": 10, "hangs": 1})
    await eventually(lambda: len(daemon.notes.last) == 2)
    assert daemon.notes.last[1]["text"] == "the learner's process is stopped: crashed \\x1b[2J"
    reason = "the learner is stopped: crashed \\x1b[2J; "
    assert daemon.not_ready_reason().startswith(reason), "the learner comes first"
    assert daemon.status()["learner_process"]["reason"] == "crashed \\x1b[2J"
    assert await end(daemon, running) == 0


async def test_what_the_learner_warns_of_is_an_alarm_and_counted(spec: NodeSpec, nodes: list[node_module.Node]) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    learner.say(Report(41, 4100, 50.0, 10**8, 0, None, None, 41, None))
    learner.say(Warned("step 41: the loss is 50\x1b[2J, far above its range of late"))
    await eventually(lambda: any("the loss is 50" in note["text"] for note in daemon.notes.last))
    [note] = [note for note in daemon.notes.last if "the loss is 50" in note["text"]]
    assert note["text"].startswith("the learner warns: step 41: the loss is 50\\x1b[2J, far")
    assert note["is_alarm"]
    assert daemon.status()["learner"]["warnings"] == 1
    await learner.close()
    assert await end(daemon, running) == 0


async def test_a_daemon_that_starts_again_tells_only_what_still_holds(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "LEARNER_PROCESS_POLL_S", 0.01)
    for state, alarms in (("running", 0), ("stopped", 1)):
        write_process(spec.state_dir, {"state": state, "reason": "exit code 1", "crashes": 1, "hangs": 0})
        daemon = Daemon(spec)
        running = asyncio.create_task(daemon.run())
        await eventually(lambda daemon=daemon: daemon.status()["learner_process"] != {})
        assert daemon.notes.alarms == alarms
        assert await end(daemon, running) == 0


def test_the_learner_is_started_by_the_supervisor_and_only_if_it_does_not_run(
    spec: NodeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    daemon = Daemon(spec)
    daemon.learner_process = {"state": "stopped", "reason": "", "crashes": 10, "hangs": 0}
    monkeypatch.delenv("DILOCO_SUPERVISOR_PID", raising=False)
    with pytest.raises(ConfigError, match="not started by"):
        daemon.start_learner()
    monkeypatch.setenv("DILOCO_SUPERVISOR_PID", str(os.getppid()))
    assert daemon.start_learner() == "stopped"
    assert signals == [(os.getppid(), signal.SIGUSR1)]
    daemon.learner_process["state"] = "running"
    with pytest.raises(ConfigError, match="runs already"):
        daemon.start_learner()
    (spec.state_dir / PROCESS_FILE).unlink(missing_ok=True)
    daemon.learner_process = {}
    with pytest.raises(ConfigError, match="not started by"):
        daemon.start_learner()
    assert len(signals) == 1
