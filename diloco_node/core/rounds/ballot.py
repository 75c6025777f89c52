"""Ballots of a round: how long one may take, and with whom and over which stripes the next one is held.

The deadline follows from measured times. After a failed ballot, contributions keep their names, so that stripes which
have arrived at a remaining reducer are not sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.merge.fragments import Fragment
from diloco_node.core.merge.schedule import SLOWER_MAX, MovingAverage, believed_step_time_ns
from diloco_node.core.messages import ReusedStripe
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.open_round import Deadline, OpenRound
from diloco_node.core.types import BLOCK_VALUES, SMALL_TENSOR_VALUES, Codec, Contribution, Stripe
from diloco_node.numeric import NS_PER_S

MARGIN: Final = 3
"""A ballot may take this many times what is expected; a next ballot costs a whole transfer if stripes move."""

ATTEMPTS_DOUBLED_MAX: Final = 3
"""The time doubles with each further ballot of a round, three times at most. A link slower than measured gets there."""

PROBE_HEARTBEATS: Final = 3
"""The deadline of a ballot that tries a suspect, in heartbeats: time to ask again for lost messages."""

PROBE_MARGIN: Final = 2
"""Or this many times the usual ballot of the fragment, if that is longer; never above the full deadline."""

RATE_UNKNOWN_BYTES_PER_S: Final = 12_500_000
"""Assumed before anything was measured: 100 Mbit/s, the slow end of what regions are joined by."""

_BITS: Final = {Codec.INT4: 4, Codec.INT8: 8, Codec.BF16: 16, Codec.FP32: 32}
_SCALE_BITS: Final = 32


def encoded_bytes(fragment: Fragment, codec: Codec) -> int:
    """About how many bytes a fragment takes (docs/formats.md, "Encoded bytes"), before compression."""
    bits = 0
    for size in fragment.piece_sizes:
        if codec is Codec.FP32:
            bits += 32 * size
        elif codec is Codec.BF16 or size < SMALL_TENSOR_VALUES:
            bits += 16 * size
        else:
            bits += _BITS[codec] * size + _SCALE_BITS * -(-size // BLOCK_VALUES)
    return -(-bits // 8)


def ballot_deadline(
    *, minimum_ns: int, attempt: int, step_time_ns: int, rtt_ns: int, transfer_bytes: int, rate_bytes_per_s: int
) -> Deadline:
    """Decide when to give up on a ballot.

    Two steps of the slowest member, four round trips, and the time for the round's bytes at the measured rate. All
    that times `MARGIN`, and doubled for each failed ballot of this round, three times at most; never less than
    `minimum_ns`. Step time, round trip and rate are 0 if unknown. attempt: 0 for the first ballot of the round.
    transfer_bytes: what the busiest region sends in this round.
    """
    rate = rate_bytes_per_s or RATE_UNKNOWN_BYTES_PER_S
    transfer_ns = transfer_bytes * NS_PER_S // rate
    expected_ns = 2 * step_time_ns + 4 * rtt_ns + transfer_ns
    factor = 1 << min(attempt, ATTEMPTS_DOUBLED_MAX)
    duration_ns = factor * max(minimum_ns, MARGIN * expected_ns)

    def seconds(span_ns: int) -> str:
        return f"{span_ns / NS_PER_S:.3g} s"

    derivation = (
        f"{seconds(duration_ns)} = {factor} x max({seconds(minimum_ns)}, {MARGIN} x ("
        f"2 steps of {seconds(step_time_ns)} + 4 round trips of {seconds(rtt_ns)} + "
        f"{transfer_bytes} bytes at {rate} bytes/s{'' if rate_bytes_per_s else ' (assumed)'}))"
    )
    return Deadline(duration_ns, derivation)


def first_duration_ns(deadline: Deadline, attempt: int) -> int:
    """Return how long a round's first ballot was to take, from the deadline of this attempt."""
    return deadline.duration_ns >> min(attempt, ATTEMPTS_DOUBLED_MAX)


class BallotClock:
    """Remembers how long ballots took, and gives new ones their deadline."""

    def __init__(self, context: RoundContext) -> None:
        self._fragments, self._liveness = context.fragments, context.liveness
        self._context = context
        self._took = [MovingAverage() for _ in context.fragments]
        # Per fragment the bytes of the last first ballot, and the rates that its regions reported then.
        self._opened: list[tuple[int, dict[str, int]]] = [(0, {}) for _ in context.fragments]
        # Per fragment the rate of the last one that was merged, and what its members had reported.
        self._proofs: list[tuple[int, dict[str, int]]] = [(0, {}) for _ in context.fragments]

    def observe(self, fragment: int, duration_ns: int, names: Collection[str] = ()) -> None:
        """Learn how long a ballot took to its commit. names: of its members, if it was the first of its round."""
        self._took[fragment] = self._took[fragment].after(duration_ns)
        if names:
            size_bytes, reports = self._opened[fragment]
            rate = size_bytes * NS_PER_S // max(1, duration_ns)
            self._proofs[fragment] = (rate, {name: report for name, report in reports.items() if name in names})

    def _usual_ns(self, fragment: int) -> int:
        """Return the usual time of a ballot of this fragment; 0 if nothing is known.

        A fragment that was never merged gets an estimate: its size, at the slowest pace of any other fragment.
        Otherwise its first ballot would fail on a link slower than RATE_UNKNOWN_BYTES_PER_S.
        """
        own_ns = self._took[fragment].average_ns
        if own_ns:
            return own_ns
        size = self._fragments[fragment].size
        pairs = zip(self._fragments, self._took, strict=True)
        return max(
            (took.average_ns * size // fragment_.size for fragment_, took in pairs if took.average_ns), default=0
        )

    def deadline(
        self, fragment: int, members: tuple[str, ...], stripes: tuple[Stripe, ...], *, attempt: int
    ) -> Deadline:
        """Return the deadline of a ballot with these members and stripes; attempt 0 is the first of the round."""
        statuses = [self._liveness.learner(name) for name in members]
        step_times = [status.step_time_ns for status in statuses if status is not None]
        up_bytes = encoded_bytes(self._fragments[fragment], self._context.settings.codec_up)
        down_bytes = encoded_bytes(self._fragments[fragment], self._context.settings.codec_down)
        reducers = len({stripe.reducer for stripe in stripes})
        busiest_bytes = (up_bytes * max(1, reducers - 1) + down_bytes * (len(self._context.regions) - 1)) // reducers
        usual_ns = self._usual_ns(fragment)
        measured = busiest_bytes * NS_PER_S // usual_ns if usual_ns else 0
        budgets = {name: self._liveness.budget(name) for name in {*members, *(stripe.reducer for stripe in stripes)}}
        limits = {name: filter(None, (budget.egress, budget.ingress)) for name, budget in budgets.items()}
        reports = {name: min(rates, default=0) for name, rates in limits.items()}
        if attempt == 0:
            self._opened[fragment] = (busiest_bytes, reports)
        else:
            self._proofs[fragment] = (0, {})  # a low budget may have kept that ballot open: a holder's way in, perhaps
        return ballot_deadline(
            minimum_ns=self._context.settings.ballot_deadline_min_ns,
            attempt=attempt,
            step_time_ns=believed_step_time_ns(max(step_times, default=0), step_times),
            rtt_ns=max(self._liveness.rtt_ns(name) for name in reports),
            transfer_bytes=busiest_bytes,
            rate_bytes_per_s=self._believed_rate(fragment, reports, measured),
        )

    def first_deadline(
        self, fragment: int, members: tuple[str, ...], stripes: tuple[Stripe, ...], failed_probes: Sequence[int]
    ) -> Deadline:
        """Return the deadline of a round's first ballot: short if it tries suspects, at little cost to the others.

        failed_probes: of each suspect that it tries, how many in a row failed. The deadline doubles with every second
        of them, so a region that is slow and not broken gets there in the end.
        """
        full = self.deadline(fragment, members, stripes, attempt=0)
        if not failed_probes:
            return full
        duration_ns = min(full.duration_ns, self.patience_ns(fragment) << max(failed_probes) // 2)
        return Deadline(duration_ns, f"{duration_ns / NS_PER_S:.3g} s to try who is in doubt, of {full.derivation}")

    def patience_ns(self, fragment: int) -> int:
        """Return how long the others wait for a single region: a suspect on trial, or a leader without the payload."""
        usual_ns = self._usual_ns(fragment)
        if not usual_ns:
            return self._context.settings.ballot_deadline_min_ns
        return max(PROBE_HEARTBEATS * self._context.settings.heartbeat_ns, PROBE_MARGIN * usual_ns)

    def _believed_rate(self, fragment: int, reports: Mapping[str, int], measured: int) -> int:
        """Return one round's part of the slowest reported budget, if less than the measured or assumed rate; else that.

        A budget may have been lowered since. A region is believed to be slower than the others by as much as its
        learner is, and no slower than with the same budget, or less, in a ballot before.

        reports: by region; 0: no limit. measured: 0: nothing was; 0 is returned for the assumed rate.
        """
        rounds = self._context.settings.rounds_in_flight_max
        ceiling = measured or RATE_UNKNOWN_BYTES_PER_S
        usual = ceiling * rounds
        proof, reports_then = self._proofs[fragment]
        rates = sorted(
            max(min(report or usual, usual), proof if 0 < reports_then.get(name, 0) <= report else 0)
            for name, report in reports.items()
        )
        rate = max(1, max(rates[0], rates[(len(rates) - 1) // 2] // SLOWER_MAX) // rounds)
        return rate if rate < ceiling else measured


@dataclass(frozen=True, slots=True)
class NextBallot:
    """The plan for the next ballot. contributions: those that are here already; they keep their names.

    reused: stripes of theirs that have arrived and stay where they are.
    """

    members: tuple[str, ...]
    contributions: dict[str, Contribution]
    reused: tuple[ReusedStripe, ...]


def plan_next(
    round_: OpenRound,
    stripes: tuple[Stripe, ...],
    *,
    usable: Mapping[str, Contribution],
    able: tuple[str, ...],
    reachable: Collection[str],
    is_late: bool,
) -> NextBallot:
    """Choose the members of the next ballot.

    After a missed deadline: those whose contribution has arrived at all remaining reducers. After a loss: every
    reachable member that still has a contribution. If nobody remains: all that could contribute to a fresh round.

    stripes: of the next ballot. usable: contributions of the failed ballot that may still be merged.
    able: learners that could contribute to a fresh round, sorted. is_late: the deadline was missed; else a loss.
    """
    places = {stripe: index for index, stripe in enumerate(stripes)}
    # Of each stripe that stays with its reducer: its place in the failed ballot, and in the next one.
    same_places = [(old, places[stripe]) for old, stripe in enumerate(round_.stripes) if stripe in places]
    is_same_layout = stripes == round_.stripes
    # A lost member can't send its stripes again, so it stays only if all stripes stay where they are.
    whole_learners = {
        name
        for name in usable
        if same_places
        and round_.is_received(name, [old for old, _ in same_places])
        and (name in reachable or is_same_layout)
    }
    if is_late:
        names = whole_learners
    else:
        names = {
            name
            for name in round_.members
            if name in reachable and name not in round_.refusals and (name in usable or name in able)
        }
        names |= whole_learners if is_same_layout else set()
    members = tuple(sorted(names)) or able
    reused_stripes = tuple(
        ReusedStripe(name, new)
        for name in members
        for old, new in same_places
        if name in usable and round_.is_received(name, [old])
    )
    return NextBallot(members, {name: usable[name] for name in members if name in usable}, reused_stripes)
