"""adapters/plain_accept.py: connections that come in are taken or closed, whatever ends the wait for first bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator

import pytest

from diloco_node.adapters import plain_accept
from diloco_node.adapters.plain_accept import PlainAccept
from diloco_node.errors import ProtocolViolation
from diloco_node.transport.kernel.tcp_info import Address


class Door:
    """Takes who says `yes`, for 30 s at most or so long as a test says."""

    def __init__(self, limit_s: float = 30.0, at_most: int = 4) -> None:
        self.taken: list[socket.socket] = []
        self.took = asyncio.Event()
        self.refusals: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self._run = PlainAccept(3, limit_s, at_most, self._take, self._refused).run(self.listener)
        self.task = asyncio.create_task(self._run)

    def _take(self, first: bytes, connection: socket.socket, _remote: Address) -> None:
        if first != b"yes":
            raise ProtocolViolation(f"said {first!r}")
        self.taken.append(connection)
        self.took.set()

    def _refused(self, _remote: Address | None, reason: str) -> None:
        self.refusals.append(reason)

    def comes(self, first: bytes = b"") -> socket.socket:
        """A connection from outside."""
        one = socket.create_connection(self.listener.getsockname())
        one.settimeout(5)
        one.sendall(first)
        return one


@contextlib.asynccontextmanager
async def opened(limit_s: float = 30.0, at_most: int = 4) -> AsyncIterator[Door]:
    door = Door(limit_s, at_most)
    try:
        yield door
    finally:
        door.task.cancel()
        await asyncio.gather(door.task, return_exceptions=True)
        door.listener.close()
        for one in door.taken:
            one.close()


async def until_closed(one: socket.socket) -> None:
    assert await asyncio.to_thread(one.recv, 1) == b""
    one.close()


async def test_who_says_the_right_thing_is_taken_and_others_are_closed() -> None:
    async with opened() as door:
        with door.comes(b"yes") as good:
            await until_closed(door.comes(b"no!"))
            await door.took.wait()
            door.taken[0].sendall(b"!")
            assert await asyncio.to_thread(good.recv, 1) == b"!"
        assert door.refusals == ["said b'no!'"]


async def test_who_says_nothing_or_hangs_up_is_closed_and_makes_room() -> None:
    async with opened(limit_s=0.05, at_most=1) as door:
        silent, gone, good = door.comes(), door.comes(b"y"), door.comes(b"yes")
        gone.shutdown(socket.SHUT_WR)
        await until_closed(silent)
        await until_closed(gone)
        await door.took.wait()
        good.close()
        assert door.refusals == ["silent", "said b'y'"]


@pytest.mark.parametrize("turns", range(6))
async def test_nobody_is_lost_when_it_ends_while_somebody_comes(turns: int) -> None:
    """Whether the connection was not accepted, just accepted, or being asked when it ended."""
    async with opened() as door:
        await asyncio.sleep(0)
        coming = door.comes()
        for _ in range(turns):
            await asyncio.sleep(0)
        door.task.cancel()
        await asyncio.gather(door.task, return_exceptions=True)
        door.listener.close()
        with contextlib.suppress(ConnectionResetError):  # by the kernel, if it was not accepted
            await until_closed(coming)
        coming.close()
        assert door.taken == []


async def test_out_of_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, failures = plain_accept._accepted, [0]

    async def fails_once(listener: socket.socket) -> tuple[socket.socket, Address]:
        failures[0] += 1
        if failures[0] == 1:
            raise OSError(errno.EMFILE, "no more")
        return await accepted(listener)

    monkeypatch.setattr(plain_accept, "_accepted", fails_once)
    async with opened(limit_s=0.05) as door:
        with door.comes(b"yes"):
            await door.took.wait()
        assert door.refusals == ["[Errno 24] no more"]
