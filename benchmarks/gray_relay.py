"""Relays for benchmarks/gray.py: TCP connections for bulk from one region to another, held up in either direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

GREETING_BYTES = 12_288
"""What a connection may carry in each direction whatever is cut: the TLS handshake and both hellos, so that links come
up and only then carry nothing."""

PIECE_BYTES = 65_536
SLOW_BYTES_PER_S = 100


@dataclass
class Relays:
    """One relay for each pair of regions and each side that may dial; `cut` and `slow` hold (from, to).

    Attributes:
        cut: nothing passes. slow: SLOW_BYTES_PER_S pass. carried: bytes, by (from, to).
    """

    addresses: dict[str, tuple[str, int]]
    cut: set[tuple[str, str]] = field(default_factory=set)
    slow: set[tuple[str, str]] = field(default_factory=set)
    carried: dict[tuple[str, str], int] = field(default_factory=dict)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> dict[str, dict[str, str]]:
        """Listen. Per dialing region, where it finds the relay to each other one."""
        ports: dict[str, dict[str, str]] = {name: {} for name in self.addresses}
        for dialer in sorted(self.addresses):
            for target in sorted(self.addresses.keys() - {dialer}):
                server = await asyncio.start_server(self._acceptor(dialer, target), "127.0.0.1", 0)
                self._servers.append(server)
                ports[dialer][target] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return ports

    def change(self, *, cut: set[tuple[str, str]] | None = None, slow: set[tuple[str, str]] | None = None) -> None:
        """What is cut and slow from now on."""
        self.cut, self.slow = cut or set(), slow or set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _acceptor(
        self, dialer: str, target: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accept(near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                far_in, far_out = await asyncio.open_connection(*self.addresses[target])
                parts = (
                    asyncio.create_task(self._carry(near_in, far_out, dialer, target)),
                    asyncio.create_task(self._carry(far_in, near_out, target, dialer)),
                )
                try:
                    await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for part in parts:
                        part.cancel()
                    await asyncio.gather(*parts, return_exceptions=True)
                    far_out.close()
            near_out.close()

        return accept

    async def _carry(self, come: asyncio.StreamReader, go: asyncio.StreamWriter, sender: str, receiver: str) -> None:
        """One direction, until it ends."""
        way, passed = (sender, receiver), 0
        while True:
            size = PIECE_BYTES if passed >= GREETING_BYTES else GREETING_BYTES - passed
            if passed >= GREETING_BYTES:
                while way in self.cut:
                    await self._changed.wait()
                if way in self.slow:
                    size = SLOW_BYTES_PER_S // 10
                    await asyncio.sleep(0.1)
            piece = await come.read(size)
            if not piece:
                return
            passed += len(piece)
            self.carried[way] = self.carried.get(way, 0) + len(piece)
            go.write(piece)
            await go.drain()
