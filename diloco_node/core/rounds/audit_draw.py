"""Chance of an audit: whether a payload is audited, where, and with which signs follows from two regions' nonces.

The leader commits to its nonce when it opens the ballot. The drawer, another region, tells its own to all once every
merged stripe is there, and the leader discloses its own after that. So no region knows both before all stripes are
fixed, the leader and the drawer included; and no region can choose its nonce after it knows the other one.
"""

from __future__ import annotations

import hashlib

from diloco_node.core.messages import BallotOpened
from diloco_node.core.types import Ballot


def nonce_of(secret: bytes, ballot: Ballot) -> bytes:
    """Return a region's nonce of a ballot. secret: of the region's process, at random."""
    return hashlib.sha256(secret + ballot.term.to_bytes(8, "big") + ballot.number.to_bytes(8, "big")).digest()


def commitment_of(nonce: bytes) -> bytes:
    """Return what commits a leader to its nonce and discloses nothing of it."""
    return hashlib.sha256(nonce).digest()


def drawer_of(announcement: BallotOpened, leader: str) -> str:
    """Return the drawer of a ballot: reducers take turns, else members beside the leader; empty if it is alone."""
    reducers = sorted({stripe.reducer for stripe in announcement.stripes} - {leader})
    names = reducers or sorted({*announcement.members} - {leader})
    return names[announcement.ballot.number % len(names)] if names else ""
