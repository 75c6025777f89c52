"""What several tests of whole runs use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three regions, with twice the rounds of a demo: what is waited for is rounds."""
    run = Cluster(tmp_path / "run", 3, changes={"sync_every = 16": "sync_every = 8"})
    try:
        yield run
    finally:
        await run.clear()
