"""A daemon of one region within the test, with a learner that a test leads."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import RunSettings
from diloco_node.daemon import daemon as daemon_module
from diloco_node.daemon import node as node_module
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.spec import NodeSpec
from diloco_node.shared_memory import MemoryStore
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
    ToLearner,
    frame,
    frame_length,
)
from tests.kit.node_kit import MANIFEST


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
