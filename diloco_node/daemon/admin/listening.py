"""A TCP port for an operator's browser or scraper that holds no more connections than it has room for."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

LOOPBACK: Final = "127.0.0.1"

CONNECTIONS_MAX: Final = 64
"""Over TCP at once: each is a file descriptor, and any user of this machine may open one."""


async def listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Serve an application there, on a free port if it is 0; a connection too many is closed. Raises OSError."""
    assert runner.server is not None
    serve = runner.server

    def accept() -> asyncio.BaseProtocol:
        return serve() if len(serve.connections) < CONNECTIONS_MAX else _HangUp()

    return await asyncio.get_running_loop().create_server(accept, host, port, reuse_address=True)


def port_of(server: asyncio.Server) -> int:
    """The port that a server listens on."""
    port: int = server.sockets[0].getsockname()[1]
    return port


class _HangUp(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's interface."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
