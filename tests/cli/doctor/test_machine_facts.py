"""Probes against this machine, where a fact can be planted or known."""

from __future__ import annotations

import errno
import fcntl
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_node.cli.doctor import machine_facts as probes
from diloco_node.cli.doctor import peer_probes


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
    assert probes.memfd_error() == ""
    assert probes.is_clock_synced() in (True, False, None)
    assert (probes.available_memory() or 1) > 0


@pytest.mark.parametrize(("state", "is_synced"), [(0, True), (1, True), (5, False), (-1, None)])
def test_the_kernel_s_word_on_its_clock(monkeypatch: pytest.MonkeyPatch, state: int, is_synced: bool | None) -> None:
    monkeypatch.setattr(probes.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=lambda _: state))
    assert probes.is_clock_synced() is is_synced


def test_modules_that_are_missing_are_named() -> None:
    missing = probes.missing_modules(["json", "no_such_module", "json.no_such", "no_such.deep"])
    assert list(missing) == ["no_such_module", "json.no_such", "no_such.deep"]


def test_who_has_connected_to_a_port_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert peer_probes.inbound_hosts(port) == frozenset()
        with socket.create_connection(("127.0.0.1", port)):
            assert peer_probes.inbound_hosts(port) == frozenset({"127.0.0.1"})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("0100007F", "127.0.0.1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
        ("00000000000000000000000001000000", "::1"),
    ],
)
def test_addresses_as_the_kernel_lists_them(text: str, host: str) -> None:
    assert peer_probes.plain_host(text) == host


def test_hosts_of_an_address() -> None:
    assert peer_probes.hosts_of("127.0.0.1:7400") == frozenset({"127.0.0.1"})
    assert peer_probes.hosts_of("[::1]:7400") == frozenset({"::1"})
    assert peer_probes.hosts_of("no-such-host.invalid:7400") == frozenset()


def test_a_control_group_counts_with_those_above_it_and_without_the_files_it_may_drop(tmp_path: Path) -> None:
    def group(name: str, limit: str, usage: int, inactive: int) -> None:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 7\n")

    assert probes.group_memory(tmp_path, "/") is None
    group("pod", "1000", 990, 900)
    group("pod/own", "max", 500, 0)
    assert probes.group_memory(tmp_path, "/pod/own") == 910
    assert probes.group_memory(tmp_path, "/") is None
    group("pod/own", "600", 500, 0)
    assert probes.group_memory(tmp_path, "/pod/own") == 100
    group("pod/own", "600", 700, 0)
    assert probes.group_memory(tmp_path, "/pod/own") == 0
    (tmp_path / "pod" / "own" / "memory.stat").write_text("damaged")
    assert probes.group_memory(tmp_path, "/pod/own") == 910
