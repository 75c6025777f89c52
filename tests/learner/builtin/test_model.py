"""The built-in model: names and arithmetic of Hugging Face's Llama, replicas, determinism."""

import math

import numpy as np
import pytest
import torch

from diloco_node.learner.builtin.model import ByteGPT, initial_parameters, rotary_tables, token_logits
from diloco_node.learner.builtin.shape import (
    NORM_EPSILON,
    ROTARY_BASE,
    ModelSettings,
    hf_config,
    parameter_shapes,
)

pytestmark = pytest.mark.no_device("this model is made on the host, and goes to a device in test_trainer.py")

SMALL = ModelSettings(layers=2, dim=24, heads=3, context=13)


def tokens_of(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def llama_by_hand(settings: ModelSettings, parameters: dict[str, torch.Tensor], tokens: np.ndarray) -> np.ndarray:
    """Llama for one sequence in float64 and plain numpy, written from the published formulas, loops and all."""
    p = {name: value.double().numpy() for name, value in parameters.items()}
    size = settings.dim // settings.heads

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON) * p[name]

    def rotate(head: np.ndarray) -> np.ndarray:
        out = np.empty_like(head)
        for position in range(len(head)):
            for pair in range(size // 2):
                angle = position * ROTARY_BASE ** (-2 * pair / size)
                a, b = head[position, pair], head[position, pair + size // 2]
                out[position, pair] = a * math.cos(angle) - b * math.sin(angle)
                out[position, pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = p["model.embed_tokens.weight"][tokens]
    for layer in range(settings.layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ p[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        attention = np.zeros_like(x)
        for head in range(settings.heads):
            columns = slice(head * size, (head + 1) * size)
            scores = rotate(q[:, columns]) @ rotate(k[:, columns]).T / math.sqrt(size)
            scores[np.triu_indices(len(scores), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            attention[:, columns] = weight / weight.sum(-1, keepdims=True) @ v[:, columns]
        x = x + attention @ p[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = h @ p[at + "mlp.gate_proj.weight"].T, h @ p[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ p["lm_head.weight"].T


def test_logits_are_those_of_llama_written_out():
    parameters = initial_parameters(SMALL, seed=3)
    parameters["lm_head.weight"] *= 50  # so that a wrong position or head is far outside the tolerance
    tokens = tokens_of(1, 13)
    ours = token_logits(SMALL, parameters, tokens, rotary_tables(SMALL))[0]
    np.testing.assert_allclose(ours.numpy(), llama_by_hand(SMALL, parameters, tokens[0].numpy()), rtol=1e-4, atol=1e-4)


def test_replicas_give_what_each_gives_alone():
    sets = [initial_parameters(SMALL, seed=seed) for seed in (1, 2, 3)]
    stack = {name: torch.stack([replica[name] for replica in sets]) for name in sets[0]}
    tokens = tokens_of(3, 4, 11)
    together = token_logits(SMALL, stack, tokens, rotary_tables(SMALL))
    for replica, parameters in enumerate(sets):
        alone = token_logits(SMALL, parameters, tokens[replica], rotary_tables(SMALL))
        torch.testing.assert_close(together[replica], alone, rtol=1e-4, atol=1e-5)


def test_a_prediction_does_not_see_what_comes_after():
    model = ByteGPT(SMALL, seed=4)
    tokens = tokens_of(2, 12)
    variant = tokens.clone()
    variant[:, 7:] = (variant[:, 7:] + 1) % 256
    before, after = model(tokens), model(variant)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-4


def test_loss_predicts_the_next_byte():
    model = ByteGPT(SMALL, seed=4)
    windows = tokens_of(3, 8).to(torch.uint8)
    logits = model(windows[:, :-1].long()).log_softmax(-1)
    losses = -logits.gather(-1, windows[:, 1:].long().unsqueeze(-1)).mean()
    torch.testing.assert_close(model.loss(windows), losses)


def test_equal_seeds_give_equal_bits_and_others_do_not():
    first, again, stranger = (initial_parameters(SMALL, seed=seed) for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], stranger["lm_head.weight"])


def test_the_state_has_the_names_and_shapes_that_the_config_promises():
    state = ByteGPT(SMALL, seed=0).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == parameter_shapes(SMALL)
    config = hf_config(SMALL)
    assert state["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert state["model.layers.1.mlp.gate_proj.weight"].shape == (config["intermediate_size"], config["hidden_size"])
    assert state["model.layers.0.self_attn.v_proj.weight"].shape == (config["hidden_size"],) * 2
    assert config["num_hidden_layers"] == 2
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]


def test_the_default_has_the_documented_size():
    assert sum(math.prod(shape) for shape in parameter_shapes(ModelSettings()).values()) == 133_440


@pytest.mark.parametrize(("dim", "hidden"), [(24, 64), (64, 176), (9 * 8, 192), (96, 256), (104, 280)])
def test_hidden_is_the_next_multiple_of_eight(dim: int, hidden: int):
    assert ModelSettings(dim=dim, heads=1).hidden == hidden


def test_every_parameter_gets_a_gradient():
    model = ByteGPT(SMALL, seed=1)
    model.loss(tokens_of(2, 9)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
