import json
from typing import Any

import pytest
import torch
from torch import nn

from diloco_node.learner.optimizer_parts import Kept, OptimizerParts


def quantized_optimizer() -> Any:
    """AdamW of torchao after a step, as far as its state tells: the step itself would compile for a minute."""
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(3)
    model = nn.Linear(256, 32, bias=False)
    optimizer = optim.AdamW8bit(model.parameters(), lr=0.1)
    moments = {"exp_avg": (True, -1.0), "exp_avg_sq": (False, 0.0)}
    state = {name: optimizer._new_buffer(model.weight, is_signed) for name, (is_signed, _) in moments.items()}
    for name, (_, low) in moments.items():
        state[name].copy_(torch.empty(32, 256).uniform_(low, 1.0))
    optimizer.state[model.weight] = state | {"step": torch.tensor(5.0)}
    return optimizer


@pytest.mark.no_device("torch without CUDA makes no memory of that type by itself, as a state's copy does")
def test_moments_of_eight_bits_come_back_in_eight_bits() -> None:
    optimizer, fresh = quantized_optimizer(), quantized_optimizer()
    kept = OptimizerParts(optimizer).keep()
    again = Kept.from_document(
        json.loads(json.dumps(kept.document())),
        {name: torch.empty(tensor.shape).copy_(tensor) for name, tensor in kept.tensors.items()},
    )
    fresh.state.clear()
    OptimizerParts(fresh).restore([again])
    (state,), (expected,) = fresh.state.values(), optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert type(state[name]) is type(expected[name])
        # Rounded once more, as each step of such an optimizer does.
        assert torch.allclose(state[name].dequantize(), expected[name].dequantize(), rtol=0.05, atol=0.01)


def test_moments_of_eight_bits_are_refused_by_an_optimizer_that_would_take_them_as_floats() -> None:
    optimizer = quantized_optimizer()
    kept = OptimizerParts(optimizer).keep()
    plain = torch.optim.SGD([torch.zeros(32, 256, requires_grad=True)], lr=0.1)
    kept.rest["kind"] = "SGD"
    with pytest.raises(ValueError, match="a OptimState8bit was kept, which this optimizer does not make"):
        OptimizerParts(plain).restore([kept])
