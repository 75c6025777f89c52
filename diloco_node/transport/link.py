"""The link to one peer: who dials, which of two links wins, and what runs while it is up.

A **session** is one pair of streams (control and bulk), made by one dial of one side, and the further bulk connections
of that side. A **link** is what stays: it has at most one session at a time, and dials again when there is none.

The side with the smaller name dials, if it knows an address; else the other, which also tries when there has been no
session for `fallback_s`. A process that has just started dials once whatever its name is (D-099). Two dials that cross
are resolved the same way on both sides: once the smaller name's hello is on its way its session wins; until then an
incoming one does, and its own dial is given up. In all other cases the newer session replaces the older, for only who
has lost a session makes another one.

The older of two processes with one certificate is refused while the newer is linked and alive. A process that most
of its peers refuse so, for longer than a dead link is taken for alive, ends (`SupersededError`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from diloco_node.backoff import Backoff
from diloco_node.errors import LinkLost, PayloadCorrupt, PeerError, PeerIncompatible, ProtocolViolation
from diloco_node.transport.certificate_proof import answer, hear, lane_metadata
from diloco_node.transport.intake import Intake
from diloco_node.transport.kernel.congestion import METADATA_KEY, CongestionControls, decode_congestion_controls
from diloco_node.transport.link_status import LinkState, PeerStatus
from diloco_node.transport.outbound import BulkOutbound
from diloco_node.transport.peer_session import LinkEnvironment, Session
from diloco_node.transport.streams import (
    AcceptedStream,
    DialedStream,
    DuplicateInstance,
    Metadata,
    RedundantDial,
    dial,
    raise_if_cancelled,
)
from diloco_node.wire.envelope import JOINED_FRAME, TRANSFER_CONNECTIONS_MAX, Hello, Lane, check_joined, encode_hello

REMAKE_PAUSE_MAX_S: Final = 60.0
"""Where a peer does not trust our newest certificate yet, or was busy."""

_log = structlog.get_logger(part="transport")


class PeerLink:
    """Keeps one link up. `run_dialer` in one task; `accept` for each incoming stream.

    address: where the peer listens, None if unknown. seed: of the jitter of the backoff.
    """

    def __init__(self, peer: str, address: str | None, env: LinkEnvironment, *, seed: int) -> None:
        self.peer = peer
        self.address = address
        self.env = env
        # Outlives sessions: a peer gets no fresh allowance by dialing again.
        self.intake = Intake(env.messages_per_s, now_ns=time.monotonic_ns())
        self._random = random.Random(seed)
        # Whether the peer was removed from the run: it is let in to be told so, and dialed only where it can't dial.
        self.is_former = False
        # Decides which of two crossing dials goes on; never changes.
        self._is_smaller = env.hello.region < peer
        # Number of the last dial of this process; all streams of one session carry the dialer's.
        self.dials = 0
        # True from the hello of the dial under way on: from then on it wins, if ours is the smaller name.
        self._is_hello_sent = False
        self._dialing: asyncio.Task[Session] | None = None
        # Streams that came in, by the peer's process and dial, until both lanes of a session are there.
        self.accepted: dict[tuple[bytes, int], dict[Lane, AcceptedStream]] = {}
        # (instance id, dial) of the newest dial of the peer that was let in; an older one is turned away.
        self._newest = (b"", 0)
        # The session that carries messages; None exactly while `_down` is set.
        self.session: Session | None = None
        # The session that was made last; it may wait for the lock while the one before ends.
        self._latest: Session | None = None
        self._session_lock = asyncio.Lock()
        # One of the two is set at any time.
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._down.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        # The peer's, from the metadata of its last call or answer; None until then.
        self._congestion: CongestionControls | None = None
        # The reason why there is no session, for people; empty while there is one.
        self._error = ""
        # When the peer began to refuse us because of a newer process of ours; None while it does not.
        self._refused_since_s: float | None = None
        # When `remake` may be tried again after it has failed, and how long that takes each time.
        self._remake_at_s, self._remake_pause = 0.0, Backoff(env.times.violation_backoff_s, REMAKE_PAUSE_MAX_S)
        # True from `stop` on: no session begins any more.
        self._is_stopped = False
        # The state, and since when it holds.
        self._state = LinkState.WAITING
        self._since_s = asyncio.get_running_loop().time()

    # ---- what the transport asks -------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> bool:
        """Queue a control frame; False if it is dropped, for there is no session, or its queue is full."""
        return self.session is not None and self.session.queue.put(frame)

    @property
    def outbound(self) -> BulkOutbound:
        """The bulk of the current session. Raises LinkLost when there is none."""
        if self.session is None:
            raise LinkLost(f"{self.peer}: the link is down" + (f" ({self._error})" if self._error else ""))
        return self.session.outbound

    def status(self) -> PeerStatus:
        """Return the state of the link."""
        status = PeerStatus(self._state, self.address, self._error, 0, self._congestion)
        if self.session is None:
            return status
        ours, *peers = self.session.certificates
        return replace(
            status,
            connections=self.session.connections,
            certificate=peers[-1] if peers else None,
            is_renewed=ours == self.env.credentials.identity.certificate,
        )

    def drop(self, reason: str) -> None:
        """End the current session, if there is one."""
        if self.session is not None:
            self.session.drop(reason)

    def check_certificates(self, *, is_renewed: bool = False) -> None:
        """Drop the session if a certificate that it was made with has ended, is revoked, or is not trusted any more."""
        if self.session is not None:
            why = self.env.credentials.link_fault(self.session.certificates, is_renewed=is_renewed)
            if self.is_former and asyncio.get_running_loop().time() - self._since_s > self.env.times.farewell_s:
                why = why or f"{self.peer} was removed from the run"
            if why:
                self.session.drop(why)

    @property
    def is_outdated(self) -> bool:
        """Whether the session has an older certificate of ours, and `remake` may help: a dial that was under way when
        the certificate changed, or that won against `remake`, was made with the one before."""
        if self.session is None or self._dialing is not None or asyncio.get_running_loop().time() < self._remake_at_s:
            return False
        latest = self._latest or self.session
        return latest.certificates[0] != self.env.credentials.identity.certificate

    async def remake(self) -> PeerError | None:
        """Replace the session by one with our newest certificate; the old one goes on until that is up. Without an
        address it is dropped: the peer dials. Returns why it failed, or None."""
        if self.session is None or self._dialing is not None:
            return None
        if self.address is None:
            self.drop(f"{self.env.hello.region} has another certificate")
            return None
        session = await self._dial_session(self.session)
        if not isinstance(session, Session):
            self._remake_at_s = asyncio.get_running_loop().time() + self._remake_pause.next_s()
            return session
        self._remake_pause.reset()
        _log.info("link made with the new certificate", peer=self.peer)
        self._spawn(self.run_session(session))
        return None

    def turned_away(self, error: PeerIncompatible) -> None:
        """The peer called, and does not belong here: why there is no link, where it is the peer that dials."""
        if self.session is None:
            self._error = str(error)

    # ---- dialing -----------------------------------------------------------------------------------------------------

    async def run_dialer(self) -> None:
        """Dial whenever there is no session and it is our turn. Ends only without an address, and by cancellation."""
        times = self.env.times
        backoff = Backoff(times.backoff_min_s, times.backoff_max_s)
        may_wait = False
        while True:
            await self._down.wait()
            if self.address is None:
                return
            if may_wait and not self._is_smaller and self.env.is_advertised:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(times.fallback_s):
                        await self._up.wait()
                        continue
            may_wait = True
            started_s = asyncio.get_running_loop().time()
            why: Session | PeerError | None = await self._dial_session(None)
            if isinstance(why, Session):  # no other name: a session that was replaced is not held while the next is up
                why = await self.run_session(why)
            raise_if_cancelled()
            if asyncio.get_running_loop().time() - started_s > times.backoff_max_s:
                backoff.reset()
            wait_s = backoff.next_s(at_least_s=times.violation_backoff_s if _is_violation(why) else 0.0)
            await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
            # A removed region dials us. But of two runs with one name each has removed the other, and each is to know.
            rest_s = times.former_s if self.env.is_advertised else 0.0
            while self.is_former and rest_s > 0.0:  # it may be added again meanwhile
                await asyncio.sleep(min(rest_s, 1.0))
                rest_s -= 1.0

    async def _dial_session(self, old: Session | None) -> Session | PeerError | None:
        """Dial once. `old`: the session to replace. Returns why it failed; None: it was superfluous."""
        if old is None:
            self._set_state(LinkState.DIALING)
        self.dials += 1
        dialing = self._dialing = asyncio.create_task(self._connect(self.dials, old), name=f"dial {self.peer}")
        try:
            return await dialing
        except asyncio.CancelledError:
            if dialing.done() and not dialing.cancelled() and dialing.exception() is None:
                await dialing.result().discard()  # it was made in the very moment in which it was given up
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return None  # only the dial was given up, for an incoming session
        except RedundantDial:
            return None
        except PeerError as error:
            if old is None:
                self._note_failure(error)
            if isinstance(error, DuplicateInstance):
                # For longer than a dead one would be taken for alive: the newer process lives.
                now_s = asyncio.get_running_loop().time()
                self._refused_since_s = self._refused_since_s if self._refused_since_s is not None else now_s
                if now_s - self._refused_since_s > self.env.times.silent_s:
                    self.env.superseded(self.peer, error)
            return error
        finally:
            self._dialing = None
            self._is_hello_sent = False
            if self.session is None:
                self._set_state(LinkState.WAITING)

    async def _connect(self, dial_number: int, old: Session | None) -> Session:
        assert self.address is not None
        env, own = self.env, self.env.credentials.identity.certificate
        if why := env.quarantine_reason(self.peer):
            raise LinkLost(f"{self.peer} is {why}")
        streams: dict[Lane, DialedStream] = {}
        try:
            address = self.address
            for lane in Lane:
                streams[lane] = await self._dial(address, lane, lane_metadata(lane))
                # Of a name with several addresses both lanes take the same one: behind another may be another process.
                address = str(streams[lane].endpoint or address)
            if self.session not in (None, old):
                raise RedundantDial("the peer's session came up first")
            self._is_hello_sent = True
            async with asyncio.timeout(env.times.hello_s):
                instance = await self._exchange_hellos(streams, dial_number)
                self._congestion = decode_congestion_controls(await streams[Lane.CONTROL].peer_metadata(METADATA_KEY))
        except BaseException as error:
            for stream in streams.values():
                await stream.aclose()
            if isinstance(error, TimeoutError):
                raise LinkLost(f"{self.peer} at {self.address}: no hello within {env.times.hello_s:.0f} s") from None
            raise
        more = partial(self.dial_more, address, instance, dial_number)
        return Session(self.peer, streams, env, own, self.intake, instance=instance, more=more)

    async def dial_more(self, address: str, instance: bytes, dial_number: int, connection: int) -> DialedStream:
        """Open one more bulk connection of a session that is up. Raises PeerError."""
        times = self.env.times
        stream = await self._dial(address, Lane.BULK)
        ours = self._hello(Lane.BULK, dial_number, connection)
        try:
            async with asyncio.timeout(times.hello_s):
                await stream.write(encode_hello(ours))
                peer_hello = await hear(stream, ours, self.peer, self.env.credentials)
                if peer_hello.instance_id != instance:
                    raise LinkLost(f"{self.peer} at {address}: another process answers than the one we are linked with")
                await stream.write(JOINED_FRAME)
        except BaseException as error:
            await stream.aclose()
            if isinstance(error, TimeoutError):
                raise LinkLost(f"{self.peer} at {address}: no hello within {times.hello_s:.0f} s") from None
            raise
        return stream

    async def _dial(self, address: str, lane: Lane, metadata: Metadata = ()) -> DialedStream:
        env, identity = self.env, self.env.credentials.identity
        if why := env.credentials.fault(identity.certificate):
            raise LinkLost(why)
        async with env.meter.opening(self.peer, is_bulk=lane is Lane.BULK):
            stream = await dial(identity, self.peer, address, lane, timeout_s=env.times.handshake_s, metadata=metadata)
            if stream.endpoint is not None:
                # A name may lead elsewhere than when this process began: bytes to the new address are counted, too.
                env.meter.assign(self.peer, (stream.endpoint.ip, stream.endpoint.port))
        return stream

    async def _exchange_hellos(self, streams: dict[Lane, DialedStream], dial_number: int) -> bytes:
        """Returns the instance that answers."""
        for lane, stream in streams.items():
            await stream.write(encode_hello(self._hello(lane, dial_number)))
        instances = set()
        for lane, stream in streams.items():
            peer_hello = await hear(stream, self._hello(lane, dial_number), self.peer, self.env.credentials)
            instances.add(peer_hello.instance_id)
        if len(instances) != 1:
            raise LinkLost(f"{self.peer} at {self.address}: two processes answer at this address")
        return instances.pop()

    def _hello(self, lane: Lane, dial_number: int, connection: int = 0) -> Hello:
        return replace(self.env.hello, lane=lane, dial=dial_number, connection=connection)

    # ---- accepting ---------------------------------------------------------------------------------------------------

    async def accept(self, hello: Hello, stream: AcceptedStream) -> PeerError | None:
        """Take one stream of the peer's dial, and keep it until its session ends. Raises PeerError: it was refused.

        Returns: why its session ended, if the peer broke the protocol; it has been counted already.
        """
        if hello.connection:
            return await self._accept_more(hello, stream)
        self._resolve(hello)
        own = self.env.credentials.identity.certificate
        if hello.lane is Lane.CONTROL:
            self._congestion = decode_congestion_controls(stream.peer_metadata(METADATA_KEY))
        await stream.send_metadata(answer(stream, self.peer, hello.lane, self.env.credentials))
        try:
            async with asyncio.timeout(self.env.times.hello_s):
                await stream.write(encode_hello(self._hello(hello.lane, hello.dial)))
        except TimeoutError:
            raise LinkLost(f"{self.peer}: does not take our hello: its window is closed") from None
        key = (hello.instance_id, hello.dial)
        streams = self.accepted.setdefault(key, {})
        if hello.lane in streams:
            raise ProtocolViolation(f"{self.peer}: a second {hello.lane} stream in one dial")
        streams[hello.lane] = stream
        try:
            if len(streams) == len(Lane):
                del self.accepted[key]
                instance, number = key
                session = Session(
                    self.peer, streams, self.env, own, self.intake, instance=instance, accepted_dial=number
                )
                self._spawn(self.run_session(session))
            else:
                self._forget_old_dials(key)
            return await stream.until_closed()
        finally:
            stream.close()
            if self.accepted.get(key) is streams:
                del self.accepted[key]

    async def _accept_more(self, hello: Hello, stream: AcceptedStream) -> PeerError | None:
        """Take a further bulk connection of the session; a greeting that fails costs nothing until it is used."""
        session = self.session
        if not 0 < hello.connection < TRANSFER_CONNECTIONS_MAX:
            raise ProtocolViolation(
                f"{self.peer}: bulk connection {hello.connection}; there are {TRANSFER_CONNECTIONS_MAX}"
            )
        if session is None or (session.instance, session.accepted_dial) != (hello.instance_id, hello.dial):
            raise LinkLost(f"{self.peer}: bulk connection {hello.connection} of a session that is not up")
        if session.is_joining or hello.connection != session.connections:
            raise LinkLost(f"{self.peer}: bulk connection {hello.connection} is not the next one")
        session.is_joining = True
        try:
            async with asyncio.timeout(self.env.times.hello_s):
                await stream.send_metadata(answer(stream, self.peer, hello.lane, self.env.credentials))
                await stream.write(encode_hello(self._hello(hello.lane, hello.dial, hello.connection)))
                check_joined(await stream.read())
            session.add(stream)
        except TimeoutError:
            raise LinkLost(f"{self.peer}: bulk connection {hello.connection} was not used") from None
        finally:
            session.is_joining = False
        return await stream.until_closed()

    def _resolve(self, hello: Hello) -> None:
        """Decide which of two crossing dials goes on, and which of two processes; see the module's docstring."""
        session = self.session
        if session is not None and session.is_alive and hello.instance_id < session.instance:
            raise DuplicateInstance(
                f"superseded: a newer process of {self.peer} is linked with {self.env.hello.region}; two with one "
                "certificate must not run at once"
            )
        if self._is_smaller and self._is_hello_sent:
            raise RedundantDial(f"{self.env.hello.region} is dialing {self.peer} itself at this moment")
        instance, number = self._newest
        if hello.instance_id == instance and hello.dial < number:
            raise RedundantDial(f"dial {hello.dial} of {self.peer} is older than {number}")
        self._newest = (hello.instance_id, hello.dial)
        if self._dialing is not None:
            self._dialing.cancel()

    def _forget_old_dials(self, newest: tuple[bytes, int]) -> None:
        """At most one dial of a peer waits for its second stream, and no longer than a hello may take."""
        for key, streams in list(self.accepted.items()):
            if key != newest:
                _close_all(streams)
        loop = asyncio.get_running_loop()
        loop.call_later(self.env.times.hello_s, lambda: _close_all(self.accepted.get(newest, {})))

    # ---- the session -------------------------------------------------------------------------------------------------

    async def run_session(self, session: Session) -> PeerError | None:
        """Make this the link's session, and carry it to its end. Returns why it ended."""
        if self._latest is not None:
            self._latest.drop("replaced by a newer session")
        self._latest = session
        try:
            if self._is_stopped:  # its task was made before `stop`, and begins after it
                return None
            async with self._session_lock:  # the handler sees the end of one session before the start of the next
                return await self._carry(session)
        finally:
            await session.discard()

    async def _carry(self, session: Session) -> PeerError | None:
        self.session = session
        self._refused_since_s = None
        self.env.superseded(self.peer, None)
        self._down.clear()
        self._up.set()
        self._error = ""
        self._set_state(LinkState.UP)
        self.check_certificates(is_renewed=True)  # what it was made with may not be good since
        _log.info("link up", peer=self.peer)
        try:
            self.env.handler.link_changed(self.peer, is_up=True)
            why = await session.run()
            self._note_failure(why)
            return why
        except Exception as error:  # noqa: BLE001 - the link task is one of the places that catch broadly
            self._error = f"internal error: {error!r}"
            _log.exception("link broke by a fault of ours", peer=self.peer)
            context = {"message": f"the link to {self.peer} broke", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            return None
        finally:
            self.session = None
            self._up.clear()
            self._down.set()
            self._set_state(LinkState.WAITING)
            self.env.handler.link_changed(self.peer, is_up=False)

    def _note_failure(self, error: PeerError) -> None:
        if str(error) != self._error:
            _log.warning("no link", peer=self.peer, reason=str(error))
        self._error = str(error)
        if _is_violation(error) and not self.is_former:  # somebody else may be at its address by now
            self.env.reject(self.peer, error)

    def _set_state(self, state: LinkState) -> None:
        if state is not self._state:
            self._state = state
            self._since_s = asyncio.get_running_loop().time()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work, name=f"session {self.peer}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Drop the session of an incoming dial, and wait for its end. The dialer's task is cancelled by its owner."""
        self._is_stopped = True
        if self._latest is not None:
            self._latest.drop("this node stops")
        if self._dialing is not None:
            self._dialing.cancel()
        for streams in list(self.accepted.values()):
            _close_all(streams)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._set_state(LinkState.STOPPED)


def _is_violation(error: PeerError | None) -> bool:
    return isinstance(error, (ProtocolViolation, PayloadCorrupt, PeerIncompatible))


def _close_all(streams: dict[Lane, AcceptedStream]) -> None:
    for stream in streams.values():
        stream.close()
