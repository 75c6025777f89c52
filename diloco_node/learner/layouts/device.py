"""Values between a model on devices and the host, by streams of their own: the training thread never waits (D-094).

Down: the training thread packs a fragment into staging memory on the device, in the stream of the loop. A second stream
copies it from there into page-locked memory as soon as it is packed, and a thread of its own waits for that copy.

Up: the worker puts a version, and what the own steps are measured from, into page-locked memory, and copies both into
staging in a third stream. When they are there the training thread applies them in place: addresses stay, as CUDA graphs
want.

A room is the memory for one fragment on its way. There are two for each direction, so that the next one is packed or
copied while the last one is read. At P = 24 that is one byte for each parameter on the device, and one page-locked.

`torch.cuda` (also of ROCm), `torch.xpu` and others have the same streams and events: nothing here names one of them,
but for what CUDA alone can do. Without streams (MPS) values go the host's way, which waits.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final, Literal

import torch
from torch import Tensor

from diloco_node.codec.blocks import FIRST_VALUE, FragmentBlocks
from diloco_node.core.types import BLOCK_VALUES, Codec
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.block_rows import (
    LEVELS,
    EncodedRows,
    differing_bytes,
    encode_rows,
    is_in_rows,
    row_bytes,
    row_count,
)
from diloco_node.learner.layouts.capture import check_not_capturing, relax_capture
from diloco_node.learner.layouts.page_locked import page_locked
from diloco_node.learner.layouts.shard_map import LocalFragment, Slab
from diloco_node.learner.layouts.tensors import ModelTensors

ROOMS: Final = 2
"""For each direction. More are made for a while where more fragments are asked for at once."""

WITHOUT_STREAMS: Final = ("cpu", "mps", "meta")

Encoder = Literal["host", "device"]

log = logging.getLogger("diloco_node.learner")


@dataclass(frozen=True, slots=True)
class Stretch:
    """The slabs of one fragment that lie on one device.

    sizes: per slab its values, which lie side by side in the device's staging memory.
    copies: (place in the fragment's vector, place in staging) of slabs that are neighbours in both.
    """

    device: torch.device
    fragment: int
    slabs: tuple[Slab, ...]
    sizes: list[int]
    copies: tuple[tuple[slice, slice], ...]
    size: int

    @classmethod
    def of_slabs(cls, device: torch.device, fragment: int, slabs: Sequence[Slab]) -> Stretch:
        """Lay them side by side."""
        copies: list[tuple[slice, slice]] = []
        end = 0
        for slab in slabs:
            span = slice(end, end + slab.size)
            if copies and copies[-1][0].stop == slab.offset:
                copies[-1] = slice(copies[-1][0].start, slab.span.stop), slice(copies[-1][1].start, span.stop)
            else:
                copies.append((slab.span, span))
            end = span.stop
        return cls(device, fragment, tuple(slabs), [slab.size for slab in slabs], tuple(copies), end)

    def views(self, row: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """Parts of a row of staging memory in the shapes of the values."""
        slices = torch.split_with_sizes(row, self.sizes)
        return [flat.view(value.shape) for flat, value in zip(slices, values, strict=True)]


@dataclass(slots=True)
class Room:
    """Memory for one fragment on its way.

    Attributes:
        host: shape (rows, largest fragment), float32, page-locked if the system allows.
        staging: by device, shape (rows, values), float32.
        stretches: what is in it now.
        views: by fragment and device, a stretch, staging, and by row the views of its slabs in it.
        fills: by device, an event that comes when staging holds the values. reads: when its last user has read them.
    """

    host: Tensor
    staging: dict[torch.device, Tensor] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    views: dict[tuple[int, torch.device], tuple[Stretch, Tensor, list[list[Tensor]]]] = field(default_factory=dict)
    fills: dict[torch.device, Any] = field(default_factory=dict)
    reads: dict[torch.device, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """All that shows its memory."""
        views = [view for *_, rows in self.views.values() for row in rows for view in row]
        return [self.host, *self.staging.values(), *views]

    def rows(self, stretch: Stretch) -> Tensor:
        """Shape (rows, stretch.size): its staging memory. Made at first, and after `model.to()`."""
        staging = self.staging.get(stretch.device)
        if staging is None or staging.shape[1] < stretch.size:
            try:
                staging = torch.empty(len(self.host), stretch.size, dtype=torch.float32, device=stretch.device)
            except torch.OutOfMemoryError as error:
                size = 4 * len(self.host) * stretch.size >> 20
                raise LearnerError(
                    f"{stretch.device} has no {size} MiB left for each of four fragments on their way: make the batch "
                    "smaller. A run with more [rounds] fragments takes less"
                ) from error
            self.staging[stretch.device] = staging
            # The memory may have been another tensor's, whose last reader is still to run in the loop's stream.
            self.reads[stretch.device] = record_event(stretch.device)
        return staging[:, : stretch.size]

    def slab_views(self, stretch: Stretch, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """By row, memory for each slab in the shapes and on the device of the values.

        Views of staging memory are made once: each of them would take a call of torch at each order.
        """
        if not has_streams(stretch.device):
            pairs = [*zip(stretch.slabs, values, strict=True)]
            return [[row[slab.span].view(value.shape).to(stretch.device) for slab, value in pairs] for row in self.host]
        place = stretch.fragment, stretch.device
        entry = self.views.get(place)
        if entry is None or entry[0] is not stretch or entry[1] is not self.staging.get(stretch.device):
            views = [stretch.views(row, values) for row in self.rows(stretch)]
            entry = self.views[place] = stretch, self.staging[stretch.device], views
        return entry[2]


class DeviceLane:
    """The way of values between a device and the host, by streams of its own.

    `pack` and `apply` are for the training thread, `send` for the worker.

    down: by fragment, what is packed. up: by fragment, what versions are applied to.
    """

    def __init__(self, tensors: ModelTensors, down: Sequence[LocalFragment], up: Sequence[LocalFragment]) -> None:
        # Waits for what was packed, while the worker does other things.
        self._fetcher = ThreadPoolExecutor(1, "diloco-fetcher", initializer=self.begin)
        self._tensors = tensors
        self._sharded: list[Any] = [m for m in tensors.model.modules() if hasattr(m, "set_post_optim_event")]
        self._largest_down, self._largest_up = (max(local.size for local in locals_) for locals_ in (down, up))
        # By identity of a fragment: itself, where its slabs were, and the stretches of these.
        self._layouts: dict[int, tuple[LocalFragment, list[torch.device], list[Stretch]]] = {}
        # A stream for each way, for neither waits behind what the other one waits for.
        self._sides: dict[tuple[torch.device, str], Any] = {}
        # False once a device had no memory left to encode.
        self._may_encode = True
        # Rooms that nobody uses; the training thread takes, both threads give back.
        self._down = deque(self._room(1, self._largest_down) for _ in range(ROOMS))
        self._up = deque(self._room(2, self._largest_up) for _ in range(ROOMS))
        for rooms, fragments in ((self._down, down), (self._up, up)):
            widest = _widest([stretch for local in fragments for stretch in self._stretches(local)])
            for room in rooms:
                for stretch in widest:
                    room.rows(stretch)

    @property
    def free(self) -> tuple[int, int]:
        """Fragments that can be packed, and versions that can be sent, without more memory."""
        return len(self._down), len(self._up)

    # ---- down --------------------------------------------------------------------------------------------------------

    def pack(self, local: LocalFragment, out: Tensor, *, is_kept: bool = False) -> Future[Room | None]:
        """Order a copy of the values as they are now, behind what the loop has ordered; it is made when the future is.

        out: shape (values,), float32, CPU; overwritten. is_kept: the room stays, for `encode` and `give_back`.
        """
        check_not_capturing("call step() after each replay")
        room = self._down.popleft() if self._down else self._room(1, self._largest_down)
        room.stretches = self._stretches(local)
        with torch.no_grad():
            for stretch in room.stretches:
                values = self._tensors.in_place(stretch.slabs)
                if not has_streams(stretch.device):
                    for slab, value in zip(stretch.slabs, values, strict=True):
                        room.host[0, slab.span].view(value.shape).copy_(value)
                    continue
                (targets,) = room.slab_views(stretch, values)
                _wait(room.reads, stretch.device)
                torch._foreach_copy_(targets, values)
                room.fills[stretch.device] = record_event(stretch.device)
        return self._fetcher.submit(self._fetch, room, out, is_kept)

    def _fetch(self, room: Room, out: Tensor, is_kept: bool) -> Room | None:
        """Wait for what was packed; return the room if it is kept."""
        for stretch in room.stretches:
            if not has_streams(stretch.device):
                continue
            row = room.rows(stretch)[0]
            with self._on_side(stretch.device, "down"):
                _wait(room.fills, stretch.device)
                for place, span in stretch.copies:
                    room.host[0, place].copy_(row[span], non_blocking=True)
                room.reads[stretch.device] = record_event(stretch.device)
        for event in room.reads.values():
            event.synchronize()
        out.copy_(room.host[0, : out.numel()])
        if is_kept:
            return room
        self.give_back(room)
        return None

    def encode(self, room: Room, base: Tensor, blocks: FragmentBlocks) -> dict[int, EncodedRows]:
        """Encode `base` minus what was packed, as far as devices can and have memory; waits. In the worker.

        base: shape (values,), float32, CPU, page-locked. Returns: by number of the piece, in the room's memory.
        """
        if self._may_encode:
            try:
                return self._encode(room, base, blocks)
            except torch.OutOfMemoryError as error:
                self._may_encode = False
                log.warning(
                    "`[learner] encode`: a device has no memory for it, the host encodes from now on: %s", error
                )
                for side in self._sides.values():  # nothing lands in the room any more
                    side.synchronize()
        return {}

    def _encode(self, room: Room, base: Tensor, blocks: FragmentBlocks) -> dict[int, EncodedRows]:
        numbers = {first: number for number, first in enumerate(blocks.layout[:-1, FIRST_VALUE].tolist())}
        landing, end = room.host.view(-1).view(torch.uint8), 0
        # As in `_fetch`, of all devices: what lands may lie where another device's values did.
        for event in room.reads.values():
            event.synchronize()
        rows: dict[int, EncodedRows] = {}
        for stretch in room.stretches:
            is_there = [is_in_rows(blocks, numbers[slab.offset]) for slab in stretch.slabs]
            slabs = [*compress(stretch.slabs, is_there)]
            if not slabs or not has_streams(stretch.device):
                continue
            counts = [row_count(slab.size) for slab in slabs]
            total = sum(counts)
            squares_at, codes_at, end = end, end + 4 * total, end + row_bytes(blocks.codec) * total
            squares, codes = landing[squares_at:codes_at].view(torch.int32), landing[codes_at:end].view(total, -1)
            with self._on_side(stretch.device, "up"), torch.no_grad():
                slices = torch.split_with_sizes(room.rows(stretch)[0], stretch.sizes)
                gradient = torch.zeros(total, BLOCK_VALUES, dtype=torch.float32, device=stretch.device)
                targets = [
                    values.view(-1)[: slab.size]
                    for values, slab in zip(torch.split(gradient, counts), slabs, strict=True)
                ]
                for target, slab in zip(targets, slabs, strict=True):
                    target.copy_(base[slab.span], non_blocking=True)
                torch._foreach_sub_(targets, [*compress(slices, is_there)])
                for place, values in zip((codes, squares), encode_rows(gradient, blocks.codec), strict=True):
                    place.copy_(values, non_blocking=True)
                room.reads[stretch.device] = record_event(stretch.device)
            pieces = zip(slabs, torch.split(codes, counts), torch.split(squares, counts), strict=True)
            for slab, piece_codes, piece_squares in pieces:
                rows[numbers[slab.offset]] = EncodedRows(piece_codes.numpy(), piece_squares.numpy())
        for event in room.reads.values():
            event.synchronize()
        return rows

    # ---- up ----------------------------------------------------------------------------------------------------------

    def reserve(self, local: LocalFragment) -> Room:
        """Take a room for a version of the fragment; `send`, `apply` and `give_back` have to follow."""
        room = self._up.popleft() if self._up else self._room(2, self._largest_up)
        room.stretches = self._stretches(local)
        for stretch in room.stretches:
            if has_streams(stretch.device):
                room.rows(stretch)
        return room

    def send(self, room: Room, new: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Copy a version into staging, and wait until it is there.

        new, anchor: float32, CPU, which make up the fragment's vector; an empty `anchor` if nothing is kept.
        """
        for row, vectors in enumerate((new, anchor)):
            end = 0
            for vector in vectors:
                room.host[row, end : end + vector.numel()].copy_(vector)
                end += vector.numel()
        for stretch in room.stretches:
            if not has_streams(stretch.device):
                continue
            rows = room.rows(stretch)
            with self._on_side(stretch.device, "up"):
                _wait(room.reads, stretch.device)
                for row in range(2 if anchor else 1):
                    for place, span in stretch.copies:
                        rows[row, span].copy_(room.host[row, place], non_blocking=True)
                room.fills[stretch.device] = record_event(stretch.device)
        for event in room.fills.values():
            event.synchronize()

    def apply(self, room: Room, *, is_anchored: bool, carry_factor: float) -> None:
        """Order the carry-over of what was sent, as `ModelTensors.shift`: in place, each operation rounded by itself.
        `is_anchored`: own steps are kept."""
        check_not_capturing("call step() after each replay")
        self._tensors.reshard()
        for stretch in room.stretches:
            _wait(room.fills, stretch.device)
            with torch.no_grad():
                values = self._tensors.in_place(stretch.slabs)
                new, anchor = room.slab_views(stretch, values)
                followed = self._tensors.followed
                rows = [row for row in zip(stretch.slabs, values, new, strict=True) if row[1].numel()]
                buffers = [row for row in rows if not isinstance(followed[row[0].piece.name], torch.nn.Parameter)]
                least = [torch.minimum(value, target) for _, value, target in buffers]
                _shift(values, new, anchor if is_anchored else None, carry_factor)
                for (_, value, _), floor in zip(buffers, least, strict=True):  # as `slab_values.carry` keeps the sign
                    value.copy_(torch.where((value < 0.0) & (floor.min() >= 0.0), floor, value))
                self._tensors.follow(stretch.slabs)
            if has_streams(stretch.device):
                room.reads[stretch.device] = event = record_event(stretch.device)
                self._hand_on(event)

    def give_back(self, room: Room) -> None:
        """Nobody reads the room's host memory any more."""
        (self._down if len(room.host) == 1 else self._up).append(room)

    # ---- both --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare a thread that waits: it must not break a CUDA graph that the loop captures meanwhile."""
        if any(device.type == "cuda" for device in self._tensors.devices):
            relax_capture()

    def close(self) -> None:
        """Wait for what was packed, and let go of the memory; nothing is packed or sent any more."""
        self._fetcher.shutdown()
        self._down.clear()
        self._up.clear()

    def _room(self, rows: int, largest: int) -> Room:
        return Room(page_locked(rows, largest))

    def _stretches(self, local: LocalFragment) -> list[Stretch]:
        """By device; laid out anew where `model.to()` has moved parameters."""
        devices = self._tensors.devices_of(local.slabs)
        layout = self._layouts.get(id(local))
        if layout is None or layout[1] != devices:
            slabs: dict[torch.device, list[Slab]] = {}
            for slab, device in zip(local.slabs, devices, strict=True):
                slabs.setdefault(device, []).append(slab)
            stretches = [Stretch.of_slabs(device, local.index, neighbours) for device, neighbours in slabs.items()]
            layout = self._layouts[id(local)] = local, devices, stretches
        return layout[2]

    @contextlib.contextmanager
    def _on_side(self, device: torch.device, way: str) -> Iterator[None]:
        """In a device's stream for one way; each way is one thread's."""
        module = getattr(torch, device.type)
        if (device, way) not in self._sides:
            self._sides[device, way] = module.Stream(device=device)
        with module.stream(self._sides[device, way]):
            yield

    def _hand_on(self, event: Any) -> None:
        """Have FSDP2's next gathers wait for what was applied, where it was told to wait for the optimizer alone."""
        for module in self._sharded:
            if module._get_fsdp_state()._state_ctx.post_optim_event is not None:
                module.set_post_optim_event(event)


class LateNumbers:
    """A few numbers that are computed on a device, and read when they are there."""

    def __init__(self, numbers: Tensor, room: Tensor | None = None) -> None:
        """Order the copy of shape (k,). `room`: page-locked, float32, used until they were read; None: own."""
        self._numbers = numbers
        self._event = None
        if has_streams(numbers.device):
            if room is None:
                room = torch.empty(numbers.numel(), dtype=torch.float32, device="cpu", pin_memory=True)
            self._numbers = room[: numbers.numel()].copy_(numbers, non_blocking=True)
            self._event = record_event(numbers.device)

    def read(self) -> list[float] | None:
        """The numbers, or None as long as they are not there."""
        if self._event is not None and not self._event.query():
            return None
        numbers: list[float] = self._numbers.tolist()
        return numbers

    def wait(self) -> list[float]:
        """Wait for the numbers. Not in the training thread."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def has_streams(device: torch.device) -> bool:
    """Whether work on it is ordered, and may be waited for by events."""
    return device.type not in WITHOUT_STREAMS


def encodes_there(devices: Collection[torch.device], codec: Codec, encode: Encoder, *, is_gathered: bool) -> bool:
    """Whether contributions are encoded on the devices of the model; says why not, where that was asked for."""
    if encode != "device":
        return False
    reasons = {
        f"codec_up is {codec.value}, not int4 or int8": codec not in LEVELS,
        "the model is not on a device with streams": not any(map(has_streams, devices)),
        "ranks hold parts of the model, and blocks lie across them": is_gathered,
    }
    for device in filter(has_streams, devices) if not any(reasons.values()) else ():
        reasons[f"{device} rounds otherwise than the host"] = differing_bytes(device, codec) > 0
    for reason in [reason for reason, is_so in reasons.items() if is_so]:
        log.warning('`[learner] encode = "device"`: the host encodes, for %s', reason)
    return not any(reasons.values())


def record_event(device: torch.device) -> Any:
    """An event behind all that this thread has ordered on a device so far."""
    module = getattr(torch, device.type)
    # Who waits for this kind sleeps; for others the processor turns.
    event = module.Event(blocking=True) if device.type == "cuda" else module.Event()
    event.record(module.current_stream(device))
    return event


def _wait(events: dict[torch.device, Any], device: torch.device) -> None:
    """Have what this thread orders next on a device begin after an event, if there is one. The host goes on."""
    event = events.get(device)
    if event is not None:
        getattr(torch, device.type).current_stream(device).wait_event(event)


def _shift(values: list[Tensor], new: list[Tensor], anchor: list[Tensor] | None, carry_factor: float) -> None:
    """Set `values = new + carry_factor * (values - anchor)` in place; `anchor` is used up."""
    if anchor is None:
        torch._foreach_copy_(values, new)
        return
    is_rounded = any(value.dtype != torch.float32 for value in values)
    theta = values
    if is_rounded:  # in float32: a - b is -b + a
        torch._foreach_neg_(anchor)
        torch._foreach_add_(anchor, values)
        theta = anchor
    else:
        torch._foreach_sub_(theta, anchor)
    if carry_factor != 1.0:
        torch._foreach_mul_(theta, carry_factor)
    torch._foreach_add_(theta, new)
    if is_rounded:
        torch._foreach_copy_(values, theta)


def _widest(stretches: Sequence[Stretch]) -> list[Stretch]:
    """By device the one with the most values; of devices with streams alone."""
    widest: dict[torch.device, Stretch] = {}
    for stretch in sorted(stretches, key=lambda stretch: stretch.size):
        if has_streams(stretch.device):
            widest[stretch.device] = stretch
    return list(widest.values())
