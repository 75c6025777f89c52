"""Frames on the two streams between regions.

Every frame is one HTTP/2 (gRPC) message: one byte of kind, a fixed little-endian head, a body.

| kind | lane | after the kind |
|---|---|---|
| HELLO | both, first frame in each direction of each connection | msgpack `Hello` |
| CONTROL | control | msgpack message (`message_tables.CONTROL`) |
| PING | control | nothing: the sender lives |
| BEGIN | bulk | transfer id u64, raw bytes u64, msgpack header (`message_tables.HEADERS`) |
| CHUNK | bulk | transfer id u64, offset u64, raw length u32, is_compressed u8, data |
| END | bulk | transfer id u64, then for each connection the chunks that went over it u32 |
| ABORT | bulk | transfer id u64, how many counts follow u8, these as in END, reason in UTF-8 |
| RUN_SHOWN | control, after the hello, to a region that asks to join | msgpack `RunShown` (`run_shown`) |
| JOINED | bulk, from the dialing side, second frame of a further connection | nothing: it is used from here on |

BEGIN, END and ABORT go over the first connection of the bulk lane, CHUNK over any. Pure: bytes in, frozen dataclasses
out. The order of frames (a chunk only after its begin, no gaps) is the business of `transport/inbound.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from diloco_node.core.bounds import LISTING_BYTES_MAX
from diloco_node.core.settings_body import LEDGER_KEYS
from diloco_node.errors import PeerIncompatible, ProtocolViolation
from diloco_node.escaping import escaped
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Schema
from diloco_node.wire.message_tables import CONTROL, HEADERS, PROTOCOL_VERSION, ControlMessage, TransferHeader
from diloco_node.wire.tensor_listing import tensor_difference

TRANSFER_CONNECTIONS_MAX: Final = 8
"""Over so many a transfer may go: a link for a measurement may have more than one of a run."""

CHUNK_BYTES_MAX: Final = 2**20
"""Raw bytes of one chunk. Compressed it may be a little more where compression does not pay, hence the slack below."""

CHUNK_SLACK_BYTES: Final = 4096

TRANSFER_BYTES_MAX: Final = 64 * 2**30
"""No transfer is larger: a fragment's state of 8 Gi parameters."""

REASON_BYTES_MAX: Final = 1024

KIND_HELLO: Final = 1
KIND_CONTROL: Final = 2
KIND_PING: Final = 3
# 4 was ECHO, up to version 4.
KIND_BEGIN: Final = 16
KIND_CHUNK: Final = 17
KIND_END: Final = 18
KIND_ABORT: Final = 19
KIND_JOINED: Final = 20

_BEGIN: Final = struct.Struct("<BQQ")
_CHUNK: Final = struct.Struct("<BQQIB")
_END: Final = struct.Struct("<BQ")
_ABORT: Final = struct.Struct("<BQB")
_COUNT_BYTES: Final = 4

PING_FRAME: Final = bytes([KIND_PING])
JOINED_FRAME: Final = bytes([KIND_JOINED])

SETTINGS_NAMED_MAX: Final = 4
"""Settings that differ which one line names; the rest is counted."""

FRAME_BYTES_MAX: Final = 4 * 2**20 + 64 * 2**10
"""No frame of either lane is larger; the transport's limit for one message."""


class Lane(StrEnum):
    """The two kinds of connection between a pair of regions: one for control, one or more for bulk."""

    CONTROL = "control"
    BULK = "bulk"


class LinkRole(StrEnum):
    """The purpose of a process. Only two of the same role link."""

    TRAINING = "training"
    MEASURING = "measuring"
    JOINING = "joining"
    """Asks for the run, and never links."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame in each direction on each stream.

    Attributes:
        protocol_version: of the sender. run_id, settings_digest, manifest_digest: must be equal on both sides.
        founding_digest: of the settings that the ledger holds; empty once it does, for a begun run says them to all.
        region: must be the name in the sender's certificate.
        instance_id: 16 bytes per daemon process: its start by the wall clock, then 8 random bytes. The greater id is
        that of the newer of two processes with one certificate. lane: which of the two streams this is.
        dial: the dialer's count of attempts in this process; all streams of one pair carry the dialer's number.
        connection: of the bulk lane, which of its connections: 0 is the first, others join a session that is up.
        role: must be equal on both sides.
        settings: what the digests are of, for people: "rounds.sync_every=24" and so on. Nothing follows from it.
        model: the tensors that the manifest's digest is of, for people (`tensor_listing`).
    """

    protocol_version: int
    run_id: str
    founding_digest: str
    region: str
    settings_digest: str
    manifest_digest: str
    instance_id: bytes
    lane: Lane
    dial: int
    connection: int = 0
    role: LinkRole = LinkRole.TRAINING
    settings: tuple[str, ...] = ()
    model: bytes = b""


class ModelsDiffer(PeerIncompatible):
    """The peer is of this run, and trains another model."""


@dataclass(frozen=True, slots=True)
class TransferBegin:
    """A transfer of `raw_bytes` (before zstd) follows."""

    transfer: int
    raw_bytes: int
    header: TransferHeader


@dataclass(frozen=True, slots=True)
class TransferChunk:
    """Raw bytes [offset, offset + raw_bytes) of a transfer. data: themselves, or a zstd frame of them; a view.

    There is no checksum here: TLS authenticates every record, and a CRC took a third of a transfer's CPU time.
    """

    transfer: int
    offset: int
    raw_bytes: int
    is_compressed: bool
    data: memoryview


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """All chunks were sent: so many over each connection, 0 over those that are not named."""

    transfer: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferAbort:
    """The sender gave up after so many chunks over each connection; what came so far is worth nothing."""

    transfer: int
    chunks: tuple[int, ...]
    reason: str


BulkFrame = TransferBegin | TransferChunk | TransferEnd | TransferAbort

_HELLO: Final[Schema[Hello]] = Schema({1: Hello}, bounds=BOUNDS, bytes_max=4096 + LISTING_BYTES_MAX)


_OTHER_ROLE: Final = {
    LinkRole.TRAINING: "what answers is the training daemon of {region}, which measures only with daemons: leave out "
    "--alone to measure through the daemon that runs here, or start `diloco-node measure serve` beside that one on a "
    "port of its own (measure_port in run.toml)",
    LinkRole.JOINING: "{region} asks for the run of a daemon, and this is none",
    LinkRole.MEASURING: "what is there is no training daemon, but `diloco-node measure` of {region}: end it, or give "
    "it a port of its own (measure_port in run.toml)",
}


def encode_hello(hello: Hello) -> bytes:
    """A HELLO frame. Raises ValueError when a field is over its limit."""
    return bytes([KIND_HELLO]) + _HELLO.encode(hello)


def decode_hello(frame: bytes) -> Hello:
    """Decode a first frame. Raises PeerIncompatible: another version's. ProtocolViolation: no hello."""
    if not frame or frame[0] != KIND_HELLO:
        raise ProtocolViolation("the first frame on a stream must be a hello")
    try:
        return _HELLO.decode(memoryview(frame)[1:])
    except ProtocolViolation as error:
        peer_version = _hello_version(frame)
        if peer_version is not None and peer_version != PROTOCOL_VERSION:
            raise PeerIncompatible(_version_difference(PROTOCOL_VERSION, peer_version)) from None
        raise ProtocolViolation(f"hello: {error}") from None


def _hello_version(frame: bytes) -> int | None:
    """The protocol version in a hello of unknown shape: in all versions a small integer after head and tag 1."""
    head = 3 if frame[1:2] == b"\xdc" else 1
    tag, version = frame[1 + head : 2 + head], frame[2 + head : 3 + head]
    if tag == b"\x01" and version and version[0] < 0x80:
        return version[0]
    return None


def check_hello(ours: Hello, peer: Hello, *, certificate_region: str) -> None:
    """Check that the two sides belong together. ours: what we sent, or would send, on this stream. peer: what came.

    Raises ProtocolViolation: the message names another region than the certificate. PeerIncompatible: names every field
    that differs, with both values. ModelsDiffer: only the model does.
    """
    if peer.region != certificate_region:
        raise ProtocolViolation(
            f"identity_mismatch: the certificate is {certificate_region}'s, the hello says {peer.region}"
        )
    if peer.protocol_version == ours.protocol_version and peer.role is not ours.role:
        raise PeerIncompatible(_OTHER_ROLE[peer.role].format(region=peer.region))
    if different := _differences(ours, peer):
        is_of_the_run = replace(peer, manifest_digest=ours.manifest_digest)
        kind = PeerIncompatible if _differences(ours, is_of_the_run) else ModelsDiffer
        raise kind("; ".join(different))
    if peer.lane is not ours.lane:
        raise ProtocolViolation(f"a hello for the {peer.lane} lane on the {ours.lane} stream")
    if peer.connection != ours.connection:
        raise ProtocolViolation(f"a hello for connection {peer.connection} on connection {ours.connection}")


def _differences(ours: Hello, peer: Hello) -> list[str]:
    if ours.protocol_version != peer.protocol_version:
        return [_version_difference(ours.protocol_version, peer.protocol_version)]
    differences: list[str] = []
    for name in ("run_id", "founding_digest", "settings_digest", "manifest_digest"):
        here, there = getattr(ours, name), getattr(peer, name)
        if here == there or (name == "founding_digest" and not (here and there)):
            continue
        is_model = name == "manifest_digest"
        words = "" if is_model or name == "run_id" else settings_difference(ours.settings, peer.settings)
        words = tensor_difference(ours.model, peer.model) if is_model else words
        differences.append(words or f"{name}: ours {here!a}, theirs {there!a}")
    return list(dict.fromkeys(differences))


def _version_difference(ours: int, peer_version: int) -> str:
    """Both versions, and the order of work: entries and messages are read by the one version that wrote them."""
    return (
        f"protocol_version: ours {ours}, theirs {peer_version}: regions of two versions do not link. Stop all regions, "
        "install the same version everywhere, and start them"
    )


def settings_difference(ours: Sequence[str], peer_settings: Sequence[str]) -> str:
    """Name the settings, "name=value" each, that differ, as `rounds.sync_every is 24 here, 16 there`; empty: none is
    told.

    The peer's may be anything of the size of a hello, and are escaped.
    """
    if not ours or not peer_settings:
        return ""
    here, there = (dict(line.partition("=")[::2] for line in lines) for lines in (ours, peer_settings))
    # A region whose run has begun does not tell those that the ledger holds.
    untold = (here.keys() ^ there.keys()) & LEDGER_KEYS
    names = sorted(name for name in {*here, *there} - untold if here.get(name) != there.get(name))
    lines = [
        f"{escaped(name)} is {escaped(here.get(name, 'unknown'))} here, {escaped(there.get(name, 'unknown'))} there"
        for name in names[:SETTINGS_NAMED_MAX]
    ]
    if len(names) > len(lines):
        lines.append(f"{len(names) - len(lines)} more")
    return f"{'; '.join(lines)}: these settings of run.toml must be the same in all regions" if lines else ""


def encode_control(message: ControlMessage) -> bytes:
    """A CONTROL frame. Raises TypeError or ValueError for a message outside of the schema."""
    return b"\x02" + CONTROL.encode(message)


def decode_control(frame: bytes) -> ControlMessage:
    """The message of a CONTROL frame. Raises ProtocolViolation."""
    if not frame or frame[0] != KIND_CONTROL:
        raise ProtocolViolation(f"frame kind {frame[0] if frame else 'none'} on the control lane")
    return CONTROL.decode(memoryview(frame)[1:])


def encode_begin(transfer: int, header: TransferHeader, raw_bytes: int) -> bytes:
    """A BEGIN frame; `transfer` counts up on each stream, `raw_bytes` is the size before zstd."""
    return _BEGIN.pack(KIND_BEGIN, transfer, raw_bytes) + HEADERS.encode(header)


def encode_chunk(transfer: int, offset: int, raw_bytes: int, data: bytes | memoryview, *, is_compressed: bool) -> bytes:
    """A CHUNK frame. Copies `data` once, into the frame."""
    return b"".join((_CHUNK.pack(KIND_CHUNK, transfer, offset, raw_bytes, is_compressed), data))


def encode_end(transfer: int, chunks: Sequence[int] = ()) -> bytes:
    """An END frame; `chunks` is how many went over each connection."""
    return _END.pack(KIND_END, transfer) + _pack(chunks)


def encode_abort(transfer: int, reason: str, chunks: Sequence[int] = ()) -> bytes:
    """An ABORT frame; a long reason is cut."""
    head = _ABORT.pack(KIND_ABORT, transfer, len(chunks)) + _pack(chunks)
    return head + reason.encode("utf-8", "replace")[:REASON_BYTES_MAX]


def check_joined(frame: bytes) -> None:
    """Check that a frame is JOINED. Raises ProtocolViolation."""
    if frame != JOINED_FRAME:
        raise ProtocolViolation("a further bulk connection must begin with joined")


def _pack(chunks: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(chunks)}I", *chunks)


def decode_bulk(frame: bytes) -> BulkFrame:
    """A frame of the bulk lane. Raises ProtocolViolation."""
    kind = frame[0] if frame else 0
    if kind == KIND_CHUNK:
        return _decode_chunk(frame)
    if kind == KIND_BEGIN:
        return _decode_begin(frame)
    if kind == KIND_END:
        return _decode_end(frame)
    if kind == KIND_ABORT:
        return _decode_abort(frame)
    raise ProtocolViolation(f"frame kind {kind if frame else 'none'} on the bulk lane")


def _decode_begin(frame: bytes) -> TransferBegin:
    if len(frame) < _BEGIN.size:
        raise ProtocolViolation(f"a begin frame of {len(frame)} bytes")
    _, transfer, raw_bytes = _BEGIN.unpack_from(frame)
    if raw_bytes > TRANSFER_BYTES_MAX:
        raise ProtocolViolation(f"a transfer of {raw_bytes} bytes; the limit is {TRANSFER_BYTES_MAX}")
    return TransferBegin(transfer, raw_bytes, HEADERS.decode(memoryview(frame)[_BEGIN.size :]))


def _decode_end(frame: bytes) -> TransferEnd:
    counts, remainder = divmod(len(frame) - _END.size, _COUNT_BYTES)
    if remainder or not 0 <= counts <= TRANSFER_CONNECTIONS_MAX:
        raise ProtocolViolation(f"an end frame of {len(frame)} bytes")
    return TransferEnd(_END.unpack_from(frame)[1], struct.unpack_from(f"<{counts}I", frame, _END.size))


def _decode_abort(frame: bytes) -> TransferAbort:
    if len(frame) < _ABORT.size:
        raise ProtocolViolation(f"an abort frame of {len(frame)} bytes")
    _, transfer, counts = _ABORT.unpack_from(frame)
    reason_at = _ABORT.size + counts * _COUNT_BYTES
    if counts > TRANSFER_CONNECTIONS_MAX or not reason_at <= len(frame) <= reason_at + REASON_BYTES_MAX:
        raise ProtocolViolation(f"an abort frame of {len(frame)} bytes with {counts} counts")
    reason = frame[reason_at:].decode("utf-8", "replace")
    return TransferAbort(transfer, struct.unpack_from(f"<{counts}I", frame, _ABORT.size), reason)


def _decode_chunk(frame: bytes) -> TransferChunk:
    if len(frame) < _CHUNK.size:
        raise ProtocolViolation(f"a chunk frame of {len(frame)} bytes")
    _, transfer, offset, raw_bytes, flags = _CHUNK.unpack_from(frame)
    data = memoryview(frame)[_CHUNK.size :]
    if not 1 <= raw_bytes <= CHUNK_BYTES_MAX:
        raise ProtocolViolation(f"a chunk of {raw_bytes} raw bytes; 1 to {CHUNK_BYTES_MAX} are allowed")
    if len(data) > raw_bytes + CHUNK_SLACK_BYTES:
        raise ProtocolViolation(f"a chunk of {raw_bytes} raw bytes in {len(data)} bytes")
    if flags > 1:
        raise ProtocolViolation(f"a chunk with unknown flags {flags:#x}")
    if not flags and len(data) != raw_bytes:
        raise ProtocolViolation(f"an uncompressed chunk of {len(data)} bytes says that it has {raw_bytes}")
    return TransferChunk(transfer, offset, raw_bytes, bool(flags), data)
