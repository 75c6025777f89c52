"""Ranks of one region over Gloo that a test leads step by step, with one model cut in any way.

Steps are the same in whatever way the model is cut: each value moves by what its place and the step say. So two layouts
that merge at the same steps must come to the same bits. As a program this is one rank: commands on standard input, one
JSON object a line, an answer to each.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from diloco_node.cli.demo.processes import free_ports
from diloco_node.core.types import Codec
from diloco_node.shared_memory import MemoryStore
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, OfferApplied, SnapshotReady

SETTLE_S = 0.05


class Ranks:
    """Processes of one region; used as a context manager."""

    def __init__(self, count: int) -> None:
        port = free_ports(1)[0]
        shared = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "1",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.kit.shard_ranks"],
                env=shared | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Have all ranks do something; their answers."""
        self.tell(**command)
        return self.answers()

    def tell(self, **command: Any) -> None:
        for rank in range(len(self.processes)):
            self.tell_one(rank, **command)

    def answers(self) -> list[dict[str, Any]]:
        return [self._answer(rank) for rank in range(len(self.processes))]

    def ask_one(self, rank: int, **command: Any) -> dict[str, Any]:
        """Have one rank do something; its answer."""
        self.tell_one(rank, **command)
        return self._answer(rank)

    def tell_one(self, rank: int, **command: Any) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def _answer(self, rank: int) -> dict[str, Any]:
        process = self.processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"rank {rank} ended with {process.wait(PATIENCE_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def attach(self, layout: str, folder: Path, *, optimizer: bool = False) -> None:
        """Build the model, cut it, and join the daemon of `folder`."""
        self.ask(do="attach", layout=layout, folder=str(folder), optimizer=optimizer)

    def moments(self) -> dict[str, str]:
        """Digest of each tensor of the optimizer's state, whole, by parameter and key."""
        return {name: digest for answer in self.ask(do="moments") for name, digest in answer.items()}

    def merged(self, daemon: FakeDaemon, rounds: int, *, fragments: int = 2, applied: int = 0) -> int:
        """Rounds with steps before, during and after each. Returns how many versions were applied."""
        for at in range(rounds):
            fragment = at % fragments
            count = len([one for one in daemon.said if isinstance(one, SnapshotReady)])
            self.ask(do="step", count=2)
            daemon.want(fragment)
            while not [one for one in daemon.said if isinstance(one, SnapshotReady)][count:]:
                self.ask(do="settle")  # takes the order, at the same step whenever it comes
            ready = daemon.wait_for(SnapshotReady, count + 1)
            self.ask(do="step", count=1)
            merged = daemon.theta[fragment] - np.float32(0.7) * daemon.decoded(fragment) + np.float32(0.01)
            # Every third version leaves this learner out.
            daemon.commit(fragment, merged, ready.contribution.snapshot if at % 3 else -1)
            applied += 1
            while len([one for one in daemon.said if isinstance(one, OfferApplied)]) < applied:
                self.ask(do="settle")
        return applied

    def state(self) -> dict[str, str]:
        """Digest of each parameter, whole, and under "global" that of the global parameters."""
        return {name: digest for answer in self.ask(do="state") for name, digest in answer.items()}


def states(count: int, layouts: list[str], folder: Path, *, rounds: int, codec: Codec = Codec.INT4) -> dict[str, Any]:
    """By layout the state after so many rounds, with the same ranks."""
    found: dict[str, Any] = {}
    with Ranks(count) as ranks:
        for layout in layouts:
            place = folder / f"{layout}-{count}"
            place.mkdir()
            with MemoryStore(place / "memory.sock"), FakeDaemon(place, codec=codec) as daemon:
                ranks.attach(layout, place)
                first = ranks.state()
                ranks.merged(daemon, rounds, applied=2)
                found[layout] = {"first": first, "last": ranks.state()}
                ranks.ask(do="close")
    return found


# ---- one rank --------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Carry out what standard input says."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer or {}) + "\n")
        sys.stdout.flush()


class Rank:
    """What a rank does."""

    def __init__(self) -> None:
        self.steps = 0

    def attach(self, layout: str, folder: str, optimizer: bool = False) -> None:
        import torch

        import diloco_node

        os.environ["DILOCO_SOCKET"] = f"{folder}/learner.sock"
        os.environ["DILOCO_SUPERVISOR"] = f"{folder}/memory.sock"
        torch.manual_seed(5)
        self.steps = 0
        self.model, self.masters = cut(layout)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01) if optimizer else None
        self.position = Position()
        self.diloco = diloco_node.attach(
            self.model, self.optimizer, masters=self.masters, stateful={"position": self.position}
        )

    def step(self, count: int) -> None:
        import torch

        from diloco_node.learner.layouts.tensors import local_part

        for _ in range(count):
            self.steps += 1
            with torch.no_grad():
                # Those that an optimizer holds: after an evaluation the model has others.
                for name, tracked in self.diloco._tensors._tracked.items():
                    parameter = tracked.parameter
                    if self.optimizer is not None:
                        self._set_gradient(name, parameter)
                    else:
                        source = self.masters.get(name, parameter)
                        local_part(source).sub_(self.gradient(name, source))
                        if source is not parameter:
                            local_part(parameter).copy_(local_part(source))
            if self.optimizer is not None:
                self.optimizer.step()
            self.position.value += 10 + self.diloco._ranks.rank
            self.diloco.step(tokens=4)

    def gradient(self, name: str, parameter: Any) -> Any:
        """Of what lies here."""
        import torch

        seed = zlib.crc32(f"{name} {self.steps}".encode())
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.01
        box = self.diloco._tensors.boxes[name]
        if not box:
            return torch.zeros(parameter.to_local().shape)
        cuts = tuple(slice(low, low + size) for low, size in zip(box[0].offsets, box[0].sizes, strict=True))
        return whole[cuts]

    def _set_gradient(self, name: str, parameter: Any) -> None:
        from torch.distributed.tensor import DTensor

        from diloco_node.learner.layouts.tensors import is_sharded

        local = self.gradient(name, parameter)
        parameter.grad = (
            DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
            if is_sharded(parameter)
            else local.clone()
        )

    def moments(self) -> dict[str, str]:
        from diloco_node.learner.layouts.tensors import is_sharded

        assert self.optimizer is not None
        return {
            f"{name} {key}": digest(value.full_tensor() if is_sharded(value) else value)
            for name, parameter in self.diloco._tensors.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def where(self) -> dict[str, Any]:
        return {"position": self.position.value, "global_step": self.diloco.global_step}

    def evaluate(self) -> dict[str, str]:
        """A forward pass without a backward one: what FSDP2 leaves unsharded."""
        import torch

        with torch.no_grad():
            seen = self.model.up(torch.arange(12.0).view(2, 6))
        return {"up": digest(seen)}

    def checkpoint(self) -> None:
        self.diloco.checkpoint()

    def settle(self) -> None:
        self.diloco.settle(SETTLE_S)

    def fail(self, at: str, meet_s: float = 300.0, **command: Any) -> dict[str, str]:
        """Do what must raise; how it does."""
        import diloco_node.learner.ranks
        from diloco_node.errors import LearnerError

        diloco_node.learner.ranks.MEET_S = meet_s  # type: ignore[misc]
        try:
            getattr(self, at)(**command)
        except LearnerError as error:
            return {"error": str(error)}
        return {"error": ""}

    def state(self) -> dict[str, str]:
        from diloco_node.learner.layouts.tensors import is_sharded

        found = {}
        for name, parameter in self.diloco._tensors.model.named_parameters():
            whole = parameter.full_tensor() if is_sharded(parameter) else parameter
            found[name] = digest(whole)
        if self.diloco._ranks.is_first or self._is_cut():
            for name, value in self.diloco.global_state_dict().items():
                found[f"global {name}"] = digest(value)
        return found

    def _is_cut(self) -> bool:
        return not self.diloco._fragments.shards.is_first_whole

    def close(self) -> None:
        self.diloco.close()


class Position:
    """A part of the loop that is each rank's own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def digest(values: Any) -> str:
    import torch

    data: bytes = values.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def build() -> Any:
    """Uneven and empty shards, a tied and a frozen weight, a buffer."""
    import torch
    from torch import nn

    model = nn.Module()
    model.embed_tokens = nn.Embedding(11, 6)
    model.up = nn.Linear(6, 42)
    model.down = nn.Linear(42, 6, bias=False)
    model.small = nn.Linear(5, 3)
    model.frozen = nn.Linear(6, 6).requires_grad_(False)
    model.lm_head = nn.Linear(6, 11, bias=False)
    model.lm_head.weight = model.embed_tokens.weight
    model.register_buffer("seen", torch.zeros(3))
    return model


def cut(layout: str) -> tuple[Any, dict[str, Any]]:
    """The model in one of the ways that PyTorch has, and the masters of its parameters."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, world = build(), dist.get_world_size()
    columns = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "whole":
        pass
    elif layout == "ddp":
        model.forward = lambda: None
        return torch.nn.parallel.DistributedDataParallel(model), {}
    elif layout == "whole-masters":
        model = model.bfloat16()
    elif layout in ("fsdp", "offload", "fsdp-masters"):
        model = model.bfloat16() if layout == "fsdp-masters" else model
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if layout == "offload" else {}
        mesh = init_device_mesh("cpu", (world,))
        for part in (model.up, model.down, model.small, model):
            fully_shard(part, mesh=mesh, **policy)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for part in (model.up, model.down, model.small, model):
            fully_shard(part, mesh=mesh)
    elif layout == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), columns)
    elif layout == "fsdp-tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], columns)
        for part in (model.up, model.down, model.small, model):
            fully_shard(part, mesh=mesh["dp"])
    elif layout == "pipeline":
        stages = [["embed_tokens", "lm_head"], ["up"], ["down"], ["small", "frozen"]]
        own = [name for at in range(dist.get_rank(), len(stages), world) for name in stages[at]]
        for name, _ in list(model.named_children()):
            if name not in own:
                del model._modules[name]
    else:
        raise ValueError(layout)
    masters = {}
    if layout.endswith("masters"):
        masters = {name: one.detach().float() for name, one in model.named_parameters() if one.requires_grad}
    return model, masters


if __name__ == "__main__":
    serve()
