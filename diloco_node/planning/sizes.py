"""Bytes of encoded fragments in each codec, for planning."""

from __future__ import annotations

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import Codec
from diloco_node.planning.plan import FragmentSize


def fragment_sizes(manifest: Manifest) -> tuple[FragmentSize, ...]:
    """The size of each fragment of a model, to the byte, by fragment index; zstd is not counted."""
    return tuple(_size(fragment.piece_sizes) for fragment in manifest.fragments)


def even_sizes(values: int, fragments: int) -> tuple[FragmentSize, ...]:
    """A model of which only the size is known, cut into equal fragments of one piece each.

    values: parameters, at least one per fragment. fragments: P.

    Raises ValueError: fewer values than fragments, or no fragment.
    """
    if not 1 <= fragments <= values:
        raise ValueError(f"{values} values can't be cut into {fragments} fragments")
    size, remainder = divmod(values, fragments)
    large, small = _size((size + 1,)), _size((size,))
    return (large,) * remainder + (small,) * (fragments - remainder)


def _size(pieces: tuple[int, ...]) -> FragmentSize:
    return FragmentSize(sum(pieces), {codec: FragmentBlocks(pieces, codec).encoded_bytes for codec in Codec})
