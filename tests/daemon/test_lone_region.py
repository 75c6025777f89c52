"""A region that goes on alone: the entries that it writes, and the folders with which it can't."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_node.core.ledger.election import TERMS_AHEAD
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.witness import WitnessRecord
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import (
    DiskNamedBody,
    Entry,
    EntryBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    SnapshotBody,
)
from diloco_node.daemon.lone_region import WitnessBucket, go_on_alone, look_alone
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.errors import ConfigError, StorageError, StoreRefused
from diloco_node.storage.store import RegionStore
from diloco_node.storage.swapped_object import FOLDER
from tests.kit.ledger_kit import a_round, disk_of
from tests.kit.node_kit import MANIFEST

REGIONS = ("a", "b", "c")
FRAGMENTS = len(MANIFEST.fragments)
TERM = 7
W = disk_of("w")


def begin(folder: Path, bodies: Sequence[EntryBody] = (), *, is_own: bool = True, has_states: bool = True) -> None:
    """Leave the folder of region b with a ledger of these entries; `is_own`: which names this folder. `has_states`:
    parameters to begin with are there."""
    folder.mkdir()
    save_manifest(folder, MANIFEST)
    with closing(RegionStore(folder)) as store:
        own_disk = store.load(FRAGMENTS).disk
        for fragment in range(FRAGMENTS) if has_states else ():
            theta = np.zeros(MANIFEST.fragments[fragment].size, np.float32)
            store.store_state(fragment, 0, theta, theta, bytes(32))
        disks = tuple(own_disk if name == "b" and is_own else disk_of(name) for name in REGIONS)
        genesis = GenesisBody("run", MANIFEST.digest, "settings", REGIONS, (bytes(32),) * FRAGMENTS, disks)
        entries = list[Entry]()
        for index, body in enumerate((LeaderBody("a"), genesis, *bodies), start=1):
            entries.append(seal(index, TERM, entries[-1].hash if entries else ZERO_HASH, body))
        store.persist(TERM, "", 0, entries)


def sign(statement: bytes) -> bytes:
    return b"signed " + statement


def test_its_entries_remove_the_others_each_by_a_signature_of_its_own(tmp_path: Path) -> None:
    begin(tmp_path / "b", [MembershipBody("d", "contributor", "d:1", b"of before")])
    seen = look_alone(tmp_path / "b", "b")
    facts = go_on_alone(tmp_path / "b", "b", "run", sign)
    assert facts == seen
    assert (facts.voters, facts.leavers, facts.index) == (REGIONS, ("a", "c", "d"), 3)
    assert facts.addresses == {"a": "", "b": "", "c": "", "d": "d:1"}
    with closing(RegionStore(tmp_path / "b")) as store:
        recovered = store.load(FRAGMENTS)
    assert not store.lost
    assert recovered.term == TERM + TERMS_AHEAD
    assert recovered.voted_for == "b"
    roster = Roster()
    for entry in recovered.entries:
        before, roster = roster, roster.after(entry)
        if entry.index > facts.index:
            assert isinstance(entry.body, MembershipBody)
            assert entry.term == recovered.term
            assert before.change_fault(entry.body) == ""
            assert roster.signature == sign(roster.statement("run"))
    assert (roster.names, roster.voters, roster.changes) == (("b",), ("b",), 4)
    assert roster.disks == {"b": recovered.disk}


URL = "s3://sites/run"


class Bucket(WitnessBucket):
    """A bucket that holds this record, and the payloads of these entries."""

    def __init__(
        self, record: WitnessRecord | None = None, entries: Sequence[Entry] = (), before: WitnessRecord | None = None
    ) -> None:
        self.before = before
        self.record, self.keys = record, frozenset(f"{FOLDER}/{entry.hash.hex()}" for entry in entries)
        self.closed = 0

    def ask(self, url: str) -> "Bucket":
        assert url == URL
        return self

    def close(self, run_id: str) -> None:
        self.closed += run_id == "run"


def begin_two_sites(folder: Path) -> tuple[Entry, ...]:
    """Leave the folder of region b, beside a witness with a vote, with 5 entries; return them and five more."""
    changes = [MembershipBody("c", "former", "", b"of before"), MembershipBody("witness", "witness", URL, b"of before")]
    begin(folder, [*changes, DiskNamedBody("witness", W)])
    with closing(RegionStore(folder)) as store:
        entries = list(store.load(FRAGMENTS).entries)
    for version in range(1, 6):
        entries.append(seal(5 + version, TERM + 1, entries[-1].hash, a_round(version)))
    return tuple(entries)


def record_of(log: Sequence[Entry], base: int) -> WitnessRecord:
    """The record of a witness whose tail begins after an entry."""
    last = log[base - 1]
    tail = tuple(log[base:])
    return WitnessRecord("run", W, 7, TERM + 1, base=LedgerBase(base, last.term, last.hash, b""), entries=tail)


@pytest.mark.parametrize("is_unnamed", [False, True])
def test_beside_a_witness_that_is_gone_it_goes_on_and_removes_that_before_the_votes(
    tmp_path: Path, *, is_unnamed: bool
) -> None:
    log = begin_two_sites(tmp_path / "b")
    bucket = Bucket(replace(record_of(log, 5), disk=disk_of("v")) if is_unnamed else None)
    facts = go_on_alone(tmp_path / "b", "b", "run", sign, bucket.ask)
    assert (facts.leavers, facts.loss, bucket.closed) == (("a", "witness"), "", 1)
    with closing(RegionStore(tmp_path / "b")) as store:
        bodies = [entry.body for entry in store.load(FRAGMENTS).entries][-2:]
    assert [getattr(body, "region", "") for body in bodies] == ["witness", "a"]


def test_what_the_witness_has_acknowledged_is_not_thrown_away_where_it_can_be_had(tmp_path: Path) -> None:
    log = begin_two_sites(tmp_path / "b")
    for bucket, words in (
        (Bucket(record_of(log, 5), log[5:]), "it is 2 of the 3 voters, so it goes on, and takes 5 entries .* entry 10"),
        (Bucket(record_of(log[:5], 4)), "it is 2 of the 3 voters, so it goes on$"),
        (Bucket(record_of(log[:3], 2)), "it is 2 of the 3 voters, so it goes on$"),
    ):
        with pytest.raises(ConfigError, match=f"start b: with witness at {URL} {words}"):
            go_on_alone(tmp_path / "b", "b", "run", sign, bucket.ask)
        assert bucket.closed == 0


def test_what_the_witness_holds_and_nobody_can_have_is_named_before_it_is_lost(tmp_path: Path) -> None:
    log = begin_two_sites(tmp_path / "b")
    for bucket, words in (
        (Bucket(record_of(log, 5), log[7:]), "entries up to 10, and lacks 2 of their payloads"),
        (
            Bucket(record_of(log, 8), log[5:]),
            "entries up to 10, 2 rounds among them, and shows those after entry 8 only",
        ),
    ):
        loss = f"witness has acknowledged {words}"
        assert look_alone(tmp_path / "b", "b", bucket.ask).loss == loss
    assert bucket.closed == 0
    assert go_on_alone(tmp_path / "b", "b", "run", sign, bucket.ask).loss == loss
    assert bucket.closed == 1, "the other site can't go on with it"


def test_what_an_earlier_try_lost_is_named_again(tmp_path: Path) -> None:
    log = begin_two_sites(tmp_path / "b")
    empty = WitnessRecord("run", disk_of("v"), 1)
    for before, entries, words in (
        (record_of(log, 5), log[7:], "has acknowledged entries up to 10, and lacks 2 of their payloads"),
        (record_of(log, 5), log, "had acknowledged entries up to 10 before an earlier try closed it"),
        (record_of(log[:5], 5), (), ""),
        (replace(record_of(log, 5), disk=disk_of("u")), log, ""),
    ):
        bucket = Bucket(empty, entries, before)
        assert look_alone(tmp_path / "b", "b", bucket.ask).loss == (words and f"witness {words}")
    assert go_on_alone(tmp_path / "b", "b", "run", sign, bucket.ask).loss == ""
    assert bucket.closed == 1


def test_a_witness_that_can_not_be_read_or_closed_stops_it(tmp_path: Path) -> None:
    log = begin_two_sites(tmp_path / "b")
    before = (tmp_path / "b" / "ledger.log").read_bytes()

    def refuse(_: str) -> WitnessBucket:
        raise StoreRefused("nobody answers")

    class Written(Bucket):
        def close(self, run_id: str) -> None:
            raise StoreRefused("has just been written")

    for ask in (refuse, Written(record_of(log, 8)).ask):
        with pytest.raises(StoreRefused):
            go_on_alone(tmp_path / "b", "b", "run", sign, ask)
        assert (tmp_path / "b" / "ledger.log").read_bytes() == before


def test_a_voter_without_a_folder_is_removed_first(tmp_path: Path) -> None:
    begin(tmp_path / "b", [DiskNamedBody("c", b"")])
    go_on_alone(tmp_path / "b", "b", "run", sign)
    with closing(RegionStore(tmp_path / "b")) as store:
        entries = store.load(FRAGMENTS).entries
    assert [entry.body.region for entry in entries if isinstance(entry.body, MembershipBody)] == ["c", "a"]


@pytest.mark.parametrize(
    ("bodies", "is_own", "words"),
    [
        ([MembershipBody("b", "contributor")], True, "b has no vote, so it may lack .* go on with one of a, c"),
        ([MembershipBody("b", "former")], True, "b has no vote"),
        ([], False, "names another folder of b than"),
        ([DiskNamedBody("b", b"another".ljust(16))], True, "names another folder of b than"),
        ([MembershipBody("a", "former"), MembershipBody("c", "former")], True, "b is the only member already"),
        (
            [FinishedBody((0,) * FRAGMENTS, "asked")],
            True,
            r"start the region and 1 of the other voters\. Or .* new run from its end, with run\.init = .*/b@N$",
        ),
        ([a_round(1)], True, "lacks the payload of version 1 of fragment 0, and nobody is left to fetch it from"),
    ],
)  # fmt: skip
def test_a_folder_with_which_it_can_not_is_left_as_it_is(
    tmp_path: Path, bodies: list[EntryBody], is_own: bool, words: str
) -> None:
    begin(tmp_path / "b", bodies, is_own=is_own)
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=words):
        go_on_alone(tmp_path / "b", "b", "run", sign)
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir() if path.is_file()} == before


def test_a_folder_without_the_parameters_or_with_others_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "empty", has_states=False)
    with pytest.raises(ConfigError, match="lacks the state of fragment 0 at version 0 or later, and nobody is left"):
        go_on_alone(tmp_path / "empty", "b", "run", sign)
    begin(tmp_path / "other", [SnapshotBody(1, 0, b"1" * 32)])
    with pytest.raises(ConfigError, match="fragment 1: at version 0 the ledger names other bytes"):
        go_on_alone(tmp_path / "other", "b", "run", sign)


def test_a_folder_before_the_run_in_use_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run has not begun there"):
        go_on_alone(tmp_path / "none", "b", "run", sign)
    begin(tmp_path / "b")
    with closing(RegionStore(tmp_path / "b")), pytest.raises(StorageError, match="in use by another daemon"):
        go_on_alone(tmp_path / "b", "b", "run", sign)
    ledger = tmp_path / "b" / "ledger.log"
    damaged = ledger.read_bytes()[:-1] + b"?"
    ledger.write_bytes(damaged)
    with pytest.raises(StorageError):
        go_on_alone(tmp_path / "b", "b", "run", sign)
    assert ledger.read_bytes() == damaged, "it was not set aside"
