"""A folder that keeps all payloads and the whole ledger."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_node import atomic_file
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.summary import RunSummary, encode_summary
from diloco_node.core.types import NO_BASE, GenesisBody, Recovered
from diloco_node.errors import StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import ledger_files
from diloco_node.storage import store as store_module
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import TensorHeader
from tests.kit.store_kit import FRAGMENTS, base_of, chain, digest_of, flip, payload_versions


def test_an_archive_keeps_payloads_first_states_and_the_whole_ledger(folder: Path) -> None:
    store = RegionStore(folder, is_archive=True)
    store.load(FRAGMENTS)
    theta = np.zeros(3, np.float32)
    for version in (0, 8, 16, 24):
        store.store_state(0, version, theta, theta, b"d" * 16)
    for version in range(1, 21):
        store.store_payload(0, version, digest_of(b"x"), [b"x"])
    store.prune(0, 1000)
    assert store.state_versions(0) == (0, 16, 24)
    assert payload_versions(store, 0) == list(range(1, 21))
    entries = chain(12)
    store.persist(1, "a", 0, entries[:5])
    store.persist(1, "a", 0, entries[5:7], base_of(entries[2]))
    store.persist(1, "a", 0, entries[7:10])
    store.persist(1, "a", 0, entries[10:], base_of(entries[8]))
    assert read_whole_ledger(folder, FRAGMENTS) == (NO_BASE, entries)
    store.persist(1, "a", 0, (), base_of(chain(20)[-1]))
    store.close()
    assert read_whole_ledger(folder, FRAGMENTS) == (base_of(chain(20)[-1]), ()), "behind a gap nothing can be said"


def archive(folder: Path) -> RegionStore:
    store = RegionStore(folder, is_archive=True)
    store.load(FRAGMENTS)
    return store


def test_an_archive_that_begins_again_keeps_its_first_ledger(folder: Path) -> None:
    entries = chain(20)
    store = archive(folder)
    store.persist(1, "a", 0, entries[:12])
    store.persist(1, "a", 0, entries[12:], base_of(entries[7]))
    store.close()
    flip(folder / LEDGER_NAME, 800)
    store = archive(folder)
    assert "damaged" in store.lost
    store.persist(1, "a", 0, (), base_of(entries[9]))
    store.persist(1, "a", 0, entries[10:])
    assert read_whole_ledger(folder, FRAGMENTS) == (NO_BASE, entries)
    store.persist(1, "a", 0, (), base_of(entries[14]))
    store.close()
    assert read_whole_ledger(folder, FRAGMENTS) == (NO_BASE, entries)


@pytest.mark.parametrize("is_started_again", [False, True])
def test_an_archive_whose_new_ledger_was_not_synced_keeps_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_started_again: bool
) -> None:
    entries = chain(9)
    store = archive(folder)
    store.persist(1, "a", 0, entries[:7])
    synced = []

    def sync_first_only(path: Path) -> None:
        synced.append(path)
        if len(synced) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        for module in (ledger_files, atomic_file):  # the folder before the new file, and with its name
            patch.setattr(module, "sync_folder", sync_first_only)
        with pytest.raises(StorageError, match="reports an error"):
            store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    if is_started_again:
        store.close()
        store = archive(folder)
    else:
        store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    store.persist(1, "a", 0, (), base_of(entries[5]))
    store.close()
    assert read_whole_ledger(folder, FRAGMENTS) == (NO_BASE, entries)
    assert len(list(folder.glob("ledger-*.log"))) == 2


def summed_up(genesis: GenesisBody) -> bytes:
    zeros = (0,) * FRAGMENTS
    return encode_summary(
        RunSummary((genesis,), (), zeros, zeros, (), zeros, zeros, (), (), (), (), zeros, 0, (), (b"",) * FRAGMENTS)
    )


@pytest.mark.parametrize("run", ["mine", "another"])
def test_a_kept_ledger_that_ends_otherwise_is_a_gap_and_one_of_another_run_refused(folder: Path, run: str) -> None:
    genesis = GenesisBody("mine", "m", "s", ("a",), (bytes(32),) * FRAGMENTS, (bytes(16),))
    common = (seal(1, 1, ZERO_HASH, genesis),)
    store = archive(folder)
    store.persist(1, "a", 0, chain(9, after=common, name="own"))
    entries = chain(9, term=2, after=common, name="committed")
    base = base_of(entries[4], summed_up(replace(genesis, run_id=run)))
    store.persist(2, "a", 2, (), base)
    store.persist(2, "a", 0, entries[5:])
    store.close()
    if run == "mine":
        assert read_whole_ledger(folder, FRAGMENTS) == (base, entries[5:])
    else:
        with pytest.raises(StorageError, match="of another run"):
            read_whole_ledger(folder, FRAGMENTS)


def test_an_archive_lists_its_payloads_once_and_reads_those_that_recovery_may_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = archive(folder)
    theta = np.zeros(3, np.float32)
    for version in range(25):
        if version % 8 == 0:
            store.store_state(0, version, theta, theta, b"d" * 16)
        if version:
            store.store_payload(0, version, digest_of(b"x"), [b"x"])
    listed, read = [], []
    real_glob, real_header = Path.glob, store_module.tensor_files.read_header

    def glob(path: Path, pattern: str) -> Iterator[Path]:
        listed.append((path.name, pattern))
        return real_glob(path, pattern)

    def read_header(path: Path) -> TensorHeader:
        read.append(path.name)
        return real_header(path)

    monkeypatch.setattr(Path, "glob", glob)
    monkeypatch.setattr(store_module.tensor_files, "read_header", read_header)
    store.prune(0, 20)
    assert [name for name, _ in listed] == ["state"]
    store.close()
    recovered = load_archive(folder)
    assert [name for name, pattern in listed if pattern == "f*.bin"] == ["state", "state", "payloads"]
    assert {version for _, version, _ in recovered.payloads} == set(range(16, 25))
    assert len(read) == len(recovered.payloads)
    damaged = [folder / "state" / f"f000-v{version:08d}.bin" for version in (16, 24)]
    for path in damaged:
        flip(path, 4)
    assert {version for _, version, _ in load_archive(folder).payloads} == set(range(1, 25)), "Theta_0 needs them all"


def load_archive(folder: Path) -> Recovered:
    store = RegionStore(folder, is_archive=True)
    try:
        return store.load(FRAGMENTS)
    finally:
        store.close()
