"""Contributors in the ledger: they follow and acknowledge it, and count for nothing until the log gives them a vote."""

import pytest

from diloco_node.core.events import Effect, TimerFired
from diloco_node.core.ledger.election import Role
from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.messages import AppendEntries, RequestVote, RequestVoteReply
from diloco_node.core.types import DiskNamedBody, LeaderBody
from tests.kit.ledger_kit import (
    TIMEOUT_NS,
    a_core,
    a_discard,
    a_leader,
    ack,
    arrive,
    chain,
    disk_of,
    sends,
    vote,
    vote_request,
    write_all,
)
from tests.kit.ledger_network import Network

ADDED = MembershipBody("d", "contributor")


def lead_with_contributor() -> tuple[LedgerCore, int]:
    """A settled leader of three voters, with a contributor whose folder is named: four entries, all committed."""
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "b", ack(1, 1, True, 1), now_ns)
    for body in (ADDED, DiskNamedBody("d", disk_of("d")), a_discard(1)):
        write_all(core, core.propose(body, now_ns=now_ns), now_ns)
    arrive(core, "b", ack(1, 9, True, 4), now_ns)
    assert core.cluster_commit_index == 4
    return core, now_ns


def test_an_acknowledgement_of_a_contributor_commits_nothing_and_of_a_voter_does() -> None:
    core, now_ns = lead_with_contributor()
    write_all(core, core.propose(a_discard(2), now_ns=now_ns), now_ns)
    arrive(core, "d", ack(1, 99, True, 5), now_ns)
    assert (core.durable_indexes["d"], core.cluster_commit_index) == (5, 4)
    arrive(core, "b", ack(1, 99, True, 5), now_ns)
    assert core.cluster_commit_index == 5


def test_a_vote_counts_from_the_entry_that_gives_it() -> None:
    """Of four voters three are needed, for that entry already."""
    core, now_ns = lead_with_contributor()
    write_all(core, core.propose(MembershipBody("d", "voter"), now_ns=now_ns), now_ns)
    arrive(core, "b", ack(1, 99, True, 5), now_ns)
    assert core.cluster_commit_index == 4
    arrive(core, "d", ack(1, 99, True, 5), now_ns)
    assert core.cluster_commit_index == 5


def test_a_vote_is_gone_from_the_entry_that_takes_it() -> None:
    core, now_ns = lead_with_contributor()
    write_all(core, core.propose(MembershipBody("c", "contributor"), now_ns=now_ns), now_ns)
    arrive(core, "c", ack(1, 99, True, 5), now_ns)
    assert core.cluster_commit_index == 4, "of two voters both are needed"
    arrive(core, "b", ack(1, 99, True, 5), now_ns)
    assert core.cluster_commit_index == 5


def test_a_leader_that_hears_contributors_alone_steps_down() -> None:
    core, now_ns = lead_with_contributor()
    for _ in range(40):
        now_ns = max(now_ns, core.wake_at_ns)
        core.handle(TimerFired(), now_ns=now_ns)
        if not core.is_leader:
            return
        arrive(core, "d", ack(1, core._sequence, True, 4), now_ns)
    raise AssertionError("it still leads")


def contributor() -> LedgerCore:
    """Region d, of which a, b and c know that it is a contributor, and which does not know it yet."""
    return a_core("d", ("a", "b", "c"))


def asked(effects: list[Effect]) -> list[str]:
    return [peer for peer, message in sends(effects) if isinstance(message, RequestVote)]


def test_who_has_no_vote_asks_for_none_and_gives_one_when_asked() -> None:
    """Its log may just not have the entry yet that gives it a vote: else two of three can be stuck."""
    core = contributor()
    for _ in range(5):
        assert asked(core.handle(TimerFired(), now_ns=core.wake_at_ns)) == []
    assert core.role is Role.FOLLOWER
    answers = sends(write_all(core, arrive(core, "a", vote_request(1, False, 0, 0))))
    assert answers == [("a", vote(1, False, True))]
    assert "no member by the entries here yet: it catches up from nobody yet, for no leader reaches it" in core.reason


def test_votes_of_contributors_are_not_counted_nor_asked_for() -> None:
    core, now_ns = lead_with_contributor()
    core.handle(TimerFired(), now_ns=now_ns + 10**9)
    assert not core.is_leader
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert asked(effects) == ["b", "c"]
    arrive(core, "d", RequestVoteReply(core.term + 1, True, True, b""))
    assert core.role is Role.ASKING
    arrive(core, "b", RequestVoteReply(core.term + 1, True, True, b""))
    assert core.role is Role.CANDIDATE


@pytest.mark.parametrize("kind", ["contributor", "former"])
def test_who_has_the_entry_that_takes_its_vote_helps_those_who_lack_it(kind: str) -> None:
    """Its leader died with that entry. Where it is not, three of four must vote: without this one nobody led."""
    log, entry = chain(1, 1), MembershipBody("b", kind)
    entries = (*log, seal(3, 1, log[-1].hash, entry))
    for settled_index, last_index, is_granted in ((0, 2, True), (0, 1, False), (3, 2, False), (3, 3, True)):
        core = a_core("b", ("a", "b", "c", "d"), entries=entries, term=1, settled_index=settled_index)
        assert core.disks.roster.voters == ("a", "c", "d")
        effects = write_all(core, arrive(core, "c", vote_request(2, False, last_index, 1)))
        assert sends(effects) == [("c", vote(2, False, is_granted))], (settled_index, last_index)


def test_who_alone_has_the_entry_that_removes_a_region_votes_for_it_and_follows_it() -> None:
    """Its leader died with that entry, and the removed one leads on without it. Once that is committed it is none."""
    log = chain(1, 1)
    entries = (*log, seal(3, 1, log[-1].hash, MembershipBody("c", "former")))
    for settled_index, is_heard in ((2, True), (3, False)):
        core = a_core("b", ("a", "b", "c", "d"), entries=entries, term=1, settled_index=settled_index)
        effects = write_all(core, arrive(core, "c", vote_request(2, False, 3, 2)))
        assert sends(effects) == ([("c", vote(2, False, True))] if is_heard else [])
        other = seal(3, 2, log[-1].hash, LeaderBody("c"))
        write_all(core, arrive(core, "c", AppendEntries(2, 1, 2, log[-1].hash, (other,), 2)))
        assert (core.leader, core.entries[-1] == other) == (("c", True) if is_heard else ("", False))
        assert ("c" in core.disks.roster.voters) is is_heard


def test_four_regions_elect_a_leader_after_the_one_that_was_taking_a_vote_died() -> None:
    network = Network(4, seed=1)
    leader = network.elect()
    network.run(2 * TIMEOUT_NS)
    leaver, *others = (name for name in network.names if name != leader)
    network.cut |= {(leader, name) for name in others}
    network.propose(MembershipBody(leaver, "contributor"))
    network.run_until(lambda: leaver not in network.cores[leaver].disks.roster.voters)
    network.crash(leader)
    network.run(TIMEOUT_NS // 2)
    assert network.cores[others[0]].disks.roster.voters == network.names
    network.heal()
    assert network.elect() in others


def test_a_removed_region_is_told_and_then_nothing_is_sent_to_it() -> None:
    core, now_ns = lead_with_contributor()
    arrive(core, "d", ack(1, 20, True, 4), now_ns)
    write_all(core, core.propose(MembershipBody("d", "former"), now_ns=now_ns), now_ns)
    arrive(core, "d", ack(1, 21, True, 5), now_ns)
    assert "d" in core.durable_indexes, "it is not committed yet"
    arrive(core, "b", ack(1, 21, True, 5), now_ns)
    effects = arrive(core, "d", ack(1, 22, True, 5), now_ns)
    (farewell,) = [message for peer, message in sends(effects) if peer == "d"]
    assert isinstance(farewell, AppendEntries)
    assert farewell.commit_index == 5
    arrive(core, "d", ack(1, farewell.sequence, True, 5), now_ns)
    assert core.durable_indexes.keys() == set("abc")
    assert sends(arrive(core, "d", ack(1, farewell.sequence, True, 5), now_ns)) == []
