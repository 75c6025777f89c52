"""A disk that refuses: nothing that was acknowledged is lost, and the error says what to do."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from diloco_node.daemon.final_model import write_final
from diloco_node.errors import LedgerGone, LedgerLost, StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import durable, ledger_files
from diloco_node.storage import store as store_module
from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import DIGEST, FRAGMENTS, chain, digest_of, load, refusing

pytestmark = pytest.mark.usefixtures("fast_disk")


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
    before = store._disk_id.value
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


def test_a_disk_that_becomes_read_only_refuses_in_our_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel remounts a disk that fails: writes are refused, and so is the removal of what they left."""
    for name in ("writev", "fsync"):
        monkeypatch.setattr(os, name, refusing(errno.EROFS))
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(Path, name, refusing(errno.EROFS))
    with pytest.raises(StorageError, match="read-only"):
        durable.replace_file(tmp_path / "y", [b"y"])
    with pytest.raises(StorageError, match="Read-only"):
        write_final(tmp_path, {"a": np.zeros(3, np.float32)})
