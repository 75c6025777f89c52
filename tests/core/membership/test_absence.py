"""A voter that is away for long loses its vote, and gets it back as a new folder is named; nobody takes it at will."""

import pytest

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.membership import absence
from diloco_node.core.membership.absence import EVICT_AFTER_NS, Absence
from diloco_node.core.membership.member_change import tolerance
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody
from diloco_node.numeric import NS_PER_S
from tests.core.test_lies import is_liar
from tests.kit.ledger_kit import disk_of
from tests.kit.small_world import Small

pytestmark = pytest.mark.world

NAMES = ("a", "b", "c", "d", "e")


class Hearing:
    """Region a, which hears these, and by whose word others hear those."""

    def __init__(self, alive: str = "bcde", elsewhere: str = "") -> None:
        self.alive, self.elsewhere, self.others = alive, elsewhere, NAMES[1:]

    def is_alive(self, region: str, *, now_ns: int) -> bool:
        return region in self.alive

    def hears(self, listener: str, speaker: str, *, now_ns: int) -> bool:
        return speaker in self.elsewhere


def watched(seconds: int, hearing: Hearing, record: Absence | None = None, *, since: int = 0) -> Absence:
    record = record or Absence("a")
    for second in range(since, since + seconds + 1):
        record.watch(hearing, now_ns=second * NS_PER_S)
    return record


def after(*bodies: DiskNamedBody | MembershipBody, names: tuple[str, ...] = NAMES) -> Roster:
    roster = Roster.of_voters(names, {name: disk_of(name) for name in names})
    for index, body in enumerate(bodies, 1):
        roster = roster.after(seal(index, 1, ZERO_HASH, body))
    return roster


def test_only_who_is_heard_nowhere_for_long_is_to_lose_its_vote() -> None:
    hearing = Hearing("bc", elsewhere="d")
    record = watched(1799, hearing)
    assert record.longest(NAMES, now_ns=1799 * NS_PER_S) == ""
    watched(1, hearing, record, since=1799)
    assert record.longest(NAMES, now_ns=1800 * NS_PER_S) == "e", "d is heard by another"
    assert record.longest("abcd", now_ns=1800 * NS_PER_S) == ""
    watched(1, Hearing("bce", elsewhere="d"), record, since=1801)
    assert record.longest(NAMES, now_ns=3000 * NS_PER_S) == ""


def test_a_process_that_stood_still_has_missed_nobody() -> None:
    record = watched(5, Hearing("b"))
    record.watch(Hearing("b"), now_ns=EVICT_AFTER_NS)
    assert record.longest(NAMES, now_ns=EVICT_AFTER_NS) == ""


def test_who_heard_a_region_of_late_does_not_acknowledge_that_it_was_away() -> None:
    record, body = watched(3, Hearing()), DiskNamedBody("e", EVICTED)
    watched(900, Hearing("bcd"), record, since=3)
    assert record.doubt(body, now_ns=902 * NS_PER_S) == "e was heard here 899 s ago"
    assert record.doubt(body, now_ns=903 * NS_PER_S) == ""
    assert record.doubt(DiskNamedBody("e", b""), now_ns=0) == record.doubt(DiskNamedBody("e", EXPELLED), now_ns=0) == ""
    assert Absence("a").doubt(body, now_ns=0) == "", "who has just started has heard nobody"
    assert Absence("e").doubt(body, now_ns=0) == "e is here itself"


def test_a_leader_that_did_not_hear_of_a_return_yet_is_not_refused() -> None:
    half, quarter, body = 900, 450, DiskNamedBody("e", EVICTED)
    record = watched(3, Hearing("bcde"))
    watched(half, Hearing("bcd"), record, since=3)
    watched(half + quarter, Hearing("bcde"), record, since=half + 3)
    back = half + 3
    assert record.doubt(body, now_ns=(back + quarter) * NS_PER_S - 1) == ""
    assert record.doubt(body, now_ns=(back + quarter) * NS_PER_S)
    assert record.doubt(DiskNamedBody("b", EVICTED), now_ns=back * NS_PER_S), "it was never away"
    ends_ns = back * NS_PER_S + EVICT_AFTER_NS
    assert [record.has_missed("e", now_ns=ends_ns - 1), record.has_missed("e", now_ns=ends_ns)] == [True, False]
    assert not record.has_missed("b", now_ns=EVICT_AFTER_NS)
    assert record.has_missed("b", now_ns=EVICT_AFTER_NS - 1), "it may have been away before this process began"


def test_a_region_that_was_away_since_this_process_began_has_returned_once_it_is_heard() -> None:
    half, body = 900, DiskNamedBody("e", EVICTED)
    late, early = watched(half, Hearing("bcd")), watched(half - 1, Hearing("bcd"))
    watched(1, Hearing(), late, since=half)
    watched(1, Hearing(), early, since=half - 1)
    assert late.doubt(body, now_ns=(half + 1) * NS_PER_S) == ""
    assert early.doubt(body, now_ns=half * NS_PER_S) == "e was heard here 0 s ago"


def test_a_leader_takes_no_vote_of_who_came_back_since_its_last_heartbeat_to_all(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(6)
    core, victim, now_ns = small.hosts[small.leader()].core, small.others()[0], small.world.now_ns
    record = core.liveness.absence
    record._present_ns[victim] = record._heard_ns[victim] = now_ns - EVICT_AFTER_NS
    assert record.longest([victim], now_ns=now_ns) == victim
    assert core.replacement.propose(now_ns=now_ns) == []
    small.go(2)
    assert not [body for body in small.bodies() if isinstance(body, DiskNamedBody)]


def test_an_evicted_voter_counts_for_no_majority_and_three_are_left() -> None:
    roster = after(DiskNamedBody("e", EVICTED))
    assert (roster.voters, roster.kind_of("e"), roster.names) == (NAMES[:4], "voter", NAMES)
    assert roster.is_majority("abc")
    assert not roster.is_majority("abe")
    assert roster.eviction_fault("e") == "e has no vote that could be taken"
    expelled = after(DiskNamedBody("e", EXPELLED))
    assert expelled.eviction_fault("e") == "e has no vote that could be taken", "it would be readmitted by the way"
    assert roster.eviction_fault("d") == ""
    last = after(DiskNamedBody("e", EVICTED), DiskNamedBody("d", EVICTED))
    assert last.eviction_fault("c") == "2 voters would be left without c, and 3 must be"
    assert after(DiskNamedBody("d", b""), DiskNamedBody("c", b"")).eviction_fault("e") == (
        "without e 3 of 4 voters must vote, and only 2 can: a, b"
    )
    assert (
        tolerance(roster, NAMES)
        == "4 voters, 3 must be there: merging goes on with 1 of them away; e was away too long"
    )
    assert after(DiskNamedBody("e", EVICTED), DiskNamedBody("e", disk_of("e"))).voters == NAMES


def test_what_the_authority_signed_stays_as_it_is() -> None:
    assert after(DiskNamedBody("e", EVICTED)).statement("run") == after().statement("run")


def test_a_contributor_that_was_evicted_gets_no_vote_before_its_folder_is_named() -> None:
    roster = after(DiskNamedBody("e", EVICTED), MembershipBody("e", "contributor"))
    assert "does not hold yet what is committed" in roster.change_fault(MembershipBody("e", "voter"))


def test_of_five_voters_one_that_is_away_loses_its_vote_and_gets_it_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(absence, "EVICT_AFTER_NS", 4 * NS_PER_S)
    small = Small(patch, 5)
    small.go(6)
    gone = small.others()[0]
    small.hosts[gone].kill_daemon()
    small.go(10)
    roster = small.hosts[small.leader()].core.history.roster
    assert (len(roster.voters), gone in roster.voters, gone in roster.names) == (4, False, True)
    small.hosts[gone].start_daemon()
    small.go(10)
    disk = small.hosts[gone].disk.id
    named = [body for body in small.bodies() if isinstance(body, DiskNamedBody)]
    assert named == [DiskNamedBody(gone, EVICTED), DiskNamedBody(gone, disk)]
    assert all(host.core.history.roster.voters == small.sim.setup.founders for host in small.hosts.values())
    small.settle()


def test_an_eviction_of_who_is_there_is_refused_by_those_who_hear_it(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(6)
    leader, victim = small.leader(), small.others()[0]
    is_liar(small, leader)
    core = small.hosts[leader].core
    patch.setattr(core.liveness.absence, "longest", lambda names, *, now_ns: victim)
    patch.setattr(core.liveness.absence, "doubt", lambda body, *, now_ns: "")
    small.go(6)
    assert not [body for body in small.bodies() if isinstance(body, DiskNamedBody)]
    reasons = [small.hosts[name].core.ledger.wrong_leaders.get(leader, "") for name in small.others()]
    assert any(f"{victim} was heard here" in reason for reason in reasons), reasons
