"""The versions of a run that regions' folders or copies can give back: listed, copied elsewhere, and verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.recovery.past_versions import PastVersion
from diloco_node.core.recovery.replay_plan import digests_of, rounds_of
from diloco_node.core.types import GenesisBody
from diloco_node.daemon.checkpoint_copies import CheckpointCopies, CheckpointCopy, CopyState, copies_at
from diloco_node.daemon.export_source import trainer_model
from diloco_node.daemon.past_run import PastRun, find_past, read_runs
from diloco_node.daemon.run_files import RunFiles, region_folders
from diloco_node.daemon.state_replay import read_past
from diloco_node.errors import ConfigError
from diloco_node.numeric import F32
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.tensor_files import payload_name, state_name


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version that a place has, or had. lack: what is missing; empty if nothing is.

    step, tokens: None: a copy does not say. content_bytes: parameters and momentum.
    written_at: UTC, ISO 8601: of a copy, or of its last payload in a region; empty if that is gone.
    """

    version: int
    step: int | None
    tokens: int | None
    content_bytes: int
    written_at: str
    lack: str


def version_rows(place: str | Path) -> list[VersionRow]:
    """The versions of copies, or those whose entries some region still has, in order. Raises ConfigError, StorageError:
    as `read_runs`; or the store refuses."""
    if (copies := copies_at(place)) is not None:
        return [_copy_row(state) for state in copies.states()]
    runs = read_runs(region_folders(Path(place)))
    past = {item.number: item for run in runs for item in run.past}
    content_bytes = 8 * runs[0].files.manifest.size
    rows = []
    for number, item in sorted(past.items()):
        lacks = [run.reachable.lack(item) for run in runs]
        lack = "" if "" in lacks else lacks[0]
        written_at = max(_written_at(run, item) for run in runs)
        rows.append(VersionRow(number, item.step, item.tokens, content_bytes, written_at, lack))
    return rows


def _copy_row(state: CopyState) -> VersionRow:
    if (item := state.checkpoint) is None:
        return VersionRow(state.version, None, None, 0, "", state.lack)
    return VersionRow(item.version, item.step, item.tokens, item.content_bytes, item.written_at, state.lack)


def _written_at(run: PastRun, past: PastVersion) -> str:
    """The time at which the last payload of a version came to this disk; empty: none of them is there."""
    folder, times = run.files.folder / "payloads", []
    for fragment, version, digest in run.payloads_of(past):
        with contextlib.suppress(OSError):  # a daemon that runs here may have removed it
            times.append((folder / payload_name(fragment, version, digest)).stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else ""


def copy_version(
    place: str | Path, target: CheckpointCopies, *, version: int | None, step: int | None, is_forced: bool
) -> tuple[CheckpointCopy, bool]:
    """Copy a version of regions' folders, or a copy, as back from a bucket; without `version` and `step` the newest.

    Returns: the checkpoint, and whether it was written: a whole copy that is there stays, unless `is_forced`.

    Raises ConfigError: the version can't be had, or another run's copies are there. StorageError: disk or store refuse.
    """
    if (copies := copies_at(place)) is not None:
        source = copies.find(version=version, step=step)
        run_id, run, number = source.run_id, source.run, source.version
    else:
        folders = region_folders(Path(place))
        past_run, past = find_past(folders, version=version, step=step)
        run_id, run, number = past_run.files.spec.run_id, run_hash(past_run.files.genesis), past.number
    predecessor = next((state for state in target.check_run(run_id, run) if state.version == number), None)
    if predecessor is not None and predecessor.checkpoint is not None and not predecessor.lack and not is_forced:
        return predecessor.checkpoint, False
    if copies is not None:
        target.write(source, partial(copies.fragment, source), predecessor)
        return source, True
    files, past, parameters = read_past(folders, version=number)
    values = list(zip(parameters.theta, parameters.momentum, strict=True))
    checkpoint = describe(files, past, values)
    target.write(checkpoint, lambda fragment: values[fragment], predecessor)
    return checkpoint, True


def run_hash(genesis: GenesisBody) -> str:
    """By which two runs of one name differ."""
    return seal(1, 0, ZERO_HASH, genesis).hash.hex()


def describe(files: RunFiles, past: PastVersion, values: Sequence[tuple[F32, F32]]) -> CheckpointCopy:
    """Describe a version with its digests. values: parameters and momentum per fragment, each shape (n,), float32."""
    return CheckpointCopy(
        run_id=files.spec.run_id,
        run=run_hash(files.genesis),
        region=files.spec.region,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=past.number,
        versions=past.versions,
        step=past.step,
        tokens=past.tokens,
        digests=tuple(fragment_digest(theta, momentum).hex() for theta, momentum in values),
        model=trainer_model(files.folder),
        manifest=files.manifest,
    )


def version_faults(place: str | Path, version: int | None) -> tuple[int, list[str]]:
    """Read copies, all or one version's; or compare all states and payloads of regions with what their ledgers name, of
    a version all that it comes from.

    Returns: how many files were read, or fragments computed, and a line for each that differs, with its name.

    Raises ConfigError: the version can't be had, or there are no copies. StorageError: a ledger is damaged, disk or
    store refuse, or a file of a region's version differs.
    """
    if (copies := copies_at(place)) is not None:
        return _copy_faults(copies, version)
    folders = region_folders(Path(place))
    if version is not None:
        return len(read_past(folders, version=version)[2].theta), []
    checks = []
    for folder in folders:
        files = RunFiles.read(folder)
        checks += [*_state_faults(files), *_payload_faults(files)]
    return len(checks), [line for line in checks if line]


def _state_faults(files: RunFiles) -> Iterator[str]:
    """For each state its fault; empty if there is none."""
    for fragment, versions in enumerate(files.states):
        names = digests_of(files.genesis, files.summary, files.entries)[fragment]
        for version in versions:
            path = files.folder / "state" / state_name(fragment, version)
            try:
                own, pair = files.store.state_digest(fragment, version), files.store.read_state(fragment, version)
            except DamagedFile as error:
                if path.exists():  # else a daemon that runs here has removed it
                    yield str(error)
                continue
            digest = fragment_digest(*pair)
            fault = ""
            for ledger_digest, source in ((own, "its header"), (names.get(version, digest), "the ledger")):
                if digest != ledger_digest:
                    fault = f"{source} names digest {ledger_digest.hex()[:16]}, its values have {digest.hex()[:16]}"
            yield fault and f"{path} differs: {fault}"


def _payload_faults(files: RunFiles) -> Iterator[str]:
    """For each payload on disk its fault; empty if there is none."""
    for rounds in rounds_of(files.entries, len(files.states)):
        for body in rounds.values():
            place = (body.fragment, body.version, body.payload_digest)
            path = files.folder / "payloads" / payload_name(*place)
            if not path.exists():
                continue
            try:
                files.store.read_payload(*place)
            except DamagedFile as error:
                if path.exists():
                    yield str(error)
                continue
            yield ""


def _copy_faults(copies: CheckpointCopies, version: int | None) -> tuple[int, list[str]]:
    if version is not None:
        checkpoint = copies.find(version=version)
        return len(checkpoint.versions), copies.faults(checkpoint)
    count, faults = 0, list[str]()
    for state in copies.states():
        if state.checkpoint is None or state.lack:
            count += 1
            faults.append(f"{copies.place}: version {state.version} lacks {state.lack}")
        else:
            count += len(state.checkpoint.versions)
            faults += copies.faults(state.checkpoint)
    if not count:
        raise ConfigError(f"{copies.place} has no copies: diloco-node checkpoint copy REGION URL writes them")
    return count, faults
