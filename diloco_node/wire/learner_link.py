"""Messages between learner and daemon of one region on the Unix socket.

Each message is a frame: length as little-endian u32, then strict msgpack (`wire.message_schema`). The conversation:

1. The learner connects and sends `Attach`. The daemon answers `Welcome` or `Refuse`.
2. `Welcome.wants_initial_state`: the learner writes its parameters into the version area and says `InitialState`.
3. `VersionOffered` for each fragment (genesis, or where the run is) is answered by `OfferApplied`. The first step is
   made when every fragment has a version.
4. Every inner step: `Report`. At any time: `SnapshotRequested` (answered by `SnapshotReady` or `SnapshotDenied`) and
   `VersionOffered` (answered by `OfferApplied`), both at the next step boundary.
5. `ShardsGiven` after `Welcome`, and when there is news; `RunAdvanced` after `Welcome`, and again and again.
6. `Stop`: the learner stops stepping and says `Done`, or `Failed` when it breaks.

When the daemon dies the learner goes on and attaches to the next one with its `incarnation`, positions and snapshots.
Requests and offers of the old daemon are void: a slot of the version area that the `Attach` does not name may be
written again as soon as it has arrived.

Memory (areas `VERSION_AREA` and `CONTRIBUTION_AREA` of the supervisor): in the version area any slot holds any
fragment, and stays as it is while the daemon's parameters or the learner's base are in it. Theta_0 of fragment f is
written to slot f. Contributions follow each other in the order of the fragments, without gaps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

from diloco_node.core.merge.fragments import Manifest, TensorSpec
from diloco_node.core.types import CarryMode, Codec, Contribution, FragmentPosition, MergeRule
from diloco_node.errors import ProtocolViolation
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Schema

LINK_PROTOCOL: Final = 5

VERSION_AREA: Final = "versions"
"""Area of `version_slots`, float32: one copy of the model that daemon and learner share, and versions on their way."""

SPARE_SLOTS: Final = 2
"""Slots beside one a fragment: so many rounds are in flight by default. With more, a version may wait for a slot."""

NO_SLOT: Final = -1

CONTRIBUTION_AREA: Final = "contributions"
"""Area of the encoded contributions, one place of `FragmentBlocks.encoded_bytes` per fragment."""

NEW_PROCESS: Final = 0
"""`Attach.incarnation` of a learner process that has not been welcomed yet."""

NO_SNAPSHOT: Final = -1

UNATTACHED: Final = FragmentPosition(base_version=-1, cycle_start_step=0, included_step=0, included_tokens=0)
"""Where a new process stands with every fragment."""

FRAME_BYTES_MAX: Final = 16 * 2**20
"""An `Attach` that lists 65,536 tensors fits."""


# ---- learner to daemon -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """First frame of every connection.

    Attributes:
        protocol: LINK_PROTOCOL. pid: of the learner process (rank 0), for messages.
        tensors: trainable tensors. `RDA` stands for "not an embedding or head": the run's own merge rule applies.
        incarnation: NEW_PROCESS, or what an earlier daemon allotted to this process.
        run_id: "" for a new process, else the run that the earlier daemon named.
        step, tokens: since the start of this incarnation.
        step_time_ns: moving average of the time of one inner step, 0 when unknown.
        positions: one per fragment; empty for a new process, which does not know how many there are.
        snapshots: per fragment the number of its unresolved snapshot or NO_SNAPSHOT; empty for a new process.
        listing: of its frozen tensors (`wire.frozen_listing`).
        slots: per fragment the one where its base lies; empty, or NO_SLOT, for a base in memory of its own.
    """

    protocol: int
    pid: int
    tensors: tuple[TensorSpec, ...]
    incarnation: int
    run_id: str
    step: int
    tokens: int
    step_time_ns: int
    positions: tuple[FragmentPosition, ...]
    snapshots: tuple[int, ...]
    listing: bytes = b""
    slots: tuple[int, ...] = ()

    def in_fragments(self, count: int) -> Attach:
        """The same with a position and a snapshot for each fragment. Raises ProtocolViolation: it names others."""
        if self.incarnation == NEW_PROCESS and not self.positions and not self.snapshots:
            return replace(self, positions=(UNATTACHED,) * count, snapshots=(NO_SNAPSHOT,) * count)
        if len(self.positions) != count or len(self.snapshots) != count:
            raise ProtocolViolation(
                f"learner pid={self.pid} attaches with {len(self.positions)} positions and {len(self.snapshots)} "
                f"snapshots, expected {count}: was rounds.fragments changed during the run?"
            )
        if len(self.slots) > count or any(slot >= count + SPARE_SLOTS for slot in self.slots):
            raise ProtocolViolation(f"learner pid={self.pid} attaches with slots {self.slots} of {count} fragments")
        return self


@dataclass(frozen=True, slots=True)
class Report:
    """After an inner step; several may be folded into the newest.

    Attributes:
        step, tokens: since the start of this incarnation.
        loss: of a step not long ago (read without waiting for the device); None when unknown or not finite.
        step_time_ns: moving average. blocked_ns: time that the loop has spent in `step()`, altogether.
        val_loss, val_loss_global: held-out loss of the own and of the global parameters, in the last evaluation.
        val_step: step of the run at which that was; None: there was none.
        global_step: step on the schedule that all learners share, as this learner knows it.
    """

    step: int
    tokens: int
    loss: float | None
    step_time_ns: int
    blocked_ns: int
    val_loss: float | None
    val_loss_global: float | None
    global_step: int
    val_step: int | None


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """Encoded in the contribution area, where it stays until another snapshot of the fragment is wanted."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class SnapshotDenied:
    """No snapshot of the fragment for this version, and why."""

    fragment: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class OfferApplied:
    """A version was applied: the slots of the fragment that are not named here are free.

    Attributes:
        carry_factor: how much of the own steps was kept: 1 for an exact carry-over.
        carried_steps: own steps that are in no version up to this one, and were kept (times lam).
        slot: where the learner's base of the fragment lies now; NO_SLOT: in memory of its own.
    """

    fragment: int
    version: int
    position: FragmentPosition
    carry_factor: float
    carried_steps: int
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class InitialState:
    """The learner's own parameters lie in the version area, all fragments."""


@dataclass(frozen=True, slots=True)
class Done:
    """The learner has stopped stepping for good. The last evaluation is as in `Report`."""

    step: int
    tokens: int
    val_loss: float | None
    val_loss_global: float | None
    blocked_ns: int
    val_step: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The learner broke and is about to exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Warned:
    """The learner noticed something that people should know, and goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The learner was told to stop, and makes no more steps. It waits for a merge of its last ones; said repeatedly."""


@dataclass(frozen=True, slots=True)
class EndWanted:
    """The script wants the run to end: its region's vote."""

    reason: str


ToDaemon = (
    Attach
    | Report
    | SnapshotReady
    | SnapshotDenied
    | OfferApplied
    | InitialState
    | Done
    | Failed
    | Warned
    | Leaving
    | EndWanted
)

# ---- daemon to learner -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Attach.

    Attributes:
        region: this region's name. region_index: its place in `regions`, which never changes.
        incarnation: which life of the learner this is; the one in Attach unless that was NEW_PROCESS.
        run_id: the run's name. fragments: P. sync_every: H. merge: rule for tensors that are not embeddings or head.
        codec_up: of contributions. carry: mode. carry_steps_limit: steps up to which carry-over is exact.
        global_step: where the run is: steps of the median learner; 0 at its start.
        manifest_digest: of the fragments; the learner refuses to go on if its own differs.
        wants_initial_state: write your parameters into the version area and say InitialState.
        state_dir: the region's folder, absolute.
        steps_max: of the median learner, at which the run ends; 0: no such limit.
        fragment_digests: of the parameters with which a script began the run, for a region that has made no step; else
            empty.
    """

    region: str
    region_index: int
    regions: tuple[str, ...]
    incarnation: int
    run_id: str
    fragments: int
    sync_every: int
    merge: MergeRule
    codec_up: Codec
    carry: CarryMode
    carry_steps_limit: int
    global_step: int
    manifest_digest: str
    wants_initial_state: bool
    state_dir: str
    steps_max: int = 0
    fragment_digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """No. `is_final`: another try of this process will be refused too, it should exit."""

    reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """Take a snapshot of the fragment at the next step boundary, for the round that makes `version`.

    Asked again for the same version and base, the learner answers with the same snapshot.
    """

    fragment: int
    version: int
    base_version: int


@dataclass(frozen=True, slots=True)
class VersionOffered:
    """A slot of the version area holds `version`. slot: which one; NO_SLOT is never sent.

    Attributes:
        included_snapshot: the newest one of this incarnation that the versions since its base include, or NO_SNAPSHOT.
        is_last: after it, all own parameters of the fragment are the merged ones plus a few steps.
    """

    fragment: int
    version: int
    included_snapshot: int
    is_last: bool = False
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class RunAdvanced:
    """How far the run is, as far as this region knows; of two the later counts, and neither makes a learner go back.

    Attributes:
        global_step: steps of the median learner.
        run_part: of the way to the run's end, 0 to 1; None: nothing says where it ends.
        reason: why further steps are of no use now; empty: go on.
    """

    global_step: int
    run_part: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShardsGiven:
    """The virtual shards of the data that are this region's, by the ledger as far as it is known here.

    Attributes:
        changes: of the members (`Roster.changes`). shards: ascending.
        starts: per shard the row, over all passes, at which the learner begins it; -1: another region may train it
            still, and it is to wait.
    """

    changes: int
    shards: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop at the next step boundary: the run is finished, or the region is drained.

    Attributes:
        versions: of all fragments, where the run is finished: offered before or soon after; else empty.
    """

    reason: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """An operator has changed settings of the run; as in Welcome."""

    sync_every: int
    carry_steps_limit: int


ToLearner = Welcome | Refuse | SnapshotRequested | VersionOffered | Stop | RunAdvanced | ShardsGiven | SettingsChanged

# The tag of a message is its place in the union, from 1.
TO_DAEMON: Final[Schema[ToDaemon]] = Schema(
    dict(enumerate(get_args(ToDaemon), 1)), bounds=BOUNDS, bytes_max=FRAME_BYTES_MAX
)
TO_LEARNER: Final[Schema[ToLearner]] = Schema(
    dict(enumerate(get_args(ToLearner), 1)), bounds=BOUNDS, bytes_max=FRAME_BYTES_MAX
)

# ---- memory and frames -----------------------------------------------------------------------------------------------

_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size


def version_slots(manifest: Manifest) -> tuple[int, int]:
    """Slots of the version area, and values of each: the largest fragment fits."""
    fragments = manifest.fragments
    return len(fragments) + SPARE_SLOTS, max(fragment.size for fragment in fragments)


def frame(body: bytes) -> bytes:
    """An encoded message with its length before it."""
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes | memoryview) -> int:
    """Bytes that follow a head of LENGTH_BYTES. Raises ProtocolViolation: more than FRAME_BYTES_MAX, or nothing."""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ProtocolViolation(f"learner link: a frame of {length} B, expected 1..{FRAME_BYTES_MAX} B")
    return int(length)


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take whole frames from the front; yield their bodies."""
    while len(buffer) >= LENGTH_BYTES:
        end = LENGTH_BYTES + frame_length(bytes(buffer[:LENGTH_BYTES]))
        if len(buffer) < end:
            return
        body = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        yield body


def merge_rules(tensors: tuple[TensorSpec, ...], merge: MergeRule) -> tuple[TensorSpec, ...]:
    """The tensors as the run merges them: `RDA` becomes the run's rule; embeddings and head stay averaged."""
    return tuple(spec if spec.merge is MergeRule.AVG else replace(spec, merge=merge) for spec in tensors)
