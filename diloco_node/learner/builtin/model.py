"""The built-in model: a small GPT in the shape and with the names of Hugging Face's `LlamaForCausalLM`.

The arithmetic is one function, `token_logits`, over a dictionary of parameters. Every parameter may have one leading
dimension of *replicas*: then R models run as one set of batched matrix products. So `benchmarks/quality.py` trains many
learners at the speed of one, with the very model that `python -m diloco_node.learner` trains.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from diloco_node.learner.builtin.shape import NORM_EPSILON, ROTARY_BASE, VOCABULARY, ModelSettings, parameter_shapes


def initial_parameters(settings: ModelSettings, *, seed: int) -> dict[str, Tensor]:
    """Fresh float32 parameters; equal seeds give equal bits on any machine with the same torch version.

    Matrices are normal with variance 1 / fan-in, those that write into the residual stream scaled down by
    sqrt(2 layers); embedding and head have standard deviation 0.02; norms are one.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(settings).items():
        if len(shape) == 1:
            parameters[name] = torch.ones(shape)
            continue
        deviation = 0.02 if name in ("model.embed_tokens.weight", "lm_head.weight") else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= (2 * settings.layers) ** 0.5
        parameters[name] = torch.empty(shape).normal_(0.0, deviation, generator=generator)
    return parameters


def rotary_tables(settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding: each of shape (context, dim / heads), float32."""
    half = settings.dim // settings.heads // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(settings.context, dtype=torch.float64)[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def token_logits(
    settings: ModelSettings,
    parameters: Mapping[str, Tensor],
    tokens: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """The model's arithmetic, for one set of parameters or for R replicas at once (a leading dimension R everywhere).

    tokens: shape (B, T) or (R, B, T), int64, below 256; T at most `context`. rotary: `rotary_tables`, on the device of
    the parameters. Returns: shape (B, T, 256) or (R, B, T, 256); the prediction at t is for the token at t + 1.
    """
    *lead, batch, length = tokens.shape
    stream = _embed(parameters["model.embed_tokens.weight"], tokens)
    for layer in range(settings.layers):
        prefix, tables = f"model.layers.{layer}.", (rotary[0][:length], rotary[1][:length])
        stream = _layer(settings, parameters, prefix, tables, stream, lead=(*lead, batch))
    logits = _linear(_rms_norm(stream, parameters["model.norm.weight"]), parameters["lm_head.weight"])
    return logits.view(*lead, batch, length, VOCABULARY)


def _layer(
    settings: ModelSettings,
    parameters: Mapping[str, Tensor],
    at: str,
    rotary: tuple[Tensor, Tensor],
    stream: Tensor,
    *,
    lead: tuple[int, ...],
) -> Tensor:
    """Apply one transformer block, whose names begin with `at`; stream is (..., B * T, dim), lead is (..., B)."""
    length = len(rotary[0])
    normal = _rms_norm(stream, parameters[f"{at}input_layernorm.weight"])
    projections = [parameters[f"{at}self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    qkv = _linear(normal, torch.cat(projections, dim=-2))
    qkv = qkv.view(*lead, length, 3, settings.heads, settings.dim // settings.heads)
    query_key, value = torch.split(qkv, [2, 1], dim=-3)
    # Four dimensions, or torch's CPU kernel falls back to one that is three times slower.
    query, key, value = (
        projection.reshape(-1, length, settings.heads, projection.shape[-1]).transpose(1, 2)
        for projection in (*_rotate(query_key, *rotary).unbind(-3), value)
    )
    attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    attention = attention.transpose(-3, -2).reshape(stream.shape)
    stream = stream + _linear(attention, parameters[f"{at}self_attn.o_proj.weight"])
    normal = _rms_norm(stream, parameters[f"{at}post_attention_layernorm.weight"])
    gate_up = torch.cat((parameters[f"{at}mlp.gate_proj.weight"], parameters[f"{at}mlp.up_proj.weight"]), dim=-2)
    gate, up = _linear(normal, gate_up).chunk(2, dim=-1)
    return stream + _linear(functional.silu(gate) * up, parameters[f"{at}mlp.down_proj.weight"])


def _embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the table, shape (..., B * T, dim). Replicas look into one tall table, each at its own offset."""
    *lead, batch, length = tokens.shape
    if lead:
        offsets = torch.arange(lead[0], device=tokens.device) * table.shape[-2]
        tokens = tokens + offsets[:, None, None]
    rows = functional.embedding(tokens, table.reshape(-1, table.shape[-1]))
    return rows.view(*lead, batch * length, table.shape[-1])


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight^T` per replica: (..., N, in) and (..., out, in) to (..., N, out)."""
    return torch.matmul(x, weight.transpose(-1, -2))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension; weight is (dim,) or (R, dim)."""
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON)
    return normal * weight.unsqueeze(-2)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding in Hugging Face's convention: the two halves of a head are the pairs.

    x: shape (..., T, 2, heads, size): queries and keys. cosine, sine: shape (T, size).
    """
    size = x.shape[-1]
    # (first, second) -> (-second, first) as a product with a constant: slicing and joining 8 values at a time is slow.
    swap = torch.eye(size, dtype=x.dtype, device=x.device).roll(size // 2, dims=1)
    swap[size // 2 :] *= -1.0
    return x * cosine[:, None, None, :] + (x @ swap) * sine[:, None, None, :]


class ByteGPT(nn.Module):
    """The model as a module; `state_dict()` has exactly the names and shapes of `LlamaForCausalLM`."""

    def __init__(self, settings: ModelSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        for name, value in initial_parameters(settings, seed=seed).items():
            self._place(name, value)
        cosine, sine = rotary_tables(settings)
        self.register_buffer("rotary_cosine", cosine, persistent=False)
        self.register_buffer("rotary_sine", sine, persistent=False)

    def _place(self, name: str, value: Tensor) -> None:
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for name_part in path:
            if name_part not in owner._modules:
                owner.add_module(name_part, nn.Module())
            owner = owner.get_submodule(name_part)
        owner.register_parameter(leaf, nn.Parameter(value))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (B, T, 256) for tokens of shape (B, T), int64."""
        rotary = (self.get_buffer("rotary_cosine"), self.get_buffer("rotary_sine"))
        parameters = dict(self.named_parameters())
        return token_logits(self.settings, parameters, tokens, rotary)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token over windows of shape (B, T + 1), uint8 or int64; a scalar."""
        tokens = windows.long()
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
