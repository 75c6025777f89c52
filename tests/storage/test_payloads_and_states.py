"""Payloads and states in the folder: what is kept, what is pruned, what an archive keeps, and who only reads."""

import errno
import os
import shutil
import threading
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
from diloco_node.storage import durable, ledger_files
from diloco_node.storage import store as store_module
from diloco_node.storage.durable import DamagedFile, replace_file
from diloco_node.storage.ledger_files import LEDGER_END_NAME, VOTE_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import TensorHeader, named_version
from tests.kit.store_kit import DIGEST, FRAGMENTS, base_of, chain, digest_of, flip, load

pytestmark = pytest.mark.usefixtures("fast_disk")


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


def test_a_state_is_read_by_its_digest_only(store: RegionStore) -> None:
    values = np.arange(10, dtype=np.float32)
    store.store_state(0, 8, values, values + 1, b"8" * 32)
    assert store.read_state_bytes(0, 8, b"8" * 32).tobytes() == values.tobytes() + (values + 1).tobytes()
    for version, digest in ((8, b"9" * 32), (7, b"8" * 32)):
        with pytest.raises(DamagedFile):
            store.read_state_bytes(0, version, digest)
    assert store.set_aside == []


# ---- damage ----------------------------------------------------------------------------------------------------------


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
