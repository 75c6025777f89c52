"""A region that lies: some of its messages differ from its core's, in one field at a time.

A lie is of the field's type and passes the schema, so only a check of its meaning can find it. Control messages, bodies
that it proposes as leader, and the headers and bytes of bulk transfers are changed.

Fields by which majorities are counted (`COUNTED`) stay as they are: no Raft stands a voter
that votes twice, acknowledges what it does not have, or leads a term for which nobody elected it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from diloco_node.core import messages as msg
from diloco_node.core.shapes import REGION_FIELDS
from diloco_node.errors import ProtocolViolation
from diloco_node.lab.sim.host import CoreFactory, Host
from diloco_node.lab.sim.world import FakeNetwork, World
from diloco_node.wire.envelope import TransferBegin, decode_bulk, decode_control, encode_begin, encode_control

COUNTED: dict[type, tuple[str, ...]] = {
    msg.RequestVote: ("last_index", "last_term", "disk", "has_view"),
    msg.RequestVoteReply: ("term", "pre_vote", "granted", "disk"),
    msg.AppendEntries: ("term", "commit_index", "entries"),
    msg.AppendEntriesReply: ("accepted", "durable_index", "durable_hash", "disk"),
}
"""Fields by which elections and commits are counted."""

REMEMBERED_MAX = 16
"""Values of a field that are kept, to be said again later."""

HUGE = (2**31, 2**40, 2**50, 2**62, 2**63 - 1)

TOLERATED = ("other bytes than its digest", "stripe of")
"""Words of a fake about bytes that do not fit their header."""


class Liar:
    """Changes what a region sends, from the seed.

    Attributes:
        region: which one. rate: chance of each message to be changed.
        lies: how many were told, by what was changed. is_over: it tells the truth from now on.
        has_forged: it has proposed what nobody decided.
    """

    def __init__(
        self,
        world: World,
        network: FakeNetwork,
        hosts: Mapping[str, Host],
        region: str,
        *,
        rate: float,
    ) -> None:
        self.rate = rate
        self.lies: dict[str, int] = {}
        self.is_over = False
        self.has_forged = False
        self._world = world
        self._rng = Random(world.rng.getrandbits(63))
        self._names = sorted(hosts)
        self.region = region
        self._layouts = hosts[region].setup.layouts
        self._values: dict[tuple[str, str], list[Any]] = {}
        network.frame_spoilers[region] = self._frame
        network.bulk_spoilers[region] = self._bulk
        hosts[region].make_core = self._spoil_core(hosts[region].make_core)

    def end(self) -> None:
        """Tell the truth from now on."""
        self.is_over = True

    def _frame(self, target: str, frame: bytes) -> bytes:
        """The frame, or one with a lie in it."""
        message = decode_control(frame)
        self._remember(message)
        lie = self._lie_about(message) if self._is_lying() else message
        if lie == message or not self._is_of_model(lie):
            return frame
        try:
            lying_frame = encode_control(lie)
            decode_control(lying_frame)
        except (ValueError, TypeError, ProtocolViolation):
            return frame
        self._world.note(self.region, f"LIE to {target}: {lie}", b"lie")
        return lying_frame

    def _bulk(self, target: str, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        begin = decode_bulk(header)
        if not isinstance(begin, TransferBegin) or not self._is_lying():
            return header, body
        lie, data = begin.header, body
        if self._rng.random() < 0.3:
            data = self._other_bytes(body)
            self._count(f"{type(lie).__name__} bytes")
        else:
            lie = self._lie_about(lie)
        if not self._is_of_model(lie):
            return header, body
        try:
            lying_header = encode_begin(0, lie, len(data))
            decode_bulk(lying_header)
        except (ValueError, TypeError, ProtocolViolation):
            return header, body
        self._world.note(self.region, f"LIE to {target}: {lie}, {len(data)} bytes", b"lie")
        return lying_header, data

    def _is_lying(self) -> bool:
        return not self.is_over and self._rng.random() < self.rate

    def _is_of_model(self, lie: Any) -> bool:
        """Whether the fakes of the other side can look at it: the daemon's own checks of blocks are not theirs."""
        contribution = lie.contribution if isinstance(lie, msg.ContributionStripe) else lie
        is_stripe = isinstance(lie, msg.ContributionStripe | msg.MergedStripe)
        asks_or_brings = is_stripe or isinstance(lie, msg.StateRequested | msg.PayloadRequested)
        if asks_or_brings and not 0 <= contribution.fragment < len(self._layouts):
            return False
        return (
            not is_stripe or 0 <= lie.block_start < lie.block_stop <= self._layouts[contribution.fragment].block_count
        )

    def _lie_about(self, value: Any) -> Any:
        """The same dataclass with one field changed, somewhere inside it."""
        fields_counted = COUNTED.get(type(value), ())
        fields = [field.name for field in dataclasses.fields(value) if field.name not in fields_counted]
        if not fields:
            return value
        name = self._rng.choice(fields)
        path = f"{type(value).__name__}.{name}"
        field_value = getattr(value, name)
        if not dataclasses.is_dataclass(field_value):
            self._count(path)
        field_lie = self._other(path, name, field_value)
        return replace(value, **{name: field_lie})

    def _other(self, path: str, name: str, value: Any) -> Any:
        """Another value of the same type."""
        kind = type(value)
        candidates = [candidate for candidate in self._values.get((kind.__name__, name), ()) if candidate != value]
        if candidates and self._rng.random() < 0.25:
            return self._rng.choice(candidates)
        if dataclasses.is_dataclass(value):
            return self._lie_about(value)
        if value is None:
            return self._rng.choice(candidates) if candidates else None
        if kind is tuple:
            return self._other_tuple(path, name, value)
        make = _MAKERS.get(kind)
        if name in REGION_FIELDS and kind is str:
            return self._rng.choice([*self._names, "nobody"])
        return make(self._rng, value) if make is not None else value

    def _other_tuple(self, path: str, name: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
        how = self._rng.random()
        if not value or how < 0.15:
            return (*value, *value[-1:]) if value else value
        at = self._rng.randrange(len(value))
        if how < 0.3:
            return value[:at] + value[at + 1 :]
        if how < 0.4:
            return tuple(reversed(value))
        if how < 0.5 and all(isinstance(number, float) for number in value):
            factor = self._rng.choice((0.0, 1e-6, 1e6, 1e30))
            return tuple(number * factor for number in value)
        return (*value[:at], self._other(path, name, value[at]), *value[at + 1 :])

    def _spoil_core(self, make_core: CoreFactory) -> CoreFactory:
        """Now and then its core proposes what nobody decided: the lie is in its own log, so all get the same."""

        def make(*args: Any) -> Any:
            core = make_core(*args)
            propose = core.ledger.propose

            def propose_lie(body: Any, *, now_ns: int) -> Any:
                lie = self._lie_about(body) if self._is_lying() else body
                if lie != body and core.ledger._has_payload(lie):
                    self.has_forged = True
                    self._world.note(self.region, f"LIE in its log: {lie}", b"lie")
                    return propose(lie, now_ns=now_ns)
                return propose(body, now_ns=now_ns)

            core.ledger.propose = propose_lie
            return core

        return make

    def _remember(self, value: Any) -> None:
        """Keep some of the values of each field, to say them again."""
        if not dataclasses.is_dataclass(value):
            return
        for field in dataclasses.fields(value):
            field_value = getattr(value, field.name)
            if dataclasses.is_dataclass(field_value):
                self._remember(field_value)
            values = self._values.setdefault((type(field_value).__name__, field.name), [])
            if len(values) < REMEMBERED_MAX:
                values.append(field_value)
            elif self._rng.random() < 0.02:
                values[self._rng.randrange(REMEMBERED_MAX)] = field_value

    def _other_bytes(self, body: bytes) -> bytes:
        how = self._rng.random()
        if how < 0.3 and body:
            at = self._rng.randrange(len(body))
            return body[:at] + bytes([body[at] ^ (1 << self._rng.randrange(8))]) + body[at + 1 :]
        if how < 0.5:
            return body[: len(body) // 2]
        if how < 0.6:
            return body + body[:8]
        if how < 0.8:
            return bytes(len(body))
        # The sign of each bf16 value turned round, its exponent ten higher: a gradient times -1024.
        return b"".join(
            bytes((low, (((high & 0x7F) + 5) & 0x7F) | (~high & 0x80)))
            for low, high in zip(body[::2], body[1::2], strict=False)
        )

    def _count(self, label: str) -> None:
        self.lies[label] = self.lies.get(label, 0) + 1


def _other_int(rng: Random, value: int) -> int:
    if rng.random() < 0.25:
        return rng.choice(HUGE) * rng.choice((1, -1))
    return value + rng.choice((-1, 1, -value, -2 * value - 1, 7, 1000, -1000))


def _other_float(rng: Random, value: float) -> float:
    return float(rng.choice((-value, value * 1000.0, value * -1000.0, 0.0, 1e300, -1e300, value / 1000.0, math.pi)))


def _other_bytes(rng: Random, value: bytes) -> bytes:
    if not value:
        return b"\x01" * 32
    at = rng.randrange(len(value))
    return value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :]


def _other_str(rng: Random, value: str) -> str:
    return rng.choice(("", value[::-1], value + "?", "x" * 200, "\x1b[31m"))


_MAKERS: dict[type, Callable[[Random, Any], Any]] = {
    bool: lambda _, value: not value,
    int: _other_int,
    float: _other_float,
    bytes: _other_bytes,
    str: _other_str,
}
