"""A ledger that is summed up: the same sums everywhere, and everything goes on as if no entry had gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.account_check import check_account
from diloco_node.core.ledger.summary import base_digest, decode_summary, encode_summary
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import DiscardedBody, Entry, EntryBody, FinishedBody, LedgerBase, SnapshotBody
from diloco_node.errors import ProtocolViolation
from tests.kit.rounds_kit import GENESIS, Ledger, committed_round, contribution

BODIES: list[EntryBody] = [
    GENESIS,
    committed_round(0, 1, [contribution("a", steps=(0, 10)), contribution("b", steps=(0, 4))]),
    committed_round(1, 1, [contribution("a", 1, steps=(0, 12))]),
    SnapshotBody(0, 1, b"1" * 32),
    DiscardedBody("b", 1, 0, 4, 9, 320, "died"),
    DiscardedBody("b", 1, 1, 0, 9, 576, "died"),
    committed_round(0, 2, [contribution("a", base=1, steps=(10, 20), snapshot=2)]),
    SnapshotBody(0, 2, b"2" * 32),
    committed_round(1, 2, [contribution("b", 1, incarnation=2, base=1, steps=(0, 5))]),
    replace(committed_round(0, 3, [contribution("b", base=2, incarnation=2, steps=(0, 6))]), is_last=True),
    FinishedBody((3, 2), "enough"),
]


def entries_of(bodies: list[EntryBody]) -> list[Entry]:
    ledger = Ledger()
    return [ledger.add(body) for body in bodies]


def summed(entries: list[Entry]) -> tuple[RoundHistory, bytes]:
    history = RoundHistory(2)
    for entry in entries:
        history.apply(entry, now_ns=0)
    return history, encode_summary(history.sum_up())


@pytest.mark.parametrize("cut", range(1, len(BODIES) + 1))
def test_a_history_goes_on_from_sums_as_if_no_entry_had_gone(cut: int) -> None:
    entries = entries_of(BODIES)
    whole, expected = summed(entries)
    _, encoded = summed(entries[:cut])
    restored = RoundHistory(2)
    restored.restore(decode_summary(encoded, fragments=2), cut, now_ns=0)
    for entry in entries[cut:]:
        restored.apply(entry, now_ns=0)
    assert encode_summary(restored.sum_up()) == expected
    offered = contribution("a", base=2, steps=(20, 25), snapshot=3)
    for fragment in range(2):
        one = replace(offered, fragment=fragment)
        assert restored.carried_since(one) == whole.carried_since(one)
        assert restored.contribution_fault(one, version=4, incarnation_min=0) == whole.contribution_fault(
            one, version=4, incarnation_min=0
        )
        for learner in "ab":
            assert restored.included_snapshot(learner, 1, fragment, base=0, version=3) == whole.included_snapshot(
                learner, 1, fragment, base=0, version=3
            )
    assert restored.is_last_round(0, 3) == whole.is_last_round(0, 3)
    assert restored.steps_before("b", 3) == whole.steps_before("b", 3) == 9 + 6


def test_a_summary_is_bounded_however_often_learners_die() -> None:
    bodies: list[EntryBody] = [GENESIS]
    for incarnation in range(200):
        bodies += [DiscardedBody("a", incarnation, fragment, 0, 9, 576, "died") for fragment in range(2)]
    history, encoded = summed(entries_of(bodies))
    summary = decode_summary(encoded, fragments=2)
    assert len(summary.covered) == INCARNATIONS_KEPT
    assert (summary.closed[0].incarnation, summary.closed[0].tokens) == (191, (192 * 576,) * 2)
    assert len(encoded) < 1000
    assert history.steps_before("a", 200) == 200 * 9
    assert "closed" in history.discard_fault(DiscardedBody("a", 3, 0, 0, 9, 1, "again"))
    assert history.account.discards_due("a", 3, steps=9, tokens=576, fragments=2, reason="") == ()


def test_the_token_account_is_checked_behind_sums() -> None:
    bodies = list(BODIES)
    for incarnation in range(3, 15):
        bodies += [DiscardedBody("b", incarnation, fragment, 0, 9, 576, "died") for fragment in range(2)]
    entries = entries_of(bodies)
    trained = {("a", 1): (25, 25 * 64), ("b", 1): (9, 576), ("b", 2): (6, 384), ("b", 15): (0, 0)}
    trained |= {("b", incarnation): (9, 576) for incarnation in range(3, 15)}
    whole = check_account(entries, trained, fragment_sizes=(3, 5))
    for cut in range(1, len(entries) + 1):
        _, encoded = summed(entries[:cut])
        behind = check_account(
            entries[cut:], trained, fragment_sizes=(3, 5), summary=decode_summary(encoded, fragments=2)
        )
        assert (behind.merged, behind.discarded) == (whole.merged, whole.discarded)
        # Sums of closed incarnations say less of which one has the fault.
        assert bool(behind.faults) == bool(whole.faults)


def test_a_learner_that_counted_other_tokens_than_were_summed_up_is_found() -> None:
    bodies: list[EntryBody] = [GENESIS]
    for incarnation in range(12):
        bodies += [DiscardedBody("b", incarnation, fragment, 0, 9, 576, "died") for fragment in range(2)]
    _, encoded = summed(entries_of(bodies))
    summary = decode_summary(encoded, fragments=2)
    trained = {("b", incarnation): (9, 576) for incarnation in range(12)} | {("b", 12): (0, 0)}
    assert check_account([], trained, fragment_sizes=(3, 5), summary=summary).balanced
    trained["b", 1] = (9, 577)
    assert not check_account([], trained, fragment_sizes=(3, 5), summary=summary).balanced


def test_every_flipped_bit_of_a_summary_is_refused_or_changes_its_digest() -> None:
    _, encoded = summed(entries_of(BODIES))
    base = LedgerBase(11, 1, b"h" * 32, encoded)
    for at in range(len(encoded)):
        other = encoded[:at] + bytes([encoded[at] ^ 1]) + encoded[at + 1 :]
        assert base_digest(replace(base, summary=other)) != base_digest(base)
        try:
            decode_summary(other, fragments=2)
        except ProtocolViolation:
            continue


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_summary_of_another_model_is_refused(fragments: int) -> None:
    _, encoded = summed(entries_of(BODIES))
    with pytest.raises(ProtocolViolation, match="fragments"):
        decode_summary(encoded, fragments=fragments)


def test_what_is_no_summary_is_refused() -> None:
    for data in (b"", b"\xc0", b"\x90", bytes(100), b"\xdd\xff\xff\xff\xff", encode_summary(RoundHistory(2).sum_up())):
        with pytest.raises(ProtocolViolation):
            decode_summary(data, fragments=2)
