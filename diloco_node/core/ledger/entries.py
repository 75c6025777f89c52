"""Entries of the ledger as bytes: one canonical encoding, the hash chain over it, strict decoding.

The encoding is msgpack over arrays, field by field in the order of the dataclasses, a body after the name of its kind.
It is canonical: one body has one encoding, and `decode_entry` refuses every other spelling of it (an integer in a
longer form, an integer for a float). Equal hashes therefore mean equal entries, and everything before them equal too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from diloco_node.core import types
from diloco_node.core.array_codec import ArrayCodecs, Codec
from diloco_node.core.bounds import CORE_BOUNDS, HASH, INDEX
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import OutOfBounds, number_check, octets_check
from diloco_node.core.types import Entry, EntryBody
from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation

ZERO_HASH: Final = bytes(32)
"""The `previous` of entry 1."""

ENTRY_BYTES_MAX: Final = 3 << 20
"""Longest encoded entry, below the limit of a control message. A round of 64 learners and 4,000 pieces takes 2.4 MB."""


BODY_TYPES: Final[dict[str, type[Any]]] = {
    "genesis": types.GenesisBody,
    "leader": types.LeaderBody,
    "round": types.RoundBody,
    "discarded": types.DiscardedBody,
    "finished": types.FinishedBody,
    "disk-named": types.DiskNamedBody,
    "snapshot": types.SnapshotBody,
    "summary": types.SummaryBody,
    "extended": types.ExtendedBody,
    "revoked": types.RevokedBody,
    "membership": MembershipBody,
    "settings": SettingsBody,
}
"""By the name of its kind on disk; a leader's entry is the empty one that it begins its term with.

On the wire a body has its place here as its tag: a further kind goes to the end.
"""

_KINDS: Final = {body_type: kind for kind, body_type in BODY_TYPES.items()}
_DEPTH_MAX: Final = 6
"""An entry, its round, the members, one of them, its contribution, the norms."""

_INDEX: Final = number_check(INDEX)
_HASH: Final = octets_check(HASH)

_Plain = int | float | str | bytes | list[Any]


def seal(index: int, term: int, previous: bytes, body: EntryBody) -> Entry:
    """Make the entry with its place in the chain. previous: hash of entry `index - 1`, or ZERO_HASH.

    Raises ValueError: a field has the wrong type or is out of its bounds, or the entry is over ENTRY_BYTES_MAX.
    """
    return Entry(index=index, term=term, previous=previous, body=body, hash=_hash_of(index, term, previous, body))


def verify_chain(
    entries: Sequence[Entry],
    *,
    previous_index: int = 0,
    previous_hash: bytes = ZERO_HASH,
    digests: Sequence[bytes] | None = None,
) -> None:
    """Check that the entries follow each other and the one before, by default none, and that every hash is right.

    digests: the hashes that are right; None: they are worked out here.

    Raises ProtocolViolation: names the first index that is wrong and what is wrong with it.
    """
    term = 0
    for offset, entry in enumerate(entries):
        index = previous_index + 1 + offset
        if entry.index != index:
            raise ProtocolViolation(f"entry {index} of the ledger is missing: found entry {entry.index} in its place")
        if entry.term < max(term, 1):
            raise ProtocolViolation(f"entry {index} of the ledger has term {entry.term}, the one before has {term}")
        if entry.previous != previous_hash:
            raise ProtocolViolation(f"entry {index} of the ledger does not follow entry {index - 1}: other hash")
        try:
            digest = digests[offset] if digests else _hash_of(entry.index, entry.term, entry.previous, entry.body)
        except ValueError as error:
            raise ProtocolViolation(f"entry {index} of the ledger: {error}") from error
        if entry.hash != digest:
            raise ProtocolViolation(f"entry {index} of the ledger does not match its hash")
        term, previous_hash = entry.term, entry.hash


def encode_entry(entry: Entry) -> bytes:
    """The entry as bytes, canonical. Raises ValueError: as `seal`."""
    plain = [entry.index, entry.term, entry.previous, *_plain_body(entry.body), entry.hash]
    return _pack(plain)


def decode_entry(data: bytes | memoryview) -> Entry:
    """The entry that `encode_entry` wrote. The hash is read, not checked: see `verify_chain`.

    Raises ProtocolViolation: not the canonical encoding of an entry.
    """
    return _decode(data)[0]


def decode_chain(texts: Sequence[bytes], *, previous_index: int, previous_hash: bytes) -> tuple[Entry, ...]:
    """The entries that follow that one. Raises ProtocolViolation: as `decode_entry` and `verify_chain`."""
    pairs = [_decode(data) for data in texts]
    entries, digests = tuple(entry for entry, _ in pairs), [digest for _, digest in pairs]
    verify_chain(entries, previous_index=previous_index, previous_hash=previous_hash, digests=digests)
    return entries


def _decode(data: bytes | memoryview) -> tuple[Entry, bytes]:
    """The entry, and the hash that is right for it: of the same plain values, which are not made a second time."""
    if len(data) > ENTRY_BYTES_MAX:
        raise ProtocolViolation(f"an entry of {len(data)} bytes: at most {ENTRY_BYTES_MAX} are allowed")
    try:
        plain = unpack(data, depth_max=_DEPTH_MAX, values_max=ENTRY_BYTES_MAX // 8, items_max=ENTRY_BYTES_MAX // 8)
        index, term, previous, kind, body, own_hash = plain
        body_type = BODY_TYPES[kind]
        entry = Entry(
            index=_INDEX(index),
            term=_INDEX(term),
            previous=_HASH(previous),
            body=canonical_codec(body_type)[1](body),
            hash=_HASH(own_hash),
        )
        is_canonical = _pack(plain) == data
        digest = _hash(previous, [index, term, kind, body])
    except OutOfBounds as error:
        raise ProtocolViolation(f"not an entry of the ledger: {kind}{error.path}: {error.found}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolViolation(f"not an entry of the ledger: {type(error).__name__}: {error}") from error
    if not is_canonical:
        raise ProtocolViolation(f"entry {entry.index} of the ledger is not in its canonical encoding")
    return entry, digest


def _hash_of(index: int, term: int, previous: bytes, body: EntryBody) -> bytes:
    return _hash(previous, [index, term, *_plain_body(body)])


def _hash(previous: bytes, plain: list[_Plain]) -> bytes:
    return hashlib.sha256(previous + _pack(plain)).digest()


def body_kind(body: EntryBody) -> str:
    """Its name on the wire and on disk, such as "round"."""
    return _KINDS[type(body)]


def _plain_body(body: EntryBody) -> list[_Plain]:
    kind = _KINDS.get(type(body))
    if kind is None:
        raise ValueError(f"{type(body).__name__} is no body of an entry")
    try:
        return [kind, canonical_codec(type(body))[0](body)]
    except OutOfBounds as error:
        raise ValueError(f"{type(body).__name__}{error.path}: {error.found}") from None


def _pack(plain: list[_Plain]) -> bytes:
    data: bytes = msgpack.packb(plain, use_bin_type=True)
    if len(data) > ENTRY_BYTES_MAX:
        raise ValueError(f"an entry of {len(data)} bytes: at most {ENTRY_BYTES_MAX} are allowed")
    return data


_CODECS: Final[dict[type, Codec]] = {}


def canonical_codec(kind: type) -> Codec:
    """(write, read) for a dataclass as an array of its fields, which both refuse what is out of bounds. Made once."""
    if kind not in _CODECS:
        _CODECS[kind] = ArrayCodecs(CORE_BOUNDS, {}).codec(kind)
    return _CODECS[kind]
