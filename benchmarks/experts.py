"""A toy mixture of experts: load of the experts and loss, before and after merges, by how the router is balanced.

    python benchmarks/sources.py --fetch              # the texts, once
    python benchmarks/experts.py --seeds 2            # 10 arms of 2,000 steps: half an hour on one core, resumes
    python benchmarks/experts.py --arms own_bias_mean,own_bias_local --seeds 1 --json

Two layers of eight experts, top two, nothing dropped; 0.2 M parameters. Balanced by an auxiliary loss ("aux"), by a
bias buffer that follows the load after each step ("bias", arXiv 2408.15664), merged by its mean as `attach(buffers=)`
does it, or kept by each region, or not at all. Data and regions as in `sources.py`. Load is that of the fullest of the
eight experts over their mean (1 is even, 4 the worst of top two), the mean of both layers, on held-out text of what
the region trains on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))

from quality_merge import Rounds
from quality_stack import Inner
from sources import BATCH, CONTEXT, OVERLAP, POINT_WINDOWS, POINTS, RATE, SOURCES, Arm, Windows, command, settings

from diloco_node.learner.builtin.data import Corpus
from diloco_node.numeric import F32

DIM, HEADS, LAYERS, EXPERTS, TOP, HIDDEN = 64, 4, 2, 8, 2, 64
AUX: Final = 0.01
BIAS_STEP: Final = 1e-3


@dataclass(frozen=True, slots=True)
class ExpertArm(Arm):
    """As `sources.Arm`. balance: "aux", "bias_mean", "bias_local" or "none"."""

    balance: str = "none"


ARMS: Final = (
    *(ExpertArm(f"own_{way}", balance=way) for way in ("bias_mean", "bias_local", "aux", "none")),
    *(ExpertArm(f"data_parallel_{way}", "all", balance=way) for way in ("bias_local", "aux")),
    *(ExpertArm(f"mix_{way}", "mix", balance=way) for way in ("bias_mean", "bias_local", "aux", "none")),
)


class Mixture(nn.Module):
    """A byte model of pre-norm blocks, each of attention and of eight experts, of which a router chooses two a byte.

    Attributes:
        loads: part of the last call's choices by layer and expert. aux: the auxiliary loss of the last call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_place = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        for name, size, width in (("qkv", DIM, 3 * DIM), ("out", DIM, DIM), ("router", DIM, EXPERTS)):
            setattr(self, name, _linears(size, width))
        self.up, self.down = _linears(DIM, EXPERTS * HIDDEN), _linears(EXPERTS * HIDDEN, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS + 1))
        self.lm_head = nn.Linear(DIM, 256, bias=False)
        for each in (self.embed, self.embed_place, self.lm_head):
            nn.init.normal_(each.weight, std=0.02)
        self.register_buffer("expert_bias", torch.zeros(LAYERS, EXPERTS))

    def loss(self, windows: Any) -> Tensor:
        """Mean loss in nats per byte of windows of shape (B, T + 1)."""
        self.loads, self.aux = torch.zeros(LAYERS, EXPERTS), torch.zeros(())
        tokens = torch.from_numpy(windows.astype(np.int64))
        stream = self.embed(tokens[:, :-1]) + self.embed_place.weight
        for layer in range(LAYERS):
            qkv = self.qkv[layer](self.norms[2 * layer](stream)).unflatten(-1, (3, HEADS, -1))
            attention = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            stream = stream + self.out[layer](attention.transpose(1, 2).flatten(2))
            stream = stream + self._experts(layer, self.norms[2 * layer + 1](stream))
        logits = self.lm_head(self.norms[-1](stream))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _experts(self, layer: int, stream: Tensor) -> Any:
        scores = torch.sigmoid(self.router[layer](stream))
        choice = torch.topk(scores + self.expert_bias[layer], TOP).indices
        gates = scores * torch.zeros_like(scores).scatter_(-1, choice, 1.0)
        load = choice.flatten().bincount(minlength=EXPERTS) / choice.numel()
        shares = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
        self.loads[layer], self.aux = load, self.aux + EXPERTS * (load * shares).sum()
        gates = (gates / gates.sum(-1, keepdim=True)).repeat_interleave(HIDDEN, -1)
        return self.down[layer](functional.gelu(self.up[layer](stream)) * gates)

    def tensors(self, *, biases: bool) -> dict[str, Tensor]:
        """What is merged, by name: the parameters, and with `biases` those of the routers."""
        return {**dict(self.named_parameters()), **(dict(self.named_buffers()) if biases else {})}

    def bind(self, row: F32, *, biases: bool) -> None:
        """Lay those tensors into a row of theta, and take the values that are there."""
        at = 0
        for tensor in self.tensors(biases=biases).values():
            tensor.data = torch.from_numpy(row[at : at + tensor.numel()]).view(tensor.shape)
            at += tensor.numel()

    @torch.no_grad()
    def figures(self, windows: Any) -> list[float]:
        """Loss, load of the fullest expert over the mean, and entropy of the load (1 is even), over all layers."""
        loss = float(self.loss(windows))
        entropy = -torch.special.xlogy(self.loads, self.loads).sum(-1) / np.log(EXPERTS)
        return [loss, float(self.loads.max(-1).values.mean()) * EXPERTS, float(entropy.mean())]


def _linears(size: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(size, width, bias=False) for _ in range(LAYERS))


def train(arm: ExpertArm, *, steps: int, seed: int, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """One run: figures of each region before and after merges, of the merged model, and at the end."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    replicas, merges_bias = 1 if arm.regions == "all" else len(SOURCES), arm.balance == "bias_mean"
    models = [Mixture() for _ in range(replicas)]
    shapes = {name: tuple(tensor.shape) for name, tensor in models[0].tensors(biases=merges_bias).items()}
    first = torch.cat([tensor.detach().flatten() for tensor in models[0].tensors(biases=merges_bias).values()])
    theta: F32 = np.tile(first.numpy(), (replicas, 1))
    for model, row in zip(models, theta, strict=True):
        model.bind(row, biases=merges_bias)
    betas = (0.9, 0.99 if replicas > 1 else 0.95)
    optimizers = [torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.1) for model in models]
    rounds = Rounds(settings(arm, steps), shapes, theta, tokens_per_step=BATCH * CONTEXT) if replicas > 1 else None
    windows, inner = Windows(arm, corpora, seed=seed), Inner(lr=RATE, steps=steps)
    tests = [corpus.held_out_windows(POINT_WINDOWS, CONTEXT) for corpus in corpora]
    mixed = np.concatenate(tests)
    own = tests if arm.regions == "own" else [mixed] * replicas
    marks = {int(part * steps / arm.sync_every) * arm.sync_every + OVERLAP for part in POINTS} | {steps}
    points: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        for model, optimizer, batch in zip(models, optimizers, windows.at(step - 1, is_over=False), strict=True):
            _step(model, optimizer, batch, arm.balance, inner.lr_at(step))
        if rounds is None:
            continue
        before = [model.figures(test) for model, test in zip(models, own, strict=True)] if step in marks else []
        (rounds.finish if step == steps else rounds.after_step)(step)
        if step in marks:
            after = [model.figures(test) for model, test in zip(models, own, strict=True)]
            merged = _merged(models, rounds.global_parameters(), mixed, biases=merges_bias)
            points.append({"step": step, "before": before, "after": after, "merged": merged})
    if rounds is None:
        points.append({"step": steps, "merged": [model.figures(mixed) for model in models]})
    return {"arm": arm.name, "seed": seed, "points": points, "seconds": round(time.perf_counter() - started, 1)}


def _step(model: Mixture, optimizer: torch.optim.Optimizer, batch: Any, balance: str, rate: float) -> None:
    """One inner step of a region; then the biases follow the load."""
    loss = model.loss(batch)
    if balance == "aux":
        loss = loss + AUX * model.aux
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    if balance.startswith("bias"):
        model.expert_bias.add_(torch.sign(1 / EXPERTS - model.loads), alpha=BIAS_STEP)


def _merged(models: Sequence[Mixture], row: F32, windows: Any, *, biases: bool) -> list[list[float]]:
    """Figures of the merged parameters, with the biases of each region where they are not merged."""
    result = []
    for model in models[: 1 if biases else None]:
        merged = Mixture()
        merged.load_state_dict(model.state_dict())
        merged.bind(row, biases=biases)
        result.append(merged.figures(windows))
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: means over regions and seeds; before and after on the region's text, merged on all sources."""
    lines = ["| arm | step | load before | after | merged | entropy | loss before | after | merged |", f"|{'---|' * 9}"]
    for name in dict.fromkeys(record["arm"] for record in results):
        runs = [record["points"] for record in results if record["arm"] == name]
        for at, point in enumerate(runs[0]):
            mean = {
                kind: np.mean([np.mean(run[at][kind], axis=0) for run in runs], axis=0)
                for kind in ("before", "after", "merged")
                if kind in point
            }
            load, loss = ([f"{values[i]:.{3 - i}f}" for values in mean.values()] for i in (1, 0))
            blank = [""] * (3 - len(load))
            cells = [name, str(point["step"]), *blank, *load, f"{mean['merged'][2]:.3f}", *blank, *loss]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(__doc__ or "", ARMS, train, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
