"""core/rounds/entry_check.py: every rule an entry must keep, and that the check can go back and forth with the log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.summary import encode_summary
from diloco_node.core.rounds.claim_limits import INCARNATIONS_AHEAD_MAX
from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import (
    Ballot,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    RoundBody,
    SnapshotBody,
    Stripe,
    SummaryBody,
)
from tests.kit.rounds_kit import GENESIS, MANIFEST, REGIONS, Ledger, committed_round, contribution

RUN = ("run", "settings", MANIFEST.digest, REGIONS)
BLOCKS = [sum(-(-size // 256) for size in fragment.piece_sizes) for fragment in MANIFEST.fragments]


def whole(body: RoundBody) -> RoundBody:
    return replace(body, stripes=(Stripe("a", 0, 1), Stripe("b", 1, BLOCKS[body.fragment])))


def a_round(*learners: str, fragment: int = 0, version: int = 1, **fields: object) -> RoundBody:
    members = [contribution(name, fragment, **fields) for name in learners or ("a", "b")]  # type: ignore[arg-type]
    return whole(committed_round(fragment, version, members, ballot=Ballot(1, version)))


SUM_EVERY = 4


def new_check() -> EntryCheck:
    return EntryCheck(RUN, MANIFEST, summary_entries=SUM_EVERY)


def check_after(*bodies: EntryBody) -> tuple[EntryCheck, Ledger]:
    check, ledger = new_check(), Ledger()
    for body in bodies:
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    return check, ledger


def fault_of(body: EntryBody, *before: EntryBody) -> str:
    check, ledger = check_after(*before)
    return check.fault(ledger.add(body))


FIRST = a_round()
SECOND = a_round("a", version=2, base=1, steps=(10, 20), snapshot=2)
DISCARD = DiscardedBody("b", 1, 0, 10, 15, 64, "died")


def test_an_honest_ledger_is_accepted_whole() -> None:
    check_after(
        LeaderBody("a"),
        GENESIS,
        FIRST,
        a_round("c", fragment=1),
        DISCARD,
        LeaderBody("b"),
        SECOND,
        a_round("b", version=3, base=0, incarnation=2, steps=(0, 4)),
        FinishedBody((3, 1), "tokens"),
        LeaderBody("c"),
        DiscardedBody("c", 1, 0, 0, 9, 1, "died"),
        DiskNamedBody("b", b""),
        DiskNamedBody("b", b"x" * 16),
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (GENESIS, "a second genesis"),
        (LeaderBody("mallory"), "mallory is no region"),
        (replace(FIRST, fragment=99), "there is no fragment 99"),
        (replace(FIRST, version=2), "version 2 of fragment 0, the next is 1"),
        (replace(FIRST, ballot=Ballot(2, 1)), "ballot 2.1 in an entry of term 1"),
        (replace(FIRST, ballot=Ballot(0, 1)), "ballot 0.1"),
        (replace(FIRST, members=()), "members (none)"),
        (replace(FIRST, members=FIRST.members[::-1]), "members b, a"),
        (replace(FIRST, members=FIRST.members[:1] * 2), "members a, a"),
        (a_round("a", "mallory"), "mallory is no region"),
        (replace(FIRST, fragment=1, factors=(1.0,) * len(MANIFEST.fragments[1].pieces)), "contributes to fragment 0"),
        (a_round("a", base=1), "base is version 1 for a round to version 1"),
        (a_round("a", base=-1), "base is version -1"),
        (a_round("a", steps=(1, 10)), "does not follow step 0"),
        (a_round("a", steps=(0, 0)), "covers 0 steps"),
        (a_round("a", norm=2.0**201), "squared norm of piece 0"),
        (a_round("a", incarnation=INCARNATIONS_AHEAD_MAX + 1), "incarnation 1048577 of a is too far ahead of 0"),
        (replace(FIRST, factors=FIRST.factors[1:]), "factors for"),
        (replace(FIRST, factors=(0.1, *FIRST.factors[1:])), "no float32"),
        (replace(FIRST, members=tuple(replace(member, weight=0.0) for member in FIRST.members)), "weights [0.0, 0.0]"),
        (replace(FIRST, members=tuple(replace(member, weight=0.1) for member in FIRST.members)), "no float32"),
        (replace(FIRST, share=0.0), "share 0.0"),
        (replace(FIRST, share=0.1), "no float32"),
        (replace(FIRST, stripes=()), "stripes of 0 blocks"),
        (replace(FIRST, stripes=FIRST.stripes[1:]), "a stripe from block 1 where 0 is next"),
        (replace(FIRST, stripes=FIRST.stripes[:1]), "stripes of 1 blocks for"),
        (replace(FIRST, stripes=(*FIRST.stripes, FIRST.stripes[1])), "where"),
        (replace(FIRST, stripes=(Stripe("mallory", 0, BLOCKS[0]),)), "mallory is no region"),
        (replace(DISCARD, learner="mallory", step_from=0), "mallory is no region"),
        (replace(DISCARD, fragment=2), "there is no fragment 2"),
        (DISCARD, "(10, 15] of b's incarnation 1 does not follow step 0"),
        (replace(DISCARD, step_from=0, step_to=0), "does not follow"),
        (replace(DISCARD, incarnation=1 << 40, step_from=0), "incarnation 1099511627776 of b is too far ahead of 0"),
        (DiskNamedBody("mallory", b"x" * 16), "mallory is no region"),
        (DiskNamedBody("b", b"x" * 16), "b's folder is 0202"),
        (FinishedBody((1, 0), "x"), "ends at versions (1, 0), the ledger is at (0, 0)"),
        (FinishedBody((0,), "x"), "ends at versions (0,)"),
    ],
)
def test_what_can_not_follow_genesis(body: EntryBody, says: str) -> None:
    assert says in fault_of(body, GENESIS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FIRST, "version 1 of fragment 0, the next is 2"),
        (replace(SECOND, version=3), "the next is 2"),
        (a_round("a", version=2, base=0, steps=(10, 20)), "base is version 0, it was included in 1"),
        (a_round("a", version=2, base=1, steps=(5, 20)), "(5, 20] of a's incarnation 1 does not follow step 10"),
        (a_round("a", version=2, base=1, incarnation=0, steps=(0, 9)), "incarnation 0 of a after 1 was included"),
        (replace(DISCARD, step_from=9), "does not follow step 10"),
        (DiskNamedBody("a", b"x" * 16), "a's folder is 0101"),
    ],
)
def test_what_can_not_follow_a_round(body: EntryBody, says: str) -> None:
    assert says in fault_of(body, GENESIS, FIRST)


@pytest.mark.parametrize("body", [FIRST, DISCARD, FinishedBody((0, 0), "x")])
def test_nothing_but_leaders_before_genesis(body: EntryBody) -> None:
    assert "before genesis" in fault_of(body)
    assert "before genesis" in fault_of(body, LeaderBody("a"))


@pytest.mark.parametrize("body", [FIRST, GENESIS, FinishedBody((0, 0), "again")])
def test_nothing_merges_after_the_end(body: EntryBody) -> None:
    assert fault_of(body, GENESIS, FinishedBody((0, 0), "x"))


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"manifest_digest": "other"},
        {"regions": ("a", "b")},
        {"regions": ("b", "a", "c")},
        {"fragment_digests": GENESIS.fragment_digests[1:]},
        {"disks": ()},
        {"disks": GENESIS.disks[1:]},
        {"disks": GENESIS.disks[:1] * 3},
    ],
)
def test_genesis_is_of_this_run(change: dict[str, object]) -> None:
    assert fault_of(GENESIS) == ""
    assert fault_of(replace(GENESIS, **change))  # type: ignore[arg-type]


def test_settings_may_have_changed_since_genesis() -> None:
    assert fault_of(replace(GENESIS, settings_digest="other")) == ""


def test_a_body_without_a_rule_is_refused() -> None:
    check, _ = check_after(GENESIS)
    assert "int is not known here" in check.fault(Entry(2, 1, ZERO_HASH, 5, ZERO_HASH))  # type: ignore[arg-type]


LIVES = INCARNATIONS_KEPT + 3


def candidates(rng: random.Random, check: EntryCheck) -> list[EntryBody]:
    """Bodies of which some can follow, whatever came before."""
    steps = sorted({0, 10, 20, 30})
    result: list[EntryBody] = [LeaderBody("a"), GENESIS, FinishedBody((1, 0), "x")]
    for _ in range(12):
        step_from, step_to = sorted(rng.sample(steps, 2))
        name, fragment, version = rng.choice(REGIONS), rng.randrange(2), rng.randint(1, 3)
        base, life = rng.randrange(version), rng.randint(1, LIVES)
        result.append(
            a_round(name, fragment=fragment, version=version, base=base, incarnation=life, steps=(step_from, step_to))
        )
        result.append(DiscardedBody(name, life, fragment, step_from, step_to, 5, "x"))
    return result


@pytest.mark.parametrize("seed", range(20))
def test_after_going_back_it_answers_as_one_that_never_went_there(seed: int) -> None:
    rng = random.Random(seed)
    taken: list[Entry] = []
    check, settled = new_check(), 0
    for _ in range(60):
        if taken[settled:] and rng.random() < 0.3:
            keep = rng.randint(settled, len(taken))
            del taken[keep:]
            check.back_to(keep)
        if rng.random() < 0.2:
            settled = rng.randint(settled, len(taken))
            check.settle(settled)
        fresh = new_check()
        for entry in taken:
            fresh.take(entry)
        for body in candidates(rng, check):
            entry = seal(len(taken) + 1, 1, taken[-1].hash if taken else ZERO_HASH, body)
            fault = check.fault(entry)
            assert fault == fresh.fault(entry), f"seed {seed}"
            if not fault:
                check.take(entry)
                taken.append(entry)
                break
    assert check.index == len(taken) > 5


@pytest.mark.parametrize("seed", range(20))
def test_behind_any_base_the_answers_are_those_of_a_whole_ledger(seed: int) -> None:
    """Regions compact at different times: what one accepts that has all entries, all accept, and nothing else."""
    rng = random.Random(seed)
    whole_check, ledger = check_after(GENESIS)
    history = RoundHistory(2)
    history.apply(ledger.entries[0], now_ns=0)
    behind: dict[int, EntryCheck] = {}
    refused = 0
    for _ in range(120):
        index = whole_check.index
        if index % SUM_EVERY == 0 and index not in behind:
            last, summary = ledger.entries[-1], history.sum_up()
            behind[index] = new_check()
            behind[index].begin(LedgerBase(index, last.term, last.hash, encode_summary(summary)))
        result = [*candidates(rng, whole_check), *sums(rng, index)]
        rng.shuffle(result)
        for body in result:
            entry = seal(index + 1, 1, ledger.entries[-1].hash, body)
            fault = whole_check.fault(entry)
            # Which sum was named last before it, a base does not say: it accepts one more.
            answers = {at: "" if isinstance(body, SummaryBody) else check.fault(entry) for at, check in behind.items()}
            expected = "" if isinstance(body, SummaryBody) else fault
            assert answers == dict.fromkeys(behind, expected), f"seed {seed}"
            if fault:
                refused += 1
                continue
            if isinstance(body, SummaryBody):
                assert {check.fault(entry) for check in behind.values()} <= {""}
            ledger.entries.append(entry)
            history.apply(entry, now_ns=0)
            for check in (whole_check, *behind.values()):
                check.take(entry)
            break
    assert len(behind) > 5
    assert refused > 20
    assert any(history.account.is_closed(name, 1) for name in REGIONS), "no sum closed anything"


def test_an_incarnation_that_a_sum_has_closed_is_booked_no_more_by_anybody() -> None:
    lives = [DiscardedBody("b", life, 0, 0, 10, 64, "died") for life in range(1, LIVES)]
    late = DiscardedBody("b", 1, 0, 10, 15, 64, "died")
    fillers = [LeaderBody("a")] * (-(1 + len(lives)) % SUM_EVERY)
    assert "incarnation 1 of b is closed" in fault_of(late, GENESIS, *lives, *fillers)
    check, _ = check_after(GENESIS, *lives, *fillers)
    check.back_to(1 + len(lives[:-1]))
    assert "is closed" not in check.fault(seal(check.index + 1, 1, ZERO_HASH, late)), "the sum was truncated"


def sums(rng: random.Random, index: int) -> list[EntryBody]:
    """Snapshots, and sums up to entries of before."""
    made = [SnapshotBody(rng.randrange(2), rng.randint(1, 3), bytes(32)) for _ in range(2)]
    return [*made, *(SummaryBody(rng.randint(1, index), bytes(32)) for _ in range(2))]


def test_the_genesis_of_the_tests_is_of_the_run() -> None:
    assert isinstance(GENESIS, GenesisBody)
    assert (GENESIS.run_id, GENESIS.settings_digest, GENESIS.manifest_digest, GENESIS.regions) == RUN


def test_a_folder_is_taken_away_once_and_then_named_once() -> None:
    away = DiskNamedBody("b", b"")
    assert "b's folder is none, named is none" in fault_of(away, GENESIS, away)
    assert fault_of(DiskNamedBody("b", b"x" * 16), GENESIS, away) == ""
