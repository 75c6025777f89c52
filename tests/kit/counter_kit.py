"""Trained counters as files."""

import zlib


def counter_file(steps: int, tokens: int) -> bytes:
    """What `learner/trained-N` holds, as docs/formats.md has it."""
    counts = steps.to_bytes(8, "little") + tokens.to_bytes(8, "little")
    return counts + zlib.crc32(counts).to_bytes(4, "little")
