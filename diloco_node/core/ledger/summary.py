"""The summary of the first entries of a ledger: everything they say that still matters, in one bounded encoding.

Each region sums up at the same entries and gets the same bytes, so that one digest in the ledger is enough to compare
them. The encoding is that of entries: msgpack over arrays, canonical.

Forgotten facts, and why nobody misses them:

- Single rounds: whose they were, factors, weights, payload digests. No region needs them to go on: states are fetched
  at a snapshot, and a base is used only where every fragment's snapshot is at least as new.
- Intervals of the token account. They were contiguous when they were booked, so (steps, tokens) up to where says the
  same. An incarnation with `INCARNATIONS_KEPT` later ones in the ledger is closed: only its sums are left, and
  nothing of it is booked any more. A region books losses by incarnation, so an older one is complete by then.
- Older inclusions of a learner than its last one in a fragment: its base is at least that version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgpack

from diloco_node.core.bounds import SUMMARY_BYTES_MAX
from diloco_node.core.ledger.entries import canonical_codec
from diloco_node.core.ledger.roster import Roster, lines_fault
from diloco_node.core.member_kind import Membership
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import LEFT_OUT, OutOfBounds
from diloco_node.core.types import Entry, FinishedBody, GenesisBody, LedgerBase, SnapshotBody
from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation

_DEPTH_MAX: Final = 6


@dataclass(frozen=True, slots=True)
class Covered:
    """Up to where a learner's incarnation is merged or discarded.

    steps, tokens: per fragment; a single number if it is the same for all, as of a dead incarnation.
    """

    learner: str
    incarnation: int
    steps: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A learner's incarnations up to this one, in sums.

    steps: how far each got in any fragment, together. tokens: merged or discarded, per fragment.
    """

    learner: str
    incarnation: int
    steps: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Included:
    """The newest committed round of a fragment that included a learner.

    version: that the round made. snapshot: the learner's number for it. step_to: its step. tokens_to: of the
    incarnation.
    """

    learner: str
    fragment: int
    incarnation: int
    version: int
    snapshot: int
    step_to: int
    tokens_to: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The last steps that a learner's incarnation gave up in a fragment, and its version when that was booked."""

    learner: str
    fragment: int
    incarnation: int
    step_to: int
    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Committed rounds that include a learner."""

    learner: str
    rounds: int


@dataclass(frozen=True, slots=True)
class ShardLife:
    """Shards of the data that a learner's incarnation trained last, by shard; see `shard_account.ShardHolder`."""

    learner: str
    incarnation: int
    shards: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardWait:
    """Shards of the data that are another's now, and that this learner may train until it has heard."""

    learner: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardLines:
    """All that `ShardAccount` knows."""

    lives: tuple[ShardLife, ...]
    waits: tuple[ShardWait, ...]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The facts of the entries up to one index.

    Attributes:
        genesis, finished: none or one.
        versions, version_entries: per fragment the last committed one, and the index of its entry.
        snapshots: of each fragment the last two, by fragment and version.
        merged, discarded: tokens per fragment, of all learners.
        last_rounds: per fragment the version of the run's last round; -1: it was not held yet.
        recent: per fragment how long its last gradients were (`core.merge.outliers.RecentRounds.packed`).
        rounds_committed: over all fragments.
        members: as `Roster.lines`; empty: those of genesis. changes, signature: see `roster.Roster`.
        revocations: certificates, sorted.
        settings: that the ledger holds by now; none: as `GenesisBody.settings`.
        shards: one, if regions count the rows of the data that they train.
    """

    genesis: tuple[GenesisBody, ...]
    finished: tuple[FinishedBody, ...]
    versions: tuple[int, ...]
    version_entries: tuple[int, ...]
    snapshots: tuple[SnapshotBody, ...]
    merged: tuple[int, ...]
    discarded: tuple[int, ...]
    covered: tuple[Covered, ...]
    closed: tuple[Closed, ...]
    included: tuple[Included, ...]
    given_up: tuple[GivenUp, ...]
    last_rounds: tuple[int, ...]
    rounds_committed: int
    joined: tuple[Joined, ...]
    recent: tuple[bytes, ...] = ()
    members: tuple[Membership, ...] = ()
    changes: int = 0
    signature: bytes = b""
    revocations: tuple[bytes, ...] = ()
    settings: tuple[SettingsBody, ...] = ()
    shards: tuple[ShardLines, ...] = field(default=(), metadata=LEFT_OUT)


def encode_summary(summary: RunSummary) -> bytes:
    """As bytes, canonical. Raises ValueError: a field is out of range, or it is longer than SUMMARY_BYTES_MAX."""
    try:
        plain = canonical_codec(RunSummary)[0](summary)
    except OutOfBounds as error:
        raise ValueError(f"RunSummary{error.path}: {error.found}") from None
    data: bytes = msgpack.packb(plain, use_bin_type=True)
    if len(data) > SUMMARY_BYTES_MAX:
        raise ValueError(f"a summary of {len(data)} bytes: at most {SUMMARY_BYTES_MAX} are allowed")
    return data


def decode_summary(data: bytes, *, fragments: int) -> RunSummary:
    """The summary that `encode_summary` wrote, of a ledger with so many fragments.

    Raises ProtocolViolation: not the canonical encoding of a summary, or not of such a ledger.
    """
    if len(data) > SUMMARY_BYTES_MAX:
        raise ProtocolViolation(f"a summary of {len(data)} bytes: at most {SUMMARY_BYTES_MAX} are allowed")
    try:
        plain = unpack(data, depth_max=_DEPTH_MAX, values_max=SUMMARY_BYTES_MAX // 2, items_max=SUMMARY_BYTES_MAX // 8)
        summary: RunSummary = canonical_codec(RunSummary)[1](plain)
        is_canonical = encode_summary(summary) == data
    except OutOfBounds as error:
        raise ProtocolViolation(f"not a summary of a ledger: RunSummary{error.path}: {error.found}") from None
    except (ValueError, TypeError) as error:
        raise ProtocolViolation(f"not a summary of a ledger: {type(error).__name__}: {error}") from error
    fault = "" if is_canonical else "it is not in its canonical encoding"
    fault = fault or _shape_fault(summary, fragments)
    if fault:
        raise ProtocolViolation(f"not a summary of this ledger: {fault}")
    return summary


def summary_of(base: LedgerBase, *, fragments: int) -> RunSummary | None:
    """The summary of a base; None: its ledger begins with the first entry. Raises as `decode_summary`."""
    return decode_summary(base.summary, fragments=fragments) if base.index else None


def base_digest(base: LedgerBase) -> bytes:
    """Return the digest by which the ledger names a base: SHA-256 over its place and its summary."""
    place = msgpack.packb([base.index, base.term, base.hash], use_bin_type=True)
    return hashlib.sha256(place + base.summary).digest()


def summed_roster(summary: RunSummary) -> Roster:
    """The members that the entries name."""
    if not summary.members:
        genesis = summary.genesis[0]
        return Roster.of_voters(genesis.regions, dict(zip(genesis.regions, genesis.disks, strict=True)))
    return Roster(summary.members, summary.changes, summary.signature)


def roster_at(summary: RunSummary | None, entries: Iterable[Entry]) -> Roster:
    """The members at the last of these entries, which follow the summary."""
    roster = Roster() if summary is None else summed_roster(summary)
    for entry in entries:
        roster = roster.after(entry)
    return roster


def _shape_fault(summary: RunSummary, fragments: int) -> str:
    per_fragment = (
        summary.versions,
        summary.version_entries,
        summary.merged,
        summary.discarded,
        summary.last_rounds,
        summary.recent,
        *(line.tokens for line in summary.closed),
    )
    if any(len(values) != fragments for values in per_fragment):
        return f"it is not of {fragments} fragments"
    if any(len(values) not in (1, fragments) for line in summary.covered for values in (line.steps, line.tokens)):
        return f"an account is not of {fragments} fragments"
    numbers = [snapshot.fragment for snapshot in summary.snapshots]
    numbers += [line.fragment for line in summary.included]
    numbers += [line.fragment for line in summary.given_up]
    if any(not 0 <= fragment < fragments for fragment in numbers):
        return f"it names a fragment that is none of {fragments}"
    if len(summary.genesis) != 1 or len(summary.genesis[0].fragment_digests) != fragments:
        return "it has no genesis"
    genesis = summary.genesis[0]
    is_named = len(genesis.disks) == len(genesis.regions)
    fault = _members_fault(summary) if is_named else "it does not name a folder for each region"
    return fault or _shards_fault(summary)


def _shards_fault(summary: RunSummary) -> str:
    lives = [life for lines in summary.shards for life in lines.lives]
    if any(not len(life.shards) == len(life.starts) == len(life.stops) for life in lives):
        return "shards of the data without positions"
    shards = [shard for life in lives for shard in life.shards]
    return "a shard of the data is held twice" if len(set(shards)) < len(shards) else ""


def _members_fault(summary: RunSummary) -> str:
    return lines_fault(summary.members) or ("" if summed_roster(summary).voters else "nobody votes")
