"""The state folder: what was answered survives, what was not is cut off, what is damaged is found."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diloco_node import atomic_file
from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.folder_lives import starts_of
from diloco_node.core.ledger.summary import RunSummary, encode_summary
from diloco_node.core.types import DISK_ID_BYTES, NO_BASE, Entry, GenesisBody, LeaderBody, LedgerBase, Recovered
from diloco_node.errors import LedgerGone, LedgerLost, StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import durable, ledger_files
from diloco_node.storage import store as store_module
from diloco_node.storage.disk_id import DISK_ID_NAME
from diloco_node.storage.durable import DamagedFile, replace_file
from diloco_node.storage.ledger_files import LEDGER_END_NAME, VOTE_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import TensorHeader, named_version

FRAGMENTS = 2
DIGEST = bytes(range(32))


def digest_of(*parts) -> bytes:
    return payload_digest([stripe_digest(bytes(part)) for part in parts if len(part)])


def chain(count: int, *, term: int = 1, after: tuple[Entry, ...] = (), name: str = "a") -> tuple[Entry, ...]:
    """`after`, and `count` entries more."""
    entries = list(after)
    for _ in range(count):
        previous = entries[-1].hash if entries else ZERO_HASH
        entries.append(seal(len(entries) + 1, term, previous, LeaderBody(f"{name}-{len(entries)}")))
    return tuple(entries)


def load(folder: Path) -> Recovered:
    store = RegionStore(folder)
    try:
        return store.load(FRAGMENTS)
    finally:
        store.close()


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are opened here: with the calls to fsync counted where it matters, not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def store(folder: Path) -> Iterator[RegionStore]:
    opened = RegionStore(folder)
    opened.load(FRAGMENTS)
    yield opened
    opened.close()


# ---- term, vote and log ----------------------------------------------------------------------------------------------


def test_an_empty_folder_is_a_new_region(folder: Path) -> None:
    first = load(folder)
    assert first == Recovered(0, "", (), (-1, -1), frozenset(), (b"", b""), disk=first.disk)
    assert len(first.disk) == DISK_ID_BYTES
    assert load(folder) == first


def test_two_folders_have_two_ids(folder: Path, tmp_path: Path) -> None:
    assert load(folder).disk != load(tmp_path / "other").disk


def test_each_start_is_another_life_of_the_folder_and_two_copies_begin_two(folder: Path, tmp_path: Path) -> None:
    first = load(folder)
    shutil.copytree(folder, tmp_path / "copy")
    lives = [first.life, load(folder).life, load(tmp_path / "copy").life]
    assert [starts_of(life) for life in lives] == [1, 2, 2]
    assert lives[1] != lives[2]
    assert load(tmp_path / "copy").disk == first.disk


def test_a_folder_of_an_older_version_keeps_its_id(folder: Path) -> None:
    before = load(folder)
    body = b"DLDISK1\n" + before.disk
    (folder / DISK_ID_NAME).write_bytes(body + hashlib.sha256(body).digest())
    after = load(folder)
    assert (after.disk, starts_of(after.life)) == (before.disk, 1)


def test_a_folder_on_a_full_disk_is_loaded_in_its_last_life(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(folder)
    monkeypatch.setattr(os, "writev", refusing(errno.ENOSPC))
    after = load(folder)
    assert (after.disk, after.life) == (before.disk, before.life)
    assert not list(folder.rglob("*.tmp"))


def test_what_was_persisted_is_loaded(folder: Path, store: RegionStore) -> None:
    entries = chain(5)
    store.persist(1, "a", 0, entries[:2])
    store.persist(1, "a", 0, entries[2:])
    store.persist(3, "", 0, ())
    store.close()
    recovered = load(folder)
    assert (recovered.term, recovered.voted_for, recovered.entries) == (3, "", entries)


def test_truncation_replaces_the_end_of_the_log(folder: Path, store: RegionStore) -> None:
    entries = chain(5)
    other = chain(2, term=2, after=entries[:3], name="b")
    store.persist(1, "a", 0, entries)
    store.persist(2, "", 4, other[3:])
    store.persist(2, "", 0, chain(1, term=2, after=other)[-1:])
    store.persist(2, "", 6, ())
    store.close()
    assert load(folder).entries == other


def test_the_log_goes_on_after_a_restart(folder: Path, store: RegionStore) -> None:
    entries = chain(6)
    store.persist(1, "", 0, entries[:3])
    store.close()
    again = RegionStore(folder)
    again.load(FRAGMENTS)
    again.persist(1, "", 0, entries[3:])
    again.close()
    assert load(folder).entries == entries


def test_one_small_entry_is_one_write_and_one_fdatasync(store: RegionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = chain(2)
    store.persist(1, "a", 0, entries[:1])
    calls: list[str] = []
    for name in ("pwrite", "writev", "write", "fsync", "fdatasync", "ftruncate", "open", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1])
    store.persist(1, "a", 0, entries[1:])
    assert calls == ["pwrite", "fdatasync"]


def test_a_gap_in_the_entries_is_a_bug_of_the_caller(store: RegionStore) -> None:
    entries = chain(3)
    with pytest.raises(AssertionError):
        store.persist(1, "", 0, entries[1:])


# ---- what a crash may leave; tests/storage/test_power_cut.py has each moment -----------------------------------------


def grown(folder: Path) -> tuple[bytes, bytes, tuple[Entry, ...]]:
    """ledger.log before and after one write of two entries, and all entries."""
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(4)
    store.persist(1, "a", 0, entries[:2])
    before, noted = ((folder / name).read_bytes() for name in (LEDGER_NAME, LEDGER_END_NAME))
    store.persist(1, "a", 0, entries[2:])
    after = (folder / LEDGER_NAME).read_bytes()
    store.close()
    # A crash in the middle of a write comes before it is noted as durable.
    (folder / LEDGER_END_NAME).write_bytes(noted)
    return before, after, entries


def test_a_torn_last_write_is_cut_off_wherever_it_ends(folder: Path) -> None:
    before, after, entries = grown(folder)
    for length in range(len(before), len(after)):
        (folder / LEDGER_NAME).write_bytes(after[:length])
        assert load(folder).entries == entries[:2], length
        assert (folder / LEDGER_NAME).read_bytes() == before, length


def test_a_last_write_whose_sectors_never_arrived_is_cut_off(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(20)
    store.persist(1, "a", 0, entries[:2])
    before = (folder / LEDGER_NAME).stat().st_size
    noted = (folder / LEDGER_END_NAME).read_bytes()
    store.persist(1, "a", 0, entries[2:])
    store.close()
    (folder / LEDGER_END_NAME).write_bytes(noted)
    whole = (folder / LEDGER_NAME).read_bytes()
    sectors = range(before - before % 512, len(whole), 512)
    assert len(sectors) >= 3
    for sector in sectors:
        first = max(before, sector)
        last = min(sector + 512, len(whole))
        torn = whole[:first] + bytes(last - first) + whole[last:]
        (folder / LEDGER_NAME).write_bytes(torn)
        assert load(folder).entries == entries[:2], sector
    (folder / LEDGER_NAME).write_bytes(whole[:before] + bytes(len(whole) - before))
    assert load(folder).entries == entries[:2]


def test_after_a_cut_the_log_goes_on(folder: Path) -> None:
    _, after, entries = grown(folder)
    (folder / LEDGER_NAME).write_bytes(after[:-1])
    store = RegionStore(folder)
    assert store.load(FRAGMENTS).entries == entries[:2]
    assert store.cut_bytes > 0
    store.persist(1, "a", 0, entries[2:])
    store.close()
    assert load(folder).entries == entries


def test_the_first_start_may_be_interrupted_anywhere(folder: Path) -> None:
    load(folder)
    header = (folder / LEDGER_NAME).read_bytes()
    for content in [*(header[:length] for length in range(len(header))), bytes(len(header)), bytes(3)]:
        (folder / LEDGER_NAME).write_bytes(content)
        assert load(folder).entries == ()
        assert (folder / LEDGER_NAME).read_bytes() == header
    (folder / LEDGER_NAME).unlink()
    assert load(folder).entries == ()
    (folder / LEDGER_NAME).unlink()
    (folder / VOTE_NAME).unlink()
    assert load(folder).term == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    """Flip one bit in place (writing the whole file anew makes some file systems wait for the disk)."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def lost(folder: Path) -> str:
    """What a start on a copy of the folder finds damaged; it begins again under another id, nothing is deleted."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    store = RegionStore(copy)
    recovered = store.load(FRAGMENTS)
    store.close()
    assert recovered.entries == ()
    assert (recovered.term, recovered.voted_for) == (0, "")
    assert recovered.disk not in disk_id(folder), "a folder that lost what it had has another id"
    for name in (LEDGER_NAME, VOTE_NAME):
        if (folder / name).exists():
            assert (copy / f"{name}.damaged-1").read_bytes() == (folder / name).read_bytes()
    again = load(copy)
    assert again == recovered
    return store.lost


def disk_id(folder: Path) -> bytes:
    return (folder / DISK_ID_NAME).read_bytes()


@pytest.mark.parametrize("name", [LEDGER_NAME, VOTE_NAME])
def test_a_flipped_bit_anywhere_in_ledger_and_vote_is_found_and_the_folder_begins_again(
    folder: Path, name: str
) -> None:
    grown(folder)
    # In every eighth byte another bit.
    for bit in range(0, 8 * (folder / name).stat().st_size, 63):
        flip(folder / name, bit)
        assert "is damaged" in lost(folder), bit
        flip(folder / name, bit)
    assert len(load(folder).entries) == 4


def test_a_ledger_that_was_cut_short_at_a_frame_is_found(folder: Path) -> None:
    before, after, entries = grown(folder)
    store = RegionStore(folder)
    assert store.load(FRAGMENTS).entries == entries
    store.persist(1, "a", 0, chain(5)[4:])
    store.close()
    for content in (before, after):
        (folder / LEDGER_NAME).write_bytes(content)
        assert "frames were durable" in lost(folder)
    (folder / LEDGER_END_NAME).write_bytes(b"torn")
    assert load(folder).entries == entries, "without the note it looks like a write that was interrupted"


def test_a_folder_whose_id_is_gone_or_damaged_keeps_its_ledger_under_another_id(folder: Path) -> None:
    _, _, entries = grown(folder)
    for content in (None, b"", b"x" * 56):
        before = load(folder)
        if content is None:
            (folder / DISK_ID_NAME).unlink()
        else:
            (folder / DISK_ID_NAME).write_bytes(content)
        after = load(folder)
        assert after.entries == before.entries == entries
        assert after.disk != before.disk
        kept = [path.read_bytes() for path in folder.glob(f"{DISK_ID_NAME}.damaged-*")]
        assert content is None or content in kept, "set aside, not written over"


def test_a_frame_that_is_missing_doubled_or_swapped_is_found(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    ends = [(folder / LEDGER_NAME).stat().st_size]
    for entry in chain(3):
        store.persist(1, "", 0, (entry,))
        ends.append((folder / LEDGER_NAME).stat().st_size)
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    head, one, two, three = data[: ends[0]], *(data[a:b] for a, b in pairwise(ends))
    for wrong in (head + two + three, head + one + three, head + one + one + two, head + two + one, one + two):
        (folder / LEDGER_NAME).write_bytes(wrong)
        assert "is damaged at byte" in lost(folder)


def test_zeros_in_the_middle_are_damage_and_not_a_torn_write(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(42)
    store.persist(1, "", 0, entries[:40])
    store.persist(1, "", 0, entries[40:])
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).write_bytes(data[:1024] + bytes(512) + data[1536:])
    assert "does not match its checksum" in lost(folder)


def test_a_lost_sector_before_a_later_write_is_damage_and_not_a_torn_write(folder: Path) -> None:
    """The disk said that it had written the frame, and it has one that was written after it."""
    before, _, _ = grown(folder)
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    for entry in chain(12)[4:]:
        store.persist(1, "a", 0, (entry,))
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    first = len(before)
    stop = first - first % 512 + 512
    assert data.count(b"DLf1", stop) >= 2
    (folder / LEDGER_NAME).write_bytes(data[:first] + bytes(stop - first) + data[stop:])
    assert "is damaged at byte" in lost(folder)


def test_a_missing_vote_or_ledger_is_found(folder: Path) -> None:
    grown(folder)
    for name in (VOTE_NAME, LEDGER_NAME):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        assert "is missing" in lost(folder)
        (folder / name).write_bytes(b"")
        assert "is damaged" in lost(folder)
        (folder / name).write_bytes(data)
    assert len(load(folder).entries) == 4


def test_an_older_copy_of_the_vote_is_found(folder: Path, store: RegionStore) -> None:
    old = (folder / VOTE_NAME).read_bytes()
    store.persist(1, "a", 0, chain(1))
    store.close()
    (folder / VOTE_NAME).write_bytes(old)
    assert "older copy" in lost(folder)


def test_entries_that_do_not_follow_each_other_are_refused(folder: Path, store: RegionStore) -> None:
    other = chain(2, name="b")
    store.persist(1, "", 0, chain(1))
    store.persist(1, "", 0, other[1:])
    store.close()
    assert "entry 2 of the ledger does not follow entry 1" in lost(folder)


def test_every_flipped_bit_in_a_payload_is_found_and_the_file_set_aside(folder: Path, store: RegionStore) -> None:
    content = np.random.default_rng(7).bytes(300)
    digest = digest_of(content[:100], content[100:])
    store.store_payload(1, 3, digest, [content[:100], content[100:]])
    path = folder / "payloads" / f"f001-v00000003-{digest[:8].hex()}.bin"
    bits = 8 * path.stat().st_size
    for bit in range(bits):
        flip(path, bit)
        with pytest.raises(StorageError, match="fetch it from a peer"):
            store.read_payload(1, 3, digest)
        path.with_name(path.name + ".damaged").rename(path)
        flip(path, bit)
    assert len(store.set_aside) == bits
    assert bytes(store.read_payload(1, 3, digest)) == content


def test_a_flipped_bit_anywhere_in_a_state_is_found_and_the_one_before_is_taken(
    folder: Path, store: RegionStore
) -> None:
    theta = np.arange(20, dtype=np.float32)
    store.store_state(0, 8, theta, theta, b"d" * 16)
    store.store_state(0, 16, theta + 1, theta + 2, b"e" * 16)
    store.close()
    path = folder / "state" / "f000-v00000016.bin"
    for bit in range(0, 8 * path.stat().st_size, 31):
        flip(path, bit)
        assert load(folder).states == (8, -1), bit
        path.with_name(path.name + ".damaged").rename(path)
        flip(path, bit)
    assert load(folder).states == (16, -1)


def test_damaged_payloads_after_the_state_do_not_count_as_there(folder: Path, store: RegionStore) -> None:
    theta = np.arange(20, dtype=np.float32)
    store.store_state(0, 8, theta, theta, b"d" * 16)
    for version in (8, 9, 10):
        store.store_payload(0, version, digest_of(b"x" * 100), [b"x" * 100])
    store.close()
    path = folder / "payloads" / f"f000-v00000009-{digest_of(b'x' * 100)[:8].hex()}.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(folder).payloads == {(0, 8, digest_of(b"x" * 100)), (0, 10, digest_of(b"x" * 100))}
    assert (folder / "payloads" / (path.name + ".damaged")).exists()


@pytest.mark.parametrize("length", [0, 1, 511, 512, 600])
def test_a_file_that_is_too_short_or_too_long_is_found(folder: Path, store: RegionStore, length: int) -> None:
    digest = digest_of(b"x" * 100)
    store.store_payload(0, 1, digest, [b"x" * 100])
    path = folder / "payloads" / f"f000-v00000001-{digest[:8].hex()}.bin"
    data = path.read_bytes()
    path.write_bytes(data[:length])
    with pytest.raises(StorageError, match="is damaged"):
        store.read_payload(0, 1, digest)
    path.write_bytes(data + b"y")
    with pytest.raises(StorageError, match="is damaged"):
        store.read_payload(0, 1, digest)


def test_a_file_under_another_name_is_found(folder: Path, store: RegionStore) -> None:
    digest = digest_of(b"x" * 100)
    store.store_payload(0, 1, digest, [b"x" * 100])
    old = folder / "payloads" / f"f000-v00000001-{digest[:8].hex()}.bin"
    shutil.copy(old, folder / "payloads" / f"f000-v00000002-{digest[:8].hex()}.bin")
    with pytest.raises(StorageError, match="holds another thing"):
        store.read_payload(0, 2, digest)
    # Two digests that begin alike share a name; the header tells them apart.
    with pytest.raises(StorageError, match=f"not {digest[:8].hex()}ff"):
        store.read_payload(0, 1, digest[:8] + b"\xff" * 24)


# ---- payloads and states ---------------------------------------------------------------------------------------------


def test_payloads_come_back_as_they_were_whatever_the_chunks(store: RegionStore) -> None:
    content = np.random.default_rng(3).integers(0, 256, 70_001, dtype=np.uint8)
    parts: list[bytes | memoryview | np.ndarray[tuple[int], np.dtype[np.uint8]]] = [
        content[:1],
        memoryview(content[1:60_000]),
        content[60_000:60_000],
        content[60_000:].tobytes(),
    ]
    digest = digest_of(*parts)
    store.store_payload(0, 1, digest, parts)
    store.store_payload(0, 1, digest, parts)
    read = store.read_payload(0, 1, digest)
    assert read.dtype == np.uint8
    assert np.array_equal(read, content)
    many = [content[at : at + 1100] for at in range(0, len(content), 1100)]
    assert len(many) == 64
    store.store_payload(0, 2, digest_of(*many), many)
    assert np.array_equal(store.read_payload(0, 2, digest_of(*many)), content)
    with pytest.raises(ValueError, match="at most 64"):
        store.store_payload(0, 3, DIGEST, [content[:1]] * 65)


def test_a_file_of_more_parts_than_the_kernel_takes_at_once_is_whole(folder: Path) -> None:
    content = np.random.default_rng(3).bytes(70_001)
    folder.mkdir(exist_ok=True)
    replace_file(folder / "many", [content[at : at + 7] for at in range(0, len(content), 7)])
    assert (folder / "many").read_bytes() == content


def test_a_partial_write_of_the_kernel_is_continued(store: RegionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(4).integers(0, 256, 5000, dtype=np.uint8)
    real_writev, real_pwrite = os.writev, os.pwrite
    monkeypatch.setattr(os, "writev", lambda fd, views: real_writev(fd, [bytes(views[0][:499])]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_pwrite(fd, bytes(data[:17]), at))
    digest = digest_of(content[:100], content[100:])
    store.store_payload(0, 1, digest, [content[:100], content[100:]])
    entries = chain(3)
    store.persist(1, "a", 0, entries)
    monkeypatch.undo()
    assert np.array_equal(store.read_payload(0, 1, digest), content)
    store.close()
    assert load(store.folder).entries == entries


def test_states_come_back_as_they_were(store: RegionStore) -> None:
    theta = np.array([0.0, -0.0, 1e-45, 3.5, -7.25], np.float32)
    momentum = np.arange(5, dtype=np.float32)
    store.store_state(1, 0, theta, momentum, b"d" * 16)
    read_theta, read_momentum = store.read_state(1, 0)
    assert read_theta.tobytes() == theta.tobytes()
    assert read_momentum.tobytes() == momentum.tobytes()
    read_theta += 1  # the caller owns it
    assert store.state_digest(1, 0) == b"d" * 16
    assert store.state_versions(1) == (0,)
    with pytest.raises(ValueError, match="float32"):
        store.store_state(1, 1, theta.astype(np.float64), momentum, b"")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum"):
        store.store_state(1, 1, theta, momentum[:3], b"")


def test_what_is_not_there_says_so(store: RegionStore) -> None:
    with pytest.raises(StorageError, match="does not exist: fetch it"):
        store.read_payload(0, 1, DIGEST)
    with pytest.raises(StorageError, match="does not exist"):
        store.read_state(0, 1)


def test_recovered_names_the_newest_state_and_all_payloads(folder: Path, store: RegionStore) -> None:
    theta = np.zeros(3, np.float32)
    for version in (2, 10, 9):
        store.store_state(1, version, theta, theta, b"d" * 16)
        store.store_payload(0, version, digest_of(b"x"), [b"x"])
    store.close()
    recovered = load(folder)
    assert recovered.states == (-1, 10)
    assert recovered.payloads == {(0, version, digest_of(b"x")) for version in (2, 9, 10)}


def test_prune_keeps_what_recovery_may_need(folder: Path, store: RegionStore) -> None:
    theta = np.zeros(3, np.float32)
    for version in (0, 8, 16):
        store.store_state(0, version, theta, theta, b"d" * 16)
        store.store_state(1, version, theta, theta, b"d" * 16)
    for version in range(1, 21):
        store.store_payload(0, version, digest_of(b"x"), [b"x"])
        store.store_payload(1, version, digest_of(b"x"), [b"x"])
    store.prune(0, 0)
    assert store.state_versions(0) == (0, 8, 16)
    store.prune(0, 5)
    assert store.state_versions(0) == (8, 16)
    assert payload_versions(store, 0) == list(range(5, 21))
    store.prune(0, 1000)
    # Theta at 16 may turn out to be damaged: then 8 and everything after it is needed.
    assert store.state_versions(0) == (8, 16)
    assert payload_versions(store, 0) == list(range(9, 21))
    assert store.state_versions(1) == (0, 8, 16)
    assert payload_versions(store, 1) == list(range(1, 21))


def payload_versions(store: RegionStore, fragment: int) -> list[int]:
    places = (named_version(path) for path in sorted((store.folder / "payloads").glob("f*.bin")))
    return [place[1] for place in places if place is not None and place[0] == fragment]


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
    assert len(read) == 1 + len(recovered.payloads)
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


def test_who_only_reads_passes_over_a_payload_that_is_pruned_meanwhile(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = np.zeros(3, np.float32)
    store.store_state(0, 8, theta, theta, b"d" * 16)
    for version in (7, 8, 9, 10):
        store.store_payload(0, version, digest_of(b"x"), [b"x"])
    real = store_module.tensor_files.read_header

    def pruned(path: Path) -> TensorHeader:
        if "v00000007" in path.name or "v00000009" in path.name:
            path.unlink()
        return real(path)

    monkeypatch.setattr(store_module.tensor_files, "read_header", pruned)
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


def test_a_folder_that_somebody_else_made_above_an_unreadable_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "region").mkdir()
    real = atomic_file.sync_folder

    def refuse(folder: Path) -> None:
        if folder == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(folder)

    monkeypatch.setattr(durable, "sync_folder", refuse)
    assert load(tmp_path / "region").entries == ()


def test_versions_are_ordered_by_number_and_not_by_name(store: RegionStore) -> None:
    theta = np.zeros(3, np.float32)
    for version in (100_000_000, 99_999_999):
        store.store_state(0, version, theta, theta, b"d" * 16)
    assert store.state_versions(0) == (99_999_999, 100_000_000)


def test_prune_without_a_state_removes_nothing(store: RegionStore) -> None:
    for version in range(1, 4):
        store.store_payload(0, version, digest_of(b"x"), [b"x"])
    store.prune(0, 100)
    assert payload_versions(store, 0) == [1, 2, 3]


def test_files_may_be_written_from_several_threads(store: RegionStore) -> None:
    content = np.random.default_rng(5).integers(0, 256, 200_000, dtype=np.uint8)

    def write(version: int) -> None:
        store.store_payload(0, version, digest_of(content), [content])
        store.store_payload(0, 99, digest_of(content), [content])

    threads = [threading.Thread(target=write, args=(version,)) for version in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert payload_versions(store, 0) == [*range(8), 99]
    assert np.array_equal(store.read_payload(0, 99, digest_of(content)), content)


# ---- the disk refuses ------------------------------------------------------------------------------------------------


def refusing(code: int) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "copy the state folder to a good disk"),
    ],
)
def test_a_refused_write_says_what_to_do_and_loses_nothing(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    entries = chain(3)
    store.persist(1, "a", 0, entries[:1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing(code))
        patch.setattr(os, "writev", refusing(code))
        with pytest.raises(StorageError, match=rf"ledger.log.*{advice}"):
            store.persist(1, "a", 0, entries[1:])
        with pytest.raises(StorageError, match=rf"vote.bin.*{advice}"):
            store.persist(2, "b", 0, ())
        with pytest.raises(StorageError, match=rf"payloads.*{advice}"):
            store.store_payload(0, 1, digest_of(b"x"), [b"x"])
    assert not list(folder.rglob("*.tmp"))
    store.persist(1, "a", 0, entries[1:])
    store.close()
    recovered = load(folder)
    assert (recovered.term, recovered.voted_for, recovered.entries) == (1, "a", entries)


def test_a_disk_that_fills_up_in_the_middle_of_a_write_leaves_the_log_whole(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = chain(3)
    store.persist(1, "a", 0, entries[:1])
    real, calls = os.pwrite, [0]

    def filling(descriptor: int, data: bytes, at: int) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[:40], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        with pytest.raises(StorageError, match="free some space"):
            store.persist(1, "a", 0, entries[1:])
    store.persist(1, "a", 0, entries[1:2])
    store.close()
    assert load(folder).entries == entries[:2]


def test_a_really_full_device_gives_the_same_error(folder: Path) -> None:
    # /dev/full answers every write with ENOSPC.
    ledger = ledger_files.LedgerFile(folder)
    ledger._descriptor = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(StorageError, match="free some space"):
        ledger.append(0, chain(1))
    ledger.close()


class Platter:
    """What a power cut would leave of each file. The kernel's part: after a failed sync the lost pages count as clean,
    so that a later sync of the same file says yes and writes only what was written since."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_failing = False
        self.durable: dict[int, bytearray] = {}
        self.dirty: dict[int, list[tuple[int, bytes]]] = {}
        self._pwrite, self._writev = os.pwrite, os.writev
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "writev", self.writev)
        patch.setattr(os, "fsync", self.sync)
        patch.setattr(os, "fdatasync", self.sync)

    def pwrite(self, descriptor: int, data: bytes, at: int) -> int:
        self.dirty.setdefault(os.fstat(descriptor).st_ino, []).append((at, bytes(data)))
        return self._pwrite(descriptor, data, at)

    def writev(self, descriptor: int, parts: list[bytes]) -> int:
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        self.dirty.setdefault(os.fstat(descriptor).st_ino, []).append((at, b"".join(parts)))
        return self._writev(descriptor, parts)

    def sync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        writes = self.dirty.pop(inode, [])
        if self.is_failing:
            raise OSError(errno.EIO, "lost")
        image = self.durable.setdefault(inode, bytearray())
        for at, data in writes:
            image.extend(bytes(max(0, at + len(data) - len(image))))
            image[at : at + len(data)] = data

    def after_power_cut(self, path: Path) -> bytes:
        """What the disk has of a file: zeros where nothing arrived."""
        size = path.stat().st_size
        return bytes(self.durable[path.stat().st_ino][:size].ljust(size, b"\0"))


def test_after_a_failed_fdatasync_the_log_goes_on_in_a_new_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platter = Platter(monkeypatch)
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(5)
    store.persist(1, "a", 0, entries[:1])
    platter.is_failing = True
    for _ in range(3):
        with pytest.raises(StorageError, match="copy the state folder to a good disk"):
            store.persist(1, "a", 0, entries[1:3])
    platter.is_failing = False
    store.persist(1, "a", 0, entries[1:3])
    (folder / LEDGER_NAME).write_bytes(platter.after_power_cut(folder / LEDGER_NAME))
    store.persist(1, "a", 0, entries[3:])
    store.close()
    assert not list(folder.glob("*.tmp"))
    (folder / LEDGER_NAME).write_bytes(platter.after_power_cut(folder / LEDGER_NAME))
    assert load(folder).entries == entries


def test_a_log_that_can_not_be_read_back_after_a_failed_fdatasync_is_lost(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = chain(3)
    store.persist(1, "a", 0, entries[:2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refusing(errno.EIO))
        with pytest.raises(StorageError):
            store.persist(1, "a", 0, entries[2:])
    path = folder / LEDGER_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + b"?" + whole[41:])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refusing(errno.EIO))
        with pytest.raises(LedgerLost, match="read back") as found:
            store.persist(1, "a", 0, entries[2:])
    assert found.value.exit_code == 6, "with its id it must not start again"
    before = store.disk
    path.write_bytes(whole[:40])
    with pytest.raises(LedgerGone, match="0 whole entries of 2"):
        store.persist(1, "a", 0, entries[2:])
    store.close()
    assert load(folder).disk not in (before, b"")


def test_a_log_whose_end_can_not_be_cut_off_goes_on_in_a_new_file(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = chain(3)
    store.persist(1, "a", 0, entries[:1])
    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:30], at))
        patch.setattr(os, "fdatasync", refusing(errno.ENOSPC))
        patch.setattr(os, "ftruncate", refusing(errno.ENOSPC))
        with pytest.raises(StorageError, match="free some space"):
            store.persist(1, "a", 0, entries[1:2])
    store.persist(1, "a", 0, entries[1:])
    store.close()
    assert load(folder).entries == entries


def test_what_was_never_synced_is_on_the_disk_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platter = Platter(monkeypatch)
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(4)
    store.persist(1, "a", 0, entries[:2])

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # killed between write and sync: the frame lies in the kernel's cache
        patch.setattr(os, "fdatasync", killed)
        with pytest.raises(KeyboardInterrupt):
            store.persist(1, "a", 0, entries[2:])
    store.close()
    platter.dirty.clear()  # and its pages were lost without a word
    assert load(folder).entries == entries
    assert platter.after_power_cut(folder / LEDGER_NAME) == (folder / LEDGER_NAME).read_bytes()


def test_names_are_on_the_disk_before_they_are_loaded(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    synced: list[Path] = []
    monkeypatch.setattr(store_module, "sync_folder", synced.append)
    load(folder)
    assert {folder, folder / "payloads", folder / "state"} <= set(synced)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("what", ["state", "payload"])
def test_a_file_that_can_not_be_read_now_is_not_called_damaged(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    values, digest = np.arange(100, dtype=np.float32), digest_of(b"x" * 5000)
    if what == "state":
        store.store_state(0, 1, values, values, DIGEST)
    store.store_payload(0, 2, digest, [b"x" * 5000])
    with monkeypatch.context() as patch:
        patch.setattr(np, "fromfile", refusing(code))
        with pytest.raises(StorageError, match="can't read"):
            store.read_state(0, 1) if what == "state" else store.read_payload(0, 2, digest)
        store.close()
        with pytest.raises(StorageError, match="can't read"):
            load(folder)
    assert store.set_aside == []
    again = load(folder)
    assert again.states == (1 if what == "state" else -1, -1)
    assert again.payloads == {(0, 2, digest)}


def test_a_file_that_the_disk_can_not_read_is_set_aside(
    folder: Path, store: RegionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digest_of(b"x" * 5000)
    store.store_payload(0, 1, digest, [b"x" * 5000])
    with monkeypatch.context() as patch:
        patch.setattr(np, "fromfile", refusing(errno.EIO))
        with pytest.raises(StorageError, match=r"set aside.*fetch it from a peer"):
            store.read_payload(0, 1, digest)
    assert len(store.set_aside) == 1
    store.close()
    assert load(folder).payloads == frozenset()


def test_a_folder_that_can_not_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't use"):
        RegionStore(tmp_path / "file" / "region")


def test_replacing_a_file_keeps_the_old_one_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    durable.replace_file(path, [b"old"])
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(StorageError):
        durable.replace_file(path, [b"new"])
    assert path.read_bytes() == b"old"


# ---- two daemons on one folder ---------------------------------------------------------------------------------------


def test_a_second_daemon_in_this_process_is_found(folder: Path, store: RegionStore) -> None:
    with pytest.raises(StorageError, match=rf"in use by another daemon \(process {os.getpid()}\)"):
        RegionStore(folder)
    store.close()
    RegionStore(folder).close()


def test_the_lock_goes_with_the_process_however_it_ends(folder: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from diloco_node.storage.store import RegionStore;"
        "RegionStore(Path(sys.argv[1])).load(1); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {other.pid}"):
            RegionStore(folder)
        other.kill()
        other.wait()
    RegionStore(folder).close()


# ---- a ledger that begins with a base --------------------------------------------------------------------------------


def base_of(entry: Entry, summary: bytes = bytes(2000) + b"sums") -> LedgerBase:
    return LedgerBase(entry.index, entry.term, entry.hash, summary)


def test_a_ledger_that_is_summed_up_goes_on(folder: Path, store: RegionStore) -> None:
    entries = chain(9)
    store.persist(1, "a", 0, entries[:6])
    size = (folder / LEDGER_NAME).stat().st_size
    store.persist(1, "a", 0, entries[6:8], base_of(entries[4], b"sums"))
    assert (folder / LEDGER_NAME).stat().st_size < size
    store.persist(1, "a", 8, entries[7:])
    store.close()
    recovered = load(folder)
    assert (recovered.base, recovered.entries) == (base_of(entries[4], b"sums"), entries[5:])


def test_a_base_of_the_leader_takes_the_place_of_the_whole_ledger(folder: Path, store: RegionStore) -> None:
    entries = chain(40)
    store.persist(1, "a", 0, chain(5, name="other"))
    store.persist(1, "a", 1, (), base_of(entries[29]))
    assert load_again(store, folder) == (base_of(entries[29]), ())
    again = RegionStore(folder)
    again.load(FRAGMENTS)
    again.persist(1, "a", 0, entries[30:33], base_of(entries[30]))
    again.persist(1, "a", 32, ())
    assert load_again(again, folder) == (base_of(entries[30]), ())


def load_again(store: RegionStore, folder: Path) -> tuple[LedgerBase, tuple[Entry, ...]]:
    store.close()
    recovered = load(folder)
    return recovered.base, recovered.entries


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_refused_sum_is_written_when_the_disk_takes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    store = RegionStore(folder, is_archive=is_archive)
    store.load(FRAGMENTS)
    entries = chain(9)
    store.persist(1, "a", 0, entries[:7])
    for name in ("writev", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refusing(errno.ENOSPC))
            with pytest.raises(StorageError, match="full"):
                store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    assert load_again(store, folder) == (base_of(entries[3]), entries[4:])
    assert read_whole_ledger(folder, FRAGMENTS)[1] == (entries if is_archive else entries[4:])


def test_a_torn_write_behind_a_base_is_cut_off_and_damage_before_it_is_refused(
    folder: Path, store: RegionStore
) -> None:
    entries = chain(9)
    store.persist(1, "a", 0, entries[:7])
    store.persist(1, "a", 0, (), base_of(entries[3]))
    whole, noted = ((folder / name).read_bytes() for name in (LEDGER_NAME, LEDGER_END_NAME))
    store.persist(1, "a", 0, entries[7:])
    data = (folder / LEDGER_NAME).read_bytes()
    store.close()
    (folder / LEDGER_END_NAME).write_bytes(noted)
    (folder / LEDGER_NAME).write_bytes(data[: len(whole) + 40])
    assert load(folder).entries == entries[4:7]
    for at in (40, 1000, len(whole) - 30):
        (folder / LEDGER_NAME).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert "damaged" in lost(folder)


def test_an_older_vote_than_the_base_is_refused(folder: Path, store: RegionStore) -> None:
    entries = chain(3, term=4)
    store.persist(4, "a", 0, entries)
    store.persist(4, "a", 0, (), base_of(entries[2]))
    store.close()
    vote = ledger_files.VoteFile(folder)
    vote.write(3, "")
    assert "older copy" in lost(folder)


def test_a_state_is_read_by_its_digest_only(store: RegionStore) -> None:
    values = np.arange(10, dtype=np.float32)
    store.store_state(0, 8, values, values + 1, b"8" * 32)
    assert store.read_state_bytes(0, 8, b"8" * 32).tobytes() == values.tobytes() + (values + 1).tobytes()
    for version, digest in ((8, b"9" * 32), (7, b"8" * 32)):
        with pytest.raises(DamagedFile):
            store.read_state_bytes(0, version, digest)
    assert store.set_aside == []
