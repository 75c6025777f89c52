"""daemon/witness_link.py and storage/swapped_object.py over an S3 server: turns, payloads, a bucket that is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core import events as ev
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.witness import QUIET_NS, RECORD_BYTES_MAX
from diloco_node.core.member_kind import Membership
from diloco_node.core.messages import (
    AppendEntriesReply,
    BaseSent,
    Message,
    Payload,
    PayloadRequested,
    Refused,
    RequestVote,
    RequestVoteReply,
    StateRequested,
)
from diloco_node.core.types import RateLimits, RunSettings
from diloco_node.daemon import lone_region, witness_link
from diloco_node.daemon.lone_region import WitnessBucket
from diloco_node.daemon.witness_link import WitnessLink, WitnessRoute
from diloco_node.errors import StoreRefused
from diloco_node.numeric import U8
from diloco_node.storage import object_store
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.object_store import BucketObjects, bucket_scheme
from diloco_node.storage.swapped_object import BEFORE, FOLDER, RECORD, SwappedObject
from diloco_node.transport.pacing.pacer import Pacer
from tests.kit.ledger_kit import a_round, append_entries, chain, disk_of
from tests.kit.s3_server import s3_server

pytest.importorskip("obstore")
BUCKET: Final = "sites"
BODY: Final = np.arange(1000, dtype=np.uint8)
LOG: Final = chain(1, 1, 1, bodies=lambda index, _: a_round(index))
WAIT_S: Final = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server(BUCKET) as environment:
        yield environment


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty place of a test."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


def opened(url: str) -> SwappedObject:
    return SwappedObject(url, bucket_scheme(url))


def test_what_is_not_there_is_an_error_of_ours_and_ends_no_daemon(url: str) -> None:
    bucket = opened(url)
    with pytest.raises(DamagedFile, match="is not there"):
        bucket.read("payloads/none", 20)
    bucket.remove("payloads/none")
    nowhere = opened("s3://no-such-bucket/run")
    with pytest.raises(StoreRefused, match="no such bucket"):
        nowhere.read_tagged(RECORD, 20)
    with pytest.raises(StoreRefused, match="no such bucket"):
        nowhere.write("payloads/none", [b"1"])


def test_of_writers_that_read_the_same_version_one_writes(url: str) -> None:
    bucket = opened(url)
    bucket.check(FOLDER)
    assert bucket.sizes() == {}, "the probe is gone"
    assert bucket.read_tagged(RECORD, 20) is None
    assert bucket.swap(RECORD, b"0", None)
    assert not bucket.swap(RECORD, b"other", None)
    for turn in range(5):
        answer = bucket.read_tagged(RECORD, 20)
        assert answer is not None
        # Other bytes in each turn, as a record has: an ETag is of the bytes, and equal ones would be no change.
        names = [b"%d of turn %d" % (number, turn) for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            outcomes = list(threads.map(lambda name, tag=answer[1]: bucket.swap(RECORD, name, tag), names))
        assert outcomes.count(True) == 1, (turn, outcomes)
        after = bucket.read_tagged(RECORD, 20)
        assert after is not None
        assert after[0] == names[outcomes.index(True)]
    with pytest.raises(StoreRefused, match="at most 1 belong there"):
        bucket.read_tagged(RECORD, 1)


@pytest.mark.parametrize(("condition", "word"), [("create", "If-None-Match"), ("tag", "If-Match")])
def test_a_store_that_ignores_conditions_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, condition: str, word: str
) -> None:
    swap = SwappedObject.swap

    def careless(self: SwappedObject, key: str, data: bytes, tag: Any) -> bool:
        if (tag is None) == (condition == "create"):
            self.write(key, [data])
            return True
        return swap(self, key, data, tag)

    monkeypatch.setattr(SwappedObject, "swap", careless)
    with pytest.raises(StoreRefused, match=f"does not keep to {word} when"):
        opened(url).check(FOLDER)


class FakeStore:
    """The payloads of a region."""

    def read_payload(self, fragment: int, version: int, digest: bytes) -> U8:
        if (fragment, version, digest) != (0, 2, LOG[1].body.payload_digest):  # type: ignore[union-attr]
            raise DamagedFile("it is not there")
        return BODY


class FakeFetcher:
    """Takes what was asked for."""

    def __init__(self) -> None:
        self.taken: list[U8] = []
        self.refusals: list[Refused] = []
        blocks = type("Blocks", (), {"encoded_bytes": BODY.nbytes})()
        self.parameters = type("Parameters", (), {"blocks": [blocks]})()

    def expects(self, peer: str, header: Payload, raw_bytes: int) -> bool:
        return True

    def on_refusal(self, peer: str, message: Refused) -> None:
        self.refusals.append(message)

    async def take_transfer(self, peer: str, header: Payload, body: U8, *, is_whole: bool) -> None:
        assert is_whole
        self.taken.append(body)


class Site:
    """A region's way to the witness, without its daemon."""

    def __init__(self, region: str, url: str) -> None:
        self.now_ns = 0
        self.answers: list[tuple[str, Message]] = []
        self.notes: list[ev.Note] = []
        self.fetcher = FakeFetcher()
        self.tasks: set[str] = set()
        self.lasting = {"witness watch"}
        self.pacer = Pacer((), meter=cast(Any, SimpleNamespace(sample=lambda: None)), send=lambda *_: None)
        runtime = SimpleNamespace(
            spec=SimpleNamespace(region=region, run_id="run", settings=RunSettings()),
            store=FakeStore(),
            notes=SimpleNamespace(add=self.notes.append),
            spawn=self._spawn,
            now_ns=lambda: self.now_ns,
        )
        self.link = WitnessLink(cast(Any, runtime), self.pacer, self._take)
        self.link.fetcher = cast(Any, self.fetcher)
        self.follow(url)

    def follow(self, url: str, since: int = 1) -> None:
        """The log names a witness there from this entry on."""
        self.link.follow(Roster([Membership("w", "witness", address=url, since=since)]))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.add(name)
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(lambda _: self.tasks.discard(name))
        return task

    def _take(self, event: ev.Event) -> None:
        assert isinstance(event, ev.MessageArrived)
        self.answers.append((event.peer, event.message))

    async def ask(self, message: Message) -> Message:
        """Send it, and wait for the answer."""
        count = len(self.answers)
        self.link.send(message)
        await until(lambda: len(self.answers) > count)
        return self.answers[count][1]


async def until(is_done: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_leader_keeps_its_tail_there_and_the_other_region_gets_it_with_payloads(url: str) -> None:
    async def scenario() -> None:
        here, there = Site("a", url), Site("b", url)
        started = await here.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        assert isinstance(started, AppendEntriesReply)
        assert (started.accepted, started.durable_index) == (True, 1)
        # Entry 2 is taken once its payload is there; that of entry 3 is not on this disk.
        await until_index(here, 2)
        assert opened(url).read(f"{FOLDER}/{LOG[1].hash.hex()}", BODY.nbytes).tolist() == BODY.tolist()

        request = RequestVote(2, True, 1, 1, disk_of("b"), True)
        refused = await there.ask(request)
        assert isinstance(refused, RequestVoteReply)
        assert not refused.granted
        await until(lambda: len(there.answers) > 1)
        peer, tail = there.answers[1]
        assert (peer, getattr(tail, "entries", None)) == ("w", LOG[1:2])
        digest = LOG[1].body.payload_digest  # type: ignore[union-attr]
        there.link.send(PayloadRequested(0, 2, digest))
        await until(lambda: there.fetcher.taken)
        assert there.fetcher.taken[0].tolist() == BODY.tolist()
        there.link.send(PayloadRequested(0, 3, digest))
        there.link.send(StateRequested(0, 3, digest))
        await until(lambda: len(there.fetcher.refusals) == 2)

        there.now_ns = QUIET_NS
        granted = await there.ask(RequestVote(2, False, 2, 1, disk_of("b"), True))
        assert isinstance(granted, RequestVoteReply)
        assert granted.granted
        lost = await here.ask(append_entries(LOG, 3, 2, term=1))
        assert isinstance(lost, AppendEntriesReply)
        assert (lost.accepted, lost.term) == (False, 2)
        assert there.notes == []
        assert {note.text for note in here.notes} <= {"w does not answer: it is not there", "w answers again"}
        for site in (here, there):
            site.link.close()

    asyncio.run(scenario())


async def until_index(site: Site, index: int, last: int = 3) -> None:
    for _ in range(100):
        reply = await site.ask(append_entries(LOG, 2, last, term=1))
        assert isinstance(reply, AppendEntriesReply)
        if reply.durable_index == index:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the payload does not get there")


def test_a_bucket_that_is_away_gives_no_answer_and_is_told_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    endpoint = "http://127.0.0.1:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

    async def scenario() -> None:
        site = Site("a", url)
        site.link.send(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        await until(lambda: site.notes)
        assert site.link.fault
        assert "nobody answers" in site.notes[0].text
        site.link.send(BaseSent(1, 2, 1, 1, LOG[0].hash, b""))
        await asyncio.sleep(0.5)
        assert (len(site.notes), site.answers) == (1, [])
        site.link.close()

    asyncio.run(scenario())


def test_an_older_record_in_its_place_is_answered_by_nobody_and_named(url: str) -> None:
    async def scenario() -> None:
        site, bucket = Site("a", url), opened(url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        older = bucket.read_tagged(RECORD, RECORD_BYTES_MAX)
        assert older is not None
        await until_index(site, 2, last=2)
        newer = bucket.read_tagged(RECORD, RECORD_BYTES_MAX)
        assert newer is not None
        assert bucket.swap(RECORD, older[0], newer[1])
        count = len(site.answers)
        site.link.send(append_entries(LOG, 2, 2, term=1))
        await until(lambda: site.link.fault)
        assert "holds an older record than was read here before" in site.notes[-1].text
        assert len(site.answers) == count
        bucket.remove(RECORD)
        site.link.send(RequestVote(2, True, 1, 1, disk_of("a"), True))
        await until(lambda: "older record" not in site.link.fault)
        assert "has lost the record of w, which gives no vote" in site.link.fault, "another cause, another remedy"
        assert len(site.notes) == 1
        site.link.close()

    asyncio.run(scenario())


def test_an_emptied_bucket_is_no_witness_that_is_there(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(witness_link, "LOOK_S", 0.05)

    async def scenario() -> None:
        site, bucket = Site("a", url), opened(url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        assert site.link.there == {"w"}
        bucket.remove(RECORD)
        await until(lambda: site.link.fault)  # by the look at it
        await site.ask(BaseSent(1, 2, 1, 1, LOG[0].hash, b""))
        assert site.link.there == {"w"}, "a leader makes it anew"
        site.link.close()

        voter = Site("b", url)
        bucket.remove(RECORD)
        voter.link.send(RequestVote(2, True, 1, 1, disk_of("b"), True))
        await until(lambda: voter.link.fault)
        assert (voter.link.there, voter.answers) == (frozenset(), [])
        assert "has lost the record of w, which gives no vote" in voter.notes[0].text
        voter.link.close()

    asyncio.run(scenario())


def test_answers_and_uploads_of_a_witness_that_was_removed_come_too_late(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The next one has its name: an upload that counted there, too, would be acknowledged without the payload."""
    swap, write, is_held = SwappedObject.swap, BucketObjects.write, threading.Event()

    def slow_swap(self: SwappedObject, *args: Any) -> bool:
        is_held.wait(WAIT_S)
        return swap(self, *args)

    def slow_write(self: BucketObjects, *args: Any, **names: Any) -> None:
        is_held.wait(WAIT_S)
        write(self, *args, **names)

    async def scenario() -> None:
        site = Site("a", url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        monkeypatch.setattr(BucketObjects, "write", slow_write)
        await site.ask(append_entries(LOG, 2, 2, term=1))
        first = site.link._place
        await until(lambda: LOG[1].hash in first.uploads)
        monkeypatch.setattr(SwappedObject, "swap", slow_swap)
        site.link.send(BaseSent(2, 2, 1, 1, LOG[0].hash, b""))
        await asyncio.sleep(0.2)
        count = len(site.answers)
        site.follow(f"{url}/other", since=9)
        is_held.set()
        await until(lambda: not first.uploads and not site.link._is_busy)
        assert len(site.answers) == count
        assert site.link._place.stored == {}
        reply = await site.ask(BaseSent(2, 1, 1, 1, LOG[0].hash, b""))
        assert isinstance(reply, AppendEntriesReply)
        reply = await site.ask(append_entries(LOG, 2, 2, term=2))
        assert isinstance(reply, AppendEntriesReply)
        assert reply.durable_index == 1, "its payload is not there"
        site.link.close()

    asyncio.run(scenario())


def test_what_no_record_names_is_removed_after_a_day(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    bucket = opened(url)
    bucket.write(f"{FOLDER}/{LOG[1].hash.hex()}", [BODY])
    bucket.write(f"{FOLDER}/orphan", [BODY])
    bucket.write("other/of-the-users", [BODY])

    async def scenario() -> None:
        monkeypatch.setattr(witness_link, "SWEEP_EVERY", timedelta(0))
        site = Site("a", url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        await until_index(site, 2, last=2)
        await until(lambda: site.tasks <= site.lasting)
        assert f"{FOLDER}/orphan" in bucket.sizes(), "it may be an upload of just now"
        monkeypatch.setattr(witness_link, "ORPHAN_AGE", timedelta(seconds=-10))
        await site.ask(append_entries(LOG, 3, 2, term=2))
        await until(lambda: f"{FOLDER}/orphan" not in bucket.sizes())
        kept = {RECORD, f"{FOLDER}/{LOG[1].hash.hex()}", "other/of-the-users"}
        assert bucket.sizes().keys() == kept
        site.link.close()

    asyncio.run(scenario())


def test_an_upload_counts_for_a_day(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Then another region may have removed it."""

    async def scenario() -> None:
        site = Site("a", url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        await site.ask(append_entries(LOG, 2, 2, term=1))
        await until(lambda: LOG[1].hash in site.link._place.stored)
        monkeypatch.setattr(witness_link, "ORPHAN_AGE", timedelta(seconds=-10))
        late = await site.ask(append_entries(LOG, 2, 2, term=1))
        assert isinstance(late, AppendEntriesReply)
        assert late.durable_index == 1
        monkeypatch.undo()
        site.link.close()

    asyncio.run(scenario())


def test_each_part_of_a_large_object_is_asked_for_before_it_goes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 5 << 20)
    bucket, body, counts = BucketObjects(url, bucket_scheme(url)), np.arange(3 << 20, dtype=np.uint32), list[int]()
    bucket.write("large", [memoryview(body)], pace=counts.append)
    assert bucket.read("large", body.nbytes, pace=counts.append).tobytes() == body.tobytes()
    assert counts == 2 * [5 << 20, 5 << 20, 2 << 20]


def test_the_object_of_who_goes_on_alone_is_replaced_unless_somebody_writes_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone_region, "QUIET_NS", 0)
    empty = WitnessBucket(url)
    assert (empty.record, empty.keys) == (None, frozenset())
    empty.close("run")
    assert opened(url).read_tagged(RECORD, RECORD_BYTES_MAX) is None

    async def scenario() -> None:
        site = Site("a", url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        await until_index(site, 2, last=2)
        early, bucket = WitnessBucket(url), WitnessBucket(url)
        assert bucket.record is not None
        assert bucket.record.entries == LOG[1:2]
        assert bucket.keys == {RECORD, f"{FOLDER}/{LOG[1].hash.hex()}"}
        bucket.close("another run")
        assert opened(url).read_tagged(BEFORE, RECORD_BYTES_MAX) is None, "of another run"
        bucket.close("run")
        late = await site.ask(append_entries(LOG, 3, 2, term=1))
        assert isinstance(late, AppendEntriesReply)
        assert late.disk != bucket.record.disk, "of which the ledger knows nothing"
        with pytest.raises(StoreRefused, match="has just been written: another region goes on with it"):
            early.close("run")
        again = WitnessBucket(url)
        assert again.before == bucket.record, "what it acknowledged stays known"
        again.close("run")
        assert WitnessBucket(url).before == bucket.record, "an empty record takes no other's place"
        site.link.close()

    asyncio.run(scenario())
    with pytest.raises(StoreRefused, match="make an empty bucket of that name"):
        WitnessBucket("s3://no-such-bucket/run")
    opened(f"{url}-spoiled").swap(RECORD, b"", None)
    with pytest.raises(StoreRefused, match=f"{url}-spoiled/witness: .* remove witness/record there"):
        WitnessBucket(f"{url}-spoiled")


def test_traffic_with_the_bucket_is_within_the_budget(url: str) -> None:
    async def scenario() -> None:
        site = Site("a", url)
        site.pacer.set_plan(BudgetPlan(RateLimits(egress=20_000)))
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        started_s = time.monotonic()
        await until_index(site, 2, last=2)
        lanes = site.pacer.status()["peers"]["w"]["lanes"]
        assert lanes["control"]["used_bytes"] > 200
        assert lanes["rounds"]["used_bytes"] >= BODY.nbytes
        await site.link._may_send("w", 20_000)
        assert time.monotonic() - started_s > 0.7, "20 kB/s"
        site.pacer.set_plan(BudgetPlan(RateLimits(ingress=2_000_000)))
        site.pacer.sample()
        reading = asyncio.create_task(site.link._may_read("w", 1_000_000))
        await asyncio.sleep(0)
        site.pacer.sample()
        assert site.pacer._grants.region.debt_bytes(now_ns=time.monotonic_ns()) > 500_000, "it counts"
        assert not reading.done()
        reading.cancel()
        site.link.close()
        site.pacer.close()

    asyncio.run(scenario())


def test_another_runs_record_is_left_alone_and_named(url: str) -> None:
    async def scenario() -> None:
        site, other = Site("a", url), Site("a", url)
        other.link._run_id = "other"
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        other.link.send(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        await until(lambda: other.notes)
        assert f"{url}/{RECORD} holds the record of run run, and this is run other" in other.notes[0].text
        assert "`members remove w`, then `members witness` with an empty place" in other.notes[0].text
        for each in (site, other):
            each.link.close()

    asyncio.run(scenario())
    assert opened(url).read_tagged(RECORD, RECORD_BYTES_MAX) is not None


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda _: b"\xff" * 90, id="garbage"),
        pytest.param(lambda data: data.replace(b"\x01", b"\x02", 1), id="newer"),
    ],
)
def test_a_record_that_is_none_or_of_a_newer_version_is_named_before_it_is_needed(
    url: str, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(witness_link, "LOOK_S", 0.05)

    async def scenario() -> None:
        site, bucket = Site("a", url), opened(url)
        await site.ask(BaseSent(1, 1, 1, 1, LOG[0].hash, b""))
        sound = bucket.read_tagged(RECORD, RECORD_BYTES_MAX)
        assert sound is not None
        spoiled = spoil(sound.data)
        assert bucket.swap(RECORD, spoiled, sound.tag)
        await until(lambda: site.link.fault)
        assert f"{url}/{RECORD} holds no record that this version can read (" in site.notes[-1].text
        count = len(site.answers)
        site.link.send(BaseSent(1, 2, 1, 1, LOG[0].hash, b""))
        await until(lambda: not site.link._is_busy)
        assert (len(site.answers), len(site.notes)) == (count, 1)
        found = bucket.read_tagged(RECORD, RECORD_BYTES_MAX)
        assert found is not None
        assert found.data == spoiled, "nobody writes over it"
        site.link.close()

    asyncio.run(scenario())


def test_a_route_sends_to_the_bucket_what_is_for_the_witness() -> None:
    class Seen:
        def __init__(self) -> None:
            self.sent: list[str] = []

        def send(self, peer: str, message: Message) -> bool:
            self.sent.append(peer)
            return False

    links, witness = Seen(), Seen()
    cast(Any, witness).name = "w"
    cast(Any, witness).send = lambda message: witness.sent.append("w")
    route = WitnessRoute(cast(Any, links), cast(Any, witness))
    message = BaseSent(1, 1, 1, 1, LOG[0].hash, b"")
    assert (route.send("w", message), route.send("b", message)) == (True, False)
    assert (links.sent, witness.sent) == (["b"], ["w"])
