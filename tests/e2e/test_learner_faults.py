"""A learner that diverges or crashes again and again: the others go on, and it comes back to merged parameters."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from diloco_node.main import main
from diloco_node.supervisor.learner_watch import CRASHES_MAX
from tests.kit import faulty_region
from tests.kit.cluster_kit import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

PROGRAM = str(Path(faulty_region.__file__).resolve())
ROUNDS = 4
"""Rounds that the others commit meanwhile: one of each fragment."""

USUAL_STEPS = 40
"""After so many a learner knows which losses are usual."""


def end_of(process: dict[str, Any], fault: str) -> bool:
    """Whether the learner's process has come to the end that its fault brings."""
    if fault == "crash":
        return process["state"] == "stopped" and process["crashes"] == CRASHES_MAX
    return process["crashes"] == 1 and process["exit_code"] == 1


async def test_a_learner_that_diverges_or_crashes_holds_up_nobody_and_is_merged_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 3, changes={"sync_every = 16": "sync_every = 8"})
    faults = dict(zip(cluster.names, ("crash", "nan", "spike"), strict=True))
    try:
        for name, fault in faults.items():
            region = cluster.regions[name]
            region.program = (PROGRAM,)
            region.settings += ("learner.on_spike=rollback",) if fault == "spike" else ()
            await region.start(cluster.config, (sys.executable, PROGRAM, "learn", fault))
        await cluster.until_trains()
        for name, fault in faults.items():
            await cluster.until(
                "its losses are known",
                lambda now, name=name: now[name]["learner"] and now[name]["learner"]["step"] >= USUAL_STEPS,
                [name],
            )
            before = await cluster.until_merged(name)
            pids = before[name]["pids"]
            file = cluster.regions[name].state_dir / faulty_region.FAULT_NAME
            file.touch()
            await cluster.until(
                f"{name} ends by its fault: {fault}",
                lambda now, name=name, fault=fault: (
                    now[name]["learner"] is None and end_of(now[name]["learner_process"], fault)
                ),
                [name],
            )
            now = await cluster.until_commits(ROUNDS, why=f"in all regions, while {name} has no learner")
            assert now[name]["learner"] is None
            assert now[name]["pids"]["daemon"] == pids["daemon"], "its daemon has acknowledged them"
            file.unlink()
            if fault == "crash":
                assert main(["learner", "start", str(cluster.regions[name].state_dir)]) == 0
            after = await cluster.until_merged(name, why=f"after its fault was over: {fault}")
            assert after[name]["learner"]["incarnation"] > before[name]["learner"]["incarnation"]
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    report = cluster.account()
    assert report.faults == ()
    assert report.discarded > 0, "steps that no merge has"
    for name in cluster.names:
        folder = cluster.regions[name].state_dir
        lives = [json.loads(line) for line in (folder / faulty_region.ATTACHED_NAME).read_text().splitlines()]
        assert len(lives) == 2, "the first one, and the one after the fault"
        assert min(lives[1]["versions"]) > 0
        assert lives[1]["is_merged"]
    final = safetensors.numpy.load_file(cluster.folder / cluster.names[0] / "final.safetensors")
    assert all(math.isfinite(float(abs(one).max())) for one in final.values())
