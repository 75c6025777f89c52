"""Chunks of encoded bytes on the wire: zstd where it pays, and nothing decoded before its header was believed.

A compressed chunk is exactly one zstd frame with its content size and a checksum (the low half of XXH64 of the raw
bytes). A chunk that does not pay travels as it is, without a checksum: TLS authenticates every record.

Every refusal is PayloadCorrupt, and its message begins with one word for logs and counters: `frame` (not a zstd
frame, or broken inside), `declared_size`, `window_too_large`, `dictionary`, `checksum`, `trailing_data`.
"""

from __future__ import annotations

import threading
from typing import Final

import zstandard

from diloco_node.errors import PayloadCorrupt

CHUNK_RAW_BYTES_MAX: Final = 1 << 20
"""Raw bytes of one chunk."""

WINDOW_BYTES_MAX: Final = 8 << 20
"""The largest decoder window a frame may ask for. Level 1 on a chunk of 1 MiB asks for 512 KiB."""

ZSTD_LEVEL: Final = 1
"""int4 and bf16 gain a fifth at about 1 GB/s per core; higher levels gain next to nothing on quantised values."""

PAYS_BELOW: Final = 0.97
"""Sent compressed when the frame is smaller than this part of the raw bytes: below, decoding costs more than it
saves."""

_COMPRESSED_MISSES_MAX: Final = 2
_SAMPLE_EVERY: Final = 16

SAMPLE_BYTES: Final = 32 << 10
"""Bytes of a chunk to try where compression did not pay of late: all of it, with the way to a thread and back, costs
more.
"""


class CompressionPolicy:
    """Stops trying where compression does not pay, and looks again now and then: for a stream of similar chunks.

    After 2 chunks in a row that did not pay only every 16th is tried, a sample of it first, until one pays. A pure
    function of the sizes seen.
    """

    def __init__(self) -> None:
        self._misses = 0
        self._skipped = 0

    def should_try(self) -> bool:
        """Whether the next chunk is worth compressing. Call once per chunk."""
        if self._misses < _COMPRESSED_MISSES_MAX:
            return True
        self._skipped = (self._skipped + 1) % _SAMPLE_EVERY
        return self._skipped == 0

    def is_worth(self, raw: memoryview) -> bool:
        """Whether to compress the next chunk. Call once per chunk, and then `record`; it takes 0.1 ms at most."""
        if not self.should_try():
            return False
        if self._misses >= _COMPRESSED_MISSES_MAX and not compress_chunk(raw[:SAMPLE_BYTES])[0]:
            self.record(paid=False)
            return False
        return True

    def record(self, *, paid: bool) -> None:
        """Tell what came of a try."""
        self._misses = 0 if paid else self._misses + 1


class _Contexts(threading.local):
    """zstd contexts are expensive to make and not safe to share: one pair per thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)


_contexts = _Contexts()


def compress_chunk(raw: memoryview) -> tuple[bool, bytes | memoryview]:
    """Compress one chunk if it pays. Safe in any thread; releases the GIL while zstd works.

    Returns: (True, one zstd frame), or (False, raw itself). Raises ValueError: the chunk is too long.
    """
    if raw.nbytes > CHUNK_RAW_BYTES_MAX:
        raise ValueError(f"a chunk has at most {CHUNK_RAW_BYTES_MAX} bytes, got {raw.nbytes}")
    if raw.nbytes == 0:
        return False, raw
    frame = _contexts.compressor.compress(raw)
    return (True, frame) if len(frame) < PAYS_BELOW * raw.nbytes else (False, raw)


def decompress_chunk(data: bytes | memoryview, target: memoryview) -> None:
    """Decode one compressed chunk, and nothing after it, into its place, of exactly its raw bytes. Safe in any thread.

    The size in the frame's header is compared with that of `target` before any decoder runs or memory is taken:
    zstd's own limits don't hold when a frame declares a size. `target` is untouched when the chunk is refused.

    Raises PayloadCorrupt: see the module's docstring for the reasons.
    """
    try:
        header = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"frame: {len(data)} bytes do not begin with a zstd frame ({error})") from None
    if header.content_size != target.nbytes or target.nbytes > CHUNK_RAW_BYTES_MAX:
        raise PayloadCorrupt(f"declared_size: the frame declares {header.content_size} bytes, expected {target.nbytes}")
    if target.nbytes == 0:  # zstandard looks no further into a frame that declares nothing
        raise PayloadCorrupt("declared_size: an empty chunk is never compressed")
    if header.window_size > WINDOW_BYTES_MAX:
        raise PayloadCorrupt(f"window_too_large: {header.window_size} bytes, at most {WINDOW_BYTES_MAX} are allowed")
    if header.dict_id != 0:
        raise PayloadCorrupt(f"dictionary: the frame asks for dictionary {header.dict_id}, none is in use")
    if not header.has_checksum:
        raise PayloadCorrupt("checksum: the frame has none")
    try:
        raw = _contexts.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"{_reason(str(error))}: {error}") from None
    if len(raw) != target.nbytes:
        raise PayloadCorrupt(f"declared_size: the frame declares {target.nbytes} bytes and holds {len(raw)}")
    target[:] = raw


def _reason(message: str) -> str:
    """The word for a refusal that zstd made while decoding; it tells them apart only in its text."""
    if "unused data" in message:
        return "trailing_data"
    return "checksum" if "checksum" in message else "frame"
