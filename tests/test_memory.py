import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_node.errors import BindError, LearnerError, StorageError
from diloco_node.memory import (
    MemoryStore,
    Trained,
    TrainedCounter,
    allot_incarnation,
    peer_uid,
    read_trained,
    request_area,
    socket_path,
)

SIZE = 3 * mmap.PAGESIZE + 17


def test_same_name_and_size_is_the_same_memory(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        one = request_area(tmp_path / "m.sock", "inbox", SIZE)
        two = request_area(tmp_path / "m.sock", "inbox", SIZE)
        other = request_area(tmp_path / "m.sock", "outbox", SIZE)
        assert len(one) == len(two) == SIZE
        one[SIZE - 1] = 77
        assert two[SIZE - 1] == 77
        assert other[SIZE - 1] == 0


def test_area_outlives_who_mapped_it(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        area = request_area(tmp_path / "m.sock", "inbox", SIZE)
        area[0:5] = b"theta"
        area.close()
        assert request_area(tmp_path / "m.sock", "inbox", SIZE)[0:5] == b"theta"


def test_another_size_replaces_the_area_and_old_mappings_stay(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        old = request_area(tmp_path / "m.sock", "inbox", SIZE)
        old[0] = 1
        new = request_area(tmp_path / "m.sock", "inbox", SIZE + 1)
        assert (old[0], new[0]) == (1, 0)
        assert request_area(tmp_path / "m.sock", "inbox", SIZE)[0] == 0  # and back again is new as well


def test_area_can_not_be_shrunk_under_a_mapping(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "m.sock"), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(tmp_path / "m.sock"))
        connection.send(b'{"name": "inbox", "size_bytes": 4096}')
        _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fds[0], 0)
        finally:
            os.close(fds[0])


@pytest.mark.parametrize(
    ("name", "size_bytes"), [("../inbox", 1), ("", 1), ("Inbox", 1), ("inbox", 0), ("inbox", -1), ("inbox", 1 << 43)]
)
def test_wrong_request_is_refused_and_the_store_lives_on(tmp_path: Path, name: str, size_bytes: int) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        with pytest.raises(LearnerError, match="refused"):
            request_area(tmp_path / "m.sock", name, size_bytes)
        assert len(request_area(tmp_path / "m.sock", "inbox", 5)) == 5


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[]", b'{"name": 3}', b'{"name": "a", "size_bytes": "x"}'])
def test_garbage_does_not_stop_the_store(tmp_path: Path, garbage: bytes) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(tmp_path / "m.sock"))
            connection.send(garbage)
            connection.recv(4096)
        assert len(request_area(tmp_path / "m.sock", "inbox", 5)) == 5


def test_number_of_areas_is_bounded(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "m.sock"):
        for number in range(16):
            request_area(tmp_path / "m.sock", f"area-{number}", 1)
        with pytest.raises(LearnerError, match="16 areas"):
            request_area(tmp_path / "m.sock", "one-more", 1)


def test_no_store_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="is the supervisor alive"):
        request_area(tmp_path / "m.sock", "inbox", 1)


def test_stale_socket_file_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.write_text("")
    with MemoryStore(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(request_area(path, "inbox", 1)) == 1
    assert not path.exists()


def test_path_that_can_not_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="no-such-folder"):
        MemoryStore(tmp_path / "no-such-folder" / "m.sock")


def test_closing_closes_every_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with MemoryStore(tmp_path / "m.sock"):
        request_area(tmp_path / "m.sock", "inbox", 1).close()
        request_area(tmp_path / "m.sock", "inbox", 2).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_long_state_folder_gets_a_short_socket_path(tmp_path: Path) -> None:
    short = socket_path(tmp_path, "a.sock")
    assert short == tmp_path.resolve() / "a.sock"
    deep = tmp_path / ("x" * 120)
    path = socket_path(deep, "a.sock")
    assert path == socket_path(deep, "a.sock")
    assert path != socket_path(tmp_path / ("y" * 120), "a.sock")
    assert len(str(path)) <= 107
    with MemoryStore(path):
        assert len(request_area(path, "inbox", 1)) == 1
    path.parent.rmdir()


def test_peer_uid_is_the_kernels_word() -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        assert peer_uid(one) == os.getuid()


# ---- trained counters ------------------------------------------------------------------------------------------------


def test_incarnations_grow_and_start_at_zero(tmp_path: Path) -> None:
    assert [allot_incarnation(tmp_path) for _ in range(11)] == list(range(1, 12))  # 10 sorts after 9
    assert read_trained(tmp_path)[9:] == (Trained(10, 0, 0), Trained(11, 0, 0))
    assert (tmp_path / "learner" / "trained-11").stat().st_size == 16


def test_lost_disk_does_not_reuse_a_number_of_the_ledger(tmp_path: Path) -> None:
    assert allot_incarnation(tmp_path, incarnation_min=7) == 7
    assert allot_incarnation(tmp_path, incarnation_min=3) == 8


def test_counter_survives_sigkill(tmp_path: Path) -> None:
    number = allot_incarnation(tmp_path)
    code = (
        "import os, pathlib, sys\nfrom diloco_node.memory import TrainedCounter\n"
        "counter = TrainedCounter(pathlib.Path(sys.argv[1]), int(sys.argv[2]))\n"
        "for step in range(1, 1001): counter.write(step, step * 2**33)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(number)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_trained(tmp_path) == (Trained(number, 1000, 1000 * 2**33),)
    raw = (tmp_path / "learner" / f"trained-{number}").read_bytes()
    assert raw == (1000).to_bytes(8, "little") + (1000 * 2**33).to_bytes(8, "little")


def test_counter_that_was_not_allotted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="same state folder"):
        TrainedCounter(tmp_path, 1)


def test_damaged_counter_is_named(tmp_path: Path) -> None:
    number = allot_incarnation(tmp_path)
    (tmp_path / "learner" / f"trained-{number}").write_bytes(b"short")
    with pytest.raises(StorageError, match="trained-1 has 5 B"):
        read_trained(tmp_path)
