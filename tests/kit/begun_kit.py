"""A region's folder with a run in its ledger, as a daemon leaves it."""

from pathlib import Path

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import ExtendedBody, FinishedBody, GenesisBody, LeaderBody
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.state_names import FINAL_NAME
from diloco_node.storage.store import RegionStore
from tests.kit.node_kit import MANIFEST


def begin_run(
    folder: Path,
    run_id: str,
    regions: tuple[str, ...],
    *,
    finished: str = "",
    limits: tuple[int, int] = (0, 0),
    extended: tuple[int, int] | None = None,
    changes: tuple[MembershipBody | SettingsBody, ...] = (),
    settings: tuple[SettingsBody, ...] = (),
) -> None:
    """Leave manifest and ledger of a run; with a reason also its end, by these limits, and the final model's file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_manifest(folder, MANIFEST)
    fragments = len(MANIFEST.fragments)
    disks = tuple(name.encode().ljust(16, b".") for name in regions)
    bodies = [
        LeaderBody(regions[0]),
        GenesisBody(run_id, MANIFEST.digest, "settings", regions, (bytes(32),) * fragments, disks, settings=settings),
        *changes,
        *([FinishedBody((0,) * fragments, finished, *limits)] if finished else []),
        *([ExtendedBody(*extended)] if extended else []),
    ]
    entries = []
    for index, body in enumerate(bodies, start=1):
        entries.append(seal(index, 1, entries[-1].hash if entries else ZERO_HASH, body))
    store = RegionStore(folder)
    store.load(fragments)
    store.persist(1, "", 0, entries)
    store.close()
    if finished:
        (folder / FINAL_NAME).write_bytes(b"model")
