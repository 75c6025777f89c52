"""Both sides of a fetch: every order is answered once, by the bytes that were asked for."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.core.events import Event, FetchFailed, FetchPayload, FetchState, Note, PayloadStored, StateStored
from diloco_node.core.messages import Payload, PayloadRequested, Refused, State, StateRequested
from diloco_node.core.types import Stripe
from diloco_node.daemon.effects import disk_writes
from diloco_node.daemon.effects import fetch as fetch_module
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.fetch import SERVES_MAX, SERVES_OF_A_PEER_MAX, Fetcher
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.parameters import Parameters
from diloco_node.errors import StorageError
from diloco_node.storage.store import RegionStore
from tests.kit.node_kit import (
    MANIFEST,
    FakeTransport,
    HeldExecutor,
    InlineExecutor,
    Tasks,
    encoded,
    make_parameters,
    settle,
    theta_of,
)
from tests.kit.waiting import eventually


class Bench:
    def __init__(self, parameters: Parameters, store: RegionStore) -> None:
        self.parameters, self.store = parameters, store
        self.transport = FakeTransport()
        self.tasks = Tasks()
        self.posted: list[Event] = []
        self.notes: list[Note] = []
        self.pool: Any = InlineExecutor()
        self.initial = InitialStates(len(MANIFEST.fragments), store)
        self.fetcher = Fetcher(
            parameters=parameters,
            store=store,
            transport=self.transport,
            pool=self.pool,
            files=self.pool,
            post=self.posted.append,
            note=self.notes.append,
            spawn=self.tasks.spawn,
            initial=self.initial,
            writes=DiskWrites(self.notes.append),
        )
        blocks = parameters.blocks[0]
        half = blocks.block_count // 2
        self.stripes = (Stripe("b", 0, half), Stripe("c", half, blocks.block_count))
        self.body = encoded(blocks, theta_of(0, 3)).tobytes()
        edge = blocks.span_bytes(0, half)
        self.digest = payload_digest([stripe_digest(self.body[:edge]), stripe_digest(self.body[edge:])])

    def payload_order(self, peer: str = "b", version: int = 1) -> FetchPayload:
        return FetchPayload(peer, 0, version, self.digest, self.stripes)

    def state(self, version: int, seed: int = 5) -> tuple[State, bytes]:
        theta, momentum = theta_of(0, seed), theta_of(0, seed + 1)
        return State(0, version, fragment_digest(theta, momentum)), theta.tobytes() + momentum.tobytes()

    def keep(self, version: int, seed: int = 5) -> bytes:
        """Put a state on this region's disk; its digest."""
        header, body = self.state(version, seed)
        theta, momentum = np.split(np.frombuffer(body, np.float32), 2)
        self.store.store_state(0, version, theta, momentum, header.digest)
        return header.digest

    async def arrive(self, peer: str, header: Payload | State, body: bytes, *, is_whole: bool = True) -> bool:
        if not self.fetcher.expects(peer, header, len(body)):
            return False
        await self.fetcher.take_transfer(peer, header, np.frombuffer(body, np.uint8), is_whole=is_whole)
        return True

    def watchdogs(self) -> int:
        return sum(not pending.watchdog.cancelled() for pending in self.fetcher.pending.values())


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    parameters, store = await make_parameters(tmp_path)
    bench_ = Bench(parameters, store)
    yield bench_
    for pending in bench_.fetcher.pending.values():
        pending.watchdog.cancel()
    assert bench_.tasks.errors == []
    store.close()


# ---- asking ----------------------------------------------------------------------------------------------------------


async def test_a_payload_that_was_asked_for_is_stored_and_told(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order())
    assert bench.transport.sent == [("b", PayloadRequested(0, 1, bench.digest))]
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bench.body)
    norms = squared_norms(bench.fetcher.parameters.blocks[0], bench.body)
    assert bench.posted == [PayloadStored(0, 1, bench.digest, tuple(norms))]
    assert bench.store.read_payload(0, 1, bench.digest).tobytes() == bench.body
    assert not await bench.arrive("b", Payload(0, 1, bench.digest), bench.body), "only once"


async def test_a_payload_of_other_bytes_is_refused_and_not_stored(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order())
    wrong = bytearray(bench.body)
    wrong[499] ^= 1
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bytes(wrong))
    assert bench.posted == [FetchFailed("b", 0, 1, "the payload does not match its digest")]
    with pytest.raises(StorageError):
        bench.store.read_payload(0, 1, bench.digest)


@pytest.mark.parametrize(
    ("peer", "version", "is_same_digest", "extra"),
    [("c", 1, True, b""), ("b", 2, True, b""), ("b", 1, False, b""), ("b", 1, True, b"x")],
)
async def test_what_was_not_asked_for_is_not_taken_and_the_watchdog_goes_on(
    bench: Bench, peer: str, version: int, is_same_digest: bool, extra: bytes
) -> None:
    bench.fetcher.ask(bench.payload_order())
    header = Payload(0, version, bench.digest if is_same_digest else b"z" * 32)
    assert not await bench.arrive(peer, header, bench.body + extra)
    assert bench.watchdogs() == 1, "an answer must still come, whatever else the peer sends"
    assert bench.posted == []


async def test_silence_is_an_answer_in_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "FETCH_SILENCE_S", 0.0)
    bench.fetcher.ask(bench.payload_order())
    bench.fetcher.ask(FetchState("b", 0, 1, b"d" * 32))
    await settle()
    assert bench.posted == [FetchFailed("b", 0, 1, "no answer in time"), FetchFailed("b", 0, 1, "no answer in time")]


async def test_a_transfer_that_takes_too_long_is_a_failure_and_its_bytes_are_taken_nevertheless(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "TRANSFER_S_MIN", 0.0)
    monkeypatch.setattr(fetch_module, "SLOW_BYTES_PER_S", 1e9)
    header, body = Payload(0, 1, bench.digest), np.frombuffer(bench.body, np.uint8)
    bench.fetcher.ask(bench.payload_order())
    assert bench.fetcher.expects("b", header, len(bench.body))
    await eventually(lambda: bench.posted, "the failure")
    assert bench.posted == [FetchFailed("b", 0, 1, "too slow; it may still come")]
    bench.fetcher.ask(bench.payload_order("c"))
    await bench.fetcher.take_transfer("b", header, body, is_whole=True)
    (_, stored) = bench.posted
    assert isinstance(stored, PayloadStored)
    assert await bench.arrive("c", header, bench.body)
    assert len(bench.posted) == 2, "it is here already"


async def test_other_bytes_that_come_late_are_not_said_to_be_of_the_donor_that_was_asked_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "FETCH_SILENCE_S", 0.0)
    bench.fetcher.ask(bench.payload_order("b"))
    await settle()
    monkeypatch.undo()
    bench.fetcher.ask(bench.payload_order("c"))
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bytes(len(bench.body)))
    reason = "b, asked before, has sent it: the payload does not match its digest"
    assert bench.posted[1:] == [FetchFailed("c", 0, 1, reason)]


async def test_a_transfer_that_breaks_off_and_a_lost_link_are_one_failure(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order())
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bench.body, is_whole=False)
    bench.fetcher.peer_lost("b")
    assert bench.posted == [FetchFailed("b", 0, 1, "the transfer broke off")]


async def test_what_could_not_even_be_asked_has_failed_at_once(bench: Bench) -> None:
    bench.transport.is_down = True
    bench.fetcher.ask(bench.payload_order())
    assert bench.posted == [FetchFailed("b", 0, 1, "no link")]
    assert not bench.watchdogs()
    bench.transport.is_down = False
    bench.fetcher.ask(bench.payload_order())
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bench.body)
    (event,) = bench.posted[1:]
    assert isinstance(event, PayloadStored)


async def test_a_lost_link_fails_what_was_asked_of_that_peer(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order("b"))
    bench.fetcher.ask(FetchState("c", 0, 1, b"d" * 32))
    bench.fetcher.peer_lost("b")
    assert bench.posted == [FetchFailed("b", 0, 1, "link lost")]
    bench.fetcher.peer_lost("b")
    assert len(bench.posted) == 1


async def test_a_refusal_fails_the_version_it_names_only(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order())
    bench.fetcher.on_refusal("b", Refused(0, 9, "gone"))
    bench.fetcher.on_refusal("c", Refused(0, 1, "gone"))
    assert bench.posted == []
    bench.fetcher.on_refusal("b", Refused(0, 1, "gone"))
    assert bench.posted == [FetchFailed("b", 0, 1, "gone")]


async def test_a_payload_that_came_by_itself_ends_the_fetch_of_it(bench: Bench) -> None:
    """The core counts it as stored: a failure of this fetch later would be taken for one of the next."""
    bench.fetcher.ask(bench.payload_order())
    bench.fetcher.drop_fetch(0, 2)
    bench.fetcher.drop_fetch(0, 1)
    assert await bench.arrive("b", Payload(0, 1, bench.digest), bench.body), "so that its end is seen"
    assert bench.fetcher.pending == {}
    with pytest.raises(StorageError):
        bench.store.read_payload(0, 1, bench.digest)
    bench.fetcher.ask(bench.payload_order(version=2))
    assert not await bench.arrive("b", Payload(0, 1, bench.digest), bench.body)
    assert bench.posted == []


async def test_the_late_transfer_of_an_earlier_fetch_does_not_end_the_later_one(bench: Bench) -> None:
    bench.fetcher.ask(bench.payload_order())
    assert bench.fetcher.expects("b", Payload(0, 1, bench.digest), len(bench.body))
    bench.fetcher.drop_fetch(0, 1)
    bench.fetcher.ask(bench.payload_order(version=2))
    body = np.frombuffer(bench.body, np.uint8)
    await bench.fetcher.take_transfer("b", Payload(0, 1, bench.digest), body, is_whole=False)
    assert bench.posted == []
    assert bench.watchdogs() == 1


async def test_a_state_is_taken_at_the_very_version_and_digest_that_the_ledger_names(bench: Bench) -> None:
    header, body = bench.state(3)
    bench.fetcher.ask(FetchState("b", 0, 3, header.digest))
    assert bench.transport.sent == [("b", StateRequested(0, 3, header.digest))]
    for version in (2, 4, 2**62):
        assert not await bench.arrive("b", replace(header, version=version), body), "another version"
    other_digest, other_body = bench.state(3, seed=7)
    assert not await bench.arrive("b", other_digest, other_body), "another state of the version"
    assert not await bench.arrive("b", header, body[:-4])
    assert await bench.arrive("b", header, body)
    assert bench.posted == [StateStored(0, 3, header.digest)]
    theta, momentum = bench.store.read_state(0, 3)
    assert theta.tobytes() + momentum.tobytes() == body


async def test_a_state_of_other_bytes_is_refused(bench: Bench) -> None:
    header, body = bench.state(3)
    bench.fetcher.ask(FetchState("b", 0, 3, header.digest))
    assert await bench.arrive("b", header, bytes(4) + body[4:])
    assert bench.posted == [FetchFailed("b", 0, 3, "the state is not what the ledger names")]
    assert bench.store.state_versions(0) == (0,)


@pytest.mark.parametrize("is_right", [True, False])
async def test_an_earlier_state_that_comes_late_is_a_start_and_no_answer_for_the_newer(
    bench: Bench, *, is_right: bool
) -> None:
    """Else a line on which a state takes longer than the ledger names newer ones brings none, ever."""
    (earlier, body), (newer, newer_body) = bench.state(3), bench.state(8, seed=7)
    bench.fetcher.ask(FetchState("b", 0, 3, earlier.digest))
    (pending,) = bench.fetcher.pending.values()
    bench.fetcher._on_delay(pending)
    bench.fetcher.ask(FetchState("b", 0, 8, newer.digest))
    assert bench.posted == [FetchFailed("b", 0, 3, "no answer in time")]
    assert await bench.arrive("b", earlier, body if is_right else bytes(len(body)))
    assert bench.posted[1:] == [StateStored(0, 3, earlier.digest)] * is_right
    assert await bench.arrive("b", newer, newer_body)
    assert bench.posted[-1] == StateStored(0, 8, newer.digest)


async def test_a_peer_that_never_answers_fills_no_memory(bench: Bench) -> None:
    for version in range(1, 50):
        bench.fetcher.ask(FetchState("b", 0, version, b"d" * 32))
        bench.fetcher._on_delay(next(reversed(bench.fetcher.pending.values())))
    assert len(bench.fetcher.pending) == SERVES_OF_A_PEER_MAX
    assert len(bench.posted) == 49


async def test_theta_0_must_be_the_one_of_genesis(bench: Bench) -> None:
    header, body = bench.state(0)
    bench.fetcher.ask(FetchState("b", 0, 0, b"other"))
    before = bench.store.read_state(0, 0)[0].tobytes()
    assert not await bench.arrive("b", header, body)
    assert bench.store.read_state(0, 0)[0].tobytes() == before
    bench.fetcher.ask(FetchState("b", 0, 0, header.digest))
    assert await bench.arrive("b", header, body)
    assert bench.posted[-1] == StateStored(0, 0, header.digest)


async def test_the_learners_own_theta_0_is_not_written_over_a_fetched_one(bench: Bench) -> None:
    header, body = bench.state(0)
    bench.fetcher.ask(FetchState("b", 0, 0, header.digest))
    assert await bench.arrive("b", header, body)
    own = [theta_of(fragment, 77) for fragment in range(2)]
    digests = [fragment_digest(theta, np.zeros_like(theta)) for theta in own]
    assert [bench.initial.store_own(fragment, theta) for fragment, theta in enumerate(own)] == digests, "of one model"
    assert bench.store.read_state(0, 0)[0].tobytes() == body[: len(body) // 2]
    assert bench.store.read_state(1, 0)[0].tobytes() == own[1].tobytes()
    bench.initial.forget_fetched()
    bench.initial.store_own(0, own[0])
    assert bench.store.read_state(0, 0)[0].tobytes() == own[0].tobytes(), "nothing names the fetched one any more"


@pytest.mark.parametrize("is_payload", [True, False])
async def test_what_came_waits_for_room_on_the_own_disk_and_is_not_sent_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_payload: bool
) -> None:
    """Else each try brings gigabytes over the link that nobody can store, and nobody hears why."""
    monkeypatch.setattr(disk_writes, "STORAGE_RETRY_S", 0.0)
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    header, body = (Payload(0, 1, bench.digest), bench.body) if is_payload else bench.state(3)
    bench.fetcher.ask(bench.payload_order() if is_payload else FetchState("b", 0, 3, header.digest))
    arrival = asyncio.create_task(bench.arrive("b", header, body))
    await settle()
    (refusal,) = bench.fetcher.writes.refusals.items()
    assert "of b" in refusal[0]
    assert "the disk is full" in refusal[1][1]
    assert [note.is_alarm for note in bench.notes] == [True]
    bench.fetcher.peer_lost("b")  # it has sent all
    assert bench.posted == []
    free = 2**30
    assert await arrival
    (event,) = bench.posted
    assert isinstance(event, PayloadStored if is_payload else StateStored)
    assert bench.fetcher.writes.refusals == {}
    assert len(bench.transport.sent) == 1


# ---- serving ---------------------------------------------------------------------------------------------------------


async def test_a_payload_is_served_from_disk(bench: Bench) -> None:
    edge = bench.parameters.blocks[0].span_bytes(0, bench.stripes[0].block_stop)
    body = np.frombuffer(bench.body, np.uint8)
    bench.store.store_payload(0, 1, bench.digest, [body[:edge], body[edge:]])
    bench.fetcher.serve("c", PayloadRequested(0, 1, bench.digest))
    await bench.tasks.finish()
    assert bench.transport.transfers == [("c", Payload(0, 1, bench.digest), bench.body)]
    assert bench.fetcher.serves == 0


async def test_a_state_is_served_from_disk_at_the_version_that_was_asked_for(bench: Bench) -> None:
    digest = bench.keep(8)
    bench.keep(16, seed=3)
    bench.fetcher.serve("c", StateRequested(0, 8, digest))
    await bench.tasks.finish()
    ((_, header, body),) = bench.transport.transfers
    theta, momentum = np.split(np.frombuffer(body, np.float32), 2)
    assert header == State(0, 8, digest)
    assert fragment_digest(theta, momentum) == digest


async def test_a_state_that_is_not_what_the_ledger_names_is_not_served(bench: Bench) -> None:
    bench.keep(8)
    bench.fetcher.serve("c", StateRequested(0, 8, b"other" * 6 + b"!!"))
    await bench.tasks.finish()
    assert bench.transport.sent == [("c", Refused(0, 8, "gone"))]
    assert bench.store.set_aside == [], "it is whole, only another one"


async def test_a_state_is_not_read_on_the_loop(bench: Bench) -> None:
    digest = bench.keep(0)
    executor = HeldExecutor()
    bench.fetcher.files = executor
    read: list[int] = []
    real = bench.store.read_state_bytes
    bench.store.read_state_bytes = lambda *args: read.append(1) or real(*args)  # type: ignore[method-assign,func-returns-value]
    bench.fetcher.serve("c", StateRequested(0, 0, digest))
    await settle()
    assert read == [], "reading and hashing a fragment takes too long for the loop"
    await executor.let_go()
    await bench.tasks.finish()
    ((_, header, _),) = bench.transport.transfers
    assert header == State(0, 0, digest)


@pytest.mark.parametrize(
    ("want", "reason"),
    [
        (PayloadRequested(0, 9, b"d" * 32), "gone"),
        (StateRequested(0, 9, b"d" * 32), "gone"),
        (PayloadRequested(99, 1, b"d" * 32), "unknown"),
        (StateRequested(-1, 0, b"d" * 32), "unknown"),
    ],
)
async def test_what_is_not_here_is_refused_with_the_reason(
    bench: Bench, want: PayloadRequested | StateRequested, reason: str
) -> None:
    bench.fetcher.serve("c", want)
    await bench.tasks.finish()
    assert bench.transport.sent == [("c", Refused(want.fragment, want.version, reason))]
    assert bench.fetcher.serves == 0


async def test_what_can_not_be_read_just_now_is_not_called_gone(bench: Bench) -> None:
    def refuse(*_: Any) -> Any:
        raise StorageError("can't read it: too many open files")

    bench.store.read_payload = refuse  # type: ignore[method-assign]
    bench.fetcher.serve("c", PayloadRequested(0, 1, bench.digest))
    await bench.tasks.finish()
    assert bench.transport.sent == [("c", Refused(0, 1, "busy"))], "a peer that is gone is not asked for it again"


async def test_a_peer_that_asks_all_the_time_leaves_the_others_their_part(bench: Bench) -> None:
    bench.transport.is_slow = True
    requests = [StateRequested(0, version, bench.keep(version)) for version in range(SERVES_OF_A_PEER_MAX + 1)]
    for _ in range(100):
        for request in requests:
            bench.fetcher.serve("c", request)
    await settle(50)
    assert bench.fetcher.serves == SERVES_OF_A_PEER_MAX
    assert set(bench.transport.sent) == {("c", Refused(0, SERVES_OF_A_PEER_MAX, "busy"))}
    for request in requests[:-1]:
        bench.fetcher.serve("b", request)
    await settle(50)
    assert {peer for peer, _ in bench.transport.sent} == {"c"}, "b is served"
    await bench.transport.deliver()
    await bench.tasks.finish()
    assert bench.fetcher.serves == 0
    bench.fetcher.serve("c", requests[0])
    await settle(50)
    assert bench.fetcher.serves == 1, "and c again, when its own are done"
    await bench.transport.deliver()
    await bench.tasks.finish()


async def test_only_so_many_are_served_at_once(bench: Bench) -> None:
    bench.transport.is_slow = True
    digest = bench.keep(0)
    for number in range(SERVES_MAX + 1):
        bench.fetcher.serve(f"c{number}", StateRequested(0, 0, digest))
        await settle(50)
    assert bench.fetcher.serves == SERVES_MAX
    assert bench.transport.sent == [(f"c{SERVES_MAX}", Refused(0, 0, "busy"))]
    await bench.transport.deliver()
    await bench.tasks.finish()
    assert bench.fetcher.serves == 0


async def test_a_link_lost_while_serving_frees_the_place(bench: Bench) -> None:
    bench.transport.is_down = True
    bench.fetcher.serve("c", StateRequested(0, 0, bench.keep(0)))
    await bench.tasks.finish()
    assert bench.fetcher.serves == 0
    assert bench.transport.sent == []
