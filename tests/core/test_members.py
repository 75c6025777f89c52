"""Regions come and go in mid-run: a contributor joins, trains and is merged, gets a vote, and another region leaves."""

import pytest

from diloco_node.core.events import Effect, FinishOrdered, MessageArrived, Note, Send
from diloco_node.core.ledger.ledger_state import LedgerState
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.membership import replacement
from diloco_node.core.membership.farewell import NEWS_HEARTBEATS
from diloco_node.core.messages import RosterShown
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import RoundBody
from diloco_node.lab.sim.member_check import MemberCheck
from diloco_node.lab.sim.planting import signature_of, signed
from diloco_node.numeric import NS_PER_S
from tests.kit.planted.member_faults import count_contributors
from tests.kit.rounds_kit import committed_round, contribution
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


def order(small: Small, region: str, kind: str, *, is_forced: bool = False) -> str:
    """Give the order to the leader; why it can't be carried out."""
    host = small.hosts[small.leader()]
    body = signed(host.core.ledger.disks.roster, MembershipBody(region, kind))
    change = EntryOrdered(body, is_cut_off=kind == "former", is_forced=is_forced)
    fault: str = host.core.replacement.order_fault(change, now_ns=small.world.now_ns)
    host.post(change)
    return fault


def start(small: Small, region: str) -> None:
    """Start a joiner: from now on everything is demanded of it, too."""
    small.sim.start_region(region)
    small.sim.honest[region] = small.hosts[region]


def stop(small: Small, region: str) -> None:
    """End a region that has left the run."""
    small.hosts[region].kill_daemon()
    small.hosts[region].kill_learner()
    del small.sim.honest[region], small.hosts[region]


def merged(small: Small, after: int) -> set[str]:
    """Learners in the rounds that were committed after so many entries."""
    rounds = [body for body in small.bodies()[after:] if isinstance(body, RoundBody)]
    assert rounds
    return {member.contribution.learner for body in rounds for member in body.members}


def roster(small: Small, region: str) -> Roster:
    found: Roster = small.hosts[region].core.history.roster
    return found


@pytest.mark.parametrize(("regions", "summary_entries"), [(4, 12), pytest.param(5, 1024, marks=pytest.mark.seeds)])
def test_a_region_joins_is_merged_and_gets_a_vote_and_another_leaves(
    patch: pytest.MonkeyPatch, regions: int, summary_entries: int
) -> None:
    small = Small(patch, regions, joiners=1, summary_entries=summary_entries)
    (joiner,) = small.sim.setup.joiners
    small.go(6)
    assert order(small, joiner, "voter").startswith(f"{joiner} is no member: add it first")
    assert order(small, joiner, "contributor") == ""
    small.go(3)
    assert roster(small, small.leader()).kind_of(joiner) == "contributor", "before it is there"
    assert order(small, joiner, "voter").startswith(f"the disk of {joiner} does not hold yet")
    start(small, joiner)
    small.go(8)
    count = len(small.bodies())
    small.go(5)
    assert merged(small, count) == set(small.hosts), "a contributor trains and is merged"
    assert all(roster(small, name).voters == small.sim.setup.founders for name in small.hosts)
    assert not small.hosts[joiner].core.ledger._may_stand()
    assert order(small, joiner, "voter") == ""
    small.go(2)
    assert all(roster(small, name).voters == small.sim.setup.regions for name in small.hosts)
    small.settle()

    leaver = next(name for name in small.others() if name != joiner)
    assert order(small, leaver, "former") == ""
    small.go(5)
    assert "no member of the run any more" in small.hosts[leaver].core.ledger.reason, "it is told"
    assert leaver not in small.hosts[small.leader()].core.ledger.durable_indexes, "and then nobody sends to it"
    assert "was removed from the run by an operator (entry" in small.hosts[leaver].core.farewell.reason
    stop(small, leaver)
    count = len(small.bodies())
    small.go(5)
    assert merged(small, count) == set(small.hosts)
    assert roster(small, joiner).voters == tuple(sorted(small.hosts))
    small.settle()


def test_a_region_that_a_voter_does_not_hear_gets_no_vote(patch: pytest.MonkeyPatch) -> None:
    """Of four voters three must be there: after a failure of the leader the other three could elect nobody."""
    small = Small(patch, 3, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(6)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    small.go(8)
    leader = small.leader()
    other = next(name for name in small.others() if name != joiner)
    pairs = [(joiner, other), (other, joiner)]
    small.sim.network.cut_all(pairs)
    small.go(3)
    assert small.leader() == leader
    fault = order(small, joiner, "voter")
    assert fault.startswith(f"{joiner} and {other} don't hear each other: after a failure of {leader} its vote would")
    small.go(2)
    assert joiner not in roster(small, leader).voters
    small.heal(pairs)
    small.go(3)
    assert order(small, joiner, "voter") == ""
    small.go(2)
    assert joiner in roster(small, leader).voters
    small.settle()


def test_regions_that_never_come_cost_nothing_and_one_that_is_gone_is_removed(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 5, joiners=2)
    small.go(4)
    for joiner in small.sim.setup.joiners:
        assert order(small, joiner, "contributor") == ""
        small.go(1)
    leader = small.leader()
    gone, other = (name for name in small.sim.setup.founders if name != leader)
    small.hosts[gone].kill_daemon()
    small.go(3)
    count = len(small.bodies())
    small.go(4)
    assert merged(small, count) == {leader, other}
    assert "it makes 2 voters, of which 2 must be there" in order(small, other, "former")
    assert order(small, gone, "former") == "", "it needs only the others"
    small.go(2)
    for joiner in small.sim.setup.joiners:
        assert order(small, joiner, "former") == ""
        small.go(1)
    assert roster(small, leader).names == tuple(sorted((leader, other)))
    stop(small, gone)
    for joiner in small.sim.setup.joiners:
        del small.hosts[joiner]
    assert [note for note in small.alarms() if "can't be" in note.text] == []
    small.settle()


@pytest.mark.seeds
def test_contributors_do_not_count_for_the_majority_nor_stand_for_election(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 5, joiners=2)
    small.go(8)
    for joiner in small.sim.setup.joiners:
        start(small, joiner)
        assert order(small, joiner, "contributor") == ""
        small.go(8)
    first, second = (name for name in small.sim.setup.founders if name != small.leader())
    for name in (first, second):
        small.hosts[name].kill_daemon()
    count = len(small.bodies())
    small.go(15)
    assert len(small.bodies()) <= count + 2, "one of three voters and two contributors commit nothing"
    assert not any(host.is_leading for host in small.hosts.values())
    small.hosts[first].start_daemon()
    small.go(20)
    assert len(small.bodies()) > count + 4, "two of three voters do"
    small.hosts[second].start_daemon()
    small.settle()


@pytest.mark.seeds
def test_the_vote_of_a_contributor_that_is_counted_is_found(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 5, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(8)
    start(small, joiner)
    assert order(small, joiner, "contributor") == ""
    small.go(15)
    for host in small.hosts.values():
        count_contributors(host.core)
    away = [name for name in small.others() if name != joiner][:2]
    for name in away:
        small.hosts[name].kill_daemon()
    small.sim.run_until(lambda: small.world.now_ns > 60_000_000_000)
    assert any("durable: " in text for text in small.sim.checkers.violations)


def test_two_changes_that_are_open_at_once_are_found(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 5, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(5)
    leader = small.leader()
    small.cut(leader)
    assert order(small, joiner, "contributor") == ""
    assert "another change of the regions is not committed yet" in order(small, small.others()[0], "former")
    core = small.hosts[leader].core

    def propose_anyway(event: EntryOrdered, *_: object, now_ns: int) -> list[Effect]:
        effects: list[Effect] = core.ledger.propose(event.body, now_ns=now_ns)
        return effects

    patch.setattr(core.replacement, "carry_out", propose_anyway)
    change = signed(core.ledger.disks.roster, MembershipBody(small.others()[0], "former"))
    small.hosts[leader].post(EntryOrdered(change, is_cut_off=True))
    assert any("2 changes are open at once" in text for text in small.sim.checkers.violations)


def test_a_region_that_an_open_round_has_leaves_after_it_and_no_new_round_has_it(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(4)
    leaver = small.others()[0]
    host = small.hosts[small.leader()]
    small.sim.run_until(lambda: any(leaver in round_.members for round_ in host.core.leader.rounds.values()))
    ballots = {round_.ballot for round_ in host.core.leader.rounds.values()}
    assert order(small, leaver, "former", is_forced=True) == ""
    assert roster(small, host.name).kind_of(leaver) == "voter", "its contribution counts"
    small.go(4)
    assert roster(small, host.name).kind_of(leaver) == "former"
    late = [body for body in small.bodies() if isinstance(body, RoundBody) and body.ballot > max(ballots)]
    assert late
    assert leaver not in {member.contribution.learner for body in late for member in body.members}


def test_of_two_regions_that_leave_at_once_the_second_is_refused_until_the_first_has_left(
    patch: pytest.MonkeyPatch,
) -> None:
    """The later order took the place of the one that waited for a round, and the two kept each other from leaving."""
    small = Small(patch, 5, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(4)
    first, second = small.others()[:2]
    host = small.hosts[small.leader()]
    small.sim.run_until(lambda: any(first in round_.members for round_ in host.core.leader.rounds.values()))
    assert order(small, first, "former", is_forced=True) == ""
    assert roster(small, host.name).kind_of(first) == "voter", "a round has it"
    waits = f"{first} is about to leave, and an open round still has it: try again once it has left"
    assert order(small, second, "former", is_forced=True) == waits
    assert order(small, joiner, "contributor") == waits, "it is signed as the change that the departure is"
    assert order(small, first, "contributor", is_forced=True) == waits
    end_ns = small.world.now_ns + 10_000_000_000
    while roster(small, host.name).kind_of(second) != "former" and small.world.now_ns < end_ns:
        small.go(0.2)
        for name in (first, second):  # two operators, each until the list says so
            if roster(small, host.name).kind_of(name) != "former":
                order(small, name, "former", is_forced=True)
    changes = [body for body in small.bodies() if isinstance(body, MembershipBody)]
    assert [(body.region, body.kind) for body in changes] == [(first, "former"), (second, "former")]


def test_a_departure_that_an_open_round_holds_up_for_long_is_given_up(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 5)
    small.go(4)
    leader, (first, second) = small.leader(), small.others()[:2]
    core = small.hosts[leader].core
    small.sim.run_until(lambda: any(first in round_.members for round_ in core.leader.rounds.values()))
    patch.setattr(core.leader, "let_go", lambda region: not region)
    patch.setattr(replacement, "HOLD_NS", 4 * NS_PER_S)
    deadline_ns = max(round_.deadline_ns for round_ in core.leader.rounds.values())
    assert order(small, first, "former", is_forced=True) == ""
    small.go((deadline_ns - small.world.now_ns) / NS_PER_S + 3.5)
    assert "is about to leave" in order(small, second, "former", is_forced=True), "a round may have ended in time"
    small.go(1)
    assert any(f"an open round has had {first} all the time" in note.text for note in small.alarms())
    assert "is about to leave" not in order(small, second, "contributor", is_forced=True)


def test_a_region_that_was_removed_while_it_was_down_is_told_when_it_comes_back(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(4)
    leaver, other = small.others()[:2]
    small.hosts[leaver].kill_daemon()
    small.go(2)
    assert order(small, leaver, "former") == ""
    small.go(2)
    small.hosts[leaver].start_daemon()
    small.go(6)
    core = small.hosts[leaver].core
    assert "shows the authority's signature, change 1 of the members" in core.farewell.reason
    assert core.history.roster.kind_of(leaver) == "voter", "its own ledger does not say so"
    stop(small, leaver)
    small.settle()
    assert small.hosts[other].core.farewell.reason == ""


def test_orders_where_nobody_leads_or_the_run_is_over_name_the_remedy(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 3)
    small.go(4)
    first, second = small.others()

    def fault(region: str, kind: str = "contributor") -> str:
        host = small.hosts[region]
        body = signed(host.core.ledger.disks.roster, MembershipBody("new", kind))
        change = EntryOrdered(body, is_cut_off=kind == "former")
        answer: str = host.core.replacement.order_fault(change, now_ns=small.world.now_ns)
        return answer

    assert fault(first) == f"only the leader can do it: give the order to {small.leader()}"
    small.hosts[second].kill_daemon()
    small.hosts[small.leader()].kill_daemon()
    small.go(8)
    assert fault(first).startswith("no region leads now: give the order again once a majority of the voters is there")
    assert fault(first).endswith("If one is lost for good, `diloco-node members recover`")
    for host in small.hosts.values():
        if host is not small.hosts[first]:
            host.start_daemon()
    small.go(4)
    small.hosts[first].post(FinishOrdered("enough"))
    small.go(12)
    over = "the run is over: to go on with it, raise run.steps or run.tokens in run.toml"
    assert all(fault(name).startswith(over) for name in small.hosts)
    assert all(
        host.core.replacement.order_fault(
            EntryOrdered(SettingsBody.of(host.core.history.settings)), now_ns=small.world.now_ns
        ).startswith(over)
        for host in small.hosts.values()
    )


def test_every_member_tells_a_region_that_it_was_removed(patch: pytest.MonkeyPatch) -> None:
    """Only the leader that removed it sent it entries: one elected since left it running while its links stood."""
    small = Small(patch, 4)
    small.go(4)
    leaver, peer = small.others()[:2]
    core = small.hosts[peer].core
    without = roster(small, peer).changed(MembershipBody(leaver, "former"))
    told = RosterShown(1, without.lines, signature_of(without.statement("simulated")))
    patch.setattr(core.history, "roster", Roster(told.members, told.changes, told.signature))
    core.farewell.look(now_ns=small.world.now_ns)
    assert Send(leaver, told) in core._effects.take()


def test_the_word_of_a_peer_alone_removes_nobody(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(4)
    victim, peer = small.others()[:2]
    core = small.hosts[victim].core
    without = roster(small, victim).changed(MembershipBody(victim, "former"))
    forged = signature_of(without.statement("another run"))
    for message in (
        RosterShown(1, without.lines, forged),
        RosterShown(1, without.lines[::-1], signature_of(without.statement("simulated"))),
        RosterShown(0, without.lines, signature_of(without.statement("simulated"))),
    ):
        small.hosts[victim].post(MessageArrived(peer, message))
    assert core.farewell.reason == ""
    assert any(f"shows a list without {victim}: no authority" in note.text for note in small.alarms())
    small.settle()


def test_a_list_of_before_removes_nobody_who_was_added_again(patch: pytest.MonkeyPatch) -> None:
    """The authority has signed it, so a peer may show it for ever."""
    small = Small(patch, 4)
    small.go(4)
    victim, peer = small.others()[:2]
    core = small.hosts[victim].core
    before = roster(small, victim)
    without = before.changed(MembershipBody(victim, "former"))
    old = RosterShown(1, without.lines, signature_of(without.statement("simulated")))
    with patch.context() as context:
        context.setattr(core.history, "roster", without.changed(MembershipBody(victim, "contributor")))
        core.farewell.take(peer, old)
        assert core.farewell.reason == ""
    core.farewell.joined = 2  # with an empty folder, and listed by the second change
    core.farewell.take(peer, old)
    assert core.farewell.reason == ""
    # A founder that was wiped comes with its first run.toml, and a peer that lags may be the first to link.
    core.farewell.joined = 0
    quiet_ns = NEWS_HEARTBEATS * core.history.settings.heartbeat_ns
    with patch.context() as context:
        context.setattr(core.ledger, "newer_roster", core.ledger.newer_roster)
        core.farewell.take(peer, old)
        core.farewell.look(now_ns=small.world.now_ns)
        again = without.changed(MembershipBody(victim, "contributor"))
        core.farewell.take(small.others()[2], RosterShown(2, again.lines, signature_of(again.statement("simulated"))))
        core.farewell.look(now_ns=small.world.now_ns + 2 * quiet_ns)
        assert core.farewell.reason == ""
    core.farewell.take(peer, old)
    for after_ns in (0, quiet_ns - 1, quiet_ns):
        assert core.farewell.reason == ""
        core.farewell.look(now_ns=small.world.now_ns + after_ns)
    assert core.farewell.reason, "where it is news"


@pytest.mark.parametrize("more", [0, 1], ids=["as-many-changes", "more-changes-here"])
def test_two_regions_that_went_on_alone_name_each_other_and_neither_leaves(
    patch: pytest.MonkeyPatch, more: int
) -> None:
    small = Small(patch, 3)
    small.go(4)
    pair = small.others()[:2]
    lists = {}
    for name in pair:
        lists[name] = roster(small, name)
        bodies = [MembershipBody(other, "former") for other in small.hosts if other != name]
        grown = [MembershipBody("later", "contributor")] * (more and name == pair[0])
        for index, body in enumerate((*bodies, *grown), start=1000):
            lists[name] = lists[name].changed(body, index)
    for name, peer in (pair, pair[::-1]):
        core = small.hosts[name].core
        # As at its start: the entries are in its log, and not known as committed.
        patch.setattr(core.ledger.disks, "roster", lists[name])
        shown = lists[peer]
        core.farewell.take(peer, RosterShown(shown.changes, shown.lines, b"forged"))
        assert not any("two runs" in note.text for note in core._effects.take() if isinstance(note, Note))
        signature = signature_of(shown.statement("simulated"))
        core.farewell.take(peer, RosterShown(shown.changes, shown.lines, signature))
        text = f"{name} and {peer} are of two runs with one name"
        assert any(text in note.text for note in core._effects.take() if isinstance(note, Note) and note.is_alarm)
        core.farewell.take(peer, RosterShown(shown.changes, shown.lines, signature))
        assert not any("two runs" in note.text for note in core._effects.take() if isinstance(note, Note)), "told once"
        assert core.farewell.reason == ""
        assert core.ledger.newer_roster.changes == 0, "it links with nobody by that list"
        assert core.ledger.contradictions[peer].startswith(text), "an alert, for as long as it is so"
        own = lists[name]
        core.farewell.take(peer, RosterShown(own.changes, own.lines, b"forged"))
        assert peer in core.ledger.contradictions
        core.farewell.take(peer, RosterShown(own.changes, own.lines, signature_of(own.statement("simulated"))))
        assert core.ledger.contradictions == {}, "it was emptied, and added here"


def test_a_leader_that_makes_up_a_change_of_the_members_is_refused_and_loses_its_place(
    patch: pytest.MonkeyPatch,
) -> None:
    small = Small(patch, 4)
    small.go(4)
    leader = small.leader()
    core, victim = small.hosts[leader].core, small.others()[0]
    made_up = MembershipBody(victim, "contributor", signature=b"s" * 71)
    change = EntryOrdered(made_up, is_cut_off=False, is_forced=True)
    fault = core.replacement.order_fault(change, now_ns=small.world.now_ns)
    assert "no authority of the run has signed it" in fault, "an operator without the key"
    patch.setattr(core.ledger._entry_gate, "_fault_after", lambda *_: "")  # the leader itself takes anything
    host = small.hosts[leader]
    patch.setattr(core.replacement, "order_fault", lambda *_, **__: "")
    followers = small.others()
    violations: list[str] = []
    patch.setattr(small.sim.checkers, "violate", violations.append)
    host.post(change)
    until_ns = small.world.now_ns + 6_000_000_000
    small.sim.run_until(lambda: small.world.now_ns > until_ns)
    assert any("no authority of the run has signed it" in text for text in violations)
    assert any(small.hosts[name].core.ledger.is_leader for name in followers), "they follow it no more"
    for name in followers:
        assert small.hosts[name].core.ledger.disks.roster.voters == small.sim.setup.founders


def test_a_removed_regions_contribution_that_is_merged_is_found() -> None:
    violations: list[str] = []
    check = MemberCheck(("a", "b", "c"), violations.append)
    round_ = committed_round(0, 1, [contribution("b")])
    check.committed(round_)
    assert violations == []
    check.committed(MembershipBody("b", "former"))
    check.committed(round_)
    assert violations == ["members: 0/1 is of ['b'], of whom the run has none"]
    check.committed(MembershipBody("b", "voter"))
    assert "gives a vote to who has not shown that it holds the state" in violations[1]


def test_a_voter_that_was_away_while_another_came_follows_it_as_its_leader(patch: pytest.MonkeyPatch) -> None:
    """The log there does not name the newcomer, and only the newcomer sends what does."""
    small = Small(patch, 5, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(4)
    late = small.others()[0]
    small.hosts[late].kill_daemon()
    small.go(1)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    small.go(4)
    assert order(small, joiner, "voter") == ""
    small.go(2)
    patch.setattr(LedgerState, "_successor", lambda *_: joiner)
    hosts = [small.hosts[name] for name in sorted(set(small.hosts) - {late, joiner})]
    for host in hosts:
        patch.setattr(host.core.ledger, "_is_draining", True)  # it stands no more
    for host in 10 * hosts:
        for effect in host.core.ledger.transfer_leadership("offers its place", now_ns=small.world.now_ns):
            host.effects.perform(effect)
        small.go(1)
        if small.hosts[joiner].core.ledger.is_leader:
            break
    small.hosts[late].start_daemon()
    small.go(4)
    assert small.leader() == joiner
    assert small.hosts[late].core.ledger.leader == joiner
    assert roster(small, late).voters == small.sim.setup.regions
