"""Real transports on loopback, a handler that keeps everything, and peers that do what a test wants."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diloco_node.core.messages import BulkHeader, Message
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import Identity, load_identity
from diloco_node.transport.peer_session import LinkTimes
from diloco_node.transport.streams import DialedStream, dial
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from tests.kit.stacks import to_its_end
from tests.kit.waiting import Changing, eventually

DEADLINE_S = 120.0
RUN = "run1"
FAST = LinkTimes(  # to come back; what ends a link comes late, for this machine may stand still
    handshake_s=60.0,
    hello_s=60.0,
    fallback_s=0.3,
    backoff_min_s=0.02,
    backoff_max_s=0.2,
    violation_backoff_s=0.2,
    ping_s=0.2,
    silent_s=60.0,
    transfer_silent_s=60.0,
)


class Recorder(Changing):
    """A handler that keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, Message]] = []
        self.changes: list[tuple[str, bool]] = []
        self.opened: list[tuple[str, BulkHeader, int]] = []
        self.closed: list[tuple[str, BulkHeader, bytes, bool]] = []
        self.is_up: dict[str, bool] = {}
        self.refuses: set[type] = set()

    def control_arrived(self, peer: str, message: Message) -> None:
        self.messages.append((peer, message))
        self.changed.set()

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        assert self.is_up.get(peer, False) is not is_up, "a change that changes nothing"
        self.is_up[peer] = is_up
        self.changes.append((peer, is_up))
        self.changed.set()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        self.opened.append((peer, header, raw_bytes))
        self.changed.set()
        return None if type(header) in self.refuses else memoryview(bytearray(raw_bytes))

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        self.closed.append((peer, header, bytes(buffer), is_whole))
        self.changed.set()


class Mesh:
    """Makes transports of one run, and stops them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executors = [ThreadPoolExecutor(2)]
        self.running: list[GrpcTransport] = []
        init_run(folder / "run", RUN, ["a", "b", "c"])
        init_run(folder / "stranger", RUN, ["a", "b", "c"])

    def another_executor(self) -> ThreadPoolExecutor:
        self.executors.append(ThreadPoolExecutor(2))
        return self.executors[-1]

    def identity(self, region: str, run: str = "run") -> Identity:
        return load_identity(self.folder / run / region)

    async def start(
        self, region: str, peers: dict[str, str | None], *, former: Collection[str] = (), **changes: Any
    ) -> tuple[GrpcTransport, Recorder]:
        """Start the transport of a region. `former`: of its peers, those that its ledger names as removed."""
        handler = changes.setdefault("handler", Recorder())
        options: dict[str, Any] = {
            "region": region,
            "run_id": RUN,
            "settings_digest": "settings",
            "founding_digest": "first",
            "settings": ("rounds.sync_every=24",),
            "manifest_digest": "manifest",
            "identity": self.identity(region),
            "listen": ("127.0.0.1", 0),
            "peers": peers,
            "executor": self.executors[0],
            "times": FAST,
            **changes,
        }
        transport = GrpcTransport(**options)
        if former:
            transport.follow(peers, former)
        await transport.start()
        self.running.append(transport)
        return transport, handler

    async def pair(self, **changes: Any) -> tuple[GrpcTransport, Recorder, GrpcTransport, Recorder]:
        """a and b, connected; a dials."""
        b, at_b = await self.start("b", {"a": None})
        a, at_a = await self.start("a", {"b": address(b)}, **changes)
        await at_a.until(lambda: at_a.is_up.get("b"))
        await at_b.until(lambda: at_b.is_up.get("a"))
        return a, at_a, b, at_b

    async def stop(self) -> None:
        for transport in self.running:
            await transport.stop()
        for executor in self.executors:
            executor.shutdown()


def address(transport: GrpcTransport) -> str:
    return f"127.0.0.1:{transport.port}"


@contextlib.asynccontextmanager
async def meshed(folder: Path) -> AsyncIterator[Mesh]:
    """A mesh that leaves no task behind."""
    made = Mesh(folder)
    yield made
    await to_its_end(made.stop(), "the end of the transports")
    await expect_no_orphans(DEADLINE_S)


async def expect_no_orphans(patience_s: float) -> None:
    """No task of ours is left; one that grpc made for a call that has ended may take some turns more."""
    left = {task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not _is_harness(task)}
    if ending := {task for task in left if _is_grpc(task)}:
        done, _ = await asyncio.wait(ending, timeout=patience_s)
        left -= done
    assert left == set(), "orphan tasks"


def _is_grpc(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "grpc" in Path(code.co_filename).parts


def _is_harness(task: asyncio.Task[Any]) -> bool:
    return "async_finalizer" in repr(task) or "_wrap" in repr(task) or "runner" in repr(task)


async def connect_as(mesh: Mesh, identity: Identity, transport: GrpcTransport, lane: e.Lane) -> DialedStream:
    """A stream to a transport of region b, from a peer that does what a test wants."""
    del mesh
    return await dial(identity, "b", address(transport), lane, timeout_s=DEADLINE_S)


def hello_of(region: str, lane: e.Lane, **changes: Any) -> bytes:
    hello = e.Hello(PROTOCOL_VERSION, RUN, "first", region, "settings", "manifest", b"i" * 16, lane, 1)
    return e.encode_hello(dataclasses.replace(hello, **changes))


async def rogue(mesh: Mesh, transport: GrpcTransport, region: str = "a") -> dict[e.Lane, DialedStream]:
    """Both streams to b with a right hello, and whatever comes after."""
    made = {lane: await connect_as(mesh, mesh.identity(region), transport, lane) for lane in e.Lane}
    for lane, stream in made.items():
        await stream.write(hello_of(region, lane))
        e.decode_hello(await stream.read())
    return made


async def read_on(stream: DialedStream) -> None:
    """Read until the stream ends, which raises LinkLost."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await stream.read()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What came before the other side ended the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def status_of(transport: GrpcTransport, peer: str, text: str) -> str:
    """What this side says of a peer, once it holds the text."""
    await eventually(lambda: text in transport.peer_status()[peer].error)
    return transport.peer_status()[peer].error
