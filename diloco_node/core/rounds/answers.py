"""Answers of the regions to a ballot, judged and filed: contributions, refusals, merge reports, discards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from diloco_node.core.merge import weights as weighing
from diloco_node.core.messages import (
    AuditDrawn,
    Contributed,
    ContributionProjected,
    Declined,
    MergedReceived,
    PayloadDurable,
    ReductionReported,
    StripesReceived,
)
from diloco_node.core.rounds.claim_limits import claim_fault, discard_contradiction
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discards import DiscardDesk
from diloco_node.core.rounds.eligibility import Eligibility
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.types import Contribution, DiscardedBody, EntryBody, RoundBody

BallotAnswer = (
    Contributed
    | Declined
    | StripesReceived
    | ReductionReported
    | MergedReceived
    | PayloadDurable
    | AuditDrawn
    | ContributionProjected
)


class Answers:
    """Judges each answer before it files it: no region is believed on its word.

    eligibility: learns of new incarnations. proposals: the queue for discards. rounds: open ones, by fragment.
    """

    def __init__(
        self,
        context: RoundContext,
        eligibility: Eligibility,
        proposals: deque[EntryBody],
        rounds: Mapping[int, OpenRound],
    ) -> None:
        self._region, self._fragments = context.region, context.fragments
        self._history, self._liveness, self._effects = context.history, context.liveness, context.effects
        self._eligibility = eligibility
        self._discards = DiscardDesk(context.history)
        self._proposals, self._rounds = proposals, rounds

    def clear(self) -> None:
        """Forget everything: this region leads no longer."""
        self._discards.clear()

    def on_commit(self, body: EntryBody) -> None:
        """Take a committed entry."""
        if isinstance(body, RoundBody):
            self._discards.on_round()
        elif isinstance(body, DiscardedBody):
            self._discards.on_commit(body)

    def take(self, round_: OpenRound, peer: str, message: BallotAnswer) -> None:
        """File an answer to the current ballot of a round that is not proposed yet."""
        match message:
            case Contributed():
                self._take_contribution(round_, peer, message.contribution)
            case Declined():
                self._refuse(round_, peer, message.reason)
            case StripesReceived():
                round_.on_receipts(peer, message.receipts)
            case ReductionReported():
                self._take_report(round_, peer, message)
            case MergedReceived():
                if len(message.digests) == len(round_.stripes):
                    round_.merged_digests[peer] = message.digests
            case PayloadDurable():
                round_.holders[peer] = message.digest
            case AuditDrawn():
                round_.draws[peer] = message
            case ContributionProjected():
                round_.projections[peer] = message.projections

    def merge_fault(self, contribution: Contribution, version: int) -> str:
        """Return why a contribution may not be merged; empty if it may. The leader decides this nowhere else."""
        if self._discards.is_booking(contribution):
            return "its steps are being booked as discarded"
        fault = self._history.contribution_fault(
            contribution, version=version, incarnation_min=self._eligibility.incarnation_min(contribution.learner)
        )
        return fault or self._conflict(contribution)

    def _conflict(self, contribution: Contribution) -> str:
        """Return why a contribution's rows of the data can't be merged beside those of rounds that are decided.

        Any of these rounds may be committed first: then the entry of another would be refused, with all its members.
        """
        shards = self._history.account.shards
        faults = (
            shards.conflict(contribution, rival)
            for fragment, round_ in sorted(self._rounds.items())
            if round_.decision is not None and fragment != contribution.fragment
            for rival in round_.decision.contributions
        )
        return next((fault for fault in faults if fault), "")

    def take_discards(self, bodies: Iterable[DiscardedBody], *, now_ns: int) -> None:
        """Propose to book lost steps, as soon as no open round can still include any of them."""
        for body in bodies:
            peer = body.learner
            status = self._liveness.learner(peer)
            if status is not None and body.incarnation < status.incarnation:
                # That incarnation is over: no ballot may name it from now on.
                self._eligibility.observe_incarnation(peer, body.incarnation + 1)
            round_ = self._rounds.get(body.fragment)
            if not 0 <= body.fragment < len(self._fragments) or discard_contradiction(body, status):
                continue  # of a report on its way, perhaps: it is repeated
            # Steps of an earlier life than the round's are in no contribution to it. They do not wait for it: lives end
            # faster than rounds sometimes, and the account of one is closed when so many have followed.
            included = round_.contributions.get(peer) if round_ is not None else None
            is_held = included is not None and included.incarnation <= body.incarnation
            if is_held or not self._discards.accept(body, now_ns=now_ns):
                continue
            self._proposals.append(body)
            self._effects.note(
                "discarded",
                f"steps ({body.step_from}, {body.step_to}] of {peer}'s incarnation {body.incarnation}: {body.reason}",
                fragment=body.fragment,
            )

    def _take_contribution(self, round_: OpenRound, peer: str, contribution: Contribution) -> None:
        earlier = round_.contributions.get(peer)
        if peer not in round_.members or earlier == contribution:
            return
        if earlier is not None and earlier.incarnation == contribution.incarnation:
            # Its name and bytes stay the same in all ballots of a round: what has arrived is of no use otherwise.
            round_.renamers.add(peer)
            return
        if round_.decision is not None or (earlier is not None and earlier.incarnation > contribution.incarnation):
            return
        fault = weighing.refusal(contribution, len(self._fragments[round_.fragment].pieces))
        if contribution.learner != peer or contribution.fragment != round_.fragment:
            fault = f"is named for {contribution.learner} and fragment {contribution.fragment}"
        self._eligibility.observe_incarnation(peer, contribution.incarnation)
        fault = fault or self._claim_fault(peer, contribution) or self.merge_fault(contribution, round_.version)
        if fault:
            self._refuse(round_, peer, fault)
            return
        round_.refusals.pop(peer, None)
        round_.contributions[peer] = contribution

    def _claim_fault(self, peer: str, contribution: Contribution) -> str:
        if peer == self._region:
            return ""
        statuses = (self._liveness.learner(name) for name in (self._region, *self._liveness.others))
        return claim_fault(
            contribution,
            report=self._liveness.learner(peer),
            reports=[status for status in statuses if status is not None],
            incarnation_known=self._history.account.newest_incarnation(peer),
        )

    def _refuse(self, round_: OpenRound, peer: str, reason: str) -> None:
        if peer in round_.members and peer not in round_.contributions and peer not in round_.refusals:
            self.drop(round_, peer, reason)

    def drop(self, round_: OpenRound, name: str, reason: str) -> None:
        """Leave a member out of the merge."""
        round_.refusals[name] = reason
        self._effects.note("declined", f"{name}: {reason}", fragment=round_.fragment, version=round_.version)

    def _take_report(self, round_: OpenRound, peer: str, report: ReductionReported) -> None:
        if round_.decision is None or report.stripe in round_.reports:
            return
        fault = round_.report_fault(peer, report, len(self._fragments[round_.fragment].pieces))
        if fault:
            self._effects.note(
                "report", f"{peer}: {fault}", fragment=round_.fragment, version=round_.version, is_alarm=True
            )
            return
        round_.on_report(report)
