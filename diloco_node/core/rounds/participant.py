"""What every region does for rounds, as the leader orders: contribute, reduce its stripe, store the payload.

A region never decides about a round. It follows the highest ballot of the current leader and forgets lower ones; what
its learner contributed keeps its name and bytes from ballot to ballot, until the round of that fragment commits.
"""

from __future__ import annotations

from diloco_node.core.events import (
    CloseBallot,
    ContributionStripeArrived,
    MergedStripeArrived,
    ReduceStripe,
    ReductionDone,
    SendContribution,
    SendMerged,
    StorePayload,
    TakeSnapshot,
)
from diloco_node.core.merge.stripes import block_count, stripes_fault
from diloco_node.core.messages import (
    BallotOpened,
    Contributed,
    Declined,
    LeftOut,
    MergeDecided,
    MergedReceived,
    PayloadDurable,
    StripesReceived,
)
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.followed import Block, EarlyArrivals, FollowedBallot, FollowedRound, Name, name_of
from diloco_node.core.rounds.open_round import payload_digest
from diloco_node.core.rounds.suspicion import LEFT_OUT_SHOWN_MAX, REASON_SHOWN_MAX
from diloco_node.core.types import Ballot, Contribution, LearnerStatus, RoundBody


class RoundParticipant:
    """See the module. Feed it facts, then call `pump`.

    Args:
        manifest: of the model.

    Attributes:
        left_out: whom the leader leaves out of its ballots, as its last one said.
    """

    def __init__(self, context: RoundContext, versions: Versions) -> None:
        self.left_out: tuple[LeftOut, ...] = ()
        self._region = context.region
        self._others = tuple(name for name in context.regions if name != context.region)
        self._settings, self._history, self._effects = context.settings, context.history, context.effects
        self._versions = versions
        self._learner: LearnerStatus | None = None
        self._pieces = [len(fragment.pieces) for fragment in context.fragments]
        self._blocks = [block_count(fragment) for fragment in context.fragments]
        self._fragments = [FollowedRound() for _ in context.fragments]
        self._early = EarlyArrivals()
        self._committed: list[list[RoundBody]] = [[] for _ in context.fragments]
        self._dirty: set[int] = set()

    def open_versions(self) -> dict[int, int]:
        """Fragment to version of rounds that are open as far as is known here: a new leader opens them again."""
        return {
            fragment: one.version
            for fragment, one in enumerate(self._fragments)
            if one.part is not None and one.version == self._history.versions[fragment] + 1
        }

    def is_storing(self, body: RoundBody) -> bool:
        """Whether this very payload is being written to disk."""
        part = self._fragments[body.fragment].part
        is_this = part is not None and part.ballot == body.ballot and part.digest == body.payload_digest
        return is_this and part is not None and not part.is_lost

    def is_following(self, body: RoundBody) -> bool:
        """Whether this region takes part in the ballot that made the payload, so that its stripes are on their way."""
        part = self._fragments[body.fragment].part
        return part is not None and part.ballot == body.ballot

    def open_rounds(self) -> list[tuple[int, int, Ballot, str]]:
        """(fragment, version, ballot, what it waits for here) of each open round that is known here."""
        found = []
        for fragment, one in enumerate(self._fragments):
            if one.part is not None and one.version > self._history.versions[fragment]:
                found.append((fragment, one.version, one.part.ballot, self._waits_for(one, one.part)))
        return found

    def standing(self, fragment: int) -> tuple[int, Ballot, str, tuple[str, ...]] | None:
        """(version, ballot, phase, whom it waits for) of a fragment's open round as far as this region sees it."""
        one = self._fragments[fragment]
        if one.part is None or one.version <= self._history.versions[fragment]:
            return None
        version, part = one.version, one.part
        if part.digest:
            return version, part.ballot, "commit", ()
        if self._region in part.opened.members and not part.has_contributed and not part.declined:
            return version, part.ballot, "gather", (self._region,)
        if part.decision is None and part.own_stripes(self._region):
            return version, part.ballot, "gather", ()
        return version, part.ballot, "reduce", part.lacking_reducers()

    def _waits_for(self, one: FollowedRound, part: FollowedBallot) -> str:
        if part.digest:
            return "waits for the commit" if self._is_stored(one, part) else "writes the payload"
        if self._region in part.opened.members and not part.has_contributed and not part.declined:
            return "waits for the learner's snapshot" if one.requested_base is not None else "waits for the learner"
        if part.decision is None and part.own_stripes(self._region):
            return f"waits for the decision of {part.leader}"
        return f"waits for merged stripes of {', '.join(part.lacking_reducers())}"

    def learner_changed(self, status: LearnerStatus | None) -> None:
        """The learner reported, attached or is gone. A new incarnation knows nothing of the old one's snapshots."""
        is_new_incarnation = status is not None and (
            self._learner is None or self._learner.incarnation != status.incarnation
        )
        for one in self._fragments:
            if status is None:
                one.requested_base = None
            elif is_new_incarnation and one.pending is not None and one.pending.incarnation != status.incarnation:
                one.pending = None
        self._learner = status
        self._dirty.update(range(len(self._fragments)))

    def snapshot_taken(self, contribution: Contribution) -> None:
        """The learner has made a contribution."""
        one = self._fragments[contribution.fragment]
        is_current = self._learner is not None and self._learner.incarnation == contribution.incarnation
        if not is_current or contribution.learner != self._region or one.requested_base != contribution.base_version:
            # An answer to a question of an earlier round or incarnation: what it names is resolved by now.
            return
        one.requested_base, one.pending = None, contribution
        self._dirty.add(contribution.fragment)

    def snapshot_refused(self, fragment: int, version: int, reason: str) -> None:
        """The learner could not: request it again if its base has moved on since, else decline."""
        one = self._fragments[fragment]
        requested_base, one.requested_base = one.requested_base, None
        if one.part is None or one.version != version or requested_base is None:
            return
        if self._learner is not None and self._learner.positions[fragment].base_version == requested_base:
            self._decline(one.part, reason)
        self._dirty.add(fragment)

    def ballot_opened(self, leader: str, opened: BallotOpened) -> None:
        """Follow a ballot, or answer again if it is the one that is followed. Lower ones are refused by silence.

        One whose stripes are none of the fragment is refused aloud: nobody could cut a contribution by them.
        """
        if not 0 <= opened.fragment < len(self._fragments):
            return
        one = self._fragments[opened.fragment]
        if opened.version <= self._history.versions[opened.fragment] or opened.version < one.version:
            return
        fault = stripes_fault(
            opened.stripes, regions=(self._region, *self._others), blocks=self._blocks[opened.fragment]
        )
        if fault:
            text = f"ballot of {leader}: {fault}"
            self._effects.note("ballot", text, fragment=opened.fragment, version=opened.version, is_alarm=True)
            return
        part = one.part
        if part is not None and opened.version == one.version:
            if opened.ballot == part.ballot:
                self._repeat_reports(one, part)
                return
            if opened.ballot < part.ballot:
                return
            self._effects.emit(CloseBallot(part.ballot, opened.fragment, one.version, committed=False))
        if opened.version > one.version:
            one.version, one.pending, one.sent, one.requested_base = opened.version, None, None, None
        self.left_out = tuple(
            LeftOut(name.region, name.part, name.reason[:REASON_SHOWN_MAX])
            for name in opened.left_out[:LEFT_OUT_SHOWN_MAX]
        )
        one.part = FollowedBallot(leader, opened)
        # What came before the announcement, and what has arrived in the ballots before.
        for event in self._early.take(opened.ballot, opened.fragment):
            if isinstance(event, MergedStripeArrived):
                one.part.keep_merged(event)
            else:
                one.keep_stripe(one.part, event, self._region)
        self._send_durable(one, one.part)
        self._dirty.add(opened.fragment)

    def merge_decided(self, decision: MergeDecided) -> None:
        """Reduce this, or report again what came of it."""
        one = self._fragments[decision.fragment] if 0 <= decision.fragment < len(self._fragments) else None
        if one is None or one.part is None or one.part.ballot != decision.ballot:
            return
        part = one.part
        fault = _decision_fault(decision, part.opened, self._pieces[decision.fragment])
        if fault:
            text = f"decision of {part.leader}: {fault}"
            self._effects.note("decision", text, fragment=decision.fragment, version=one.version, is_alarm=True)
            return
        if part.decision is None:
            part.decision = decision
            self._dirty.add(decision.fragment)
            return
        for _, reduced in sorted(part.reduced.items()):
            self._effects.send(part.leader, part.report_of(reduced))

    def stripe_arrived(self, event: ContributionStripeArrived) -> None:
        """A stripe of a contribution is here, perhaps before the ballot that explains which blocks it is."""
        contribution = event.contribution
        fragment = contribution.fragment
        one = self._fragments[fragment]
        version = contribution.base_version + 1
        if version <= self._history.versions[fragment]:
            self._free_late(event.ballot, fragment, version)
        elif one.part is not None and event.ballot == one.part.ballot:
            if one.keep_stripe(one.part, event, self._region):
                self._dirty.add(fragment)
                if one.has_all(one.part, name_of(contribution), self._region):
                    self._effects.send(one.part.leader, StripesReceived(event.ballot, *name_of(contribution)))
        elif one.part is None or event.ballot > one.part.ballot:
            self._early.keep(event)

    def merged_arrived(self, event: MergedStripeArrived) -> None:
        """A merged stripe is here."""
        one = self._fragments[event.fragment]
        if event.version <= self._history.versions[event.fragment]:
            self._free_late(event.ballot, event.fragment, event.version)
        elif one.part is not None and one.part.ballot == event.ballot:
            one.part.keep_merged(event)
            self._dirty.add(event.fragment)
        elif one.part is None or event.ballot > one.part.ballot:
            self._early.keep(event)

    def stripe_reduced(self, event: ReductionDone) -> None:
        """The stripe of this region is merged: tell the leader, give it to everybody."""
        for one in self._fragments:
            part = one.part
            if part is not None and part.ballot == event.ballot and event.stripe in part.reducing:
                part.reduced[event.stripe] = event
                stripe = part.opened.stripes[event.stripe]
                self._effects.send(part.leader, part.report_of(event))
                self._effects.emit(
                    SendMerged(
                        event.ballot,
                        event.stripe,
                        part.opened.fragment,
                        part.opened.version,
                        event.digest,
                        stripe.block_start,
                        stripe.block_stop,
                        self._others,
                    )
                )

    def payload_stored(self, fragment: int, version: int, digest: bytes) -> None:
        """A payload is on disk: tell the leader if it is the one of the current ballot."""
        one = self._fragments[fragment]
        if one.part is not None and one.version == version and one.part.digest == digest:
            self._effects.send(one.part.leader, PayloadDurable(one.part.ballot, digest))

    def payload_not_stored(self, fragment: int, ballot: Ballot) -> None:
        """The merged stripes went before they were written: should the ballot commit, its payload is to be fetched."""
        part = self._fragments[fragment].part
        if part is not None and part.ballot == ballot:
            part.is_lost = True

    def committed(self, body: RoundBody) -> None:
        """A round is decided for good; its bytes are kept until it is applied."""
        self._committed[body.fragment].append(body)

    def applied(self, fragment: int, version: int) -> None:
        """The fragment is at `version`: nothing of the rounds up to there is needed any more."""
        closed = [body for body in self._committed[fragment] if body.version <= version]
        self._committed[fragment] = [body for body in self._committed[fragment] if body.version > version]
        one = self._fragments[fragment]
        for body in closed:
            self._close(one, body)
        if one.version <= version:
            one.part = one.pending = one.sent = one.requested_base = None
        one.arrived = {key: made for key, made in one.arrived.items() if made > version}
        if closed:
            self._early.forget(fragment, closed[-1].ballot)
        self._dirty.add(fragment)

    def pump(self) -> None:
        """Do everything that can be done now."""
        while self._dirty:
            fragment = min(self._dirty)
            self._dirty.discard(fragment)
            one = self._fragments[fragment]
            if one.part is not None and one.version > self._history.versions[fragment]:
                self._contribute(one, one.part)
                self._reduce(one, one.part)
                self._store(one, one.part)

    def _contribute(self, one: FollowedRound, part: FollowedBallot) -> None:
        opened = part.opened
        if (
            self._region not in opened.members
            or part.has_contributed
            or part.declined
            or one.requested_base is not None
        ):
            return
        reason = self._decline_reason(opened.fragment)
        if reason:
            self._decline(part, reason)
        elif one.pending is not None:
            part.has_contributed = True
            self._effects.send(part.leader, Contributed(part.ballot, one.pending))
            # What the reducers have may be of a learner that has died since.
            reused = opened.reused if one.sent == name_of(one.pending) else ()
            skip = tuple(sorted(there.stripe for there in reused if there.learner == self._region))
            one.sent = name_of(one.pending)
            self._effects.emit(SendContribution(part.ballot, one.version, one.pending, opened.stripes, skip))
        elif not self._may_contribute(opened.fragment, one.version):
            assert self._learner is not None
            one.requested_base = self._learner.positions[opened.fragment].base_version
            self._effects.emit(TakeSnapshot(opened.fragment, one.version, one.requested_base))

    def _reduce(self, one: FollowedRound, part: FollowedBallot) -> None:
        """Start the sum of every stripe of this region whose contributions are all here."""
        decision = part.decision
        if decision is None:
            return
        for index, stripe in part.own_stripes(self._region):
            blocks = (stripe.block_start, stripe.block_stop)
            is_whole = all((name_of(named), blocks) in one.arrived for named in decision.contributions)
            if index in part.reducing or not is_whole:
                continue
            order = self._order_of_sum(decision.contributions, list(one.arrived))
            part.reducing[index] = order
            self._effects.emit(
                ReduceStripe(
                    ballot=part.ballot,
                    fragment=part.opened.fragment,
                    version=one.version,
                    stripe=index,
                    block_start=stripe.block_start,
                    block_stop=stripe.block_stop,
                    contributions=tuple(decision.contributions[place] for place in order),
                    coefficients=tuple(decision.coefficients[place] for place in order),
                    residual_of=one.residual_of(index, blocks) if self._settings.error_feedback else None,
                )
            )

    def _store(self, one: FollowedRound, part: FollowedBallot) -> None:
        if part.digest or len(part.merged) < len(part.opened.stripes):
            return
        part.digest = payload_digest([part.merged[index] for index in range(len(part.opened.stripes))])
        if self._is_stored(one, part):
            self._effects.send(part.leader, PayloadDurable(part.ballot, part.digest))
        else:
            self._effects.emit(
                StorePayload(part.ballot, part.opened.fragment, one.version, part.digest, part.opened.stripes)
            )

    def _may_contribute(self, fragment: int, version: int) -> str:
        """Why the learner can't contribute just yet; empty if it can. It is checked again when something changes.

        The snapshot is taken against version - 1, after the learner has applied it: so an offer always resolves the
        snapshot before, and a base is never older than the last inclusion.
        """
        if self._learner is None:
            return "no learner"
        position = self._learner.positions[fragment]
        covered = self._history.covered_step(self._region, self._learner.incarnation, fragment)
        if position.base_version != version - 1:
            return f"the learner is at version {position.base_version}"
        if self._history.versions[fragment] != version - 1:
            return f"version {version - 1} is not committed here"
        if position.included_step != covered:
            return f"steps ({covered}, {position.included_step}] are not booked yet"
        return ""

    def _decline_reason(self, fragment: int) -> str:
        """Why the learner will not contribute to this ballot at all; empty if it will, perhaps later."""
        if self._learner is None:
            return "no learner is attached"
        if self._learner.finished:
            return "the learner has stopped"
        position = self._learner.positions[fragment]
        has_pending = self._fragments[fragment].pending is not None
        if not has_pending and position.base_version >= 0 and self._learner.step <= position.included_step:
            return "no steps since the last inclusion"
        return ""

    def _order_of_sum(self, named: tuple[Contribution, ...], arrived: list[tuple[Name, Block]]) -> list[int]:
        """The order in which contributions are added: by learner, for float32 sums depend on it.

        Args:
            named: as the leader listed them.
            arrived: in the order of arrival, which must not matter.
        """
        del arrived
        return sorted(range(len(named)), key=lambda place: named[place].learner)

    def _repeat_reports(self, one: FollowedRound, part: FollowedBallot) -> None:
        """Everything that was reported in this ballot; any of it may have been lost."""
        if part.has_contributed and one.pending is not None:
            self._effects.send(part.leader, Contributed(part.ballot, one.pending))
        if part.declined:
            self._effects.send(part.leader, Declined(part.ballot, part.declined))
        if any(index not in part.reduced for index, _ in part.own_stripes(self._region)):
            self._send_durable(one, part)
        for _, reduced in sorted(part.reduced.items()):
            self._effects.send(part.leader, part.report_of(reduced))
        if part.digest and self._is_stored(one, part):
            self._effects.send(part.leader, PayloadDurable(part.ballot, part.digest))
        digests = tuple(part.merged.get(index, b"") for index in range(len(part.opened.stripes)))
        self._effects.send(part.leader, MergedReceived(part.ballot, digests))

    def _send_durable(self, one: FollowedRound, part: FollowedBallot) -> None:
        for name in one.received_names(part, self._region):
            self._effects.send(part.leader, StripesReceived(part.ballot, *name))

    def _decline(self, part: FollowedBallot, reason: str) -> None:
        part.declined = reason
        self._effects.send(part.leader, Declined(part.ballot, reason))

    def _is_stored(self, one: FollowedRound, part: FollowedBallot) -> bool:
        return self._versions.has_stored(part.opened.fragment, one.version, part.digest)

    def _close(self, one: FollowedRound, body: RoundBody) -> None:
        part = one.part
        one.residual = None
        is_followed = part is not None and one.version == body.version
        if is_followed and part is not None:
            if part.ballot != body.ballot:
                self._effects.emit(CloseBallot(part.ballot, body.fragment, body.version, committed=False))
            elif part.reduced:
                one.residual = (body.version, body.ballot, part.reduced_blocks())
        if is_followed or one.arrived or self._early.has_any:
            self._effects.emit(CloseBallot(body.ballot, body.fragment, body.version, committed=True))

    def _free_late(self, ballot: Ballot, fragment: int, version: int) -> None:
        """Bytes of a round that is over. Before it is applied here, it is still to be closed with all it has."""
        residual = self._fragments[fragment].residual
        is_kept = residual is not None and residual[1] == ballot
        if version <= self._versions.applied[fragment] and not is_kept:
            self._effects.emit(CloseBallot(ballot, fragment, version, committed=False))


def _decision_fault(decision: MergeDecided, opened: BallotOpened, pieces: int) -> str:
    """Why a leader's decision is none about this ballot; empty if it is. Its sum is worked out as it stands."""
    names = [one.learner for one in decision.contributions]
    if decision.version != opened.version or not names or len(names) != len(set(names)):
        return f"version {decision.version} of {names}, the ballot is for version {opened.version}"
    strange = [
        one for one in decision.contributions if one.learner not in opened.members or one.fragment != decision.fragment
    ]
    if strange:
        return f"{strange[0].learner}'s contribution to fragment {strange[0].fragment} has no part in it"
    rows = [len(row) for row in decision.coefficients]
    return (
        ""
        if rows == [pieces] * len(names)
        else f"coefficients {rows} for {len(names)} contributions of {pieces} pieces"
    )
