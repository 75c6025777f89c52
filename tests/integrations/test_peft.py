"""LoRA by PEFT itself: a folder begins a run, the learner ends with the merged adapter, PEFT loads the export."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import diloco_node
from diloco_node.core.types import Codec
from diloco_node.daemon.effects.initial_files import check_initial, read_initial
from diloco_node.daemon.final_model import write_final
from diloco_node.wire.learner_link import SnapshotReady
from tests.cli.test_export import a_region, exported, finish
from tests.kit.fake_daemon import FakeDaemon

pytestmark = [
    pytest.mark.e2e,  # importing the library takes longer than the test
    pytest.mark.filterwarnings("default"),  # its own
]


def base_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["lm_head"], "bias": "lora_only"},
        {"use_dora": True, "target_modules": ["embed_tokens", "v_proj"]},
        {"trainable_token_indices": [1, 5, 23]},
    ],
    ids=["plain", "with a head", "of an embedding", "with rows of an embedding"],
)
def test_an_adapter_goes_in_and_out_in_pefts_own_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(**{"r": 4, "init_lora_weights": False, "target_modules": ["q_proj"], **options})
    first = peft.get_peft_model(base_model(), config)
    first.save_pretrained(tmp_path / "first")
    torch.manual_seed(9)
    model = peft.get_peft_model(base_model(), config)  # each region draws adapters of its own
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.01)
    rows = torch.arange(24).view(2, 12)
    check_initial(tmp_path / "first")
    with FakeDaemon(folder, codec=Codec.FP32) as probe:
        diloco_node.attach(model, optimizer, checkpoint_every_s=0).close()
        assert probe.manifest is not None
        theta = read_initial(tmp_path / "first", probe.manifest)  # as `run.init` does
    with FakeDaemon(folder, codec=Codec.FP32, theta=theta) as daemon:
        with diloco_node.attach(model, optimizer) as diloco:
            assert torch.equal(model(rows).logits, first(rows).logits), "it begins with the adapter of the folder"

            def step() -> None:
                loss = model(rows, labels=rows).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step(tokens=rows.numel(), loss=loss)

            step()
            daemon.want(0)
            while not any(isinstance(message, SnapshotReady) for message in daemon.said):
                step()
            daemon.commit(0, daemon.theta[0] - np.float32(0.7) * daemon.decoded(0), 1)
            daemon.stop_learner(versions=(1, 0))
            while not diloco.should_stop:
                step()
        model.save_pretrained(tmp_path / "trained")
        merged, manifest = daemon.theta, daemon.manifest
    assert manifest is not None
    region = a_region(tmp_path / "region", manifest)
    values = {spec.name: np.empty(spec.size, np.float32) for spec in manifest.tensors}
    for fragment, vector in zip(manifest.fragments, merged, strict=True):
        for piece in fragment.pieces:
            part = vector[piece.offset : piece.offset + piece.size]
            values[piece.name][piece.value_start : piece.value_stop] = part
    finish(region, manifest)
    write_final(region, {spec.name: values[spec.name].reshape(spec.shape) for spec in manifest.tensors})
    code, text = exported(capsys, region, tmp_path / "out", "--base", tmp_path / "first")
    assert code == 0, text
    trained = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    trained.pop("base_model.model.model.embed_tokens.base_layer.weight", None)  # frozen: the base has it
    out = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: value.shape for name, value in out.items()} == {name: value.shape for name, value in trained.items()}
    for name, value in out.items():
        assert torch.equal(value, trained[name]), f"{name}: what the script saves is what the run has"
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "out")
    assert torch.equal(loaded(rows).logits, model(rows).logits)
    assert not torch.equal(loaded(rows).logits, first(rows).logits)


def test_an_adapter_that_is_merged_into_a_copy_in_mid_run_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its names are those of the base, none of which is merged."""
    peft = pytest.importorskip("peft", reason="needs peft")
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    with FakeDaemon(folder), diloco_node.attach(model, optimizer, checkpoint_every_s=0) as diloco:
        diloco.save_merged(model)
        whole = copy.deepcopy(model).merge_and_unload()
        assert "own weights" not in caplog.text
        whole.state_dict()
        assert "of a copy of the model: unless global_state_dict() was loaded into it, it holds" in caplog.text
        model.merge_adapter()
        model.get_base_model().state_dict()
        model.unmerge_adapter()
        assert "of merged adapters: the weights below them hold this region's own" in caplog.text
