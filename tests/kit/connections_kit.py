"""Sessions of several connections, for tests."""

from typing import Any

from diloco_node.core.messages import Payload
from diloco_node.transport.streams import DialedStream
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import Mesh, connect_as, hello_of

HEADER = Payload(1, 2, bytes(32))


# ---- who may join ----------------------------------------------------------------------------------------------------


async def joining(mesh: Mesh, b: GrpcTransport, connection: int, **changes: Any) -> DialedStream:
    """A further bulk connection to b's session with a, up to b's answer."""
    stream = await connect_as(mesh, mesh.identity("a"), b, e.Lane.BULK)
    await stream.write(hello_of(changes.pop("region", "a"), e.Lane.BULK, connection=connection, **changes))
    e.decode_hello(await stream.read())
    return stream


def chunk(transfer: int, offset: int, size: int) -> bytes:
    return e.encode_chunk(transfer, offset, size, b"x" * size, is_compressed=False)
