"""Kinds of members, and the entry that changes a region's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WITNESS_NAME: Final = "witness"
"""The name of a run's witness among its members, and of no region."""


class MemberKind(StrEnum):
    """The kind of a member of the run: a voter counts for majorities, a contributor trains and does not vote.

    A witness votes and runs nowhere: it is an object in a bucket (`core.ledger.witness`), and its address is a URL.
    """

    VOTER = "voter"
    CONTRIBUTOR = "contributor"
    WITNESS = "witness"
    FORMER = "former"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A member of the run, or a former one; see `roster.Membership`."""

    region: str
    kind: str
    disk: bytes
    since: int
    address: str
    folders: int


@dataclass(frozen=True, slots=True)
class MembershipBody:
    """The kind of a region from this entry on (`core.ledger.roster`): the view changes, one region at a time.

    Attributes:
        kind: a `MemberKind`.
        address: where the others dial it, "host:port"; empty: it dials them.
        signature: of the run's authority, over `Roster.statement` after the change.
    """

    region: str
    kind: str
    address: str = ""
    signature: bytes = b""
