"""The shape of the built-in model, known without torch: the names are those of Hugging Face's `LlamaForCausalLM`.

Llama rather than GPT-2, because its linear layers are plain (out, in) matrices: `final.safetensors` loads into
transformers without any transposition, together with the `config.json` that `hf_config` describes. Tokens are bytes:
token id = byte value, no tokenizer, no special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

VOCABULARY: Final = 256
"""Values of a byte."""

NORM_EPSILON: Final = 1e-5
ROTARY_BASE: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The shape of the model: by default 0.13 M parameters, which learn on one slow core.

    dim: width of the residual stream. heads: divides dim into even parts (rotary embedding turns pairs). context: bytes
    that a prediction may look at.
    """

    layers: int = 2
    dim: int = 64
    heads: int = 4
    context: int = 64

    @property
    def hidden(self) -> int:
        """Width of the gated MLP: 8/3 of dim, rounded up to a multiple of 8."""
        return -(-self.dim * 8 // 24) * 8


def hf_config(settings: ModelSettings) -> dict[str, Any]:
    """The model as a `config.json` that `AutoModelForCausalLM.from_pretrained` reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": settings.dim,
        "intermediate_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.dim // settings.heads,
        "max_position_embeddings": settings.context,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, in the order of the module."""
    dim, hidden = settings.dim, settings.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, dim)}
    for layer in range(settings.layers):
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (dim, dim)
        shapes[f"{at}mlp.gate_proj.weight"] = (hidden, dim)
        shapes[f"{at}mlp.up_proj.weight"] = (hidden, dim)
        shapes[f"{at}mlp.down_proj.weight"] = (dim, hidden)
        shapes[f"{at}input_layernorm.weight"] = (dim,)
        shapes[f"{at}post_attention_layernorm.weight"] = (dim,)
    shapes["model.norm.weight"] = (dim,)
    shapes["lm_head.weight"] = (VOCABULARY, dim)
    return shapes
