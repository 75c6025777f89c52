"""Several ranks in one region: rank 0 talks to the daemon, all ranks do the same at the same boundary.

Each step the ranks add up one small vector of integers: tokens and stop requests of all of them, and (nonzero in rank 0
only) where the run is and which fragments it is about to apply. A sum rather than a broadcast, because tokens are
wanted anyway: it costs the same. Then rank 0 broadcasts the new values of those fragments. A group of its own on Gloo
carries it, so that no GPU is waited for. Nothing is pickled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_node.errors import LearnerError

BYTES_MAX = 1 << 40
PART_UNITS = 1 << 32


@dataclass(frozen=True, slots=True)
class Boundary:
    """What all ranks agree on at one step boundary.

    Attributes:
        tokens: of this step, over all ranks. is_stopping: some rank, or the daemon, wants to stop.
        applied: fragments, ascending, whose new values rank 0 is going to broadcast.
        global_step, part: where the run is, as rank 0 knows (`learner.run_clock`).
    """

    tokens: int
    is_stopping: bool
    applied: tuple[int, ...]
    global_step: int = 0
    part: float | None = None


class Ranks:
    """This process's place among the ranks of its region; a region of one rank needs no torch.distributed.

    Raises:
        LearnerError: started by a launcher with several ranks, but torch.distributed is not initialised.
    """

    def __init__(self) -> None:
        is_ready = dist.is_available() and dist.is_initialized()
        if not is_ready and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LearnerError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: "
                "call torch.distributed.init_process_group() before diloco_node.attach()"
            )
        self.size = dist.get_world_size() if is_ready else 1
        self.rank = dist.get_rank() if is_ready else 0
        # A collective call: all ranks attach.
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the daemon."""
        return self.rank == 0

    def agree(
        self,
        tokens: int,
        *,
        is_stopping: bool,
        applied: tuple[int, ...],
        fragments: int,
        global_step: int = 0,
        part: float | None = None,
    ) -> Boundary:
        """Add up what the ranks bring to a boundary.

        Args:
            tokens: of this rank. is_stopping: this rank wants to stop.
            applied: what rank 0 is going to apply; () elsewhere. fragments: P.
            global_step, part: where the run is, on rank 0; 0 and None elsewhere.
        """
        if self.size == 1:
            return Boundary(tokens, is_stopping, applied, global_step, part)
        flags = torch.zeros(4 + fragments, dtype=torch.int64, device="cpu")
        flags[0], flags[1], flags[2] = tokens, int(is_stopping), global_step
        # Whole numbers are added up without rounding; 0 stands for None.
        flags[3] = 0 if part is None else 1 + round(part * PART_UNITS)
        for index in applied:
            flags[4 + index] = 1
        dist.all_reduce(flags, group=self._group)
        tokens_all, stops, global_step_all, units, *marks = flags.tolist()
        return Boundary(
            tokens_all,
            stops > 0,
            tuple(index for index, mark in enumerate(marks) if mark),
            global_step_all,
            (units - 1) / PART_UNITS if units else None,
        )

    def share_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], device="cpu")
        dist.broadcast(length, 0, group=self._group)
        count = int(length.item())
        if count == 0:
            return b""
        body = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.is_first
            else torch.empty(count, dtype=torch.uint8, device="cpu")
        )
        dist.broadcast(body, 0, group=self._group)
        return data if self.is_first else body.numpy().tobytes()

    def share_vector(self, values: Tensor) -> None:
        """Overwrite `values`, shape (n,), float32, CPU, with rank 0's."""
        if self.size > 1:
            dist.broadcast(values, 0, group=self._group)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None
