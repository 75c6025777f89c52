"""Needs of a schedule, and whether the links can keep it.

In a round every region sends its contribution, stripe by stripe, to the reducers, and gets every merged stripe. With M
regions and equal stripes, each link carries 1/M of a contribution and 1/M of the merged fragment, and each region sends
and receives `(M - 1) / M` of both. A cycle is H inner steps, in which each of P fragments has one round.

Two things bound how fast cycles can follow each other, and neither depends on H:

- **bytes**: the busiest line must carry a cycle's bytes within the cycle;
- **rounds in flight**: a round lasts `8 one-way delays + 2 waits for a step boundary (half a step each, on average) +
  transfer`, and only `rounds_in_flight_max` are open at once.

Times are integer nanoseconds, rates integer bytes per second. Bytes are wire bytes unless a name says `payload`; the
overhead (headers, TLS, acknowledgements of what comes in) is a part of the payload, 6 % before it is measured. zstd is
not counted on: it depends on the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import Final

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import Codec, RunSettings
from diloco_node.numeric import NS_PER_S
from diloco_node.wire.learner_link import SPARE_SLOTS

ONE_WAY_DELAYS: Final = 8
"""Messages of a round, from due to commit: ballot, contribution, held, decision, merged, held, append, commit."""

BOUNDARIES_HALF_STEPS: Final = 2
"""Two waits for a step boundary, before the snapshot and before the apply, each half a step on average."""

OVERHEAD: Final = Fraction(6, 100)
VALUE_BYTES: Final = 4
STATE_BYTES: Final = 8
"""Parameters and momentum, float32."""

STATES_KEPT: Final = 2
"""On disk. A third one of a fragment goes when a majority has told its digest, in a second or so. With a round each 0.1
s several of 24 fragments have one, each a third of a byte a parameter."""

MOMENT_BYTES: Final = 8
"""Two moments of the learner, copied before they are written; the memory stays for the next checkpoint."""

FREED_BYTES: Final = 256 * 2**20
"""Freed memory that a daemon keeps, at most (`daemon.process_setup`), whatever the model."""

LEARNER_CHECKPOINTS_KEPT: Final = 2
"""On disk: the older one goes before the next one is written."""

GPU_ROOMS: Final = 6
"""Fragments for which a learner on a GPU has memory there, and as much of the host's."""


@dataclass(frozen=True, slots=True)
class FragmentSize:
    """A fragment. values: float32 values in it. encoded: payload bytes of all of it, with scales, in each codec."""

    values: int
    encoded: Mapping[Codec, int]


@dataclass(frozen=True, slots=True)
class Workload:
    """The model to train, and how often it is merged.

    fragments: by index; their number is P, whatever `settings.fragments` says. step_time_ns: compute of one inner step.
    overhead: wire bytes that come on top of each payload byte.

    Raises ValueError: no fragments, no or repeated regions, or a step time that is not positive.
    """

    fragments: tuple[FragmentSize, ...]
    regions: tuple[str, ...]
    settings: RunSettings
    step_time_ns: int
    overhead: Fraction = OVERHEAD

    def __post_init__(self) -> None:
        if not self.fragments or not self.regions or len(set(self.regions)) != len(self.regions):
            raise ValueError(f"{len(self.fragments)} fragments in regions {self.regions} are no workload")
        if self.step_time_ns < 1 or self.overhead < 0:
            raise ValueError(f"step time {self.step_time_ns} ns or overhead {self.overhead} is out of range")

    @property
    def values(self) -> int:
        """Parameters of the model."""
        return sum(fragment.values for fragment in self.fragments)

    @property
    def cycle_ns(self) -> int:
        """H steps."""
        return self.settings.sync_every * self.step_time_ns

    def largest(self, codec: Codec) -> int:
        """Payload bytes of the largest fragment."""
        return max(fragment.encoded[codec] for fragment in self.fragments)

    def total(self, codec: Codec) -> int:
        """Payload bytes of all fragments."""
        return sum(fragment.encoded[codec] for fragment in self.fragments)

    def wire(self, payload_bytes: int) -> int:
        """Wire bytes that carry this payload, rounded up."""
        return -(-payload_bytes * (self.overhead.denominator + self.overhead.numerator) // self.overhead.denominator)


@dataclass(frozen=True, slots=True)
class Network:
    """Limits of the links, in wire bytes per second. A link that is not named has none.

    rtt_ns: between the two regions that are farthest apart: a round waits for the slowest. egress, ingress: per region,
    all its peers together. links: per (from, to). is_budgeted: egress and ingress are budgets; False: they are the
    lines as far as measured links show them.
    """

    rtt_ns: int
    egress: Mapping[str, int] = field(default_factory=dict)
    ingress: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    is_budgeted: bool = True

    @property
    def has_limits(self) -> bool:
        """Something can be too slow."""
        return bool(self.egress or self.ingress or self.links)

    def with_budget(self, bytes_per_s: int) -> Network:
        """The same, with this for every region's egress and ingress that has a limit."""
        return replace(
            self, egress=dict.fromkeys(self.egress, bytes_per_s), ingress=dict.fromkeys(self.ingress, bytes_per_s)
        )

    def with_budget_at_least(self, bytes_per_s: int) -> Network:
        """The same, with every region's egress and ingress that is lower raised to this."""
        return replace(
            self,
            egress={region: max(rate, bytes_per_s) for region, rate in self.egress.items()},
            ingress={region: max(rate, bytes_per_s) for region, rate in self.ingress.items()},
        )


class FlowKind(StrEnum):
    """The part of the network that a flow passes through."""

    EGRESS = "egress"
    INGRESS = "ingress"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Flow:
    """The bytes through one region's egress or ingress, or over one link from `region` to `peer`, else "".

    cycle_up, cycle_down: wire bytes of a whole cycle, of contributions and of merged stripes. largest: of both together
    in the round of the largest fragment. limit_bytes_per_s: None: unlimited.
    """

    kind: FlowKind
    region: str
    peer: str
    cycle_up: int
    cycle_down: int
    largest: int
    limit_bytes_per_s: int | None

    @property
    def cycle(self) -> int:
        """Wire bytes of a whole cycle."""
        return self.cycle_up + self.cycle_down

    def duration_ns(self, size_bytes: int) -> int:
        """Time of so many bytes at the limit, rounded up; 0 without one."""
        return 0 if self.limit_bytes_per_s is None else -(-size_bytes * NS_PER_S // self.limit_bytes_per_s)

    def __str__(self) -> str:
        if self.kind is FlowKind.LINK:
            return f"link {self.region} to {self.peer}"
        return f"{self.kind} of {self.region}"


def list_flows(workload: Workload, network: Network) -> tuple[Flow, ...]:
    """Egress and ingress of every region, then every link, in order of names. A region alone has no traffic."""
    settings = workload.settings
    regions = sorted(workload.regions)
    count, peers = len(regions), len(regions) - 1
    up, down = (-(-workload.total(codec) // count) for codec in (settings.codec_up, settings.codec_down))
    largest = sum(-(-workload.largest(codec) // count) for codec in (settings.codec_up, settings.codec_down))

    def flow(kind: FlowKind, region: str, peer: str, times: int, limit: int | None) -> Flow:
        cycle_up, cycle_down, round_bytes = (workload.wire(times * size) for size in (up, down, largest))
        return Flow(kind, region, peer, cycle_up, cycle_down, round_bytes, limit)

    egress = [flow(FlowKind.EGRESS, name, "", peers, network.egress.get(name)) for name in regions]
    ingress = [flow(FlowKind.INGRESS, name, "", peers, network.ingress.get(name)) for name in regions]
    links = [
        flow(FlowKind.LINK, sender, receiver, 1, network.links.get((sender, receiver)))
        for sender in regions
        for receiver in regions
        if sender != receiver
    ]
    return (*egress, *ingress, *links)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round of a fragment of mean size, from due to applied.

    latency_ns: eight one-way delays. boundary_ns: waits for step boundaries, on average. transfer_ns: contributions and
    then merged stripes at the limits of the slowest line; 0 without limits. overlap_ns: tau steps: what it should take
    at most.
    """

    latency_ns: int
    boundary_ns: int
    transfer_ns: int
    overlap_ns: int

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.latency_ns + self.boundary_ns + self.transfer_ns

    @property
    def is_hidden(self) -> bool:
        """It is over within tau steps."""
        return self.total_ns <= self.overlap_ns


@dataclass(frozen=True, slots=True)
class CycleNeed:
    """The shortest cycle that links and rounds in flight can keep.

    bytes_ns: for the bytes of the busiest line; 0 without limits. flight_ns: for P rounds, `rounds_in_flight_max` at a
    time. busiest: the line with the least room; None without limits.
    """

    bytes_ns: int
    flight_ns: int
    busiest: Flow | None
    round_time: RoundTime

    @property
    def cycle_ns(self) -> int:
        """The longer of both."""
        return max(self.bytes_ns, self.flight_ns)


def cycle_need(workload: Workload, network: Network, flows: Sequence[Flow]) -> CycleNeed:
    """Return what a cycle takes at least; it does not depend on H. flows: `list_flows` of the same two."""
    limited_flows = [flow for flow in flows if flow.limit_bytes_per_s is not None]
    busiest = max(limited_flows, key=lambda flow: flow.duration_ns(flow.cycle), default=None)
    up_ns = max((flow.duration_ns(flow.cycle_up) for flow in limited_flows), default=0)
    down_ns = max((flow.duration_ns(flow.cycle_down) for flow in limited_flows), default=0)
    count = len(workload.fragments)
    round_time = RoundTime(
        latency_ns=ONE_WAY_DELAYS * network.rtt_ns // 2,
        boundary_ns=BOUNDARIES_HALF_STEPS * workload.step_time_ns // 2,
        transfer_ns=-(-(up_ns + down_ns) // count),
        overlap_ns=workload.settings.overlap_steps * workload.step_time_ns,
    )
    # One region alone commits without anybody: nothing to wait for.
    flight_ns = -(-count * round_time.total_ns // workload.settings.rounds_in_flight_max)
    return CycleNeed(
        bytes_ns=0 if busiest is None else busiest.duration_ns(busiest.cycle),
        flight_ns=flight_ns if len(workload.regions) > 1 else 0,
        busiest=busiest,
        round_time=round_time,
    )


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that one region needs.

    Attributes:
        daemon: momentum.
        restart: more, after a start of the daemon: the parameters, each fragment's until its next round.
        base: more, where a learner's base is not the daemon's copy: its types or `[learner] encode` don't let it.
        copies: of AdamW's moments in the learner, for its checkpoints.
        rooms: more, of a learner on a GPU, for fragments on their way: page-locked, and as much on the GPU.
        shared: memory that both see: the parameters, fragments on their way in, encoded contributions on their way out.
        freed: memory that the daemon has freed and keeps for the next round, at most.
        rounds: snapshots, held stripes, sums and merged stripes of the rounds in flight, at the largest fragment.
        checkpoints: on disk, the region's states and the learner's checkpoints.
        payloads: merged fragments kept on disk for regions that come back, at their largest number.
    """

    daemon: int
    restart: int
    base: int
    copies: int
    rooms: int
    shared: int
    freed: int
    rounds: int
    checkpoints: int
    payloads: int

    @property
    def memory(self) -> int:
        """All that is in RAM, but for `restart`, `base` and `rooms`."""
        return self.daemon + self.copies + self.shared + self.freed + self.rounds

    @property
    def disk(self) -> int:
        """All that is on disk."""
        return self.checkpoints + self.payloads


def storage(workload: Workload) -> Storage:
    """Memory and disk of a region."""
    settings, values, regions = workload.settings, workload.values, len(workload.regions)
    largest = max(fragment.values for fragment in workload.fragments)
    up, down = workload.largest(settings.codec_up), workload.largest(settings.codec_down)
    round_bytes = VALUE_BYTES * largest + up + -(-4 * largest // regions) + down
    # From the older snapshot, or before it, until the next one.
    versions = max(settings.payload_versions, settings.checkpoint_versions) + settings.checkpoint_versions
    slots = len(workload.fragments) + SPARE_SLOTS
    return Storage(
        daemon=VALUE_BYTES * values,
        restart=VALUE_BYTES * values,
        base=VALUE_BYTES * values,
        copies=MOMENT_BYTES * values,
        rooms=GPU_ROOMS * VALUE_BYTES * largest,
        shared=VALUE_BYTES * largest * slots + workload.total(settings.codec_up),
        freed=FREED_BYTES,
        rounds=min(settings.rounds_in_flight_max, len(workload.fragments)) * round_bytes,
        checkpoints=(STATES_KEPT * STATE_BYTES + LEARNER_CHECKPOINTS_KEPT * MOMENT_BYTES) * values,
        payloads=versions * workload.total(settings.codec_down),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """All that can be said about a workload on a network, for every region and link. storage: of one region."""

    workload: Workload
    network: Network
    flows: tuple[Flow, ...]
    need: CycleNeed
    storage: Storage

    @property
    def fits(self) -> bool:
        """Each fragment gets its round every H steps."""
        return self.need.cycle_ns <= self.workload.cycle_ns

    @property
    def slack(self) -> Fraction:
        """Part of the cycle that is left over; negative when it is too short."""
        return 1 - Fraction(self.need.cycle_ns, self.workload.cycle_ns)

    @property
    def sync_every_kept(self) -> Fraction:
        """Steps between two rounds of a fragment as it will be: H, or what the network makes of it."""
        cycle_ns = max(self.need.cycle_ns, self.workload.cycle_ns)
        return Fraction(cycle_ns, self.workload.step_time_ns)

    def average(self, flow: Flow) -> Fraction:
        """Wire bytes per second over a cycle of H steps."""
        return Fraction(flow.cycle * NS_PER_S, self.workload.cycle_ns)

    def peak(self, flow: Flow) -> Fraction | None:
        """The rate at which rounds of the largest fragment end within tau steps, as many at once as then overlap. None:
        no rate is enough, because delays and step boundaries alone take tau steps."""
        round_time = self.need.round_time
        window_ns = round_time.overlap_ns - round_time.latency_ns - round_time.boundary_ns
        if window_ns <= 0:
            return None
        overlapping = -(-window_ns * len(self.workload.fragments) // self.workload.cycle_ns)
        at_once = min(overlapping, self.workload.settings.rounds_in_flight_max)
        return max(Fraction(at_once * flow.largest * NS_PER_S, window_ns), self.average(flow))


def make_plan(workload: Workload, network: Network) -> Plan:
    """Do the arithmetic; `planning.advice` says what to change."""
    flows = list_flows(workload, network)
    return Plan(workload, network, flows, cycle_need(workload, network, flows), storage(workload))


def fragment_sizes(manifest: Manifest) -> tuple[FragmentSize, ...]:
    """The size of each fragment of a model, to the byte, by fragment index; zstd is not counted."""
    return tuple(_size(fragment.piece_sizes) for fragment in manifest.fragments)


def even_sizes(values: int, fragments: int) -> tuple[FragmentSize, ...]:
    """A model of which only the size is known, cut into P equal fragments of one piece each. Raises ValueError: fewer
    values than fragments, or no fragment."""
    if not 1 <= fragments <= values:
        raise ValueError(f"{values} values can't be cut into {fragments} fragments")
    size, remainder = divmod(values, fragments)
    large, small = _size((size + 1,)), _size((size,))
    return (large,) * remainder + (small,) * (fragments - remainder)


def _size(pieces: tuple[int, ...]) -> FragmentSize:
    return FragmentSize(sum(pieces), {codec: FragmentBlocks(pieces, codec).encoded_bytes for codec in Codec})
