"""The port between regions is there again when gRPC closes it, and links that are up stay up."""

import asyncio
import socket
from pathlib import Path

import pytest
import structlog
from http2_attacks import PREFACE, client_context, opening, settings
from structlog.testing import capture_logs

from diloco_node.core.messages import RequestVoteReply
from diloco_node.daemon.logs import PeerLines
from diloco_node.transport.kernel.tcp_info import is_listening, listening_sockets
from tests.kit.transport_kit import Mesh, address
from tests.kit.waiting import eventually

NO_NAME = b"/diloco\xfcRegion/control"
"""A method that is no UTF-8: grpc.aio ends its server because of it."""


def call(port: int, identity: Path, method: bytes) -> None:
    """Call a method, and wait for whatever comes of it."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        client_context(identity).wrap_socket(plain, server_hostname="region") as secure,
    ):
        secure.sendall(PREFACE + settings() + opening(1, method))
        while b"grpc-status" not in secure.recv(65536):
            pass


async def test_a_method_that_is_no_text_costs_neither_the_port_nor_a_link(mesh: Mesh) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)  # gRPC's own is told to the loop
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    a, at_a = await mesh.start("a", {"b": address(b)})
    await at_a.until(lambda: at_a.is_up.get("b"))
    for times in (1, 2):
        await asyncio.to_thread(call, b.port, mesh.folder / "run" / "c", NO_NAME)
        await eventually(lambda times=times: b.rejections["unknown", "listener"] == times)
        await eventually(lambda: len(listening_sockets(b.port)) == 1)
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    a.send("b", RequestVoteReply(1, True, False, b""))
    await at_b.until(lambda: at_b.messages)
    assert at_a.changes == [("b", True)], "what was up stays up"
    assert b.listener is not None
    await eventually(lambda: b.listener is not None and len(b.listener.retiring) == 1)
    await a.stop()
    await eventually(lambda: b.listener is not None and not b.listener.retiring)


async def test_a_port_that_somebody_else_has_taken_meanwhile_is_tried_again(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None})
    listener = b.listener
    assert listener is not None
    assert listener.current is not None
    # Nobody looks after the port until the thief has it.
    [looking] = [task for task in b._tasks if task.get_name() == "listener"]
    looking.cancel()
    await asyncio.wait([looking])
    await listener.current.stop()
    await eventually(lambda: not listening_sockets(b.port))
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", b.port))
        thief.listen()
        b._spawn(listener.run(), "listener")
        await eventually(lambda: b.rejections["unknown", "listener"] == 1)
        await asyncio.sleep(0)
        assert listener.current is None
    await eventually(lambda: listener.current is not None)
    _, at_a = await mesh.start("a", {"b": address(b)})
    await at_a.until(lambda: at_a.is_up.get("b"))


async def test_a_port_that_is_closed_again_and_again_is_counted_and_the_log_holds_it_back(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None})
    with capture_logs() as lines:
        for _ in range(3):
            b.listener_lost()
    lines = [line for line in lines if line["event"] == "listener closed"]
    assert [line["count"] for line in lines] == [1, 2, 3]
    repeats = PeerLines()
    assert repeats(None, "", lines[0]) == lines[0]
    for line in lines[1:]:
        with pytest.raises(structlog.DropEvent):
            repeats(None, "", line)
    assert b.rejections["unknown", "listener"] == 3


def test_sockets_that_listen_are_found_by_their_port_and_known_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as two:
        [(fd, cookie)] = listening_sockets(one.getsockname()[1])
        assert fd == one.fileno()
        assert is_listening(fd, cookie)
        assert not is_listening(two.fileno(), cookie)
        assert [found for found, _ in listening_sockets(two.getsockname()[1])] == [two.fileno()]
        with socket.create_connection(one.getsockname()) as connected:
            assert not is_listening(connected.fileno(), cookie)
    assert not is_listening(fd, cookie)
