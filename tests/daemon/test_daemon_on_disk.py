"""A daemon whose ledger makes no sense, whose run has ended, or whose disk is full, slow or lost."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.data_shards import SHARDS
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import FinishedBody, LeaderBody
from diloco_node.daemon import daemon as daemon_module
from diloco_node.daemon import node as node_module
from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.learner import reception as reception_module
from diloco_node.daemon.manifest_file import MANIFEST_NAME, save_manifest
from diloco_node.daemon.run_history import HISTORY_NAME
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.stopping import STOP_S_DEFAULT, STOP_VARIABLE
from diloco_node.daemon.work import in_thread
from diloco_node.errors import ConfigError, DiskRefused, LedgerLost, StorageError
from diloco_node.state_names import ADMIN_PORT_NAME, LEDGER_NAME
from diloco_node.storage.store import RegionStore
from diloco_node.supervisor.process_file import write_process
from diloco_node.wire.learner_link import (
    Refuse,
    Report,
    RunAdvanced,
    ShardsGiven,
    Welcome,
)
from tests.kit.begun_kit import begin_run
from tests.kit.daemon_kit import Learner, end
from tests.kit.node_kit import MANIFEST
from tests.kit.waiting import eventually


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


async def test_a_budget_that_the_disk_refuses_is_told_and_not_taken(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_manifest(spec.state_dir, MANIFEST)
    file, codes = spec.state_dir / "run.toml", []
    file.write_text('[run]\nid = "run"\n[regions.a]\naddress = "h:1"\n[budget]\negress = "1 Mbit/s"\n')
    daemon = Daemon(dataclasses.replace(spec, config_file=file), lambda code, _: codes.append(code))
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: bool(nodes))
    before, refusal = daemon.spec.budget, OSError(errno.ENOSPC, "full")

    def refuse(*_: object) -> None:
        raise refusal

    with monkeypatch.context() as full_disk:
        full_disk.setattr(NodeSpec, "save", refuse)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(
            lambda: any("SIGHUP: the budget stays as it is: can't write" in note["text"] for note in daemon.notes.last)
        )
        with pytest.raises(StorageError, match="can't write"):
            daemon.set_budget({"egress": "2 Mbit/s"})
    assert daemon.spec.budget == before
    assert daemon.set_budget({"egress": "2 Mbit/s"}) == daemon.spec.budget.to_plain() != before.to_plain()
    assert codes == []
    assert await end(daemon, running) == 0
    assert codes == [0]


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


@pytest.mark.parametrize("damage", ["gone", "damaged", "of another model"])
async def test_another_model_than_the_runs_costs_neither_ledger_nor_vote(
    spec: NodeSpec, nodes: list[node_module.Node], damage: str
) -> None:
    """A script that was changed, and a file that is lost: the ledger is whole, and the run's."""
    begin_run(spec.state_dir, "run", ("a",))
    manifest, other = spec.state_dir / MANIFEST_NAME, build_manifest(MANIFEST.tensors[:1], 2)
    manifest.unlink()
    if damage == "damaged":
        manifest.write_bytes(b"{")
    elif damage == "of another model":
        save_manifest(spec.state_dir, other)
    before = {name: (spec.state_dir / name).read_bytes() for name in (LEDGER_NAME, "vote.bin")}
    running = asyncio.create_task(Daemon(spec).run())
    if damage == "of another model":
        cause, remedy = f"{manifest} lists the tensors of another model", "remove it, and the learner lists its tensors"
    else:
        cause, remedy = f"{manifest} is gone, and the learner lists the tensors of another model", "start the run's own"
        learner = await Learner.attach(spec, tensors=other.tensors)
        answer = await learner.hear()
        assert isinstance(answer, Refuse)
        assert answer.is_final
        assert cause in answer.reason
        await learner.close()
    with pytest.raises(ConfigError) as caught:
        async with asyncio.timeout(120):
            await running
    assert f"{cause} ({other.digest[:16]}) than run run trains ({MANIFEST.digest[:16]}): {remedy}" in str(caught.value)
    assert {name: (spec.state_dir / name).read_bytes() for name in before} == before
    assert [path.name for path in spec.state_dir.glob("*.damaged-*") if MANIFEST_NAME not in path.name] == []
    assert nodes == []
    assert manifest.exists() is (damage == "of another model"), "the run's own script may still list its tensors"


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
    write_report(spec.state_dir, {"state": "finished", "end": {"is_written": True}, "what": "it was"})
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
    assert (spec.state_dir / REPORT_NAME).exists()
    await learner.close()
    assert [path.name for path in spec.state_dir.glob(".*")] == []
    RegionStore(spec.state_dir).close()  # the lock is free


@pytest.mark.parametrize(("number", "stop_s"), [(None, STOP_S_DEFAULT), (signal.SIGTERM, 7.5)])
async def test_a_signal_leaves_as_much_time_as_the_supervisor_that_sends_it(
    spec: NodeSpec,
    nodes: list[node_module.Node],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals | None,
    stop_s: float,
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "7.5")
    save_manifest(spec.state_dir, MANIFEST)
    limits: list[tuple[int, float]] = []
    daemon = Daemon(spec, lambda code, limit_s: limits.append((code, limit_s)))
    drain, drains = node_module.Node.drain, []
    monkeypatch.setattr(node_module.Node, "drain", lambda node, limit_s: drains.append(limit_s) or drain(node, limit_s))
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: daemon.node is not None)
    if number is None:
        daemon.end()
    else:
        os.kill(os.getpid(), number)
    assert await asyncio.wait_for(running, 120) == 0
    assert (limits, drains) == ([(0, stop_s)], [stop_s])


async def test_a_signal_in_a_runs_own_end_leaves_as_much_time_as_the_supervisor_that_sends_it(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "7.5")
    save_manifest(spec.state_dir, MANIFEST)
    limits: list[tuple[int, float]] = []
    daemon = Daemon(spec, lambda code, limit_s: limits.append((code, limit_s)))
    drain = node_module.Node.drain

    async def slow_drain(node: node_module.Node, limit_s: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: len(limits) > 1)
        await drain(node, limit_s)

    monkeypatch.setattr(node_module.Node, "drain", slow_drain)
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: daemon.node is not None)
    daemon.end()
    assert await asyncio.wait_for(running, 120) == 0
    assert limits == [(0, STOP_S_DEFAULT), (0, 7.5)]


async def test_a_disk_that_refuses_at_the_end_takes_the_reason_away_from_nobody(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux makes a file system read-only after an error, and the ledger on it is lost."""
    unlink = Path.unlink

    def refuse(path: Path, *words: Any, **named: Any) -> None:
        if path.name == ADMIN_PORT_NAME:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, *words, **named)

    monkeypatch.setattr(Path, "unlink", refuse)
    save_manifest(spec.state_dir, MANIFEST)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: daemon.node is not None)
    daemon.end(LedgerLost("2 entries"))
    with pytest.raises(LedgerLost, match="2 entries"):
        await asyncio.wait_for(running, 120)
    assert LedgerLost.exit_code == 6
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


async def test_a_disk_that_refuses_the_list_of_tensors_costs_no_ledger(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another try may go through; a ledger that makes no sense is another thing."""
    begin_run(spec.state_dir, spec.run_id, ("a",))
    (spec.state_dir / "manifest.json").unlink(missing_ok=True)
    before = (spec.state_dir / LEDGER_NAME).read_bytes()

    def refuse(*_: object) -> None:
        raise DiskRefused("no room")

    monkeypatch.setattr(daemon_module, "save_manifest", refuse)
    daemon = Daemon(dataclasses.replace(spec, regions=("a",)))
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    with pytest.raises(DiskRefused, match="no room"):
        async with asyncio.timeout(120):
            await running
    await learner.close()
    assert (spec.state_dir / LEDGER_NAME).read_bytes() == before
    assert not [path for path in spec.state_dir.iterdir() if "damaged" in path.name]
