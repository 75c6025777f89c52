"""Ask what listens at a peer's address who it is, without linking: one call, one hello in each direction.

The hello has the role `measuring`. A daemon of a run answers it with its own hello and refuses, so its links, and those
of the asker's own daemon, stay as they are. With the answer comes the peer's wall clock, in the metadata of the call.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from diloco_node.errors import LinkLost
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.certificates import Identity
from diloco_node.transport.streams import DialedStream, Metadata, dial
from diloco_node.wire.envelope import Hello, Lane, LinkRole, decode_hello, encode_hello
from diloco_node.wire.message_tables import PROTOCOL_VERSION

CLOCK_KEY: Final = "diloco-clock"
_CLOCK_DIGITS_MAX: Final = 20
TRIES: Final = 10
_WORDS_LOST: Final = "Internal error from Core"
"""The error that grpc.aio gives when the peer refused before our hello was out, instead of the peer's words. Another
try may be slower than the peer, or faster.
"""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of the process at a peer's address.

    Attributes:
        hello: its own. rtt_s: between our hello and its.
        clock_ahead_s: its wall clock beside ours, good to half a round trip; None: it did not say.
    """

    hello: Hello
    rtt_s: float
    clock_ahead_s: float | None


def clock_metadata() -> Metadata:
    """Our wall clock, as an asker gets it; it is shown, and decides nothing."""
    return ((CLOCK_KEY, str(time.time_ns())),)  # noqa: TID251 - the wall clock itself is what was asked for


async def ask_peer(identity: Identity, peer: str, address: str, *, timeout_s: float) -> PeerAnswer:
    """Dial a peer and hear its hello.

    Raises LinkLost: nothing there takes our certificate and speaks the protocol in time; says at which stage it failed.
    PeerIncompatible, ProtocolViolation: it answers with another version's hello, or with none.
    """
    for _ in range(TRIES - 1):
        try:
            return await _ask_once(identity, peer, address, timeout_s)
        except LinkLost as error:
            if _WORDS_LOST not in str(error):
                raise
    return await _ask_once(identity, peer, address, timeout_s)


async def _ask_once(identity: Identity, peer: str, address: str, timeout_s: float) -> PeerAnswer:
    stream = await dial(identity, peer, address, Lane.CONTROL, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(stream, identity)
    except TimeoutError:
        raise LinkLost(f"{peer} at {address}: connected, but no hello within {timeout_s:.0f} s") from None
    finally:
        await stream.aclose()


async def _exchange(stream: DialedStream, identity: Identity) -> PeerAnswer:
    ours = Hello(
        PROTOCOL_VERSION,
        identity.run_id,
        epoch=0,
        region=identity.region,
        settings_digest="",
        manifest_digest="",
        instance_id=bytes(16),
        lane=Lane.CONTROL,
        dial=0,
        role=LinkRole.MEASURING,
    )
    asked_s = time.monotonic()
    await stream.write(encode_hello(ours))
    peer_hello = decode_hello(await stream.read())
    rtt_s = time.monotonic() - asked_s
    now_ns = time.time_ns()  # noqa: TID251 - compared with the peer's wall clock
    clock = await stream.peer_metadata(CLOCK_KEY)
    is_clock = clock.isascii() and clock.isdigit() and len(clock) <= _CLOCK_DIGITS_MAX
    ahead_s = (int(clock) - now_ns) / NS_PER_S + rtt_s / 2 if is_clock else None
    return PeerAnswer(peer_hello, rtt_s, ahead_s)
