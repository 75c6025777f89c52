"""Faults to plant: each breaks one rule on purpose, to show that some checker finds it.

A fault is planted into every region of a run. Most replace one small decision inside the real core, some make the fake
disk or data plane lie. `python -m tests.kit.planted NAME --seed N` runs one.
"""

from dataclasses import replace
from typing import Any

from diloco_node.core.events import ContributionStripeArrived
from diloco_node.core.messages import BallotOpened, MergedReceived, PayloadDurable, StripesReceived
from diloco_node.core.rounds.followed import name_of
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.planting import Fault
from diloco_node.wire.envelope import decode_control, encode_control
from tests.kit.planted.learner_faults import spoil_learners
from tests.kit.planted.member_faults import MEMBER_FAULTS
from tests.kit.planted.recovery_faults import RECOVERY_FAULTS
from tests.kit.planted.row_faults import ROW_FAULTS


def _answer_before_fsync(host: Host) -> None:
    host.fsync_is_late = True


def _sum_as_they_come(host: Host) -> None:
    host.is_order_loose = True


def _persist_without_payload(core: Any) -> None:
    core.ledger._may_persist = lambda entry: True


def _take_uncommitted(core: Any) -> None:
    ledger = core.ledger
    index_taken = [0]

    def take(entries_max: int | None = None) -> list[Any]:
        del entries_max
        first, last = max(index_taken[0], ledger.base.index), max(index_taken[0], ledger.last_index)
        index_taken[0] = last
        ledger._taken_index = max(ledger._taken_index, ledger.commit_index)
        return list(ledger.entries[first - ledger.base.index : last - ledger.base.index])

    ledger.take_committed = take


def _forget_vote(core: Any) -> None:
    core.ledger._vote_to_persist = lambda: ""


def _count_old_terms(core: Any) -> None:
    core.ledger._may_commit = lambda index: True


def _contribute_too_early(core: Any) -> None:
    """The member takes its snapshot against whatever it has; leader and reducers take it for one of this round."""
    core.history.last_version = lambda learner, fragment: -1
    keep_stripe = core.participant.stripe_arrived

    def keep_any_stripe(event: ContributionStripeArrived) -> None:
        newest = core.history.versions[event.contribution.fragment]
        base_version = max(event.contribution.base_version, newest)
        keep_stripe(replace(event, contribution=replace(event.contribution, base_version=base_version)))

    core.participant.stripe_arrived = keep_any_stripe
    core.participant._may_contribute = lambda fragment, version: True
    core.leader._answers.merge_fault = lambda contribution, version: ""


def _ignore_settings(core: Any) -> None:
    core.history._set = lambda bodies: None


def _merge_beside_an_order(core: Any) -> None:
    core.leader.hold_merges = lambda *, now_ns: True


def _add_in_order_of_arrival(core: Any) -> None:
    participant = core.participant

    def order(contributions: Any) -> list[int]:
        arrivals = participant.rounds[contributions[0].fragment].arrivals
        places = {name: place for place, (name, _) in reversed(list(enumerate(arrivals)))}
        return sorted(range(len(contributions)), key=lambda at: places.get(name_of(contributions[at]), 0))

    participant._order_of_sum = order


def _reuse_ballots(core: Any) -> None:
    leader = core.leader
    announce = leader._announcement

    def announce_again(*facts: Any) -> BallotOpened:
        leader._number = 0
        return announce(*facts)

    leader._announcement = announce_again


def _elect_any_length(core: Any) -> None:
    ledger = core.ledger
    ledger._is_up_to_date = lambda last_index, last_term: last_index >= ledger.last_index


def _commit_unmatched(core: Any) -> None:
    ledger = core.ledger
    follow = ledger._append_entries

    def follow_and_commit(peer: str, request: Any, now_ns: int) -> None:
        follow(peer, request, now_ns)
        if not ledger.is_leader and request.term == ledger.term:
            index_reached = min(request.commit_index, ledger._log.known_index)
            ledger.cluster_commit_index = max(ledger.cluster_commit_index, index_reached)

    ledger._append_entries = follow_and_commit


def _merge_the_dead(core: Any) -> None:
    history = core.history
    core.leader._eligibility.incarnation_min = lambda learner: 0
    history.contribution_fault = lambda contribution, *, version, incarnation_min: (
        history.account.fault(contribution) if 0 <= contribution.base_version < version else "base"
    )


class _Forgetful(set[Any]):
    """Remembers nothing."""

    def add(self, _: Any) -> None:
        """Forget it."""


def _forget_bookings(core: Any) -> None:
    core.leader._answers._discards._booking = _Forgetful()


def _weigh_all_the_same(core: Any) -> None:
    merges = core.leader._merges
    decide = merges.decide

    def decide_wrong(round_: Any, contributions: Any) -> Any:
        decision = decide(round_, contributions)
        round_.numbers = replace(round_.numbers, weights=(1.0,) * len(contributions))
        return decision

    merges.decide = decide_wrong
    _recompute_nothing(core)


def _halve_share(core: Any) -> None:
    merges = core.leader._merges
    body_of = merges.body

    def body_wrong(round_: Any, projections: Any) -> Any:
        body = body_of(round_, projections)
        return replace(body, share=body.share / 2)

    merges.body = body_wrong
    _recompute_nothing(core)


def _recompute_nothing(core: Any) -> None:
    """Entries are taken as they come: else no region takes wrong numbers, and no checker sees them."""
    core.ledger._entry_gate._meaning.doubt = lambda _: ""


def _count_any_digest(core: Any) -> None:
    leader = core.leader
    try_propose = leader.try_propose

    def propose_early(round_: Any, now_ns: int) -> None:
        if round_.is_merged:
            round_.holders = dict.fromkeys(round_.holders, round_.digest)
        try_propose(round_, now_ns)

    leader.try_propose = propose_early


def _tell_another_digest(host: Host) -> None:
    """One region says that it holds other bytes, long before it holds any."""
    if host.name != host.setup.regions[0]:
        return

    def tell(_: str, frame: bytes) -> bytes:
        message = decode_control(frame)
        is_early = isinstance(message, StripesReceived | MergedReceived)
        return encode_control(PayloadDurable(message.ballot, bytes(32))) if is_early else frame

    host.network.frame_spoilers[host.name] = tell


def _ask_again(core: Any) -> None:
    participant = core.participant
    follow = participant.ballot_opened

    def ask(leader: str, announcement: BallotOpened) -> None:
        round_ = participant.rounds[announcement.fragment]
        if round_.ballot is not None and round_.ballot.number != announcement.ballot:
            round_.contribution = round_.requested_base = None
        follow(leader, announcement)

    participant.ballot_opened = ask


def _snapshot_each_time(host: Host) -> None:
    def spoil(learner: Any) -> None:
        take = learner.take_snapshot

        def take_new(order: Any) -> None:
            learner.parts[order.fragment].snapshot = None
            take(order)

        learner.take_snapshot = take_new

    spoil_learners(host, spoil)


def _claim_a_step_less(host: Host) -> None:
    def spoil(learner: Any) -> None:
        make = learner.make_snapshot

        def make_less(fragment: int, local: Any) -> Any:
            snapshot = make(fragment, local)
            if snapshot.contribution.steps > 1:
                snapshot.contribution = replace(snapshot.contribution, step_to=snapshot.contribution.step_to - 1)
            return snapshot

        learner.make_snapshot = make_less

    spoil_learners(host, spoil)


CORE_FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "no-fsync",
            "an acknowledgement leaves only after the fsync",
            plant=_answer_before_fsync,
        ),
        Fault(
            "no-payload",
            "an entry is acknowledged only with its payload on the own disk",
            spoil=_persist_without_payload,
        ),
        Fault(
            "apply-before-commit",
            "only committed rounds are applied",
            spoil=_take_uncommitted,
        ),
        Fault(
            "forgotten-vote",
            "a vote is on disk before it is given",
            spoil=_forget_vote,
        ),
        Fault(
            "stale-base",
            "a contribution's base is at least the last version that includes its learner",
            spoil=_contribute_too_early,
        ),
        Fault(
            "arrival-order",
            "contributions are summed in the order of learner names",
            spoil=_add_in_order_of_arrival,
        ),
        Fault(
            "old-term",
            "entries of older terms are never committed by counting",
            spoil=_count_old_terms,
        ),
        Fault(
            "reused-ballot",
            "a ballot is used once",
            spoil=_reuse_ballots,
        ),
        Fault(
            "longest-log",
            "a vote goes to nobody whose last entry is of an older term",
            spoil=_elect_any_length,
        ),
        Fault(
            "unmatched-commit",
            "a follower commits only what matches its leader's log",
            spoil=_commit_unmatched,
        ),
        Fault(
            "dead-incarnation",
            "an incarnation of a learner that is over is not merged any more",
            spoil=_merge_the_dead,
        ),
        Fault(
            "forgotten-booking",
            "steps that are being booked as discarded are not booked again, and not merged",
            spoil=_forget_bookings,
        ),
        Fault(
            "other-digest",
            "who holds other bytes than the merged ones is no holder",
            spoil=_count_any_digest,
            plant=_tell_another_digest,
        ),
        Fault(
            "new-snapshot",
            "a contribution keeps its snapshot from ballot to ballot",
            spoil=_ask_again,
            plant=_snapshot_each_time,
        ),
        Fault(
            "wrong-weights",
            "weights follow from steps, tokens and versions missed",
            spoil=_weigh_all_the_same,
        ),
        Fault(
            "wrong-share",
            "the share follows from weights and versions missed",
            spoil=_halve_share,
        ),
        Fault(
            "step-less",
            "a contribution names the steps that its learner made",
            plant=_claim_a_step_less,
        ),
        Fault(
            "ignored-settings",
            "each region has the settings of the ledger from their entry on",
            spoil=_ignore_settings,
        ),
        Fault(
            "unheld-merges",
            "a merge goes by the settings of the entry before it",
            spoil=_merge_beside_an_order,
        ),
        *RECOVERY_FAULTS,
        *MEMBER_FAULTS,
        *ROW_FAULTS,
    )
}
