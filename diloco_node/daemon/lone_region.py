"""One region goes on alone, where the majority of a run's voters is lost for good.

Nobody is left who could agree. So the holder of the authority's key decides: each entry of this region's ledger counts,
and entries behind them remove all other members, signed one by one. Then this region alone is the majority. A removed
region that is there after all sees the authority's signature at its next link, and leaves the run. It may be added
again, as a contributor whose ledger and parameters are those of this region.

Beside a witness its record is read first. If the region can go on with it, as one of two, nobody needs this. Else what
it holds and the region lacks is named, and its object is replaced by an empty one: the others can't go on with it then.

Limit: rounds that the others committed, and whose entries never came here, are not in the run any more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from diloco_node.core.ledger.election import TERMS_AHEAD
from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.roster import Roster, majority_of
from diloco_node.core.ledger.summary import RunSummary, roster_at, summary_of
from diloco_node.core.ledger.witness import QUIET_NS, RECORD_BYTES_MAX, WitnessRecord, decode_record, encode_record
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.recovery.replay_plan import find_end
from diloco_node.core.types import DISK_ID_BYTES, Entry, Recovered, RoundBody, SnapshotBody
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.errors import ConfigError, ProtocolViolation, StoreRefused
from diloco_node.numeric import NS_PER_S
from diloco_node.state_names import FINAL_NAME
from diloco_node.storage.object_store import bucket_scheme
from diloco_node.storage.store import RegionStore
from diloco_node.storage.swapped_object import BEFORE, FOLDER, RECORD, SwappedObject


@dataclass(frozen=True, slots=True)
class LoneRegion:
    """The run as its folder has it.

    Attributes:
        voters: before. leavers: the other members, sorted. addresses: per member, by the ledger; empty: by run.toml.
        index: of the last entry that counts. versions: of the fragments' parameters there.
        loss: what the witness holds and this region can't get, in words; empty: nothing.
    """

    region: str
    voters: tuple[str, ...]
    leavers: tuple[str, ...]
    addresses: Mapping[str, str]
    index: int
    versions: tuple[int, ...]
    loss: str = ""


class WitnessBucket:
    """The bucket of a witness, for who goes on without it.

    Args:
        url: of its place.

    Attributes:
        record: the witness's own. before: the one that `close` replaced, of an earlier try. keys: all that is there.

    Raises:
        ConfigError, StoreRefused: it can't be read: nobody knows then what would be lost.
    """

    def __init__(self, url: str) -> None:
        self._objects = SwappedObject(url, bucket_scheme(url))
        try:
            self._record = self._objects.read_tagged(RECORD, RECORD_BYTES_MAX)
            self._before = self._objects.read_tagged(BEFORE, RECORD_BYTES_MAX)
            self.keys = frozenset(self._objects.written(FOLDER))
            self.record = None if self._record is None else decode_record(self._record.data)
            self.before = None if self._before is None else decode_record(self._before.data)
        except (StoreRefused, ProtocolViolation) as error:
            place = f"{self._objects.place}/{FOLDER}: " if isinstance(error, ProtocolViolation) else ""
            raise StoreRefused(
                f"{place}{error}. What the witness holds may count: make it readable. If it is lost for good, remove "
                f"{RECORD} there, or make an empty bucket of that name, also in another store of the environment"
            ) from error

    def close(self, run_id: str) -> None:
        """Put an empty object, without a vote, in this run's place. Raises StoreRefused: it has just been written."""
        if self._record is None or self.record is None or self.record.run_id != run_id:
            return
        time.sleep(QUIET_NS / NS_PER_S)  # a region that goes on with it writes it meanwhile
        empty = encode_record(WitnessRecord(self.record.run_id, secrets.token_bytes(DISK_ID_BYTES), 1))
        tag = None if self._before is None else self._before.tag
        # An empty record is of an earlier try, and what that replaced stays.
        is_saved = not self.record.last[1] or self._objects.swap(BEFORE, self._record.data, tag)
        if not is_saved or not self._objects.swap(RECORD, empty, self._record.tag):
            raise StoreRefused(f"{self._objects.place}/{RECORD} has just been written: another region goes on with it")


def look_alone(folder: Path, region: str, ask: Callable[[str], WitnessBucket] = WitnessBucket) -> LoneRegion:
    """Say what `go_on_alone` would do, without changing anything; a daemon may run on the folder.

    ask: opens the bucket of the witness, if there is one, by its URL.

    Raises ConfigError: why it can't be. StorageError, StoreRefused: the folder, or the witness, can't be read.
    """
    return _read(folder, region, RegionStore(folder, is_read_only=True), ask)[1]


def go_on_alone(
    folder: Path,
    region: str,
    run_id: str,
    sign: Callable[[bytes], bytes],
    ask: Callable[[str], WitnessBucket] = WitnessBucket,
) -> LoneRegion:
    """Remove all members but this region in its own ledger. It goes on when its daemon is started.

    folder: its state folder. sign: a statement, with the key of the run's authority. ask: as `look_alone`.

    Raises as `look_alone`; StorageError: a daemon runs on the folder, too; StoreRefused: the witness was just written.
    """
    look_alone(folder, region, ask)  # a store that is opened for writing sets a damaged ledger aside
    with closing(RegionStore(folder)) as store:
        recovery, facts, bucket = _read(folder, region, store, ask)
        entries = removals(recovery, region, lambda roster: sign(roster.statement(run_id)))
        if bucket is not None:
            bucket.close(run_id)
        store.persist(recovery.term + TERMS_AHEAD, region, 0, entries)
    return facts


def _read(
    folder: Path, region: str, store: RegionStore, ask: Callable[[str], WitnessBucket]
) -> tuple[Recovered, LoneRegion, WitnessBucket | None]:
    """Read a folder, and check that its region can go on alone. Raises as `look_alone`."""
    manifest = load_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} holds no parameters of a run: the run has not begun there")
    fragments = len(manifest.fragments)
    recovery = store.load(fragments)
    base = recovery.base
    summary = summary_of(base, fragments=fragments)
    roster = last_roster(recovery)
    versions = [0] * fragments if summary is None else list(summary.versions)
    for entry in recovery.entries:
        if isinstance(entry.body, RoundBody):
            versions[entry.body.fragment] = entry.body.version
    fault = _fault(folder, region, roster, recovery, next(_lacks(recovery, summary), ""))
    if find_end(summary, recovery.entries) is not None:
        voters = f" and {majority_of(len(roster.voters)) - 1} of the other voters" * (roster.voters != (region,))
        init = folder / FINAL_NAME if (folder / FINAL_NAME).exists() else f"{folder}@N"
        fault = (
            f"the run is finished in {folder}: give it more steps, and start the region{voters}. Or begin a new run "
            f"from its end, with run.init = {init}"
        )
    if fault:
        raise ConfigError(fault)
    bucket, loss = None, ""
    if roster.witness:
        bucket = ask(roster.memberships[roster.witness].address)
        loss = _loss(region, roster, recovery, bucket)
    leavers = tuple(name for name in roster.disks if name != region)
    index = recovery.entries[-1].index if recovery.entries else base.index
    addresses = dict.fromkeys(roster.disks, "") | {name: roster.memberships[name].address for name in roster.names}
    return recovery, LoneRegion(region, roster.voters, leavers, addresses, index, tuple(versions), loss), bucket


def _loss(region: str, roster: Roster, recovery: Recovered, bucket: WitnessBucket) -> str:
    """Say what the witness holds and this region can't get; or empty. Raises ConfigError: it can get all of it."""
    records = (record for record in (bucket.record, bucket.before) if record is not None)
    record = next((record for record in records if record.disk == roster.disks[roster.witness]), None)
    if record is None:
        return ""  # the ledger names no such object: nothing that it acknowledged counts
    hashes = {entry.index: entry.hash for entry in recovery.entries} | {recovery.base.index: recovery.base.hash}
    last = recovery.entries[-1] if recovery.entries else recovery.base
    is_behind = (last.term, last.index) < record.last
    lacking = [entry for entry in record.entries if is_behind and hashes.get(entry.index) != entry.hash]
    places = [(record.base.index, record.base.hash), *((entry.index, entry.hash) for entry in record.entries)]
    is_joined = not is_behind or any(hashes.get(index) == entry_hash for index, entry_hash in places)
    rounds = [entry for entry in lacking if isinstance(entry.body, RoundBody)]
    gaps = [entry for entry in rounds if f"{FOLDER}/{entry.hash.hex()}" not in bucket.keys]
    url, witness = roster.memberships[roster.witness].address, roster.witness
    if is_joined and not gaps and record is bucket.before:
        acknowledged = f"{witness} had acknowledged entries up to {record.last[1]} before an earlier try closed it"
        return acknowledged if lacking else ""
    if is_joined and not gaps:
        more = f", and takes {len(lacking)} entries from there, up to entry {record.last[1]}" if lacking else ""
        raise ConfigError(
            f"start {region}: with {witness} at {url} it is 2 of the {len(roster.voters)} voters, so it goes on{more}"
        )
    if is_joined:
        return f"{witness} has acknowledged entries up to {record.last[1]}, and lacks {len(gaps)} of their payloads"
    return (
        f"{witness} has acknowledged entries up to {record.last[1]}, {len(rounds)} rounds among them, and shows those "
        f"after entry {record.base.index} only"
    )


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
    return roster_at(summary_of(recovery.base, fragments=len(recovery.states)), recovery.entries)


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
