"""What regions answer to a ballot, judged and kept: contributions, refusals, merged stripes, discards."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from diloco_node.core.merge import weights as weighing
from diloco_node.core.messages import (
    Contributed,
    Declined,
    DiscardReported,
    MergedReceived,
    PayloadDurable,
    ReductionReported,
    StripesReceived,
)
from diloco_node.core.rounds.claim_limits import claim_fault
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discards import REPORTED_MAX, DiscardDesk
from diloco_node.core.rounds.eligibility import Eligibility
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.types import Contribution, DiscardedBody, EntryBody, RoundBody

BallotAnswer = Contributed | Declined | StripesReceived | ReductionReported | MergedReceived | PayloadDurable


class Answers:
    """See the module. Nothing is believed for being sent: each answer is judged before it is kept.

    Args:
        proposals: where discards go.
    """

    def __init__(self, context: RoundContext, eligibility: Eligibility, proposals: deque[EntryBody]) -> None:
        self._region, self._fragments = context.region, context.fragments
        self._history, self._liveness, self._effects = context.history, context.liveness, context.effects
        self._eligibility = eligibility
        self._discards = DiscardDesk(context.history)
        self._proposals = proposals

    def clear(self) -> None:
        """This region leads no longer."""
        self._discards.clear()

    def committed(self, body: EntryBody) -> None:
        """An entry is committed."""
        if isinstance(body, RoundBody):
            self._discards.round_committed()
        elif isinstance(body, DiscardedBody):
            self._discards.booked(body)

    def take(self, one: OpenRound, peer: str, message: BallotAnswer) -> None:
        """An answer to the current ballot of a round that is not proposed yet."""
        match message:
            case Contributed():
                self._contributed(one, peer, message.contribution)
            case Declined():
                self._declined(one, peer, message.reason)
            case StripesReceived():
                one.stripes_received(peer, message)
            case ReductionReported():
                self._stripe_merged(one, peer, message)
            case MergedReceived():
                if len(message.digests) == len(one.stripes):
                    one.received_merged[peer] = message.digests
            case PayloadDurable():
                one.holders[peer] = message.digest

    def may_contribute(self, offered: Contribution, version: int) -> str:
        """Why a contribution may not be merged; empty if it may. The one place where the leader decides it."""
        if self._discards.is_booking(offered):
            return "its steps are being booked as discarded"
        return self._history.contribution_fault(
            offered, version=version, incarnation_min=self._eligibility.incarnation_min(offered.learner)
        )

    def discards_reported(
        self, peer: str, message: DiscardReported, rounds: Mapping[int, OpenRound], *, now_ns: int
    ) -> None:
        """Book what is lost, as soon as no open round can still include any of it."""
        for body in message.bodies[:REPORTED_MAX]:
            if body.learner != peer:
                return
            status = self._liveness.learner(peer)
            if status is not None and body.incarnation < status.incarnation:
                # That incarnation is over: no ballot may name it from now on.
                self._eligibility.saw_incarnation(peer, body.incarnation + 1)
            one = rounds.get(body.fragment)
            if (one is not None and peer in one.contributions) or not self._discards.accept(body, now_ns=now_ns):
                continue
            self._proposals.append(body)
            self._effects.note(
                "discarded",
                f"steps ({body.step_from}, {body.step_to}] of {peer}'s incarnation {body.incarnation}: {body.reason}",
                fragment=body.fragment,
            )

    def _contributed(self, one: OpenRound, peer: str, offered: Contribution) -> None:
        known = one.contributions.get(peer)
        if peer not in one.members or known == offered:
            return
        if known is not None and known.incarnation == offered.incarnation:
            # Its name and bytes stay the same in all ballots of a round: what has arrived is of no use otherwise.
            one.renamed.add(peer)
            return
        if one.decision is not None or (known is not None and known.incarnation > offered.incarnation):
            return
        fault = weighing.refusal(offered, len(self._fragments[one.fragment].pieces))
        if offered.learner != peer or offered.fragment != one.fragment:
            fault = f"is named for {offered.learner} and fragment {offered.fragment}"
        self._eligibility.saw_incarnation(peer, offered.incarnation)
        fault = fault or self._claim_fault(peer, offered) or self.may_contribute(offered, one.version)
        if fault:
            self._declined(one, peer, fault)
            return
        one.declined.pop(peer, None)
        one.contributions[peer] = offered

    def _claim_fault(self, peer: str, offered: Contribution) -> str:
        if peer == self._region:
            return ""
        statuses = (self._liveness.learner(name) for name in (self._region, *self._liveness.others))
        return claim_fault(
            offered,
            reported=self._liveness.learner(peer),
            others=[status for status in statuses if status is not None],
            incarnation_known=self._history.incarnation(peer),
        )

    def _declined(self, one: OpenRound, peer: str, reason: str) -> None:
        if peer in one.members and peer not in one.contributions and peer not in one.declined:
            one.declined[peer] = reason
            self._effects.note("declined", f"{peer}: {reason}", fragment=one.fragment, version=one.version)

    def _stripe_merged(self, one: OpenRound, peer: str, report: ReductionReported) -> None:
        if one.decision is None or report.stripe in one.merged:
            return
        fault = one.report_fault(peer, report, len(self._fragments[one.fragment].pieces))
        if fault:
            self._effects.note("report", f"{peer}: {fault}", fragment=one.fragment, version=one.version, is_alarm=True)
            return
        one.merged[report.stripe] = report
