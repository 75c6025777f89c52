"""Every region's part in rounds, as the leader orders: contribute, reduce its stripes, store the payload.

A region never decides about a round. It follows the leader's highest ballot and forgets lower ones. Its learner's
contribution keeps its name and its bytes from ballot to ballot, until the fragment's round commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diloco_node.core.events import (
    CloseBallot,
    ContributionStripeArrived,
    MergedStripeArrived,
    PayloadStored,
    ReduceStripe,
    ReductionDone,
    SendContribution,
    SendMerged,
    SnapshotRefused,
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
    MergedStripe,
    Receipt,
    StripesReceived,
)
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.audit_part import AuditPart
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.followed import EarlyArrivals, FollowedBallot, FollowedRound, decision_fault, name_of
from diloco_node.core.rounds.open_round import payload_digest
from diloco_node.core.rounds.suspicion import LEFT_OUT_SHOWN_MAX, REASON_SHOWN_MAX
from diloco_node.core.types import NO_STEPS, Ballot, Contribution, LearnerStatus, RoundBody

PROMPT_MEMBERS_MAX: Final = 8
"""Members of a ballot whose leader is told at once of each contribution that arrives. In larger ballots these would be
too many messages: it is told with the next heartbeat."""


class RoundParticipant:
    """This region's part in all rounds. Feed it facts, then call `pump`.

    left_out: regions that take no part in ballots for now, as the leader announced it last.
    """

    def __init__(self, context: RoundContext, versions: Versions) -> None:
        self.left_out: tuple[LeftOut, ...] = ()
        self._region = context.region
        self._context = context
        self._history, self._effects = context.history, context.effects
        self._versions = versions
        self._learner: LearnerStatus | None = None
        self._pieces = [len(fragment.pieces) for fragment in context.fragments]
        self._blocks = [block_count(fragment) for fragment in context.fragments]
        # The round that is followed, by fragment. The number of its ballot never goes back.
        self.rounds = [FollowedRound() for _ in context.fragments]
        self.audits = AuditPart(context, self.rounds)
        self._early = EarlyArrivals()
        # Committed rounds that are not applied here, by fragment: their bytes are still needed.
        self._unapplied_rounds: list[list[RoundBody]] = [[] for _ in context.fragments]
        # Fragments with news since the last `pump`.
        self._changed_fragments: set[int] = set()

    def open_versions(self) -> dict[int, int]:
        """Return the open rounds that are known here, fragment to version: a new leader opens them again."""
        return {
            fragment: round_.version
            for fragment, round_ in enumerate(self.rounds)
            if round_.ballot is not None and round_.version == self._history.versions[fragment] + 1
        }

    def _followed(self, fragment: int, number: Ballot) -> FollowedBallot | None:
        """Return a ballot, if it is the one that is followed."""
        ballot = self.rounds[fragment].ballot
        return ballot if ballot is not None and ballot.number == number else None

    def is_following(self, body: RoundBody) -> bool:
        """Whether this region follows the ballot that made the payload: then its stripes are on their way."""
        return self._followed(body.fragment, body.ballot) is not None

    def is_storing(self, body: RoundBody) -> bool:
        """Whether the payload of this entry is being written to disk."""
        ballot = self._followed(body.fragment, body.ballot)
        return ballot is not None and ballot.digest == body.payload_digest and not ballot.is_lost

    def merged_stripes(self, fragment: int, number: Ballot) -> Mapping[int, tuple[bytes, tuple[float, ...]]]:
        """Return (digest, squared norms per piece) of a ballot's merged stripes that are here, by stripe."""
        ballot = self._followed(fragment, number)
        return {} if ballot is None else dict(ballot.merged)

    def payload_norms(self, fragment: int, digest: bytes) -> tuple[float, ...]:
        """Return the squared norm of each piece of a payload; empty if its stripes did not come here."""
        ballot = self.rounds[fragment].ballot
        return ballot.payload_norms() if ballot is not None and ballot.digest == digest else ()

    def open_rounds(self) -> list[tuple[int, int, Ballot, str]]:
        """Return (fragment, version, ballot, what it waits for here) of each open round that is known here."""
        return [
            (fragment, round_.version, ballot.number, self._stage(round_, ballot)[2])
            for fragment, round_ in enumerate(self.rounds)
            if (ballot := self._open_ballot(fragment)) is not None
        ]

    def standing(self, fragment: int) -> tuple[int, Ballot, str, tuple[str, ...]] | None:
        """Return (version, ballot, phase, regions it waits for) of a fragment's open round, as this region sees it."""
        round_, ballot = self.rounds[fragment], self._open_ballot(fragment)
        return None if ballot is None else (round_.version, ballot.number, *self._stage(round_, ballot)[:2])

    def _open_ballot(self, fragment: int) -> FollowedBallot | None:
        """Return the ballot of a fragment's round that is not committed yet."""
        round_ = self.rounds[fragment]
        return round_.ballot if round_.version > self._history.versions[fragment] else None

    def _owes_answer(self, ballot: FollowedBallot) -> bool:
        """Whether this region's learner has yet to answer the ballot."""
        return self._region in ballot.announcement.members and not ballot.has_contributed and not ballot.refusal

    def _stage(self, round_: FollowedRound, ballot: FollowedBallot) -> tuple[str, tuple[str, ...], str]:
        """Return the phase of a ballot, the regions that it waits for, and what it waits for here, in words."""
        if ballot.digest:
            return "commit", (), "waits for the commit" if self._is_stored(round_, ballot) else "writes the payload"
        if self._owes_answer(ballot):
            answer = "the learner's snapshot" if round_.requested_base is not None else "the learner"
            return "gather", (self._region,), f"waits for {answer}"
        if ballot.decision is None and ballot.own_stripes(self._region):
            return "gather", (), f"waits for the decision of {ballot.leader}"
        lacking = ballot.lacking_reducers()
        return "reduce", lacking, f"waits for merged stripes of {', '.join(lacking)}"

    def learner_changed(self, status: LearnerStatus | None) -> None:
        """Take the learner's report; None: it is gone. A new incarnation knows nothing of the old one's snapshots."""
        for round_ in self.rounds:
            contribution = round_.contribution
            if status is None:
                round_.requested_base = None
            elif contribution is not None and contribution.incarnation != status.incarnation:
                round_.contribution = None
        self._learner = status
        self._changed_fragments.update(range(len(self.rounds)))

    def snapshot_taken(self, contribution: Contribution) -> None:
        """Take the contribution that the learner was asked for."""
        round_ = self.rounds[contribution.fragment]
        is_current = self._learner is not None and self._learner.incarnation == contribution.incarnation
        if not is_current or contribution.learner != self._region or round_.requested_base != contribution.base_version:
            # It answers a request of an earlier round or incarnation, for which nobody waits any more.
            return
        round_.requested_base, round_.contribution = None, contribution
        self._changed_fragments.add(contribution.fragment)

    def snapshot_refused(self, event: SnapshotRefused) -> None:
        """Take the learner's refusal. Decline the ballot, unless the learner's base has moved on: then ask again."""
        round_ = self.rounds[event.fragment]
        requested_base, round_.requested_base = round_.requested_base, None
        if round_.ballot is None or round_.version != event.version or requested_base is None:
            return
        if self._learner is not None and self._learner.positions[event.fragment].base_version == requested_base:
            self._decline(round_.ballot, event.reason)
        self._changed_fragments.add(event.fragment)

    def ballot_opened(self, leader: str, announcement: BallotOpened) -> None:
        """Follow a ballot, or answer again if it is the one that is followed. Lower ballots are ignored.

        A higher ballot may be of a lower version: it replaces that of a leader which named an impossible version.
        """
        if not 0 <= announcement.fragment < len(self.rounds):
            return
        round_ = self.rounds[announcement.fragment]
        if announcement.version <= self._history.versions[announcement.fragment]:
            return
        blocks = self._blocks[announcement.fragment]
        if fault := stripes_fault(announcement.stripes, regions=self._context.regions, blocks=blocks):
            self._alarm("ballot", f"ballot of {leader}: {fault}", announcement)
            return
        ballot = round_.ballot
        if ballot is not None:
            if announcement.ballot == ballot.number and announcement.version == round_.version:
                self._repeat_reports(round_, ballot)
                return
            if announcement.ballot <= ballot.number:
                return
            if announcement.version <= round_.version:
                self.audits.give_up(ballot, leader, announcement.stripes)
                self._effects.emit(CloseBallot(ballot.number, announcement.fragment, round_.version, committed=False))
        if announcement.version != round_.version:
            round_.version = announcement.version
            round_.contribution = round_.sent_name = round_.requested_base = None
        self.left_out = tuple(
            LeftOut(line.region, line.part, line.reason[:REASON_SHOWN_MAX])
            for line in announcement.left_out[:LEFT_OUT_SHOWN_MAX]
        )
        round_.ballot = FollowedBallot(leader, announcement)
        # Some stripes came before the announcement.
        for event in self._early.take(announcement.ballot, announcement.fragment):
            if isinstance(event, MergedStripeArrived):
                round_.ballot.keep_merged(event)
            else:
                round_.keep_stripe(round_.ballot, event, self._region)
        # Stripes of earlier ballots count as well.
        self._report_stripes(round_, round_.ballot)
        self._changed_fragments.add(announcement.fragment)

    def merge_decided(self, decision: MergeDecided) -> None:
        """Reduce as the leader decided, or report the result again."""
        if not 0 <= decision.fragment < len(self.rounds):
            return
        ballot = self._followed(decision.fragment, decision.ballot)
        if ballot is None:
            return
        fault = decision_fault(decision, ballot.announcement, self._pieces[decision.fragment])
        if fault:
            self._alarm("decision", f"decision of {ballot.leader}: {fault}", ballot.announcement)
            return
        if ballot.decision is None:
            ballot.decision = decision
            self._changed_fragments.add(decision.fragment)
            return
        for _, reduction in sorted(ballot.reductions.items()):
            self._effects.send(ballot.leader, ballot.report_of(reduction))

    def stripe_arrived(self, event: ContributionStripeArrived) -> None:
        """Take a stripe of a contribution. It may come before its ballot's announcement, which cuts the stripes."""
        contribution = event.contribution
        fragment = contribution.fragment
        round_ = self.rounds[fragment]
        version = contribution.base_version + 1
        if version <= self._history.versions[fragment]:
            self._free_late(event.ballot, fragment, version)
        elif round_.ballot is not None and event.ballot == round_.ballot.number:
            if round_.keep_stripe(round_.ballot, event, self._region):
                self._changed_fragments.add(fragment)
                if len(round_.ballot.announcement.members) <= PROMPT_MEMBERS_MAX:
                    self._tell_receipts(round_, round_.ballot)
        elif round_.ballot is None or event.ballot > round_.ballot.number:
            self._early.keep(event)

    def merged_arrived(self, event: MergedStripeArrived) -> None:
        """Take a merged stripe."""
        round_ = self.rounds[event.fragment]
        if event.version <= self._history.versions[event.fragment]:
            self._free_late(event.ballot, event.fragment, event.version)
        elif round_.ballot is not None and round_.ballot.number == event.ballot:
            round_.ballot.keep_merged(event)
            self._changed_fragments.add(event.fragment)
        elif round_.ballot is None or event.ballot > round_.ballot.number:
            self._early.keep(event)

    def stripe_reduced(self, event: ReductionDone) -> None:
        """Report a merged stripe of this region to the leader, and send it to everybody."""
        for round_ in self.rounds:
            ballot = round_.ballot
            if ballot is not None and ballot.number == event.ballot and event.stripe in ballot.sum_orders:
                ballot.reductions[event.stripe] = event
                name = (event.ballot, event.stripe, ballot.announcement.fragment, ballot.announcement.version)
                stripe = ballot.announcement.stripes[event.stripe]
                header = MergedStripe(*name, event.digest, stripe.block_start, stripe.block_stop)
                peers = tuple(region for region in self._context.regions if region != self._region)
                self._effects.send(ballot.leader, ballot.report_of(event))
                self._effects.emit(SendMerged(header, peers))

    def payload_stored(self, event: PayloadStored) -> None:
        """Tell the leader that a payload is on disk, if it is the one of the current ballot."""
        round_ = self.rounds[event.fragment]
        if round_.ballot is not None and round_.version == event.version and round_.ballot.digest == event.digest:
            self._effects.send(round_.ballot.leader, round_.ballot.durable_report())

    def payload_not_stored(self, fragment: int, number: Ballot) -> None:
        """Remember that merged stripes were dropped before they were written: a payload that commits is fetched."""
        ballot = self._followed(fragment, number)
        if ballot is not None:
            ballot.is_lost = True

    def on_commit(self, body: RoundBody) -> None:
        """Take a committed round; its bytes stay until it is applied."""
        self._unapplied_rounds[body.fragment].append(body)

    def on_apply(self, fragment: int, version: int) -> None:
        """Close the rounds up to `version`, which is applied here: their bytes are not needed any more."""
        bodies = [body for body in self._unapplied_rounds[fragment] if body.version <= version]
        self._unapplied_rounds[fragment] = [body for body in self._unapplied_rounds[fragment] if body.version > version]
        round_ = self.rounds[fragment]
        for body in bodies:
            self._close(round_, body)
        if round_.version <= version:
            round_.ballot = round_.contribution = round_.sent_name = round_.requested_base = None
        round_.arrivals = {key: number for key, number in round_.arrivals.items() if number > version}
        if bodies:
            self._early.forget(fragment, bodies[-1].ballot)
        self._changed_fragments.add(fragment)

    def tick(self) -> None:
        """Tell leaders which contributions have arrived since the last heartbeat; only large ballots need it."""
        for round_ in self.rounds:
            if round_.ballot is not None:
                self._tell_receipts(round_, round_.ballot)

    def pump(self) -> None:
        """Do everything that can be done now."""
        while self._changed_fragments:
            fragment = min(self._changed_fragments)
            self._changed_fragments.discard(fragment)
            round_, ballot = self.rounds[fragment], self._open_ballot(fragment)
            if ballot is not None:
                self._contribute(round_, ballot)
                self._reduce(round_, ballot)
                self._store(round_, ballot)
                self.audits.follow(round_, ballot)

    def _contribute(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        announcement = ballot.announcement
        if not self._owes_answer(ballot) or round_.requested_base is not None:
            return
        reason = self._decline_reason(announcement.fragment)
        if reason:
            self._decline(ballot, reason)
        elif round_.contribution is not None:
            ballot.has_contributed = True
            self._effects.send(ballot.leader, Contributed(ballot.number, round_.contribution))
            # The reducers may have stripes of a learner that has died since: these are not reused.
            reusable = announcement.reused if round_.sent_name == name_of(round_.contribution) else ()
            skip = tuple(sorted(item.stripe for item in reusable if item.learner == self._region))
            round_.sent_name = name_of(round_.contribution)
            self._effects.emit(
                SendContribution(ballot.number, round_.version, round_.contribution, announcement.stripes, skip)
            )
        elif self._may_contribute(announcement.fragment, round_.version):
            assert self._learner is not None
            round_.requested_base = self._learner.positions[announcement.fragment].base_version
            self._effects.emit(TakeSnapshot(announcement.fragment, round_.version, round_.requested_base))

    def _reduce(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        """Start the sum of every stripe of this region whose contributions are all here."""
        decision = ballot.decision
        if decision is None:
            return
        for index, stripe in ballot.own_stripes(self._region):
            blocks = (stripe.block_start, stripe.block_stop)
            names = map(name_of, decision.contributions)
            if index in ballot.sum_orders or not all((name, blocks) in round_.arrivals for name in names):
                continue
            order = self._order_of_sum(decision.contributions)
            ballot.sum_orders[index] = order
            self._effects.emit(
                ReduceStripe(
                    ballot=ballot.number,
                    fragment=ballot.announcement.fragment,
                    version=round_.version,
                    stripe=index,
                    block_start=stripe.block_start,
                    block_stop=stripe.block_stop,
                    contributions=tuple(decision.contributions[place] for place in order),
                    coefficients=tuple(decision.coefficients[place] for place in order),
                )
            )

    def _order_of_sum(self, contributions: tuple[Contribution, ...]) -> list[int]:
        """Return the places of the contributions in the order in which they are added.

        Float32 sums depend on it: names decide, not the leader's list or the arrival.
        """
        return sorted(range(len(contributions)), key=lambda place: contributions[place].learner)

    def _store(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        fragment, stripes = ballot.announcement.fragment, ballot.announcement.stripes
        if ballot.digest or len(ballot.merged) < len(stripes):
            return
        ballot.digest = payload_digest([ballot.merged[index][0] for index in range(len(stripes))])
        if self._is_stored(round_, ballot):
            self._effects.send(ballot.leader, ballot.durable_report())
        else:
            self._effects.emit(StorePayload(ballot.number, fragment, round_.version, ballot.digest, stripes))

    def _may_contribute(self, fragment: int, version: int) -> bool:
        """Whether the learner can contribute now: a snapshot is taken against version - 1, once that is applied.

        So each offered version settles the snapshot before it, and no base is older than the last inclusion.
        """
        if self._learner is None:
            return False
        position = self._learner.positions[fragment]
        covered_step = self._history.covered_step(self._region, self._learner.incarnation, fragment)
        are_all_booked = position.included_step == covered_step
        return are_all_booked and position.base_version == self._history.versions[fragment] == version - 1

    def _decline_reason(self, fragment: int) -> str:
        """Return why the learner will not contribute to this ballot at all; empty if it will, perhaps later."""
        if self._learner is None:
            return "no learner is attached"
        if self._learner.finished:
            return "the learner has stopped"
        position = self._learner.positions[fragment]
        has_pending = self.rounds[fragment].contribution is not None
        if not has_pending and position.base_version >= 0 and self._learner.step <= position.included_step:
            return NO_STEPS
        return ""

    def _repeat_reports(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        """Send all reports of this ballot again; any of them may have been lost."""
        if ballot.has_contributed and round_.contribution is not None:
            self._effects.send(ballot.leader, Contributed(ballot.number, round_.contribution))
        if ballot.refusal:
            self._effects.send(ballot.leader, Declined(ballot.number, ballot.refusal))
        if ballot.is_reducing(self._region):
            self._report_stripes(round_, ballot)
        for _, reduction in sorted(ballot.reductions.items()):
            self._effects.send(ballot.leader, ballot.report_of(reduction))
        if ballot.digest and self._is_stored(round_, ballot):
            self._effects.send(ballot.leader, ballot.durable_report())
        self.audits.repeat(ballot)
        digests = tuple(ballot.merged.get(index, (b"",))[0] for index in range(len(ballot.announcement.stripes)))
        self._effects.send(ballot.leader, MergedReceived(ballot.number, digests))

    def _tell_receipts(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        """Report contributions that have arrived, if any are new to the leader. The report of a sum implies them."""
        if ballot.is_reducing(self._region) and round_.received_names(ballot, self._region) != ballot.told_names:
            self._report_stripes(round_, ballot)

    def _report_stripes(self, round_: FollowedRound, ballot: FollowedBallot) -> None:
        ballot.told_names = round_.received_names(ballot, self._region)
        if ballot.told_names:
            receipts = tuple(Receipt(*name) for name in ballot.told_names)
            self._effects.send(ballot.leader, StripesReceived(ballot.number, receipts))

    def _alarm(self, kind: str, text: str, ballot: BallotOpened) -> None:
        self._effects.note(kind, text, fragment=ballot.fragment, version=ballot.version, is_alarm=True)

    def _decline(self, ballot: FollowedBallot, reason: str) -> None:
        ballot.refusal = reason
        self._effects.send(ballot.leader, Declined(ballot.number, reason))

    def _is_stored(self, round_: FollowedRound, ballot: FollowedBallot) -> bool:
        return self._versions.has_stored(ballot.announcement.fragment, round_.version, ballot.digest)

    def _close(self, round_: FollowedRound, body: RoundBody) -> None:
        ballot = round_.ballot
        is_followed = ballot is not None and round_.version == body.version
        if is_followed and ballot is not None and ballot.number != body.ballot:
            self._effects.emit(CloseBallot(ballot.number, body.fragment, body.version, committed=False))
        if is_followed or round_.arrivals or self._early.has_any:
            self._effects.emit(CloseBallot(body.ballot, body.fragment, body.version, committed=True))

    def _free_late(self, ballot: Ballot, fragment: int, version: int) -> None:
        """Free bytes that came after their round was applied. Until then `on_apply` will free them."""
        if version <= self._versions.applied[fragment]:
            self._effects.emit(CloseBallot(ballot, fragment, version, committed=False))
