"""A ledger that is summed up: the same sums everywhere, and everything goes on as if no entry had gone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note
from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.summary import base_digest, decode_summary, encode_summary, summed_roster
from diloco_node.core.recovery.compaction import Compaction
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import (
    NO_BASE,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    FinishedBody,
    LeaderBody,
    LedgerBase,
    RevokedBody,
    RunSettings,
    SnapshotBody,
    SummaryBody,
)
from diloco_node.errors import ProtocolViolation
from diloco_node.lab.demo.account_check import check_account
from tests.kit.rounds_kit import GENESIS, Ledger, committed_round, context_of, contribution

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
    _, data = summed(entries[:cut])
    restored = RoundHistory(2)
    restored.restore(decode_summary(data, fragments=2), cut, now_ns=0)
    for entry in entries[cut:]:
        restored.apply(entry, now_ns=0)
    assert encode_summary(restored.sum_up()) == expected
    offer = contribution("a", base=2, steps=(20, 25), snapshot=3)
    for fragment in range(2):
        item = replace(offer, fragment=fragment)
        assert restored.account.carried_since(item) == whole.account.carried_since(item)
        assert restored.contribution_fault(item, version=4, incarnation_min=0) == whole.contribution_fault(
            item, version=4, incarnation_min=0
        )
        for learner in "ab":
            assert restored.included_snapshot(learner, 1, fragment, base=0, version=3) == whole.included_snapshot(
                learner, 1, fragment, base=0, version=3
            )
    assert restored.is_last_round(0, 3) == whole.is_last_round(0, 3)
    assert restored.account.steps_before("b", 3) == whole.account.steps_before("b", 3) == 9 + 6


@pytest.mark.parametrize("cut", range(1, 5))
def test_revoked_certificates_are_summed_up(cut: int) -> None:
    entries = entries_of([GENESIS, *(RevokedBody("b", digit * 32) for digit in (b"2", b"1", b"2"))])
    whole, expected = summed(entries)
    restored = RoundHistory(2)
    restored.restore(decode_summary(summed(entries[:cut])[1], fragments=2), cut, now_ns=0)
    for entry in entries[cut:]:
        restored.apply(entry, now_ns=0)
    assert restored.revocations == whole.revocations == {b"1" * 32, b"2" * 32}
    assert encode_summary(restored.sum_up()) == expected


@pytest.mark.parametrize("cut", range(1, 7))
def test_how_often_a_folder_was_replaced_is_summed_up_and_counted_on_behind_the_sums(cut: int) -> None:
    named = [DiskNamedBody("b", disk) for disk in (b"", b"2" * 16, b"", b"3" * 16)]
    entries = entries_of([GENESIS, *named[:2], DiskNamedBody("a", b""), *named[2:]])
    whole, expected = summed(entries)
    sums, data = summed(entries[:cut])
    restored = RoundHistory(2)
    restored.restore(decode_summary(data, fragments=2), cut, now_ns=0)
    view = DiskView("ab", summed_roster(sums.sum_up()))
    view.known_index = cut
    view.follow(entries[cut:])
    assert view.roster.replacements("b") == 2, "in the sums, or in the log behind them"
    for entry in entries[cut:]:
        restored.apply(entry, now_ns=0)
    assert encode_summary(restored.sum_up()) == expected
    assert [history.roster.replacements(name) for history in (restored, whole) for name in "ab"] == [0, 2, 0, 2]


def test_a_summary_is_bounded_however_often_learners_die() -> None:
    bodies: list[EntryBody] = [GENESIS]
    for incarnation in range(200):
        bodies += [DiscardedBody("a", incarnation, fragment, 0, 9, 576, "died") for fragment in range(2)]
    history, data = summed(entries_of(bodies))
    summary = decode_summary(data, fragments=2)
    assert len(summary.covered) == INCARNATIONS_KEPT
    assert (summary.closed[0].incarnation, summary.closed[0].tokens) == (191, (192 * 576,) * 2)
    assert len(data) < 1000
    assert history.account.steps_before("a", 200) == 200 * 9
    assert "closed" in history.account.fault(DiscardedBody("a", 3, 0, 0, 9, 1, "again"))
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
        _, data = summed(entries[:cut])
        behind = check_account(entries[cut:], trained, fragment_sizes=(3, 5), summary=decode_summary(data, fragments=2))
        assert (behind.merged, behind.discarded) == (whole.merged, whole.discarded)
        # Sums of closed incarnations say less of which one has the fault.
        assert bool(behind.faults) == bool(whole.faults)


def test_a_learner_that_counted_other_tokens_than_were_summed_up_is_found() -> None:
    bodies: list[EntryBody] = [GENESIS]
    for incarnation in range(12):
        bodies += [DiscardedBody("b", incarnation, fragment, 0, 9, 576, "died") for fragment in range(2)]
    _, data = summed(entries_of(bodies))
    summary = decode_summary(data, fragments=2)
    trained = {("b", incarnation): (9, 576) for incarnation in range(12)} | {("b", 12): (0, 0)}
    assert check_account([], trained, fragment_sizes=(3, 5), summary=summary).balanced
    trained["b", 1] = (9, 577)
    assert not check_account([], trained, fragment_sizes=(3, 5), summary=summary).balanced


def test_every_flipped_bit_of_a_summary_is_refused_or_changes_its_digest() -> None:
    _, data = summed(entries_of(BODIES))
    base = LedgerBase(11, 1, b"h" * 32, data)
    for at in range(len(data)):
        other = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert base_digest(replace(base, summary=other)) != base_digest(base)
        try:
            decode_summary(other, fragments=2)
        except ProtocolViolation:
            continue


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_summary_of_another_model_is_refused(fragments: int) -> None:
    _, data = summed(entries_of(BODIES))
    with pytest.raises(ProtocolViolation, match="fragments"):
        decode_summary(data, fragments=fragments)


def test_what_is_no_summary_is_refused() -> None:
    for data in (b"", b"\xc0", b"\x90", bytes(100), b"\xdd\xff\xff\xff\xff", encode_summary(RoundHistory(2).sum_up())):
        with pytest.raises(ProtocolViolation):
            decode_summary(data, fragments=2)


class Upheld:
    """A compaction over the entries of this page, with what the ledger and the disk say set by hand."""

    def __init__(self) -> None:
        self.effects = EffectBuffer("a")
        self.history = RoundHistory(2)
        self.has_states = True
        self.ledger = SimpleNamespace(base=NO_BASE, term=1, commit_index=0)
        self.compaction = Compaction(
            context_of(self.history, settings=RunSettings(summary_entries=4), effects=self.effects),
            cast(LedgerCore, self.ledger),
            cast(Versions, SimpleNamespace(has_states=lambda _: self.has_states)),
        )

    def take(self, entry: Entry) -> None:
        self.history.apply(entry, now_ns=0)
        self.ledger.commit_index = entry.index
        self.compaction.on_entry(entry)


@pytest.mark.parametrize("is_same", [True, False])
def test_the_ledger_begins_with_sums_that_a_majority_has_too_and_never_with_others(*, is_same: bool) -> None:
    upheld = Upheld()
    entries = entries_of(BODIES)
    for entry in entries[:4]:
        upheld.take(entry)
    proposal = upheld.compaction.proposal()
    assert proposal is not None
    assert proposal.index == 4
    digest = proposal.digest if is_same else bytes(32)
    last = seal(5, 1, entries[3].hash, SummaryBody(4, digest))
    upheld.take(last)
    for index in range(6, 9):
        assert upheld.compaction.next_base() is None, "a region that was away for a while still gets entries"
        last = seal(index, 1, last.hash, LeaderBody("a"))
        upheld.take(last)
    base = upheld.compaction.next_base()
    assert (base is not None and base.index == 4) == is_same
    assert any(isinstance(effect, Note) and effect.is_alarm for effect in upheld.effects.take()) != is_same
    upheld.ledger.commit_index = 3
    assert upheld.compaction.next_base() is None, "the entries that it stands for are not all on the own disk"
    upheld.ledger.commit_index, upheld.has_states = last.index, False
    assert upheld.compaction.next_base() is None, "the own disk could not go on from there"
