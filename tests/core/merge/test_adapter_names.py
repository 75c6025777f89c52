"""The names of adapters while they train, and in PEFT's file."""

import pytest

from diloco_node.core.merge.adapter_names import adapters_of, has_adapters, saved_name

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
NAMES = {
    f"{LAYER}.lora_A.default.weight": f"{LAYER}.lora_A.weight",
    f"{LAYER}.lora_B.default.weight": f"{LAYER}.lora_B.weight",
    f"{LAYER}.lora_magnitude_vector.default.weight": f"{LAYER}.lora_magnitude_vector",
    "base_model.model.embed.lora_embedding_A.default": "base_model.model.embed.lora_embedding_A",
    "base_model.model.lm_head.modules_to_save.default.weight": "base_model.model.lm_head.weight",
    "base_model.model.embed.token_adapter.trainable_tokens_delta.default": (
        "base_model.model.embed.token_adapter.trainable_tokens_delta"
    ),
    f"{LAYER}.lora_B.my_style.weight": f"{LAYER}.lora_B.weight",
    f"{LAYER}.base_layer.bias": f"{LAYER}.base_layer.bias",
}


@pytest.mark.parametrize(("name", "saved"), NAMES.items())
def test_names_are_pefts(name: str, saved: str) -> None:
    assert saved_name(name) == saved


def test_a_model_whose_head_alone_trains_is_none_of_adapters() -> None:
    assert has_adapters(NAMES)
    others = ["base_model.model.lm_head.modules_to_save.default.weight", "e.trainable_tokens_delta.default"]
    assert not has_adapters([*others, "q_lora_rank", "lora.weight"])


def test_adapters_are_named_once_each() -> None:
    assert adapters_of(NAMES) == ["default", "my_style"]
