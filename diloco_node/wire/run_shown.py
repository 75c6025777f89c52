"""The frame by which a member shows the run to a region that wants to join: settings to take over, and the members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.errors import ProtocolViolation
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Schema

KIND_RUN_SHOWN: Final = 21
RUN_SHOWN_BYTES_MAX: Final = 64 * 2**10


@dataclass(frozen=True, slots=True)
class MemberShown:
    """A member of the run. `address`: where the others dial it, "host:port"; empty: it dials them."""

    region: str
    address: str


@dataclass(frozen=True, slots=True)
class RunShown:
    """The run as one member shows it. Nothing of it is signed: who takes it checks each setting, and the digest.

    Attributes:
        settings: "rounds.sync_every=24" each, values as in run.toml; those that have their default are left out.
        members: at the last committed entry. leader: as far as this one knows.
        changes: of the members since the run began.
    """

    settings: tuple[str, ...]
    members: tuple[MemberShown, ...]
    leader: str | None
    changes: int


_SCHEMA: Final[Schema[RunShown]] = Schema({1: RunShown}, bounds=BOUNDS, bytes_max=RUN_SHOWN_BYTES_MAX)


def encode_run_shown(run: RunShown) -> bytes:
    """A RUN_SHOWN frame. Raises ValueError when a field is over its limit."""
    return bytes([KIND_RUN_SHOWN]) + _SCHEMA.encode(run)


def decode_run_shown(frame: bytes) -> RunShown:
    """Decode the frame after the hello. Raises ProtocolViolation."""
    if not frame or frame[0] != KIND_RUN_SHOWN:
        raise ProtocolViolation("after its hello it does not show the run")
    return _SCHEMA.decode(memoryview(frame)[1:])
