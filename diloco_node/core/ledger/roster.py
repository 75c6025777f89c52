"""The roster of a run: its members, the kind and the folder of each, as the entries of the ledger name them. Pure.

Genesis names the first members, which all vote. After it one entry changes one region (`MembershipBody`). A region is
added as a contributor, which never changes the majority. It becomes a voter by a further entry, once the log names its
folder: then its disk holds what was committed. A voter may become a contributor again, and each member may leave.

An entry counts from the moment when it is in the log, as in Raft's changes of a single member. So the log, the check of
its next entry and the committed history each have a roster of their own: they stand at different entries.

A former member is remembered, for its learner's account is. It may come back, as a contributor.

Beside two voters there may be a witness (`witness`): a third vote, without a region. While it is there no other change
but its removal touches the votes, so that a majority is always two of these three. One that is
removed is forgotten.

The run's authority signs each change: who may certify regions may admit and remove them. It signs the members as they
are after the change, and how many changes led there. So no order counts twice, nor for other members or in another
run; and one signature vouches for the members of a ledger that begins with a summary.

Source: Ongaro's dissertation (2014), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgpack

from diloco_node.core.bounds import REGIONS
from diloco_node.core.member_kind import WITNESS_NAME, MemberKind, Membership, MembershipBody
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody, Entry, GenesisBody

KINDS: Final = frozenset(MemberKind)
WITNESSED: Final = 2
"""A witness is for so many voters."""

VOTERS_MIN: Final = 3
"""No fewer are left when a voter is evicted."""

NO_DISK: Final = b""
"""In place of an id: no folder of this region counts."""

_PREAMBLE: Final = b"diloco-node members of a run\0"
"""Begins each statement: nothing else that the authority signs begins so."""

Authority = Callable[[bytes, bytes], str]
"""Takes a statement and a signature; why no authority of the run has signed it, with the remedy; empty if one has."""


def no_authority(_: bytes, __: bytes) -> str:
    """Refuse each signature."""
    return "this region knows no authority of the run"


def majority_of(voters: int) -> int:
    """How many of so many voters are a majority: two of two, two of three, three of four, three of five."""
    return voters // 2 + 1


class Roster:
    """The memberships at one entry of the ledger. It never changes: `after` gives another one.

    lines: the memberships, in which `lines_fault` finds nothing.

    Attributes:
        memberships: by name, former members too. Founders are first, sorted, then each one that came: so a region's
            place never changes.
        names: the members that are regions, sorted.
        voters: who counts for a majority, sorted: voters that are not EVICTED, and the witness.
        witness: its name; empty: there is none.
        disks: per member, and of the witness, the folder that the log names; see `Membership`.
        expelled: the members whose folder is `EXPELLED`.
        changes: of the members since genesis. signature: of the last one, see `statement`; empty without one.
    """

    __slots__ = ("changes", "disks", "expelled", "memberships", "names", "signature", "voters", "witness")

    def __init__(self, lines: Iterable[Membership] = (), changes: int = 0, signature: bytes = b"") -> None:
        self.changes, self.signature = changes, signature
        self.memberships = {line.region: line for line in lines}
        members = {name: line for name, line in sorted(self.memberships.items()) if line.kind != MemberKind.FORMER}
        self.witness = next((name for name, line in members.items() if line.kind == MemberKind.WITNESS), "")
        self.names = tuple(name for name in members if name != self.witness)
        self.voters = tuple(
            name for name, line in members.items() if line.kind != MemberKind.CONTRIBUTOR and line.disk != EVICTED
        )
        self.disks = {name: line.disk for name, line in members.items()}
        self.expelled = frozenset(name for name, disk in self.disks.items() if disk == EXPELLED)

    @classmethod
    def of_voters(cls, names: Iterable[str], disks: Mapping[str, bytes] | None = None, *, since: int = 0) -> Roster:
        """Make the roster of a run whose regions all vote, from these folders."""
        named_disks, kind = disks or {}, MemberKind.VOTER.value
        return cls(Membership(name, kind, named_disks.get(name, NO_DISK), since) for name in sorted(names))

    @property
    def lines(self) -> tuple[Membership, ...]:
        """The memberships as a message or a summary has them."""
        return tuple(self.memberships.values())

    @property
    def voter_disks(self) -> dict[str, bytes]:
        """Per voter the folder that the log names."""
        return {name: self.disks[name] for name in self.voters}

    def disks_without(self, region: str) -> dict[str, bytes]:
        """Per voter the folder once this region is expelled: its vote counts for the majority then, and can't come."""
        lost = {region: NO_DISK} if self.kind_of(region) is MemberKind.VOTER else {}
        return self.voter_disks | lost

    def kind_of(self, region: str) -> MemberKind:
        """The kind of a region now; FORMER also for one that never was a member."""
        line = self.memberships.get(region)
        return MemberKind.FORMER if line is None else MemberKind(line.kind)

    def has_removed(self, region: str) -> bool:
        """Whether a region was a member, and is none any more."""
        return region in self.memberships and region not in self.disks

    def places(self, region: str) -> tuple[str, ...]:
        """All regions that are or were members, and this one: by their places, which shares of the data go by."""
        return tuple(dict.fromkeys((*(name for name in self.memberships if name != self.witness), region)))

    def addresses(self, settings: Mapping[str, str | None]) -> dict[str, str | None]:
        """Where to dial each region, former members too: as the authority has signed, else as the settings say."""
        return {
            name: line.address or settings.get(name) for name, line in self.memberships.items() if name != self.witness
        }

    def replacements(self, region: str) -> int:
        """How often the log named another folder of the region, in place of one that was lost."""
        line = self.memberships.get(region)
        return 0 if line is None else max(0, line.folders - 1)

    def is_majority(self, names: Iterable[str]) -> bool:
        """Whether a majority of the voters is among these regions."""
        return len(set(names) & set(self.voters)) >= majority_of(len(self.voters))

    def stand_in(self, reaches: Callable[[str], bool]) -> str:
        """The witness, while a voter is out of reach, for it acknowledges no entry without the payload; else empty."""
        return "" if all(reaches(name) for name in self.voters if name != self.witness) else self.witness

    def words_needed(self, there: Container[str]) -> int:
        """How many voting regions must say the same: a majority; beside a witness, which says nothing, all that are
        there."""
        if not self.witness:
            return majority_of(len(self.voters))
        return max(1, sum(name in there for name in self.voters))

    def after(self, entry: Entry) -> Roster:
        """The roster after one more entry; itself if the entry changes nothing of it."""
        body = entry.body
        if isinstance(body, GenesisBody):
            disks = dict(zip(body.regions, body.disks, strict=False))
            return Roster.of_voters(body.regions, disks, since=entry.index)
        if isinstance(body, DiskNamedBody) and body.region in self.disks:
            before = self.memberships[body.region]
            folders = before.folders + (body.disk not in (NO_DISK, EXPELLED, EVICTED))
            lines = self.memberships | {body.region: replace(before, disk=body.disk, folders=folders)}
            return Roster(lines.values(), self.changes, self.signature)
        if isinstance(body, MembershipBody) and body.kind in KINDS:
            return self.changed(body, entry.index)
        return self

    def changed(self, body: MembershipBody, index: int = 0) -> Roster:
        """The roster after this change, which has one of the kinds. `index`: of its entry."""
        if body.region == self.witness:
            regions = [line for line in self.lines if line.region != body.region]
            return Roster(regions, self.changes + 1, body.signature)
        last = self.memberships.get(body.region, Membership(body.region, body.kind, folders=0))
        disk = NO_DISK if body.kind == MemberKind.FORMER else self.disks.get(body.region, NO_DISK)
        # One that comes back may be elsewhere: it has the address that it is added with, or none.
        address = body.address if last.kind == MemberKind.FORMER else body.address or last.address
        lines = self.memberships | {body.region: Membership(body.region, body.kind, disk, index, address, last.folders)}
        return Roster(lines.values(), self.changes + 1, body.signature)

    def is_split_from(self, peer_roster: Roster) -> bool:
        """Whether neither became the other: in one history each change is newer than all before."""
        old_roster, roster = sorted((self, peer_roster), key=lambda side: side.changes)
        if old_roster.changes == roster.changes:  # what is signed, for a peer may make up the rest
            return old_roster.statement("") != roster.statement("")
        last_index = max((line.since for line in old_roster.memberships.values()), default=0)
        for name in old_roster.memberships | roster.memberships:
            old_line, line = old_roster.memberships.get(name), roster.memberships.get(name)
            if old_line and line and (old_line.kind, old_line.since) == (line.kind, line.since):
                continue
            # A witness that is removed is forgotten.
            is_news = name == old_roster.witness if line is None else line.since > last_index
            if not is_news:
                return True
        return False

    def statement(self, run_id: str) -> bytes:
        """The words that the run's authority signs: the run, the number of changes, and each member's kind and
        address."""
        lines = [[line.region, line.kind, line.address] for line in self.lines]
        return _PREAMBLE + bytes(msgpack.packb([run_id, self.changes, lines]))

    def change_fault(self, body: MembershipBody) -> str:
        """Say why this can't be the next change, whoever is there now; empty if it can."""
        region, before = body.region, self.kind_of(body.region)
        if body.kind not in KINDS:
            return f"there is no kind of member {body.kind!r}"
        kind = MemberKind(body.kind)
        if kind is before:
            return f"{region} is {'no member of the run' if kind is MemberKind.FORMER else f'a {kind} already'}"
        if region not in self.memberships and len(self.memberships) >= REGIONS:
            return f"{len(self.memberships)} regions are or were members of this run, which is as many as there can be"
        is_beside = self.witness and MemberKind.VOTER in (kind, before)
        if MemberKind.WITNESS in (kind, before) or region == WITNESS_NAME or is_beside:
            return self._witness_fault(body, before)
        if kind is MemberKind.VOTER:
            return self._promotion_fault(region)
        return self.loss_fault(region) if before is MemberKind.VOTER else ""

    def loss_fault(self, region: str) -> str:
        """Say why the others can't do without the vote of a voter, or of the witness; empty if they can."""
        disks = {name: disk for name, disk in self.voter_disks.items() if name != region}
        if not disks:
            return (
                f"{region} is the only voter: give another one a vote first, or end the run with `diloco-node finish`"
            )
        quorum = majority_of(len(disks))
        voting = [name for name, disk in disks.items() if disk not in (NO_DISK, EXPELLED)]
        if len(voting) >= quorum:
            return ""
        names = ", ".join(voting) or "none"
        return f"without {region} {quorum} of {len(disks)} voters must vote, and only {len(voting)} can: {names}"

    def eviction_fault(self, region: str) -> str:
        """Say why the vote of a region can't be taken for being away; empty if it can."""
        if region not in self.voters or self.disks[region] == EXPELLED:
            return f"{region} has no vote that could be taken"
        voters = len(self.voters) - 1
        if voters < VOTERS_MIN:
            return f"{voters} voters would be left without {region}, and {VOTERS_MIN} must be"
        return self.loss_fault(region)

    def _witness_fault(self, body: MembershipBody, before: MemberKind) -> str:
        """Say why a change of the witness, or of a vote beside it, can't be."""
        if before is MemberKind.WITNESS:
            is_removal = body.kind == MemberKind.FORMER
            return "" if is_removal else f"{body.region} is the witness, and no region: it can only be removed"
        if (body.region == WITNESS_NAME) != (body.kind == MemberKind.WITNESS):
            return f"{WITNESS_NAME} is the name of a witness, and of no region"
        if body.kind != MemberKind.WITNESS:
            return f"the votes stay as they are while {self.witness} is the witness: remove it first"
        if self.witness:
            return f"{self.witness} is the witness already: remove it first"
        voters = [line.region for line in self.lines if line.kind == MemberKind.VOTER]
        if len(voters) != WITNESSED:
            return f"a witness is for {WITNESSED} voters, and there are {len(voters)}: {', '.join(voters)}"
        return "" if "://" in body.address else f"a witness needs the URL of its object, not {body.address!r}"

    def _promotion_fault(self, region: str) -> str:
        if region not in self.disks:
            return f"{region} is no member: add it first, it gets its vote once its disk holds what is committed"
        disk = self.disks[region]
        if disk == EXPELLED:
            return f"{region} is expelled: readmit it first"
        if disk in (NO_DISK, EVICTED):
            return f"the disk of {region} does not hold yet what is committed: `members list` says what it waits for"
        return ""


def lines_fault(lines: Iterable[Membership]) -> str:
    """Say why these can't be the lines of a roster; empty if they can."""
    lines = tuple(lines)
    names, kinds = {line.region for line in lines}, [line.kind for line in lines]
    is_sound = len(names) == len(lines) and set(kinds) <= KINDS and kinds.count(MemberKind.WITNESS) <= 1
    return "" if is_sound else "a member is named twice, or of no kind there is"
