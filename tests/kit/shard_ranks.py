"""Ranks of one region over Gloo that a test leads step by step, with the model of tests/kit/shard_layouts.py.

Steps are the same in whatever way the model is cut: each value moves by what its place and the step say. So two layouts
that merge at the same steps must come to the same bits. A rank is a process that carries out commands, an answer to
each. Ranks are forked from a process that has imported torch: importing it takes longer than most tests.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, OfferApplied, SnapshotReady
from tests.kit.fakecuda import fake_device
from tests.kit.ports import free_port
from tests.kit.shard_layouts import TRAINED_BUFFER, cut

SETTLE_S = 0.01

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *(["tests.kit.fakecuda.installed"] if fake_device.is_installed() else []),
        "diloco_node.learner.warm",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        __name__,
    ]
)


class Ranks:
    """Processes of one region; used as a context manager.

    Args:
        count: how many.
        target: what each carries out, with its end of a link and its variables of the environment.
        args: and these.
    """

    def __init__(self, count: int, target: Callable[..., None] | None = None, *args: object) -> None:
        port = free_port()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        pipes = [_FORKS.Pipe() for _ in range(count)]
        self._links = [near for near, _ in pipes]
        self.processes = [
            _FORKS.Process(target=target or serve, args=(far, shared | {"RANK": str(rank)}, *args), daemon=True)
            for rank, (_, far) in enumerate(pipes)
        ]
        for process, (_, far) in zip(self.processes, pipes, strict=True):
            process.start()
            far.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for process, link in zip(self.processes, self._links, strict=True):
            process.kill()
            process.join()
            link.close()

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Have all ranks do something; their answers."""
        self.tell(**command)
        return self.answers()

    def agreed(self, **command: Any) -> dict[str, str]:
        """What all ranks say of things by name. Those that speak of one thing say the same."""
        found: dict[str, str] = {}
        for answer in self.ask(**command):
            assert answer.items() >= {name: found[name] for name in answer.keys() & found.keys()}.items()
            found |= answer
        return found

    def tell(self, **command: Any) -> None:
        for rank in range(len(self.processes)):
            self.tell_one(rank, **command)

    def answers(self) -> list[dict[str, Any]]:
        return [self.answer(rank) for rank in range(len(self.processes))]

    def ask_one(self, rank: int, **command: Any) -> dict[str, Any]:
        """Have one rank do something; its answer."""
        self.tell_one(rank, **command)
        return self.answer(rank)

    def tell_one(self, rank: int, **command: Any) -> None:
        self._links[rank].send(command)

    def answer(self, rank: int) -> dict[str, Any]:
        assert self._links[rank].poll(PATIENCE_S), f"rank {rank} does not answer"
        try:
            answer: dict[str, Any] = self._links[rank].recv()
        except EOFError:
            self.processes[rank].join(PATIENCE_S)
            raise AssertionError(f"rank {rank} ended with {self.processes[rank].exitcode}") from None
        return answer

    def attach(self, layout: str, folder: Path, *, optimizer: bool = False) -> None:
        """Build the model, cut it, and join the daemon of `folder`."""
        self.ask(do="attach", layout=layout, folder=str(folder), optimizer=optimizer)

    def moments(self) -> dict[str, str]:
        """Digest of each tensor of the optimizer's state, whole, by parameter and key."""
        return self.agreed(do="moments")

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
        # A version is no foreign write, also where this learner writes the local part of a tensor.
        assert not [one.text for one in daemon.said if isinstance(one, Warned) and "written to" in one.text]
        return applied

    def state(self) -> dict[str, str]:
        """Digest of each parameter and buffer, whole, and under "global" that of the global ones."""
        return self.agreed(do="state")


class Groups:
    """Ranks that tests share: to start them takes as long as most tests. Each test closes what it has attached."""

    def __init__(self) -> None:
        self._idle: dict[int, Ranks] = {}

    @contextmanager
    def take(self, count: int) -> Iterator[Ranks]:
        """So many ranks, of the test before or new ones; where a test fails nobody gets its ranks."""
        ranks = self._idle.pop(count, None) or Ranks(count)
        try:
            yield ranks
        except BaseException:
            ranks.end()
            raise
        self._idle[count] = ranks

    def end(self) -> None:
        for ranks in self._idle.values():
            ranks.end()
        self._idle.clear()


def states(count: int, layouts: list[str], folder: Path, *, rounds: int, groups: Groups) -> dict[str, Any]:
    """What ranks come to after so many rounds, by layout; the second half is rounds with evaluations in between.

    Returns:
        State before and after, what evaluations saw, what the daemon was sent last, and the frozen tensors.
    """
    found: dict[str, Any] = {}
    with groups.take(count) as ranks:
        for layout in layouts:
            place = folder / f"{layout}-{count}"
            place.mkdir()
            with MemoryStore(place / "memory.sock"), FakeDaemon(place) as daemon:
                ranks.attach(layout, place)
                first = ranks.state()
                applied = ranks.merged(daemon, rounds // 2, applied=2)
                seen = [ranks.agreed(do="evaluate")]
                for _ in range(2):
                    applied = ranks.merged(daemon, rounds // 4, applied=applied)
                    seen.append(ranks.agreed(do="evaluate"))
                sent = [daemon.encoded(fragment) for fragment in range(2)]
                listing = daemon.wait_attached().listing
                found[layout] = {"first": first, "last": ranks.state(), "seen": seen, "sent": sent, "listing": listing}
                ranks.ask(do="close")
    return found


def run_program(link: Connection, environment: dict[str, str], program: str, *args: str) -> None:
    """Run a program as `python -c` does; what it prints is the answer."""
    os.environ.update(environment)
    sys.argv = ["-c", *args]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    link.send(printed.getvalue())


# ---- one rank --------------------------------------------------------------------------------------------------------


def serve(link: Connection, environment: dict[str, str]) -> None:
    """Carry out what the other end of the link says, until it is gone."""
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    if fake_device.is_installed():
        from tests.kit.fakecuda.host_collectives import begin_ranks

        begin_ranks()
    else:
        dist.init_process_group("gloo")
    rank = Rank()
    while True:
        try:
            command = link.recv()
        except EOFError:
            return
        link.send(getattr(rank, command.pop("do"))(**command) or {})


class Rank:
    """What a rank does."""

    def __init__(self) -> None:
        self.steps = 0

    def attach(self, layout: str, folder: str, optimizer: bool = False, untied: Sequence[str] = ()) -> None:
        import torch

        import diloco_node

        os.environ["DILOCO_SOCKET"] = f"{folder}/learner.sock" if folder else ""
        os.environ["DILOCO_SUPERVISOR"] = f"{folder}/memory.sock"
        torch.manual_seed(5)
        self.steps = 0
        self.model, self.masters = cut(layout)
        trained = list(self.masters.values()) or [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01) if optimizer else None
        self.position = Position()
        self.diloco = diloco_node.attach(
            self.model,
            self.optimizer,
            masters=self.masters,
            buffers=(TRAINED_BUFFER,),
            untied=untied,
            stateful={"position": self.position},
        )

    @property
    def tensors(self) -> Any:
        """What `attach` made of the model."""
        return self.diloco._tensors

    @property
    def ranks(self) -> Any:
        """The others, as `attach` sees them."""
        return self.diloco._ranks

    @property
    def fragments(self) -> Any:
        """Fragments as this rank holds them."""
        return self.diloco._fragments

    def step(self, count: int, apart: float = 0.0) -> None:
        """apart: how far this rank's gradients are from those of the others, in lengths of theirs."""
        import torch

        from diloco_node.learner.layouts.tensors import local_part

        for _ in range(count):
            self.steps += 1
            with torch.no_grad():
                # Those that an optimizer holds: after an evaluation the model has others.
                tracked = {name: one.parameter for name, one in self.tensors._tracked.items()}
                for name, parameter in tracked.items():
                    source = self.masters.get(name, parameter)
                    if self.optimizer is not None and parameter.requires_grad:
                        self._set_gradient(name, source)
                    else:
                        gradient = self.gradient(name, source)
                        local_part(source).sub_(gradient * (1.0 + apart * self.ranks.rank))
            if self.optimizer is not None:
                self.optimizer.step()
            with torch.no_grad():
                for name, master in self.masters.items():
                    local_part(tracked[name]).copy_(local_part(master))
            self.position.value += 10 + self.ranks.rank
            self.diloco.step(tokens=4)

    def gradient(self, name: str, parameter: Any) -> Any:
        """Of what lies here."""
        import torch

        seed = zlib.crc32(f"{name} {self.steps}".encode())
        draw = torch.Generator("cpu").manual_seed(seed)
        whole = torch.randn(parameter.shape, generator=draw, device="cpu") * 0.01
        box = self.tensors.boxes[name]
        if not box:
            return torch.zeros(parameter.to_local().shape, device=parameter.device)
        cuts = tuple(slice(low, low + size) for low, size in zip(box[0].offsets, box[0].sizes, strict=True))
        return whole[cuts].to(parameter.device)

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
            for name, parameter in self.tensors.model.named_parameters()
            for key, value in self.optimizer.state.get(self.masters.get(name, parameter), {}).items()
        }

    def where(self) -> dict[str, Any]:
        fragments = self.fragments
        return {
            "position": self.position.value,
            "global_step": self.diloco.global_step,
            "versions": [one.base_version for one in fragments.positions],
            "arrived": list(fragments.arrived()),
        }

    def hold(self) -> None:
        """From now on no version has arrived here before `release`: the anchors are the last of it."""
        self.gate = threading.Event()
        exchange = self.fragments._exchange
        share_anchor = exchange.share_anchor

        def held(*args: Any) -> Any:
            found = share_anchor(*args)
            self.gate.wait(PATIENCE_S)
            return found

        exchange.share_anchor = held

    def release(self) -> None:
        self.gate.set()

    def evaluate(self) -> dict[str, str]:
        """A forward pass without a backward one: what FSDP2 leaves unsharded."""
        import torch

        small = dict(self.tensors.model.named_children()).get("small")
        if small is None:  # on another stage
            return {}
        with torch.no_grad():
            return {
                "small": digest(
                    small(torch.arange(10.0, dtype=small.weight.dtype, device=small.weight.device).view(2, 5))
                )
            }

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

    def model_state(self) -> dict[str, str]:
        from diloco_node.learner.layouts.tensors import is_sharded

        model = self.tensors.model
        return {
            name: digest(value.full_tensor() if is_sharded(value) else value)
            for name, value in (*model.named_parameters(), *model.named_buffers())
        }

    def state(self) -> dict[str, str]:
        found = self.model_state()
        if self.ranks.is_first or self._is_cut():
            for name, value in self.diloco.global_state_dict().items():
                found[f"global {name}"] = digest(value)
        return found

    def fill_second(self, layout: str) -> dict[str, dict[str, str]]:
        """Fill a second model by the recipe of docs/training-loop.md; what it was filled with, and what it holds."""
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        from diloco_node.learner.layouts.tensors import is_sharded

        torch.manual_seed(99)
        second, _ = cut(layout)
        state = self.diloco.global_state_dict()
        given = {name: digest(value) for name, value in state.items()}
        set_model_state_dict(second, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        values = {
            name: digest(value.full_tensor() if is_sharded(value) else value)
            for name, value in second.state_dict().items()
        }
        return {"state": given, "second": values}

    def _is_cut(self) -> bool:
        return not self.fragments.shards.is_first_whole

    def close(self) -> None:
        self.diloco.close()

    def end_group(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def finish(self) -> None:
        self.diloco.finish("enough")

    def abandon(self) -> None:
        """Leave as a loop in a generator does that is closed, whenever its rank lets go of it."""
        self.diloco.__exit__(GeneratorExit, GeneratorExit(), None)


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

    # A copy: torch can't free memory that numpy has seen, as FSDP2 frees a parameter that it has gathered.
    data: bytes = (
        values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu().numpy().tobytes()
    )
    return hashlib.sha256(data).hexdigest()[:16]
