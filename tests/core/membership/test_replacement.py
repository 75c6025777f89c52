"""How the ledger gets to name the folder that a region came back with: in two steps, one after the other."""

from typing import cast

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.folder_lives import FolderLives
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.membership.replacement import REST_HEARTBEATS, DiskReplacement
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import DiskNamedBody, RunSettings
from tests.kit.ledger_network import NO_ROUNDS
from tests.kit.rounds_kit import context_of

HEARTBEAT_NS = 10

OLD, NEW = b"o" * 16, b"n" * 16


class Leads:
    """A leader's ledger as the replacement asks it, set by hand: region b answers from another folder."""

    def __init__(self) -> None:
        self.disks = DiskView("abc", Roster.of_voters("abc", {"a": b"a" * 16, "b": OLD, "c": b"c" * 16}))
        self.folders = FolderLives(self.disks)
        self.is_settled = True
        self.cluster_commit_index = 9
        self.reported_disks = {"b": NEW, "c": b"c" * 16}
        self.durable_indexes = {"a": 9, "b": 0, "c": 9}
        self.replacement = DiskReplacement(
            context_of(RoundHistory(1), settings=RunSettings(heartbeat_ns=HEARTBEAT_NS)),
            cast(LedgerCore, self),
            NO_ROUNDS,
            lambda _: "",
        )

    def append(self, body: DiskNamedBody) -> None:
        self.disks.follow([seal(self.cluster_commit_index + 1, 1, ZERO_HASH, body)])

    def due(self, now_ns: int = 0) -> DiskNamedBody | None:
        return self.replacement.due(now_ns=now_ns)


def test_a_lost_folder_is_taken_away_before_its_successor_is_named() -> None:
    """In one step two majorities could meet in no folder that has lost nothing."""
    leads = Leads()
    leads.durable_indexes["b"] = 9
    assert leads.due() == DiskNamedBody("b", b"")
    leads.append(DiskNamedBody("b", b""))
    leads.durable_indexes["b"] = 10
    assert leads.due() is None, "the first step is not committed yet"
    leads.cluster_commit_index = 10
    assert leads.due() == DiskNamedBody("b", NEW)


def test_a_new_folder_is_named_when_it_holds_what_was_committed_a_heartbeat_ago() -> None:
    leads = Leads()
    leads.append(DiskNamedBody("b", b""))
    leads.cluster_commit_index = 20
    leads.due()
    leads.cluster_commit_index = 25
    for index in (0, 10, 19):
        leads.durable_indexes["b"] = index
        leads.replacement.commit_index_before = 20
        assert leads.due() is None, index
    leads.durable_indexes["b"] = 20
    leads.replacement.commit_index_before = 20
    assert leads.due() == DiskNamedBody("b", NEW)


def test_nothing_is_due_of_a_leader_that_is_not_settled_or_of_a_run_that_is_not_founded() -> None:
    leads = Leads()
    leads.is_settled = False
    assert leads.due() is None
    leads.is_settled = True
    leads.disks = DiskView("abc")
    assert leads.due() is None


def test_the_next_change_of_a_region_rests() -> None:
    leads = Leads()
    leads.append(DiskNamedBody("b", b""))
    leads.cluster_commit_index = leads.durable_indexes["b"] = 10
    assert leads.due(0) == DiskNamedBody("b", NEW)
    leads.append(DiskNamedBody("b", NEW))
    leads.cluster_commit_index = 11
    leads.reported_disks["b"] = b"x" * 16
    rest_ns = REST_HEARTBEATS * HEARTBEAT_NS
    assert leads.due(rest_ns - 1) is None
    assert leads.due(rest_ns) == DiskNamedBody("b", b"")
