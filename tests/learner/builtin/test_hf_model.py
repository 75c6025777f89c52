"""Models of Hugging Face in the built-in trainer: seeds, losses, evaluation, what is not merged, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.hf_settings import HfModelSettings, model_from
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.trainer import Trainer, TrainerSettings, held_out_loss, settings_from
from diloco_node.learner.layouts.tensors import ModelTensors
from tests.kit.hf_kit import DEEPSEEK
from tests.learner.builtin.test_trainer import FakeRun, corpus_of_words

pytest.importorskip("transformers")

from diloco_node.learner.builtin.hf_model import HfCausalLM, load_faults, unmerged_state

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_in(folder: Path, document: dict[str, object] | None = None) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document or LLAMA))
    return path


def made(folder: Path, document: dict[str, object] | None = None, *, seed: int = 3, **more: object) -> HfCausalLM:
    settings = HfModelSettings(str(config_in(folder, document)), context=16)
    return HfCausalLM(settings, seed=seed, vocabulary=256, **more)


def windows(count: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 17)).astype(np.uint8))


def test_equal_seeds_make_equal_weights_and_leave_the_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(77)
    before = torch.get_rng_state()
    first, second, other = (dict(made(tmp_path, seed=seed).module.named_parameters()) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("document", [LLAMA, GPT2, DEEPSEEK])
def test_the_loss_is_that_of_its_labels(tmp_path: Path, document: dict[str, object]) -> None:
    model = made(tmp_path, document)
    model.module.eval()
    for name, buffer in model.module.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(2))
    tokens = windows()
    labels = tokens.long()
    expected = model.module(input_ids=labels, labels=labels).loss
    assert model.loss(tokens).item() == pytest.approx(expected.item(), rel=1e-5)
    everything = model.summed_loss(labels, None).item() / (4 * 16)
    assert everything == pytest.approx(expected.item(), rel=1e-5)


def test_evaluation_takes_the_given_parameters_without_dropout_and_changes_nothing(tmp_path: Path) -> None:
    model, other = made(tmp_path, GPT2), made(tmp_path, GPT2, seed=8)
    held_out = windows(8).numpy()
    # As `global_state_dict` gives them: the tied head under both names, in tensors of their own.
    state = {name: value.clone() for name, value in other.module.state_dict().items()}
    found = held_out_loss(model, held_out, state, windows_at_once=3)
    assert found == held_out_loss(model, held_out, state, windows_at_once=3)
    assert found == pytest.approx(held_out_loss(other, held_out), rel=1e-6)
    assert found != pytest.approx(held_out_loss(model, held_out), rel=1e-4)
    assert model.module.training


def test_activation_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    plain, saving = made(tmp_path), made(tmp_path, checkpoint_activations=True)
    for model in (plain, saving):
        model.loss(windows()).backward()
    pairs = zip(plain.module.parameters(), saving.module.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in pairs)


def test_the_trainer_trains_it_and_a_folder_of_weights(tmp_path: Path) -> None:
    config_in(tmp_path)
    settings = TrainerSettings(
        model=HfModelSettings(str(tmp_path), context=16), batch=4, steps=40, lr=2e-2, warmup=5, eval_every=0
    )
    run = FakeRun(10**9)
    run.is_attached = False
    trainer = Trainer(settings, corpus=corpus_of_words(), say=lambda line: None)
    outcome = trainer.run(run.attach)
    assert outcome.val_loss < outcome.loss_first - 1.0
    specs = {spec.name for spec in ModelTensors(trainer.model).specs}
    assert "model.embed_tokens.weight" in specs
    assert "lm_head.weight" not in specs, "tied"
    trainer.model.save_pretrained(tmp_path / "saved")
    again = HfCausalLM(HfModelSettings(str(tmp_path / "saved"), "weights", 16), seed=0, vocabulary=256)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name


def test_what_is_not_merged_is_made_again_as_it_began(tmp_path: Path) -> None:
    model = made(tmp_path)
    state = model.module.state_dict()
    settings = HfModelSettings(str(tmp_path), context=16)
    names = {spec.name for spec in ModelTensors(model.module).specs}
    assert unmerged_state(settings, seed=3, merged=names) == {}
    frozen = "model.layers.1.mlp.up_proj.weight"
    found = unmerged_state(settings, seed=3, merged=names - {frozen})
    assert list(found) == [frozen]
    assert (found[frozen].dtype, found[frozen].shape) == ("F32", (24, 16))
    assert found[frozen].data.tobytes() == state[frozen].numpy().tobytes()


@pytest.mark.parametrize(
    ("document", "context", "named"),
    [
        (LLAMA | {"vocab_size": 255}, 16, "vocab_size is 255"),
        (LLAMA, 33, "32 positions"),
        (LLAMA | {"model_type": "no-such"}, 16, "no-such"),
        (LLAMA | {"num_attention_heads": 3}, 16, r"config\.json|makes no model"),
        ({"model_type": "vit"}, 16, "vit|vocab_size"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, document: dict[str, object], context: int, named: str) -> None:
    path = config_in(tmp_path, document)
    with pytest.raises(ConfigError, match=named) as refused:
        HfCausalLM(HfModelSettings(str(path), context=context), seed=0, vocabulary=256)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    for settings in (HfModelSettings(str(tmp_path / "none")), HfModelSettings(str(tmp_path / "none.json"))):
        with pytest.raises(ConfigError, match="does not exist"):
            HfCausalLM(settings, seed=0, vocabulary=256)
    config_in(tmp_path)
    with pytest.raises(ConfigError, match="makes no model"):
        HfCausalLM(HfModelSettings(str(tmp_path), "weights", 16), seed=0, vocabulary=256)


def test_settings_name_one_kind_of_model() -> None:
    assert model_from({"layers": 3}) == ModelSettings(layers=3)
    assert model_from({"hf": "x/config.json", "context": 8}) == HfModelSettings("x/config.json", "random", 8)
    for values, named in (
        ({"hf": "x", "layers": 2}, "unknown model settings layers"),
        ({"hf": 3}, r"model\.hf"),
        ({"hf": "x", "init": "zeros"}, r"model\.init"),
        ({"hf": "x", "context": True}, r"model\.context"),
    ):
        with pytest.raises(ConfigError, match=named):
            model_from(values)
    assert settings_from({"model": {"hf": "x"}}).model == HfModelSettings("x")


def test_faults_of_a_folder_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "saved"
    made(tmp_path).module.save_pretrained(folder)
    assert load_faults(folder) == []
    path = folder / "model.safetensors"
    tensors = load_file(path)
    moved = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.nom.weight": moved}, path, {"format": "pt"})
    lacking, left_over = load_faults(folder)
    assert lacking.startswith("model.norm.weight are lacking")
    assert left_over.startswith("model.nom.weight are of no use")
    path.write_bytes(b"none")
    assert "does not load" in load_faults(folder)[0]
    assert "does not load" in load_faults(tmp_path / "nothing")[0]
