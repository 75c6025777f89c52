"""transport/streams.py: gRPC's texts in words that say what to look at. The rest of it is met by every link's test."""

import asyncio

import grpc
import pytest
from grpc import aio

from diloco_node.errors import LinkLost
from diloco_node.transport.streams import DialedStream, explain

CONNECTING = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7400:"


@pytest.mark.parametrize(
    ("details", "text"),
    [
        (f"{CONNECTING} Failed to connect to remote host: Connection refused (111)", "(connection refused)"),
        (f"{CONNECTING} Socket closed", "closed the connection after the handshake: it does not trust our certificate"),
        (f"{CONNECTING} Connection reset by peer", "does not trust our certificate, is stopping, or its clock"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the peer's certificate has expired"),
        ("CERTIFICATE_VERIFY_FAILED: self signed", "another run's authority"),
        ("Stream removed (Socket closed)", "the connection was closed: the other side has ended"),
        ("Stream removed (recvmsg:Connection reset by peer (104))", "the connection was closed"),
        ("Stream removed (recvmsg:Connection timed out (110))", "timed out: nothing comes through any more"),
        ("something new\nin two lines", "something new in two lines"),
    ],
)
def test_failures_are_explained_in_words(details: str, text: str) -> None:
    assert text in explain(details)


def test_a_long_text_is_cut() -> None:
    assert len(explain("x" * 5000)) == 300


class DeadCall:
    """What gRPC does to a task that waits for a call's start, when that fails at the moment of the cancellation."""

    def __init__(self) -> None:
        self.is_waited_for = asyncio.Event()

    async def read(self) -> bytes:
        try:
            self.is_waited_for.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            metadata = aio.Metadata()
            raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "Socket closed") from None
        raise AssertionError

    async def write(self, frame: bytes) -> None:
        await self.read()


@pytest.mark.parametrize("use", ["read", "write"])
async def test_a_cancelled_user_of_a_call_is_cancelled_whatever_grpc_says(use: str) -> None:
    call = DeadCall()
    stream = DialedStream(None, call, peer="b", address="127.0.0.1:1")
    task = asyncio.create_task(stream.read() if use == "read" else stream.write(b"x"))  # type: ignore[arg-type]
    await call.is_waited_for.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_lost_call_that_nobody_cancelled_is_a_lost_link() -> None:
    call = DeadCall()
    stream = DialedStream(None, call, peer="b", address="127.0.0.1:1")
    reader = asyncio.create_task(call.read())
    await call.is_waited_for.wait()
    reader.cancel()
    (error,) = await asyncio.gather(reader, return_exceptions=True)
    assert isinstance(error, aio.AioRpcError)

    async def fail() -> bytes:
        raise error

    call.read = fail  # type: ignore[method-assign]
    with pytest.raises(LinkLost, match="Socket closed"):
        await stream.read()
