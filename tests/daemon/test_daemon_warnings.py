"""Alarms of a daemon: of its recovery, its core, its supervisor and its learner."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from diloco_node.daemon import daemon as daemon_module
from diloco_node.daemon import node as node_module
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import ConfigError
from diloco_node.health.alert_kinds import LEARNER_MISSING
from diloco_node.state_names import ADMIN_PORT_NAME
from diloco_node.storage.store import RegionStore
from diloco_node.supervisor.process_file import PROCESS_FILE, write_process
from diloco_node.wire.learner_link import (
    Report,
    Warned,
    Welcome,
)
from tests.kit.daemon_kit import Learner, end
from tests.kit.node_kit import MANIFEST
from tests.kit.waiting import eventually


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
    with pytest.raises(ConfigError, match="no run yet to finish: a loads its kernels"):
        daemon.running_node("finish").finish("asked by the operator")


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
    with pytest.raises(ConfigError, match=r"no run yet to finish.*learner"):
        daemon.running_node("finish").finish("asked by the operator")
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


async def test_a_reason_that_the_learners_fault_says_is_not_said_again(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(spec)
    reason = daemon.not_ready_reason()
    assert reason
    for fault, told in {
        f"{reason}: its process runs": f"{reason}: its process runs",
        "hung": f"hung; {reason}",
    }.items():
        monkeypatch.setattr(daemon_module, "learner_fault", lambda _, fault=fault: (LEARNER_MISSING, fault))
        assert daemon.not_ready_reason() == told


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
