"""tests/kit/cluster_kit.py: what it says of regions that never came up."""

from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, all_train


async def test_where_no_region_runs_nobody_trains_and_the_last_words_are_told(tmp_path: Path) -> None:
    """A wrong run.toml once ended all of them at once, and the test that waited went on."""
    assert not all_train({})
    cluster = Cluster(tmp_path / "run", 2)
    for region in cluster.regions.values():
        (region.state_dir / "logs").mkdir(parents=True)
        (region.state_dir / "logs" / "start.log").write_text("run.toml is not valid TOML\n")
    with pytest.raises(AssertionError, match=r"us-east: run\.toml is not valid TOML"):
        await cluster.until("everybody trains", all_train, wait_s=0.0)
