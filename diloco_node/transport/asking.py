"""Ask what listens at a peer's address who it is, without linking: one call, one hello in each direction.

The hello has the role `measuring`. A daemon of a run answers it with its own hello and refuses, so its links, and those
of the asker's own daemon, stay as they are. With the answer comes the peer's wall clock, in the metadata of the call.
A hello with the role `joining` is answered with the run as well (`run_shown`), also to a region that is no member yet.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509

from diloco_node.config.urls import host_and_port
from diloco_node.errors import IdentityError, LinkLost, PeerCertificateRefused
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.certificates import NODE_CERT, NODE_KEY, Identity, names_of
from diloco_node.transport.streams import DialedStream, Metadata, dial
from diloco_node.wire.envelope import Hello, Lane, LinkRole, decode_hello, encode_hello
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from diloco_node.wire.run_shown import RunShown, decode_run_shown

CLOCK_KEY: Final = "diloco-clock"
_CLOCK_DIGITS_MAX: Final = 20
TRIES: Final = 10
_WORDS_LOST: Final = "Internal error from Core"
"""The error that grpc.aio gives, instead of the peer's words, when the peer refused before our hello was out. Another
try may be slower than the peer, or faster."""


_DATES: Final = {
    "certificate has expired": "the certificate there has ended by this machine's clock: set that if it is wrong, else "
    "renew the member's with `diloco-node certs renew`",
    "certificate is not yet valid": "the certificate there begins later than this machine's clock says: set that",
}
"""OpenSSL's words for the dates of a peer's certificate, and ours."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of the process at a peer's address.

    Attributes:
        hello: its own. rtt_s: between our hello and its.
        clock_ahead_s: its wall clock beside ours, good to half a round trip; None: it did not say.
        run: to a region that joins.
    """

    hello: Hello
    rtt_s: float
    clock_ahead_s: float | None
    run: RunShown | None = None


def clock_metadata() -> Metadata:
    """Our wall clock, as an asker gets it; it is shown, and decides nothing."""
    return ((CLOCK_KEY, str(time.time_ns())),)  # noqa: TID251 - the wall clock itself is what was asked for


def region_at(folder: Path, identity: Identity, address: str, *, timeout_s: float) -> tuple[str, str]:
    """The region whose certificate is shown at an address, and our own host on the way. folder: of `identity`. Raises
    LinkLost: no region listens there. PeerCertificateRefused: one of another authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the name in the certificate is what is asked for
    context.load_verify_locations(cadata=identity.ca_pem.decode())
    context.load_cert_chain(folder / NODE_CERT, folder / NODE_KEY)
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(host_and_port(address), timeout_s) as sock, context.wrap_socket(sock) as tls:
            encoding, own_host = tls.getpeercert(binary_form=True), str(tls.getsockname()[0])
        region, _ = names_of(x509.load_der_x509_certificate(encoding or b""), address)
    except ssl.SSLCertVerificationError as error:
        raise PeerCertificateRefused(
            _DATES.get(error.verify_message)
            or f"the certificate there is of another authority than that of run {identity.run_id} "
            f"({error.verify_message}): give the address of one of its regions, or take the folder of that other run"
        ) from None
    except (ssl.SSLError, IdentityError) as error:
        reason = getattr(error, "reason", None) or error
        raise LinkLost(f"what listens there is no region of diloco-node ({reason}): give a member's address") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LinkLost(f"nobody answers there ({reason}): give the address of a member that runs") from None
    return region, own_host


async def ask_peer(
    identity: Identity, peer: str, address: str, *, timeout_s: float, role: LinkRole = LinkRole.MEASURING
) -> PeerAnswer:
    """Dial a peer and hear its hello.

    Raises LinkLost: nothing there takes our certificate and speaks the protocol in time; says at which stage it failed.
    PeerIncompatible, ProtocolViolation: it answers with another version's hello, or with none.
    """
    for _ in range(TRIES - 1):
        try:
            return await _ask_once(identity, peer, address, timeout_s, role)
        except LinkLost as error:
            if _WORDS_LOST not in str(error):
                raise
    return await _ask_once(identity, peer, address, timeout_s, role)


async def _ask_once(identity: Identity, peer: str, address: str, timeout_s: float, role: LinkRole) -> PeerAnswer:
    stream = await dial(identity, peer, address, Lane.CONTROL, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(stream, identity, role)
    except TimeoutError:
        raise LinkLost(f"{peer} at {address}: connected, but no hello within {timeout_s:.0f} s") from None
    finally:
        await stream.aclose()


async def _exchange(stream: DialedStream, identity: Identity, role: LinkRole) -> PeerAnswer:
    ours = Hello(
        PROTOCOL_VERSION,
        identity.run_id,
        founding_digest="",
        region=identity.region,
        settings_digest="",
        manifest_digest="",
        instance_id=bytes(16),
        lane=Lane.CONTROL,
        dial=0,
        role=role,
    )
    asked_s = time.monotonic()
    await stream.write(encode_hello(ours))
    peer_hello = decode_hello(await stream.read())
    rtt_s = time.monotonic() - asked_s
    now_ns = time.time_ns()  # noqa: TID251 - compared with the peer's wall clock
    clock = await stream.peer_metadata(CLOCK_KEY)
    is_clock = clock.isascii() and clock.isdigit() and len(clock) <= _CLOCK_DIGITS_MAX
    ahead_s = (int(clock) - now_ns) / NS_PER_S + rtt_s / 2 if is_clock else None
    is_told = role is LinkRole.JOINING and peer_hello.role is LinkRole.TRAINING
    return PeerAnswer(peer_hello, rtt_s, ahead_s, decode_run_shown(await stream.read()) if is_told else None)
