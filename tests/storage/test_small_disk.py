"""A real file system that fills up, and one that turns read-only, under a store that is open: a tmpfs of its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_node import atomic_file
from diloco_node.errors import StorageError
from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import FRAGMENTS, chain, digest_of, load

DISK_BYTES = 2**20
BODY = bytes(8192)


def mount(*words: str) -> None:
    if subprocess.run(["mount", *words], check=False, capture_output=True).returncode:
        pytest.skip("*** A FULL AND A READ-ONLY DISK ARE NOT TESTED: nothing can be mounted here ***")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where the small disk is mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(place)], check=True)


def fill(path: Path) -> None:
    """Take all that is left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, os.statvfs(path).f_bavail * os.statvfs(path).f_frsize)
    os.close(descriptor)


def sizes(folder: Path) -> dict[str, int]:
    """All files, also those that a write has left half done."""
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_or_read_only_disk_takes_no_half_file_and_all_of_it_later(disk: Path) -> None:
    folder = disk / "region"
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(400)  # more than fits into the pages that the log has
    try:
        store.persist(1, "a", 0, entries[:1])
        store.store_payload(0, 1, digest_of(BODY), [BODY])
        before = sizes(folder)
        fill(disk / "filler")
        with pytest.raises(StorageError, match=r"ledger.log.*free some space"):
            store.persist(1, "a", 0, entries[1:])
        with pytest.raises(StorageError, match=r"payloads.*free some space"):
            store.store_payload(0, 2, digest_of(BODY), [BODY])
        assert sizes(folder) == before
        (disk / "filler").unlink()
        store.persist(1, "a", 0, entries[1:])
        before = sizes(folder)
        # What is open stays so: the kernel refuses to make a disk read-only that is being written to.
        mount("--bind", str(folder / "payloads"), str(folder / "payloads"))
        mount("-o", "remount,bind,ro", str(folder / "payloads"))
        with pytest.raises(StorageError, match=r"payloads.*read-only"):
            store.store_payload(0, 2, digest_of(BODY), [BODY])
        subprocess.run(["umount", str(folder / "payloads")], check=True)
        assert sizes(folder) == before
        store.store_payload(0, 2, digest_of(BODY), [BODY])
    finally:
        store.close()
    recovered = load(folder)
    assert recovered.entries == entries
    assert recovered.payloads == {(0, version, digest_of(BODY)) for version in (1, 2)}


def test_what_has_no_room_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a state would take what is left, and the ledger, which needs little, could not be written."""
    free = 2 * len(BODY)  # and a header is written, too
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    store = RegionStore(tmp_path)
    store.load(FRAGMENTS)
    try:
        with monkeypatch.context() as context:
            context.setattr(atomic_file, "replace_file", lambda *_, **__: pytest.fail("it was begun"))
            with pytest.raises(StorageError, match=r"payloads.*free some space"):
                store.store_payload(0, 1, digest_of(BODY), [BODY, BODY])
        free *= 2
        store.store_payload(0, 1, digest_of(BODY), [BODY, BODY])
    finally:
        store.close()
