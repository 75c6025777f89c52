"""An open round as the leader sees it: its current ballot, and the answers to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from diloco_node.core.merge.numbers import MergeNumbers, is_same_norm
from diloco_node.core.merge.weights import SQUARED_NORM_MAX
from diloco_node.core.messages import AuditDrawn, BallotOpened, MergeDecided, Receipt, ReductionReported
from diloco_node.core.projections import Window
from diloco_node.core.rounds.suspicion import BallotRole
from diloco_node.core.types import Ballot, Contribution, Stripe


def payload_digest(stripe_digests: Sequence[bytes]) -> bytes:
    """Return the digest that names a merged payload: SHA-256 over its stripes' digests in block order."""
    return hashlib.sha256(b"".join(stripe_digests)).digest()


def cuts_of(stripes: Sequence[Stripe]) -> tuple[tuple[int, int], ...]:
    """Return how a fragment is cut, whoever reduces what."""
    return tuple((stripe.block_start, stripe.block_stop) for stripe in stripes)


@dataclass(frozen=True, slots=True)
class QuestionedBallot:
    """A merged ballot whose norms do not add up: the leader reduces the same stripes itself to see who is wrong."""

    stripes: tuple[Stripe, ...]
    reports: tuple[ReductionReported, ...]
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a ballot may take from its opening, and why (`derivation`), in one line for log and status."""

    duration_ns: int
    derivation: str


@dataclass(slots=True)
class OpenRound:
    """The round that takes one fragment to one version, with the current ballot.

    Attributes:
        opened_at_ns: of the first ballot; attempt counts the ballots from 0.
        is_last: it is the run's last round of this fragment.
        announcement, ballot_at_ns, deadline: the current ballot, as it was announced.
        contributions: by learner, judged and named in this ballot. refusals: of the other members, with the reason.
        receipts: per learner and stripe (incarnation, snapshot) of the contribution that its reducer has.
        reports: of the merged stripes, by stripe. checked: stripes whose bytes were compared with them here.
        judged: what was known of the merged stripes when nothing was wrong with them.
        holders: regions that have the merged payload on disk, with its digest.
        merged_digests: per region the digests of the merged stripes that it claims to have.
        draws: per region the nonce that it told. nonces, windows: of the audit, once it is drawn; without a window the
            payload is not audited.
        projections: per member what it told of its contribution, in the windows of an audited payload.
        own_rows: by windows, this region's projections of all contributions. projecting: windows they are asked for in.
        audit_lack: what of the audit is on its way, once a majority and the leader have the payload; empty: nothing.
        question: the ballot before, if its norms did not add up.
        trials: suspects, each with the role in which this ballot tries it.
        renamers: members that gave their contribution another name in this round.
        rejections: learners that may not be in any ballot of this round, each with the reason.
        exclusions: reducers that held up a ballot of this round.
        is_proposed: it is in the leader's log; nothing is changed any more.
        beats: heartbeats since the ballot was announced. repeat_at: at which of them it is announced again.
        held_since_ns: when a majority had the payload of this ballot, and the leader had not.
    """

    opened_at_ns: int
    is_last: bool
    announcement: BallotOpened
    ballot_at_ns: int
    deadline: Deadline
    attempt: int = 0
    contributions: dict[str, Contribution] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    receipts: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    decision: MergeDecided | None = None
    numbers: MergeNumbers | None = None
    reports: dict[int, ReductionReported] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    judged: object = None
    holders: dict[str, bytes] = field(default_factory=dict)
    merged_digests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    draws: dict[str, AuditDrawn] = field(default_factory=dict)
    nonces: tuple[bytes, ...] = ()
    windows: tuple[Window, ...] = ()
    projections: dict[str, tuple[float, ...]] = field(default_factory=dict)
    own_rows: dict[tuple[Window, ...], tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    projecting: set[tuple[Window, ...]] = field(default_factory=set)
    audit_lack: str = ""
    question: QuestionedBallot | None = None
    trials: tuple[tuple[str, BallotRole], ...] = ()
    renamers: set[str] = field(default_factory=set)
    rejections: dict[str, str] = field(default_factory=dict)
    exclusions: set[str] = field(default_factory=set)
    is_proposed: bool = False
    beats: int = 0
    repeat_at: int = 1
    held_since_ns: int | None = None

    def begin_ballot(
        self, announcement: BallotOpened, *, deadline: Deadline, contributions: dict[str, Contribution], now_ns: int
    ) -> None:
        """Begin the next ballot. Answers to the ballot before are forgotten; rejections and exclusions stay."""
        self.announcement, self.deadline, self.ballot_at_ns = announcement, deadline, now_ns
        self.beats, self.repeat_at = 0, 1
        self.attempt += 1
        self.contributions = contributions
        self.refusals, self.receipts, self.reports, self.holders, self.merged_digests = {}, {}, {}, {}, {}
        self.draws, self.nonces, self.windows, self.audit_lack = {}, (), (), ""
        self.checked, self.projections, self.own_rows, self.projecting = set(), {}, {}, set()
        self.decision, self.numbers, self.judged, self.trials, self.held_since_ns = None, None, None, (), None

    def asks_again(self, *, spacing_max: int) -> bool:
        """Count a heartbeat; whether the ballot is announced again in it, after 1, 2, 4 and so on of them.

        spacing_max: most heartbeats between two times, for the answers grow with the square of the regions.
        """
        self.beats += 1
        if self.beats < self.repeat_at:
            return False
        self.repeat_at = self.beats + min(self.beats, spacing_max)
        return True

    @property
    def fragment(self) -> int:
        """The index of its fragment."""
        return self.announcement.fragment

    @property
    def version(self) -> int:
        """The version that the round makes."""
        return self.announcement.version

    @property
    def ballot(self) -> Ballot:
        """The number of the current ballot."""
        return self.announcement.ballot

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the current ballot."""
        return self.announcement.members

    @property
    def stripes(self) -> tuple[Stripe, ...]:
        """Stripes of the current ballot, in block order."""
        return self.announcement.stripes

    @property
    def deadline_ns(self) -> int:
        """When the current ballot is given up."""
        return self.ballot_at_ns + self.deadline.duration_ns

    @property
    def reducers(self) -> tuple[str, ...]:
        """Reducers of the current ballot, each once, in the order of their stripes."""
        return tuple(dict.fromkeys(stripe.reducer for stripe in self.stripes))

    @property
    def is_merged(self) -> bool:
        """Whether every reducer has reported its merged stripes."""
        return self.decision is not None and len(self.reports) == len(self.stripes)

    @property
    def digest(self) -> bytes:
        """The digest of the merged payload, once `is_merged`."""
        return payload_digest([self.reports[index].digest for index in range(len(self.stripes))])

    def payload_holders(self) -> list[str]:
        """Return regions that have this very payload on disk, sorted; once `is_merged`."""
        own_digest = self.digest
        return [name for name, digest in sorted(self.holders.items()) if digest == own_digest]

    def has_stripes_of(self, reducer: str, region: str) -> bool:
        """Whether a region claims to have all merged stripes of a reducer, with the digests that the reducer told."""
        if self.holders.get(region) == self.digest:
            return True
        digests = self.merged_digests.get(region)
        return digests is not None and all(
            digests[index] == self.reports[index].digest for index in self.stripes_of(reducer)
        )

    def has_other_stripes_of(self, reducer: str, region: str) -> bool:
        """Whether a region received a merged stripe of a reducer with another digest than the reducer told."""
        digests = self.merged_digests.get(region)
        return digests is not None and any(
            digests[index] and digests[index] != self.reports[index].digest for index in self.stripes_of(reducer)
        )

    def stripes_of(self, reducer: str) -> list[int]:
        """Return the stripes that a reducer merges: indexes into `stripes`."""
        return [index for index, stripe in enumerate(self.stripes) if stripe.reducer == reducer]

    def late_reducers(self) -> tuple[str, ...]:
        """Return reducers that lack a report, each once, in the order of the stripes."""
        late = (stripe.reducer for index, stripe in enumerate(self.stripes) if index not in self.reports)
        return tuple(dict.fromkeys(late))

    def missing_members(self) -> tuple[str, ...]:
        """Return members that have neither contributed nor declined."""
        return tuple(name for name in self.members if name not in self.contributions and name not in self.refusals)

    def on_receipts(self, reducer: str, receipts: Sequence[Receipt]) -> None:
        """File that contributions of members have arrived at a reducer."""
        for receipt in receipts:
            if receipt.learner in self.members:
                names = self.receipts.setdefault(receipt.learner, {})
                names |= dict.fromkeys(self.stripes_of(reducer), (receipt.incarnation, receipt.snapshot))

    def on_report(self, report: ReductionReported) -> None:
        """File a merged stripe: every contribution to it has arrived at its reducer."""
        assert self.decision is not None
        self.reports[report.stripe] = report
        for contribution in self.decision.contributions:
            names = self.receipts.setdefault(contribution.learner, {})
            names[report.stripe] = contribution.incarnation, contribution.snapshot

    def is_received(self, learner: str, stripes: Sequence[int] | None = None) -> bool:
        """Whether a learner's contribution to this ballot has arrived at all reducers, or at those of these stripes."""
        contribution = self.contributions.get(learner)
        if contribution is None:
            return False
        indexes = range(len(self.stripes)) if stripes is None else stripes
        names, name = self.receipts.get(learner, {}), (contribution.incarnation, contribution.snapshot)
        return all(names.get(index) == name for index in indexes)

    @property
    def phase(self) -> str:
        """The phase of the round, one of `view.PHASES`."""
        if self.decision is None:
            return "gather"
        return "commit" if self.is_proposed else "reduce"

    def late_regions(self, regions: Sequence[str]) -> tuple[str, ...]:
        """Return the regions that the round waits for. regions: all of the run."""
        if self.decision is None:
            return self.missing_members()
        if self.is_merged:
            return tuple(name for name in regions if name not in self.holders)
        return self._late_contributors() or self.late_reducers()

    def _late_contributors(self) -> tuple[str, ...]:
        learners = [contribution.learner for contribution in self.decision.contributions] if self.decision else []
        return tuple(name for name in learners if not self.is_received(name))

    def wait_reason(self) -> str:
        """Return what the round waits for, in words."""
        if self.is_proposed:
            return "waits for its ledger entry to commit"
        if self.decision is None:
            return f"waits for contributions of {', '.join(self.missing_members())}"
        if not self.is_merged:
            late = self._late_contributors()
            on_the_way = f", stripes of {', '.join(late)} are on their way" if late else ""
            return f"waits for merged stripes of {', '.join(self.late_reducers())}{on_the_way}"
        if self.audit_lack:
            return f"waits for {self.audit_lack}, to audit the payload"
        names = ", ".join(sorted(self.holders)) or "nobody"
        return f"waits until a majority and the leader have the payload on disk; so far {names}"

    def report_fault(self, peer: str, report: ReductionReported, pieces: int) -> str:
        """Return why a reducer's report is unusable; empty if it is fine."""
        assert self.decision is not None
        if not 0 <= report.stripe < len(self.stripes) or self.stripes[report.stripe].reducer != peer:
            return f"stripe {report.stripe} is not reduced by {peer}"
        rows = (report.squared_norms, *report.contribution_norms)
        if len(rows) != 1 + len(self.decision.contributions) or any(len(row) != pieces for row in rows):
            return "norms of another shape"
        # Of a merged stripe it is a little more than of the contributions, for its values are rounded.
        if not all(0.0 <= norm <= 4.0 * SQUARED_NORM_MAX for row in rows for norm in row):
            return "norms that are negative, not finite or beyond all bounds"
        return ""

    def norm_mismatch(self) -> tuple[str, ...]:
        """Return learners whose stripes do not add up to the norms in the header of their contribution."""
        assert self.decision is not None
        learners = []
        for place, contribution in enumerate(self.decision.contributions):
            for piece, claim in enumerate(contribution.squared_norms):
                total = sum(self.reports[index].contribution_norms[place][piece] for index in range(len(self.stripes)))
                if not is_same_norm(total, claim):
                    learners.append(contribution.learner)
                    break
        return tuple(learners)

    def merged_squared_norms(self) -> tuple[float, ...]:
        """Return the squared norm of the decoded payload per piece, added in the order of the stripes."""
        columns = zip(*(self.reports[index].squared_norms for index in range(len(self.stripes))), strict=True)
        return tuple(fsum(column) for column in columns)
