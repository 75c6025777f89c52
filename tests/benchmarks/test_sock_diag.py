"""benchmarks/sock_diag.py: the kernel's socket table says the same as our own descriptors."""

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import sock_diag
from sock_diag import parse, read_sockets_to, split

from diloco_node.transport.kernel.tcp_info import read_sockets

OURS = os.getpid()
HAS_DIAG = True
try:
    sock_diag._ask(socket.AF_INET, 1)
except OSError:  # pragma: no cover - a sandbox
    HAS_DIAG = False
needs_diag = pytest.mark.skipif(not HAS_DIAG, reason="this kernel has no NETLINK_SOCK_DIAG: its table was NOT checked")


def send(near: socket.socket, far: socket.socket, size: int) -> None:
    thread = threading.Thread(target=near.sendall, args=(b"x" * size,))
    thread.start()
    while size:
        size -= len(far.recv(min(size, 2**16)))
    thread.join()


@needs_diag
def test_the_table_says_what_the_descriptor_says(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    send(near, far, 1_000_001)
    (out,) = read_sockets_to([near.getpeername()], pid=OURS)
    (into,) = read_sockets_to([far.getpeername()], pid=OURS)
    by_descriptor = {one.fd: one for one in read_sockets()}
    for found in (out, into):
        other = by_descriptor[found.fd]
        assert (found.cookie, found.local, found.remote) == (other.cookie, other.local, other.remote)
    assert (out.fd, into.fd) == (near.fileno(), far.fileno())
    assert out.bytes_sent - out.bytes_retransmitted == into.bytes_received == 1_000_001
    assert out.data_segments_sent > 0


@needs_diag
def test_only_sockets_to_the_addresses_asked_for(connection: tuple[socket.socket, socket.socket]) -> None:
    near, _ = connection
    host, port = near.getpeername()
    assert [one.fd for one in read_sockets_to([(host, port)], pid=OURS)] == [near.fileno()]
    assert read_sockets_to([("127.0.0.2", port)], pid=OURS) == []
    assert read_sockets_to([], pid=OURS) == []


@needs_diag
def test_a_dual_stack_socket_shows_its_plain_address() -> None:
    with socket.socket(socket.AF_INET6) as listening:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("::", 0))
        listening.listen()
        near = socket.create_connection(("127.0.0.1", listening.getsockname()[1]))
        far, _ = listening.accept()
        with near, far:
            (found,) = read_sockets_to([near.getsockname()], pid=OURS)
            assert found.fd == far.fileno()
            assert found.remote == near.getsockname()


@needs_diag
def test_a_socket_of_another_process_is_seen_by_its_id() -> None:
    code = (
        "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); s.sendall(b'y'*5000); input()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        child = subprocess.Popen([sys.executable, "-c", code, str(address[1])], stdin=subprocess.PIPE)
        far, _ = listening.accept()
        with far:
            left = 5000
            while left:
                left -= len(far.recv(left))
            assert read_sockets_to([address], pid=OURS) == [], "it is not ours"
            (found,) = read_sockets_to([address], pid=child.pid)
            assert found.bytes_sent - found.bytes_retransmitted == 5000
            assert found.local == far.getpeername()
        child.communicate(b"\n", timeout=120)
    assert read_sockets_to([address], pid=child.pid) == []


def test_without_netlink_nothing_is_known(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = connection

    def refuse(*_: object) -> list[bytes]:
        raise PermissionError("seccomp")

    monkeypatch.setattr(sock_diag, "_ask", refuse)
    assert read_sockets_to([near.getpeername()], pid=OURS) == []


@given(st.binary(max_size=200))
def test_what_is_no_netlink_is_an_oserror_and_ends(data: bytes) -> None:
    try:
        messages, _ = split(data)
    except OSError:
        return
    assert sum(len(one) for one in messages) <= len(data)


def test_a_refusal_of_the_kernel_is_an_oserror() -> None:
    with pytest.raises(OSError, match="does not tell"):
        split(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -1))
    assert split(struct.pack("=IHHII", 16, 3, 0, 1, 0)) == ([], True)


@given(st.binary(min_size=0, max_size=100))
def test_attributes_that_make_no_sense_are_nothing(data: bytes) -> None:
    assert parse(bytes([socket.AF_INET]) + bytes(71) + data, 3) is None
