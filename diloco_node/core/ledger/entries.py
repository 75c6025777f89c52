"""Entries of the ledger as bytes: one canonical encoding, the hash chain over it, strict decoding.

The encoding is msgpack over arrays, field by field in the order of the dataclasses, a body after the name of its kind.
It is canonical: one body has one encoding, and `decode_entry` refuses every other spelling of it (an integer in a
longer form, an integer for a float). Equal hashes therefore mean equal entries, and everything before them equal too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, get_args, get_type_hints

import msgpack

from diloco_node.core.bounds import CORE_BOUNDS, HASH, INDEX
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import (
    REGION_FIELDS,
    Bound,
    Check,
    Items,
    OutOfBounds,
    bound_of,
    check_relations,
    items_check,
    may_be_short,
    octets_check,
    relations,
    scalar_check,
    whole_array,
    whole_check,
)
from diloco_node.core.types import (
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    RevokedBody,
    RoundBody,
    SnapshotBody,
    SummaryBody,
)
from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation

ZERO_HASH: Final = bytes(32)
"""The `previous` of entry 1."""

ENTRY_BYTES_MAX: Final = 3 << 20
"""Longest encoded entry, below the limit of a control message. A round of 64 learners and 4,000 pieces takes 2.4 MB."""


class EntryKind(StrEnum):
    """The kind of a ledger entry. `LEADER` is the empty entry a new leader begins its term with."""

    GENESIS = "genesis"
    LEADER = "leader"
    ROUND = "round"
    DISCARDED = "discarded"
    FINISHED = "finished"
    DISK_NAMED = "disk-named"
    SNAPSHOT = "snapshot"
    SUMMARY = "summary"
    EXTENDED = "extended"
    REVOKED = "revoked"
    MEMBERSHIP = "membership"
    SETTINGS = "settings"


_BODY_TYPES: Final[dict[str, type[Any]]] = {
    EntryKind.GENESIS.value: GenesisBody,
    EntryKind.LEADER.value: LeaderBody,
    EntryKind.ROUND.value: RoundBody,
    EntryKind.DISCARDED.value: DiscardedBody,
    EntryKind.FINISHED.value: FinishedBody,
    EntryKind.DISK_NAMED.value: DiskNamedBody,
    EntryKind.SNAPSHOT.value: SnapshotBody,
    EntryKind.SUMMARY.value: SummaryBody,
    EntryKind.EXTENDED.value: ExtendedBody,
    EntryKind.REVOKED.value: RevokedBody,
    EntryKind.MEMBERSHIP.value: MembershipBody,
    EntryKind.SETTINGS.value: SettingsBody,
}
_KINDS: Final = {body_type: kind for kind, body_type in _BODY_TYPES.items()}
_DEPTH_MAX: Final = 6
"""An entry, its round, the members, one of them, its contribution, the norms."""

_INDEX: Final = whole_check(INDEX)
_TERM: Final = whole_check(INDEX)
_HASH: Final = octets_check(HASH)

_Plain = int | float | str | bytes | list[Any]


def seal(index: int, term: int, previous: bytes, body: EntryBody) -> Entry:
    """Make the entry with its place in the chain.

    Args:
        index: from 1.
        term: of the leader that appends it, from 1.
        previous: hash of entry `index - 1`, or ZERO_HASH.
        body: what it records.

    Raises:
        ValueError: a field has the wrong type or is out of its bounds (`core.bounds`), or the entry would be longer
            than ENTRY_BYTES_MAX.
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
            digest = _hash_of(entry.index, entry.term, entry.previous, entry.body)
        except ValueError as error:
            raise ProtocolViolation(f"entry {index} of the ledger: {error}") from error
        if entry.hash != digest:
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
            index=_INDEX(index),
            term=_TERM(term),
            previous=_HASH(previous),
            body=canonical_codec(body_type)[1](body),
            hash=_HASH(own_hash),
        )
        is_canonical = encode_entry(entry) == data
    except OutOfBounds as error:
        raise ProtocolViolation(f"not an entry of the ledger: {kind}{error.path}: {error.found}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolViolation(f"not an entry of the ledger: {type(error).__name__}: {error}") from error
    if not is_canonical:
        raise ProtocolViolation(f"entry {entry.index} of the ledger is not in its canonical encoding")
    return entry


def _hash_of(index: int, term: int, previous: bytes, body: EntryBody) -> bytes:
    return hashlib.sha256(previous + _pack([index, term, *_plain_body(body)])).digest()


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


_Codec = tuple[Check, Check]
_CODECS: Final[dict[Any, _Codec]] = {}


def canonical_codec(kind: Any) -> _Codec:
    """(write, read) for a dataclass as an array of its fields, which both refuse what is out of bounds. Made once."""
    if kind not in _CODECS:
        _CODECS[kind] = _dataclass_codec(kind)
    return _CODECS[kind]


def _dataclass_codec(kind: Any) -> _Codec:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    bounds = [bound_of(CORE_BOUNDS, kind.__name__, name) for name in names]
    codecs = [_field(hints[name], bound, name) for name, bound in zip(names, bounds, strict=True)]
    writers = [(name, write) for name, (write, _) in zip(names, codecs, strict=True)]
    readers = [(name, read) for name, (_, read) in zip(names, codecs, strict=True)]
    pairs = relations(names, bounds)

    is_short = may_be_short(kind)

    def write(value: Any) -> list[Any]:
        if type(value) is not kind:
            raise OutOfBounds(f"expected {kind.__name__}, found {type(value).__name__}")
        plain = _each_field(writers, [getattr(value, name) for name in names])
        return plain[:-1] if is_short and not plain[-1] else plain

    def read(plain: Any) -> Any:
        if is_short and type(plain) is list:
            plain = whole_array(plain, len(names))
        if type(plain) is not list or len(plain) != len(names):
            raise OutOfBounds(f"expected {kind.__name__} as an array of {len(names)}")
        return kind(*_each_field(readers, plain))

    def _each_field(checks: list[tuple[str, Check]], values: list[Any]) -> list[Any]:
        results = []
        for (name, check), value in zip(checks, values, strict=True):
            try:
                results.append(check(value))
            except OutOfBounds as error:
                raise error.within(f".{name}") from None
        if pairs:
            check_relations(names, results, pairs)
        return results

    return write, read


def _field(hint: Any, bound: Bound | None, name: str) -> _Codec:
    """Return the codec of one field: a dataclass, `tuple[X, ...]`, or a scalar with a bound."""
    if is_dataclass(hint):
        return canonical_codec(hint)
    if isinstance(bound, Items):
        write, read = _field(get_args(hint)[0], bound.of, name)
        return (
            items_check(write, bound, container=tuple, make=list),
            items_check(read, bound, container=list, make=tuple),
        )
    check = scalar_check(hint, bound, is_region=name in REGION_FIELDS)
    if check is None:
        raise TypeError(f"{name}: no bound in core/bounds.py for {hint!r}, found {bound}")
    if hint is float:
        # An integer in a float field gets the bytes of the float: 1 == 1.0, and equal bodies must have equal hashes.
        return (lambda value: check(float(value) if type(value) is int else value)), check
    return check, check
