"""The shared memory in which the daemon finds a region's encoded contributions, one place for each fragment."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FIRST_BLOCK, FragmentBlocks
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.block_rows import EncodedRows, squared_norm
from diloco_node.numeric import F32, F64, U8
from diloco_node.wire.learner_link import version_slots


class ContributionArea:
    """Encodes outer gradients into the area. Belongs to the encoder's thread.

    area: shape (sum of encoded bytes,), uint8; None on ranks that encode nothing. blocks: by fragment, its layout.
    """

    def __init__(self, manifest: Manifest, codec_up: Codec, area: U8 | None) -> None:
        self.blocks = layouts(manifest, codec_up)
        self._starts = [0, *accumulate(blocks.encoded_bytes for blocks in self.blocks)]
        self._area = np.zeros(0, np.uint8) if area is None else area
        self._zeros = np.zeros(0, np.float32)

    def warm_up(self, *, is_gathered: bool) -> None:
        """Load or compile the kernel now, not beside the first steps. `is_gathered`: for `encode_difference`, too."""
        smallest = min(self.blocks, key=lambda blocks: blocks.values)
        zeros = np.zeros(smallest.values, np.float32)
        kernels.encode_delta(smallest, zeros, zeros, np.zeros(smallest.encoded_bytes, np.uint8))
        if is_gathered:
            self._zeros = np.zeros(max(blocks.values for blocks in self.blocks), np.float32)

    def encode(self, index: int, base: F32, theta: F32, rows: Mapping[int, EncodedRows] | None = None) -> F64:
        """Encode `base - theta` of fragment `index`; returns the squared norms of its pieces.

        rows: by number of the piece what a device has encoded of it.

        Raises PayloadCorrupt: a value is not finite. LearnerError: so a device says, and it is not so.
        """
        start, blocks = self._starts[index], self.blocks[index]
        out = self._area[start : start + blocks.encoded_bytes]
        if not rows:
            return kernels.encode_delta(blocks, base, theta, out)
        if any((piece.squares < 0).any() for piece in rows.values()):
            kernels.encode_delta(blocks, base, theta, out)  # says what it refuses
            raise LearnerError(f"fragment {index}: the device refused values that the host encodes: it is damaged")
        norms = np.zeros(blocks.pieces, np.float64)
        for piece, (first, stop) in enumerate(pairwise(blocks.layout[:, FIRST_BLOCK].tolist())):
            target, values = out[blocks.byte_slice(first, stop)], blocks.value_slice(first, stop)
            if piece in rows:
                target[:] = rows[piece].code_bytes.reshape(-1)[: target.size]
                norms[piece] = squared_norm(rows[piece])
            else:
                norms += kernels.encode_delta(blocks, base[values], theta[values], target, first, stop)
        return norms

    def encode_difference(self, index: int, difference: F32) -> F64:
        """Encode `base - theta` that was subtracted before, to the bytes of `encode`: subtracting 0 changes nothing."""
        return self.encode(index, difference, self._zeros[: difference.size])

    def close(self) -> None:
        """Let go of the shared memory."""
        self._area = np.zeros(0, np.uint8)


def layouts(manifest: Manifest, codec_up: Codec) -> list[FragmentBlocks]:
    """Return the layout of each fragment's contribution."""
    return [FragmentBlocks(fragment.piece_sizes, codec_up) for fragment in manifest.fragments]


def area_sizes(manifest: Manifest, codec_up: Codec) -> tuple[int, int]:
    """Return the bytes of version area and contribution area."""
    slots, values = version_slots(manifest)
    return 4 * slots * values, sum(blocks.encoded_bytes for blocks in layouts(manifest, codec_up))
