"""Snapshots of one fragment, and versions on their way: what is known of each, and of all."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from diloco_node.core.types import CarryMode, Codec, Contribution
from diloco_node.learner.late_looks import LateLook
from diloco_node.learner.layouts.device import Encoder, Room
from diloco_node.wire.learner_link import SnapshotDenied, SnapshotReady, VersionOffered


@dataclass(frozen=True, slots=True)
class FragmentSettings:
    """Facts that the Welcome of the daemon fixes, by its names, and which processor encodes."""

    region: str
    incarnation: int
    codec_up: Codec
    carry: CarryMode
    carry_steps_limit: int
    encode: Encoder = "host"


@dataclass(slots=True)
class HeldSnapshot:
    """S: the parameters of one fragment at a step boundary, until a version resolves it.

    Attributes:
        version: of the request. contribution: what it becomes; its norms are known when it is encoded.
        tokens: of this incarnation, at that boundary.
        values: shape (owned size,), float32, CPU; the first part of `buffer`, which comes from the rooms.
        fetch: done when they have come from the device, with the room that is still needed; None without a device.
        looks: at the model, ordered before, that were not judged yet: what they refuse is not sent. refusal: why.
        answer: set by the encoder when it is done and the counters are durable.
        encoded: set by the encoder after `answer`.
    """

    version: int
    contribution: Contribution
    tokens: int
    values: Tensor
    buffer: Tensor
    fetch: Future[Room | None] | None = None
    looks: tuple[LateLook, ...] = ()
    refusal: str = ""
    answer: SnapshotReady | SnapshotDenied | None = None
    encoded: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> Room | None:
        """Wait until the values are here."""
        fetch, self.fetch = self.fetch, None  # its callback holds the snapshot
        return None if fetch is None else fetch.result()

    def refuse(self) -> bool:
        """Wait for the looks, and spoil what they refuse: so the rank that encodes hears of it. Whether they do."""
        self.refusal = next(filter(None, [look.refusal() for look in self.looks]), "")
        if self.refusal:
            self.values.fill_(math.nan)
        self.looks = ()
        return bool(self.refusal)


@dataclass(slots=True)
class ComingVersion:
    """A version on its way into the model.

    Attributes:
        place: shape (n,), float32, CPU: on rank 0 the whole version, else empty. slot: where it lies, or NO_SLOT.
        new, anchor_followed: see `RankExchange.scatter` and `share_anchor`; set when `arrived` is.
        room: what it is applied from, if the model is on a device.
    """

    offered: VersionOffered
    place: Tensor
    slot: int
    new: tuple[Tensor, Tensor] | None = None
    anchor_followed: Tensor | None = None
    room: Room | None = None
    arrived: threading.Event = field(default_factory=threading.Event)
