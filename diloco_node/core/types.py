"""The words of the system as types: who, what, how much. No behaviour beyond validation and derived values.

Units: steps are inner steps of one learner; positions `(step_from, step_to]` count from the start of that learner's
incarnation; times end in `_ns` (monotonic integer nanoseconds); sizes are float32 values unless they end in `_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import LEFT_OUT

BLOCK_VALUES: Final = 256
"""Values that share one quantisation scale."""

DISK_ID_BYTES: Final = 16
"""Length of the random id of a region's folder."""

NO_STEPS: Final = "no steps since the last inclusion"
"""Why a learner declines a ballot that it has nothing to give to."""

SMALL_TENSOR_VALUES: Final = 4096
"""Pieces with fewer values travel in bf16 whatever the codec, for a scale per 256 of them would not pay."""


class Codec(StrEnum):
    """How the values of an outer gradient travel."""

    INT4 = "int4"
    INT8 = "int8"
    BF16 = "bf16"
    FP32 = "fp32"


class MergeRule(StrEnum):
    """How one tensor's outer gradients become one: radial-directional averaging, or the weighted mean.

    A run with `TRIMMED` averages directions as with `RDA`, and leaves out each value's extremes, whatever the tensor.
    """

    RDA = "rda"
    AVG = "avg"
    TRIMMED = "trimmed"


class CarryMode(StrEnum):
    """How a learner treats its steps since its snapshot when a new version arrives."""

    CARRY = "carry"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """The number of an attempt at a round. It is unique in a run: a term has one leader, which counts its attempts."""

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


@dataclass(frozen=True, slots=True)
class Contribution:
    """The name of what a learner offers to a round. It does not change from one ballot of the round to the next.

    Attributes:
        learner, incarnation: the region whose learner made it, and which one; grows with every restart of its process.
        fragment: its index. snapshot: number of the snapshot, unique within the incarnation. tokens: of the steps.
        base_version: the version the learner had last applied; the delta is against it.
        step_from, step_to: the inner steps (a, b] it covers; a is the step of the last included snapshot.
        squared_norms: per piece of the fragment, sum of squares of the *decoded* outer gradient (float64).
        rows: of the data, trained in the steps (`core.data_shards.TrainedRows`); empty: nobody counts them.
    """

    learner: str
    incarnation: int
    fragment: int
    base_version: int
    snapshot: int
    step_from: int
    step_to: int
    tokens: int
    squared_norms: tuple[float, ...]
    rows: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)

    @property
    def steps(self) -> int:
        """Inner steps covered."""
        return self.step_to - self.step_from


@dataclass(frozen=True, slots=True)
class Stripe:
    """The part of a fragment that one region reduces: blocks [block_start, block_stop)."""

    reducer: str
    block_start: int
    block_stop: int


@dataclass(frozen=True, slots=True)
class FragmentPosition:
    """Where one learner stands with one fragment.

    Attributes:
        base_version: the version it last applied; -1 before genesis was applied.
        cycle_start_step: the step at which its cycle of this fragment began: the snapshot's step if the last applied
            version included it, else the step of the apply. Due when `step - cycle_start_step >= H`.
        included_step, included_tokens: the learner's step and cumulative tokens at the last *included* snapshot
            (0 and 0 if none, or what was discarded when the incarnation started).
    """

    base_version: int
    cycle_start_step: int
    included_step: int
    included_tokens: int


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """A region's report of its learner, with every heartbeat.

    Attributes:
        incarnation: of the learner.
        step, tokens: inner steps and tokens since the start of this incarnation.
        step_time_ns: moving average of the time of one inner step; 0 when unknown.
        positions: one per fragment, by fragment index.
        finished: it was ordered to stop and has stopped stepping.
        leaving: it steps no more, and ends as soon as a merge includes its last steps: its machine is taken away.
    """

    incarnation: int
    step: int
    tokens: int
    step_time_ns: int
    positions: tuple[FragmentPosition, ...]
    finished: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class FragmentDigest:
    """The digest of one fragment's parameters and momentum at one version, all 32 bytes (`codec.digest`)."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Member:
    """An included learner of a committed round, with the leader's decision about it."""

    contribution: Contribution
    weight: float


@dataclass(frozen=True, slots=True)
class GenesisBody:
    """The run begins. Digest of Theta_0 per fragment, and everything two regions must agree on.

    Attributes:
        settings_digest: of the settings that the ledger does not hold.
        disks: the id of each region's folder, in the order of `regions`: the first ones that count.
        listing: of the proposer's frozen tensors, for words (`wire.frozen_listing`); empty: none was known.
        settings: that hold until an entry changes them; none: those that each region was started with.
    """

    run_id: str
    manifest_digest: str
    settings_digest: str
    regions: tuple[str, ...]
    fragment_digests: tuple[bytes, ...]
    disks: tuple[bytes, ...] = ()
    listing: bytes = b""
    settings: tuple[SettingsBody, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaderBody:
    """A new leader's first entry; committing it commits what older terms left."""

    leader: str


@dataclass(frozen=True, slots=True)
class RoundBody:
    """A committed round: everything a region needs, beside the payload, to take `fragment` to `version`.

    Attributes:
        factors: per piece of the fragment, float32 (sent as its exact value): `delta = factor * decode(payload)`;
            share and the radial part of RDA are in it.
        payload_digest: SHA-256 over the merged stripes' digests in block order.
        stripes: how the payload was cut; stripe by stripe, in block order, it is the payload.
        share: part of a full outer step; below 1 if members bring work of versions without them (`core.merge.weights`).
        is_last: the run's last round of this fragment: the members' plain mean, taken whole (`core.merge.numbers`).
        squared_norms: per piece, sum of squares of the decoded payload: the factors follow from it.
        nonces: the leader's and the drawer's, if that was told in time; the audit follows from them (`core.rounds`).
        projections: per member, per window of an audited payload (`core.merge.freivalds`); empty for a member that
            did not tell them in time.
        outer_lr, outer_momentum: of the outer step, by the settings at this entry (`core.merge.numbers`).
    """

    fragment: int
    version: int
    ballot: Ballot
    members: tuple[Member, ...]
    share: float
    factors: tuple[float, ...]
    stripes: tuple[Stripe, ...]
    payload_digest: bytes
    is_last: bool = False
    squared_norms: tuple[float, ...] = ()
    nonces: tuple[bytes, ...] = ()
    projections: tuple[tuple[float, ...], ...] = ()
    outer_lr: float = 0.5
    outer_momentum: float = 0.6


@dataclass(frozen=True, slots=True)
class DiscardedBody:
    """Steps (step_from, step_to] of a dead incarnation that are in no merge, per fragment, and why."""

    learner: str
    incarnation: int
    fragment: int
    step_from: int
    step_to: int
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class FinishedBody:
    """The run is over: no round is opened after this entry, unless an `ExtendedBody` follows.

    versions: of all fragments; they are final. steps_max, tokens_max: of the settings that it ended with.
    """

    versions: tuple[int, ...]
    reason: str
    steps_max: int = 0
    tokens_max: int = 0


@dataclass(frozen=True, slots=True)
class ExtendedBody:
    """The run that was over goes on, up to other limits; see `core.rounds.extension`."""

    steps_max: int
    tokens_max: int


EXPELLED: Final = b"\xff" * DISK_ID_BYTES
"""In place of a folder's id: an operator has expelled the region."""

EVICTED: Final = b"\xfe" * DISK_ID_BYTES
"""In place of a folder's id: the region was away for long, and has no vote until it is back."""


@dataclass(frozen=True, slots=True)
class DiskNamedBody:
    """The folder of a region that counts from this entry on: the view of the run changes, one region at a time.

    disk: the folder's id; empty: none of this region, until a further entry names one; EXPELLED: none, until an entry
    readmits the region; EVICTED: none, and the voter counts for no majority, until an entry names one.
    """

    region: str
    disk: bytes


@dataclass(frozen=True, slots=True)
class RevokedBody:
    """A region's certificate that no link may be made or kept with, by its SHA-256; the region may get another one."""

    region: str
    certificate: bytes


@dataclass(frozen=True, slots=True)
class SnapshotBody:
    """A majority of the regions has these bytes: the state of `fragment` at `version` has this digest.

    Only such states are fetched, and every region compares its own with them. Version 0 is snapshotted by genesis.
    """

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SummaryBody:
    """Digest of the `LedgerBase` at `index`, which every region computes: what may stand for the entries up to it."""

    index: int
    digest: bytes


# fmt: off
EntryBody = (
    GenesisBody | LeaderBody | RoundBody | DiscardedBody | FinishedBody | DiskNamedBody | SnapshotBody | SummaryBody
    | ExtendedBody | RevokedBody | MembershipBody | SettingsBody
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the ledger.

    Attributes:
        index: from 1, without gaps.
        term: of the leader that appended it.
        previous: hash of the entry before (32 zero bytes before entry 1).
        hash: SHA-256 over (previous, canonical encoding of index, term and body); made by `core.ledger.entries.seal`.
    """

    index: int
    term: int
    previous: bytes
    body: EntryBody
    hash: bytes


@dataclass(frozen=True, slots=True)
class LedgerBase:
    """The beginning of a ledger whose first entries are gone: they are summed up.

    index, term, hash: of the last entry that is summed up; 0, 0 and 32 zero bytes for none.
    summary: what the entries up to it say, as far as it still matters; `core.ledger.summary` encodes it.
    """

    index: int
    term: int
    hash: bytes
    summary: bytes


NO_BASE: Final = LedgerBase(0, 0, bytes(32), b"")
"""The base of a ledger that has all its entries."""


class Direction(StrEnum):
    """Limits of traffic, seen from this region."""

    EGRESS = "egress"
    INGRESS = "ingress"


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Ceilings in bytes per second; None: no limit."""

    egress: int | None = None
    ingress: int | None = None

    def __str__(self) -> str:
        """In one line; empty without limits."""
        limits = (("egress", self.egress), ("ingress", self.ingress))
        return ", ".join(f"{name} {8 * rate:,} bit/s" for name, rate in limits if rate is not None)

    def with_rate(self, direction: Direction, rate_bytes_per_s: int | None) -> RateLimits:
        """The same with one of them changed."""
        return replace(self, **{direction.value: rate_bytes_per_s})


NO_LIMITS: Final = RateLimits()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that all regions of a run agree on. `config/` builds them from run.toml.

    Attributes:
        fragments: P. sync_every: H, inner steps between two rounds of one fragment. overlap_steps: tau.
        quorum_min: learners due before the grace window starts; 0 means a majority of the live ones.
        grace_gamma: part of the slack that the grace window may use.
        outer_lr, outer_momentum: outer SGD with Nesterov momentum, 0 is plain SGD (`config.resolve.default_outer`).
        merge: rule for tensors that are not embeddings or head (those are always averaged).
        codec_up: of contributions. codec_down: of merged stripes.
        carry, carry_steps_max: see CarryMode and `core.merge.carry`; beyond carry_steps_max lambda discounts (0: 4 H).
        weight_cap, weight_share_max, tokens_ratio_max: see `core.merge.weights`.
        tokens_max, steps_max: end of the run by merged tokens of all regions, or by the steps of the median learner
            (`core.rounds.progress`); 0 means no end.
        election_timeout_ns: drawn from 1 to 2 times this.
        payload_versions: payloads kept beyond the last checkpoint of their fragment.
        checkpoint_versions: between two states of a fragment on a region's disk, whose digests the ledger gets.
        summary_entries: between two sums of the ledger, which keeps at least so many behind the last one. With 24
            fragments 1,024 entries are some 40 versions of each and about 1 MB, enough for a region that was away for
            some minutes.
    """

    fragments: int = 24
    sync_every: int = 24
    overlap_steps: int = 2
    quorum_min: int = 0
    grace_gamma: float = 0.8
    rounds_in_flight_max: int = 2
    outer_lr: float = 0.5
    outer_momentum: float = 0.6
    merge: MergeRule = MergeRule.RDA
    codec_up: Codec = Codec.INT4
    codec_down: Codec = Codec.INT8
    carry: CarryMode = CarryMode.CARRY
    carry_steps_max: int = 0
    weight_cap: float = 2.0
    weight_share_max: float = 0.4
    tokens_ratio_max: float = 4.0
    tokens_max: int = 0
    steps_max: int = 0
    heartbeat_ns: int = 200_000_000
    election_timeout_ns: int = 1_000_000_000
    ballot_deadline_min_ns: int = 2_000_000_000
    payload_versions: int = 4
    checkpoint_versions: int = 4
    summary_entries: int = 1024

    @property
    def carry_steps_limit(self) -> int:
        """Steps up to which carry-over is exact."""
        return self.carry_steps_max or 4 * self.sync_every


@dataclass(frozen=True, slots=True)
class FolderLife:
    """A daemon's life in its state folder, as it tells it.

    Attributes:
        disk: the folder's id. life: starts of the folder so far, times 2^32, and random bits of this one.
        end_index: last entry of its log on disk when it began. commit_index: the last one now that is committed, too.
    """

    disk: bytes
    life: int
    end_index: int
    commit_index: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The content of a region's disk at its start.

    Attributes:
        term, voted_for: Raft's hard state; 0 and "" on an empty disk.
        entries: the ledger after `base`, hash chain checked.
        states: per fragment the newest version whose parameters and momentum are on disk (-1: none).
        payloads: (fragment, version, digest) of complete payload files.
        disk: the folder's id (DISK_ID_BYTES), made at random when it was; one that lost what it had gets another.
        state_digests: of `states`, as their files name them; empty where there is none. No tuple at all: unknown.
        base: what stands for the entries before the first one.
        life: of the folder (`FolderLife`), which begins with this start: two that are else equal are equal.
    """

    term: int
    voted_for: str
    entries: tuple[Entry, ...]
    states: tuple[int, ...]
    payloads: frozenset[tuple[int, int, bytes]]
    state_digests: tuple[bytes, ...] = ()
    base: LedgerBase = NO_BASE
    disk: bytes = bytes(16)
    life: int = field(default=0, compare=False)

    @property
    def settled_index(self) -> int:
        """Last entry whose round is in a state on disk; 0 if none is. It is committed: no other round is applied."""
        states = dict(enumerate(self.states))
        settled = (
            entry.index
            for entry in self.entries
            if isinstance(entry.body, RoundBody) and entry.body.version <= states.get(entry.body.fragment, -1)
        )
        return max(settled, default=0)
