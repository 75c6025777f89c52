"""The leader's decision of a merge, in numbers by `core.merge.numbers`. Every region checks them (`entry_check`)."""

from __future__ import annotations

from diloco_node.core.merge import outliers
from diloco_node.core.merge.numbers import merge_numbers, outer_rates
from diloco_node.core.messages import MergeDecided
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.types import Contribution, Member, RoundBody


class MergeDecisions:
    """The figures of merges. Remembers whose contributions are too long, to raise an alarm only when that begins."""

    def __init__(self, context: RoundContext) -> None:
        self._fragments = context.fragments
        self._history, self._effects = context.history, context.effects
        self._outliers: set[tuple[str, int]] = set()

    def clear(self) -> None:
        """Forget whose contributions are too long: this region leads no longer."""
        self._outliers.clear()

    def decide(self, round_: OpenRound, contributions: tuple[Contribution, ...]) -> MergeDecided:
        """Fix weights, clips and coefficients; the stripes may still be on their way."""
        recent, account = self._history.recent[round_.fragment], self._history.account
        round_.numbers = numbers = merge_numbers(
            self._fragments[round_.fragment],
            self._history.settings,
            contributions,
            carried_since=[account.carried_since(contribution) for contribution in contributions],
            recent=recent,
            version=round_.version,
            is_last=round_.is_last,
        )
        self._note_outliers(round_, outliers.excess(contributions, numbers.clips, recent))
        round_.decision = MergeDecided(
            round_.ballot, round_.fragment, round_.version, contributions, numbers.coefficients()
        )
        return round_.decision

    def body(self, round_: OpenRound, projections: tuple[tuple[float, ...], ...]) -> RoundBody:
        """Return the ledger entry of a round whose stripes are all merged."""
        numbers, squared_norms = round_.numbers, round_.merged_squared_norms()
        assert numbers is not None
        rates = outer_rates(self._history.settings, is_last=round_.is_last)
        return RoundBody(
            round_.fragment,
            round_.version,
            round_.ballot,
            tuple(map(Member, numbers.contributions, numbers.weights)),
            numbers.share,
            numbers.factors(squared_norms),
            round_.stripes,
            round_.digest,
            round_.is_last,
            squared_norms,
            round_.nonces,
            projections,
            *rates,
        )

    def _note_outliers(self, round_: OpenRound, excess: dict[str, str]) -> None:
        """Raise an alarm when a learner's contributions to a fragment begin to be too long; note each further one."""
        for name in round_.members:
            fault, place = excess.get(name, ""), (name, round_.fragment)
            if fault:
                text, is_new = f"contribution of {name}: {fault}", place not in self._outliers
                self._effects.note("norms", text, fragment=round_.fragment, version=round_.version, is_alarm=is_new)
                self._outliers.add(place)
            else:
                self._outliers.discard(place)
