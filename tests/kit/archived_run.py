"""A run of three whole regions to its end, in virtual time; the first of them keeps an archive."""

import asyncio
from pathlib import Path

import pytest

from diloco_node.core.types import RunSettings
from diloco_node.daemon import node as node_module
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.state_names import NODE_NAME
from tests.kit.memory_transport import MemoryTransport, Network
from tests.kit.node_kit import MANIFEST
from tests.kit.node_world import SOME_IDENTITY, Region, VirtualLoop

NAMES = ("a", "b", "c")
SETTINGS = RunSettings(
    fragments=2,
    sync_every=6,
    steps_max=90,
    heartbeat_ns=50_000_000,
    election_timeout_ns=400_000_000,
    checkpoint_versions=3,
    payload_versions=2,
    summary_entries=12,
)


def train(folder: Path, settings: RunSettings = SETTINGS, *, init: Path | None = None) -> None:
    """Run to the end; each region's folder is as `start` and a daemon leave it."""

    async def run() -> None:
        MemoryTransport.network = Network()
        regions = [
            Region(name, NAMES, folder / name, settings, seed, is_archive=name == "a", init=init)
            for seed, name in enumerate(NAMES, start=1)
        ]
        for region in regions:
            await region.start()
        async with asyncio.timeout(300):
            while not all(region.has_finished for region in regions):
                assert [region.errors for region in regions] == [[], [], []]
                await asyncio.sleep(0.05)
        for region in regions:
            save_manifest(region.folder, MANIFEST)
            region.spec.save(region.folder / NODE_NAME)
            await region.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_module, "GrpcTransport", MemoryTransport)
        patch.setattr(node_module, "load_identity", lambda *_, **__: SOME_IDENTITY)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(run())
