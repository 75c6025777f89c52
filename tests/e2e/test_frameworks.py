"""Loops of other libraries join a run by their callback alone: the examples, as their users start them."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, all_train
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

EXAMPLES = {
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_fit.py": ("lightning",),
    "accelerate_loop.py": ("accelerate",),
}


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_trains_in_two_regions_and_comes_back_after_a_kill(tmp_path: Path, example: str) -> None:
    missing = [name for name in EXAMPLES[example] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install 'diloco-node[hf,lightning]'")
    cluster = Cluster(tmp_path / "run", 2)
    try:
        for region in cluster.regions.values():
            await region.start(cluster.config, [sys.executable, str(ROOT / "examples" / example)])
        before = await cluster.until_trains()
        await cluster.until_commits(8)
        victim = cluster.names[0]
        os.kill(before[victim]["pids"]["learner"], signal.SIGKILL)
        await cluster.until(
            "the learner is back",
            lambda now: (
                all_train(now) and now[victim]["learner"]["incarnation"] > before[victim]["learner"]["incarnation"]
            ),
        )
        await cluster.until_merged(victim, why="after its learner was killed")
        after = await cluster.until_commits(4)
        for name in cluster.names:
            learner = after[name]["learner"]
            assert learner["tokens"] % learner["step"] == 0, "each step has as many tokens"
            assert learner["loss"] is not None
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
