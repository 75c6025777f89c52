"""Round trips and rates inside an emulation, measured without the program: as ping does it, and by TCP transfers.

One process opens sockets in every region's namespace (a socket stays where it was opened) and waits for all of them.
The figures show whether the emulation keeps its file, so neither uses anything the emulation counts.
"""

import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from diloco_node.config.units import Rate
from diloco_node.errors import DilocoError
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.topology import Pair, Topology
from diloco_node.lab.wan.tun import inside
from diloco_node.numeric import NS_PER_S

PINGS: Final = 15
PING_GAP_S: Final = 0.02
PING_DEADLINE_S: Final = 2.0
RATE_SECONDS: Final = 0.6
WINDOW_NS: Final = 50_000_000
WINDOWS_MIN: Final = 4
SLOW_START_TRIPS: Final = 12
CHUNK_BYTES: Final = 1 << 20
PORT: Final = 7399

WIRE_PER_PAYLOAD: Final = 1500 / 1448
"""IP packets of 1,500 bytes carry 1,448: 20 of IP and 32 of TCP with timestamps."""

_ECHO: Final = struct.Struct("!BBHHH")
_STAMP: Final = struct.Struct("=qq")
_SO_TIMESTAMPNS: Final = 35
_TCP_WINDOW_CLAMP: Final = 10
_ZEROS: Final = b"\0" * CHUNK_BYTES


def rtt_ns_of(topology: Topology, source: str, target: str) -> int:
    """There and back, without queues."""
    return topology.paths[source, target].delay_ns + topology.paths[target, source].delay_ns


def rate_of(topology: Topology, source: str, target: str) -> Rate:
    """Of a pair when nothing else is sent: the slowest part of the way."""
    rates = [topology.region(source).egress, topology.region(target).ingress, topology.paths[source, target].rate]
    return min(rate for rate in rates if rate is not None)


def ping(
    places: dict[str, Place],
    pairs: Sequence[Pair],
    *,
    count: int = PINGS,
    gap_s: float = PING_GAP_S,
    deadline_s: float = PING_DEADLINE_S,
) -> dict[Pair, list[int]]:
    """ICMP echoes over pairs of regions, all pairs at the same time.

    Args:
        count: per pair. gap_s: between two of a pair. deadline_s: how long to wait for answers after the last.

    Returns:
        Per pair the round trips that came back, in ns. The kernel's stamp of arrival is used, so that a busy processor
        adds only what lies between our clock and the sending.
    """
    sockets: dict[socket.socket, tuple[Pair, int]] = {}
    try:
        for number, (source, target) in enumerate(pairs):
            sockets[_echo_socket(places[source], places[target])] = ((source, target), number)
        return _ping(sockets, count, gap_s, deadline_s)
    except OSError as error:
        raise DilocoError(f"pings can't be sent in the namespaces ({error.strerror})") from error
    finally:
        for sock in sockets:
            sock.close()


def _echo_socket(source: Place, target: Place) -> socket.socket:
    with inside(source.namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    sock.connect((target.address, 0))
    return sock


def _ping(
    sockets: dict[socket.socket, tuple[Pair, int]], count: int, gap_s: float, deadline_s: float
) -> dict[Pair, list[int]]:
    rtts: dict[Pair, list[int]] = {pair: [] for pair, _ in sockets.values()}
    # Others on the machine may ping too; an identifier of ours alone tells our answers.
    identifier = os.getpid() & 0xFFFF
    sent_ns: dict[tuple[int, int], int] = {}
    for sequence in range(count):
        for sock, (_, number) in sockets.items():
            echo = _echo(identifier, sequence, number)
            sent_ns[number, sequence] = time.time_ns()
            try:
                sock.send(echo)
            except OSError:
                # A device that is down: no answer, like any loss.
                continue
        _collect(sockets, rtts, sent_ns, identifier, until_s=time.monotonic() + gap_s)
    ends_s = time.monotonic() + deadline_s
    while any(len(trips) < count for trips in rtts.values()) and time.monotonic() < ends_s:
        _collect(sockets, rtts, sent_ns, identifier, until_s=min(ends_s, time.monotonic() + 0.1))
    return rtts


def _collect(
    sockets: dict[socket.socket, tuple[Pair, int]],
    rtts: dict[Pair, list[int]],
    sent_ns: dict[tuple[int, int], int],
    identifier: int,
    *,
    until_s: float,
) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        ready, _, _ = select.select(list(sockets), [], [], left_s)
        for sock in ready:
            pair, number = sockets[sock]
            answer = _read_answer(sock, identifier, number)
            if answer is not None and (number, answer[0]) in sent_ns:
                rtts[pair].append(answer[1] - sent_ns.pop((number, answer[0])))


def _echo(identifier: int, sequence: int, number: int) -> bytes:
    body = struct.pack("!I", number) + bytes(52)
    total = sum(struct.unpack("!32H", _ECHO.pack(8, 0, 0, identifier, sequence) + body + b""))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return _ECHO.pack(8, 0, checksum, identifier, sequence) + body


def _read_answer(sock: socket.socket, identifier: int, number: int) -> tuple[int, int] | None:
    """(sequence, when it arrived) of an answer to one of our echoes; None for anything else."""
    try:
        data, extras, _, _ = sock.recvmsg(2048, 256)
    except OSError:
        return None
    at = (data[0] & 0x0F) * 4 if data else 0
    if len(data) < at + _ECHO.size + 4:
        return None
    kind, _, _, identifier_read, sequence = _ECHO.unpack_from(data, at)
    if kind != 0 or identifier_read != identifier or struct.unpack_from("!I", data, at + _ECHO.size)[0] != number:
        return None
    for level, option, value in extras:
        if level == socket.SOL_SOCKET and option == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _STAMP.unpack_from(value)
            return sequence, seconds * NS_PER_S + nanoseconds
    return sequence, time.time_ns()


def transfer(topology: Topology, source: Place, target: Place, *, seconds: float = RATE_SECONDS) -> int | None:
    """What one TCP connection moves when the link is full, in bytes per second on the wire.

    The receiver's window holds it at one round trip and half of the queue, so that it never overflows. Measured when
    its slow start is over, at the receiver, without copying the bytes out of the kernel.

    Returns:
        None when the connection failed or moved too little to tell.
    """
    trip_ns = rtt_ns_of(topology, source.region, target.region)
    expected = rate_of(topology, source.region, target.region).bytes_per_s
    window = max(65_536, expected * (trip_ns + topology.queue_ns // 2) // NS_PER_S)
    skip_ns = SLOW_START_TRIPS * trip_ns + 50_000_000
    # (when, bytes so far) at the receiving end: written by its thread alone, read when that has ended.
    marks: list[tuple[int, int]] = []
    try:
        with _listener(target, window) as listener, _sender(source) as sender:
            thread = threading.Thread(
                target=_receive, args=(listener, marks, window, skip_ns + int(seconds * NS_PER_S)), daemon=True
            )
            thread.start()
            try:
                sender.connect((target.address, PORT))
                _send(sender, time.monotonic() + skip_ns / NS_PER_S + seconds)
            except OSError:
                pass
            thread.join(PING_DEADLINE_S + skip_ns / NS_PER_S + seconds)
    except OSError as error:
        raise DilocoError(f"no connection from {source.namespace} to {target.namespace} ({error.strerror})") from error
    return _rate(marks, skip_ns)


def _listener(target: Place, window: int) -> socket.socket:
    with inside(target.namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, 33, 4 * window + CHUNK_BYTES)  # SO_RCVBUFFORCE: beyond the system's limit
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_WINDOW_CLAMP, window)
    sock.settimeout(PING_DEADLINE_S)
    sock.bind((target.address, PORT))
    sock.listen(1)
    return sock


def _sender(source: Place) -> socket.socket:
    with inside(source.namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(PING_DEADLINE_S)
    sock.bind((source.address, 0))
    return sock


def _send(sock: socket.socket, until_s: float) -> None:
    # Sending ends with the time, or when the receiver has seen enough and closes.
    while time.monotonic() < until_s:
        sock.send(_ZEROS)


def _receive(listener: socket.socket, marks: list[tuple[int, int]], window: int, for_ns: int) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    scratch = bytearray(CHUNK_BYTES)
    with connection:
        connection.settimeout(PING_DEADLINE_S)
        total, started_ns = 0, 0
        while True:
            try:
                # MSG_TRUNC on TCP: the kernel drops the bytes and only counts them.
                count = connection.recv_into(scratch, CHUNK_BYTES, socket.MSG_TRUNC)
            except OSError:
                return
            now_ns = time.monotonic_ns()
            started_ns = started_ns or now_ns
            if count == 0 or now_ns - started_ns > for_ns:
                return
            total += count
            # Again and again: the kernel widens it whenever it learns how much memory a segment takes.
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_WINDOW_CLAMP, window)
            marks.append((now_ns, total))


def _rate(marks: Sequence[tuple[int, int]], skip_ns: int) -> int | None:
    """Median over windows of 50 ms, so that a moment in which a busy machine ran neither end does not count."""
    windows: dict[int, int] = {}
    before = 0
    for at_ns, total in marks:
        number = (at_ns - marks[0][0] - skip_ns) // WINDOW_NS
        windows[number] = windows.get(number, 0) + total - before
        before = total
    # The first windows are the start of the connection, the last one is not whole.
    steady = [windows.get(number, 0) for number in range(max(windows, default=0))]
    if len(steady) < WINDOWS_MIN:
        return None
    return int(statistics.median(steady) * NS_PER_S / WINDOW_NS * WIRE_PER_PAYLOAD)
