"""Links to all other regions over HTTP/2 (grpc.aio), mutual TLS, one port.

Per pair of regions there is one connection for control (small messages, never behind bulk) and one or more for bulk
(transfers), with one bidirectional call each. The certificate says which region is at the other end. `streams` knows
gRPC, `link` keeps a pair connected, `outbound`, `bundle` and `inbound` carry the bytes, `kernel/` counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final

import structlog

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.errors import (
    ConfigError,
    IdentityError,
    LinkLost,
    PayloadCorrupt,
    PeerError,
    PeerIncompatible,
    ProtocolViolation,
    RateExceeded,
    SupersededError,
)
from diloco_node.transport.asking import clock_metadata
from diloco_node.transport.certificates import Identity, tls_name
from diloco_node.transport.credentials import Credentials
from diloco_node.transport.inbound import TransportHandler
from diloco_node.transport.intake import MESSAGES_PER_S
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.kernel.wire_meter import PeerTraffic, WireMeter
from diloco_node.transport.link import PeerLink
from diloco_node.transport.link_status import PeerStatus
from diloco_node.transport.listener import Listener
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.peer_links import PeerLinks
from diloco_node.transport.peer_session import LinkEnvironment, LinkTimes
from diloco_node.transport.quarantine import Quarantine
from diloco_node.transport.streams import AcceptedStream, Caller, DuplicateInstance, RedundantDial, caller, refuse
from diloco_node.wire.envelope import (
    TRANSFER_CONNECTIONS_MAX,
    Hello,
    Lane,
    LinkRole,
    ModelsDiffer,
    check_hello,
    decode_hello,
    encode_control,
    encode_hello,
)
from diloco_node.wire.message_tables import BULK_LANES, PROTOCOL_VERSION, BudgetLane, ControlMessage, TransferHeader
from diloco_node.wire.run_shown import RunShown, encode_run_shown

_log = structlog.get_logger(part="transport")

GIVE_WAY_S: Final = 2.0
"""How long a measurement waits for rounds and recovery on other links, each time."""

HANDSHAKES_MAX: Final = 32
"""Accepted calls that have not said hello yet."""

STRANGERS_MAX: Final = 4
"""With so many, one of a region that is no member has no turn: it may be about to join, or a thief."""

REJECTIONS_MAX: Final = 1024
"""Different (peer, reason) that are counted; names come from certificates of the run, so this is never reached."""

UNKNOWN_PEER: Final = "unknown"
"""In `rejections`, for what nobody can tell whose fault it was."""


class GrpcTransport:
    """Mutual TLS links to the other regions of a run. All methods are called on the event loop.

    Args:
        region: our name. run_id, settings_digest, founding_digest, manifest_digest, settings, model, role: see `Hello`.
        identity: from `load_identity`. listen: host and port; port 0 takes a free one, see `port`.
        peers: the other regions, each with `host:port`, or None where we can't dial.
        handler: gets what arrives. executor: threads for compression and decoding.
        is_advertised: the others know our address. If not, we dial at once instead of giving them the first turn.
        times: deadlines. seed: of the jitter between dials. budget: see `Pacer.set_plan`.
        connections: for bulk to each peer that we dial; None: as many as a link is worth (`pacing.link_stats`).
        on_superseded: called once, when most of the peers are linked with a newer process that has our certificate.
        messages_per_s: what one peer may send of one kind of message (`intake.messages_per_s`).
        show_run: the run, for a region of its authority that asks to join.

    Raises ConfigError: we are among the peers, or there can't be so many connections. IdentityError: the certificate is
    for another region or run.
    """

    def __init__(
        self,
        *,
        region: str,
        run_id: str,
        settings_digest: str,
        manifest_digest: str,
        identity: Identity,
        listen: tuple[str, int],
        peers: Mapping[str, str | None],
        handler: TransportHandler,
        executor: Executor,
        is_advertised: bool = True,
        times: LinkTimes | None = None,
        seed: int = 0,
        budget: BudgetPlan = BudgetPlan(),  # noqa: B008 - frozen
        connections: int | None = None,
        on_superseded: Callable[[SupersededError], None] | None = None,
        role: LinkRole = LinkRole.TRAINING,
        messages_per_s: int = MESSAGES_PER_S,
        founding_digest: str = "",
        settings: tuple[str, ...] = (),
        model: bytes = b"",
        show_run: Callable[[], RunShown] | None = None,
    ) -> None:
        if connections is not None and not 1 <= connections <= TRANSFER_CONNECTIONS_MAX:
            raise ConfigError(f"{connections} bulk connections: 1 to {TRANSFER_CONNECTIONS_MAX}")
        if region in peers:
            raise ConfigError(f"{region} is among its own peers")
        if (identity.region, identity.run_id) != (region, run_id):
            raise IdentityError(f"the certificate is for {identity}, this node is {tls_name(region, run_id)}")
        hello = Hello(
            PROTOCOL_VERSION,
            run_id,
            founding_digest,
            region,
            settings_digest,
            manifest_digest,
            new_instance_id(time.time_ns()),  # noqa: TID251 - only between two at once
            Lane.CONTROL,
            0,
            role=role,
            settings=settings,
            model=model,
        )
        self.credentials = Credentials(identity)
        # What to bind; `_port` is the port that was bound, 0 before.
        self._listen = listen
        self._times = times or LinkTimes()
        self._show_run = show_run
        # The kernel's counters of all links, and what they may send by them.
        self.meter = WireMeter()
        self.pacer = Pacer(peers, meter=self.meter, send=self.send)
        self.pacer.set_plan(budget)
        self._env = LinkEnvironment(
            hello,
            self.credentials,
            handler,
            executor,
            self._times,
            is_advertised,
            self.meter,
            self.pacer,
            self.pacer.target_connections if connections is None else lambda _peer: connections,
            self.reject,
            self.link_superseded,
            self.quarantine_reason,
            messages_per_s,
        )
        self._quarantine = Quarantine(peers)
        self._peers = PeerLinks(peers, self._env, self._quarantine, seed=seed)
        self.on_superseded = on_superseded
        # Peers that refuse us because of a newer process of ours; a link that comes up takes its peer out.
        self._superseded_by: set[str] = set()
        # A link for each peer, and a listener: from `start` on.
        self.links = self._peers.links
        self.listener: Listener | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # Incoming calls whose hello has not come yet, at most HANDSHAKES_MAX.
        self._handshakes = 0
        self.port = 0
        # The last message and its frame: what goes to all regions is encoded once.
        self._encoded: tuple[ControlMessage | None, bytes] = (None, b"")
        # Transfers of rounds and recovery under way; `_quiet` is set when the last one ends.
        self._urgent = 0
        self._quiet = asyncio.Event()
        self.rejections: Counter[tuple[str, str]] = Counter()
        # By peer how its model differs; its handler forgets it when a link comes up.
        self.other_models: dict[str, str] = {}

    def begin_run(self, settings: tuple[str, ...]) -> None:
        """Greet as a region whose ledger holds all settings but these, "name=value" each."""
        self._env.hello = replace(self._env.hello, founding_digest="", settings=settings)

    async def start(self) -> None:
        """Bind the port and begin to dial. Raises BindError, IdentityError."""
        host, port = self._listen
        listener = Listener(
            lambda: self.credentials.identity,
            host,
            port,
            self._serve,
            handshake_s=self._times.handshake_s,
            on_lost=self.listener_lost,
        )
        await listener.start()
        self.listener, self.port = listener, listener.port
        self._peers.start(self._spawn)
        self._spawn(listener.run(), "listener")
        self._spawn(self.pacer.run(), "wire meter")
        _log.info("listening", region=self._env.hello.region, address=host, port=self.port)

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_report)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Close all links; pending transfers fail with LinkLost. May be called twice."""
        tasks, self._tasks = list(self._tasks), set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.stop()
        listener, self.listener = self.listener, None
        if listener is not None:
            await listener.stop()
        self.pacer.close()

    def send(self, peer: str, message: ControlMessage) -> bool:
        """Queue a control message; False if it was dropped, for the link is down or its queue is full."""
        if message is not self._encoded[0]:
            self._encoded = (message, encode_control(message))
        return self._link(peer).send(self._encoded[1])

    async def transfer(self, peer: str, header: TransferHeader, body: memoryview) -> None:
        """Stream a body in chunks (zstd where it pays). Returns when the last chunk is handed to the link.

        Within the budget, rounds go before recovery, and those of one lane in the order of `outbound`. The body must
        not change until this returns, raises or is cancelled.

        Raises LinkLost: the link is down, went down on the way, or was too slow.
        """
        is_measurement = BULK_LANES[type(header)] is BudgetLane.MEASUREMENT
        if not is_measurement:
            self._urgent += 1
            self._quiet.clear()
        try:
            await self._link(peer).outbound.transfer(header, body.cast("B") if body.nbytes else memoryview(b""))
        finally:
            if not is_measurement:
                self._urgent -= 1
                if not self._urgent:
                    self._quiet.set()

    def traffic(self) -> dict[str, PeerTraffic]:
        """Wire bytes per peer since start, as of a second ago at most."""
        return {peer: self.pacer.traffic(peer) for peer in self.links}

    async def give_way(self) -> None:
        """Before each transfer of a measurement: wait while rounds or recovery are on their way to any peer.

        On one link, and within a budget, their lanes go first anyway; without a budget only this keeps a measurement on
        one link from taking the line from rounds on another. Not for ever: after `GIVE_WAY_S` one transfer may go.
        """
        if self._urgent and self.pacer.status()["egress_bytes_per_s"] is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_WAY_S):
                    await self._quiet.wait()

    def tcp(self, peer: str, *, is_now: bool = False) -> TcpCounters | None:
        """Return TCP's counters of the link to a peer, as of now, or of a second ago at most; None where the kernel has
        none."""
        if is_now:
            self.meter.sample()
        return self.meter.tcp(peer)

    def budget_status(self) -> dict[str, Any]:
        """Return ceilings, demand and use, per peer and lane; see `Pacer.status`."""
        status = self.pacer.status()
        return status | {
            "peers": {peer: row for peer, row in status["peers"].items() if peer not in self._peers.former}
        }

    def peer_status(self) -> dict[str, PeerStatus]:
        """Return the state of each link, and why it is down if it is."""
        return {peer: link.status() for peer, link in self.links.items()}

    def reject(self, peer: str, error: PeerError) -> None:
        """Count what a peer did wrong, and log it; the log holds back what repeats itself (`daemon.logs.PeerLines`)."""
        if isinstance(error, ModelsDiffer) and peer in self.links:
            self.other_models[peer] = str(error)
        key = (peer, _reason(error))
        if key not in self.rejections and len(self.rejections) >= REJECTIONS_MAX:
            return
        self.rejections[key] += 1
        _log.warning("rejected", peer=peer, reason=key[1], error=str(error), count=self.rejections[key])
        # No honest peer of this version sends that. Another run or version is a mistake of people, and no strike.
        is_strike = isinstance(error, (ProtocolViolation, PayloadCorrupt))
        if is_strike and self._quarantine.strike(peer, str(error), now_ns=time.monotonic_ns()):
            _log.error("quarantined", peer=peer, reason=self.quarantine_reason(peer))
            if peer in self.links:
                self.links[peer].drop(self.quarantine_reason(peer))

    def quarantine_reason(self, peer: str) -> str:
        """Why a peer is shut out now, and for how long; empty when it is not."""
        return self._quarantine.describe(peer, now_ns=time.monotonic_ns())

    def expel(self, regions: frozenset[str]) -> None:
        """Close the links of these peers, and let none of them link before a later call leaves it out."""
        news, self._quarantine.expelled = regions - self._quarantine.expelled, regions
        for peer in sorted(news & self.links.keys()):
            self.links[peer].drop(self.quarantine_reason(peer))

    @property
    def addresses(self) -> dict[str, str | None]:
        """Where each peer listens; None where that is not known."""
        return {peer: address for peer, address in self._peers.addresses.items() if peer not in self._peers.former}

    def follow(
        self, addresses: Mapping[str, str | None], former: Collection[str] = (), *, messages_per_s: int | None = None
    ) -> None:
        """Have these peers from now on; see `PeerLinks.follow`."""
        self._peers.follow(addresses, former, messages_per_s=messages_per_s)

    async def renew(self, identity: Identity) -> dict[str, PeerError]:
        """Use another identity of this region from now on; see `PeerLinks.renew`."""
        self.credentials.identity = identity
        return await self._peers.renew()

    def lift_quarantine(self, peer: str) -> bool:
        """Forget what a peer did; it may link again. Returns whether it was shut out or had strikes."""
        return self._quarantine.lift(peer)

    def listener_lost(self) -> None:
        """Some peer has found a way to have gRPC close our port; who it was gRPC does not tell."""
        key = (UNKNOWN_PEER, "listener")
        self.rejections[key] += 1
        reason = "gRPC closed the port: it is opened again"
        _log.error("listener closed", peer=UNKNOWN_PEER, reason=reason, count=self.rejections[key])

    def link_superseded(self, peer: str, error: PeerError | None) -> None:
        """One peer's word is not enough: it could be broken, or captured. With one peer only, nobody can confirm it."""
        if error is None:
            self._superseded_by.discard(peer)
            return
        self._superseded_by.add(peer)
        if self.on_superseded is not None and 2 * len(self._superseded_by) > max(2, len(self.addresses)):
            on_superseded, self.on_superseded = self.on_superseded, None
            on_superseded(
                SupersededError(
                    f"a newer process of {self._env.hello.region} runs, with the same certificate: {error}. If it is "
                    "not meant to, stop that one and start this one again; each region needs a certificate and a "
                    "state folder of its own"
                )
            )

    def _link(self, peer: str) -> PeerLink:
        link = self.links.get(peer)
        if link is None:
            raise ValueError(f"{peer} is not a peer of {self._env.hello.region}, or the transport has not started")
        return link

    async def _serve(self, lane: Lane, context: Any) -> None:
        """Carry one accepted call to its end."""
        peer_caller = caller(context)
        stream = AcceptedStream(context, peer=peer_caller.region)
        try:
            link, hello = await self._greet(lane, peer_caller, stream)
            why = await link.accept(hello, stream)
        except RedundantDial as error:
            await refuse(context, error)
        except PeerError as error:
            if not isinstance(error, LinkLost) or isinstance(error, DuplicateInstance):
                self.reject(peer_caller.region, error)
            await refuse(context, error)
        else:
            if why is not None:
                await refuse(context, why)

    async def _greet(self, lane: Lane, peer_caller: Caller, stream: AcceptedStream) -> tuple[PeerLink, Hello]:
        """Find the link of the caller, and check that we belong together. Raises PeerError."""
        region, link = peer_caller.region, self._link_of(peer_caller, stream)
        self._handshakes += 1
        try:
            async with asyncio.timeout(self._times.hello_s):
                hello = await self._hear(region, link, lane, stream)
        except TimeoutError:
            raise LinkLost(f"{region}: no hello within {self._times.hello_s:.0f} s") from None
        finally:
            self._handshakes -= 1
        if link is None:
            raise PeerIncompatible(f"{region} is no member that {self._env.hello.region} knows of yet")
        self.meter.assign(region, peer_caller.address, is_lasting=False, is_bulk=lane is Lane.BULK)
        return link, hello

    def _link_of(self, peer_caller: Caller, stream: AcceptedStream) -> PeerLink | None:
        """The link of a caller by its certificate; None: it may want to join. Raises PeerError: it is not let in."""
        region, run_id = peer_caller.region, self._env.hello.run_id
        link = self.links.get(region)
        if peer_caller.tls_name != tls_name(region, run_id) or (link is None and self._show_run is None):
            raise PeerIncompatible(f"{region!a} ({peer_caller.tls_name!a}) is not a region of run {run_id}")
        stream.certificate = self.credentials.take(region, peer_caller.certificate)
        if why := self.quarantine_reason(region):
            raise LinkLost(f"{region} is {why} by {self._env.hello.region}; its operator can lift that")
        if self._handshakes >= (STRANGERS_MAX if link is None else HANDSHAKES_MAX):
            raise LinkLost(f"{self._handshakes} calls wait for a hello already")
        return link

    async def _hear(self, region: str, link: PeerLink | None, lane: Lane, stream: AcceptedStream) -> Hello:
        """Take the hello of a caller, and show it the run if it asks for that. Raises PeerError: we don't match."""
        hello = decode_hello(await stream.read())
        connection = hello.connection if lane is Lane.BULK else 0
        ours = replace(self._env.hello, lane=lane, dial=hello.dial, connection=connection)
        if hello.role is LinkRole.JOINING and self._show_run is not None:
            await _answer_joiner(ours, stream, self._show_run)
            raise LinkLost(f"{region} was shown the run")
        if link is None:
            return hello
        try:
            check_hello(ours, hello, certificate_region=region)
        except PeerIncompatible as error:
            await stream.send_metadata(clock_metadata())
            await stream.write(encode_hello(ours))  # so that the other side can say what differs, too
            if hello.role is not ours.role:
                # A person asks (`doctor`, `measure`): nothing is wrong with the peer.
                raise LinkLost(str(error)) from None
            link.turned_away(error)
            raise
        return hello


async def _answer_joiner(ours: Hello, stream: AcceptedStream, show_run: Callable[[], RunShown]) -> None:
    """Show the run to a region that asks to join. Raises LinkLost: it has settings that are too long to be told."""
    try:
        frame = encode_run_shown(show_run())
    except ValueError as error:
        raise LinkLost(f"the settings of this run can't be told ({error}): copy run.toml from a region") from None
    await stream.send_metadata(clock_metadata())
    await stream.write(encode_hello(ours))
    await stream.write(frame)


def _report(task: asyncio.Task[Any]) -> None:
    """These tasks end by cancellation only; anything else is a fault of ours that must be seen."""
    if not task.cancelled() and task.exception() is not None:
        context = {"message": f"{task.get_name()} ended", "exception": task.exception()}
        task.get_loop().call_exception_handler(context)


def new_instance_id(now_ns: int) -> bytes:
    """16 bytes that no other process has; greater than those of a process that started earlier, by its clock."""
    return now_ns.to_bytes(8, "big") + secrets.token_bytes(8)


def _reason(error: PeerError) -> str:
    """A short word for counters."""
    if isinstance(error, DuplicateInstance):
        return "superseded"
    if "identity_mismatch" in str(error):
        return "identity_mismatch"
    reasons: tuple[tuple[type[PeerError], str], ...] = (
        (PeerIncompatible, "incompatible"),
        (PayloadCorrupt, "corrupt"),
        (ProtocolViolation, "protocol"),
        (RateExceeded, "rate"),
    )
    return next((reason for kind, reason in reasons if isinstance(error, kind)), "other")
