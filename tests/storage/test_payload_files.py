"""Payloads that grow part by part in files that are written over: what is on the disk, what becomes of the files."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.daemon.final_model import write_final
from diloco_node.errors import StorageError
from diloco_node.storage import payload_files
from diloco_node.storage.durable import replace_file
from diloco_node.storage.payload_files import SPARES_AHEAD, SPARES_MAX, PayloadDraft, SpareFiles
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import HEADER_BYTES

SIZE = 4999


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    draft = PayloadDraft(SpareFiles(tmp_path), SIZE)
    body = os.urandom(SIZE - 10)
    draft.write(10 + 3000, memoryview(body)[3000:])
    draft.write(10, memoryview(body)[:3000])
    assert all(name.endswith(".tmp") for name in files(tmp_path))
    draft.finish(tmp_path / "x.bin", b"h" * 10)
    assert files(tmp_path) == ["x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == b"h" * 10 + body


@pytest.mark.parametrize("before", [SIZE, SIZE - 900, SIZE + 900])
def test_a_spare_is_written_over_and_has_the_size_of_the_draft(tmp_path: Path, before: int) -> None:
    spares = SpareFiles(tmp_path)
    (tmp_path / "old").write_bytes(b"o" * before)
    inode = (tmp_path / "old").stat().st_ino
    spares.give(tmp_path / "old")
    draft = PayloadDraft(spares, SIZE)
    draft.write(0, memoryview(bytes(SIZE)))
    draft.finish(tmp_path / "new", b"h")
    assert (tmp_path / "new").stat().st_ino == inode
    assert (tmp_path / "new").read_bytes() == b"h" + bytes(SIZE - 1)


def test_the_nearest_spare_is_taken_and_none_of_another_size(tmp_path: Path) -> None:
    spares = SpareFiles(tmp_path)
    for size in (SIZE * 2, SIZE + 300, SIZE + 100, SIZE // 2):
        (tmp_path / "old").write_bytes(bytes(size))
        spares.give(tmp_path / "old")
    assert spares.count(SIZE) == 2
    sizes = []
    while (path := spares.take(SIZE)) is not None:
        sizes.append(path.stat().st_size)
    assert sizes == [SIZE + 100, SIZE + 300]


def test_no_more_spares_are_kept_than_allowed(tmp_path: Path) -> None:
    spares = SpareFiles(tmp_path)
    for index in range(SPARES_MAX + 3):
        (tmp_path / "old").write_bytes(bytes([index]))
        spares.give(tmp_path / "old")
    assert len(files(tmp_path)) == SPARES_MAX
    assert {(tmp_path / name).read_bytes()[0] for name in files(tmp_path)} == set(range(3, SPARES_MAX + 3))
    spares.give(tmp_path / "gone")
    assert len(files(tmp_path)) == SPARES_MAX


def test_files_are_written_ahead_and_discarded_drafts_come_back(tmp_path: Path) -> None:
    spares = SpareFiles(tmp_path)
    spares.write_ahead(SIZE)
    spares.write_ahead(SIZE)
    assert len(files(tmp_path)) == SPARES_AHEAD
    assert {(tmp_path / name).stat().st_size for name in files(tmp_path)} == {SIZE}
    draft = PayloadDraft(spares, SIZE)
    assert spares.count(SIZE) == SPARES_AHEAD - 1
    draft.discard()
    assert spares.count(SIZE) == SPARES_AHEAD


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("pwrite", "fdatasync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1])
    monkeypatch.setattr(payload_files, "sync_folder", lambda folder: calls.append(f"folder {folder.name}"))
    draft = PayloadDraft(SpareFiles(tmp_path), SIZE)
    draft.write(100, memoryview(bytes(50)))
    assert calls == ["pwrite", "fdatasync"]
    draft.finish(tmp_path / "x", b"h")
    assert calls == ["pwrite", "fdatasync", "pwrite", "fdatasync", "rename", f"folder {tmp_path.name}"]


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_what_the_disk_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spares = SpareFiles(tmp_path)
    draft = PayloadDraft(spares, SIZE)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(StorageError, match="disk is full"):
        draft.write(0, memoryview(bytes(10)))
    with pytest.raises(StorageError, match="disk is full"):
        draft.finish(tmp_path / "x", b"h")
    monkeypatch.undo()
    draft.discard()
    assert not (tmp_path / "x").exists()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    spares.take(SIZE)
    with pytest.raises(StorageError, match="disk is full"):
        spares.write_ahead(SIZE)
    with pytest.raises(StorageError, match="disk is full"):
        PayloadDraft(spares, SIZE)


def test_a_disk_that_becomes_read_only_breaks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel remounts a disk that fails: writes are refused, and so is the removal of what they left."""
    spares = SpareFiles(tmp_path)
    draft = PayloadDraft(spares, SIZE)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("pwrite", "fdatasync", "fsync", "writev", "posix_fallocate"):
        monkeypatch.setattr(os, name, refuse)
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    for write in (
        lambda: draft.finish(tmp_path / "x", b"h"),
        lambda: spares.write_ahead(SIZE),
        lambda: PayloadDraft(spares, SIZE),
        lambda: replace_file(tmp_path / "y", [b"y"]),
        lambda: write_final(tmp_path, {"a": np.zeros(3, np.float32)}),
    ):
        with pytest.raises(StorageError):
            write()
    draft.discard()


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:499], at))
    draft = PayloadDraft(SpareFiles(tmp_path), SIZE)
    body = os.urandom(SIZE)
    draft.write(0, memoryview(body))
    draft.finish(tmp_path / "x", body[:1])
    assert (tmp_path / "x").read_bytes() == body


def test_the_store_reads_what_was_drafted_and_reuses_what_it_prunes(tmp_path: Path) -> None:
    store = RegionStore(tmp_path / "region")
    store.load(1)
    rng = np.random.default_rng(5)
    digests = []
    for version in range(1, 5):
        parts = [rng.integers(0, 256, size, np.uint8) for size in (1001, 2003)]
        digests.append(payload_digest([stripe_digest(part) for part in parts]))
        draft = store.draft_payload(3004)
        draft.write(store.content_offset(1001), parts[1].data)
        draft.write(store.content_offset(0), parts[0].data)
        store.finish_payload(draft, 0, version, digests[-1], [1001, 2003])
        assert store.read_payload(0, version, digests[-1]).tobytes() == b"".join(part.tobytes() for part in parts)
        theta = np.zeros(3, np.float32)
        store.store_state(0, version, theta, theta, b"d" * 32)
    payloads = tmp_path / "region" / "payloads"
    before = {path.stat().st_ino for path in payloads.glob("f000-v*")}
    store.prune(0, 5)
    assert len(list(payloads.glob("spare-*"))) == 3
    store.finish_payload(store.draft_payload(3004), 0, 9, b"n" * 32, [3004])
    (new,) = payloads.glob("f000-v00000009-*")
    assert new.stat().st_ino in before
    assert new.stat().st_size == HEADER_BYTES + 3004
    store.close()
    again = RegionStore(tmp_path / "region")
    again.load(1)
    assert not list(payloads.glob("*.tmp")), "spares go when the folder is opened"
    again.close()
