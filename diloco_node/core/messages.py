"""Messages between regions in the control lane. Frozen facts; encoding and limits are `wire`'s business.

The sender is never in a message: it is what the certificate of the link says. Bulk bytes (stripes, payloads, state)
travel as transfers with a `BulkHeader` in the bulk lane; the cores see only their headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.core.member_kind import Membership
from diloco_node.core.types import (
    NO_LIMITS,
    Ballot,
    Contribution,
    DiscardedBody,
    Entry,
    FolderLife,
    FragmentDigest,
    LearnerStatus,
    RateLimits,
    Stripe,
)


@dataclass(frozen=True, slots=True)
class RequestVote:
    """A candidate asks for a vote, or (pre_vote) whether it would get one. A pre-vote changes nobody's state.

    Attributes:
        disk: the candidate's folder.
        has_view: its log names the folders that count. Without, it founds the run and needs every vote.
    """

    term: int
    pre_vote: bool
    last_index: int
    last_term: int
    disk: bytes
    has_view: bool


@dataclass(frozen=True, slots=True)
class RequestVoteReply:
    """The answer; `term` is the term asked about if granted, else the voter's own. `disk` is the voter's folder."""

    term: int
    pre_vote: bool
    granted: bool
    disk: bytes


@dataclass(frozen=True, slots=True)
class AppendEntries:
    """The leader's heartbeat, with entries if the follower lacks some. `sequence` comes back in the answer."""

    term: int
    sequence: int
    previous_index: int
    previous_hash: bytes
    entries: tuple[Entry, ...]
    commit_index: int


@dataclass(frozen=True, slots=True)
class AppendEntriesReply:
    """Answered at once, whether or not a payload is on its way.

    Attributes:
        accepted: the previous entry matched.
        durable_index: the last index that is on the follower's disk *with its payload* and matches the leader's log;
            if not accepted, a hint where to look for the common part.
        durable_hash: the hash of that entry if accepted: what is counted is this very entry. If not accepted, 32 zero
            bytes; or the follower's entry there, beside which the leader's can't be.
        disk: the follower's folder.
    """

    term: int
    sequence: int
    accepted: bool
    durable_index: int
    durable_hash: bytes
    disk: bytes


@dataclass(frozen=True, slots=True)
class BaseSent:
    """Leader to a follower whose next entry is summed up: begin your ledger with this. AppendEntriesReply answers it.

    Attributes:
        sequence: as in AppendEntries.
        index, base_term, hash: of the last entry that is summed up.
        summary: of the entries up to there (`LedgerBase.summary`).
    """

    term: int
    sequence: int
    index: int
    base_term: int
    hash: bytes
    summary: bytes


@dataclass(frozen=True, slots=True)
class TimeoutNow:
    """Leader to all: the successor may stand for election at once, no pre-vote; the others may vote for it."""

    term: int
    successor: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To all every second `heartbeat_ns`, rarer beyond nine regions; to the leader also in between where there is news,
    and at once when the learner is due.

    Attributes:
        sequence: grows by one with each heartbeat of one daemon process.
        echo, echo_delay_ns: the highest sequence received from the receiver, and how long ago: for the round-trip time.
        hears: regions whose heartbeats arrive here, sorted. learner: None while none is attached.
        applied_index: the last ledger entry this region has applied.
        digests: of fragments that changed version since the last heartbeats (a few, repeated for some time).
        budget: this region's ceilings now; the leader cuts stripes by them.
        leaving: the region is about to stop, as its operator or its cloud wants: no fault if nothing more comes.
        folder: the first message on each link tells it, so before any vote.
    """

    sequence: int
    echo: int
    echo_delay_ns: int
    hears: tuple[str, ...]
    learner: LearnerStatus | None
    applied_index: int
    digests: tuple[FragmentDigest, ...]
    budget: RateLimits = NO_LIMITS
    leaving: bool = False
    folder: FolderLife | None = None


@dataclass(frozen=True, slots=True)
class ReusedStripe:
    """The learner's contribution is on the reducer of this stripe already, from an earlier ballot of the round."""

    learner: str
    stripe: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A region that takes no part in the leader's ballots for a while.

    Attributes:
        part: member or reducer. reason: why, in words.
    """

    region: str
    part: str
    reason: str


@dataclass(frozen=True, slots=True)
class BallotOpened:
    """Leader to all: a round to take fragment to `version`; members contribute, stripes say who reduces what.

    Repeated to a region until it reports PayloadDurable. A repetition is a question: the region repeats everything that
    it has reported in this ballot so far.

    Attributes:
        reused: what members need not send again; the stripe is an index into `stripes`.
        left_out: for the status of every region, and a first hint for the next leader.
        commitment: of the leader to its nonce (`core.rounds.audit_draw`).
    """

    ballot: Ballot
    fragment: int
    version: int
    members: tuple[str, ...]
    stripes: tuple[Stripe, ...]
    reused: tuple[ReusedStripe, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    commitment: bytes = b""


@dataclass(frozen=True, slots=True)
class Contributed:
    """Member to leader: the snapshot is taken and encoded, its stripes are on their way to the reducers."""

    ballot: Ballot
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Declined:
    """Member to leader: it will not contribute to this ballot, and why."""

    ballot: Ballot
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A contribution, by its name: a learner that died has left stripes of an older one."""

    learner: str
    incarnation: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class StripesReceived:
    """Reducer to leader: of these contributions every stripe that is reduced there has arrived whole."""

    ballot: Ballot
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class MergeDecided:
    """Leader to reducers: merge exactly these, sorted by learner, with these coefficients.

    coefficients: per contribution, per piece of the fragment, float32: `sum = sum_m c[m][piece] * decode(delta_m)`.
    """

    ballot: Ballot
    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    coefficients: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ReductionReported:
    """Reducer to leader: its merged stripe is on its way to every region.

    Attributes:
        stripe: index into the ballot's stripes.
        squared_norms: per piece, sum of squares of the *decoded* merged stripe.
        contribution_norms: per contribution, per piece, the part of its squared norm that lies in this stripe.
        digest: BLAKE3 of the encoded stripe before zstd.
    """

    ballot: Ballot
    stripe: int
    squared_norms: tuple[float, ...]
    contribution_norms: tuple[tuple[float, ...], ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class MergedReceived:
    """Region to leader, when a ballot is announced again: the merged stripes that are here.

    So the leader sees whose stripes come to nobody, and who tells it another digest than it sends around.

    Attributes:
        digests: one per stripe of the ballot; empty for a stripe that is not here.
    """

    ballot: Ballot
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PayloadDurable:
    """Region to leader: all merged stripes of the ballot are on its disk, fsynced."""

    ballot: Ballot
    digest: bytes


@dataclass(frozen=True, slots=True)
class AuditDrawn:
    """Drawer to all, once all merged stripes are there: its nonce. Leader to all if the payload is audited: all nonces.

    digest: of the merged payload, which is fixed. nonces: the leader's first.
    """

    ballot: Ballot
    digest: bytes
    nonces: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ContributionProjected:
    """Member to leader: the projections of its own contribution, per window of the audit (`core.merge.freivalds`)."""

    ballot: Ballot
    projections: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """To all, repeated until the run closes: this region wants the end (one last round per fragment).

    is_order: its operator says so, and that is enough; else its script does, and a majority of regions must.
    """

    reason: str
    is_order: bool = True


@dataclass(frozen=True, slots=True)
class DiscardReported:
    """Region to all, repeated until they are in the ledger: steps of its learner that no merge will ever include.

    Voters pass it on to the leader, which books what a majority can bear out. They are of a dead incarnation after its
    last inclusion, or were thrown away by `overwrite`.
    """

    bodies: tuple[DiscardedBody, ...]


@dataclass(frozen=True, slots=True)
class PayloadRequested:
    """Send me this payload (bulk transfer of kind PAYLOAD), or answer Refused."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateRequested:
    """Send me parameters and momentum of a fragment at this version with this digest (kind STATE), or Refused."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request that can't be met, and why (`gone`, `unknown`, `busy`)."""

    fragment: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class RosterShown:
    """To whoever may be behind: the members after the last change, former ones too, and the signature of the run's
    authority over them (`core.ledger.roster.Roster`)."""

    changes: int
    members: tuple[Membership, ...]
    signature: bytes


# fmt: off
Message = (
    RequestVote | RequestVoteReply | AppendEntries | AppendEntriesReply | BaseSent | TimeoutNow | Heartbeat
    | BallotOpened | Contributed | Declined | StripesReceived | MergeDecided | ReductionReported | MergedReceived
    | PayloadDurable | AuditDrawn | ContributionProjected | FinishRequested | DiscardReported | PayloadRequested
    | StateRequested | Refused | RosterShown
)
# fmt: on

# A tuple: a union of types takes `isinstance` ten times as long, and each message is asked.
LEDGER_MESSAGES: Final = (RequestVote, RequestVoteReply, AppendEntries, AppendEntriesReply, BaseSent, TimeoutNow)


@dataclass(frozen=True, slots=True)
class ContributionStripe:
    """Header: one stripe of one contribution, from a member to a reducer.

    The block range is in it because the header may overtake the BallotOpened that explains the stripe's number, and
    because a reducer keeps the bytes for a later ballot with the same range.
    """

    ballot: Ballot
    stripe: int
    version: int
    contribution: Contribution
    block_start: int
    block_stop: int


@dataclass(frozen=True, slots=True)
class MergedStripe:
    """Header: one merged stripe, from its reducer to a region."""

    ballot: Ballot
    stripe: int
    fragment: int
    version: int
    digest: bytes
    block_start: int
    block_stop: int


@dataclass(frozen=True, slots=True)
class Payload:
    """Header: the whole merged payload of a committed or held round, from any holder."""

    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class State:
    """Header: float32 parameters, then float32 momentum, of a fragment at a committed version."""

    fragment: int
    version: int
    digest: bytes


BulkHeader = ContributionStripe | MergedStripe | Payload | State
