"""The shape of the built-in model, known without torch: the names are those of Hugging Face's `LlamaForCausalLM`.

Llama rather than GPT-2, because its linear layers are plain (out, in) matrices: `final.safetensors` loads into
transformers without any transposition, together with the `config.json` that `hf_config` describes. Tokens are bytes
by default: token id = byte value, no tokenizer, no special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from diloco_node.errors import ConfigError

VOCABULARY: Final = 256
"""Of text as bytes."""

NORM_EPSILON: Final = 1e-5
ROTARY_BASE: Final = 10_000.0

_LIMITS: Final = {
    "layers": (1, 128),
    "dim": (8, 16_384),
    "heads": (1, 256),
    "context": (2, 65_536),
    "vocabulary": (2, 1 << 24),
}


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The shape of the model. The default has 0.13 M parameters: it learns on one slow core.

    Attributes:
        layers: transformer blocks. dim: width of the residual stream. heads: attention heads; divides dim into
            even parts (rotary embedding turns pairs). context: tokens that a prediction may look at.
        vocabulary: how many tokens there are; 256 for bytes, at least the tokenizer's with one.

    Raises:
        ConfigError: a value is out of range, or heads does not divide dim into even parts.
    """

    layers: int = 2
    dim: int = 64
    heads: int = 4
    context: int = 64
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"model.{name} is {value!r}: use a whole number from {low} to {high}")
        if self.dim % (2 * self.heads):
            raise ConfigError(
                f"model.heads is {self.heads} and model.dim is {self.dim}: dim must be a multiple of 2 x heads, "
                f"for example {2 * self.heads * max(1, self.dim // (2 * self.heads))}"
            )

    @property
    def hidden(self) -> int:
        """Width of the gated MLP: 8/3 of dim, rounded up to a multiple of 8."""
        return -(-self.dim * 8 // 24) * 8


def hf_config(settings: ModelSettings) -> dict[str, Any]:
    """What `config.json` beside `final.safetensors` must hold for `AutoModelForCausalLM.from_pretrained`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": settings.vocabulary,
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
    """Name -> shape of every parameter, in the order of the module."""
    dim, hidden = settings.dim, settings.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (settings.vocabulary, dim)}
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
    shapes["lm_head.weight"] = (settings.vocabulary, dim)
    return shapes


def model_settings_from(values: Mapping[str, Any]) -> ModelSettings:
    """Settings from a JSON object.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    known = asdict(ModelSettings())
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown model settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return ModelSettings(**{**known, **dict(values)})
