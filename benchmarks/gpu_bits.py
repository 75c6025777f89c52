"""The check `bits` of benchmarks/gpu.py: what a learner leaves on a device is what it leaves on the CPU."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_daemon import ScriptedDaemon, region
from gpu_lines import Line, verdict
from gpu_model import Size
from torch import Tensor, nn

import diloco_node
from diloco_node.learner.daemon_session import ENCODER_VARIABLE
from diloco_node.wire.learner_link import NO_SNAPSHOT


class Tensors(nn.Module):
    """Many tensors of odd shapes."""

    def __init__(self, count: int, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        draw = np.random.default_rng(3)
        for index in range(count):
            shape = tuple(int(size) for size in draw.integers(1, 90, int(draw.integers(1, 4))))
            values = torch.from_numpy(draw.standard_normal(shape[:2]).astype(np.float32))
            self.register_parameter(f"p{index}", nn.Parameter(values.to(dtypes[index % len(dtypes)])))


def life(size: Size, device: str, dtypes: tuple[torch.dtype, ...], *, has_masters: bool) -> dict[str, bytes]:
    """Everything that a learner's merging leaves, by what it is: the same on every device.

    Each round has a snapshot, two steps, and a version that includes it, or, every third one, leaves it out.
    """
    draw = np.random.default_rng(7)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name, region(Path(name)):
        model = Tensors(size.tensors, dtypes).to(device)
        masters = {name: value.detach().float() for name, value in model.named_parameters()} if has_masters else None
        left: dict[str, bytes] = {}

        def move(diloco: Any) -> None:
            for key, parameter in model.named_parameters():
                noise = torch.from_numpy(draw.standard_normal(parameter.shape).astype(np.float32) * 0.01).to(device)
                with torch.no_grad():
                    if masters is None:
                        parameter.add_(noise.to(parameter.dtype))
                    else:
                        parameter.copy_(masters[key].add_(noise))
            diloco.step(tokens=3)

        with (
            ScriptedDaemon(Path(name), fragments=4) as daemon,
            diloco_node.attach(model, masters=masters, checkpoint_every_s=0) as diloco,
        ):
            for number, index in itertools.product(range(size.rounds), range(4)):
                move(diloco)
                taken = daemon.until_ready(diloco, index)
                left[f"contribution {number}.{index}"] = daemon.encoded(index)
                left[f"norms {number}.{index}"] = np.array(taken.squared_norms).tobytes()
                move(diloco)
                theta = daemon.theta[index] + draw.standard_normal(len(daemon.theta[index])).astype(np.float32) * 0.1
                is_left_out = (number + index) % 3 == 2
                daemon.until_applied(diloco, index, theta, NO_SNAPSHOT if is_left_out else taken.snapshot)
            state = diloco.global_state_dict()
        left |= {f"global {key}": raw(value) for key, value in state.items()}
        left |= {f"own {key}": raw(value) for key, value in model.named_parameters()}
        return left | {f"master {key}": raw(value) for key, value in (masters or {}).items()}


def raw(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def bits(size: Size) -> Iterator[Line]:
    """Snapshots, versions and encoded contributions: equal to the CPU's, whichever encodes."""
    single, half, tiny = torch.float32, torch.bfloat16, torch.float16
    cases = {
        "float32": ((single,), False),
        "bfloat16": ((half,), False),
        "float16": ((tiny,), False),
        "masters": ((half,), True),
        "mixed": ((single, half), False),
    }
    wrong: dict[str, list[str]] = {}
    for label, (dtypes, has_masters) in cases.items():
        expected = life(size, "cpu", dtypes, has_masters=has_masters)
        for encoder in ("host", "device"):
            with patch.dict(os.environ, {ENCODER_VARIABLE: encoder}):
                result = life(size, "cuda", dtypes, has_masters=has_masters)
            wrong[f"{label}, {encoder}"] = [key for key in expected if expected[key] != result.get(key)]
    text = ", ".join(f"{label} {f'differs in {keys[:3]}' if keys else 'equal'}" for label, keys in wrong.items())
    yield Line("bits", verdict(not any(wrong.values())), f"{size.tensors} tensors; {text}", {"wrong": wrong})
