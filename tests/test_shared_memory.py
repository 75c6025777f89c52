import mmap
import os
import socket
from pathlib import Path

import pytest

from diloco_node.errors import BindError, LearnerError
from diloco_node.shared_memory import CONTENTS_BYTES_MAX, MemoryStore, request_area

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


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff", b"[]", b"[" * 4096, b'{"name": 3}', b'{"name": "a", "size_bytes": "x"}']
)
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


def test_stale_socket_file_is_replaced_and_that_of_the_next_store_stays(tmp_path: Path) -> None:
    """The folder may be emptied, and taken by another region's start, while this one still ends."""
    path = tmp_path / "m.sock"
    path.write_text("")
    with MemoryStore(path) as before:
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(request_area(path, "inbox", 1)) == 1
        path.unlink()
        with MemoryStore(path):
            before.close()
            assert len(request_area(path, "inbox", 1)) == 1


def test_path_that_can_not_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="no-such-folder"):
        MemoryStore(tmp_path / "no-such-folder" / "m.sock")


def test_closing_closes_every_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with MemoryStore(tmp_path / "m.sock"):
        request_area(tmp_path / "m.sock", "inbox", 1).close()
        request_area(tmp_path / "m.sock", "inbox", 2).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_store_shows_what_a_small_area_holds(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "memory.sock") as store:
        assert store.contents("counters") is None
        with request_area(store.path, "counters", 5000) as area:
            area[:3] = b"abc"
            assert store.contents("counters") == b"abc" + bytes(CONTENTS_BYTES_MAX - 3)
