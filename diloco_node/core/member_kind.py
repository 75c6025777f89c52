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
class Membership:
    """A region's place in the run.

    Attributes:
        kind: a `MemberKind`.
        disk: the id of its folder that counts; NO_DISK, EXPELLED or EVICTED (`core.types`): none does.
        since: index of the entry that gave it this kind; 0: of none.
        address: where the others dial it; empty: run.toml says so, or it dials them.
        folders: how many the log has named so far; each but the first one in place of one that was lost.
    """

    region: str
    kind: str
    disk: bytes = b""
    since: int = 0
    address: str = ""
    folders: int = 1


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
