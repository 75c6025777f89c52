"""Plain TCP connections that come in for a measurement, and say with their first bytes what they are for.

None is lost: a connection belongs to the accepting side from the moment the kernel hands it over until somebody takes
it, and is closed otherwise, also when this is cancelled in between (`loop.sock_accept` would drop it then).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diloco_node.errors import PeerError
from diloco_node.transport.kernel.tcp_info import Address


@dataclass(frozen=True, slots=True)
class PlainAccept:
    """How connections are let in.

    Attributes:
        first_bytes: so many are read before it is decided. limit_s: they come in so long, or the connection is closed.
        at_most: connections that have not said them yet; others wait in the kernel.
        take: called with the first bytes and a connection that is the callee's from then on; raises PeerError or
            OSError, and then it is closed.
        refused: called with an address (None: not even accepted) and why.
    """

    first_bytes: int
    limit_s: float
    at_most: int
    take: Callable[[bytes, socket.socket, Address], None]
    refused: Callable[[Address | None, str], None]

    async def run(self, listener: socket.socket) -> None:
        """Accept until this is cancelled. The listener does not block, and stays open."""
        slots = asyncio.Semaphore(self.at_most)
        # Only ends with the connections closed: a group waits for its tasks, and each closes what it was given.
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                try:
                    connection, address = await _accepted(listener)
                except OSError as error:  # out of descriptors, or it was gone before we took it
                    self.refused(None, str(error))
                    slots.release()
                    await asyncio.sleep(self.limit_s)
                    continue
                greeting = group.create_task(self._greet(connection, address))
                # A task that is cancelled before it has begun never gets to its own `finally`.
                greeting.add_done_callback(partial(_close_untaken, connection))
                greeting.add_done_callback(lambda _: slots.release())

    async def _greet(self, connection: socket.socket, address: Address) -> bool:
        """Whether it was taken."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(self.limit_s):
                first = await _read(connection, self.first_bytes)
            self.take(first, connection, address)
        except (OSError, PeerError) as error:  # TimeoutError is one of OSError
            self.refused(address, str(error) or "silent")
            return False
        return True


def _close_untaken(connection: socket.socket, task: asyncio.Task[bool]) -> None:
    if task.cancelled() or task.exception() is not None or not task.result():
        connection.close()


async def _accepted(listener: socket.socket) -> tuple[socket.socket, Address]:
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            connection, address = listener.accept()
            return connection, (str(address[0]), int(address[1]))
        readable = asyncio.Event()
        loop.add_reader(listener, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(listener)


async def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if it ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            break
        data += more
    return data
