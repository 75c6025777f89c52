"""`export` of a run that trains LoRA adapters: the files and names that PEFT itself writes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_node.core.merge.adapter_names import saved_name
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.main import main
from tests.cli.test_export import a_region, exported, finish

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = build_manifest(
    [TensorSpec(f"{LAYER}.lora_A.default.weight", (4, 16)), TensorSpec(f"{LAYER}.lora_B.default.weight", (16, 4))], 2
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """What PEFT's save_pretrained wrote before the run."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}))
    values = {f"{LAYER}.lora_A.weight": torch.zeros(4, 16), f"{LAYER}.lora_B.weight": torch.zeros(16, 4)}
    save_file(values, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("is_over", [False, True])
def test_export_writes_pefts_two_files(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], is_over: bool
) -> None:
    folder = a_region(tmp_path / "a", ADAPTER)
    tensors = finish(folder, ADAPTER) if is_over else None
    code, message = exported(capsys, folder, tmp_path / "out", "--base", base)
    assert code == 0, message
    out = {path.name for path in (tmp_path / "out").iterdir()}
    assert out == {"adapter_config.json", "adapter_model.safetensors", "export.json"}
    values = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        f"{LAYER}.lora_A.weight": (4, 16),
        f"{LAYER}.lora_B.weight": (16, 4),
    }
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == (base / "adapter_config.json").read_bytes()
    if tensors is not None:
        assert all(np.array_equal(values[saved_name(name)].numpy(), value) for name, value in tensors.items())


def test_half_the_size_is_rounded(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_region(tmp_path / "a", ADAPTER)
    assert exported(capsys, folder, tmp_path / "out", "--config", base / "adapter_config.json", "--dtype", "bfloat16")
    values = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {value.dtype for value in values.values()} == {torch.bfloat16}


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["export", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_what_does_not_fit_is_named(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = a_region(tmp_path / "a", ADAPTER), tmp_path / "out"
    assert "add --base FOLDER with what PEFT's save_pretrained wrote" in refused(capsys, folder, out)
    save_file({f"{LAYER}.lora_A.weight": torch.zeros(8, 16)}, base / "adapter_model.safetensors")
    assert "lora_A.weight is (8, 16), in the run (4, 16)" in refused(capsys, folder, out, "--base", base)
    (base / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "adapter_model.safetensors can't be read" in refused(capsys, folder, out, "--base", base)
    (base / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "another kind of adapter" in refused(capsys, folder, out, "--base", base)
    (base / "adapter_config.json").write_text("[]")
    assert "can't be read as PEFT's adapter_config.json" in refused(capsys, folder, out, "--base", base)
    assert not out.exists()


def test_an_embedding_that_was_resized_and_frozen_is_copied(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = base / "adapter_model.safetensors", base / "adapter_config.json"
    name = "base_model.model.model.embed_tokens.weight"
    save_file(load_file(file) | {name: torch.full((6, 4), 2.5)}, file)
    folder = a_region(tmp_path / "a", ADAPTER)
    code, message = exported(capsys, folder, tmp_path / "out", "--base", base)
    assert code == 0, message
    values = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(values) == 3
    assert torch.equal(values[name], torch.full((6, 4), 2.5))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["embed_tokens"]}))
    code, message = exported(capsys, folder, tmp_path / "other", "--base", base)
    assert code != 0
    assert f"is another adapter than the run's: {name} is (6, 4), in the run not there" in message


def test_two_adapters_at_once_are_refused(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_A.style.weight"]
    manifest = build_manifest([TensorSpec(name, (4, 16)) for name in names], 2)
    folder = a_region(tmp_path / "a", manifest)
    save_manifest(folder, manifest)
    assert "trains the adapters default, style" in refused(capsys, folder, tmp_path / "out", "--base", base)
