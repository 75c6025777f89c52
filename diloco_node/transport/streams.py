"""A bidirectional gRPC call as a stream of frames, the same from either end; options and errors of grpc.aio.

Everything that knows a peculiarity of gRPC is in this module. It turns every failure into `LinkLost` with a text for
people: what was tried, what the other side answered.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

# gRPC prints handshake failures of every port scan to stderr, past our log. Set before its C library starts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc import aio

from diloco_node.errors import BindError, IdentityError, LinkLost, PeerCertificateRefused, PeerError
from diloco_node.transport.addresses import Endpoint, first_success, resolve
from diloco_node.transport.certificates import Certificate, Identity, tls_name
from diloco_node.transport.credentials import CHALLENGE_KEY, new_challenge, pem_to_der
from diloco_node.wire.envelope import FRAME_BYTES_MAX, Lane

METHOD_PREFIX: Final = "/diloco.Region/"

_STREAMS_PER_CONNECTION: Final = 2
"""A connection carries one call. Further calls of a peer have to wait."""

ACCEPTED_CONNECTIONS_MAX: Final = 1024
"""Accepted at once, whoever makes them: all connections of 64 regions, and hundreds in a handshake. More are closed."""

_KEEPALIVE_MS: Final = 10_000
"""HTTP/2's own pings: a line that carries nothing any more is noticed by gRPC, too."""

_READ_BYTES_MAX: Final = 2**20
"""Read from a socket at once. More makes a transfer no faster."""

_COMMON_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_metadata_size", 16 * 2**10),
    ("grpc.absolute_max_metadata_size", 16 * 2**10),
    # Windows grow with the measured bandwidth-delay product: 5 Gbit/s x 40 ms are 25 MB.
    ("grpc.http2.bdp_probe", 1),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # Else it grows with each flood: 25 s of pings took 583 MiB.
    ("grpc.experimental.tcp_max_read_buffer_size", _READ_BYTES_MAX),
]

_SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second daemon on the same port would get half of the connections
    ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
    # No limit on pings. gRPC 1.85 does not close a connection while they go on. Each one over the limit adds an error
    # to a list and copies it: 50 us a ping instead of 0.1 us. So 0.3 MB a second took a whole core.
    ("grpc.http2.max_ping_strikes", 0),
    # Every connection of a peer carries a call; one without is only a descriptor that is held.
    ("grpc.max_connection_idle_ms", 10_000),
]

_CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else both lanes would share one TCP connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.min_reconnect_backoff_ms", 600_000),  # redialing is our own loop's business
    ("grpc.initial_reconnect_backoff_ms", 600_000),
    ("grpc.max_reconnect_backoff_ms", 600_000),
]

Server: TypeAlias = aio.Server
Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Keys and values that are sent beside the frames of a call. A receiver passes over a key that it does not know."""

Serve: TypeAlias = Callable[[Any, Any], Awaitable[None]]


class RedundantDial(LinkLost):
    """The peer prefers the link that the other side is making at this moment. Nothing is wrong."""


class DuplicateInstance(LinkLost):
    """Two live processes have one certificate: the one that was started first gets this error."""


_REFUSALS: Final = {grpc.StatusCode.ALREADY_EXISTS: RedundantDial, grpc.StatusCode.ABORTED: DuplicateInstance}
"""By the status with which an accepting side ends the call."""


class DialedStream:
    """The dialing side of a stream; owns its channel. It has a reader task, a writer task, and `close` from anywhere.

    endpoint: of the peer that has answered; None where nobody asks. challenge: ours, that it answers (`credentials`).
    """

    def __init__(
        self,
        channel: aio.Channel,
        call: Any,
        *,
        peer: str,
        address: str,
        endpoint: Endpoint | None = None,
        challenge: str = "",
    ) -> None:
        self.endpoint = endpoint
        # The peer's, once it was proved; None where nobody asks.
        self.certificate: Certificate | None = None
        self.challenge = challenge
        self._channel = channel
        self._call = call
        self._peer = peer
        self._address = address

    async def read(self) -> bytes:
        """The next frame. Raises LinkLost at the end of the stream."""
        try:
            frame = await self._call.read()
        except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._link_lost(error) from None
        if frame is aio.EOF:
            raise await self._link_lost(None)
        return frame

    async def write(self, frame: bytes) -> None:
        """Hand a frame to gRPC; waits while its windows are full. Raises LinkLost."""
        try:
            await self._call.write(frame)
        except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._link_lost(error) from None

    async def peer_metadata(self, key: str) -> str:
        """A value of the accepting side's metadata, or ""; call it when a frame has come, for it comes before."""
        return _metadata_value(await self._call.initial_metadata(), key)

    async def _link_lost(self, error: BaseException | None) -> LinkLost:
        raise_if_cancelled()
        if isinstance(error, aio.AioRpcError):
            code, details = error.code(), error.details() or ""
        elif self._call.done():
            code, details = await self._call.code(), await self._call.details() or ""
        else:
            code, details = grpc.StatusCode.OK, ""
        if code is grpc.StatusCode.OK:
            details = "the peer ended the stream"
        if code in _REFUSALS:
            return _REFUSALS[code](f"{self._peer} at {self._address}: {details}")
        return LinkLost(f"{self._peer} at {self._address}: {explain(details or str(code))}")

    def close(self, error: PeerError | None = None) -> None:
        """End both directions now; what was not sent yet is lost."""
        del error  # a call can only be cancelled, not refused
        self._call.cancel()

    async def aclose(self) -> None:
        """Close the connection under the stream, too."""
        self._call.cancel()
        await self._channel.close()


class AcceptedStream:
    """The accepting side of a stream. Its RPC ends when the handler that waits on `until_closed` returns."""

    def __init__(self, context: Any, *, peer: str) -> None:
        # The peer's, once it was found good.
        self.certificate: Certificate | None = None
        self._context = context
        self._peer = peer
        self._closed = asyncio.Event()
        self._error: PeerError | None = None

    async def read(self) -> bytes:
        """See `DialedStream.read`."""
        try:
            frame = await self._context.read()
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkLost(f"{self._peer}: the stream broke off ({error})") from None
        if frame is aio.EOF:
            raise LinkLost(f"{self._peer}: the peer ended the stream")
        return frame

    async def write(self, frame: bytes) -> None:
        """See `DialedStream.write`."""
        try:
            await self._context.write(frame)
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkLost(f"{self._peer}: the stream broke off ({error})") from None

    def peer_metadata(self, key: str) -> str:
        """A value of the dialing side's metadata, or ""."""
        return _metadata_value(self._context.invocation_metadata(), key)

    async def send_metadata(self, metadata: Metadata) -> None:
        """Metadata for the dialing side, before the first frame. Raises LinkLost."""
        try:
            await self._context.send_initial_metadata(metadata)
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkLost(f"{self._peer}: the stream broke off ({error})") from None

    def close(self, error: PeerError | None = None) -> None:
        """See `DialedStream.close`; the peer gets the error."""
        if not self._closed.is_set():
            self._error = error
        self._closed.set()

    async def until_closed(self) -> PeerError | None:
        """Return when somebody called `close`: the error that it was called with."""
        await self._closed.wait()
        return self._error


Stream: TypeAlias = DialedStream | AcceptedStream


@dataclass(frozen=True, slots=True)
class Caller:
    """The other end of an accepted call, by its certificate (DER, empty where TLS tells none) and address, IP and port.

    region, tls_name: empty where the certificate says nothing usable.
    """

    region: str
    tls_name: str
    address: tuple[str, int]
    certificate: bytes


def caller(context: Any) -> Caller:
    """Return the other end: from the certificate that TLS checked, never from a message."""
    auth: dict[str, list[bytes]] = dict(context.auth_context())
    common = auth.get("x509_common_name", [])
    dns = auth.get("x509_subject_alternative_name", [])
    pem = auth.get("x509_pem_cert", [])
    _, _, host_port = unquote(context.peer()).partition(":")
    host, _, port = host_port.rpartition(":")
    return Caller(
        common[0].decode("utf-8", "replace") if len(common) == 1 else "",
        dns[0].decode("utf-8", "replace") if len(dns) == 1 else "",
        (host.strip("[]"), int(port) if port.isdigit() else 0),
        pem_to_der(pem[0]) if len(pem) == 1 else b"",
    )


async def refuse(context: Any, error: PeerError) -> None:
    """End an accepted call with the reason, for the dialing side's log. Never returns normally."""
    codes = (code for code, kind in _REFUSALS.items() if isinstance(error, kind))
    code = next(codes, grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(code, str(error)[:1024].encode("ascii", "backslashreplace").decode())


def make_server(
    identity: Callable[[], Identity], address: str, serve: Serve, *, handshake_s: float
) -> tuple[Server, int]:
    """A server with mutual TLS on `address`, not started yet, and the port it got.

    Args:
        identity: ours now; asked at each handshake, by a thread of gRPC's. address: `host:port`.
        serve: called with (lane, context) for each call; it ends with it.
        handshake_s: connections that have not finished TLS by then are closed.

    Raises BindError: the address can't be taken. IdentityError: TLS does not accept our certificate.
    """
    handshake = ("grpc.server_handshake_timeout_ms", max(1, int(handshake_s * 1000)))
    connections = ("grpc.max_allowed_incoming_connections", connections_max())
    server = aio.server(options=[*_SERVER_OPTIONS, handshake, connections])
    server.add_generic_rpc_handlers((_Calls(serve),))
    try:
        port = server.add_secure_port(address, _server_credentials(identity))
    except ValueError as error:
        raise IdentityError(f"TLS refuses our certificate for {identity().region}: {error}") from error
    except RuntimeError:
        port = 0
    if not port:
        raise BindError(
            f"can't listen on {address}: the port is taken, or the address is not this machine's. "
            "Stop what listens there (`ss -ltnp` shows it), or set another port for this region."
        )
    return server, port


def _server_credentials(identity: Callable[[], Identity]) -> grpc.ServerCredentials:
    """Have gRPC take another identity from the next handshake on."""
    current = identity()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        before, current = current, identity()
        return None if current is before else _configuration(current)

    return grpc.dynamic_ssl_server_credentials(_configuration(current), changed, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key_pem, identity.cert_pem)], root_certificates=identity.ca_pem
    )


def connections_max() -> int:
    """How many connections may come in: at most half of this process's descriptors. A flood of them must not keep a
    payload from the disk."""
    return min(ACCEPTED_CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Maps the methods of the lanes to `serve`; gRPC refuses any other."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._lanes = {METHOD_PREFIX + lane: lane for lane in Lane}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Part of gRPC's interface."""
        lane = self._lanes.get(handler_call_details.method)
        if lane is None:
            return None

        async def serve(_: Any, context: Any) -> None:
            await self._serve(lane, context)

        return grpc.stream_stream_rpc_method_handler(serve)


async def dial(
    identity: Identity, peer: str, address: str, lane: Lane, *, timeout_s: float, metadata: Metadata = ()
) -> DialedStream:
    """Connect to a peer, at any address of its name, and open the call of one lane. timeout_s: without resolving the
    name. Raises LinkLost: names the peer, the address, the stage that failed, and the time it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    challenge = new_challenge()
    metadata = (*metadata, (CHALLENGE_KEY, challenge))
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
    options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", tls_name(peer, identity.run_id))]

    async def attempt(endpoint: Endpoint) -> DialedStream:
        channel = aio.secure_channel(endpoint.target, credentials, options=options)
        try:
            await _until_ready(channel)
            call = _open(channel, lane, metadata)
            return DialedStream(channel, call, peer=peer, address=address, endpoint=endpoint, challenge=challenge)
        except BaseException:
            await channel.close()
            raise_if_cancelled()
            raise

    try:
        attempts = {str(endpoint): partial(attempt, endpoint) for endpoint in await resolve(address)}
        async with asyncio.timeout(timeout_s):
            return await first_success(attempts, discard=DialedStream.aclose)
    except (TimeoutError, LinkLost) as error:
        reason = "no answer to connect or TLS handshake" if isinstance(error, TimeoutError) else str(error)
        elapsed_s = loop.time() - started_s
        kind = PeerCertificateRefused if "certificate" in reason else LinkLost
        raise kind(f"{peer} at {address}: {reason} (connecting, after {elapsed_s:.1f} s)") from None


def _open(channel: aio.Channel, lane: Lane, metadata: Metadata = ()) -> Any:
    return channel.stream_stream(METHOD_PREFIX + lane)(metadata=metadata, wait_for_ready=False)


def _metadata_value(metadata: Iterable[tuple[str, Any]] | None, key: str) -> str:
    """A peer's own word: whatever it likes, of at most 16 KiB."""
    value = next((value for name, value in metadata or () if name == key), "")
    return value if isinstance(value, str) else ""


async def _until_ready(channel: aio.Channel) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise LinkLost(explain(await _failure(channel)))
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _failure(channel: aio.Channel) -> str:
    """Why a channel could not connect: gRPC tells only to a call."""
    call = _open(channel, Lane.CONTROL)
    try:
        await call.read()
        return await call.details() or str(await call.code())
    except aio.AioRpcError as error:
        raise_if_cancelled()
        return error.details() or str(error.code())
    finally:
        call.cancel()


def raise_if_cancelled() -> None:
    """Call this before dialing again: gRPC swallows the cancellation of a task that waits for a call's start, and a
    task that goes on is waited for forever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


_EXPLANATIONS: Final = (
    ("Hostname Verification Check failed", "the certificate at this address belongs to another region or run"),
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the peer's certificate has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid",
        "the peer's certificate is not valid yet: check clocks",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "we don't trust the peer's certificate: it was signed by another run's authority"),
    ("Connection refused", "nobody listens there (connection refused)"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    ("HTTP_REQUEST", "what listens there does not speak TLS"),
    ("No route to host", "no route to host"),
    ("Network is unreachable", "network is unreachable"),
    ("DNS resolution failed", "the name can't be resolved"),
    ("Domain name not found", "the name can't be resolved"),
    ("Stream removed (recvmsg:Connection timed out", "the connection timed out: nothing comes through any more"),
    ("Stream removed (", "the connection was closed: the other side has ended, or its machine or a router did it"),
)


def explain(details: str) -> str:
    """gRPC's text for a failure, in words that say what to look at."""
    for pattern, text in _EXPLANATIONS:
        if pattern in details:
            return text
    # TLS 1.3: the dialer's handshake is over before the peer has looked at the dialer's certificate. A refusal then
    # shows as a connection that ends before any HTTP/2 settings came.
    if "failed to connect" in details and ("Socket closed" in details or "Connection reset" in details):
        return (
            "the peer closed the connection after the handshake: it does not trust our certificate, is stopping, or "
            "its clock is wrong"
        )
    return details.replace("\n", " ")[:300]
