"""`export` from a region's folder: what it takes, what it adds, and what it refuses in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.types import FinishedBody, Member, RunSettings
from diloco_node.daemon.final_model import write_final
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.daemon.run_record import FINAL_NAME
from diloco_node.daemon.spec import NodeSpec
from diloco_node.learner.builtin.documents import TextPiece
from diloco_node.learner.builtin.encoding import TextEncoding
from diloco_node.learner.builtin.hf_settings import HfModelSettings
from diloco_node.learner.builtin.shape import ModelSettings, hf_config, parameter_shapes
from diloco_node.main import main
from diloco_node.state_names import NODE_NAME
from diloco_node.storage.store import RegionStore
from tests.kit.data_kit import END, rows_of, write_tokenizer
from tests.kit.hf_kit import DEEPSEEK
from tests.kit.ledger_kit import a_round, chain
from tests.kit.node_kit import contribution_of

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)
BUILTIN = build_manifest([TensorSpec(*one) for one in parameter_shapes(TINY).items()], 2)
OWN = build_manifest([TensorSpec("net.embed.weight", (8, 4)), TensorSpec("net.up.weight", (6, 4))], 2)
OWN_CONFIG = {"model_type": "mine", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


def theta_of(manifest: Manifest, fragment: int, version: int) -> np.ndarray:
    random = np.random.default_rng([fragment, version])
    return random.standard_normal(manifest.fragments[fragment].size).astype(np.float32)


def tensors_of(manifest: Manifest, *versions: int) -> dict[str, np.ndarray]:
    found = {spec.name: np.empty(spec.size, np.float32) for spec in manifest.tensors}
    for fragment, version in zip(manifest.fragments, versions, strict=True):
        for piece in fragment.pieces:
            part = theta_of(manifest, fragment.index, version)[piece.offset : piece.offset + piece.size]
            found[piece.name][piece.value_start : piece.value_stop] = part
    return {spec.name: found[spec.name].reshape(spec.shape) for spec in manifest.tensors}


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
    bodies = [dataclasses.replace(a_round(*one), members=(member, member)) for one in rounds]
    store.persist(1, "a", 0, chain(*(1 for _ in bodies), bodies=lambda index, _: bodies[index - 1]))
    store.close()
    save_manifest(folder, manifest)
    values: dict[str, Any] = {
        one.name: folder / one.name
        if one.name in ("state_dir", "identity_dir", "learner_socket", "supervisor_socket")
        else one.default
        for one in dataclasses.fields(NodeSpec)
    }
    values |= {"region": folder.name, "run_id": "try", "regions": ("a", "b"), "peers": {}, "settings": settings}
    values |= {"listen_host": "", "listen_port": 0, "is_advertised": False, "admin_port": 0, "settings_digest": "00"}
    NodeSpec(**values).save(folder / NODE_NAME)
    (folder / "trainer.json").write_text(json.dumps({"model": dataclasses.asdict(TINY), "seed": 5}))
    return folder


def finish(folder: Path, manifest: Manifest = BUILTIN) -> dict[str, np.ndarray]:
    tensors = tensors_of(manifest, 40, 60)
    write_final(folder, tensors)
    store = RegionStore(folder)
    entries = store.load(2).entries
    ends = chain(*(1 for _ in range(len(entries) + 1)), bodies=lambda at, _: _body(entries, at))
    store.persist(1, "a", 0, ends[-1:])
    store.close()
    return tensors


def _body(entries: tuple[Any, ...], index: int) -> Any:
    return entries[index - 1].body if index <= len(entries) else FinishedBody((5, 7), "enough")


def exported(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main(["export", *map(str, words), "--no-check"])
    out, err = capsys.readouterr()
    return code, err if code else out


def held(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(out / "model.safetensors"))


def is_equal(found: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> bool:
    return set(found) == set(expected) and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_in_mid_run_it_takes_the_newest_state_of_each_fragment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = a_region(tmp_path / "a"), tmp_path / "out"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, said = exported(capsys, folder, out)
    assert code == 0, said
    assert "run try (in mid-run, versions 4 to 6, 4,000 tokens), 12 merged tensors" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert is_equal(held(out), tensors_of(BUILTIN, 4, 6))
    config = json.loads((out / "config.json").read_text())
    assert config.pop("dtype") == "float32"
    assert config.items() <= hf_config(TINY).items()
    document = json.loads((out / "export.json").read_text())
    # 4 and 6 rounds of two members with 400 tokens each, over two fragments.
    assert (document["versions"], document["tokens"], document["is_final"]) == ([4, 6], 4000, False)
    assert (document["run_id"], document["region"]) == ("try", "a")
    assert (out / "tokenizer.json").exists()


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


def test_a_damaged_state_falls_back_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_region(tmp_path / "a")
    path = folder / "state" / "f001-v00000006.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert exported(capsys, folder, tmp_path / "out")[0] == 0
    assert is_equal(held(tmp_path / "out"), tensors_of(BUILTIN, 4, 4))
    assert path.exists(), "it is not set aside: a daemon may run here"
    (folder / "state" / "f001-v00000004.bin").unlink()
    code, said = exported(capsys, folder, tmp_path / "other")
    assert code == 6
    assert "no whole state of fragment 1" in said


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


def test_the_tokenizer_is_the_one_that_the_run_trained_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    texts, folder, out = rows_of(3), a_region(tmp_path / "a"), tmp_path / "out"
    trainer = json.loads((folder / "trainer.json").read_text())
    place = write_tokenizer(tmp_path / "words").parent
    (tmp_path / "my-words.json").write_bytes((place / "tokenizer.json").read_bytes())
    for tokenizer in (place, place / "tokenizer.json", tmp_path / "my-words.json"):
        (folder / "trainer.json").write_text(json.dumps(trainer | {"tokenizer": str(tokenizer)}))
        assert exported(capsys, folder, out, "--force")[0] == 0
        found = transformers.AutoTokenizer.from_pretrained(out)
        pieces = [TextPiece(text.encode(), is_last=False, is_held_out=False) for text in texts]
        assert found(texts).input_ids == [one.tolist() for one in TextEncoding(tokenizer).encode(pieces)]
        assert (found.eos_token, found.model_max_length) == (END, TINY.context)
    # What lies beside the file belongs to it.
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w7"}')
    (folder / "trainer.json").write_text(json.dumps(trainer | {"tokenizer": str(place / "tokenizer.json")}))
    assert exported(capsys, folder, out, "--force")[0] == 0
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == "w7"
    (place / "tokenizer.json").unlink()
    place.rename(tmp_path / "elsewhere")
    assert main(["export", str(folder), str(out), "--force", "--no-check"]) == 0
    assert f"no tokenizer: the run's, {place}/tokenizer.json, is not here: add --tokenizer" in capsys.readouterr().err
    assert not (out / "tokenizer.json").exists()


def a_base(folder: Path, **more: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OWN_CONFIG))
    (folder / "tokenizer.json").write_text('{"own": 1}')
    (folder / "README.md").write_text("not a tokenizer's")
    embed = torch.randn(8, 4).bfloat16()
    tensors = {
        "embed.weight": embed,
        "head.weight": embed.clone(),
        "up.weight": torch.zeros(6, 4),
        "frozen.weight": torch.randn(8, 4).bfloat16(),
        "zeros.weight": torch.zeros(6, 4),
        "steps": torch.tensor(9),
        **more,
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_frozen_parameters_and_buffers_come_from_the_base_and_tied_names_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, base, out = a_region(tmp_path / "a", OWN), a_base(tmp_path / "base"), tmp_path / "out"
    code, said = exported(capsys, folder, out, "--base", base, "--strip", "net.")
    assert code == 0, said
    found, theirs = held(out), load_file(base / "model.safetensors")
    merged = tensors_of(OWN, 4, 6)
    assert sorted(found) == ["embed.weight", "frozen.weight", "steps", "up.weight", "zeros.weight"]
    for name in ("embed.weight", "up.weight"):
        assert np.array_equal(found[name], merged[f"net.{name}"])
    for name in ("frozen.weight", "steps", "zeros.weight"):
        assert torch.equal(found[name], theirs[name]), name
    document = json.loads((out / "export.json").read_text())
    assert document["tied"] == ["head.weight"]
    assert document["kept"] == ["frozen.weight", "steps", "zeros.weight"]
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "mine",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    assert (out / "tokenizer.json").read_text() == '{"own": 1}'
    assert not (out / "README.md").exists()


def test_a_tokenizer_and_a_config_of_ones_own_go_before_those_of_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, base = a_region(tmp_path / "a", OWN), a_base(tmp_path / "base")
    (tmp_path / "spiece.model").write_bytes(b"\x00pieces")
    (tmp_path / "other.json").write_text('{"model_type": "other"}')
    words = ["--base", base, "--strip", "net.", "--tokenizer", tmp_path / "spiece.model"]
    assert exported(capsys, folder, tmp_path / "out", *words, "--config", tmp_path / "other.json")[0] == 0
    assert (tmp_path / "out" / "spiece.model").read_bytes() == b"\x00pieces"
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "other"


def test_what_does_not_fit_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, base = a_region(tmp_path / "a", OWN), a_base(tmp_path / "base")
    narrow = a_base(tmp_path / "narrow", **{"up.weight": torch.zeros(6, 5)})
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for words, named in (
        ([], "add --config FILE, or --base FOLDER"),
        (["--base", base], "tensor net.embed.weight of the run is not in --base: add --strip net."),
        (["--base", narrow, "--strip", "net."], "tensor up.weight is (6, 5) in --base, the run's is (6, 4)"),
        (["--base", base, "--strip", "net.up."], "net.embed.weight does not begin with it"),
        (["--base", tmp_path / "nothing"], "config.json can't be read"),
        (["--config", tmp_path / "list.json"], "is no JSON object"),
        (["--config", tmp_path / "empty.json"], "has no model_type"),
        (["--base", base, "--strip", "net.", "--tokenizer", tmp_path / "none"], "does not exist"),
        (["--base", base, "--strip", "net.", "--tokenizer", tmp_path / "nothing"], "no tokenizer.json"),
    ):
        code, said = exported(capsys, folder, tmp_path / "out", *words)
        assert code == 2
        assert named in said
        assert said.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_folders_that_are_no_regions_or_not_empty_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_region(tmp_path / "a")
    code, said = exported(capsys, tmp_path / "a" / "state", tmp_path / "out")
    assert code == 2
    assert "no manifest.json there" in said
    code, said = exported(capsys, folder, tmp_path / "a")
    assert code == 2
    assert "--force" in said
    code, said = exported(capsys, folder, folder, "--force")
    assert code == 2
    assert "has no export.json: --force replaces earlier exports only" in said
    assert (folder / "ledger.log").exists()
    tensors = finish(folder)
    tensors["model.norm.weight"] = np.ones(3, np.float32)
    write_final(folder, tensors)
    code, said = exported(capsys, folder, tmp_path / "out")
    assert code == 6
    assert FINAL_NAME in said


def test_what_was_written_is_loaded_as_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, out = a_region(tmp_path / "a"), tmp_path / "out"
    assert main(["export", str(folder), str(out)]) == 0
    assert "no tensor is missing or left over" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert is_equal(dict(model.state_dict()), tensors_of(BUILTIN, 4, 6))
    config = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["export", str(folder), str(out), "--force", "--config", str(tmp_path / "config.json")]) == 1
    assert "are lacking, and would be random" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["seed", "weights", "base"])
def test_with_a_frozen_weight_and_a_buffer_the_loaded_model_is_the_regions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    transformers = pytest.importorskip("transformers")
    from diloco_node.learner.builtin.hf_model import HfCausalLM

    saved, out, frozen = tmp_path / "saved", tmp_path / "out", "model.layers.1.self_attn.o_proj.weight"
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(DEEPSEEK))
    settings = HfModelSettings(str(saved), "weights" if way == "weights" else "random", 16)
    module = HfCausalLM(HfModelSettings(str(saved), context=16), seed=5, vocabulary=256).module
    expected = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    buffer = next(name for name in expected if name.endswith("e_score_correction_bias"))
    if way != "seed":
        expected[buffer] = np.arange(1, 5, dtype=np.float32)
        module.get_buffer(buffer).copy_(torch.from_numpy(expected[buffer]))
        module.save_pretrained(saved)
        assert "model.layers.1.mlp.experts.down_proj" not in load_file(saved / "model.safetensors")
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters() if name != frozen}
    manifest = build_manifest([TensorSpec(*one) for one in shapes.items()], 2)
    folder = a_region(tmp_path / "a", manifest)
    (folder / "trainer.json").write_text(json.dumps({"model": dataclasses.asdict(settings), "seed": 5}))
    if way == "base":
        (folder / "trainer.json").unlink()
    expected |= finish(folder, manifest) if way == "weights" else tensors_of(manifest, 4, 6)
    words = ["--base", str(saved)] if way == "base" else []
    assert main(["export", str(folder), str(out), *words]) == 0, capsys.readouterr().err
    assert "no tensor is missing or left over" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert is_equal(dict(model.state_dict()), expected)
    assert json.loads((out / "export.json").read_text())["kept"] == sorted([frozen, buffer])
