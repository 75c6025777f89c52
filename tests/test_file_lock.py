"""file_lock.py: a lock that is held, and a file system that gives none, in each place that locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from diloco_node.errors import DiskRefused
from diloco_node.file_lock import lock_file
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import allot_incarnation, save_trained
from diloco_node.supervisor.supervisor import run_supervisor
from tests.kit.supervisor_kit import WAIT, spec


def test_a_lock_holds_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a+b") as first, path.open("a+b") as second:
        lock_file(first.fileno(), path)
        with pytest.raises(BlockingIOError):
            lock_file(second.fileno(), path)
        first.close()
        lock_file(second.fileno(), path, waits=True)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS, errno.EINTR, errno.EIO])
def test_a_file_system_without_locks_is_no_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    incarnation = allot_incarnation(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for lock in (
        lambda: run_supervisor(spec(tmp_path, WAIT, None)),
        lambda: RegionStore(tmp_path),
        lambda: save_trained(tmp_path, incarnation, None),
    ):
        with pytest.raises(DiskRefused) as refusal:
            lock()
        assert f"can't be locked ({os.strerror(code)}): the file system of this folder gives no locks" in str(
            refusal.value
        )
        assert "--state-dir" in str(refusal.value)
