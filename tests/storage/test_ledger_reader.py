"""Reading a folder beside the daemon that writes it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.core.types import NO_BASE
from diloco_node.errors import StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import ledger_files
from diloco_node.storage import store as store_module
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.ledger_files import LEDGER_END_NAME, VOTE_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import FRAGMENTS, base_of, chain, digest_of


def test_who_only_reads_passes_over_a_payload_that_is_pruned_meanwhile(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = np.zeros(3, np.float32)
    store.store_state(0, 8, theta, theta, b"d" * 16)
    for version in (7, 8, 9, 10):
        store.store_payload(0, version, digest_of(b"x"), [b"x"])

    def pruned(read: Callable[[Path], Any], path: Path) -> Any:
        if "v00000007" in path.name or "v00000009" in path.name:
            path.unlink()
        return read(path)

    files = store_module.tensor_files
    monkeypatch.setattr(files, "read_header", partial(pruned, files.read_header))
    monkeypatch.setattr(files, "read_content", partial(pruned, files.read_content))
    recovered = RegionStore(folder, is_read_only=True).load(FRAGMENTS)
    assert {version for _, version, _ in recovered.payloads} == {8, 10}


@pytest.mark.parametrize("is_archive", [False, True])
def test_who_only_reads_finds_a_ledger_that_was_cut_and_an_older_vote(folder: Path, is_archive: bool) -> None:
    store = RegionStore(folder, is_archive=is_archive)
    store.load(FRAGMENTS)
    entries = chain(3) + chain(1, term=2, after=chain(3))[3:]
    store.persist(1, "a", 0, entries[:1])
    store.persist(1, "a", 0, entries[1:2])
    store.persist(1, "a", 0, entries[2:3], base_of(entries[0]))
    before = {name: (folder / name).read_bytes() for name in (LEDGER_NAME, VOTE_NAME)}
    store.persist(2, "a", 0, entries[3:])
    store.close()
    after = {name: (folder / name).read_bytes() for name in before}
    reader = RegionStore(folder, is_read_only=True)
    assert reader.load(FRAGMENTS).entries == entries[1:]
    for name, said in ((LEDGER_NAME, "3 frames were durable, 2 are there"), (VOTE_NAME, "older copy")):
        (folder / name).write_bytes(before[name])
        with pytest.raises(StorageError, match=said):
            RegionStore(folder, is_read_only=True).load(FRAGMENTS)
        (folder / name).write_bytes(after[name])
    assert read_whole_ledger(folder, FRAGMENTS)[1] == (entries if is_archive else entries[1:])


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("is_summed_up", [False, True])
def test_a_ledger_that_is_written_while_it_is_read_is_whole(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch, is_before: bool, is_summed_up: bool
) -> None:
    """The write lies between opening the file and reading it, before or after `ledger.end` is read."""
    entries = chain(9)
    store.persist(1, "a", 0, entries[:7])
    real = ledger_files.LedgerFile._durable_frames
    base = base_of(entries[3]) if is_summed_up else None

    def durable(file: ledger_files.LedgerFile) -> int:
        monkeypatch.setattr(ledger_files.LedgerFile, "_durable_frames", real)
        number = real(file)
        store.persist(2, "a", 0, chain(2, term=2, after=entries[:7])[7:], base)
        return real(file) if is_before else number

    monkeypatch.setattr(ledger_files.LedgerFile, "_durable_frames", durable)
    recovered = RegionStore(folder, is_read_only=True).load(FRAGMENTS)
    assert recovered.term == 2
    assert recovered.base == NO_BASE
    assert len(recovered.entries) == (7 if is_summed_up else 9)


def test_who_only_reads_changes_nothing_and_takes_no_lock(folder: Path, store: RegionStore) -> None:
    entries = chain(4)
    store.persist(1, "a", 0, entries[:2])
    noted = (folder / LEDGER_END_NAME).read_bytes()
    store.persist(1, "a", 0, entries[2:])
    values = np.arange(10, dtype=np.float32)
    for version in (1, 2):
        store.store_state(0, version, values, values, b"d" * 32)
    damaged = folder / "state" / "f000-v00000002.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    whole = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).write_bytes(whole[:-1])
    (folder / LEDGER_END_NAME).write_bytes(noted)  # a daemon is writing the second frame
    (folder / "x.tmp").write_bytes(b"being written")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader = RegionStore(folder, is_read_only=True)
    recovered = reader.load(FRAGMENTS)
    assert (recovered.entries, recovered.states) == (entries[:2], (1, -1))
    with pytest.raises(DamagedFile):
        reader.read_state(0, 2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / VOTE_NAME).unlink()
    with pytest.raises(StorageError, match=r"vote\.bin"):
        RegionStore(folder, is_read_only=True).load(FRAGMENTS)
    (folder / LEDGER_NAME).unlink()
    with pytest.raises(StorageError, match=r"ledger\.log"):
        RegionStore(folder, is_read_only=True).load(FRAGMENTS)
    with pytest.raises(StorageError, match=r"ledger\.log"):
        RegionStore(folder.parent, is_read_only=True).load(FRAGMENTS)
    assert not (folder.parent / "state").exists()
