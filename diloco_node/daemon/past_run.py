"""Earlier versions of a run that regions' folders can give back, for `export` and for the first parameters of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from diloco_node.core.recovery.past_versions import PastVersion, ReachableVersions, past_versions
from diloco_node.core.types import Entry, RoundBody
from diloco_node.daemon.checkpoint_copies import copies_at
from diloco_node.daemon.run_files import ARCHIVE_HINT, RunFiles, region_folders
from diloco_node.daemon.run_record import past_of
from diloco_node.errors import ConfigError, StorageError
from diloco_node.state_names import FINAL_NAME

_RANGES_SHOWN: Final = 4


class PastRun:
    """The versions that a region's folder can give back; a daemon may run on it.

    past: the versions that its ledger still has, in order, available or not. reachable: those that can be computed.

    Raises StorageError, ConfigError: the folder can't be read; says why.
    """

    def __init__(self, folder: Path) -> None:
        self.files = files = RunFiles.read(folder)
        entries = _committed_entries(files)
        self.past = past_versions(files.genesis, files.summary, files.base_index, entries)
        self._payloads: dict[tuple[int, int], list[tuple[int, int, bytes]]] = defaultdict(list)
        for fragment, version, digest in files.payloads:
            self._payloads[fragment, version].append((fragment, version, digest))
        self.reachable = ReachableVersions(files.genesis, files.summary, entries, files.states, files.payloads)

    def payloads_of(self, past: PastVersion) -> list[tuple[int, int, bytes]]:
        """The payloads on disk with which fragments came to a version."""
        return [item for version in enumerate(past.versions) for item in self._payloads.get(version, ())]


def _committed_entries(files: RunFiles) -> tuple[Entry, ...]:
    """The entries that no later leader can replace: up to the last one that is in a state on disk."""
    if files.is_finished and (files.folder / FINAL_NAME).exists():
        return files.entries
    newest = [max(versions, default=-1) for versions in files.states]
    indexes = [
        entry.index
        for entry in files.entries
        if isinstance(entry.body, RoundBody) and entry.body.version <= newest[entry.body.fragment]
    ]
    return files.entries[: max(indexes, default=files.base_index) - files.base_index]


def read_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Read those of a run's folders that can be read. Raises ConfigError, StorageError: of several runs; none."""
    runs, refusals = [], []
    for folder in folders:
        try:
            runs.append(PastRun(folder))
        except StorageError as error:
            refusals.append(error)
    if not runs:
        raise refusals[0]
    if len({run.files.genesis for run in runs}) > 1:
        names = ", ".join(f"{run.files.folder} ({run.files.spec.run_id})" for run in runs)
        raise ConfigError(f"these folders are of several runs: {names}; give one region's folder")
    return runs


def find_past(
    folders: Sequence[Path], *, version: int | None = None, step: int | None = None
) -> tuple[PastRun, PastVersion]:
    """Find a version of a run by its number, or the newest one up to a step; without both the newest that can be had.

    folders: of one run, the one to prefer first.

    Raises ConfigError: it is in the future, or gone; names the nearest that can be had. StorageError: as `read_runs`.
    """
    runs = read_runs(folders)
    where = str(runs[0].files.folder) if len(folders) == 1 else f"the {len(folders)} regions' folders"
    past = {item.number: item for run in runs for item in run.past}
    if not past:
        raise ConfigError(f"{where}: no whole version is on disk yet")
    newest = past[max(past)]
    available = sorted(item.number for item in past.values() if any(not run.reachable.lack(item) for run in runs))
    if version is None and step is None:
        version = max(available, default=newest.number)
    if version is None:
        assert step is not None
        version = max((item.number for item in past.values() if item.step <= step), default=min(past) - 1)
        wish = f"step {step:,}"
        is_future = step > newest.step
    else:
        wish = f"version {version}"
        is_future = version > newest.number
    if is_future:
        raise ConfigError(
            f"{wish} is in the future of {where}: the newest whole version on disk is {_words(newest)}. "
            "Without a version you get the newest state of each fragment"
        )
    lack = "" if version in past else "the ledger's entries of that time, which are summed up"
    for run in runs if not lack else ():
        lack = run.reachable.lack(past[version])
        if not lack:
            return run, past[version]
    if not available:
        raise ConfigError(f"{wish} is gone from {where}, as are all others: it lacks {lack}. {ARCHIVE_HINT}")
    nearest = min(available, key=lambda number: abs(number - version))
    raise ConfigError(
        f"{wish} is gone from {where}, which lacks {lack}. The nearest is {_words(past[nearest])}; "
        f"there are {_ranges(available)}. {ARCHIVE_HINT}"
    )


def check_past_init(init: str | Path) -> None:
    """Check that the version that `run.init` names, if any, can be had. Raises ConfigError: what can be had."""
    past = past_of(init)
    if past is not None:
        place, version = past
        try:
            copies = copies_at(place)
            if copies is not None:
                copies.find(version=version)
            else:
                find_past(region_folders(Path(place)), version=version)
        except (ConfigError, StorageError) as error:
            raise ConfigError(f"run.init: {error}") from error


def _words(past: PastVersion) -> str:
    return f"version {past.number} (step {past.step:,})"


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in few words: "0, 40 to 48"."""
    groups = [list(group) for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]
    spans = [f"{group[0][1]} to {group[-1][1]}" if len(group) > 1 else str(group[0][1]) for group in groups]
    return ", ".join([*spans[:_RANGES_SHOWN], *(["..."] if len(spans) > _RANGES_SHOWN else [])])
