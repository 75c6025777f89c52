"""Wrong messages: of a right one each field, one at a time, with values that no honest region sends.

They are encoded without the checks of `wire`, for a client that means harm has none. `sample` makes a right message of
any kind, so that kinds which are added later are wrong here too.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack

from diloco_node.core.array_codec import may_be_short
from diloco_node.core.shapes import REGION_FIELDS, Items, bound_of
from diloco_node.errors import PeerError
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_tables import BULK_HEADERS, CONTROL, ENTRY_BODIES, HEADERS, MESSAGES

TAGS = {cls: tag for tag, cls in (MESSAGES | ENTRY_BODIES).items()}
HEADER_TAGS = {cls: tag for tag, cls in BULK_HEADERS.items()}
Row = tuple[str, str]


@dataclass(frozen=True)
class Mutation:
    """One wrong message.

    Attributes:
        row: class and field of the bounds table. text: what was changed, for people.
        data: msgpack. is_header: of a bulk transfer, else a control message.
    """

    row: Row
    text: str
    data: bytes
    is_header: bool

    @property
    def has_shape(self) -> bool:
        """Whether `wire` lets it pass: then only what it means is wrong."""
        try:
            (HEADERS if self.is_header else CONTROL).decode(self.data)
        except PeerError:
            return False
        return True


def plain(value: Any, tags: Mapping[type, int], *, is_tagged: bool = True) -> Any:
    """A message as the nested arrays that travel; nothing is checked."""
    if dataclasses.is_dataclass(value):
        fields = [plain(getattr(value, one.name), tags, is_tagged=False) for one in dataclasses.fields(value)]
        if may_be_short(type(value)) and not fields[-1]:
            fields.pop()
        has_tag = is_tagged or type(value) in ENTRY_BODIES.values()
        return [tags[type(value)], *fields] if has_tag else fields
    if isinstance(value, tuple):
        return [plain(one, tags, is_tagged=False) for one in value]
    return value.value if isinstance(value, Enum) else value


def wrong_values(value: Any) -> Iterator[Any]:
    """What may stand in a field instead of an honest value."""
    if isinstance(value, bool):
        yield from (not value, 2, None)
    elif isinstance(value, int):
        yield from (-1, 0, value - 1, value + 1, value + 1000, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1.5)
        yield from (None, "1")
    elif isinstance(value, float):
        yield from (0.0, -value, 1e-300, 1e300, math.nan, math.inf, -math.inf, 0, None)
    elif isinstance(value, str):
        yield from ("", "nobody", "us-west", "eu-west", "../../x", "\x1b[2J\x1b]0;x\x07\n")
        yield from ("x" * 900, "x" * 70_000, 7, None)
    elif isinstance(value, bytes):
        flipped = bytes([value[0] ^ 1, *value[1:]]) if value else b"\0"
        yield from (b"", flipped, value[:-1], value + b"\0", bytes(len(value)), b"x" * 70_000, None)
    elif isinstance(value, list):
        yield from ([], value + value, value[:-1], list(reversed(value)), value * 500, None, 7)
    elif value is None:
        yield from (0, "", [])


def mutations(message: Any, *, is_header: bool = False) -> Iterator[Mutation]:
    """All wrong forms of a message: each field of it and of what is inside it, one at a time."""
    tags = HEADER_TAGS if is_header else TAGS
    whole = plain(message, tags)
    for row, path, value in _leaves(message, (1,)):
        for wrong in wrong_values(_at(whole, path)):
            if type(wrong) is type(_at(whole, path)) and wrong == _at(whole, path):
                continue
            changed = _replaced(whole, path, wrong)
            text = f"{type(message).__name__}: {'.'.join(row)} {str(value)[:40]!r} -> {str(wrong)[:40]!r}"
            yield Mutation(row, text, msgpack.packb(changed), is_header)


def _leaves(value: Any, start: tuple[int, ...]) -> Iterator[tuple[Row, tuple[int, ...], Any]]:
    """(row, path in the arrays, value) of each field, and of what is inside it; of a tuple inside its first item."""
    for index, one in enumerate(dataclasses.fields(value)):
        inner = getattr(value, one.name)
        if inner == () and may_be_short(type(value)) and index == len(dataclasses.fields(value)) - 1:
            continue  # it does not travel
        path = (*start[:-1], start[-1] + index)
        row = (type(value).__name__, one.name)
        if dataclasses.is_dataclass(inner):
            yield row, path, inner
            yield from _leaves(inner, (*path, _first_field(inner)))
            continue
        yield row, path, inner
        if isinstance(inner, tuple) and inner:
            if dataclasses.is_dataclass(inner[0]):
                yield from _leaves(inner[0], (*path, 0, _first_field(inner[0])))
            else:
                yield row, (*path, 0), inner[0]


def _first_field(value: Any) -> int:
    return 1 if type(value) in ENTRY_BODIES.values() else 0


def _at(whole: Any, path: tuple[int, ...]) -> Any:
    for index in path:
        whole = whole[index]
    return whole


def _replaced(whole: list[Any], path: tuple[int, ...], wrong: Any) -> list[Any]:
    copy = list(whole)
    copy[path[0]] = wrong if len(path) == 1 else _replaced(whole[path[0]], path[1:], wrong)
    return copy


def sample(cls: type, known: Mapping[str, Any]) -> Any:
    """A message of any kind: with what is known by its fields' names, else with the least that bounds allow."""
    hints = typing.get_type_hints(cls)
    names = [one.name for one in dataclasses.fields(cls)]
    return cls(
        **{
            name: known[key]
            if (key := next((key for key in (f"{cls.__name__}.{name}", name) if key in known), None)) is not None
            else _least(hints[name], bound_of(BOUNDS, cls.__name__, name), name, known)
            for name in names
        }
    )


def completed(message: Any, known: Mapping[str, Any]) -> Any:
    """The message with an item in each tuple that is empty, so that there is something to be wrong."""
    hints = typing.get_type_hints(type(message))
    changes = {
        name: _least(hints[name], bound_of(BOUNDS, type(message).__name__, name), name, known)
        for name in hints
        if getattr(message, name) == ()
    }
    return dataclasses.replace(message, **changes)


def _least(hint: Any, bound: Any, name: str, known: Mapping[str, Any]) -> Any:
    inner = [one for one in typing.get_args(hint) if one not in (Ellipsis, types.NoneType)]
    if typing.get_origin(hint) is tuple:
        return (_least(inner[0], bound.of if isinstance(bound, Items) else None, name, known),)
    if inner:
        return _least(inner[0], bound, name, known)
    if dataclasses.is_dataclass(hint):
        return sample(typing.cast(type, hint), known)
    if issubclass(hint, Enum):
        return next(iter(hint))
    octets = bytes(max(bound.lengths, default=8)) if hint is bytes else b""
    text = known["region"] if name in REGION_FIELDS else "x"
    real = min(1.0, getattr(bound, "highest", 1.0))
    return {
        bool: False,
        int: getattr(bound, "lowest", 1),
        float: real,
        bytes: octets,
        str: text,
    }[hint]


def rows_of(sent: list[Mutation]) -> set[Row]:
    """The rows of the bounds table that these touch."""
    return {one.row for one in sent}
