"""One region goes on alone, where the majority of a run's voters is lost for good.

Nobody is left who could agree. So the holder of the authority's key decides: each entry of this region's ledger counts,
and entries behind them remove all other members, signed one by one. Then this region alone is the majority. A removed
region that is there after all sees the authority's signature at its next link, and leaves the run. It may be added
again, as a contributor whose ledger and parameters are those of this region.

Limit: rounds that the others committed, and whose entries never came here, are not in the run any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import RunSummary, decode_summary, roster_at
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.recovery.replay_plan import find_end
from diloco_node.core.types import Entry, Recovered, RoundBody, SnapshotBody
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.errors import ConfigError
from diloco_node.storage.store import RegionStore

TERMS_AHEAD: Final = 1 << 16
"""Above every term that the others can have come to since: with an election each second, 18 hours without a leader."""


@dataclass(frozen=True, slots=True)
class LoneRegion:
    """The run as its folder has it.

    Attributes:
        voters: before. leavers: the members but this region, sorted; they leave the run.
        addresses: per member, as the ledger names it; empty: by run.toml.
        index: of the last entry that counts. versions: of the fragments' parameters there.
    """

    region: str
    voters: tuple[str, ...]
    leavers: tuple[str, ...]
    addresses: Mapping[str, str]
    index: int
    versions: tuple[int, ...]


def look_alone(folder: Path, region: str) -> LoneRegion:
    """Say what `go_on_alone` would do, without changing anything; a daemon may run on the folder.

    Raises ConfigError: the region has no vote, or lacks a state or payload; the run is over, or has not begun; nobody
    else is a member. StorageError: the folder can't be read, or is damaged.
    """
    return _read(folder, region, RegionStore(folder, is_read_only=True))[1]


def go_on_alone(folder: Path, region: str, run_id: str, sign: Callable[[bytes], bytes]) -> LoneRegion:
    """Remove all members but this region in its own ledger. It goes on when its daemon is started.

    sign: a statement, with the key of the run's authority.

    Raises ConfigError: as `look_alone`. StorageError: that, or a daemon runs on the folder, or it can't be written.
    """
    look_alone(folder, region)  # a store that is opened for writing sets a damaged ledger aside
    with closing(RegionStore(folder)) as store:
        recovery, facts = _read(folder, region, store)
        entries = removals(recovery, region, lambda roster: sign(roster.statement(run_id)))
        store.persist(recovery.term + TERMS_AHEAD, region, 0, entries)
    return facts


def _read(folder: Path, region: str, store: RegionStore) -> tuple[Recovered, LoneRegion]:
    """Read a folder, and check that its region can go on alone. Raises as `look_alone`."""
    manifest = load_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} holds no parameters of a run: the run has not begun there")
    fragments = len(manifest.fragments)
    recovery = store.load(fragments)
    base = recovery.base
    summary = decode_summary(base.summary, fragments=fragments) if base.index else None
    roster = last_roster(recovery)
    versions = [0] * fragments if summary is None else list(summary.versions)
    for entry in recovery.entries:
        if isinstance(entry.body, RoundBody):
            versions[entry.body.fragment] = entry.body.version
    fault = _fault(folder, region, roster, recovery, next(_lacks(recovery, summary), ""))
    if find_end(summary, recovery.entries) is not None:
        fault = f"the run is finished in {folder}: give it more steps, and start the region"
    if fault:
        raise ConfigError(fault)
    leavers = tuple(name for name in roster.disks if name != region)
    index = recovery.entries[-1].index if recovery.entries else base.index
    addresses = dict.fromkeys(roster.disks, "") | {name: roster.memberships[name].address for name in roster.names}
    return recovery, LoneRegion(region, roster.voters, leavers, addresses, index, tuple(versions))


def _fault(folder: Path, region: str, roster: Roster, recovery: Recovered, lack: str) -> str:
    """Say why this region can't go on alone, and what to do; empty if it can. lack: a missing file, or empty."""
    if not roster.voters:
        return f"{folder} names no member of a run: the run has not begun there"
    if region not in roster.voters:
        return f"{region} has no vote, so it may lack what was committed: go on with one of {', '.join(roster.voters)}"
    if roster.disks[region] != recovery.disk:
        return (
            f"the ledger names another folder of {region} than {folder}, which may lack what was committed: go on "
            "with another voter"
        )
    if tuple(roster.disks) == (region,):
        return f"{region} is the only member already: start it"
    if lack:
        return (
            f"{folder} lacks {lack}, and nobody is left to fetch it from: go on with another voter, or begin a new "
            "run from an earlier version, with run.init = FOLDER@N"
        )
    return ""


def _lacks(recovery: Recovered, summary: RunSummary | None) -> Iterator[str]:
    """Name what is missing on disk: states to begin with, and each payload after them."""
    bodies = [entry.body for entry in recovery.entries]
    versions = [0] * len(recovery.states) if summary is None else summary.versions
    snapshots = [*([] if summary is None else summary.snapshots)]
    snapshots += [body for body in bodies if isinstance(body, SnapshotBody)]
    digests = {(body.fragment, body.version): body.digest for body in snapshots}
    for fragment, version in enumerate(recovery.states):
        if version < versions[fragment]:
            yield f"the state of fragment {fragment} at version {versions[fragment]} or later"
        elif recovery.state_digests[fragment] != digests.get((fragment, version), recovery.state_digests[fragment]):
            yield f"the right state of fragment {fragment}: at version {version} the ledger names other bytes"
    for body in bodies:
        if not isinstance(body, RoundBody) or body.version <= recovery.states[body.fragment]:
            continue
        if (body.fragment, body.version, body.payload_digest) not in recovery.payloads:
            yield f"the payload of version {body.version} of fragment {body.fragment}"


def last_roster(recovery: Recovered) -> Roster:
    """The members at the last entry on a disk."""
    base = recovery.base
    summary = decode_summary(base.summary, fragments=len(recovery.states)) if base.index else None
    return roster_at(summary, recovery.entries)


def removals(recovery: Recovered, region: str, sign: Callable[[Roster], bytes]) -> tuple[Entry, ...]:
    """Make the entries that follow a ledger and remove all members but one region.

    sign: a roster, with the key of the run's authority. Raises ConfigError: there are none such.
    """
    roster = last_roster(recovery)
    last = recovery.entries[-1] if recovery.entries else recovery.base
    entries: list[Entry] = []
    leavers = [name for name in roster.disks if name != region]
    while leavers:
        # A voter without a folder counts for the majority and can't vote. So it may have to go first.
        faults = {name: roster.change_fault(MembershipBody(name, MemberKind.FORMER.value)) for name in leavers}
        name = min(leavers, key=lambda leaver: faults[leaver] != "")
        if faults[name]:
            raise ConfigError(f"{region} can't go on alone: {faults[name]}")
        body = MembershipBody(name, MemberKind.FORMER.value)
        body = replace(body, signature=sign(roster.changed(body)))
        previous = entries[-1].hash if entries else last.hash
        entry = seal(last.index + 1 + len(entries), recovery.term + TERMS_AHEAD, previous, body)
        entries.append(entry)
        roster = roster.after(entry)
        leavers.remove(name)
    return tuple(entries)
