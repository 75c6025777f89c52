"""Scripts that catch what refuses them: each is told of as a crash with its cause, started again, and merged then."""

import sys
from pathlib import Path

import pytest

from tests.kit import hiding_script
from tests.kit.cluster_kit import Cluster
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

SCRIPT = str(Path(hiding_script.__file__).resolve())
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COMMANDS = {
    "attach": [sys.executable, SCRIPT, "attach"],
    "attach-ever": ["bash", "-c", f"{sys.executable} {SCRIPT} attach-ever; true"],
    "tokens": [*TORCHRUN, "1", SCRIPT, "tokens"],
    "rank-ever": [*TORCHRUN, "2", SCRIPT, "rank-ever"],
    "weights-ever": [sys.executable, "-m", "tests.kit.hiding_script", "weights-ever"],
}
CAUSES = {
    "attach": "LearnerError: LBFGS can't train in a run",
    "attach-ever": "LearnerError: LBFGS can't train in a run",
    "tokens": "LearnerError: step(tokens=0.5): give a whole number",
    "rank-ever": "LearnerError: step(tokens=0.5): give a whole number",
    "weights-ever": "LearnerError: '0.weight', and others, were changed between two steps",
}


async def test_a_script_that_hides_a_refusal_has_crashed_whatever_starts_it_and_is_merged_after_that(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path / "run", len(COMMANDS))
    ways = dict(zip(cluster.names, COMMANDS, strict=True))
    try:
        for name, way in ways.items():
            region = cluster.regions[name]
            region.program = (SCRIPT,)
            region.env = {**region.env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            if way == "weights-ever":
                region.settings += ("learner.preload=torch",)
            await region.start(cluster.config, COMMANDS[way])
        for name, way in ways.items():
            now = await cluster.until(
                f"{way} counts as a crash", lambda now, name=name: now[name]["learner_process"].get("crashes"), [name]
            )
            process = now[name]["learner_process"]
            assert (process["crashes"], process["hangs"]) == (1, 0)
            assert f": its script hides an error: {CAUSES[way]}" in process["reason"]
            log = (cluster.regions[name].state_dir / "logs" / "supervisor.log").read_text()
            assert f"its script hides an error: {CAUSES[way]}" in log
            assert not way.endswith("ever") or "learner goes on outside of the run: " in log
        for name in cluster.names:
            after = await cluster.until_merged(name, why="after its script had hidden a refusal")
            assert after[name]["learner_process"]["restarts"] == 1
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()
