"""`ledger` prints what is in a region's ledger, once or while its daemon writes it."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import (
    Ballot,
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    Member,
    RevokedBody,
    RoundBody,
    SnapshotBody,
    Stripe,
    SummaryBody,
)
from diloco_node.main import main
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage.store import RegionStore

CONTRIBUTION = Contribution("us-east", 1, 0, 3, 2, 10, 20, 4000, (1.0,))
BODIES: tuple[EntryBody, ...] = (
    GenesisBody("my-run", "ab" * 32, "cd" * 32, ("eu", "us-east"), (bytes(32),), (b"1" * 16, b"2" * 16)),
    LeaderBody("us-east"),
    RoundBody(0, 4, Ballot(1, 7), (Member(CONTRIBUTION, 1.5),), 0.75, (1.0,), (Stripe("eu", 0, 5),), b"\x12" * 32),
    DiscardedBody("eu", 2, 0, 5, 9, 1234, "it died \x1b[31m"),
    DiskNamedBody("eu", b"\xab" * 16),
    DiskNamedBody("eu", b""),
    SnapshotBody(0, 4, b"\xcd" * 32),
    SummaryBody(6, b"\xef" * 32),
    FinishedBody((4,), "steps_max"),
    ExtendedBody(800, 0),
    RevokedBody("eu", b"\x12" * 32),
    MembershipBody("ap", "contributor", "ap.example:4317"),
    MembershipBody("ap", "former"),
)
LINES = (
    "#1 term 1 genesis: run my-run of eu, us-east, 1 fragments, settings cdcdcdcdcdcd, model abababababab",
    "#2 term 1 leader: us-east",
    "#3 term 1 round: fragment 0 to version 4 (ballot 1.7): us-east 100.0% (4,000 tokens); share 0.75, "
    "payload 121212121212",
    r"#4 term 1 discarded: fragment 0: steps 5 to 9 of eu incarnation 2, 1,234 tokens: it died \x1b[31m",
    "#5 term 1 disk-named: eu has folder abababababab",
    "#6 term 1 disk-named: eu has no folder that counts",
    "#7 term 1 snapshot: fragment 0 version 4 is cdcdcdcdcdcd",
    "#8 term 1 summary: entries up to 6 are efefefefefef",
    "#9 term 1 finished: versions 4 to 4: steps_max",
    "#10 term 1 extended: goes on to 800 steps, any number of tokens",
    "#11 term 1 revoked: certificate 121212121212 of eu",
    "#12 term 1 membership: ap is a contributor at ap.example:4317",
    "#13 term 1 membership: ap is a former member",
)


def sealed(bodies: tuple[EntryBody, ...], *, after: tuple[Entry, ...] = (), term: int = 1) -> tuple[Entry, ...]:
    """`after`, and an entry for each body."""
    entries = list(after)
    for body in bodies:
        entries.append(seal(len(entries) + 1, term, entries[-1].hash if entries else ZERO_HASH, body))
    return tuple(entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def store(folder: Path) -> RegionStore:
    region_store = RegionStore(folder)
    region_store.load(1)
    return region_store


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_each_kind_of_entry_is_one_line(folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.persist(1, "", 0, sealed(BODIES))
    assert main(["ledger", str(folder)]) == 0
    assert printed(capsys) == list(LINES)
    assert main(["ledger", str(folder / LEDGER_NAME), "--from", "8"]) == 0
    assert printed(capsys) == list(LINES[7:])


def test_a_beginning_beyond_the_end_is_told(
    folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.persist(1, "", 0, sealed(BODIES))
    last = len(BODIES)
    assert main(["ledger", str(folder), "--from", f"{last}"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["ledger", str(folder), "--from", f"{last + 1}"]) == 0
    assert capsys.readouterr() == ("", f"the last entry here is #{last}: none from #{last + 1} on\n")


def test_json_has_everything(folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str]) -> None:
    entries = sealed(BODIES)
    store.persist(1, "", 0, entries)
    assert main(["ledger", str(folder), "--json"]) == 0
    documents = [json.loads(line) for line in printed(capsys)]
    assert [(entry["index"], entry["hash"]) for entry in documents] == [
        (entry.index, entry.hash.hex()) for entry in entries
    ]
    assert documents[2]["previous"] == entries[1].hash.hex()
    assert documents[2]["kind"] == "round"
    assert documents[2]["body"]["members"][0]["contribution"]["tokens"] == 4000
    assert documents[2]["body"]["payload_digest"] == "12" * 32
    assert documents[3]["body"]["reason"] == "it died \x1b[31m"


def test_what_is_summed_up_is_told(folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str]) -> None:
    entries = sealed(BODIES)
    store.persist(1, "", 0, entries)
    store.persist(1, "", 0, (), LedgerBase(6, 1, entries[5].hash, b"sum"))
    assert main(["ledger", str(folder)]) == 0
    base = f"#6 term 1 base: entries up to here are summed up, hash {entries[5].hash.hex()[:12]}"
    assert printed(capsys) == [base, *LINES[6:]]
    assert main(["ledger", str(folder), "--from", "8"]) == 0
    assert printed(capsys) == list(LINES[7:])
    assert main(["ledger", str(folder), "--json"]) == 0
    assert json.loads(printed(capsys)[0]) == {"index": 6, "term": 1, "kind": "base", "hash": entries[5].hash.hex()}


def test_follow_goes_on_with_what_the_daemon_writes(
    folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sealed(BODIES)
    path = folder / LEDGER_NAME
    store.persist(1, "", 0, entries[:2])
    branch = sealed((LeaderBody("eu"), LeaderBody("us-east")), after=entries[:4], term=2)

    def half_written() -> None:
        before = path.read_bytes()
        store.persist(1, "", 0, entries[3:4])
        whole = path.read_bytes()
        path.write_bytes(whole[: (len(before) + len(whole)) // 2])
        steps.insert(0, (lambda: path.write_bytes(whole) and None, LINES[3:4]))

    def damaged_for_a_moment() -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
        steps.insert(0, (lambda: path.write_bytes(whole) and None, ()))

    replacement = ("#5 term 2 leader: eu", "#6 term 2 leader: us-east")
    steps: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: None, ()),
        (lambda: store.persist(1, "", 0, entries[2:3]), LINES[2:3]),
        (half_written, ()),
        (lambda: store.persist(1, "", 0, entries[4:6]), LINES[4:6]),
        (lambda: store.persist(2, "", 5, branch[4:]), replacement),
        (lambda: store.persist(2, "", 0, (), LedgerBase(3, 1, entries[2].hash, b"sum")), ()),
        (damaged_for_a_moment, ()),
        (
            lambda: store.persist(2, "", 0, sealed((LeaderBody("eu"),), after=branch, term=3)[6:]),
            ("#7 term 3 leader: eu",),
        ),
    ]
    lines_to_come: list[str] = list(LINES[:2])
    output: list[str] = []

    def next_step(_: float) -> None:
        output.extend(printed(capsys))
        assert output == lines_to_come
        if not steps:
            raise KeyboardInterrupt
        step, lines = steps.pop(0)
        step()
        lines_to_come.extend(lines)

    monkeypatch.setattr(time, "sleep", next_step)
    assert main(["ledger", str(folder), "--follow"]) == 0
    assert not steps
    assert output == lines_to_come


def test_follow_tells_of_entries_that_were_summed_up_before_it_saw_them(
    folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = sealed(BODIES)
    store.persist(1, "", 0, entries[:2])

    def sum_up(_: float) -> None:
        monkeypatch.setattr(time, "sleep", stop)
        store.persist(1, "", 0, entries[2:])
        store.persist(1, "", 0, (), LedgerBase(7, 1, entries[6].hash, b"sum"))

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sum_up)
    assert main(["ledger", str(folder), "--follow"]) == 0
    base = f"#7 term 1 base: entries up to here are summed up, hash {entries[6].hash.hex()[:12]}"
    assert printed(capsys) == [*LINES[:2], base, *LINES[7:]]


def test_a_damaged_or_missing_ledger_is_an_error(
    folder: Path, store: RegionStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.persist(1, "", 0, sealed(BODIES))
    data = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    assert main(["ledger", str(folder), "--follow"]) == 6
    assert "is damaged at byte" in capsys.readouterr().err
    assert main(["ledger", str(folder / "blobs")]) == 2
    assert "is no folder with ledger.log, and there is no run.toml here: give a region" in capsys.readouterr().err
    assert main(["ledger", str(folder), "--from", "0"]) == 2
