"""Numbers of a merge as the leader decides them: weights, clips, coefficients; then share and factors.

The ballots decide who is in the merge (`leader`). The arithmetic is that of `core.merge.weights` and
`core.merge.outliers`.
"""

from __future__ import annotations

from diloco_node.core.merge import outliers
from diloco_node.core.merge import weights as weighing
from diloco_node.core.messages import MergeDecided
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.types import CarryMode, Contribution, Member, MergeRule, RoundBody


class MergeDecisions:
    """See the module. Remembers whose contributions are too long, to raise an alarm only when that begins."""

    def __init__(self, context: RoundContext) -> None:
        self._fragments, self._settings = context.fragments, context.settings
        self._history, self._effects = context.history, context.effects
        self._outliers: set[tuple[str, int]] = set()

    def clear(self) -> None:
        """Forget whose contributions are too long: this region leads no longer."""
        self._outliers.clear()

    def decide(self, round_: OpenRound, contributions: tuple[Contribution, ...]) -> MergeDecided:
        """Fix weights, clips and coefficients; the stripes may still be on their way."""
        rules = self._rules(round_)
        recent = self._history.recent[round_.fragment]
        round_.clips = outliers.clips(contributions, self._fragments[round_.fragment].piece_sizes, recent)
        missed = self._versions_missed(contributions, round_.version)
        round_.weights = weighing.weights(contributions, missed, round_.clips, self._settings)
        self._note_outliers(round_, outliers.excess(contributions, round_.clips, recent))
        coefficients = weighing.coefficients(contributions, round_.weights, rules, round_.clips)
        round_.decision = MergeDecided(round_.ballot, round_.fragment, round_.version, contributions, coefficients)
        return round_.decision

    def body(self, round_: OpenRound) -> RoundBody:
        """Return the ledger entry of a round whose stripes are all merged."""
        assert round_.decision is not None
        contributions = round_.decision.contributions
        share = (
            1.0
            if round_.is_last
            else weighing.share(round_.weights, self._versions_missed(contributions, round_.version))
        )
        factors = weighing.factors(
            contributions, round_.weights, self._rules(round_), round_.clips, round_.merged_squared_norms(), share=share
        )
        members = tuple(
            Member(contribution, weight) for contribution, weight in zip(contributions, round_.weights, strict=True)
        )
        return RoundBody(
            round_.fragment,
            round_.version,
            round_.ballot,
            members,
            share,
            factors,
            round_.stripes,
            round_.digest,
            round_.is_last,
        )

    def _note_outliers(self, round_: OpenRound, excess: dict[str, str]) -> None:
        """Raise an alarm when a learner's contributions to a fragment begin to be too long; note each further one."""
        for name in round_.members:
            fault = excess.get(name, "")
            is_new = bool(fault) and (name, round_.fragment) not in self._outliers
            if fault:
                self._outliers.add((name, round_.fragment))
                text = f"contribution of {name}: {fault}"
                self._effects.note("norms", text, fragment=round_.fragment, version=round_.version, is_alarm=is_new)
            else:
                self._outliers.discard((name, round_.fragment))

    def _rules(self, round_: OpenRound) -> tuple[MergeRule, ...]:
        """Return the rule of each piece; the last round is a plain mean (`core.merge.outer.outer_of`)."""
        rules = self._fragments[round_.fragment].rules
        return (MergeRule.AVG,) * len(rules) if round_.is_last else rules

    def _versions_missed(self, contributions: tuple[Contribution, ...], version: int) -> tuple[int, ...]:
        """Return per contribution over how many versions its learner carried steps; 0 if it carried none.

        A learner that gave its steps up after a long cut has carried nothing over the versions before that. Its
        contribution holds a cycle like anybody's, and the steps that it has carried since.
        """
        if self._settings.carry is not CarryMode.CARRY:
            return (0,) * len(contributions)
        since = [self._history.carried_since(contribution) for contribution in contributions]
        return tuple(0 if version_before is None else version - 1 - version_before for version_before in since)
