"""An older copy of a state folder (a snapshot, a backup, a clone) has forgotten votes and entries: that is seen."""

from copy import deepcopy

import pytest

from diloco_node.core.events import LinkChanged, MessageArrived, Send, TimerFired
from diloco_node.core.ledger.election import TERMS_AHEAD
from diloco_node.core.ledger.folder_lives import next_life
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.messages import AppendEntriesReply, BaseSent
from diloco_node.core.types import DiskNamedBody, Entry, EntryBody, FolderLife, LeaderBody, Recovered
from tests.kit.ledger_kit import (
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
    disk_of,
    sends,
    vote,
    vote_request,
    write_all,
    writes,
)
from tests.kit.ledger_network import Network


def other(index: int, term: int) -> EntryBody:
    return LeaderBody(f"leader-of-{term}") if index < 3 else a_discard(index)


def short(entry: Entry) -> str:
    return entry.hash.hex()[:16]


HELD = chain(4, 5, 5, 5)
PARTED = {
    "the same term": (chain(4, 5, 5, 5, bodies=other), 2, 5, 3),
    "the term began elsewhere": (chain(4, 4, 5, 5), 1, 5, 2),
    "the leader's own term": (chain(4, 4, 4), 1, 5, 2),
    "a later leader with the same lie": (chain(4, 5, 5, 6, bodies=other), 2, 6, 3),
}


@pytest.mark.parametrize(("log", "first", "term", "index"), PARTED.values(), ids=PARTED)
def test_no_term_goes_on_in_two_logs_that_have_parted(
    log: tuple[Entry, ...], first: int, term: int, index: int
) -> None:
    core = a_core(entries=HELD, term=term)
    effects = arrive(core, "b", append_entries(log, first, len(log), term=term, sequence=3))
    (alarm,) = alarms(effects)
    assert f"b leads with another entry {index}, {short(log[index - 1])} instead of {short(HELD[index - 1])}" in alarm
    assert tuple(core.contradictions.values()) == (alarm.removeprefix(f"term {term}: a "),)
    (answer,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert answer == AppendEntriesReply(term, 3, False, index, HELD[index - 1].hash, disk_of("a"))
    assert (core.entries, core.leader, writes(effects)) == (HELD, "", [])
    # It is told once, gets no vote, and another leader whose log fits is followed.
    assert arrive(core, "b", append_entries(log, first, len(log), term=term)) == []
    answers = write_all(core, arrive(core, "b", vote_request(term + 1, False, 9, 9)))
    assert sends(answers) == [("b", vote(term + 1, False, False))]
    arrive(core, "c", append_entries((*HELD, *chain(term + 1)), 4, 4, term=term + 1))
    assert core.leader == "c"


def test_what_raft_overwrites_is_overwritten_without_a_word() -> None:
    core = a_core(entries=HELD, term=7)
    effects = arrive(core, "b", append_entries(chain(4, 6, 7), 2, 3, term=7))
    assert alarms(effects) == []
    assert [entry.term for entry in core.entries] == [4, 6, 7]


def test_a_leader_that_begins_behind_another_committed_entry_is_seen() -> None:
    """Its messages matched nowhere, and were refused for ever without a word."""
    core = a_core(term=1)
    log = chain(1, 1, 1)
    write_all(core, arrive(core, "b", append_entries(log, 1, 3, term=1, commit=3)))
    forked = chain(2, 2, 2, 2)
    effects = arrive(core, "c", append_entries(forked, 4, 4, term=2), now_ns=9 * TIMEOUT_NS)
    assert f"entry 3, {short(forked[2])} instead of {short(log[2])}, which is committed here" in alarms(effects)[0]
    assert core.entries == log


@pytest.mark.parametrize(("settled", "is_taken"), [(0, True), (2, False)])
def test_rounds_that_are_in_the_states_on_disk_are_never_overwritten(settled: int, *, is_taken: bool) -> None:
    """Who starts again knows of nothing that it was committed, but for that."""
    held, log = chain(1, 1, 1), chain(1, 2, 2)
    core = a_core(entries=held, term=2, settled_index=settled)
    effects = arrive(core, "b", append_entries(log, 2, 3, term=2))
    assert bool(alarms(effects)) is not is_taken
    assert core.entries == (log if is_taken else held)
    if not is_taken:
        words = f"b leads with another entry 2, {short(log[1])} instead of {short(held[1])}, which is committed here"
        assert words in alarms(effects)[0]
        # What follows the settled entries may be overwritten.
        arrive(core, "c", append_entries((*held[:2], *chain(1, 1, 2)[2:]), 3, 2, term=2))
        assert core.leader == "c"


def test_rounds_that_are_in_the_states_on_disk_are_committed_from_the_start() -> None:
    """Who started again told the others that nothing was committed, and looked like an older copy to them."""
    held = chain(1, 1, 1)
    core = a_core(entries=held, term=2, settled_index=2)
    assert (core.commit_index, core.cluster_commit_index, core.folder.commit_index) == (2, 2, 2)
    assert core.take_committed() == list(held[:2])


def test_a_state_on_disk_says_which_rounds_were_committed() -> None:
    rounds = [a_round(1, 0), a_round(1, 1), a_round(2, 0), a_round(2, 1), a_discard(1)]
    log = chain(1, 1, 1, 1, 1, bodies=lambda index, term: rounds[index - 1])
    for states, index in {(0, 0): 0, (-1, 1): 2, (2, 0): 3, (1, 2): 4, (1,): 1, (): 0}.items():
        assert Recovered(1, "", log, states, frozenset()).settled_index == index, states


@pytest.mark.parametrize("commit", [0, 3])
def test_a_base_that_parts_from_the_log_is_not_taken(commit: int) -> None:
    core = a_core(term=5)
    write_all(core, arrive(core, "b", append_entries(HELD, 1, 4, term=5, commit=commit)))
    core.handle(LinkChanged("b", False), now_ns=9 * TIMEOUT_NS)
    effects = arrive(core, "c", BaseSent(6, 1, 3, 5, b"x" * 32, b""), now_ns=9 * TIMEOUT_NS)
    assert f"c leads with another entry 3, {(b'x' * 8).hex()} instead of {short(HELD[2])}" in alarms(effects)[0]
    assert (core.entries, core.take_base(), core.base.index) == (HELD, None, 0)


def refused(core: LedgerCore, peer: str, now_ns: int) -> None:
    log = chain(core.term)
    for message in (append_entries(log, 1, 1, term=core.term), BaseSent(core.term, 1, 9, core.term, b"x" * 32, b"")):
        core.contradictions.clear()
        (alarm,) = alarms(arrive(core, peer, message, now_ns))
        assert f"{peer} and a both lead term {core.term}: ignored {peer}" in alarm
        assert (core.leader, core.take_base()) == ("", None)


def test_who_led_a_term_follows_nobody_else_in_it() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    now_ns += 9 * TIMEOUT_NS
    core.handle(TimerFired(), now_ns=now_ns)
    assert not core.is_leader
    refused(core, "b", now_ns)
    assert core.entries[-1].body == LeaderBody("a")
    # It knows it from its disk, too; and follows in the next term.
    core = a_core(entries=core.entries, term=core.term)
    refused(core, "c", now_ns=0)
    arrive(core, "c", append_entries((*core.entries, *chain(2)), 2, 1, term=core.term + 1))
    assert core.leader == "c"


def test_a_leader_that_hears_of_another_entry_steps_down_but_not_each_time() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    claim = AppendEntriesReply(core.term, 1, False, 1, b"x" * 32, disk_of("b"))
    effects = arrive(core, "b", claim, now_ns)
    assert f"b holds another entry 1, {(b'x' * 8).hex()} instead of {short(core.entry(1))}" in alarms(effects)[0]
    assert not core.is_leader
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    assert core._claims.is_heeded("b", now_ns=now_ns)
    arrive(core, "b", claim, now_ns)
    assert core.is_leader
    arrive(core, "b", ack(core.term, 1, False, 0), now_ns)
    assert len(core.contradictions) == 1


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_folder_from_before_one_region_went_on_alone_is_itself_the_one_to_empty(*, is_signed: bool) -> None:
    log = chain(4, *(4 + TERMS_AHEAD,) * 2)
    core = a_core(entries=HELD, term=4 + TERMS_AHEAD, settled_index=4)
    if is_signed:
        core.newer_roster = core.disks.roster.changed(MembershipBody("c", "former"))
    (alarm,) = alarms(arrive(core, "b", append_entries(log, 2, 3, term=4 + TERMS_AHEAD)))
    assert "b leads with another entry 2" in alarm
    assert alarm.endswith("dropped what this folder holds: empty that of a") is is_signed


def test_a_contradiction_is_none_any_more_once_the_logs_are_one_again() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "c", AppendEntriesReply(core.term, 1, True, 1, b"x" * 32, disk_of("c")), now_ns)
    arrive(core, "c", ack(core.term, 1, False, 0), now_ns)
    arrive(core, "b", ack(core.term, 1, True, 1), now_ns)
    arrive(core, "c", ack(core.term, 1, True, 0), now_ns)
    assert set(core.contradictions) == {"c"}, "it does not hold yet what is committed"
    arrive(core, "c", ack(core.term, 1, True, 1), now_ns)
    assert core.contradictions == {}
    core = a_core(entries=HELD, term=7)
    core.contradictions["b"] = "b leads with another entry 4"
    write_all(core, arrive(core, "b", append_entries(chain(4, 5, 5, 6, 7), 3, 3, term=7)))
    assert set(core.contradictions) == {"b"}, "this log goes on otherwise"
    write_all(core, arrive(core, "b", append_entries((*HELD, *chain(7)), 4, 4, term=7)))
    assert (core.leader, core.contradictions) == ("b", {})


def test_an_older_copy_is_an_alert_until_its_folder_is_named_anew() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    lives = [next_life(start << 32, 7) for start in range(3)]
    for life in (lives[2], lives[1]):
        core.hear("b", FolderLife(disk_of("b"), life, 0, 0))
    assert "the folder of b is an older copy" in core.contradictions["b"]
    arrive(core, "b", ack(core.term, 1, True, 1), now_ns)
    for disk in (b"", disk_of("b")):
        assert "b" in core.contradictions
        write_all(core, core.propose(DiskNamedBody("b", disk), now_ns=now_ns), now_ns)
        core.hear("b", FolderLife(disk_of("b"), lives[1], 0, 0))
    assert core.contradictions == {}


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")])
def test_an_older_copy_is_an_alert_also_where_it_leads_and_of_two_until_it_holds_all(names: tuple[str, ...]) -> None:
    """What is known of a folder is news once. Of two regions its folder counts, and must not be emptied."""
    lives = [next_life(start << 32, 7) for start in range(3)]
    core, effects, now_ns = a_leader(voters=names)
    write_all(core, effects, now_ns)
    follower = a_core(voters=names, entries=HELD, term=7)
    for life in (lives[2], lives[1]):
        core.hear("b", FolderLife(disk_of("b"), life, 0, 0))
        follower.hear("b", FolderLife(disk_of("b"), life, 0, 0))
    assert "b" in core.contradictions
    assert "b" in follower.contradictions
    arrive(core, "b", ack(core.term, 1, True, 1), now_ns)
    assert ("b" in core.contradictions) is (len(names) > 2)
    write_all(follower, arrive(follower, "b", append_entries((*HELD, *chain(7)), 4, 4, term=7)))
    assert follower.leader == "b"
    assert ("b" in follower.contradictions) is (len(names) > 2)


def test_a_region_without_a_vote_that_holds_another_entry_deposes_nobody() -> None:
    """As after `members recover`: a region that was added again came with its old folder."""
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    write_all(core, core.propose(MembershipBody("c", "contributor"), now_ns=now_ns), now_ns)
    effects = arrive(core, "c", AppendEntriesReply(core.term, 1, False, 1, b"x" * 32, disk_of("c")), now_ns)
    assert "c holds another entry 1" in alarms(effects)[0]
    assert core.is_leader


def test_two_clones_that_vote_for_two_leaders_are_seen_by_both() -> None:
    """Both copies of `a` have a vote for term 1, so `b` and `c` both win it."""
    leaders = {}
    for name in ("b", "c"):
        core = a_core(name)
        now_ns = core.wake_at_ns
        core.handle(TimerFired(), now_ns=now_ns)
        effects = arrive(core, "a", vote(1, True, True), now_ns)
        write_all(core, effects, now_ns)
        leaders[name] = (core, arrive(core, "a", vote(1, False, True), now_ns), now_ns)
        assert core.is_leader
    for name, peer in (("b", "c"), ("c", "b")):
        core, _, now_ns = leaders[name]
        for effect in leaders[peer][1]:
            if isinstance(effect, Send) and effect.peer == name:
                core.handle(MessageArrived(peer, effect.message), now_ns=now_ns)
        assert core.contradictions == {peer: f"{peer} and {name} both lead term 1: ignored {peer}"}
        assert core.is_leader


class OfTwoHistories(Network):
    """A network in which what was committed may be committed otherwise: nothing is checked."""

    def check(self, name: str) -> None:
        self.committed[name] += self.cores[name].take_committed()


def second_history(seed: int, *, is_leader_restored: bool) -> bool:
    """Let two of three commit twelve rounds, restore one from before, and let it commit others with the third.

    Returns:
        Whether the second history has a leader of the same term. Then that is checked to be seen.
    """
    network = OfTwoHistories(3, seed=seed)
    absent = network.names[seed % 3]
    network.isolate(absent)
    copies = deepcopy(network.disks)
    leader = network.elect()
    (follower,) = set(network.names) - {absent, leader}
    for number in range(12):
        network.propose(a_discard(number))
    network.run_until(lambda: min(len(network.committed[name]) for name in (leader, follower)) == 13)
    term = network.cores[leader].term
    restored, witness = (leader, follower) if is_leader_restored else (follower, leader)
    network.crash(leader)
    network.crash(follower)
    network.disks[restored] = copies[restored]
    network.heal()
    network.start(restored)
    if network.cores[network.elect()].term != term:
        return False
    for number in range(100, 112):
        network.propose(a_discard(number))
    network.run(3 * TIMEOUT_NS)
    network.alarms.clear()
    network.start(witness)
    rounds = network.cores[witness].entries
    assert [entry.body for entry in rounds[1:13]] == [a_discard(number) for number in range(12)]
    network.run(40 * TIMEOUT_NS)
    assert network.cores[witness].entries[:13] == rounds[:13]
    assert network.cores[witness].contradictions
    assert any(f": {witness} " in alarm for alarm in network.alarms)
    return True


@pytest.mark.parametrize("is_leader_restored", [False, True])
def test_an_older_copy_never_takes_committed_rounds_from_who_has_them(*, is_leader_restored: bool) -> None:
    cases = [second_history(seed, is_leader_restored=is_leader_restored) for seed in range(60)]
    assert sum(cases) >= 2
