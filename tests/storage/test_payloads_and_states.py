"""Payloads and states in the folder: what is kept, what is pruned, what an archive keeps, and who only reads."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node import atomic_file
from diloco_node.errors import StorageError
from diloco_node.storage import durable
from diloco_node.storage.durable import DamagedFile, replace_file
from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import DIGEST, chain, digest_of, flip, load, payload_versions

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


def test_a_state_that_is_replaced_while_it_is_read_is_the_old_one_or_the_new(
    store: RegionStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header and its content are of one file."""
    old, new = np.zeros(8, np.float32), np.ones(9, np.float32)
    digests = [digest_of(values.tobytes()) for values in (old, new)]
    store.store_state(0, 1, old, old, digests[0])
    read = np.fromfile

    def read_late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        store.store_state(0, 1, new, new, digests[1])
        return read(*arguments, **options)

    monkeypatch.setattr(np, "fromfile", read_late)
    assert store.read_state(0, 1)[0].tobytes() == old.tobytes()
    assert store.read_state(0, 1)[0].tobytes() == new.tobytes()
