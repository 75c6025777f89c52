"""A small model in training, for tests of what is watched of it."""

from __future__ import annotations

import torch
from torch import nn

import diloco_node


def make(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: diloco_node.Diloco, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        arrive(model)
        diloco.step(tokens=4)


def arrive(model: nn.Module) -> None:
    """What was ordered on a device is made: verdicts that would come a step later come with the next step."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.synchronize()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def load(model: nn.Module) -> None:
    model.load_state_dict(net(7).state_dict())


def load_by_hand(model: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), net(7).parameters(), strict=True):
        parameter.data.copy_(other.data)


def load_by_data(model: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), net(7).parameters(), strict=True):
        parameter.data = other.data


def load_one_layer(model: nn.Module) -> None:
    model[1].load_state_dict(net(7)[1].state_dict())  # type: ignore[index]


def draw_anew(model: nn.Module) -> None:
    for layer in model:  # type: ignore[attr-defined]
        layer.reset_parameters()
