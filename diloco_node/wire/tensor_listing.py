"""The tensors of a model in a hello: regions whose models differ name the tensors. Only words follow from it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

from diloco_node.core.bounds import LISTING_BYTES_MAX
from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.escaping import escaped

_TEXT_BYTES_MAX: Final = 4 << 20
_NAME_SHOWN: Final = 200


def pack_tensors(tensors: Sequence[TensorSpec]) -> bytes:
    """Name, shape and merge rule of all tensors, compressed; empty if that is over LISTING_BYTES_MAX."""
    rows = [[spec.name, list(spec.shape), spec.merge.value] for spec in tensors]
    listing = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 9)
    return listing if len(listing) <= LISTING_BYTES_MAX else b""


def tensor_difference(own_listing: bytes, peer_listing: bytes) -> str:
    """Name the first tensor on each side that the other lacks, or has in another shape; empty if that is not known. The
    peer's listing may be anything, and is escaped."""
    here, there = _unpack(own_listing), _unpack(peer_listing)
    if not here or not there:
        return ""
    sides = (("here", here.keys() - there.keys()), ("there", there.keys() - here.keys()))
    words = [f"tensor {_word(min(names))} is only {place}" for place, names in sides if names]
    if not words:
        name = min((name for name in here if here[name] != there[name]), default="")
        words = [f"tensor {_word(name)} is {_word(here[name])} here, {_word(there[name])} there"] if name else []
    return f"the models differ: {', '.join(words)}" if words else ""


def _unpack(listing: bytes) -> dict[str, str]:
    """Shape and rule of each tensor, in words; empty if it is no listing."""
    try:
        return {str(name): f"{shape} ({rule})" for name, shape, rule in unpack_rows(listing)}
    except (ValueError, TypeError, RecursionError, zlib.error):
        return {}


def unpack_rows(listing: bytes) -> Any:
    """Return the JSON in a listing. Raises ValueError, RecursionError or zlib.error: there is none."""
    return json.loads(zlib.decompressobj().decompress(listing, _TEXT_BYTES_MAX))


def _word(text: str) -> str:
    return escaped(text[:_NAME_SHOWN])
