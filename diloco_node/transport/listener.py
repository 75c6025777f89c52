"""The port between regions stays open: gRPC's server, and another one when it closes by itself.

grpc.aio ends its server, without a word, when a peer calls a method whose name is no UTF-8. So the listening socket is
looked at. A new server takes the port; the old one is stopped when the last of its calls has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from diloco_node.errors import BindError
from diloco_node.ticks import to_tick_s
from diloco_node.transport.certificates import Identity
from diloco_node.transport.kernel.tcp_info import is_listening, listening_sockets
from diloco_node.transport.streams import Serve, Server, make_server
from diloco_node.wire.envelope import Lane

_log = structlog.get_logger(part="transport")

LISTENER_POLL_S: Final = 0.2
"""For so long, and the making of a server, no new link can be accepted; it costs microseconds."""


@dataclass(eq=False)
class _OpenPort:
    """A server. `sockets`: those it listens on, as (descriptor, cookie). `calls`: that go on."""

    server: Server | None = None
    sockets: tuple[tuple[int, int], ...] = ()
    calls: int = 0

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)


class Listener:
    """Accepts calls at one address. `start` once, then `run` in a task, `stop` at the end.

    identity: ours now. port: 0 takes a free one. serve: as for `make_server`. on_lost: gRPC has closed the port.
    """

    def __init__(
        self,
        identity: Callable[[], Identity],
        host: str,
        port: int,
        serve: Serve,
        *,
        handshake_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._host = f"[{host}]" if ":" in host else host
        self._serve = serve
        self._handshake_s = handshake_s
        self._on_lost = on_lost
        self.current: _OpenPort | None = None
        self.retiring: list[_OpenPort] = []
        self.port = port

    async def start(self) -> None:
        """Bind the port and listen. Raises BindError, IdentityError."""
        open_port = _OpenPort()

        async def serve(lane: Lane, context: Any) -> None:
            open_port.calls += 1
            try:
                await self._serve(lane, context)
            finally:
                open_port.calls -= 1

        address = f"{self._host}:{self.port}"
        open_port.server, self.port = make_server(self._identity, address, serve, handshake_s=self._handshake_s)
        await open_port.server.start()
        open_port.sockets = listening_sockets(self.port)
        self.current = open_port

    async def run(self) -> None:
        """Look after the port. Ends only by cancellation."""
        is_told = False
        while True:
            await asyncio.sleep(to_tick_s(LISTENER_POLL_S))
            for server in [server for server in self.retiring if not server.calls]:
                self.retiring.remove(server)
                await server.stop()
            current = self.current
            if current is not None:
                # Where the kernel does not show them, nobody can tell.
                if not current.sockets or any(is_listening(fd, cookie) for fd, cookie in current.sockets):
                    continue
                self.current = None
                self.retiring.append(current)
                self._on_lost()
                is_told = False
            try:
                await self.start()
            except BindError as error:
                if not is_told:
                    _log.error("the port is lost", reason=str(error))
                is_told = True

    async def stop(self) -> None:
        """Close the port, and cancel all calls. May be called twice."""
        servers = [*self.retiring, self.current]
        self.retiring, self.current = [], None
        for server in servers:
            if server is not None:
                await server.stop()
