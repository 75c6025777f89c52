"""The folders of a run's regions as they are read without their daemons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.core.ledger.summary import RunSummary, summary_of
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.recovery.replay_plan import find_end, find_genesis
from diloco_node.core.types import Entry, GenesisBody
from diloco_node.daemon.manifest_file import MANIFEST_NAME, load_manifest
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import ConfigError, ProtocolViolation, StorageError
from diloco_node.state_names import FINAL_NAME, NODE_NAME
from diloco_node.storage.ledger_reader import LedgerReader, read_whole_ledger
from diloco_node.storage.store import RegionStore

TRIES: Final = 3
"""A daemon may remove a state after it was listed; two newer ones are there then. It may change the ledger, too."""

ARCHIVE_HINT: Final = (
    "payload_archive = true in [regions.NAME] keeps all that this region gets, from the first version on"
)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A region's folder as it was read, also below a running daemon.

    Attributes:
        summary: of the ledger's entries up to `base_index`; None: there are none. entries: those after it.
        states: per fragment the versions on disk. payloads: (fragment, version, digest) on disk.
    """

    folder: Path
    spec: NodeSpec
    manifest: Manifest
    store: RegionStore
    genesis: GenesisBody
    summary: RunSummary | None
    base_index: int
    entries: tuple[Entry, ...]
    states: tuple[tuple[int, ...], ...]
    payloads: frozenset[tuple[int, int, bytes]]

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a folder. Raises ConfigError, StorageError: it lacks something, or is damaged; what to do."""
        spec = NodeSpec.load(folder / NODE_NAME)
        manifest = load_manifest(folder)
        if manifest is None:
            raise StorageError(f"{folder} has no manifest.json: the region never learnt its model")
        fragments = len(manifest.fragments)
        store = RegionStore(folder, is_read_only=True)
        # Before the payloads: those of the rounds that a running daemon adds meanwhile are not looked for.
        base, entries = read_whole_ledger(folder, fragments)
        payloads = store.load(fragments).payloads
        summary = summary_of(base, fragments=fragments)
        genesis = find_genesis(summary, entries)
        if genesis is None:
            raise StorageError(f"{folder}: the ledger has no genesis yet, so there is nothing to compute again")
        # Of the settings only codec_down counts here, which `start` lets nobody change in a run.
        here, ledger_digest = manifest.digest, genesis.manifest_digest
        if here != ledger_digest:
            raise StorageError(
                f"{folder}: manifest.json has digest {here[:16]}, the run began with {ledger_digest[:16]}"
            )
        states = tuple(store.state_versions(fragment) for fragment in range(fragments))
        return cls(folder, spec, manifest, store, genesis, summary, base.index, entries, states, payloads)

    @property
    def is_finished(self) -> bool:
        """Whether the ledger has the end of the run."""
        return find_end(self.summary, self.entries) is not None


def region_folders(place: Path) -> list[Path]:
    """The state folders that a path means: itself, or those of a run's folder, the furthest region first. Raises
    ConfigError, StorageError."""
    if (place / MANIFEST_NAME).is_file():
        return [place]
    folders = [
        path.parent for path in sorted((*place.glob(f"*/{MANIFEST_NAME}"), *place.glob(f"state/*/{MANIFEST_NAME}")))
    ]
    if not folders:
        raise ConfigError(
            f"{place}: no {MANIFEST_NAME} there or one folder below; give a region's state folder, as state/us-east, "
            "or the folder of all regions. A region has it when its learner has attached for the first time"
        )
    return sorted(folders, key=_progress, reverse=True)


def read_ledger(folder: Path, fragments: int) -> tuple[RunSummary | None, tuple[Entry, ...]] | None:
    """Sum of the old entries, and the entries after it; None: they can't be read, or change again and again."""
    for _ in range(TRIES):
        reader = LedgerReader(folder)
        try:
            reader.read()
            return summary_of(reader.base, fragments=fragments), reader.entries
        except (StorageError, ProtocolViolation):
            continue
    return None


def final_model(folder: Path, fragments: int) -> tuple[bool, tuple[int, ...]]:
    """Whether a folder has the final model of a run that is over there, and its versions; none: no ledger says."""
    if not (folder / FINAL_NAME).is_file():
        return False, ()
    ledger = read_ledger(folder, fragments)
    end = None if ledger is None else find_end(*ledger)
    return ledger is None or end is not None, () if end is None else end.versions


def _progress(folder: Path) -> tuple[int, bool]:
    """Versions on disk, over all fragments, and whether they are the final model: others may have extended the run."""
    manifest = load_manifest(folder)
    assert manifest is not None
    is_final, versions = final_model(folder, len(manifest.fragments))
    store = RegionStore(folder, is_read_only=True)
    states = [max(store.state_versions(fragment.index), default=-1) for fragment in manifest.fragments]
    return sum(versions or states), is_final
