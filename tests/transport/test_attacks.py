"""What a client can do to the data port below our messages: TLS and HTTP/2, with and without a certificate of the run.

The listener is a process of its own. While an attack goes on, another region's messages and transfers go both ways;
afterwards tasks and descriptors are back at what they were, and memory is within a bound.
"""

import asyncio
import contextlib
import datetime as dt
import os
import socket
import ssl
import threading
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from http2_attacks import (
    ACK,
    ATTACKS,
    DATA,
    PING,
    PREFACE,
    Attack,
    Progress,
    answering,
    attacking,
    client_context,
    frame,
    message,
    opening,
    settings,
)

from diloco_node.core.messages import Payload, RequestVoteReply
from diloco_node.transport import authority as certs
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import DEADLINE_S, RUN, Mesh, Recorder, end_of, hello_of
from tests.kit.victim import WHOLE, Facts, Victim, victim
from tests.kit.waiting import eventually

pytestmark = pytest.mark.e2e

MEMORY_BYTES_MAX = 256 * 2**20
"""What one peer's attack may cost: windows, frames and queues of its connections, and what the C library keeps."""

UNDER_WAY_BYTES = 2**20
UNDER_WAY_CONNECTIONS = 16
EXCHANGES = 8
OLD_PORT = 1
"""A server that gRPC has closed keeps a descriptor as long as a link goes on over it."""

BODY = os.urandom(2**20)
AT_LEAST = {"cancelled uploads": {"sent_bytes": 5000 * 8100}, "mutated frames": {"closed": 200}}
"""5,000 cancelled calls of 8 kB, of which gRPC hands on few; and connections that end at a frame that is too wrong."""

HANDSHAKES = 300
"""Tries of one who has no certificate, beside those with more to say. They take some two seconds."""

BY_NAME = {attack.name: attack for attack in ATTACKS}


@dataclass
class Exchange:
    """Region a, which is linked with the victim."""

    transport: GrpcTransport
    seen: Recorder
    turns: int = 0

    async def turn(self) -> None:
        """A message there and back, and a transfer that arrives whole."""
        self.turns += 1
        question = RequestVoteReply(self.turns, True, False, b"")
        before = sum(message == WHOLE for _, message in self.seen.messages)
        assert self.transport.send("b", question)
        await self.transport.transfer("b", Payload(0, self.turns, bytes(32)), memoryview(BODY))
        await self.seen.until(lambda: ("b", question) in self.seen.messages)
        await self.seen.until(lambda: sum(message == WHOLE for _, message in self.seen.messages) > before)


@contextlib.asynccontextmanager
async def linked(mesh: Mesh) -> AsyncIterator[tuple[Victim, Exchange]]:
    async with victim(mesh.folder) as listener:
        transport, seen = await mesh.start("a", {"b": f"127.0.0.1:{listener.port}"})
        await seen.until(lambda: seen.is_up.get("b"))
        exchange = Exchange(transport, seen)
        for _ in range(3):
            await exchange.turn()
        yield listener, exchange
        assert seen.changes == [("b", True)], "the other region's link never went down"
        await transport.stop()


async def until_under_way(attack: Attack, progress: Progress) -> None:
    """Until it has sent a lot, or has made as many connections as it makes at once, or several times."""
    wanted = min(attack.connections, UNDER_WAY_CONNECTIONS)
    start = progress.connected, progress.sent_bytes
    await eventually(
        lambda: progress.sent_bytes - start[1] >= UNDER_WAY_BYTES or progress.connected + progress.closed >= wanted
    )


async def under(
    attack: Attack, listener: Victim, exchange: Exchange, identity: Path | None, *, closed: int = 0, sent_bytes: int = 0
) -> Facts:
    """The exchange goes on under an attack, and then everything is as before. What the victim knows in the end.

    Args:
        closed: it goes on at least until the victim has ended so many connections. sent_bytes: and got so much.
    """
    before = await listener.facts()
    memory_bytes = before.memory_bytes
    async with attacking(attack, listener.port, identity) as progress:
        await until_under_way(attack, progress)
        await eventually(lambda: progress.closed >= closed and progress.sent_bytes >= sent_bytes)
        for _ in range(EXCHANGES):
            await exchange.turn()
            memory_bytes = max(memory_bytes, (await listener.facts()).memory_bytes)
    assert memory_bytes - before.memory_bytes < MEMORY_BYTES_MAX
    after = await until_as_before(listener, before)
    assert after.up == ["a"]
    assert after.faults == 0, "an exception of ours that nobody caught"
    return after


async def until_as_before(listener: Victim, before: Facts) -> Facts:
    """Until no task or descriptor is left that was not there. What the victim knows then."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            after = await listener.facts()
            if after.tasks <= before.tasks and after.descriptors <= before.descriptors + OLD_PORT:
                return after
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(", ", "_").replace(" ", "_"))
async def test_the_others_exchange_goes_on_under_an_attack_of_a_member(mesh: Mesh, attack: Attack) -> None:
    async with linked(mesh) as (listener, exchange):
        await under(attack, listener, exchange, mesh.folder / "run" / "c", **AT_LEAST.get(attack.name, {}))


@pytest.mark.parametrize("run", [None, "stranger"])
async def test_who_has_no_certificate_of_the_run_reaches_no_handler(mesh: Mesh, run: str | None) -> None:
    """Whatever it would send, and however often it tries: it is closed in the handshake."""
    identity = mesh.folder / run / "c" if run else None
    async with linked(mesh) as (listener, exchange):
        before = await listener.facts()
        for name in ("rapid reset", "pings", "new connections"):
            closed = HANDSHAKES if name == "new connections" else 0
            after = await under(BY_NAME[name], listener, exchange, identity, closed=closed)
            assert after.calls == before.calls
            assert after.rejections == {}


async def test_a_method_that_is_no_text_does_not_keep_other_regions_out(mesh: Mesh) -> None:
    """Mutated frames have had gRPC close its port, see `transport.listener`: who comes later links all the same."""
    async with linked(mesh) as (listener, exchange):
        await under(BY_NAME["mutated frames"], listener, exchange, mesh.folder / "run" / "c")
        late, seen = await mesh.start("c", {"b": f"127.0.0.1:{listener.port}"})
        await seen.until(lambda: seen.is_up.get("b"))
        await late.stop()


SILENT = 500
OLD_LINK = 2
"""Descriptors of a link that its peer has ended: gRPC closes them some 20 s later, which nobody waits for here."""


async def test_sockets_that_never_begin_tls_are_closed_while_another_region_links(mesh: Mesh) -> None:
    """More than half of what the run's connections may be; the victim's descriptors are its own."""
    async with linked(mesh) as (listener, exchange):
        before = await listener.facts()
        silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(SILENT)]
        late, seen = await mesh.start("c", {"b": f"127.0.0.1:{listener.port}"})
        await seen.until(lambda: seen.is_up.get("b"))
        await exchange.turn()
        await late.stop()
        ended = await asyncio.wait_for(asyncio.gather(*(end_of(reader) for reader, _ in silent)), DEADLINE_S)
        for _, writer in silent:
            writer.close()
        after = await until_as_before(listener, replace(before, descriptors=before.descriptors + OLD_LINK))
        assert len(ended) == SILENT
        assert after.faults == 0
        assert after.rejections == {}


NO_WINDOW = PREFACE + settings(s4=0)


async def test_a_peer_that_never_opens_its_window_holds_nothing_for_long(mesh: Mesh) -> None:
    """Its hello is right, and it answers each PING; but nothing can be sent to it. Its calls end at their deadline,
    those of a dial with one stream and those of a dial with both.
    """
    async with linked(mesh) as (listener, exchange):
        before = await listener.facts()
        over, sockets = threading.Event(), list[ssl.SSLSocket]()

        def greet() -> None:
            for dial_number in range(8):
                for lane in list(e.Lane)[: 1 + dial_number % 2]:
                    plain = socket.create_connection(("127.0.0.1", listener.port), timeout=DEADLINE_S)
                    secure = client_context(mesh.folder / "run" / "c").wrap_socket(plain, server_hostname="region")
                    hello = hello_of("c", lane, dial=dial_number + 1)
                    method = f"/diloco.Region/{lane}".encode()
                    secure.sendall(NO_WINDOW + opening(1, method) + frame(DATA, message(hello), stream=1))
                    sockets.append(secure)

        await asyncio.to_thread(greet)
        threads = [threading.Thread(target=answering, args=(one, over)) for one in sockets]
        for thread in threads:
            thread.start()
        try:
            for _ in range(EXCHANGES):
                await exchange.turn()
            await until_handed_back(listener, before)
        finally:
            over.set()
            for thread in threads:
                thread.join()
            for one in sockets:
                one.close()
        await until_as_before(listener, before)


async def until_handed_back(listener: Victim, before: Facts) -> None:
    """Until our code is done with all calls but those of the link that there was."""
    async with asyncio.timeout(DEADLINE_S):
        while (await listener.facts()).handled > before.handled:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.1)


def handshake(port: int, context: ssl.SSLContext) -> str:
    """What comes of a TLS handshake and a first frame: the protocol that was agreed on, or why there is none."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="region") as secure,
        ):
            secure.sendall(PREFACE + settings())
            # In TLS 1.3 the client is through before the server has looked at its certificate.
            return f"{secure.version()} {secure.selected_alpn_protocol()}" if secure.recv(100) else "closed"
    except (OSError, ValueError) as error:
        return f"refused: {error}"


PINGS = 10


def answered_pings(port: int, context: ssl.SSLContext) -> int:
    """Of PINGS pings without a call, one after the other, those that are answered."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    with plain, context.wrap_socket(plain, server_hostname="region") as secure:
        secure.sendall(PREFACE + settings())
        for done in range(PINGS):
            body = done.to_bytes(8, "big")
            secure.sendall(frame(PING, body))
            data = b""
            while frame(PING, body, flags=ACK) not in data:
                if not (more := secure.recv(65536)):
                    return done
                data += more
    return PINGS


async def test_pings_are_answered_and_never_begin_a_close(mesh: Mesh) -> None:
    """While pings go on, gRPC never gets to the end of a close, and each of them costs more than the one before."""
    b, _ = await mesh.start("b", {"a": None, "c": None})
    context = client_context(mesh.folder / "run" / "c")
    assert await asyncio.to_thread(answered_pings, b.port, context) == PINGS


async def test_nothing_less_than_http_2_over_tls_1_2_is_spoken(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None, "c": None})
    identity = mesh.folder / "run" / "c"
    assert await asyncio.to_thread(handshake, b.port, client_context(identity)) == "TLSv1.3 h2"
    old = client_context(identity)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    other = client_context(identity, alpn="http/1.1")
    for context in (old, other):
        found = await asyncio.to_thread(handshake, b.port, context)
        assert found.startswith(("refused", "closed")), found


def write_dated(run: Path, folder: Path, now: dt.datetime) -> Path:
    """A certificate of region c, signed by the run's own authority as if it were another day."""
    key = ec.generate_private_key(ec.SECP256R1())
    ca_key = serialization.load_pem_private_key((run / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    ca_cert = x509.load_pem_x509_certificate((run / "ca.pem").read_bytes())
    cert = certs.node_certificate(key, "c", RUN, ca_key, ca_cert, now=now)
    folder.mkdir()
    (folder / "node.key").write_bytes(certs.key_pem(key))
    (folder / "node.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    return folder


async def test_a_certificate_that_has_expired_or_is_not_valid_yet_is_refused(mesh: Mesh) -> None:
    """It is right but for its dates."""
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    past = certs.VALID + dt.timedelta(days=10)
    for name, moved in (("today", dt.timedelta()), ("expired", -past), ("not yet", past)):
        identity = write_dated(mesh.folder / "run", mesh.folder / name, dt.datetime.now(dt.UTC) + moved)
        found = await asyncio.to_thread(handshake, b.port, client_context(identity))
        assert found == "TLSv1.3 h2" if name == "today" else found.startswith(("refused", "closed"))
    assert at_b.changes == []
    assert b.rejections == {}
