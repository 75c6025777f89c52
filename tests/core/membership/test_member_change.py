"""core/membership/member_change.py: what a change of the members would leave, in numbers."""

import pytest

from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MemberKind, Membership, MembershipBody
from diloco_node.core.membership.member_change import order_fault, tolerance
from tests.kit.ledger_kit import disk_of


def roster(voters: str, contributors: str = "") -> Roster:
    kinds = {**dict.fromkeys(voters, MemberKind.VOTER), **dict.fromkeys(contributors, MemberKind.CONTRIBUTOR)}
    return Roster(Membership(name, kind.value, disk_of(name)) for name, kind in kinds.items())


@pytest.mark.parametrize(
    ("voters", "change", "alive", "fault"),
    [
        ("abc", "b former", "bc", "3 voters, all are there: removing b leaves 2, and the next failure stops merging"),
        ("abc", "b contributor", "bc", "3 voters, all are there: taking the vote of b leaves 2, and the next"),
        ("abcd", "b former", "bc", "4 voters, of which d silent: removing b leaves 3, and the next failure"),
        ("abc", "c former", "b", ""),
        ("abc", "b former", "b", "it makes 2 voters, of which 2 must be there, and only a would be"),
        ("abcde", "b former", "bcde", ""),
        ("abcde", "b former", "bcd", "5 voters, of which e silent: removing b leaves 4, and the next failure"),
        ("abcdef", "b former", "bcd", "6 voters, of which e, f silent: removing b leaves 5, and the next failure"),
        ("abc", "a former", "bc", "a leads: asked itself, it hands over; give the order to the region that leads then"),
        ("abc", "x voter", "bcx", ""),
        ("abc", "x voter", "b", "it makes 4 voters, of which 3 must be there, and only a, b would be"),
        ("ab", "x voter", "", "it makes 3 voters, of which 2 must be there, and only a would be"),
        ("abc", "x former", "", ""),
        ("abc", "z contributor", "", ""),
        ("abc", "z former", "bc", "z is no member of the run"),
    ],
)
def test_the_arithmetic_of_a_change(voters: str, change: str, alive: str, fault: str) -> None:
    """The leader is a; x is a contributor, z is no member."""
    region, kind = change.split()
    order = MembershipBody(region, kind)
    reason = order_fault(order, roster(voters, "x"), leader="a", alive=alive)
    assert reason.startswith(fault) if fault else reason == ""
    if "--force" in reason:
        assert order_fault(order, roster(voters, "x"), leader="a", alive=alive, is_forced=True) == ""


@pytest.mark.parametrize(
    ("voters", "there", "says"),
    [
        ("abc", "abc", "3 voters, 2 must be there: merging goes on with 1 of them away"),
        ("abcde", "abcd", "5 voters, 3 must be there; no vote comes from e: merging goes on with 1 more of them away"),
        ("abc", "ab", "3 voters, 2 must be there; no vote comes from c: the next failure stops merging"),
        ("abcd", "ab", "4 voters, 3 must be there; no vote comes from c, d: merging waits for 1 of them"),
    ],
)
def test_the_tolerance_is_told_in_numbers(voters: str, there: str, says: str) -> None:
    assert tolerance(roster(voters), there) == says
