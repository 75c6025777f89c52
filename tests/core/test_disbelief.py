"""A region and a leader that was captured: what it sends is refused before it is kept, and nothing breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_node.core.events import Effect, LedgerPersisted, MessageArrived, Note, PersistLedger, TimerFired
from diloco_node.core.messages import AppendEntries
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Entry, EntryBody, LeaderBody, Recovered, RoundBody, Stripe
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
        now_ns=0,
    )


def deliver(core: RegionCore, *entries: Entry, after: Entry) -> list[Effect]:
    message = AppendEntries(1, 1, after.index, after.hash, entries, entries[-1].index)
    todo = core.handle(MessageArrived("a", message), now_ns=1)
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
    (a_round(factors=(2.0,)), "its factor 0 is 2, 1 follows from its members"),
    (a_round(squared_norms=(4.6,)), "the squared norm 4.6, its members can't exceed 4.5"),
]


@pytest.mark.parametrize(("body", "says"), BAD)
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
    lonely._election.lead()
    lonely._has_payload = lambda body: True
    core.leader.rounds[0] = object()  # type: ignore[assignment]
    core._propose(a_round(version=7), SECOND)
    assert lonely.last_index == 2
    assert core.leader.rounds == {}
    assert "does not append what can't be: entry 3: version 7" in alarms(core._effects.take())
