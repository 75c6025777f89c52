"""Loops of other libraries join a run by their callback alone: the examples, as their users start them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, all_train
from tests.kit.data_kit import END, rows_of, write_jsonl, write_tokenizer
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

EXAMPLES = {
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_fit.py": ("lightning",),
    "accelerate_loop.py": ("accelerate",),
    "torchtitan_train.py": ("torchtitan",),
}
TITAN_TOML = """
[job]
dump_folder = "{folder}"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = 2
seq_len = 32
steps = 1000000
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
"""


def command_of(example: str, folder: Path) -> list[str]:
    """How its user starts it."""
    script = str(ROOT / "examples" / example)
    if example != "torchtitan_train.py":
        return [sys.executable, script]
    write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    write_jsonl(folder / "text" / "rows.jsonl", rows_of(300))
    settings = folder / "train.toml"
    settings.write_text(TITAN_TOML.format(folder=folder))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return [*launcher, "-m", "tests.kit.titan_on_cpu", script, "--job.config_file", str(settings)]


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_trains_in_two_regions_and_comes_back_after_a_kill(tmp_path: Path, example: str) -> None:
    missing = [name for name in EXAMPLES[example] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install 'diloco-node[hf,lightning,titan]'")
    cluster = Cluster(tmp_path / "run", 2)
    command = command_of(example, tmp_path)
    try:
        for region in cluster.regions.values():
            await region.start(cluster.config, command)
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
            assert (learner["loss"] is not None) == (example != "torchtitan_train.py"), "its model returns no loss"
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
