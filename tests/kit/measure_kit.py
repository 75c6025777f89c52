"""Regions with real links on loopback that measure each other."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import BulkHeader, MergedStripe, Message
from diloco_node.core.types import Ballot
from diloco_node.measure import echoes, probes, requester
from diloco_node.measure.measurement import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.measure.requester import new_flow
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.peer_session import LinkTimes
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage, Probe
from tests.kit.waiting import Changing

RUN = "run1"
NAMES = ("a", "b", "c")
DEADLINE_S = 120.0
MB = 10**6
LINKS = LinkTimes(
    handshake_s=60.0,
    hello_s=60.0,
    fallback_s=0.3,
    backoff_min_s=0.02,
    backoff_max_s=0.2,
    violation_backoff_s=0.2,
    silent_s=60.0,
)


class FlowTimes(NamedTuple):
    """How long a flow is: `warm_up_ns` are not counted, `span_ns` are."""

    warm_up_ns: int
    span_ns: int


QUICK = FlowTimes(100_000_000, 400_000_000)
STRIPE = MergedStripe(Ballot(1, 2), 0, 0, 1, bytes(32), 0, 1)


class Region(Changing):
    """A transport with its Measuring, as `Node` joins them; rounds are kept in `rounds`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.pool = ThreadPoolExecutor(3)
        self.up: set[str] = set()
        self.rounds: list[BulkHeader] = []
        self.received: list[tuple[str, Message]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.transport: GrpcTransport
        self.measuring: Measuring

    async def start(self, folder: Path, peers: dict[str, str | None], budget: BudgetPlan) -> None:
        loop = asyncio.get_running_loop()
        self.transport = GrpcTransport(
            region=self.name,
            run_id=RUN,
            settings_digest="",
            manifest_digest="",
            identity=load_identity(folder / self.name),
            listen=("127.0.0.1", 0),
            peers=peers,
            handler=self,
            executor=self.pool,
            times=LINKS,
            budget=budget,
        )
        self.measuring = Measuring(
            region=self.name,
            transport=self.transport,
            spawn=self.spawn,
            executor=self.pool,
            now_ns=lambda: int(loop.time() * 1e9),
        )
        await self.transport.start()

    def command(self) -> MeasureCommand:
        """As a daemon's."""
        measuring = self.measuring
        return MeasureCommand(self.name, measuring.peers, lambda _: measuring.own_links(), lambda _: (None, ""))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        return task

    async def stop(self) -> None:
        await self.transport.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.pool.shutdown()

    def control_arrived(self, peer: str, message: Message) -> None:
        self.received.append((peer, message))
        if isinstance(message, MeasureMessage):
            self.measuring.control_arrived(peer, message)
        self.changed.set()

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        if is_up:
            self.up.add(peer)
        else:
            self.up.discard(peer)
        self.measuring.link_changed(peer, is_up=is_up)
        self.changed.set()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        if isinstance(header, Probe):
            return self.measuring.transfer_opened(peer, header, raw_bytes)
        return memoryview(bytearray(raw_bytes))

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        if isinstance(header, Probe):
            self.measuring.transfer_closed(peer, header, buffer, is_whole=is_whole)
        else:
            self.rounds.append(header)
        self.changed.set()

    def lane(self, peer: str, lane: str = "measurement") -> int:
        return int(self.transport.budget_status()["peers"][peer]["lanes"][lane]["used_bytes"])


class Regions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_run(folder, RUN, list(NAMES))
        self.all: dict[str, Region] = {}

    async def start(self, names: str = "ab", budget: dict[str, BudgetPlan] | None = None) -> list[Region]:
        """All linked with all: later ones dial earlier ones."""
        ports: dict[str, int] = {}
        for name in names:
            region = self.all[name] = Region(name)
            peers = {one: f"127.0.0.1:{ports[one]}" if one in ports else None for one in names if one != name}
            await region.start(self.folder, peers, (budget or {}).get(name, BudgetPlan()))
            ports[name] = region.transport.port
        for region in self.all.values():
            await region.until(lambda region=region: len(region.up) == len(names) - 1)
        return list(self.all.values())

    async def stop(self) -> None:
        for region in self.all.values():
            await region.stop()


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience with a machine that stands still: an echo or an end that comes late is none that stays away."""
    for module, name in (
        (echoes, "UNANSWERED_AFTER_S"),
        (requester, "REPLY_S"),
        (requester, "START_S"),
        (requester, "LATE_S"),
        (probes, "START_S"),
        (probes, "LATE_S"),
    ):
        monkeypatch.setattr(module, name, DEADLINE_S / 2)


def wish(number: int, **changes: Any) -> msg.MeasurementRequested:
    """What a peer would ask for: that we send to it over the link."""
    given: dict[str, Any] = {"is_requester_sending": False, "warm_up_ns": 0, "span_ns": 1000, "bytes_max": 1000}
    return msg.MeasurementRequested(number, **{**given, **changes})


def a_flow(
    peer: str = "b", *, is_sending: bool = True, times: FlowTimes = QUICK, bytes_max: int = 10**9
) -> tuple[str, msg.MeasurementRequested]:
    warm_up_ns, span_ns = times
    return peer, new_flow(is_sending, warm_up_ns=warm_up_ns, span_ns=span_ns, bytes_max=bytes_max)


async def idle(region: Region) -> None:
    """Wait until a region has done what peers asked for."""
    serving = list(region.measuring.responder.serving.values())
    if serving:
        await asyncio.wait(serving, timeout=DEADLINE_S)
    assert region.measuring.describe() == ""
