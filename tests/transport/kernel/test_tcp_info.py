"""transport/kernel/tcp_info.py: what the kernel counts of TCP sockets, and what is set on them."""

import socket
import struct
from pathlib import Path

import pytest

from diloco_node.transport.kernel import tcp_info
from diloco_node.transport.kernel.tcp_info import counters_from, plain_ip, read_sockets
from tests.kit.socket_kit import REMOTE, counters_of, send


def test_payload_bytes_are_exact_and_both_ends_agree(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    send(near, far, b"x" * 1_000_001)
    out, into = counters_of(near), counters_of(far)
    assert out.remote == far.getsockname()
    assert out.bytes_sent - out.bytes_retransmitted == into.bytes_received == 1_000_001
    assert out.segments_sent > 0
    assert 0 < out.data_segments_sent <= out.segments_sent
    assert out.bytes_acked <= 1_000_001 + 1, "the SYN counts, too"
    assert 0 < out.rtt_min_us < 60_000_000, "microseconds"


def test_reading_closes_and_changes_nothing(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(20):
        read_sockets()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    send(near, far, b"still works")


def test_other_descriptors_are_passed_over() -> None:
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        assert listening.getsockname() not in [found.local for found in read_sockets()]


def test_a_dual_stack_socket_shows_its_ipv4_address() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 in this kernel")
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening,
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])) as near,
    ):
        far, _ = listening.accept()
        with far:
            assert [found.remote for found in read_sockets() if found.local[1] == listening.getsockname()[1]] == [
                near.getsockname()
            ]


def test_plain_ip() -> None:
    assert plain_ip("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_ip("10.0.0.1") == "10.0.0.1"
    assert plain_ip("fe80::1") == "fe80::1"


def test_a_socket_that_has_been_replaced_is_not_paced(connection: tuple[socket.socket, socket.socket]) -> None:
    near, _ = connection
    found = counters_of(near)
    assert not tcp_info.pace_socket(found.fd, found.cookie + 1, 1)
    assert near.getsockopt(socket.SOL_SOCKET, tcp_info.SO_MAX_PACING_RATE, 8) != tcp_info.PACE.pack(1)
    assert tcp_info.pace_socket(found.fd, found.cookie, 1_000_000)


@pytest.mark.parametrize(
    ("behind_gaps", "sent", "again", "expected"),
    [(0, 9000, 0, 5000), (2, 9000, 1000, 7896), (3, 9000, 1000, 8000), (3, 4000, 0, 5000)],
)
def test_what_arrived_behind_a_lost_segment_counts_as_carried(
    behind_gaps: int, sent: int, again: int, expected: int
) -> None:
    info = bytearray(216)
    struct.pack_into("=I", info, 16, 1448)
    struct.pack_into("=I", info, 28, behind_gaps)
    struct.pack_into("=Q", info, 120, 5000)
    struct.pack_into("=QQ", info, 200, sent, again)
    found = counters_from(bytes(info), 1, -1, REMOTE, REMOTE)
    assert found is not None
    assert found.bytes_acked == expected


def test_the_smaller_of_the_two_buffer_limits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = (tmp_path / "tcp_wmem", tmp_path / "tcp_rmem")
    monkeypatch.setattr(tcp_info, "BUFFER_LIMITS", files)
    assert tcp_info.buffer_bytes() == tcp_info.BUFFER_BYTES_USUAL, "the kernel does not tell"
    files[0].write_text("4096\t16384\t9000000\n")
    files[1].write_text("4096\t131072\t8000000\n")
    assert tcp_info.buffer_bytes() == 8_000_000
    files[1].write_text("")
    assert tcp_info.buffer_bytes() == tcp_info.BUFFER_BYTES_USUAL


def test_a_descriptor_that_was_closed_under_us_is_no_error() -> None:
    gone = socket.socket()
    fd = gone.fileno()
    gone.close()
    assert tcp_info.read_socket(fd) is None
    assert not tcp_info.pace_socket(fd, 1, 1_000_000)
