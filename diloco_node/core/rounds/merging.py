"""What a leader decides about the numbers of a merge: weights, clips, coefficients; then its share and factors.

Who is in the merge is decided by the ballots (`leader`). The arithmetic is that of `core.merge.weights` and
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
        """This region leads no longer: the next time all are new."""
        self._outliers.clear()

    def decide(self, one: OpenRound, chosen: tuple[Contribution, ...]) -> MergeDecided:
        """Fix weights, what of each counts, and coefficients; the stripes may still be on their way."""
        rules = self._rules(one)
        one.weights = weighing.weights(
            chosen,
            self._versions_missed(chosen, one.version),
            weight_cap=self._settings.weight_cap,
            carry_steps_limit=self._settings.carry_steps_limit,
        )
        recent = self._history.recent[one.fragment]
        one.clips = outliers.clips(chosen, self._fragments[one.fragment].piece_sizes, recent)
        self._note_outliers(one, outliers.excess(chosen, one.clips, recent))
        coefficients = weighing.coefficients(chosen, one.weights, rules, one.clips)
        one.decision = MergeDecided(one.ballot, one.fragment, one.version, chosen, coefficients)
        return one.decision

    def body(self, one: OpenRound) -> RoundBody:
        """The entry of a round whose stripes are all merged."""
        assert one.decision is not None
        chosen = one.decision.contributions
        share = 1.0 if one.is_last else weighing.share(one.weights, self._versions_missed(chosen, one.version))
        factors = weighing.factors(
            chosen, one.weights, self._rules(one), one.clips, one.merged_squared_norms(), share=share
        )
        members = tuple(Member(offered, weight) for offered, weight in zip(chosen, one.weights, strict=True))
        return RoundBody(
            one.fragment, one.version, one.ballot, members, share, factors, one.stripes, one.digest, one.is_last
        )

    def _note_outliers(self, one: OpenRound, excess: dict[str, str]) -> None:
        """An alarm when a learner's contributions to a fragment begin to be too long, a line as long as they are."""
        for name in one.members:
            fault = excess.get(name, "")
            is_new = bool(fault) and (name, one.fragment) not in self._outliers
            if fault:
                self._outliers.add((name, one.fragment))
                text = f"contribution of {name}: {fault}"
                self._effects.note("norms", text, fragment=one.fragment, version=one.version, is_alarm=is_new)
            else:
                self._outliers.discard((name, one.fragment))

    def _rules(self, one: OpenRound) -> tuple[MergeRule, ...]:
        """Per piece; the last round is a plain mean (`core.merge.outer.outer_of`)."""
        rules = self._fragments[one.fragment].rules
        return (MergeRule.AVG,) * len(rules) if one.is_last else rules

    def _versions_missed(self, chosen: tuple[Contribution, ...], version: int) -> tuple[int, ...]:
        """Per contribution, versions over which its learner carried steps; 0 where nothing was carried over any.

        A learner that gave its steps up after a long cut has carried nothing over the versions before that: its
        contribution holds a cycle like anybody's, and what it kept of those after it.
        """
        if self._settings.carry is not CarryMode.CARRY:
            return (0,) * len(chosen)
        since = [self._history.carried_since(offered) for offered in chosen]
        return tuple(0 if one is None else version - 1 - one for one in since)
