"""core/ledger/witness.py: what a witness answers, what it keeps, and what its object may hold."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from diloco_node.core.ledger import witness
from diloco_node.core.ledger.election import ballot_paper
from diloco_node.core.ledger.entries import ZERO_HASH, encode_entry
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.witness import (
    BEAT_NS,
    QUIET_NS,
    WitnessRecord,
    WitnessTurn,
    WitnessWatch,
    answer,
    decode_record,
    encode_record,
    recorded,
    take_turn,
)
from diloco_node.core.member_kind import Membership
from diloco_node.core.messages import AppendEntries, AppendEntriesReply, BaseSent, Message, RequestVote, TimeoutNow
from diloco_node.core.types import Entry, LedgerBase
from diloco_node.errors import ProtocolViolation
from tests.kit.ledger_kit import a_core, a_round, append_entries, arrive, chain, disk_of, write_all

W = disk_of("w")
LOG = chain(1, 1, 2, 2, 2)
EMPTY = WitnessRecord("run", W)


def base_at(index: int, *, term: int = 2, sequence: int = 1) -> BaseSent:
    entry = LOG[index - 1]
    return BaseSent(term, sequence, index, entry.term, entry.hash, b"")


def after(record: WitnessRecord, *messages: Message, peer: str = "a", tail_max: int = 64) -> WitnessRecord:
    for message in messages:
        record = answer(record, peer, message, lambda _: True, tail_max=tail_max).record
    return record


TAIL = after(EMPTY, base_at(2), append_entries(LOG, 3, 5, term=2, commit=4))


def reply_to(record: WitnessRecord, message: Message, *, peer: str = "a") -> AppendEntriesReply:
    reply = answer(record, peer, message, lambda _: True, tail_max=64).reply
    assert isinstance(reply, AppendEntriesReply)
    return reply


def vote(term: int, *, pre_vote: bool = False, last: tuple[int, int] = (2, 5), has_view: bool = True) -> RequestVote:
    return RequestVote(term, pre_vote, last[1], last[0], disk_of("b"), has_view)


def is_granted(record: WitnessRecord, request: RequestVote, peer: str = "b") -> bool:
    reply = answer(record, peer, request, lambda _: True, tail_max=64).reply
    assert reply is not None
    return bool(getattr(reply, "granted"))  # noqa: B009 - of one of two types


def test_its_tail_begins_where_both_voters_have_everything_and_grows_from_there() -> None:
    assert (TAIL.base, TAIL.entries) == (LedgerBase(2, 1, LOG[1].hash, b""), LOG[2:])
    assert (TAIL.leader, TAIL.term, TAIL.commit_index, TAIL.last) == ("a", 2, 4, (2, 5))
    reply = reply_to(TAIL, append_entries(LOG, 6, 5, term=2, sequence=9))
    assert reply == AppendEntriesReply(2, 9, True, 5, LOG[4].hash, W)
    assert after(TAIL, base_at(4)).entries == LOG[4:], "what both have since is dropped"
    assert after(TAIL, base_at(1)) == TAIL, "an older base changes nothing"


def test_a_message_that_does_not_follow_is_refused_with_the_place_to_go_on_from() -> None:
    assert reply_to(after(EMPTY, base_at(2)), append_entries(LOG, 5, 5, term=2)).durable_index == 2
    other = chain(1, 1, 2, 2, 3)
    reply = reply_to(TAIL, append_entries(other, 6, 5, term=3))
    assert (reply.accepted, reply.durable_index, reply.term) == (False, 4, 3), "one step back: the rest may be the same"
    assert after(TAIL, append_entries(other, 5, 5, term=3)).entries == other[2:]
    settled = replace(TAIL, commit_index=5)
    assert after(settled, append_entries(other, 5, 5, term=3)).entries == LOG[2:], "what is committed stays"


def test_an_entry_is_taken_once_its_payload_is_in_the_bucket() -> None:
    log = chain(1, 1, 1, bodies=lambda index, _: a_round(index))
    request = append_entries(log, 2, 3, term=1)
    start = after(EMPTY, BaseSent(1, 1, 1, 1, log[0].hash, b""))
    waiting = answer(start, "a", request, lambda _: False, tail_max=64)
    assert (waiting.lacking, waiting.record.entries) == (log[1:], ())
    assert isinstance(waiting.reply, AppendEntriesReply)
    assert waiting.reply.durable_index == 1
    half = answer(start, "a", request, lambda entry: entry == log[1], tail_max=64)
    assert (half.lacking, half.record.entries) == (log[2:], log[1:2])
    assert half.record.payloads == {log[1].hash}
    assert half.record.entry_of(0, 2, log[1].body.payload_digest) == log[1].hash  # type: ignore[union-attr]
    assert half.record.entry_of(0, 3, bytes(32)) == b""


@pytest.mark.parametrize(
    ("request_", "is_welcome"),
    [
        (vote(3), True),
        (vote(3, last=(2, 4)), False),
        (vote(3, last=(3, 1)), True),
        (vote(2), True),
        (vote(1), False),
        (vote(3, has_view=False), False),
        (vote(3, pre_vote=True), True),
        (vote(2, pre_vote=True), False),
        (vote(3, pre_vote=True, last=(2, 4)), False),
        (vote(5000), False),
    ],
)
def test_a_vote_is_for_a_log_that_holds_the_tail(request_: RequestVote, is_welcome: bool) -> None:
    assert is_granted(TAIL, request_) is is_welcome


def test_one_vote_in_a_term_also_for_who_asks_again() -> None:
    voted = after(TAIL, vote(3), peer="b")
    assert (voted.term, voted.voted_for, voted.leader) == (3, ballot_paper("b", disk_of("b")), "")
    assert is_granted(voted, vote(3))
    assert not is_granted(voted, vote(3), peer="a")
    assert not reply_to(voted, append_entries(LOG, 6, 5, term=2)).accepted, "the older leader has lost it"
    assert after(voted, vote(3, pre_vote=True), peer="a") == voted
    followed = after(voted, append_entries(LOG, 6, 5, term=3), peer="b")
    assert not reply_to(followed, append_entries(LOG, 6, 5, term=3), peer="a").accepted, "a term has one leader"


def test_beyond_its_limit_the_oldest_committed_entries_go() -> None:
    start = after(EMPTY, base_at(1))
    trimmed = after(start, append_entries(LOG, 2, 5, term=2, commit=3), tail_max=2)
    assert (trimmed.base.index, trimmed.entries) == (3, LOG[3:])
    assert after(start, append_entries(LOG, 2, 5, term=2), tail_max=2).entries == LOG[1:], "none is committed"


def test_a_tail_is_within_its_bytes_and_what_is_not_committed_is_not_taken_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = after(EMPTY, base_at(1))
    monkeypatch.setattr(witness, "TAIL_BYTES_MAX", 2 * len(encode_entry(LOG[1])) + 3)
    trimmed = after(start, append_entries(LOG, 2, 5, term=2, commit=4))
    assert (trimmed.base.index, trimmed.entries) == (3, LOG[3:])
    request = append_entries(LOG, 2, 5, term=2)
    assert after(start, request).entries == LOG[1:], "of these more are taken"
    monkeypatch.setattr(witness, "FRESH_BYTES_MAX", witness.TAIL_BYTES_MAX)
    assert (reply_to(start, request).durable_index, after(start, request).entries) == (3, LOG[1:3])
    monkeypatch.setattr(witness, "FRESH_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(witness, "TAIL_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(witness, "ENTRIES_MAX", 3)
    assert (reply_to(start, request).durable_index, after(start, request).entries) == (4, LOG[1:4])
    assert after(start, append_entries(LOG, 2, 5, term=2, commit=3)).entries == LOG[1:], "as many are to come"


def test_a_tail_of_a_later_leader_is_taken_whatever_a_batch_of_it_ends_with() -> None:
    """The first batch ends with a term that is older than the last one here."""
    log, held, newer = chain(*[1] * 70, 3), chain(1, 1, 1, 2, 2), chain(1, 1, 1, 4)
    tail = after(EMPTY, append_entries(log, 1, 64, term=3), append_entries(log, 65, 71, term=3), tail_max=200)
    for entries, taken in ((held, log), (newer, newer)):
        core = a_core(entries=entries, term=4, voters=("a", "b"))
        core.disks.begin(Roster([*core.disks.roster.lines, Membership("w", "witness", W)]), 0)
        for message in recorded(replace(tail, term=9)):
            write_all(core, arrive(core, "w", message))
        assert core.entries == taken
        assert core.term == 4, "it is shown, and leads nobody"


def test_no_batch_of_a_tail_commits_entries_that_another_batch_has_otherwise() -> None:
    """The first batch agrees with the log here, which goes on with an entry of a leader before; the second does not."""
    log, held = chain(*[1] * 64, *[2] * 6), chain(*[1] * 66)
    tail = after(
        EMPTY, append_entries(log, 1, 64, term=2), append_entries(log, 65, 70, term=2, commit=70), tail_max=200
    )
    assert tail.commit_index == 70
    core = a_core(entries=held, term=2, voters=("a", "b"))
    core.disks.begin(Roster([*core.disks.roster.lines, Membership("w", "witness", W)]), 0)
    first, second = recorded(tail)
    write_all(core, arrive(core, "w", first))
    assert core.cluster_commit_index <= 64
    write_all(core, arrive(core, "w", second))
    assert (core.entries, core.cluster_commit_index) == (log, 70)


class Doubting:
    """A meaning that doubts each entry, whoever made it."""

    index = 0

    def fault(self, _: Entry) -> str:
        return ""

    def doubt(self, _: Entry) -> str:
        return "a number of other settings"

    def take(self, entry: Entry) -> None:
        self.index = entry.index

    def back_to(self, index: int) -> None:
        self.index = index

    def settle(self, index: int) -> None:
        pass

    def begin(self, base: LedgerBase) -> None:
        self.index = base.index


def test_what_is_committed_is_not_doubted_in_a_tail() -> None:
    for commit_index, count in ((5, 5), (4, 0)):
        core = a_core(term=1, voters=("a", "b"), meaning=Doubting())
        core.disks.begin(Roster([*core.disks.roster.lines, Membership("w", "witness", W)]), 0)
        tail = after(EMPTY, append_entries(LOG, 1, 5, term=2, commit=commit_index))
        for message in recorded(tail):
            write_all(core, arrive(core, "w", message))
        assert len(core.entries) == count


def test_the_tail_is_shown_in_batches() -> None:
    assert recorded(TAIL) == (AppendEntries(2, 0, 2, LOG[1].hash, LOG[2:], 4),)
    assert recorded(EMPTY) == ()
    log = chain(*[1] * 100)
    long = after(EMPTY, append_entries(log, 1, 64, term=1), append_entries(log, 65, 100, term=1), tail_max=200)
    assert [message.previous_index for message in recorded(long)] == [0, 64]


def turn(
    record: WitnessRecord | None,
    message: Message,
    *,
    region: str = "b",
    run_id: str = "run",
    quiet_ns: int = QUIET_NS,
    stored: frozenset[bytes] = frozenset(),
) -> WitnessTurn:
    """A turn of who has seen the record unchanged for so long."""
    watch = WitnessWatch()
    if record is not None:
        watch.see(record, now_ns=0)
    return take_turn(
        record,
        message,
        watch=watch,
        now_ns=quiet_ns,
        region=region,
        run_id=run_id,
        new_disk=W,
        uploads=stored,
        tail_max=64,
    )


def test_a_turn_writes_what_changed_and_a_refused_voter_gets_the_tail() -> None:
    kept = replace(TAIL, writes=7)
    heartbeat = append_entries(LOG, 6, 5, term=2, commit=5)
    assert turn(kept, heartbeat, region="a", quiet_ns=0).record is None, "a commit alone is not worth a write"
    beat = turn(kept, heartbeat, region="a", quiet_ns=BEAT_NS).record
    assert beat == replace(kept, writes=8, commit_index=5), "a sign of life is"
    assert turn(kept, append_entries(LOG, 6, 5, term=1)).record is None, "and nobody's who leads no more"
    granted = turn(kept, vote(3))
    assert granted.record is not None
    assert (granted.record.writes, len(granted.messages)) == (8, 1)
    refused = turn(kept, vote(3, pre_vote=True, last=(1, 2)))
    assert refused.record is None
    assert refused.messages[1:] == recorded(TAIL)
    assert turn(kept, TimeoutNow(2, "b")) == WitnessTurn()


@pytest.mark.parametrize("pre_vote", [True, False])
def test_there_is_no_vote_while_another_region_shows_signs_of_life(pre_vote: bool) -> None:
    for kept in (replace(TAIL, writes=7), replace(after(TAIL, vote(3), peer="a"), writes=8)):
        request = vote(kept.term + 1, pre_vote=pre_vote)
        early = turn(kept, request, quiet_ns=QUIET_NS - 1)
        assert early.record is None
        assert getattr(early.messages[0], "granted", None) is False
        assert turn(kept, request).messages[0].granted  # type: ignore[union-attr]
        assert turn(kept, request, region="a", quiet_ns=0).messages[0].granted, "its own"  # type: ignore[union-attr]


def test_a_stale_record_is_answered_by_nothing() -> None:
    watch = WitnessWatch()
    watch.see(replace(TAIL, writes=8), now_ns=0)
    names = {"region": "a", "run_id": "run", "new_disk": W, "uploads": frozenset()}
    for message in (base_at(4), vote(3)):
        stale = replace(TAIL, writes=7)
        assert take_turn(stale, message, watch=watch, now_ns=0, tail_max=64, **names) == WitnessTurn()  # type: ignore[arg-type]


def test_a_record_is_unchanged_since_it_was_first_seen() -> None:
    watch, kept = WitnessWatch(), replace(TAIL, writes=7)
    assert [watch.see(kept, now_ns=5), watch.see(kept, now_ns=9)] == [0, 4]
    assert [watch.is_stale(replace(kept, writes=count)) for count in (6, 7, 8)] == [True, False, False]
    assert watch.see(replace(kept, writes=8), now_ns=12) == 0
    assert watch.see(replace(kept, disk=disk_of("v"), writes=1), now_ns=13) == 0, "another object"


def test_a_tail_that_begins_anew_drops_its_payloads_and_none_that_was_put_there_in_advance() -> None:
    """The other region may count on that one, and commit its entry on one disk if it was gone."""
    log = chain(1, 1, 1, bodies=lambda index, _: a_round(index))
    kept = replace(after(EMPTY, BaseSent(1, 1, 1, 1, log[0].hash, b""), append_entries(log, 2, 2, term=1)), writes=3)
    stored = frozenset({log[2].hash, b"in advance"})
    grown = turn(kept, append_entries(log, 3, 3, term=1), region="a", stored=stored)
    assert grown.record is not None
    assert (grown.record.payloads, grown.dropped) == ({log[1].hash, log[2].hash}, frozenset())
    settled = turn(grown.record, BaseSent(1, 2, 3, 1, log[2].hash, b""), region="a", stored=stored)
    assert settled.dropped == {log[1].hash, log[2].hash}


def test_only_a_leader_makes_the_object_and_another_runs_is_left_alone() -> None:
    assert turn(None, vote(3)) == WitnessTurn()
    made = turn(None, base_at(2)).record
    assert made is not None
    assert (made.writes, made.disk, made.base.index) == (1, W, 2)
    with pytest.raises(ProtocolViolation, match="the witness is of run run, and this one is other"):
        turn(made, base_at(2), run_id="other")


def test_a_record_is_read_as_it_was_written() -> None:
    for record in (EMPTY, replace(TAIL, writes=3, voted_for="b 00")):
        assert decode_record(encode_record(record)) == record


def spoil(at: int, value: object) -> bytes:
    plain = msgpack.unpackb(encode_record(TAIL))
    plain[at] = value
    return bytes(msgpack.packb(plain))


def gap(entries: tuple[Entry, ...]) -> bytes:
    return encode_record(replace(TAIL, entries=entries))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90",
        spoil(0, 2),
        spoil(1, 5),
        spoil(2, b"short"),
        spoil(3, -1),
        spoil(5, "x" * 999),
        spoil(7, [1, 2]),
        spoil(7, [2, 1, b"short"]),
        spoil(9, [b"no entry"]),
        gap(LOG[3:]),
        encode_record(replace(TAIL, base=LedgerBase(2, 1, ZERO_HASH, b""))),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_record(data)
