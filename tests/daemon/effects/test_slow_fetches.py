"""A region without a model fetches all of it over links that take long for each fragment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Event, FetchFailed, FetchPayload, FetchState, StateStored
from diloco_node.core.messages import BulkHeader, Message, Refused, State, StateRequested
from diloco_node.core.recovery.fetches import Fetches
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.fetch import FETCH_SILENCE_S, SERVES_OF_A_PEER_MAX, TRANSFER_S_MIN, Fetcher
from diloco_node.errors import LinkLost
from diloco_node.numeric import NS_PER_S
from diloco_node.storage.durable import DamagedFile
from tests.kit.node_kit import InlineExecutor, Tasks
from tests.kit.node_world import VirtualLoop

FRAGMENTS, VERSION, VALUES, DELAY_S = 8, 5, 4, 0.05
STATES = [np.full((2, VALUES), fragment, np.float32) for fragment in range(FRAGMENTS)]
DIGESTS = [fragment_digest(*state) for state in STATES]


def fetcher_of(transport: Any, tasks: Tasks, post: Any, **store: Any) -> Fetcher:
    """The daemon's side of fetches, with a store of these methods."""
    pool, notes = InlineExecutor(), DiskWrites(lambda _: None)
    parameters: Any = SimpleNamespace(
        versions=[VERSION] * FRAGMENTS, manifest=SimpleNamespace(fragments=[SimpleNamespace(size=VALUES)] * FRAGMENTS)
    )
    shared: dict[str, Any] = {"parameters": parameters, "store": SimpleNamespace(**store), "pool": pool, "files": pool}
    shared |= {"post": post, "note": lambda _: None, "spawn": tasks.spawn, "initial": None, "writes": notes}
    return Fetcher(**shared, transport=transport)


@dataclass
class Donor:
    """A region that has the model, and its link: a lane of transfers, each of which takes `seconds`.

    Attributes:
        endless: fragments of which a part comes, and then a byte now and then. ignored: no request for these is seen.
        read_s: how long its disk takes for a state.
    """

    name: str
    joiner: Joiner
    seconds: float
    endless: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()
    read_s: float = 0.0
    is_down: bool = False
    transfers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lane = asyncio.Lock()
        self.fetcher = fetcher_of(self, self.joiner.tasks, None, read_state_bytes=self._read)

    def _read(self, fragment: int, version: int, _digest: bytes) -> np.ndarray:
        if version < self.joiner.version() - 1:
            raise DamagedFile("the two newest are on the disk")
        return STATES[fragment].view(np.uint8).ravel()

    def send(self, peer: str, message: Message) -> bool:
        assert peer == "a"
        assert isinstance(message, Refused)
        asyncio.get_running_loop().call_later(DELAY_S, self.joiner.fetcher.on_refusal, self.name, message)
        return True

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        assert peer == "a"
        assert isinstance(header, State)
        await asyncio.sleep(self.read_s)
        async with self._lane:
            if self.is_down:
                raise LinkLost("down")
            self.transfers.append(header.fragment)
            is_taken = self.joiner.fetcher.expects(self.name, header, body.nbytes)
            await self.joiner.bring(1e9 if header.fragment in self.endless else self.seconds)
            if self.is_down:
                raise LinkLost("down")
        if is_taken:
            data = np.frombuffer(body, np.uint8)
            await self.joiner.fetcher.take_transfer(self.name, header, data, is_whole=True)

    def reject(self, peer: str, error: Exception) -> None:
        raise AssertionError(peer, error)


class Joiner:
    """Region a, which has nothing.

    snapshot_s: between two versions that the ledger names; 0: there is no newer one.
    is_narrow: all that comes shares its ingress.
    """

    def __init__(self, *, snapshot_s: float = 0, is_narrow: bool = False) -> None:
        self.tasks, self.failures = Tasks(), 0
        self._snapshot_s, self._is_narrow, self._open = snapshot_s, is_narrow, 0
        self.fetcher = fetcher_of(self, self.tasks, self.post, store_state=lambda *_: None)
        self.donors: dict[str, Donor] = {}
        self.effects = EffectBuffer("a")
        self.arrived: set[int] = set()
        self.complete = asyncio.Event()

    def add(self, name: str, seconds: float, **how: Any) -> Donor:
        self.donors[name] = donor = Donor(name, self, seconds, **how)
        return donor

    def version(self) -> int:
        """The newest that the ledger names."""
        return VERSION + int(asyncio.get_running_loop().time() // self._snapshot_s if self._snapshot_s else 0)

    async def bring(self, seconds: float) -> None:
        """Let a transfer come in that takes so long if nothing else comes."""
        if not self._is_narrow:
            await asyncio.sleep(seconds)
            return
        self._open += 1
        slice_s = min(10.0, seconds / 10)
        while seconds > 0:
            await asyncio.sleep(slice_s)
            seconds -= slice_s / self._open
        self._open -= 1

    def now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * NS_PER_S)

    def send(self, peer: str, message: Message) -> bool:
        assert isinstance(message, StateRequested)
        donor = self.donors[peer]
        if not donor.is_down and message.fragment not in donor.ignored:
            asyncio.get_running_loop().call_later(DELAY_S, donor.fetcher.serve, "a", message)
        return not donor.is_down

    def lose(self, name: str) -> None:
        self.donors[name].is_down = True
        self.fetcher.peer_lost(name)

    def post(self, event: Event) -> None:
        match event:
            case FetchFailed():
                self.failures += 1
                self.fetches.on_failure(event.peer, event.fragment, event.reason, now_ns=self.now_ns())
            case StateStored():
                assert event.digest == DIGESTS[event.fragment]
                assert event.fragment not in self.arrived or self._snapshot_s, "what is here is not stored again"
                self.arrived.add(event.fragment)
                self.fetches.on_end(event.fragment, version=event.version, is_state=True)
            case _:
                raise AssertionError(event)
        asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        if len(self.arrived) == FRAGMENTS:
            self.complete.set()
        for fragment in {*range(FRAGMENTS)} - self.arrived:
            self.fetches.request(fragment, self.version(), None, digest=DIGESTS[fragment])
        alive = [name for name, donor in self.donors.items() if not donor.is_down]
        self.fetches.pump(leader="b", alive=alive, now_ns=self.now_ns())
        for effect in self.effects.take():
            if isinstance(effect, FetchPayload | FetchState):
                self.fetcher.ask(effect)
        if (wake_at_ns := self.fetches.wake_at_ns) is not None:
            # A little later, for the clock's doubles.
            asyncio.get_running_loop().call_later((wake_at_ns - self.now_ns()) / NS_PER_S + 1e-3, self.pump)

    async def fetch_all(self, limit_s: float = 50_000) -> float:
        """Fetch each fragment; how many seconds of the virtual clock that takes."""
        start_s = asyncio.get_running_loop().time()
        self.fetches = Fetches(region="a", regions=("a", *self.donors), effects=self.effects)
        self.pump()
        async with asyncio.timeout(limit_s):
            await self.complete.wait()
        took_s = asyncio.get_running_loop().time() - start_s
        assert self.arrived == set(range(FRAGMENTS))
        assert self.tasks.errors == []
        return took_s

    @property
    def transfers(self) -> int:
        return sum(len(donor.transfers) for donor in self.donors.values())


def on_virtual_time(work: Any) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


@pytest.mark.parametrize("donors", [1, 2, 3, 4])
@pytest.mark.parametrize("seconds", [0.5, 9, 12, 29, 31, 40, 60, 120, 299])
def test_a_model_comes_over_links_of_any_speed_and_only_once(seconds: float, donors: int) -> None:
    """A donor sends one after the other. Requests that waited there for 30 s were given up, and sent nevertheless."""

    async def scenario() -> None:
        joiner = Joiner()
        for name in "bcde"[:donors]:
            joiner.add(name, seconds)
        took_s = await joiner.fetch_all()
        assert joiner.transfers == FRAGMENTS
        assert joiner.failures == 0
        assert took_s < seconds * (-(-FRAGMENTS // donors) + SERVES_OF_A_PEER_MAX) + 1

    on_virtual_time(scenario())


@pytest.mark.parametrize("seconds", [400, 1000, 5000])
@pytest.mark.parametrize("donors", [1, 2, 3])
def test_what_takes_longer_than_a_donor_has_comes_nevertheless(seconds: float, donors: int) -> None:
    async def scenario() -> None:
        joiner = Joiner()
        for name in "bcd"[:donors]:
            joiner.add(name, seconds)
        took_s = await joiner.fetch_all()
        assert took_s < (FRAGMENTS + 1) * seconds, "each donor sends on, and whatever comes first counts"
        assert joiner.transfers <= donors * FRAGMENTS + SERVES_OF_A_PEER_MAX

    on_virtual_time(scenario())


@pytest.mark.parametrize("snapshot_s", [50, 200])
@pytest.mark.parametrize("donors", [1, 2, 4, 7])
@pytest.mark.parametrize("seconds", [10, 100, 350])
def test_a_model_comes_over_a_narrow_line_while_newer_versions_are_named(
    seconds: float, donors: int, snapshot_s: float
) -> None:
    """What took longer than it had was fetched again at a newer version, and none of it was ever complete."""

    async def scenario() -> None:
        joiner = Joiner(snapshot_s=snapshot_s, is_narrow=True)
        for name in "bcdefgh"[:donors]:
            joiner.add(name, seconds)
        took_s = await joiner.fetch_all(limit_s=4 * FRAGMENTS * seconds)
        assert took_s < 2 * FRAGMENTS * seconds

    on_virtual_time(scenario())


@pytest.mark.parametrize("seconds", [0.5, 12, 40, 120])
def test_a_slow_disk_of_the_only_donor_costs_no_transfer(seconds: float) -> None:
    async def scenario() -> None:
        joiner = Joiner()
        joiner.add("b", seconds, read_s=45)
        await joiner.fetch_all()
        assert joiner.transfers == FRAGMENTS
        assert joiner.failures > 0, "it was requested again, and answered by the same transfer"

    on_virtual_time(scenario())


@pytest.mark.parametrize("seconds", [0.5, 12, 40, 120])
def test_what_a_donor_that_dies_has_not_sent_comes_from_another(seconds: float) -> None:
    async def scenario() -> None:
        joiner = Joiner()
        joiner.add("b", seconds)
        joiner.add("c", seconds)
        asyncio.get_running_loop().call_later(1.5 * seconds, joiner.lose, "b")
        took_s = await joiner.fetch_all()
        assert joiner.transfers <= FRAGMENTS + 1
        assert took_s < (FRAGMENTS + 1) * seconds

    on_virtual_time(scenario())


@pytest.mark.parametrize("seconds", [0.5, 40])
@pytest.mark.parametrize("endless", [frozenset(range(FRAGMENTS)), frozenset({0}), frozenset({2}), frozenset({7})])
def test_a_donor_that_begins_and_never_ends_holds_nothing_up_for_ever(seconds: float, endless: frozenset[int]) -> None:
    async def scenario() -> None:
        joiner = Joiner()
        joiner.add("b", seconds, endless=endless)
        joiner.add("c", seconds)
        took_s = await joiner.fetch_all()
        assert took_s < 2 * TRANSFER_S_MIN + FRAGMENTS * (seconds + 30)
        assert joiner.transfers <= FRAGMENTS + 1

    on_virtual_time(scenario())


def test_a_donor_that_leaves_a_request_out_is_not_waited_for_as_long_as_it_sends_others() -> None:
    async def scenario() -> None:
        joiner = Joiner()
        joiner.add("b", 40, ignored=frozenset({0}))
        joiner.add("c", 40)
        took_s = await joiner.fetch_all()
        assert 0 in joiner.donors["c"].transfers
        assert took_s < 40 * FRAGMENTS

    on_virtual_time(scenario())


def test_a_request_that_a_donor_has_overtaken_four_times_is_not_waited_for_any_more() -> None:
    async def scenario() -> None:
        joiner, loop = Joiner(), asyncio.get_running_loop()
        joiner.add("b", 0, ignored=frozenset(range(FRAGMENTS)))
        begun_s, posts = loop.time(), []
        joiner.fetcher.post = lambda event: posts.append((event, loop.time() - begun_s))
        for fragment in range(FRAGMENTS):
            joiner.fetcher.ask(FetchState("b", fragment, VERSION, DIGESTS[fragment]))
        for fragment in range(1, FRAGMENTS):
            await asyncio.sleep(20)
            body = STATES[fragment].view(np.uint8).ravel()
            header = State(fragment, VERSION, DIGESTS[fragment])
            assert joiner.fetcher.expects("b", header, body.nbytes), "late bytes are taken"
            await joiner.fetcher.take_transfer("b", header, body, is_whole=True)
        given_up = {event.fragment: at_s for event, at_s in posts if isinstance(event, FetchFailed)}
        assert given_up[0] == pytest.approx(20 * SERVES_OF_A_PEER_MAX + FETCH_SILENCE_S, abs=1)

    on_virtual_time(scenario())
