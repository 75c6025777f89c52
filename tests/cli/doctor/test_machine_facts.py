"""Probes against this machine, where a fact can be planted or known."""

import errno
import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_node.cli.doctor import machine_facts as probes


def test_a_folder_that_is_not_there_yet_is_looked_at_from_above(tmp_path: Path) -> None:
    assert probes.nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert probes.nearest_folder(tmp_path) == tmp_path


def test_room_and_use_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(bytes(1234))
    free, error = probes.free_bytes(tmp_path)
    assert (probes.used_bytes(tmp_path), error) == (1234, "")
    assert free is not None
    assert free > 0
    assert probes.free_bytes(Path("/proc"))[0] is None
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_fsyncs_are_timed_and_leave_nothing(tmp_path: Path) -> None:
    times = probes.fsync_seconds(tmp_path)
    assert 1 <= len(times) <= probes.FSYNCS
    assert min(times) > 0
    assert list(tmp_path.iterdir()) == []
    assert probes.fsync_seconds(Path("/proc")) == []


def test_locks_and_sockets_are_tried_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (probes.lock_error(tmp_path), probes.bind_error(tmp_path)) == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert "No such file or directory" in probes.bind_error(tmp_path / "none")
    long = tmp_path / ("long" * 25)
    long.mkdir()
    assert "AF_UNIX path too long" in probes.bind_error(long)
    assert list(long.iterdir()) == []
    assert probes.lock_error(Path("/proc")) == "", "what can't be written is another check's"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "(No locks available): the file system of this folder gives no locks" in probes.lock_error(tmp_path)
    assert list(tmp_path.iterdir()) == [long]


def test_what_the_kernel_does_not_have_is_none() -> None:
    assert probes.sysctl_last("no/such/setting") is None
    assert probes.is_clock_synced() in (True, False, None)
    assert (probes.available_memory() or 1) > 0


@pytest.mark.parametrize(("state", "is_synced"), [(0, True), (1, True), (5, False), (-1, None)])
def test_the_kernel_s_word_on_its_clock(monkeypatch: pytest.MonkeyPatch, state: int, is_synced: bool | None) -> None:
    monkeypatch.setattr(probes.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=lambda _: state))
    assert probes.is_clock_synced() is is_synced


def test_modules_that_are_missing_are_named() -> None:
    missing = probes.missing_modules(["json", "no_such_module", "json.no_such", "no_such.deep"])
    assert list(missing) == ["no_such_module", "json.no_such", "no_such.deep"]
