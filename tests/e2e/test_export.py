"""A model of Hugging Face's trains in two regions, one of two ranks; it is evaluated, and exported twice."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from typer.testing import CliRunner

from diloco_node.main import app
from tests.kit.cluster_kit import Cluster
from tests.kit.commands import COMMAND
from tests.kit.data_kit import rows_of, write_jsonl
from tests.kit.hf_kit import write_hf_folder

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

MODEL = """hf = "../model"
hf_args = { gradient_accumulation_steps = 2, bf16 = true, learning_rate = 1e-3, eval_steps = 5 }
"""


def checked(said: str, code: int | None, out: Path) -> dict[str, Any]:
    """The export's own report."""
    assert code == 0, said
    document: dict[str, Any] = json.loads((out / "export.json").read_text())
    return document


def exported_here(place: Path, out: Path) -> dict[str, Any]:
    """In this process, which has imported what it needs."""
    done = CliRunner().invoke(app, ["export", str(place), str(out)])
    return checked(done.output, done.exit_code, out)


async def exported(place: Path, out: Path) -> dict[str, Any]:
    """As its users do it."""
    words = ("export", str(place), str(out))
    process = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=-1, stderr=-2)
    said, _ = await process.communicate()
    return checked(said.decode(), process.returncode, out)


async def test_ranks_evaluate_and_exports_load_and_give_the_merged_models_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_hf_folder(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", rows_of(20_000))
    changes = {"layers = 2\n": f"layers = 2\n{MODEL}", "sync_every = 16": "sync_every = 8"}
    changes |= {"paths = []": 'paths = ["../rows.jsonl"]'}
    cluster = Cluster(tmp_path / "run", 2, changes=changes)
    ranks = dict(zip(cluster.names, (2, 1), strict=True))
    cluster.regions[cluster.names[0]].settings += ("model.ranks=2",)
    try:
        await cluster.start()
        before = await cluster.until_trains()
        await cluster.until_commits(4 * 9, why="so that each fragment is on disk again")
        middle = exported_here(cluster.folder, tmp_path / "middle")
        assert not middle["is_final"]
        assert max(middle["versions"]) >= 8
        assert middle["tokens"] > 0
        await cluster.until_commits(4)
        now = await cluster.until(
            "all have evaluated the merged model",
            lambda now: all(region["learner"] and region["learner"]["val_loss_global"] for region in now.values()),
        )
        for name, count in ranks.items():
            learner = now[name]["learner"]
            whole = learner["step"] * 2 * count * 8 * 64
            assert 0.9 * whole < learner["tokens"] <= whole, (
                "each rank has batches of its own, some short at an epoch's end"
            )
            assert learner["incarnation"] == before[name]["learner"]["incarnation"], "no evaluation was its end"
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
    final = await exported(cluster.folder, tmp_path / "final")
    assert final["is_final"]
    assert final["tokens"] > middle["tokens"]
    merged = load_file(cluster.folder / cluster.names[0] / "final.safetensors")
    assert "lm_head.weight" not in merged
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    tokens = tokenizer("w1 w8 w15 w22", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = functional_call(fresh, merged, (), {"input_ids": tokens}).logits
        assert torch.equal(model(input_ids=tokens).logits, logits)
    assert torch.equal(model.lm_head.weight, merged["model.embed_tokens.weight"])
    for name in ("middle", "final"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        told = model.generate(tokens, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert told.shape == (1, tokens.shape[1] + 20)
