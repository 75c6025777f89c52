"""Measuring ends without a core: what `measure serve` runs, and what the command line makes for each test.

An end is the transport of a daemon with a `Measuring` on it, and nothing else. Its hello says so: it never links with a
training daemon. `measure serve` dials nobody by itself: whoever measures dials it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from diloco_node.errors import DilocoError, IdentityError, PeersUnreachable, ProtocolViolation
from diloco_node.measure.measuring import Linked, Measuring
from diloco_node.transport.certificates import Identity
from diloco_node.transport.peer_session import LinkTimes
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire.envelope import LinkRole
from diloco_node.wire.measure_messages import MeasureMessage, Probe

LINK_S: Final = 15.0
"""A link has come up by then."""

LINK_POLL_S: Final = 0.02
THREADS: Final = 4
ANYWHERE: Final = ("127.0.0.1", 0)
"""Where an end that only dials listens: a transport has a port."""


class _OnlyMeasuring:
    """Takes what is for measuring, and nothing else. measuring: set before the transport starts."""

    measuring: Measuring

    def control_arrived(self, peer: str, message: object) -> None:
        if not isinstance(message, MeasureMessage):
            raise ProtocolViolation(f"{peer} sends a {type(message).__name__} to an end that only measures")
        self.measuring.control_arrived(peer, message)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        self.measuring.link_changed(peer, is_up=is_up)

    def transfer_opened(self, peer: str, header: object, raw_bytes: int) -> memoryview | None:
        if not isinstance(header, Probe):
            kind = type(header).__name__
            raise ProtocolViolation(f"{peer} sends a {kind} of {raw_bytes} bytes to an end that only measures")
        return self.measuring.transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: Probe, buffer: memoryview, *, is_whole: bool) -> None:
        self.measuring.transfer_closed(peer, header, buffer, is_whole=is_whole)


@contextlib.asynccontextmanager
async def measuring_end(
    identity: Identity,
    peers: Mapping[str, str | None],
    *,
    listen: tuple[str, int] = ANYWHERE,
    dial: Linked | None = None,
    times: LinkTimes | None = None,
) -> AsyncIterator[Measuring]:
    """An end, until the end of the block. peers: `host:port` of those to dial at once. dial: see `Measuring`.

    Raises BindError: the port can't be taken. IdentityError: TLS does not accept our certificate.
    """
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    handler = _OnlyMeasuring()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="measure") as executor:
        transport = GrpcTransport(
            region=identity.region,
            run_id=identity.run_id,
            settings_digest="",
            manifest_digest="",
            identity=identity,
            listen=listen,
            peers=peers,
            handler=handler,
            executor=executor,
            is_advertised=False,
            role=LinkRole.MEASURING,
            times=times,
        )
        measuring = handler.measuring = Measuring(
            region=identity.region,
            transport=transport,
            spawn=spawn,
            executor=executor,
            now_ns=time.monotonic_ns,
            dial=dial,
            is_bounded=False,
        )
        try:
            await transport.start()
            yield measuring
        finally:
            await transport.stop()
            leftover = list(tasks)
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)


class Dialer:
    """Makes links to `measure serve` of other regions, at these `host:port`, anew each time; a `measuring.Linked`."""

    def __init__(self, identity: Identity, addresses: Mapping[str, str], *, times: LinkTimes | None = None) -> None:
        self._identity = identity
        self._addresses = addresses
        self._times = times

    @contextlib.asynccontextmanager
    async def __call__(self, peers: tuple[str, ...]) -> AsyncIterator[Measuring]:
        """See `Linked`. Some of several peers may lack a link: the measurement says why."""
        where = {peer: self._addresses.get(peer) for peer in peers}
        if len(peers) == 1 and where[peers[0]] is None:
            raise PeersUnreachable(f"{self._identity.region} has no address of {peers[0]} in run.toml")
        async with measuring_end(self._identity, where, times=self._times) as measuring:
            for peer in peers:
                if where[peer] is None:
                    continue
                error = await link_up(measuring, peer)
                if error and len(peers) == 1:
                    raise _explain(error)
            yield measuring


async def link_up(end: Measuring, peer: str) -> str:
    """Wait for a link; why there is none, or empty."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + LINK_S
    while loop.time() < until_s:
        status = end.transport.peer_status()[peer]
        if status.state.value == "up":
            return ""
        if status.error:
            return status.error
        await asyncio.sleep(LINK_POLL_S)
    return f"{peer}: no link in {LINK_S:.0f} s"


def _explain(error: str) -> DilocoError:
    if "superseded" not in error and "certificate" in error:
        return IdentityError(f"{error}; both must be of the same `diloco-node certs init`")
    if "training daemon" in error or "protocol_version" in error:
        return PeersUnreachable(error)
    return PeersUnreachable(f"{error}: is `diloco-node measure serve` running there, and its port open?")
