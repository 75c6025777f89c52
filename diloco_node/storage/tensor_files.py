"""Payload and state files: a header that says what is in the file, then raw bytes. Written once, never changed.

::

    payloads/f003-v00000012-0123456789abcdef.bin   the merged stripes of a round in block order
    state/f003-v00000008.bin                       parameters, then momentum, float32

The header is 512 bytes: magic, msgpack of the fields, zeros, CRC-32 of what is before. A payload's content is checked
against the digest that the ledger names: SHA-256 over the digests of its stripes, whose sizes are in the header. So
nothing has to be hashed while a round waits for the disk. A state's content is checked with a BLAKE3 of its own.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import numpy as np
from blake3 import blake3

from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.errors import StorageError
from diloco_node.numeric import F32, U8
from diloco_node.storage.durable import DamagedFile, disk_error, replace_file

HEADER_BYTES: Final = 512
PARTS_MAX: Final = 64
"""Stripes of a payload: `core.merge.stripes` makes fewer."""

_MAGIC: Final = b"DLTENS2\n"
_NAME: Final = re.compile(r"f(\d{3,})-v(\d{8,})(?:-([0-9a-f]{16}))?\.bin")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of a file.

    Attributes:
        kind: "payload" or "state". fragment, version: whose it is. content_bytes: after the header.
        digest: of a payload: SHA-256 over its stripes' digests; of a state: what the caller gave.
        checksum: of the content of a state: BLAKE3. Empty for a payload, whose digest checks it.
        part_bytes: of a payload: the sizes of its stripes. Empty for a state.
    """

    kind: str
    fragment: int
    version: int
    digest: bytes
    content_bytes: int
    checksum: bytes
    part_bytes: tuple[int, ...]

    def encode(self) -> bytes:
        """As HEADER_BYTES bytes."""
        fields = [self.kind, self.fragment, self.version, self.digest, self.content_bytes, self.checksum]
        fields.append(self.part_bytes)
        plain: bytes = _MAGIC + msgpack.packb(fields)
        assert len(plain) <= HEADER_BYTES - 4, len(plain)
        content = plain.ljust(HEADER_BYTES - 4, b"\0")
        return content + zlib.crc32(content).to_bytes(4, "little")


def payload_name(fragment: int, version: int, digest: bytes) -> str:
    """File name of a payload."""
    return f"f{fragment:03d}-v{version:08d}-{digest[:8].hex()}.bin"


def state_name(fragment: int, version: int) -> str:
    """File name of a state."""
    return f"f{fragment:03d}-v{version:08d}.bin"


def named_version(path: Path) -> tuple[int, int] | None:
    """(fragment, version) of a file's name; None if it is not such a name."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None


def write_payload(path: Path, stripes: Sequence[memoryview], *, fragment: int, version: int, digest: bytes) -> None:
    """Write a payload; durable when this returns. Raises StorageError; ValueError for more than PARTS_MAX parts."""
    sizes = tuple(len(stripe) for stripe in stripes)
    if len(sizes) > PARTS_MAX:
        raise ValueError(f"a payload of {len(sizes)} stripes, at most {PARTS_MAX}")
    header = TensorHeader("payload", fragment, version, digest, sum(sizes), b"", sizes)
    replace_file(path, [header.encode(), *stripes])


def write_state(path: Path, theta: F32, momentum: F32, *, fragment: int, version: int, digest: bytes) -> None:
    """Write parameters and momentum; durable when this returns. Raises StorageError."""
    arrays = [_bytes_of(theta), _bytes_of(momentum)]
    header = TensorHeader(
        "state", fragment, version, digest, sum(len(array) for array in arrays), _checksum(arrays), ()
    )
    replace_file(path, [header.encode(), *arrays])


def read_header(path: Path) -> TensorHeader:
    """Read the header, checked with the file's name and size. Raises DamagedFile. StorageError: it can't be read."""
    try:
        with path.open("rb") as file:
            return _checked_header(path, file)
    except OSError as error:
        raise _read_error(path, error) from error


def _checked_header(path: Path, file: BinaryIO) -> TensorHeader:
    data, size_bytes = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    checksum = int.from_bytes(data[HEADER_BYTES - 4 :], "little")
    is_whole = len(data) == HEADER_BYTES and data.startswith(_MAGIC)
    if not is_whole or zlib.crc32(data[: HEADER_BYTES - 4]) != checksum:
        raise DamagedFile(f"{path} is damaged: its header does not match its checksum")
    unpacker: Any = msgpack.Unpacker(max_buffer_size=HEADER_BYTES)  # also the most items that an array may claim
    unpacker.feed(data[len(_MAGIC) : HEADER_BYTES - 4])
    kind, fragment, version, digest, content_bytes, checksum, part_bytes = unpacker.unpack()
    header = TensorHeader(kind, fragment, version, digest, content_bytes, checksum, tuple(part_bytes))
    is_payload = header.kind == "payload"
    right_name = payload_name(header.fragment, header.version, header.digest) if is_payload else None
    if path.name != (right_name or state_name(header.fragment, header.version)):
        raise DamagedFile(f"{path} holds another thing: {header.kind} {header.fragment} version {header.version}")
    if size_bytes != HEADER_BYTES + header.content_bytes:
        tail_bytes = size_bytes - HEADER_BYTES
        raise DamagedFile(f"{path} is damaged: {tail_bytes} bytes of content, its header says {header.content_bytes}")
    return header


def read_content(path: Path) -> tuple[TensorHeader, U8]:
    """Header and content, shape (content_bytes,), uint8, owned by the caller; both checked. Raises as `read_header`."""
    try:
        with path.open("rb", buffering=0) as file:  # a rename may put another file in its place meanwhile
            header = _checked_header(path, file)
            content = np.fromfile(file, dtype=np.uint8, count=header.content_bytes)
    except OSError as error:
        raise _read_error(path, error) from error
    if len(content) != header.content_bytes or not _is_intact(header, content):
        raise DamagedFile(f"{path} is damaged: its content does not match its checksum")
    return header, content


def _read_error(path: Path, error: OSError) -> StorageError:
    refusal = disk_error("read", path, error)
    return DamagedFile(str(refusal)) if error.errno == errno.EIO else refusal


def _bytes_of(values: F32) -> memoryview:
    if values.dtype != np.float32 or values.ndim != 1:
        raise ValueError(f"expected a vector of float32, found {values.dtype} {values.shape}")
    return np.ascontiguousarray(values).view(np.uint8).data


def _is_intact(header: TensorHeader, content: U8) -> bool:
    if header.kind != "payload":
        return _checksum([content.data]) == header.checksum
    ends = list(itertools.accumulate(header.part_bytes))
    stripes = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return payload_digest([stripe_digest(stripe.data) for stripe in stripes]) == header.digest


def _checksum(arrays: Sequence[memoryview]) -> bytes:
    digest = blake3()
    for array in arrays:
        digest.update(array)
    return digest.digest()
