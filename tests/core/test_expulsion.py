"""An operator expels a region: it takes no part in anything, the others merge on; readmitted, it catches up."""

import pytest

from diloco_node.core.ledger.disks import expulsion_fault
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody, RevokedBody, RoundBody
from tests.kit.ledger_kit import disk_of
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


def order(small: Small, region: str, *, is_lifted: bool = False) -> str:
    """Give the order to the leader; why it can't be carried out."""
    host = small.hosts[small.leader()]
    expulsion = EntryOrdered(DiskNamedBody(region, b"" if is_lifted else EXPELLED), is_cut_off=not is_lifted)
    fault = host.core.replacement.order_fault(expulsion, now_ns=small.world.now_ns)
    host.post(expulsion)
    return fault


def members(small: Small, after: int) -> set[str]:
    """Learners in the rounds that were committed after so many entries."""
    rounds = [body for body in small.bodies()[after:] if isinstance(body, RoundBody)]
    assert rounds
    return {member.contribution.learner for body in rounds for member in body.members}


def test_an_expelled_region_is_in_no_round_and_a_readmitted_one_is_again(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    victim = small.others()[0]
    assert order(small, victim) == ""
    small.go(3)
    assert DiskNamedBody(victim, EXPELLED) in small.bodies()
    count = len(small.bodies())
    small.go(4)
    assert members(small, count) == set(small.hosts) - {victim}
    assert all(host.core.history.roster.expelled == {victim} for name, host in small.hosts.items() if name != victim)
    assert "is expelled already" in order(small, victim)
    assert small.view(small.leader()).leader != victim
    assert order(small, victim, is_lifted=True) == ""
    small.go(10)
    disk = small.hosts[victim].disk.id
    named = [body for body in small.bodies() if isinstance(body, DiskNamedBody)]
    assert named == [DiskNamedBody(victim, EXPELLED), DiskNamedBody(victim, b""), DiskNamedBody(victim, disk)]
    count = len(small.bodies())
    small.go(4)
    assert members(small, count) == set(small.hosts)
    assert "is not expelled" in order(small, victim, is_lifted=True)
    small.settle()


def test_nobody_is_expelled_without_whom_no_majority_is_left(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(8)
    first, second, third = small.others()
    assert order(small, first) == ""
    small.go(5)
    fault = order(small, second)
    assert fault.startswith(f"3 of 4 regions must vote; without {second} only 2 can: ")
    assert third in fault
    assert f"{small.leader()} leads: stop it first" in order(small, small.leader())
    small.go(5)
    assert [body.region for body in small.bodies() if isinstance(body, DiskNamedBody)] == [first]
    follower, expulsion = small.hosts[second].core, EntryOrdered(DiskNamedBody(third, EXPELLED), is_cut_off=True)
    fault = follower.replacement.order_fault(expulsion, now_ns=small.world.now_ns)
    assert fault.endswith(f"give the order to {small.leader()}")


def test_a_region_that_is_away_is_no_vote_that_is_left(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(8)
    first, second, _ = small.others()
    small.hosts[first].kill_daemon()
    small.go(5)
    assert f"without {second} only 2 can" in order(small, second), "else not even the order could be committed"


def test_the_arithmetic_counts_who_votes() -> None:
    disks = {"a": b"1", "b": b"2", "c": b"3", "d": b"", "e": EXPELLED}
    assert expulsion_fault(disks, "d") == ""
    assert expulsion_fault(disks, "c") == "3 of 5 regions must vote; without c only 2 can: a, b"
    assert expulsion_fault(disks, "d", alive={"a", "b"}) == "3 of 5 regions must vote; without d only 2 can: a, b"
    evicted = Roster.of_voters("abcd", {name: EVICTED if name == "d" else disk_of(name) for name in "abcd"})
    assert evicted.voters == ("a", "b", "c")
    assert expulsion_fault(evicted.disks_without("d"), "d") == ""
    # Of three voters two would do; expelled, d counts again, and is one of four.
    with_c_away = expulsion_fault(evicted.disks_without("d"), "d", alive={"a", "b"})
    assert with_c_away == "3 of 4 regions must vote; without d only 2 can: a, b"
    assert expulsion_fault({}, "d") == "1 of 0 regions must vote; without d only 0 can: "


def revoke(small: Small, region: str, certificate: bytes, *, is_cut_off: bool = False) -> str:
    """Give the order to the leader; why it can't be carried out."""
    host = small.hosts[small.leader()]
    order_ = EntryOrdered(RevokedBody(region, certificate), is_cut_off=is_cut_off)
    fault = host.core.replacement.order_fault(order_, now_ns=small.world.now_ns)
    host.post(order_)
    return fault


def test_a_revoked_certificate_is_known_everywhere_and_only_once(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(8)
    leader, (first, second, _) = small.leader(), small.others()
    assert revoke(small, first, b"1" * 32, is_cut_off=True) == ""
    assert "not committed yet: try again" in revoke(small, second, b"2" * 32)
    small.go(5)
    assert all(host.core.history.revocations == {b"1" * 32} for host in small.hosts.values())
    assert "is revoked already" in revoke(small, first, b"1" * 32)
    assert "leads with this certificate: give" in revoke(small, leader, b"3" * 32, is_cut_off=True)
    assert revoke(small, leader, b"3" * 32) == "", "an older one of the leader's own"
    small.go(5)
    assert sum(isinstance(body, RevokedBody) for body in small.bodies()) == 2
    follower = small.hosts[second].core
    order_ = EntryOrdered(RevokedBody(first, b"4" * 32), is_cut_off=False)
    fault = follower.replacement.order_fault(order_, now_ns=small.world.now_ns)
    assert fault.endswith(f"give the order to {leader}")
    small.settle()


def test_no_certificate_is_revoked_without_whose_region_no_majority_is_left(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(8)
    first, second, _ = small.others()
    assert order(small, first) == ""
    small.go(5)
    fault = revoke(small, second, b"2" * 32, is_cut_off=True)
    assert fault.startswith(f"3 of 4 regions must vote; without {second} only 2 can: ")
    assert fault.endswith(f"give {second} another one first, with diloco-node certs renew {second}")
    assert revoke(small, second, b"2" * 32) == "", "it has another one already"
