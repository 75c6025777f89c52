"""Entries of the ledger as bytes: one canonical encoding, the hash chain over it, strict decoding.

The encoding is msgpack over arrays, field by field in the order of the dataclasses, a body after the name of its kind.
It is canonical: one body has one encoding, and `decode_entry` refuses every other spelling of it (an integer in a
longer form, an integer for a float). Equal hashes therefore mean equal entries, and everything before them equal too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

import msgpack

from diloco_node.core.types import (
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    EntryKind,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    RoundBody,
)
from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation

ZERO_HASH: Final = bytes(32)
"""The `previous` of entry 1."""

ENTRY_BYTES_MAX: Final = 3 << 20
"""Longest encoded entry, below the limit of a control message. A round of 64 learners and 4,000 pieces takes 2.4 MB."""

_BODY_TYPES: Final[dict[str, type[Any]]] = {
    EntryKind.GENESIS.value: GenesisBody,
    EntryKind.LEADER.value: LeaderBody,
    EntryKind.ROUND.value: RoundBody,
    EntryKind.DISCARDED.value: DiscardedBody,
    EntryKind.FINISHED.value: FinishedBody,
    EntryKind.DISK_NAMED.value: DiskNamedBody,
}
_KINDS: Final = {body_type: kind for kind, body_type in _BODY_TYPES.items()}
_INT_LIMIT: Final = 1 << 63
_STR_CHARS_MAX: Final = 4096
_DEPTH_MAX: Final = 6
"""An entry, its round, the members, one of them, its contribution, the norms."""

_Plain = int | float | str | bytes | list[Any]


def seal(index: int, term: int, previous: bytes, body: EntryBody) -> Entry:
    """Make the entry with its place in the chain.

    Args:
        index: from 1.
        term: of the leader that appends it, from 1.
        previous: hash of entry `index - 1`, or ZERO_HASH.
        body: what it records.

    Raises:
        ValueError: a field has the wrong type or is out of range (NaN, an integer beyond 63 bits), or the entry would
            be longer than ENTRY_BYTES_MAX.
    """
    return Entry(index=index, term=term, previous=previous, body=body, hash=_hash_of(index, term, previous, body))


def verify_chain(entries: Sequence[Entry], *, previous_index: int = 0, previous_hash: bytes = ZERO_HASH) -> None:
    """Check that the entries follow each other and what comes before, and that every hash is right.

    Args:
        entries: in order; may be empty.
        previous_index, previous_hash: the entry before the first one; by default none.

    Raises:
        ProtocolViolation: names the first index that is wrong and what is wrong with it.
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
            expected = _hash_of(entry.index, entry.term, entry.previous, entry.body)
        except ValueError as error:
            raise ProtocolViolation(f"entry {index} of the ledger: {error}") from error
        if entry.hash != expected:
            raise ProtocolViolation(f"entry {index} of the ledger does not match its hash")
        term, previous_hash = entry.term, entry.hash


def encode_entry(entry: Entry) -> bytes:
    """The entry as bytes, canonical.

    Raises:
        ValueError: as `seal`.
    """
    plain = [entry.index, entry.term, entry.previous, *_plain_body(entry.body), entry.hash]
    return _pack(plain)


def decode_entry(data: bytes | memoryview) -> Entry:
    """The entry that `encode_entry` wrote. The hash is read, not checked: see `verify_chain`.

    Raises:
        ProtocolViolation: not the canonical encoding of an entry.
    """
    if len(data) > ENTRY_BYTES_MAX:
        raise ProtocolViolation(f"an entry of {len(data)} bytes: at most {ENTRY_BYTES_MAX} are allowed")
    try:
        plain = unpack(data, depth_max=_DEPTH_MAX, values_max=ENTRY_BYTES_MAX // 8, items_max=ENTRY_BYTES_MAX // 8)
        index, term, previous, kind, body, own_hash = plain
        body_type = _BODY_TYPES[kind]
        entry = Entry(
            index=_read_int(index),
            term=_read_int(term),
            previous=_read_hash(previous),
            body=_codec(body_type)[1](body),
            hash=_read_hash(own_hash),
        )
        is_canonical = encode_entry(entry) == data
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolViolation(f"not an entry of the ledger: {type(error).__name__}: {error}") from error
    if not is_canonical:
        raise ProtocolViolation(f"entry {entry.index} of the ledger is not in its canonical encoding")
    return entry


def _hash_of(index: int, term: int, previous: bytes, body: EntryBody) -> bytes:
    return hashlib.sha256(previous + _pack([index, term, *_plain_body(body)])).digest()


def _plain_body(body: EntryBody) -> list[_Plain]:
    kind = _KINDS.get(type(body))
    if kind is None:
        raise ValueError(f"{type(body).__name__} is no body of an entry")
    return [kind, _codec(type(body))[0](body)]


def _pack(plain: list[_Plain]) -> bytes:
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    if len(packed) > ENTRY_BYTES_MAX:
        raise ValueError(f"an entry of {len(packed)} bytes: at most {ENTRY_BYTES_MAX} are allowed")
    return packed


_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _codec(kind: Any) -> _Codec:
    """(write, read) for a dataclass, `tuple[X, ...]`, or a scalar; made once for each type."""
    if kind not in _CODECS:
        _CODECS[kind] = _dataclass_codec(kind) if is_dataclass(kind) else _tuple_codec(kind)
    return _CODECS[kind]


def _tuple_codec(kind: Any) -> _Codec:
    write_item, read_item = _codec(get_args(kind)[0])
    return (lambda values: [write_item(value) for value in values], lambda plain: _read_tuple(plain, read_item))


def _dataclass_codec(kind: Any) -> _Codec:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    codecs = [_codec(hints[name]) for name in names]

    def write(value: Any) -> list[Any]:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
        return [codec[0](getattr(value, name)) for name, codec in zip(names, codecs, strict=True)]

    def read(plain: Any) -> Any:
        if type(plain) is not list or len(plain) != len(names):
            raise ValueError(f"expected {kind.__name__} as an array of {len(names)}")
        return kind(*[codec[1](item) for item, codec in zip(plain, codecs, strict=True)])

    return write, read


def _read_tuple(plain: Any, read_item: Callable[[Any], Any]) -> tuple[Any, ...]:
    if type(plain) is not list:
        raise ValueError(f"expected an array, found {type(plain).__name__}")
    return tuple(read_item(item) for item in plain)


def _read_int(value: Any) -> int:
    if type(value) is not int or not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ValueError(f"expected an integer of 64 bits, found {value!r:.40}")
    return value


def _write_float(value: Any) -> float:
    # An integer in a float field gets the bytes of the float: 1 == 1.0, and equal bodies must have equal hashes.
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"expected a finite float, found {value!r:.40}")
    return float(value)


def _read_float(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"expected a finite float, found {value!r:.40}")
    return value


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, found {value!r:.40}")
    return value


def _check_str(value: Any) -> str:
    if type(value) is not str or len(value) > _STR_CHARS_MAX:
        raise ValueError(f"expected a string of at most {_STR_CHARS_MAX} characters, found {value!r:.40}")
    return value


def _check_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"expected bytes, found {type(value).__name__}")
    return value


def _read_hash(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != len(ZERO_HASH):
        raise ValueError("expected a hash of 32 bytes")
    return value


_CODECS: Final[dict[Any, _Codec]] = {
    bool: (_check_bool, _check_bool),
    int: (_read_int, _read_int),
    float: (_write_float, _read_float),
    str: (_check_str, _check_str),
    bytes: (_check_bytes, _check_bytes),
}
