import os
import socket
from pathlib import Path

from diloco_node.unix_sockets import ancestors_of, peer_uid, socket_path


def test_long_state_folder_gets_a_short_socket_path(tmp_path: Path) -> None:
    short = socket_path(tmp_path, "a.sock")
    assert short == tmp_path.resolve() / "a.sock"
    deep = tmp_path / ("x" * 120)
    path = socket_path(deep, "a.sock")
    assert path == socket_path(deep, "a.sock")
    assert path != socket_path(tmp_path / ("y" * 120), "a.sock")
    assert len(str(path)) <= 107
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    path.unlink()
    path.parent.rmdir()


def test_peer_uid_is_the_kernels_word() -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        assert peer_uid(one) == os.getuid()


def test_a_process_has_its_parent_before_older_ancestors() -> None:
    pids = ancestors_of(os.getpid())
    assert (pids or [1])[0] == os.getppid()
    assert pids == [pid for pid in dict.fromkeys(pids) if pid > 1]
    assert ancestors_of(pids[0] if pids else 1) == pids[1:]
    assert ancestors_of(2**22 + 1) == []
