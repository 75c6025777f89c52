"""The check of entries after going back, and behind a base: its answers are those of a whole ledger."""

import random

import pytest

from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.summary import encode_summary
from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import (
    DiscardedBody,
    Entry,
    EntryBody,
    FinishedBody,
    LeaderBody,
    LedgerBase,
    SnapshotBody,
    SummaryBody,
)
from tests.kit.entry_check_kit import SUM_EVERY, a_round, check_after, fault_of, new_check
from tests.kit.rounds_kit import GENESIS, REGIONS

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
