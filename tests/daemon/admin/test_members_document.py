"""daemon/admin/members_document.py: members as people see them, and an order of the admin port."""

from dataclasses import replace

import pytest

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody, Entry
from diloco_node.daemon.admin.members_document import MemberSigns, member_order, members_document
from diloco_node.errors import ConfigError


def test_each_member_has_a_row_and_the_run_says_what_it_bears() -> None:
    disks = DiskView("abc")
    assert members_document(disks, MemberSigns("a"))["tolerance"] == "the run has not begun"
    assert {row["state"] for row in members_document(disks, MemberSigns("a"))["rows"]} == {"there", "away"}
    founders = Roster.of_voters("abc", {"a": b"a" * 16, "b": b"b" * 16}, since=2)
    disks.begin(founders.changed(MembershipBody("d", "contributor", "d:1"), 7), 7)
    document = members_document(disks, MemberSigns("a", frozenset("b"), since_unix={"d": 5.0}))
    seen = members_document(disks, MemberSigns("d", frozenset("a"), reported=frozenset("ab")))
    assert seen["rows"][1]["state"] == "there, but not heard by d"
    assert seen["tolerance"].startswith("3 voters, 2 must be there; no vote comes from c: the next failure")
    over = members_document(disks, MemberSigns("a", is_over=True))["tolerance"]
    assert over == "the run is finished: nothing is merged any more"
    assert document["changes"] == 1
    assert document["tolerance"] == (
        "3 voters, 2 must be there; no vote comes from c: the next failure stops merging; training goes on in each "
        "region"
    )
    keys = ("region", "kind", "since", "since_unix", "address", "has_folder", "is_there", "state")
    waits = "away, waits for a link with its certificate"
    assert [tuple(row[key] for key in keys) for row in document["rows"]] == [
        ("a", "voter", 2, None, "", True, True, "there"),
        ("b", "voter", 2, None, "", True, True, "there"),
        ("c", "voter", 2, None, "", False, False, waits),
        ("d", "contributor", 7, 5.0, "d:1", False, False, waits),
    ]


JOINS = MemberSigns("a")
JOINED = MembershipBody("d", "contributor", "d:1")


@pytest.mark.parametrize(
    ("signs", "disk", "state"),
    [
        (JOINS, b"", "away, waits for a link with its certificate"),
        (replace(JOINS, linked=frozenset("d")), b"", "its certificate is good, waits for its first heartbeat"),
        (replace(JOINS, heard=frozenset("d")), b"", "there, waits until its disk holds what is committed"),
        (MemberSigns("d", held_bytes=1_500_000, state_bytes=8_000_000), b"", "fetches the model: 1.5 of 8.0 MB"),
        (
            MemberSigns("d", state_bytes=8_000_000, catch_up="9 rounds behind"),
            b"",
            "fetches the model: 0.0 of 8.0 MB; 9 rounds behind",
        ),
        (
            MemberSigns("d", held_bytes=8, state_bytes=8, catch_up="9 rounds behind"),
            b"",
            "there, waits until its disk holds what is committed; 9 rounds behind",
        ),
        (replace(JOINS, catch_up="9 rounds behind"), b"", "away, waits for a link with its certificate"),
        (MemberSigns("d", held_bytes=8, state_bytes=8), b"", "there, waits until its disk holds what is committed"),
        (replace(JOINS, heard=frozenset("d")), b"d" * 16, "there, ready for a vote"),
        (JOINS, b"d" * 16, "away"),
        (JOINS, EXPELLED, "expelled, until `diloco-node quarantine lift`"),
        (JOINS, EVICTED, "away too long: it has no vote until it is back"),
        (replace(JOINS, heard=frozenset("d")), EVICTED, "there, waits until its disk holds what is committed"),
    ],
)
def test_a_joiner_says_what_it_waits_for(signs: MemberSigns, disk: bytes, state: str) -> None:
    roster = Roster.of_voters("abc", dict.fromkeys("abc", b"a" * 16), since=2).changed(JOINED, 7)
    disks = DiskView("abc", roster.after(Entry(8, 1, b"", DiskNamedBody("d", disk), b"")))
    assert members_document(disks, signs)["rows"][3]["state"] == state


def test_a_voter_that_was_away_too_long_is_none_that_counts() -> None:
    roster = Roster.of_voters("abcd", dict.fromkeys("abcd", b"a" * 16), since=2)
    disks = DiskView("abcd", roster.after(Entry(8, 1, b"", DiskNamedBody("d", EVICTED), b"")))
    rows = members_document(disks, JOINS)["rows"]
    assert [(row["kind"], row["counts"]) for row in rows] == [("voter", True)] * 3 + [("voter", False)]


def test_a_member_that_shards_of_the_data_wait_for_says_so() -> None:
    roster = Roster.of_voters("abc", dict.fromkeys("abc", b"a" * 16), since=2)
    rows = members_document(DiskView("abc", roster), MemberSigns("a", shards={"c": 170}))["rows"]
    assert rows[1]["state"] == "away"
    assert rows[2]["state"] == "away; 170 shards wait for c, until it has heard of the change that took them"


@pytest.mark.parametrize(
    ("fault", "disk", "state"),
    [
        ("", b"w" * 16, "there"),
        ("nobody answers", b"w" * 16, "away: nobody answers"),
        ("", b"", "there; no vote until both regions have its object in their log"),
    ],
)
def test_a_witness_says_whether_its_bucket_answers(fault: str, disk: bytes, state: str) -> None:
    roster = Roster.of_voters("ab", dict.fromkeys("ab", b"a" * 16), since=2)
    roster = roster.changed(MembershipBody("w", "witness", "s3://sites/run"), 7)
    disks = DiskView("ab", roster.after(Entry(8, 1, b"", DiskNamedBody("w", disk), b"")))
    document = members_document(disks, MemberSigns("a", frozenset("bw"), witness_fault=fault))
    assert document["rows"][2]["state"] == state
    assert document["tolerance"].startswith("3 voters, 2 must be there")


def test_a_former_member_waits_for_nothing() -> None:
    roster = Roster.of_voters("abc", since=2).changed(MembershipBody("c", "former"), 7)
    assert members_document(DiskView("abc", roster), MemberSigns("a"))["rows"][2]["state"] == "removed"


def test_one_member_may_have_no_address() -> None:
    addition = {"region": "ap", "kind": "contributor", "address": "", "changes": 1, "signature": "0a"}
    order = member_order(addition, ROSTER, {"eu": "eu.example:7400", "us": "us.example:7400"})
    assert order.body == MembershipBody("ap", "contributor", "", b"\x0a")
    demotion = member_order({**addition, "region": "us", "address": None}, ROSTER)
    assert demotion.body == MembershipBody("us", "contributor", "", b"\x0a")


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
        ({"address": ""}, "nobody can dial eu, so ap must be dialable: give --address"),
        ({"region": "us", "address": ""}, "us is a voter already"),
        ({"address": 7400}, 'the address 7400: it must be "HOST:PORT"'),
        ({"changes": 2}, "the members were changed meanwhile"),
    ],
)
def test_an_addition_that_can_not_be_is_refused(change: dict[str, object], fault: str) -> None:
    addition = {"region": "ap", "kind": "contributor", "address": "ap.example:7400", "changes": 1, "signature": "0a"}
    with pytest.raises(ConfigError, match=fault):
        member_order({**addition, **change}, ROSTER, {"us": "us.example:7400"})
