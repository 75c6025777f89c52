"""Several ranks in one region: rank 0 talks to the daemon, all ranks do the same at the same boundary.

Each step the ranks add up one small vector of integers: tokens and stop requests of all of them, which transfers have
arrived everywhere, and (nonzero in rank 0 only) where the run is and whether the daemon has asked for something. Only
then, when all ranks are known to be at the boundary, rank 0 says what it is. A group of its own on Gloo carries it, so
that no GPU is waited for. Nothing is pickled.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.wire.learner_link import TO_LEARNER, ToLearner, frame, take_frames

PART_UNITS: Final = 1 << 32

MEET_S: Final = 300.0
"""For ranks that go into one call, each when it is done with what it did before: evaluations, files."""

WAITING: Final = b"?"
"""Rank 0's word for the others while there is no Welcome: none of them waits for hours in one call."""

PATIENCE: Final = timedelta(minutes=30)
"""For ranks in one step, at least: rank 0 may evaluate meanwhile. The connection of a rank that dies ends at once."""

ABSENCE_TOLD: Final = timedelta(minutes=1)
"""So long a rank may be late in `attach` before people are told."""

Orders = tuple[ToLearner, ...]
"""Messages that all ranks carry out at one boundary, in this order; at most one request or offer for a fragment."""

_TIMES_OUT: Final = re.compile("timed out|timeout", re.IGNORECASE)

_attaches: Final[WeakKeyDictionary[Any, Iterator[int]]] = WeakKeyDictionary()
"""By process group numbers of the calls of `attach`: ranks that make their groups anew may be of another age."""

log = logging.getLogger("diloco_node.learner")


@dataclass(frozen=True, slots=True)
class Boundary:
    """The facts that all ranks agree on at one step boundary.

    Attributes:
        tokens: of this step, over all ranks. is_stopping: some rank, or the daemon, wants to stop.
        has_orders: rank 0 has something that all ranks are to carry out now. wants_checkpoint: it is time for one.
        arrived: fragments, ascending, whose new values every rank has.
        global_step, part: where the run is, as rank 0 knows (`learner.run_clock`).
        is_idle: every rank could write a checkpoint now.
        written_step: of the last checkpoint, when this rank and all others have written it; else -1.
        wants_end: the script of some rank wants the run to end.
        is_held: further steps are of no use now.
        has_exit: a handler of some rank's script wants to exit.
    """

    tokens: int
    is_stopping: bool
    has_orders: bool = False
    wants_checkpoint: bool = False
    arrived: tuple[int, ...] = ()
    global_step: int = 0
    part: float | None = None
    is_idle: bool = True
    written_step: int = -1
    wants_end: bool = False
    is_held: bool = False
    has_exit: bool = False


@contextmanager
def among_ranks() -> Iterator[None]:
    """Torch's errors within it are LearnerErrors that say what to do."""
    try:
        yield
    except ValueError as error:
        raise LearnerError(
            f"the process group of this region's ranks has ended ({first_line(error)}): call "
            "torch.distributed.destroy_process_group() after the `with` block, or after close()"
        ) from error
    except RuntimeError as error:
        if _TIMES_OUT.search(str(error)):
            raise LearnerError(
                f"another rank of this region did not come to the same call ({first_line(error)}). Every rank calls "
                "step(), checkpoint() and close(), not rank 0 alone; or it hangs, and its own log says where"
            ) from error
        raise LearnerError(
            f"another rank of this region has ended or does not answer ({first_line(error)}). Its own log says why; "
            "the launcher and the supervisor start all ranks again"
        ) from error


def first_line(error: Exception) -> str:
    """Return torch's message without its stack."""
    return str(error).partition("\n")[0][:300]


def _patience() -> timedelta:
    """As long as the script's own group waits, and no less than `PATIENCE`."""
    world: Any = dist.group.WORLD
    backends = [world._get_backend(device) for device in getattr(world, "_device_types", ())]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    own: list[timedelta] = [item._timeout for item in options if hasattr(item, "_timeout")]
    return max([PATIENCE, *own])


def _new_group() -> Any:
    return dist.new_group(backend="gloo", timeout=_patience())


def _await_all(rank: int, ranks: int) -> None:
    """Wait until all ranks are in `attach`, and tell who is not: a new group would wait for them without a word.

    Rank 0 waits for all, the others for it: one store serves them. Raises LearnerError: a rank does not come.
    """
    store, number = dist.distributed_c10d._get_default_store(), next(_attaches.setdefault(dist.group.WORLD, count()))
    deadline_s = time.monotonic() + _patience().total_seconds()
    store.set(f"diloco attach {number} of {rank}", "here")
    for other in range(ranks if rank == 0 else 1):
        while True:
            try:
                store.wait([f"diloco attach {number} of {other}"], ABSENCE_TOLD)
                break
            except RuntimeError as error:
                text = f"attach() waits for rank {other} of {ranks}: every rank calls it, not rank 0 alone"
                if time.monotonic() >= deadline_s or not _TIMES_OUT.search(str(error)):
                    raise LearnerError(f"{text} ({first_line(error)})") from error
                log.warning("%s", text)


class Ranks:
    """This process's place among the ranks of its region; a region of one rank needs no torch.distributed.

    Raises LearnerError: started by a launcher with more ranks than torch.distributed was initialised with.
    """

    def __init__(self) -> None:
        is_ready = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if is_ready else 1
        # A text that is no number is no launcher's.
        if (launched := os.environ.get("WORLD_SIZE", "")).isdecimal() and int(launched) > self.size:
            fault = f"has {self.size} ranks: each group would be a learner" if is_ready else "is not initialised"
            raise LearnerError(
                f"WORLD_SIZE is {launched}, but torch.distributed {fault}: call "
                "torch.distributed.init_process_group() with all ranks before diloco_node.attach(). If each "
                "of them is a region, unset WORLD_SIZE"
            )
        self.rank = dist.get_rank() if is_ready else 0
        # A collective call: all ranks attach. The second one is for the thread that carries parameters.
        self._group: Any = None
        self.bulk_group: Any = None
        if self.size > 1:
            _await_all(self.rank, self.size)
            self._group, self.bulk_group = _new_group(), _new_group()

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the daemon."""
        return self.rank == 0

    @property
    def can_meet(self) -> bool:
        """Whether all ranks can still be asked: a script may end their process group before it closes its learner."""
        return self.size == 1 or dist.is_initialized()

    def have_daemon(self, socket: str) -> bool:
        """Whether rank 0 has a daemon's `socket`. All ranks call it. Raises LearnerError: only another one has."""
        flags = [bool(flag) for flag in self.all_bytes(b"1" if socket else b"")]
        if any(flags) and not flags[0]:
            raise LearnerError(
                f"DILOCO_SOCKET is set on rank {flags.index(True)}, but not on rank 0: the daemon's host must "
                "have the first ranks. Start it with `torchrun --node-rank 0 --master-addr ... --master-port ...`"
            )
        return flags[0]

    def agree(self, boundary: Boundary, *, fragments: int) -> Boundary:
        """Add up what the ranks bring to a boundary of P fragments. Raises LearnerError: another rank is gone.

        boundary: of each rank `tokens`, `is_stopping`, `arrived`, `is_idle`, `written_step`, `wants_end`, and
        `has_exit`; the others are rank 0's.
        """
        if self.size == 1:
            return boundary
        # Whole numbers are added up without rounding; 0 stands for None.
        head = (
            boundary.tokens,
            boundary.is_stopping,
            boundary.has_orders,
            boundary.wants_checkpoint,
            boundary.global_step,
            0 if boundary.part is None else 1 + round(boundary.part * PART_UNITS),
            boundary.is_idle,
            1 + boundary.written_step,
            boundary.wants_end,
            boundary.is_held,
            boundary.has_exit,
        )
        values = torch.tensor([*map(int, head), *(int(f in boundary.arrived) for f in range(fragments))], device="cpu")
        with among_ranks():
            dist.all_reduce(values, group=self._group)
        tokens, stops, orders, wishes, step, units, idle, written_step, ends, holds, exits, *counts = values.tolist()
        return Boundary(
            tokens,
            stops > 0,
            orders > 0,
            wishes > 0,
            tuple(f for f, count in enumerate(counts) if count == self.size),
            step,
            (units - 1) / PART_UNITS if units else None,
            idle == self.size,
            boundary.written_step if written_step == self.size * (1 + boundary.written_step) else -1,
            ends > 0,
            holds > 0,
            exits > 0,
        )

    def share_orders(self, orders: Orders) -> Orders:
        """Give rank 0's orders, of which all know that there are some, to every rank. Raises as `share_bytes`."""
        if self.size == 1:
            return orders
        body = self.share_bytes(b"".join(frame(TO_LEARNER.encode(order)) for order in orders))
        return tuple(TO_LEARNER.decode(order) for order in take_frames(bytearray(body)))

    def meet(self, call: str) -> None:
        """Wait for all ranks to come to the same call, for a bounded time. Raises LearnerError: one does not come."""
        if self.size == 1:
            return
        with among_ranks():
            try:
                dist.monitored_barrier(self._group, timedelta(seconds=MEET_S), wait_all_ranks=True)
            except RuntimeError as error:
                raise LearnerError(
                    f"{call} waits for all ranks of the region, and not all of them came to it within {MEET_S:.0f} s: "
                    f"call it on every rank, not on rank 0 alone. Torch says: {first_line(error)}"
                ) from error

    def greatest(self, values: Tensor) -> Tensor:
        """Return the greatest of each value over all ranks, in place. values: on the CPU."""
        with among_ranks():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def all_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on every rank."""
        return [self.share_bytes(data, source=rank) for rank in range(self.size)]

    def say_wait(self) -> None:
        """Rank 0's word to the others, which are in `share_late`, that it has nothing yet."""
        self.share_bytes(WAITING)

    def share_late(self, data: bytes) -> bytes:
        """The bytes of rank 0, which may come after hours; it calls `say_wait` meanwhile. Raises as `share_bytes`."""
        while (body := self.share_bytes(data)) == WAITING:
            pass
        return body

    def share_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        """The bytes of one rank, on every rank; the others' are ignored. Raises LearnerError: a rank is gone."""
        if self.size == 1:
            return data
        is_source = self.rank == source
        length = torch.tensor([len(data)], device="cpu")
        with among_ranks():
            dist.broadcast(length, source, group=self._group)
        count = int(length.item())
        if count == 0:
            return b""
        body = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if is_source
            else torch.empty(count, dtype=torch.uint8, device="cpu")
        )
        with among_ranks():
            dist.broadcast(body, source, group=self._group)
        return data if is_source else body.numpy().tobytes()

    def close(self) -> None:
        """Leave the groups."""
        for group in (self._group, self.bulk_group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._group = self.bulk_group = None
