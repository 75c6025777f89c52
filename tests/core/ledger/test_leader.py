"""The ledger core as leader: commits, batches, searches, stepping down (Raft 5.3, 5.4.2; dissertation 6.2)."""

import itertools

import pytest

from diloco_node.core.cadence import MARGIN
from diloco_node.core.events import Effect, LinkChanged, TimerFired
from diloco_node.core.ledger.election import Role, TermClaims
from diloco_node.core.ledger.log import STAGED_ENTRIES_MAX
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.replication import BATCH_ENTRIES_MAX
from diloco_node.core.messages import AppendEntries, AppendEntriesReply, Message
from diloco_node.core.types import LeaderBody, RoundBody
from tests.kit.ledger_kit import (
    HEARTBEAT_NS,
    TIMEOUT_NS,
    a_core,
    a_discard,
    a_leader,
    a_round,
    ack,
    alarms,
    append_entries,
    arrive,
    chain,
    sends,
    vote,
    vote_request,
    write_all,
    writes,
)
from tests.kit.ledger_network import Network


def test_a_new_leader_appends_an_entry_of_its_term_at_once() -> None:
    core, effects, _ = a_leader(entries=chain(1, 1))
    entry = core.entries[-1]
    assert (entry.index, entry.term, entry.body) == (3, 2, LeaderBody("a"))
    assert writes(effects)[0].entries == (entry,)
    previous = core.entries[1].hash
    expected = [AppendEntries(2, sequence, 2, previous, (entry,), 0) for sequence in (1, 2)]
    assert [message for _, message in sends(effects)][:2] == expected


def test_a_leader_does_not_count_itself_before_its_own_disk_has_the_entry() -> None:
    core, effects, now_ns = a_leader()
    assert core.durable_indexes == {"a": 0, "b": 0, "c": 0}
    arrive(core, "b", ack(1, 1, True, 1), now_ns)
    assert core.cluster_commit_index == 0
    write_all(core, effects, now_ns)
    assert core.cluster_commit_index == 1
    assert core.is_settled


def test_an_entry_on_the_others_disks_commits_and_the_leader_does_not_take_it_yet() -> None:
    core, effects, now_ns = a_leader()
    arrive(core, "b", ack(1, 1, True, 1), now_ns)
    arrive(core, "c", ack(1, 2, True, 1), now_ns)
    assert core.cluster_commit_index == 1
    assert core.commit_index == 0
    assert core.take_committed() == []
    write_all(core, effects, now_ns)
    assert [entry.index for entry in core.take_committed()] == [1]
    assert core.take_committed() == []


def test_half_of_four_voters_is_no_majority() -> None:
    core = a_core("a", tuple("abcd"))
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", vote(1, True, True))
    assert core.role is Role.ASKING
    write_all(core, arrive(core, "c", vote(1, True, True)))
    arrive(core, "b", vote(1, False, True))
    assert not core.is_leader
    write_all(core, arrive(core, "c", vote(1, False, True)))
    assert core.is_leader
    arrive(core, "b", ack(1, 1, True, 1))
    assert core.cluster_commit_index == 0
    arrive(core, "c", ack(1, 2, True, 1))
    assert core.cluster_commit_index == 1


def test_entries_of_older_terms_are_never_committed_by_counting() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 1))
    write_all(core, effects, now_ns)
    for sequence, peer in ((1, "b"), (2, "c")):
        arrive(core, peer, ack(2, sequence, True, 2), now_ns)
    assert core.cluster_commit_index == 0
    assert not core.is_settled
    arrive(core, "b", ack(2, 1, True, 3), now_ns)
    assert core.cluster_commit_index == 3
    assert core.is_settled


def test_a_commit_is_sent_at_once() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    effects = arrive(core, "b", ack(1, 1, True, 1), now_ns)
    assert [(peer, message.commit_index) for peer, message in sends(effects) if isinstance(message, AppendEntries)] == [
        ("b", 1),
        ("c", 1),
    ]


def test_heartbeats_go_out_in_time_also_while_a_batch_is_on_its_way() -> None:
    core, _, now_ns = a_leader()
    for _ in range(3):
        now_ns = core.wake_at_ns
        effects = core.handle(TimerFired(), now_ns=now_ns)
        assert [(peer, message.entries) for peer, message in sends(effects) if isinstance(message, AppendEntries)] == [
            ("b", ()),
            ("c", ()),
        ]
        assert core.wake_at_ns <= now_ns + HEARTBEAT_NS


def test_one_batch_is_on_its_way_at_a_time() -> None:
    core, _, now_ns = a_leader()
    effects = core.propose(a_discard(1), now_ns=now_ns)
    assert sends(effects) == []
    effects = arrive(core, "b", ack(1, 1, True, 0), now_ns)
    (peer, message) = sends(effects)[0]
    assert isinstance(message, AppendEntries)
    assert (peer, message.previous_index, [entry.body for entry in message.entries]) == ("b", 1, [a_discard(1)])


def test_a_batch_holds_at_most_so_many_entries_and_the_next_follows_its_answer() -> None:
    entries = chain(*[1] * 200)
    core, effects, now_ns = a_leader(entries=entries)
    effects = arrive(core, "b", ack(2, 1, False, 0), now_ns)
    counts = []
    while batch := [m for _, m in sends(effects) if isinstance(m, AppendEntries) and m.entries]:
        counts.append(len(batch[0].entries))
        durable = batch[0].previous_index + len(batch[0].entries)
        effects = arrive(core, "b", ack(2, batch[0].sequence, True, durable), now_ns)
    assert counts == [BATCH_ENTRIES_MAX, BATCH_ENTRIES_MAX, BATCH_ENTRIES_MAX, 201 - 3 * BATCH_ENTRIES_MAX]


def test_a_leader_sends_no_more_than_a_follower_may_stage() -> None:
    core, effects, now_ns = a_leader(entries=chain(*[1] * 500))
    effects = arrive(core, "b", ack(2, 1, False, 0), now_ns)
    sent = 0
    while batch := [m for _, m in sends(effects) if isinstance(m, AppendEntries) and m.entries]:
        sent += len(batch[0].entries)
        effects = arrive(core, "b", ack(2, batch[0].sequence, True, 10), now_ns)
    assert sent == 10 + STAGED_ENTRIES_MAX
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert [m.entries for peer, m in sends(effects) if peer == "b" and isinstance(m, AppendEntries)] == [()]


def test_a_leader_searches_the_common_part_with_the_followers_hint() -> None:
    core, _, now_ns = a_leader(entries=chain(1, 1, 1, 2, 2))
    effects = arrive(core, "b", ack(3, 1, False, 3), now_ns)
    message = sends(effects)[0][1]
    assert isinstance(message, AppendEntries)
    assert message.previous_index == 3
    assert [entry.index for entry in message.entries] == [4, 5, 6]


def test_refusals_that_come_late_or_twice_are_old_news() -> None:
    core, _, now_ns = a_leader(entries=chain(1, 1, 1, 2, 2))
    arrive(core, "b", ack(3, 1, False, 3), now_ns)
    assert sends(arrive(core, "b", ack(3, 1, False, 1), now_ns)) == []
    assert sends(arrive(core, "b", ack(3, 99, False, 0), now_ns)) == []


def test_an_acknowledgement_ends_the_search() -> None:
    core, _, now_ns = a_leader(entries=chain(*[1] * 200))
    arrive(core, "b", ack(2, 1, False, 0), now_ns)
    # Late news from before the refusal: the follower has 150 entries, no need to send them from the first on.
    arrive(core, "b", ack(2, 1, True, 150), now_ns)
    core.handle(LinkChanged("b", False), now_ns=now_ns)
    message = sends(core.handle(LinkChanged("b", True), now_ns=now_ns))[0][1]
    assert isinstance(message, AppendEntries)
    assert message.previous_index == 150


def test_acknowledgements_never_go_back() -> None:
    core, effects, now_ns = a_leader(entries=chain(1))
    write_all(core, effects, now_ns)
    arrive(core, "b", ack(2, 1, True, 2), now_ns)
    assert core.durable_indexes["b"] == 2
    arrive(core, "b", ack(2, 1, True, 1), now_ns)
    assert core.durable_indexes["b"] == 2
    assert core.cluster_commit_index == 2


def test_answers_of_another_term_are_not_counted() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 2), term=2)
    write_all(core, effects, now_ns)
    arrive(core, "b", ack(2, 1, True, 3), now_ns)
    assert core.durable_indexes["b"] == 0
    arrive(core, "b", ack(4, 1, True, 3), now_ns)
    assert (core.role, core.term, core.cluster_commit_index) == (Role.FOLLOWER, 4, 0)


def silent(core: LedgerCore, now_ns: int, until_ns: int) -> tuple[list[Effect], int]:
    """Nobody answers, until then or until it leads no longer; the last effects, and when that was."""
    effects: list[Effect] = []
    while core.is_leader and core.wake_at_ns <= until_ns:
        now_ns = core.wake_at_ns
        effects = core.handle(TimerFired(), now_ns=now_ns)
    return effects, now_ns


def test_a_leader_that_hears_no_majority_for_two_timeouts_steps_down() -> None:
    core, _, silent_since_ns = a_leader()
    effects, now_ns = silent(core, silent_since_ns, 9 * TIMEOUT_NS)
    assert now_ns == silent_since_ns + 2 * TIMEOUT_NS, "a follower waits from one to two of them before it stands"
    assert (core.role, core.leader) == (Role.FOLLOWER, "")
    assert "no majority answers" in str(effects)
    assert core.wake_at_ns >= now_ns + TIMEOUT_NS


def test_a_leader_learns_a_silence_that_ends() -> None:
    """On a busy machine answers wait unread. With one timeout each leader was deposed by the first such silence."""
    core, _, silent_since_ns = a_leader()
    _, now_ns = silent(core, silent_since_ns, silent_since_ns + 3 * TIMEOUT_NS // 2)
    assert core.is_leader
    gap_ns = now_ns - silent_since_ns
    arrive(core, "c", ack(1, core._sequence, True, 0), now_ns)
    _, end_ns = silent(core, now_ns, 99 * TIMEOUT_NS)
    assert not core.is_leader
    assert end_ns == now_ns + 2 * MARGIN * gap_ns


def test_a_leader_that_hears_one_of_two_followers_leads_on() -> None:
    core, _, now_ns = a_leader()
    for _ in range(50):
        now_ns = core.wake_at_ns
        for peer, message in sends(core.handle(TimerFired(), now_ns=now_ns)):
            if peer == "c" and isinstance(message, AppendEntries):
                arrive(core, "c", ack(1, message.sequence, True, 0), now_ns)
    assert core.is_leader


def test_a_leader_of_five_that_hears_one_steps_down() -> None:
    network = Network(5)
    leader = network.elect()
    peers = [name for name in network.names if name != leader]
    for other in peers[1:]:
        network.cut |= {(other, leader)}
    network.run_until(lambda: not network.cores[leader].is_leader, limit_ns=3 * TIMEOUT_NS)


def test_only_a_leader_proposes_and_only_what_its_disk_can_apply() -> None:
    with pytest.raises(AssertionError, match="can't propose"):
        a_core().propose(a_discard(1), now_ns=0)
    core, _, now_ns = a_leader(has_payload=lambda body: not isinstance(body, RoundBody))
    with pytest.raises(AssertionError, match="fragment 0 version 1"):
        core.propose(a_round(1), now_ns=now_ns)


NEWER = (
    vote_request(9, False, 0, 0),
    vote(9, False, False),
    ack(9, 1, False, 0),
    append_entries(chain(9), 1, 1, term=9),
)


@pytest.mark.parametrize("message", NEWER)
def test_a_leader_without_a_majority_that_sees_a_newer_term_follows(message: Message) -> None:
    core, _, now_ns = a_leader()
    effects = arrive(core, "c", message, now_ns + TIMEOUT_NS)
    assert (core.role, core.term) == (Role.FOLLOWER, 9)
    assert writes(effects)[0].term == 9


@pytest.mark.parametrize("message", NEWER)
def test_a_leader_with_a_majority_heeds_a_newer_term_only_of_who_can_not_follow(message: Message) -> None:
    core, _, now_ns = a_leader()
    arrive(core, "c", message, now_ns)
    assert core.is_leader != isinstance(message, AppendEntriesReply)


def test_a_follower_that_claims_newer_terms_again_and_again_is_heeded_ever_less_often() -> None:
    core, effects, now_ns = a_leader()
    lost: list[int] = []
    for _ in range(400):
        now_ns += HEARTBEAT_NS
        if core.is_leader:
            arrive(core, "b", ack(core.term, 1, True, 0), now_ns)
            arrive(core, "c", ack(core.term + 1, 1, False, 0), now_ns)
            if not core.is_leader:
                lost.append(now_ns)
        if not core.is_leader:
            core.handle(TimerFired(), now_ns=max(now_ns, core.wake_at_ns))
            effects = arrive(core, "b", vote(core.term + 1, True, True), now_ns)
            write_all(core, effects, now_ns)
            arrive(core, "b", vote(core.term, False, True), now_ns)
            assert core.is_leader
    pauses = [after - before for before, after in itertools.pairwise(lost)]
    assert len(lost) < 8, lost
    assert pauses == sorted(pauses)


@pytest.mark.parametrize("pause_ns", [HEARTBEAT_NS, 31 * TIMEOUT_NS // 10, 17 * TIMEOUT_NS, 66 * TIMEOUT_NS])
def test_a_follower_deposes_no_leader_more_than_once_a_minute_however_it_spaces_its_claims(pause_ns: int) -> None:
    claims, hour_ns = TermClaims(TIMEOUT_NS), 3600 * TIMEOUT_NS
    heeded = sum(claims.is_heeded("b", now_ns=now_ns) for now_ns in range(0, hour_ns, pause_ns))
    assert 1 < heeded <= 60
    assert claims.is_heeded("b", now_ns=2 * hour_ns), "it may be led only in a newer term"


def test_two_leaders_in_one_term_are_an_alarm() -> None:
    core, _, now_ns = a_leader()
    effects = arrive(core, "c", append_entries(chain(1), 1, 1, term=1), now_ns)
    assert "both lead" in alarms(effects)[0]
    assert core.is_leader


def test_a_follower_that_lost_what_it_acknowledged_is_an_alarm_and_is_filled_again() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 1))
    write_all(core, effects, now_ns)
    arrive(core, "b", ack(2, 1, True, 3), now_ns)
    assert core.durable_indexes["b"] == 3
    beat = next(m for peer, m in sends(core.handle(TimerFired(), now_ns=core.wake_at_ns)) if peer == "b")
    assert isinstance(beat, AppendEntries)
    effects = arrive(core, "b", ack(2, beat.sequence, False, 0), now_ns)
    assert "has lost entries" in alarms(effects)[0]
    message = sends(effects)[0][1]
    assert isinstance(message, AppendEntries)
    assert [entry.index for entry in message.entries] == [1, 2, 3]
    assert core.durable_indexes["b"] == 0
    assert core.cluster_commit_index == 3
