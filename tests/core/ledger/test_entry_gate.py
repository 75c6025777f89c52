"""core/ledger/entry_gate.py: what makes no sense gets into no log, and who sends it does not lead for long."""

from dataclasses import replace

import pytest

from diloco_node.core.events import LinkChanged
from diloco_node.core.ledger.log import STAGED_ENTRIES_MAX
from diloco_node.core.ledger.raft import DISTRUST_TIMEOUTS
from diloco_node.core.messages import BaseSent
from diloco_node.core.types import DiscardedBody, Entry, EntryBody, LeaderBody, LedgerBase, RoundBody
from diloco_node.errors import StorageError
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
    sends,
    vote,
    vote_request,
    write_all,
)
from tests.kit.ledger_network import Network, shake

NONSENSE = replace(a_discard(0), reason="nonsense")
DOUBTFUL = replace(a_discard(0), reason="doubtful")


class Counting:
    """A meaning: versions count up by one, nothing else is asked; what was taken can be looked at."""

    def __init__(self) -> None:
        self.index = 0
        self.taken: list[Entry] = []
        self.settled_index = 0
        self.asked = 0

    def fault(self, entry: Entry) -> str:
        assert entry.index == self.index + 1
        self.asked += 1
        return "nonsense" if entry.body == NONSENSE else ""

    def doubt(self, entry: Entry) -> str:
        return "a wrong number" if entry.body == DOUBTFUL else ""

    def take(self, entry: Entry) -> None:
        assert entry.index == self.index + 1
        self.index += 1
        self.taken.append(entry)

    def back_to(self, index: int) -> None:
        assert index >= self.settled_index
        del self.taken[index:]
        self.index = index

    def settle(self, index: int) -> None:
        self.settled_index = max(self.settled_index, index)

    def begin(self, base: LedgerBase) -> None:
        self.index = self.settled_index = base.index


def with_nonsense_at(*places: int, length: int = 4) -> tuple[Entry, ...]:
    def body(index: int, term: int) -> EntryBody:
        return NONSENSE if index in places else LeaderBody("b")

    return chain(*[1] * length, bodies=body)


def test_a_message_with_nonsense_in_it_leaves_the_log_as_it_was() -> None:
    core = a_core(term=1, meaning=Counting())
    log = with_nonsense_at(3)
    effects = arrive(core, "b", append_entries(log, 1, 4, term=1))
    assert sends(effects) == []
    assert "ignored entries from b" in alarms(effects)[0]
    assert "entry 3: nonsense" in alarms(effects)[0]
    assert (core.last_index, core.leader) == (0, "")


@pytest.mark.parametrize(
    ("term", "author", "commit", "says"),
    [
        (1, "b", 0, "entry 2: a wrong number"),
        (1, "b", 3, "entry 2: a wrong number"),
        (1, "c", 0, "entry 2: a wrong number"),
        (2, "b", 0, "entry 2: a wrong number"),
        (2, "b", 1, "entry 2: a wrong number"),
        (2, "b", 2, ""),
        (2, "c", 0, ""),
        (2, "", 0, "entry 2: a wrong number"),
    ],
)
def test_a_sender_answers_for_the_entries_that_it_made(term: int, author: str, commit: int, says: str) -> None:
    core = a_core(term=term, meaning=Counting())
    log = chain(
        1, 1, 1, bodies=lambda index, _: DOUBTFUL if index == 2 else LeaderBody(author) if author else a_discard(0)
    )
    effects = arrive(core, "b", append_entries(log, 1, 3, term=term, commit=commit))
    assert says in " ".join(alarms(effects))
    assert (core.last_index, core.leader) == ((0, "") if says else (3, "b"))


def test_whoever_led_the_terms_on_the_disk_answers_for_them() -> None:
    for author, says in (("b", "entry 3: a wrong number"), ("c", "")):
        log = chain(1, 1, 1, bodies=lambda index, _, author=author: DOUBTFUL if index == 3 else LeaderBody(author))
        core = a_core(entries=log[:2], term=2, meaning=Counting())
        effects = arrive(core, "b", append_entries(log, 3, 3, term=2, commit=2))
        assert says in " ".join(alarms(effects))
        assert core.last_index == (2 if says else 3)


def test_a_leader_doubts_its_own_entries_and_those_on_disk_are_not_doubted() -> None:
    log = chain(1, bodies=lambda _index, _term: DOUBTFUL)
    core = a_core(entries=log, term=1, meaning=Counting())
    assert core.last_index == 1
    core._election.lead(now_ns=0)
    assert "a wrong number" in " ".join(alarms(core.propose(DOUBTFUL, now_ns=1)))
    assert core.last_index == 1


def test_behind_a_base_that_takes_the_logs_place_entries_are_asked_again() -> None:
    meaning = Counting()
    core = a_core(term=1, meaning=meaning)
    log = with_nonsense_at(13, length=13)
    base = log[9]
    arrive(core, "b", BaseSent(1, 1, base.index, base.term, base.hash, b"summary"))
    arrive(core, "b", append_entries(log, 11, 12, term=1, sequence=2))
    assert (core.last_index, meaning.index, meaning.asked) == (12, 12, 2)
    assert "entry 13: nonsense" in alarms(arrive(core, "b", append_entries(log, 13, 13, term=1, sequence=3)))[0]
    assert core.last_index == 12


def test_who_sent_nonsense_is_not_followed_again_not_even_in_a_heartbeat() -> None:
    core = a_core(term=1, meaning=Counting())
    log = with_nonsense_at(3)
    write_all(core, arrive(core, "b", append_entries(log, 1, 2, term=1)))
    due_ns = core.wake_at_ns
    arrive(core, "b", append_entries(log, 3, 3, term=1, sequence=2), now_ns=5)
    assert arrive(core, "b", append_entries(log, 3, 2, term=1, sequence=3), now_ns=6) == []
    assert core.wake_at_ns == due_ns, "its timer runs on"
    assert (core.leader, core.last_index) == ("", 2)
    assert core.reason == "no leader in term 1 yet; refused entries of b (1 times)"


def test_a_follower_that_refused_its_leader_votes_for_others_and_never_for_the_liar() -> None:
    core = a_core(term=1, meaning=Counting())
    arrive(core, "b", append_entries(with_nonsense_at(1), 1, 1, term=1))
    assert sends(arrive(core, "c", vote_request(2, True, 0, 0), now_ns=1)) == [("c", vote(2, True, True))]
    assert sends(arrive(core, "b", vote_request(2, True, 9, 1), now_ns=1)) == [("b", vote(1, True, False))]
    effects = arrive(core, "b", vote_request(2, False, 9, 1), now_ns=1)
    assert sends(effects + write_all(core, effects)) == [("b", vote(2, False, False))]


def test_whoever_leads_on_after_nonsense_is_tried_again_later() -> None:
    core, log = a_core(term=1, meaning=Counting()), with_nonsense_at(2)
    arrive(core, "b", append_entries(with_nonsense_at(1), 1, 1, term=1))
    later_ns = DISTRUST_TIMEOUTS * TIMEOUT_NS
    for now_ns, leader in ((later_ns - 1, ""), (later_ns, "b")):
        arrive(core, "b", append_entries(log, 1, 1, term=1, sequence=2), now_ns=now_ns)
        assert core.leader == leader
    arrive(core, "b", append_entries(log, 2, 2, term=1, sequence=3), now_ns=later_ns + 1)
    assert core.leader == ""


def test_another_process_behind_a_new_link_is_heard_again() -> None:
    core = a_core(term=1, meaning=Counting())
    arrive(core, "b", append_entries(with_nonsense_at(1), 1, 1, term=1))
    core.handle(LinkChanged("b", True), now_ns=1)
    effects = arrive(core, "b", append_entries(chain(1), 1, 1, term=1, sequence=2), now_ns=1)
    assert ack(1, 2, True, 1) in [message for _, message in sends(effects + write_all(core, effects))]


def test_each_entry_is_asked_about_once() -> None:
    meaning = Counting()
    core = a_core(term=1, meaning=meaning)
    log = chain(1, 1, 1, 1)
    for sequence, (first, last) in enumerate([(1, 2), (1, 2), (2, 3), (3, 4), (4, 4)], start=1):
        write_all(core, arrive(core, "b", append_entries(log, first, last, term=1, sequence=sequence)))
    assert (core.last_index, meaning.asked) == (4, 4)


def test_the_check_follows_a_log_that_is_truncated_and_what_was_not_staged() -> None:
    meaning = Counting()
    core = a_core(term=1, meaning=meaning, has_payload=lambda body: not isinstance(body, RoundBody))
    log = chain(*[1] * (STAGED_ENTRIES_MAX + 40), bodies=lambda index, term: a_round(index))
    for first in range(1, len(log), 64):
        arrive(core, "b", append_entries(log, first, min(first + 63, len(log)), term=1, sequence=first))
    other = chain(1, 1, 2, 2, bodies=lambda index, term: a_round(index) if index < 3 else LeaderBody("c"))
    assert other[1] == log[1]
    arrive(core, "c", append_entries(other, 3, 4, term=2), now_ns=TIMEOUT_NS)
    assert meaning.taken == list(other)


def test_a_leader_does_not_append_nonsense_of_its_own_and_leads_on() -> None:
    core, _, now_ns = a_leader(meaning=Counting())
    last_index = core.last_index
    effects = core.propose(NONSENSE, now_ns=now_ns)
    assert "does not append what can't be" in alarms(effects)[0]
    assert (core.last_index, core.is_leader, sends(effects)) == (last_index, True, [])
    core.propose(a_discard(1), now_ns=now_ns)
    assert core.last_index == last_index + 1


def test_a_leader_does_not_append_what_is_out_of_bounds() -> None:
    core, _, now_ns = a_leader()
    effects = core.propose(DiscardedBody("a", 1, 0, 0, 1 << 60, 1, "x"), now_ns=now_ns)
    assert "DiscardedBody.step_to: 2^60 is above 2^48" in alarms(effects)[0]
    assert core.is_leader


def test_a_ledger_on_disk_that_makes_no_sense_is_damaged() -> None:
    with pytest.raises(StorageError, match="entry 3: nonsense"):
        a_core(entries=with_nonsense_at(3), meaning=Counting())


@pytest.mark.parametrize("voters", [3, 5])
def test_a_leader_that_sends_nonsense_is_replaced_and_the_others_go_on(voters: int) -> None:
    captured: set[str] = set()

    class Own(Counting):
        """The captured region asks nothing."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def fault(self, entry: Entry) -> str:
            return "" if self.name in captured else super().fault(entry)

    network = Network(voters, seed=7, meaning=Own)
    liar = network.elect()
    network.propose(a_discard(1))
    network.run(2 * TIMEOUT_NS)
    captured.add(liar)
    network.propose(NONSENSE)
    peers = [name for name in network.names if name != liar]
    network.run_until(lambda: any(network.cores[name].is_settled for name in peers))
    network.run(20 * TIMEOUT_NS)
    assert network.leader in peers, "and it stays one of them"
    network.propose(a_discard(2))
    last = network.cores[network.leader].last_index
    network.run_until(lambda: all(len(network.committed[name]) >= last for name in peers))
    for name in peers:
        assert NONSENSE not in [entry.body for entry in network.committed[name]]
        assert [entry.body for entry in network.committed[name]][-1] == a_discard(2)
    assert any(f"ignored entries from {liar}" in text for text in network.alarms)


@pytest.mark.parametrize("seed", range(8))
def test_under_random_faults_the_check_stays_in_step_with_the_log(seed: int) -> None:
    shake(Network(3 + 2 * (seed % 2), seed=seed, meaning=lambda name: Counting()), rounds=25)


def test_a_leader_answers_for_what_waits_of_each_term_that_it_led() -> None:
    """It can't have an entry that was doubted taken as another leader's once it is elected again."""
    leaders = {1: "b", 3: "c", 5: "b"}
    starts = {1: 1, 3: 3, 5: 5}

    def body(index: int, term: int) -> EntryBody:
        return LeaderBody(leaders[term]) if index == starts[term] else a_round(index)

    log = chain(1, 1, 3, 3, 5, 5, bodies=body)
    core = a_core(term=5, meaning=Counting(), has_payload=lambda body: not isinstance(body, RoundBody))
    arrive(core, "b", append_entries(log, 1, 6, term=5))
    assert [core.is_staged(a_round(index), leader="b") for index in (2, 4, 6)] == [True, False, True]
    assert [core.is_staged(a_round(index), leader="c") for index in (2, 4, 6)] == [False, True, False]
    assert [core.is_staged(a_round(index)) for index in (2, 4, 6, 8)] == [True, True, True, False]
    assert [core.is_staged(a_round(index), term=5) for index in (2, 4, 6)] == [False, False, True]
    assert not core.is_staged(a_round(2), leader="b", term=5)
