"""Faults of the device lane: each drops one wait, one order or one buffer, by a change of its source."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from diloco_node.learner.layouts.device import Encoder
from diloco_node.learner.local_fragments import LearnerFragments

LANE: Final = "diloco_node.learner.layouts.device"
REVERT: Final = "diloco_node.learner.revert"
FRAGMENTS: Final = "diloco_node.learner.local_fragments"
PAGES: Final = "diloco_node.learner.layouts.page_locked"


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A text that is once in a module, and what stands there instead; dtype and encoder of the life that shows it."""

    module: str
    text: str
    instead: str
    dtype: torch.dtype = torch.float32
    encode: Encoder = "host"


def planted(fault: DeviceFault) -> type[LearnerFragments]:
    """`LearnerFragments` with the fault; the modules themselves stay as they are."""
    pages, lane, revert, fragments = (_copied(name, fault) for name in (PAGES, LANE, REVERT, FRAGMENTS))
    lane.page_locked = pages.page_locked  # type: ignore[attr-defined]
    for module in (revert, fragments):
        for name in set(vars(module)) & {"DeviceLane", "LateNumbers", "Room", "encodes_there", "page_locked", "ROOMS"}:
            setattr(module, name, getattr(lane, name))
    fragments.RevertCheck = revert.RevertCheck  # type: ignore[attr-defined]
    kind: type[LearnerFragments] = fragments.LearnerFragments  # type: ignore[attr-defined]
    return kind


def _copied(name: str, fault: DeviceFault) -> ModuleType:
    path = Path(str(import_module(name).__file__))
    source = path.read_text()
    if name == fault.module:
        assert source.count(fault.text) == 1, f"{source.count(fault.text)} times in {path.name}: {fault.text}"
        source = source.replace(fault.text, fault.instead)
    module = ModuleType(name)
    exec(compile(source, str(path), "exec"), vars(module))
    return module


DEVICE_FAULTS: Final = {
    # ---- down
    "copy-before-packing": DeviceFault(
        LANE,
        "                _wait(room.fills, stretch.device)\n                for place, span in stretch.copies:\n"
        "                    room.host",
        "                for place, span in stretch.copies:\n                    room.host",
    ),
    "encoder-does-not-wait": DeviceFault(
        LANE,
        "        for event in room.reads.values():\n            event.synchronize()\n        out.copy_",
        "        out.copy_",
    ),
    "packing-into-what-is-copied": DeviceFault(
        LANE,
        "                _wait(room.reads, stretch.device)\n                torch._foreach_copy_(targets, values)\n",
        "                torch._foreach_copy_(targets, values)\n",
    ),
    "room-down-given-back-early": DeviceFault(
        LANE,
        "        return self._fetcher.submit(self._fetch, room, out, is_kept)\n",
        "        self._down.appendleft(room)\n        return self._fetcher.submit(self._fetch, room, out, is_kept)\n",
    ),
    "packed-behind-the-next-step": DeviceFault(
        FRAGMENTS,
        "        room = snapshot.fetched()\n",
        "        room = None\n"
        "        self.tensors.read(self._owned[snapshot.contribution.fragment], snapshot.values)\n",
    ),
    "encoded-before-it-was-fetched": DeviceFault(
        FRAGMENTS,
        "                snapshot.fetch.add_done_callback(lambda _, encode=encode: self._worker.put(encode))",
        "                snapshot.fetch = None; self._worker.put(encode)",
    ),
    "training-thread-copies": DeviceFault(
        FRAGMENTS,
        "        if fetch is None:\n            self.tensors.read",
        "        if True:\n            self.tensors.read",
    ),
    "training-thread-fetches": DeviceFault(
        LANE,
        "        return self._fetcher.submit(self._fetch, room, out, is_kept)\n",
        "        self._fetch(room, out, is_kept)\n        return self._fetcher.submit(lambda: None)\n",
    ),
    "snapshot-in-the-room": DeviceFault(
        LANE, "        out.copy_(room.host[0, : out.numel()])\n", "        out.set_(room.host[0, : out.numel()])\n"
    ),
    "packed-on-the-side": DeviceFault(
        LANE,
        "                torch._foreach_copy_(targets, values)\n",
        '                with self._on_side(stretch.device, "up"):\n'
        "                    torch._foreach_copy_(targets, values)\n",
    ),
    "half-a-fragment-down": DeviceFault(
        LANE,
        "room.host[0, place].copy_(row[span], non_blocking=True)",
        "room.host[0, place][1:].copy_(row[span][1:], non_blocking=True)",
    ),
    # ---- up
    "version-not-waited-for": DeviceFault(
        LANE, "            _wait(room.fills, stretch.device)\n            with torch", "            with torch"
    ),
    "version-over-one-that-is-applied": DeviceFault(
        LANE,
        "                _wait(room.reads, stretch.device)\n                for row in",
        "                for row in",
    ),
    "worker-does-not-wait-for-the-version": DeviceFault(
        LANE, "        for event in room.fills.values():\n            event.synchronize()\n", ""
    ),
    "room-up-used-twice": DeviceFault(
        LANE, "room = self._up.popleft() if self._up else self._room(2, self._largest_up)", "room = self._up[0]"
    ),
    "base-before-its-anchor": DeviceFault(
        FRAGMENTS,
        "        def carry() -> None:\n",
        "        def carry() -> None:\n"
        "            self.tensors.held(self._owned[index], incoming.place, self._base[index])\n",
    ),
    "base-not-rounded": DeviceFault(
        FRAGMENTS,
        "            self.tensors.held(self._owned[index], new, self._base[index])",
        "            self._base[index].copy_(new)",
        torch.bfloat16,
    ),
    "base-not-kept": DeviceFault(
        FRAGMENTS,
        "            self._worker.put(partial(self._keep, index, incoming.room))\n",
        "            pass\n",
        torch.bfloat16,
    ),
    "applied-on-the-side": DeviceFault(
        LANE,
        "                self._tensors.follow(stretch.slabs)\n",
        '                pass\n            with self._on_side(stretch.device, "up"), torch.no_grad():\n'
        "                torch._foreach_mul_(values, 1.0)\n",
    ),
    "applied-through-the-host": DeviceFault(
        FRAGMENTS,
        "            if self._lane is not None and incoming.room is not None:\n                self._lane.apply",
        "            self.tensors.write(self._owned[index], incoming.place)\n"
        "            if self._lane is not None and incoming.room is not None:\n                self._lane.apply",
    ),
    "anchor-not-sent": DeviceFault(LANE, "range(2 if anchor else 1)", "range(1)"),
    "pageable-rooms-and-words": DeviceFault(PAGES, "pin_memory=True)", "pin_memory=False)"),
    # ---- what a device encodes
    "codes-not-waited-for": DeviceFault(
        LANE,
        "        for event in room.reads.values():\n            event.synchronize()\n        return rows\n",
        "        return rows\n",
        encode="device",
    ),
    "packed-over-what-is-encoded": DeviceFault(
        LANE,
        "                    place.copy_(values, non_blocking=True)\n"
        "                room.reads[stretch.device] = record_event(stretch.device)\n",
        "                    place.copy_(values, non_blocking=True)\n",
        encode="device",
    ),
    "blocks-not-filled-up": DeviceFault(
        LANE, "gradient = torch.zeros(total", "gradient = torch.empty(total", encode="device"
    ),
    # ---- the check of reverted versions
    "verdict-waited-for": DeviceFault(
        LANE,
        "        if self._event is not None and not self._event.query():\n            return None\n",
        "        if self._event is not None:\n            self._event.synchronize()\n",
    ),
    "verdict-read-early": DeviceFault(
        LANE, "        if self._event is not None and not self._event.query():\n            return None\n", ""
    ),
    "samples-on-the-host": DeviceFault(REVERT, "_Trial(local, before, after)", "_Trial(local, before.cpu(), after)"),
}
