"""A region and a leader that was captured: what it sends is refused before it is kept, and nothing breaks."""

from dataclasses import replace

import pytest

from diloco_node.core.events import (
    Effect,
    Event,
    LedgerPersisted,
    MessageArrived,
    Note,
    PayloadStored,
    PersistLedger,
    TimerFired,
)
from diloco_node.core.messages import AppendEntries, FinishRequested
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Entry, EntryBody, FinishedBody, LeaderBody, Recovered, RoundBody, Stripe
from diloco_node.errors import StorageError
from tests.kit.rounds_kit import GENESIS, MANIFEST, REGIONS, SECOND, SETTINGS, Ledger, committed_round, contribution

FIRST = replace(committed_round(0, 1, [contribution("a")]), stripes=(Stripe("a", 0, 4),))
BLOCKS = sum(-(-size // 256) for size in MANIFEST.fragments[0].piece_sizes)


def a_round(**changes: object) -> RoundBody:
    return replace(FIRST, stripes=(Stripe("a", 0, BLOCKS),), **changes)  # type: ignore[arg-type]


def a_region(*entries: Entry) -> RegionCore:
    held = frozenset((0, 1, FIRST.payload_digest) for _ in entries)
    return RegionCore(
        region="c",
        regions=REGIONS,
        run_id=GENESIS.run_id,
        settings_digest=GENESIS.settings_digest,
        manifest=MANIFEST,
        settings=SETTINGS,
        recovery=Recovered(1, "", entries, (0, 0) if entries else (-1, -1), held),
        seed=1,
        secret=bytes(32),
        now_ns=0,
    )


def deliver(core: RegionCore, *entries: Entry, after: Entry, committed: int = 3, term: int = 1) -> list[Effect]:
    return follow(core, MessageArrived("a", AppendEntries(term, 1, after.index, after.hash, entries, committed)))


def follow(core: RegionCore, event: Event) -> list[Effect]:
    """What comes of an event, with a disk that writes at once."""
    todo = core.handle(event, now_ns=1)
    records: list[Effect] = []
    while todo:
        effect = todo.pop(0)
        records.append(effect)
        if isinstance(effect, PersistLedger):
            todo += core.handle(LedgerPersisted(effect.token), now_ns=1)
    return records


def alarms(effects: list[Effect]) -> str:
    return " | ".join(effect.text for effect in effects if isinstance(effect, Note) and effect.is_alarm)


BAD: list[tuple[EntryBody, str]] = [
    (a_round(fragment=99), "there is no fragment 99"),
    (GENESIS, "a second genesis"),
    (a_round(version=7), "version 7 of fragment 0, the next is 1"),
    (LeaderBody("mallory"), "mallory is no region"),
]

WRONG: list[tuple[EntryBody, str]] = [
    (a_round(factors=(2.0,)), "its factor 0 is 2, 1 follows from its members"),
    (a_round(squared_norms=(4.6,)), "its sum of piece 0 has the squared norm 4.6, its members can't exceed 4.5"),
]
"""Only the leader of its own term can be blamed for it: on disk it may be of a time with other settings."""


@pytest.mark.parametrize(("body", "says"), BAD + WRONG)
def test_an_entry_that_can_not_be_is_refused_on_receipt_with_the_peer_named(body: EntryBody, says: str) -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core = a_region(*start)
    effects = deliver(core, ledger.add(body), after=start[-1])
    assert f"ignored entries from a, and follows it no more: entry 3: {says}" in alarms(effects)
    assert (core.ledger.last_index, core.history.versions) == (2, [-1, -1])
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert core.ledger.leader == ""


def test_a_good_round_is_kept() -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core = a_region(*start)
    effects = deliver(core, ledger.add(a_round()), after=start[-1])
    assert alarms(effects) == ""
    assert (core.ledger.last_index, core.history.versions) == (3, [1, 0])


@pytest.mark.parametrize(("body", "says"), BAD)
def test_a_ledger_on_disk_with_such_an_entry_is_damaged(body: EntryBody, says: str) -> None:
    ledger = Ledger()
    for item in (LeaderBody("a"), GENESIS, body):
        ledger.add(item)
    with pytest.raises(StorageError, match="the ledger on disk makes no sense: entry 3"):
        a_region(*ledger.entries)


def test_a_leader_does_not_propose_what_the_others_would_refuse_and_forgets_the_round() -> None:
    ledger = Ledger()
    core = a_region(ledger.add(LeaderBody("c")), ledger.add(GENESIS))
    lonely = core.ledger
    lonely._election.lead(now_ns=SECOND)
    lonely._has_payload = lambda body: True
    core.leader.rounds[0] = object()  # type: ignore[assignment]
    core._propose(a_round(version=7), SECOND)
    assert lonely.last_index == 2
    assert core.leader.rounds == {}
    assert "does not append what can't be: entry 3: version 7" in alarms(core._effects.take())


def test_wrong_numbers_of_an_earlier_term_are_taken() -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    body, _ = WRONG[0]
    effects = deliver(a_region(*start), ledger.add(body), after=start[-1], term=2)
    assert alarms(effects) == ""


OTHER = (2.0,)
"""Norms of the payload as it is decoded here; the entry says 1."""

DIFFERS = "piece 0 of its payload has the squared norm 2, it says 1"


def without_payload(*entries: Entry) -> RegionCore:
    core = a_region(*entries)
    core.versions._payloads.clear()
    return core


@pytest.mark.parametrize("is_payload_first", [False, True])
def test_an_entry_whose_payload_is_not_as_it_says_is_refused_whichever_comes_first(is_payload_first: bool) -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core, entry = without_payload(*start), ledger.add(a_round())
    stored = PayloadStored(0, 1, FIRST.payload_digest, OTHER)
    effects = core.handle(stored, now_ns=1) if is_payload_first else []
    effects += deliver(core, entry, after=start[-1], committed=2)
    if not is_payload_first:
        assert core.ledger.leader == "a"
        effects += core.handle(stored, now_ns=1)
    assert f"ignored entries from a, and follows it no more: entry 3: {DIFFERS}" in alarms(effects)
    assert (core.ledger.last_index, core.ledger.leader, core.ledger.missing_payloads()) == (2, "", ())


def test_a_payload_as_the_entry_says_is_acknowledged() -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core = without_payload(*start)
    effects = core.handle(PayloadStored(0, 1, FIRST.payload_digest, (1.0,)), now_ns=1)
    effects += deliver(core, ledger.add(a_round()), after=start[-1], committed=2)
    assert (core.ledger.last_index, alarms(effects)) == (3, "")


def test_what_a_majority_has_committed_is_taken_with_an_alarm() -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core = without_payload(*start)
    effects = deliver(core, ledger.add(a_round()), after=start[-1])
    effects += follow(core, PayloadStored(0, 1, FIRST.payload_digest, OTHER))
    effects += follow(core, TimerFired())
    assert f"taken all the same: {DIFFERS}" in alarms(effects)
    assert core.ledger.missing_payloads() == ()
    assert core.history.versions == [1, 0]


def test_an_early_end_is_not_acknowledged_and_refused_after_an_election_timeout() -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core, end = a_region(*start), ledger.add(FinishedBody((0, 0), "it pleases me"))
    assert alarms(deliver(core, end, after=start[-1], committed=2)) == ""
    assert (core.ledger.last_index, core.ledger.leader) == (2, "a"), "others may know of an order"
    beat = MessageArrived("a", AppendEntries(1, 2, end.index, end.hash, (), 2))
    assert alarms(core.handle(beat, now_ns=SETTINGS.election_timeout_ns)) == ""
    effects = core.handle(beat, now_ns=SETTINGS.election_timeout_ns + 1)
    assert "it ends a run without a limit, and no operator's order came here" in alarms(effects)
    assert core.ledger.leader == ""


@pytest.mark.parametrize("is_order_first", [False, True])
def test_an_end_is_acknowledged_when_the_order_comes_or_a_majority_has_it(is_order_first: bool) -> None:
    ledger = Ledger()
    start = (ledger.add(LeaderBody("a")), ledger.add(GENESIS))
    core, end = a_region(*start), ledger.add(FinishedBody((0, 0), "the loss is flat"))
    order = MessageArrived("b", FinishRequested("the loss is flat"))
    effects = core.handle(order, now_ns=1) if is_order_first else []
    effects += deliver(core, end, after=start[-1], committed=2)
    assert core.ledger.last_index == (3 if is_order_first else 2)
    effects += follow(core, order)
    effects += deliver(core, after=end, committed=2)
    assert core.ledger.last_index == 3
    committed = a_region(*start)
    effects += deliver(committed, end, after=start[-1])
    assert committed.history.finished is not None
    assert alarms(effects) == ""
