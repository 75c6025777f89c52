"""The seam between shell and region core, all in one place: events are facts for the core, effects are its orders.

The shell and the simulator carry out the same effects. Rules that both keep:

1. Call the core from one place at a time. Effects are started in the order of the list.
2. `PersistLedger` is answered by `LedgerPersisted` with its token when it is fsynced, in the order of the tokens.
   Everything else may take any time and finish in any order.
3. An effect with an answer is answered exactly once, unless the process dies.
4. Bulk bytes stay in the shell; the core names them by (ballot, stripe), (fragment, version, digest) or Contribution.
5. Messages of the core to itself never leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.core.messages import MergedStripe, Message
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.projections import ContributionsProjected, Project, ProjectContributions, Projected
from diloco_node.core.types import Ballot, Contribution, Entry, LearnerStatus, LedgerBase, RateLimits, RoundBody, Stripe

# ==== events ==========================================================================================================


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The core's `wake_at_ns` has come."""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A control message from a peer; the name is the one in its certificate."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The connection to a peer came up or went down."""

    peer: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """This region's bandwidth ceilings, at start and whenever they change."""

    limits: RateLimits


@dataclass(frozen=True, slots=True)
class LedgerPersisted:
    """The answer to PersistLedger."""

    token: int


@dataclass(frozen=True, slots=True)
class InitialStateStored:
    """Theta_0 (from this region's learner or --init) is on this region's disk, fsynced: it may propose genesis."""

    fragment_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LearnerReported:
    """The learner finished an inner step or applied a version."""

    status: LearnerStatus


@dataclass(frozen=True, slots=True)
class LearnerAttached:
    """A learner process (or the same one, to a new daemon) is there.

    Attributes:
        status: where it stands; a fresh incarnation has base_version -1 everywhere.
        trained_before: what the persisted counters say of dead incarnations of this region's learner:
            (incarnation, steps, tokens) for each, so that what died can be booked as discarded.
        listing: of its frozen tensors, as genesis keeps it.
    """

    status: LearnerStatus
    trained_before: tuple[tuple[int, int, int], ...]
    listing: bytes = b""


@dataclass(frozen=True, slots=True)
class LearnerDetached:
    """The learner's connection ended."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The answer to TakeSnapshot: encoded and readable by this region's shell until the round is resolved."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """The answer to TakeSnapshot when the learner could not (non-finite values, base moved on, no steps)."""

    fragment: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionStripeArrived:
    """A whole stripe of a contribution is in this region's memory (also its own learner's).

    blocks: [start, stop), as its sender named them: only the ballot can tell whether `stripe` is there.
    """

    ballot: Ballot
    stripe: int
    contribution: Contribution
    blocks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReductionDone:
    """The answer to ReduceStripe; the merged stripe is in memory here."""

    ballot: Ballot
    stripe: int
    squared_norms: tuple[float, ...]
    contribution_norms: tuple[tuple[float, ...], ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class MergedStripeArrived:
    """A merged stripe is in this region's memory and matches its digest (also one that was reduced here).

    cut: who sent it, and its blocks. squared_norms: per piece, sum of squares of what was decoded here.
    """

    ballot: Ballot
    stripe: int
    fragment: int
    version: int
    digest: bytes
    cut: Stripe
    squared_norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PayloadStored:
    """A payload is on this region's disk, fsynced: by StorePayload, or by a fetch, which alone tells of norms."""

    fragment: int
    version: int
    digest: bytes
    squared_norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PayloadNotStored:
    """The merged stripes of the ballot are no longer all here: the other answer to StorePayload."""

    ballot: Ballot
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class StateStored:
    """Parameters and momentum of a fragment at a committed version are on this region's disk, fsynced (a fetch)."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """This region's own state of a fragment at a version is on its disk, fsynced. Nobody asked for it."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StatesRenamed:
    """The answer to SetStatesAside."""

    fragment: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A FetchPayload or FetchState came to nothing: refused, link lost, or wrong bytes."""

    peer: str
    fragment: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class VersionApplied:
    """The answer to ApplyVersion and AdoptState: this region's Theta and momentum of the fragment are at `version`."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class DigestComputed:
    """Some time after VersionApplied: hashing Theta and momentum takes longer than the outer step and nobody waits."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class FinishOrdered:
    """This region's operator wants the run to end now; its script if not `is_order` (`core.rounds.run_end`)."""

    reason: str
    is_order: bool = True


@dataclass(frozen=True, slots=True)
class FinalWritten:
    """The answer to WriteFinal."""


# fmt: off
Event = (
    TimerFired | MessageArrived | LinkChanged | BudgetChanged | LedgerPersisted | InitialStateStored | LearnerReported
    | LearnerAttached | LearnerDetached | SnapshotTaken | SnapshotRefused | ContributionStripeArrived | ReductionDone
    | MergedStripeArrived | PayloadStored | PayloadNotStored | StateStored | CheckpointWritten | StatesRenamed
    | FetchFailed | VersionApplied | DigestComputed | FinishOrdered | EntryOrdered | FinalWritten
    | ContributionsProjected
    | Projected
)
# fmt: on

DISK_EVENTS: Final = (InitialStateStored, PayloadStored, PayloadNotStored, StateStored, FetchFailed, VersionApplied)
"""Events that change what the disk holds or is about to hold: entries may wait for that."""

# ==== effects =========================================================================================================


@dataclass(frozen=True, slots=True)
class Send:
    """Put a control message on the link; silently lost if the link is down (the core repeats what matters)."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class PersistLedger:
    """Make term, vote and log durable, then answer LedgerPersisted(token).

    truncate_from: forget the entries from this index on before appending; 0 means none. base: then begin the ledger
    with this, and forget the entries up to it; None: leave its beginning as it is.
    """

    token: int
    term: int
    voted_for: str
    truncate_from: int
    entries: tuple[Entry, ...]
    base: LedgerBase | None = None


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask this region's learner for a snapshot of the fragment at its next step boundary.

    Answered by SnapshotTaken or SnapshotRefused. `version` is the round's new version; `base_version` what the core
    believes the learner has applied: the learner refuses if it is not so. A learner that still has an unresolved
    snapshot of this fragment against this base answers with that one again, the same bytes under the same name: another
    daemon, or another ballot, asks for the same round.
    """

    fragment: int
    version: int
    base_version: int


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Stream each stripe of the encoded contribution to its reducer (`ContributionStripe` headers).

    The own stripe is delivered locally as ContributionStripeArrived. Lost with the link; the ballot's deadline notices.
    skip: indexes into `stripes` that their reducers hold already, from an earlier ballot.
    """

    ballot: Ballot
    version: int
    contribution: Contribution
    stripes: tuple[Stripe, ...]
    skip: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReduceStripe:
    """Decode, weigh and sum in the given order, encode; answer ReductionDone.

    The bytes are found by contribution and block range: they may have arrived under an earlier ballot.
    """

    ballot: Ballot
    fragment: int
    version: int
    stripe: int
    block_start: int
    block_stop: int
    contributions: tuple[Contribution, ...]
    coefficients: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class SendMerged:
    """Stream the stripe reduced here to these peers."""

    header: MergedStripe
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StorePayload:
    """Write the ballot's merged stripes to disk, each from its reducer, in block order; fsync; answer PayloadStored, or
    PayloadNotStored."""

    ballot: Ballot
    fragment: int
    version: int
    digest: bytes
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class ApplyVersion:
    """Run the outer step of a committed round on Theta and momentum from the stored payload; answer VersionApplied."""

    body: RoundBody


@dataclass(frozen=True, slots=True)
class AdoptState:
    """Take the stored state (fetched, or Theta_0) of a fragment as Theta and momentum; answer VersionApplied."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class OfferVersion:
    """Hand Theta of the fragment at `version` to the learner, which applies it at its next step boundary.

    Attributes:
        included_snapshot: the learner's snapshot (of its incarnation) that the versions since its base include, or -1.
        is_last: the version is that of the run's last round of the fragment.
    """

    fragment: int
    version: int
    included_snapshot: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class FetchPayload:
    """Get a payload from the peer (PayloadRequested, transfer, check, store); answer PayloadStored or FetchFailed.

    `stripes` are those of the ledger's entry: the digest is over the digests of these parts.
    """

    peer: str
    fragment: int
    version: int
    digest: bytes
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class FetchState:
    """Get state from the peer (StateRequested, transfer, check, store); answer StateStored or FetchFailed.

    Anything else than the ledger names is refused with FetchFailed, and never stored.
    """

    peer: str
    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PruneFiles:
    """Payloads and states of the fragment before this version are not needed any more, here or by others."""

    fragment: int
    keep_from_version: int


@dataclass(frozen=True, slots=True)
class SetStatesAside:
    """States of the fragment from this version on are not what the ledger names: rename them; answer StatesRenamed."""

    fragment: int
    version_min: int


@dataclass(frozen=True, slots=True)
class CloseBallot:
    """Nothing more will be asked about this ballot: free its merged stripes.

    committed: contributions to this version (not to later ones) are freed; else they stay for the next ballot of the
    round.
    """

    ballot: Ballot
    fragment: int
    version: int
    committed: bool


@dataclass(frozen=True, slots=True)
class StopLearner:
    """The run is finished: tell the learner to take these versions, and to stop at its next step boundary."""

    reason: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteFinal:
    """All fragments are at their final versions: write final.safetensors; answer FinalWritten."""


@dataclass(frozen=True, slots=True)
class Note:
    """A decision and its reason, for log, status and dashboard. `kind` is a short stable word."""

    kind: str
    text: str
    fragment: int = -1
    version: int = -1
    is_alarm: bool = False


# fmt: off
Effect = (
    Send | PersistLedger | TakeSnapshot | SendContribution | ReduceStripe | SendMerged | StorePayload | ApplyVersion
    | AdoptState | OfferVersion | FetchPayload | FetchState | PruneFiles | SetStatesAside | CloseBallot | StopLearner
    | WriteFinal | Project | ProjectContributions | Note
)
# fmt: on
