"""daemon/admin/members_document.py: members as people see them, and an order of the admin port."""

import pytest

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.daemon.admin.members_document import member_order, members_document
from diloco_node.errors import ConfigError


def test_each_member_has_a_row_and_the_run_says_what_it_bears() -> None:
    disks = DiskView("abc")
    assert members_document(disks, frozenset("abc"))["tolerance"] == "the run has not begun"
    founders = Roster.of_voters("abc", {"a": b"a" * 16, "b": b"b" * 16}, since=2)
    disks.begin(founders.changed(MembershipBody("d", "contributor", "d:1"), 7), 7)
    document = members_document(disks, frozenset("ab"))
    assert document["changes"] == 1
    assert document["tolerance"] == "3 voters, 2 must be there; no vote comes from c: the next failure stops merging"
    keys = ("region", "kind", "since", "address", "has_folder", "is_there")
    assert [tuple(row[key] for key in keys) for row in document["rows"]] == [
        ("a", "voter", 2, "", True, True),
        ("b", "voter", 2, "", True, True),
        ("c", "voter", 2, "", False, False),
        ("d", "contributor", 7, "d:1", False, False),
    ]


ROSTER = Roster.of_voters(("eu", "us"))


def test_an_order_is_taken_from_a_request() -> None:
    document = {"region": "us", "kind": "former", "signature": "0aff", "force": True}
    body = MembershipBody("us", "former", signature=b"\x0a\xff")
    assert member_order(document, ROSTER) == EntryOrdered(body, is_cut_off=True, is_forced=True)
    assert not member_order({**document, "force": 1, "kind": "voter"}, ROSTER).is_forced


@pytest.mark.parametrize(
    "change",
    [{"region": None}, {"region": "US east"}, {"kind": "king"}, {"kind": 7}, {"signature": "xy"}, {"signature": None}],
)
def test_a_request_that_is_no_order_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"the body must name|hexadecimal"):
        member_order({"region": "us", "kind": "former", "signature": "00", **change}, ROSTER)


def test_a_member_is_added_at_an_address_of_its_own() -> None:
    addition = {"region": "ap", "kind": "contributor", "address": "ap.example:7400", "changes": 1, "signature": "0a"}
    order = member_order(addition, ROSTER, {"us": "us.example:7400"})
    assert order.body == MembershipBody("ap", "contributor", "ap.example:7400", b"\x0a")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"region": "eu"}, "eu is a voter already, at an address that is not known here: to move it, remove it first"),
        ({"region": "us"}, "us is a voter already, at us.example:7400"),
        ({"address": "us.example:7400"}, "us.example:7400 is the address of us: give that of ap"),
        ({"address": "ap"}, 'the address .ap.: it must be "HOST:PORT"'),
        ({"address": 7400}, 'the address 7400: it must be "HOST:PORT"'),
        ({"changes": 2}, "the members were changed meanwhile"),
    ],
)
def test_an_addition_that_can_not_be_is_refused(change: dict[str, object], fault: str) -> None:
    addition = {"region": "ap", "kind": "contributor", "address": "ap.example:7400", "changes": 1, "signature": "0a"}
    with pytest.raises(ConfigError, match=fault):
        member_order({**addition, **change}, ROSTER, {"us": "us.example:7400"})
