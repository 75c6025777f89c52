"""`export` from a region's folder: the tensors that it takes, and the reasons for which it refuses, in one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.types import EntryBody, ExtendedBody, FinishedBody, Member, RunSettings
from diloco_node.daemon.final_model import write_final
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.daemon.spec import NodeSpec
from diloco_node.integrations import model_export
from diloco_node.learner.builtin.shape import ModelSettings, hf_config, parameter_shapes
from diloco_node.main import main
from diloco_node.state_names import FINAL_NAME, NODE_NAME
from diloco_node.storage.store import RegionStore
from tests.kit.data_kit import END
from tests.kit.hf_kit import DEEPSEEK, write_hf_folder
from tests.kit.ledger_kit import a_round, chain
from tests.kit.node_kit import contribution_of

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)
BUILTIN = build_manifest([TensorSpec(*entry) for entry in parameter_shapes(TINY).items()], 2)
OWN = build_manifest([TensorSpec("net.embed.weight", (8, 4)), TensorSpec("net.up.weight", (6, 4))], 2)
OWN_CONFIG = {"model_type": "mine", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


def theta_of(manifest: Manifest, fragment: int, version: int) -> np.ndarray:
    random = np.random.default_rng([fragment, version])
    return random.standard_normal(manifest.fragments[fragment].size).astype(np.float32)


def tensors_of(manifest: Manifest, *versions: int) -> dict[str, np.ndarray]:
    values = {spec.name: np.empty(spec.size, np.float32) for spec in manifest.tensors}
    for fragment, version in zip(manifest.fragments, versions, strict=True):
        for piece in fragment.pieces:
            theta = theta_of(manifest, fragment.index, version)[piece.offset : piece.offset + piece.size]
            values[piece.name][piece.value_start : piece.value_stop] = theta
    return {spec.name: values[spec.name].reshape(spec.shape) for spec in manifest.tensors}


def a_region(folder: Path, manifest: Manifest = BUILTIN, *, versions: tuple[int, ...] = (4, 6)) -> Path:
    """In mid-run: two states of each fragment; rounds up to one version more than the newest state."""
    settings = RunSettings(fragments=2)
    store = RegionStore(folder)
    store.load(2)
    for fragment, newest in enumerate(versions):
        for version in (newest - 2, newest):
            theta = theta_of(manifest, fragment, version)
            store.store_state(fragment, version, theta, np.zeros_like(theta), b"d" * 32)
    member = Member(contribution_of("a"), 1.0)
    rounds = [(version, fragment) for fragment in (0, 1) for version in range(1, versions[fragment] + 2)]
    bodies = [dataclasses.replace(a_round(*field), members=(member, member)) for field in rounds]
    store.persist(1, "a", 0, chain(*(1 for _ in bodies), bodies=lambda index, _: bodies[index - 1]))
    store.close()
    save_manifest(folder, manifest)
    values: dict[str, Any] = {
        field.name: folder / field.name
        if field.name in ("state_dir", "identity_dir", "learner_socket", "supervisor_socket")
        else field.default
        for field in dataclasses.fields(NodeSpec)
    }
    values |= {"region": folder.name, "run_id": "try", "regions": ("a", "b"), "peers": {}, "settings": settings}
    values |= {"listen_host": "", "listen_port": 0, "address": None, "admin_port": 0, "settings_digest": "00"}
    NodeSpec(**values).save(folder / NODE_NAME)
    model = {"hf": None, **dataclasses.asdict(TINY)}
    (folder / "trainer.json").write_text(json.dumps({"run": {"seed": 5}, "model": model}))
    return folder


def finish(folder: Path, manifest: Manifest = BUILTIN) -> dict[str, np.ndarray]:
    tensors = tensors_of(manifest, 40, 60)
    write_final(folder, tensors)
    append(folder, FinishedBody((5, 7), "enough"))
    return tensors


def append(folder: Path, body: EntryBody) -> None:
    store = RegionStore(folder)
    bodies = [*(entry.body for entry in store.load(2).entries), body]
    store.persist(1, "a", 0, chain(*(1 for _ in bodies), bodies=lambda at, _: bodies[at - 1])[-1:])
    store.close()


def exported(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main(["export", *map(str, words)])
    out, err = capsys.readouterr()
    return code, err if code else out


def held(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(out / "model.safetensors"))


def is_equal(tensors: dict[str, torch.Tensor], arrays: dict[str, np.ndarray]) -> bool:
    return set(tensors) == set(arrays) and all(np.array_equal(tensors[name], arrays[name]) for name in arrays)


def test_in_mid_run_it_takes_the_newest_state_of_each_fragment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = a_region(tmp_path / "a"), tmp_path / "out"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, message = exported(capsys, folder, out)
    assert code == 0, message
    assert "run try (in mid-run, versions 4 to 6, 4,000 tokens), 12 merged tensors" in message
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert is_equal(held(out), tensors_of(BUILTIN, 4, 6))
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["hidden_size"]) == ("llama", "float32", 16)
    document = json.loads((out / "export.json").read_text())
    # 4 and 6 rounds of two members with 400 tokens each, over two fragments.
    assert (document["versions"], document["tokens"], document["is_final"]) == ([4, 6], 4000, False)
    assert (document["run_id"], document["region"]) == ("try", "a")


def test_a_finished_region_gives_its_final_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_region(tmp_path / "a")
    tensors = finish(folder)
    assert exported(capsys, folder, tmp_path / "out")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors)
    document = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (document["versions"], document["tokens"], document["is_final"]) == ([5, 7], 4800, True)


def test_of_a_whole_run_it_takes_the_region_that_is_furthest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_region(tmp_path / "state" / "a", versions=(4, 6))
    b = a_region(tmp_path / "state" / "b", versions=(6, 6))
    for place in (tmp_path, tmp_path / "state"):
        assert exported(capsys, place, tmp_path / "out", "--force")[0] == 0
        assert is_equal(held(tmp_path / "out"), tensors_of(BUILTIN, 6, 6))
    tensors = finish(a_region(tmp_path / "state" / "c", versions=(2, 2)))
    assert exported(capsys, tmp_path, tmp_path / "out", "--force")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors)
    assert b.exists()


def test_a_final_model_is_old_where_the_run_was_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By others, while this region was off; then here, where it could not be set aside."""
    a_region(tmp_path / "state" / "a", versions=(6, 8))
    c = a_region(tmp_path / "state" / "c", versions=(4, 4))
    finish(c)
    assert exported(capsys, tmp_path, tmp_path / "out")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors_of(BUILTIN, 6, 8))
    append(c, ExtendedBody(2000, 0))
    assert exported(capsys, c, tmp_path / "out", "--force")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors_of(BUILTIN, 4, 4))
    assert json.loads((tmp_path / "out" / "export.json").read_text())["is_final"] is False


def test_a_damaged_state_falls_back_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_region(tmp_path / "a")
    path = folder / "state" / "f001-v00000006.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert exported(capsys, folder, tmp_path / "out")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors_of(BUILTIN, 4, 4))
    assert path.exists(), "it is not set aside: a daemon may run here"
    (folder / "state" / "f001-v00000004.bin").unlink()
    code, message = exported(capsys, folder, tmp_path / "other")
    assert code == 6
    assert "no whole state of fragment 1" in message


def test_a_ledger_that_cannot_be_read_costs_the_tokens_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_region(tmp_path / "a")
    (folder / "ledger.log").write_bytes(b"none of it")
    assert exported(capsys, folder, tmp_path / "out")[0] == 0
    document = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (document["versions"], document["tokens"]) == ([4, 6], None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_type_is_rounded_and_named_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    folder = a_region(tmp_path / "a")
    assert exported(capsys, folder, tmp_path / "out", "--dtype", dtype)[0] == 0
    for name, values in tensors_of(BUILTIN, 4, 6).items():
        assert torch.equal(held(tmp_path / "out")[name], torch.from_numpy(values).to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_folders_that_are_no_regions_or_not_empty_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_region(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    code, message = exported(capsys, tmp_path / "empty", tmp_path / "out")
    assert code == 2
    assert "no manifest.json there" in message
    code, message = exported(capsys, tmp_path / "nowhere", tmp_path / "out")
    assert code == 2
    assert "is no folder with node.json" in message
    code, message = exported(capsys, folder, tmp_path / "a")
    assert code == 2
    assert "--force" in message
    code, message = exported(capsys, folder, folder, "--force")
    assert code == 2
    assert "has no export.json: --force replaces earlier exports only" in message
    assert (folder / "ledger.log").exists()
    tensors = finish(folder)
    tensors["model.norm.weight"] = np.ones(3, np.float32)
    write_final(folder, tensors)
    code, message = exported(capsys, folder, tmp_path / "out")
    assert code == 6
    assert FINAL_NAME in message


def test_what_was_written_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, out = a_region(tmp_path / "a"), tmp_path / "out"
    assert exported(capsys, folder, out)[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert is_equal(dict(model.state_dict()), tensors_of(BUILTIN, 4, 6))


def test_what_the_run_lacks_of_the_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder, out = a_region(tmp_path / "a"), tmp_path / "out"
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY) | {"num_hidden_layers": 2}))
    code, message = exported(capsys, folder, out, "--config", tmp_path / "config.json")
    assert code == 1
    assert "model.layers.1.input_layernorm.weight" in message
    assert ", ...: not in the run, so they are random. Give --base" in message
    assert len(json.loads((out / "export.json").read_text())["kept"]) == 9


def test_a_model_that_transformers_does_not_know_is_plain_tensors_and_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = a_region(tmp_path / "a", OWN), tmp_path / "out"
    (tmp_path / "config.json").write_text(json.dumps(OWN_CONFIG))
    code, message = exported(capsys, folder, out, "--config", tmp_path / "config.json")
    assert code == 0, message
    assert "plain tensors and config.json" in message
    assert is_equal(held(out), tensors_of(OWN, 4, 6))
    config = json.loads((out / "config.json").read_text())
    assert config == {"model_type": "mine", "tie_word_embeddings": True, "dtype": "float32"}
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "export.json", "model.safetensors"]


def test_a_script_s_own_model_without_a_config_is_its_tensors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only way to an earlier version of it, too: `final.safetensors` is of the end."""
    folder, out = a_region(tmp_path / "a", OWN), tmp_path / "out"
    for form in ([], ["--dtype", "bfloat16"]):
        code, message = exported(capsys, folder, out, "--force", *form)
        assert code == 0, message
        assert "model.safetensors alone" in message
        assert "add --config FILE, or --base FOLDER" in message
        assert sorted(path.name for path in out.iterdir()) == ["export.json", "model.safetensors"]
        if not form:
            assert is_equal(held(out), tensors_of(OWN, 4, 6))
    assert {value.dtype for value in held(out).values()} == {torch.bfloat16}


def test_without_transformers_the_built_in_model_is_plain_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "is_known", lambda config: False)
    assert exported(capsys, a_region(tmp_path / "a"), tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    for name, values in tensors_of(BUILTIN, 4, 6).items():
        assert torch.equal(held(tmp_path / "out")[name], torch.from_numpy(values).bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    assert config.items() <= hf_config(TINY).items()


def test_what_does_not_fit_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = a_region(tmp_path / "a", OWN)
    builtin = a_region(tmp_path / "b")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "own.json").write_text(json.dumps(OWN_CONFIG))
    (tmp_path / "llama.json").write_text(json.dumps(hf_config(TINY)))
    (tmp_path / "wide.json").write_text(json.dumps(hf_config(TINY) | {"intermediate_size": 8}))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / "config.json").write_text(json.dumps(hf_config(TINY)))
    for place, words, phrase in (
        (folder, ["--base", tmp_path / "nothing"], "config.json can't be read"),
        (folder, ["--config", tmp_path / "list.json"], "is no JSON object"),
        (folder, ["--config", tmp_path / "empty.json"], "has no model_type"),
        (folder, ["--config", tmp_path / "llama.json"], "tensor net.embed.weight of the run is not in the model"),
        (folder, ["--config", tmp_path / "own.json", "--base", tmp_path / "nothing"], "transformers knows, not mine"),
        (builtin, ["--config", tmp_path / "wide.json"], "the run's tensors do not fit config.json"),
        (builtin, ["--base", tmp_path / "unsaved"], "unsaved makes no model"),
    ):
        code, message = exported(capsys, place, tmp_path / "out", *words)
        assert code == 2
        assert phrase in message
        assert message.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["weights", "base"])
def test_with_a_frozen_weight_and_a_buffer_the_loaded_model_is_the_regions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    transformers = pytest.importorskip("transformers")
    base, out, frozen = tmp_path / "saved", tmp_path / "out", "model.layers.1.self_attn.o_proj.weight"
    write_hf_folder(base)
    (base / "config.json").write_text(json.dumps(DEEPSEEK))
    config = transformers.AutoConfig.from_pretrained(base)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    buffer = next(name for name in values if name.endswith("e_score_correction_bias"))
    values[buffer] = np.arange(1, 5, dtype=np.float32)
    module.get_buffer(buffer).copy_(torch.from_numpy(values[buffer]))
    module.save_pretrained(base)
    assert "model.layers.1.mlp.experts.down_proj" not in load_file(base / "model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters() if name != frozen}
    manifest = build_manifest([TensorSpec(*shape) for shape in shapes.items()], 2)
    folder = a_region(tmp_path / "a", manifest)
    (folder / "trainer.json").write_text(json.dumps({"model": {"hf": str(base)}}))
    if way == "base":
        (folder / "trainer.json").unlink()
    values |= finish(folder, manifest) if way == "weights" else tensors_of(manifest, 4, 6)
    code, message = exported(capsys, folder, out, *(["--base", base] if way == "base" else []))
    assert code == 0, message
    assert "2 tensors that are not merged" in message
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert is_equal(dict(model.state_dict()), values)
    assert json.loads((out / "export.json").read_text())["kept"] == sorted([frozen, buffer])
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == END


def test_a_model_that_began_with_random_weights_gets_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    model_folder, out = write_hf_folder(tmp_path / "model"), tmp_path / "out"
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model_folder))
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    manifest = build_manifest([TensorSpec(*shape) for shape in shapes.items()], 2)
    folder = a_region(tmp_path / "a", manifest)
    (folder / "trainer.json").write_text(json.dumps({"model": {"hf": str(model_folder)}}))
    code, message = exported(capsys, folder, out)
    assert code == 0, message
    assert json.loads((out / "export.json").read_text())["kept"] == []
    state = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(np.array_equal(state[name], values) for name, values in tensors_of(manifest, 4, 6).items())
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]), "tied"
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == END
