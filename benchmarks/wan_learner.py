"""One region's learner in benchmarks/wan.py: the same model, data and paced step in every arm.

    python wan_learner.py SPEC.json RANK

The arm decides what happens between two steps: nothing (`alone`), torch DDP over Gloo (`ddp`), an all-reduce of the
whole model and an outer step every H steps (`sync_diloco`), or `diloco_node.attach` (`ours`).

It logs one JSON line per step and now and then writes the parameters that a user would take into a file; their
held-out loss is computed later, so that it costs no arm any time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from region_sampler import RegionSampler
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from diloco_node.lab.sim.arithmetic import outer_step
from diloco_node.learner.builtin.adamw import build_adamw
from diloco_node.learner.builtin.data import load_corpus
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.trainer import GRADIENT_NORM_MAX, TrainerSettings

GLOO_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What the driver hands over, the same for all regions of an arm.

    Attributes:
        arm: see the module. regions: how many. steps: to make; 0: until told to stop.
        step_s: a step takes at least this long; 0: as fast as it goes.
        sync_every, outer_lr, outer_momentum: of `sync_diloco`.
        interface: whose bytes are counted. master: HOST:PORT of rank 0, for Gloo.
        waits: every learner is ready first, and then waits for the file `go` beside the logs.
        log: the folder of logs and parameters. snapshot_every: steps between parameters of rank 0; 0: none.
    """

    arm: str
    regions: int
    steps: int
    step_s: float
    sync_every: int
    outer_lr: float
    outer_momentum: float
    interface: str
    master: str
    log: str
    snapshot_every: int
    waits: bool
    layers: int
    dim: int
    heads: int
    context: int
    batch: int
    lr: float
    warmup: int
    schedule_steps: int
    seed: int


class Learner:
    """Model, optimizer and data of one region."""

    def __init__(self, spec: Spec, rank: int) -> None:
        torch.set_num_threads(1)
        shape = ModelSettings(layers=spec.layers, dim=spec.dim, heads=spec.heads, context=spec.context)
        self.settings = TrainerSettings(
            batch=spec.batch, lr=spec.lr, warmup_steps=spec.warmup, schedule_steps=spec.schedule_steps, seed=spec.seed
        )
        self.model = ByteGPT(shape, seed=spec.seed)
        self.optimizer = build_adamw(self.model, lr=spec.lr)
        self.sampler = RegionSampler(
            load_corpus(), region=rank, regions=spec.regions, batch=spec.batch, context=spec.context, seed=spec.seed
        )

    def step(self, number: int, loss_of: Callable[[Tensor], Tensor]) -> float:
        """Inner step `number`, counted from 1; its training loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(number)
        loss = loss_of(torch.from_numpy(self.sampler.next_batch()))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> Tensor:
        """All of them in one vector, copied."""
        return parameters_to_vector(self.model.parameters()).detach().clone()


class _Loss(nn.Module):
    """The model's loss as a module's forward: DDP hooks into that."""

    def __init__(self, model: ByteGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss of the windows."""
        return self.model.loss(windows)


@dataclass(slots=True)
class Arm:
    """What an arm adds to a learner.

    Attributes:
        loss_of: the loss whose backward pass trains. after_step: called with the step's number and its loss.
        taken: the parameters that a user would take now, shape (n,). should_stop: leave the loop.
    """

    loss_of: Callable[[Tensor], Tensor]
    after_step: Callable[[int, float], None]
    taken: Callable[[], Tensor]
    should_stop: Callable[[], bool] = lambda: False


@contextlib.contextmanager
def arm_of(spec: Spec, rank: int, learner: Learner) -> Iterator[Arm]:
    """Set the arm up, and end it in order."""
    if spec.arm == "ours":
        with attached(spec, rank, learner) as arm:
            yield arm
    elif spec.arm == "alone":
        yield Arm(learner.model.loss, lambda _number, _loss: None, learner.parameters)
    else:
        with gloo(spec, rank):
            yield data_parallel(learner) if spec.arm == "ddp" else sync_diloco(spec, learner)


@contextlib.contextmanager
def attached(spec: Spec, rank: int, learner: Learner) -> Iterator[Arm]:
    """Through the daemon of this region."""
    import diloco_node

    tokens = spec.batch * spec.context
    # Together: a region whose learner comes after the others have begun fetches Theta_0 over the slow link.
    folder = Path(spec.log)
    (folder / f"{rank}.loaded").touch()
    while not all((folder / f"{other}.loaded").exists() for other in range(spec.regions)):
        time.sleep(0.02)
    with diloco_node.attach(learner.model, learner.optimizer, checkpoint_every_s=0) as diloco:

        def taken() -> Tensor:
            named = diloco.global_state_dict()
            return torch.cat([named[name].reshape(-1) for name, _ in learner.model.named_parameters()])

        yield Arm(
            learner.model.loss,
            lambda _number, loss: diloco.step(tokens=tokens, loss=loss),
            taken,
            lambda: diloco.should_stop,
        )


@contextlib.contextmanager
def gloo(spec: Spec, rank: int) -> Iterator[None]:
    """A process group over the shaped interface."""
    host, _, port = spec.master.rpartition(":")
    os.environ |= {"GLOO_SOCKET_IFNAME": spec.interface, "MASTER_ADDR": host, "MASTER_PORT": port}
    limit = dt.timedelta(seconds=GLOO_TIMEOUT_S)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=spec.regions, timeout=limit)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def data_parallel(learner: Learner) -> Arm:
    """Torch's DDP: gradients are averaged in every step, while the backward pass goes on."""
    wrapped = nn.parallel.DistributedDataParallel(_Loss(learner.model))
    return Arm(wrapped, lambda _number, _loss: None, learner.parameters)


def sync_diloco(spec: Spec, learner: Learner) -> Arm:
    """DiLoCo without overlap: every H steps all wait for an all-reduce of the whole outer gradient, float32."""
    base = learner.parameters()
    momentum = np.zeros(base.numel(), np.float32)

    def after_step(number: int, _loss: float) -> None:
        nonlocal momentum
        if number % spec.sync_every:
            return
        delta = base - learner.parameters()
        torch.distributed.all_reduce(delta)
        mean = (delta / spec.regions).numpy()
        new, momentum = outer_step(base.numpy(), momentum, mean, lr=spec.outer_lr, mu=spec.outer_momentum)
        base.copy_(torch.from_numpy(new))
        vector_to_parameters(base.clone(), learner.model.parameters())

    return Arm(learner.model.loss, after_step, base.clone)


def interface_bytes(name: str) -> tuple[int, int]:
    """Bytes that an interface of this network namespace has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        found, _, counters = line.partition(":")
        if found.strip() == name:
            fields = counters.split()
            return int(fields[8]), int(fields[0])
    raise SystemExit(f"no interface {name}")


def run(spec: Spec, rank: int) -> None:
    """Train, and log every step."""
    learner = Learner(spec, rank)
    folder = Path(spec.log)
    with arm_of(spec, rank, learner) as arm, (folder / f"{rank}.jsonl").open("w") as log:
        number = 0
        (folder / f"{rank}.ready").touch()
        while spec.waits and not (folder / "go").exists() and not arm.should_stop():
            time.sleep(0.02)
        while not arm.should_stop() and (not spec.steps or number < spec.steps):
            started_s = time.monotonic()
            if rank == 0 and number and spec.snapshot_every and number % spec.snapshot_every == 0:
                np.save(folder / f"{number}.npy", arm.taken().numpy())
            number += 1
            loss = learner.step(number, arm.loss_of)
            # The rest of the time stands for an accelerator at work. What an arm sends during the backward pass is
            # in it: for DDP the whole step is free for its traffic.
            left_s = spec.step_s - (time.monotonic() - started_s)
            if left_s > 0:
                time.sleep(left_s)
            arm.after_step(number, loss)
            sent, received = interface_bytes(spec.interface)
            record: dict[str, Any] = {
                "step": number,
                "started": started_s,
                "seconds": time.monotonic(),
                "sent": sent,
                "received": received,
                "loss": loss,
            }
            log.write(json.dumps(record) + "\n")
            log.flush()


def main() -> None:
    """Command line: the specification's file, and this region's number."""
    # DDP warns of a stride that costs nothing here.
    warnings.filterwarnings("ignore", module="torch")
    run(Spec(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2]))


if __name__ == "__main__":
    main()
