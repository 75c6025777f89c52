"""Standings of the regions in the last rounds: tokens per step, weight, length, and whether it agrees with the others.

All but the cosines is in the ledger, so every region shows the same. Reads committed rounds, and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median, median_high, median_low
from typing import Any, Final, NamedTuple

from diloco_node.core.merge.opposition import MEMBERS_MIN, NO_OPPOSITION, Opposition
from diloco_node.core.merge.outliers import FASTER_MAX, WILD_RATIO
from diloco_node.core.types import RoundBody

ROUNDS_KEPT: Final = 64
LENGTH_ROUNDS: Final = 8
"""Lengths are a median over so many: in a sound run single ones are twice the usual (D-175)."""

TOKEN_ROUNDS: Final = 4
"""Tokens per step are a mean over so many: over all that are kept, a wrong count would be named 28 rounds later."""

COSINE_ROUNDS: Final = 6
"""Cosines that are all negative and far from zero: where data differ, they are near zero."""


class _Turn(NamedTuple):
    """A region in one round.

    length_ratio: to the median member, step for step; wild_ratio: with as few steps as the merge counts. None where too
    few can be compared.
    """

    steps: int
    tokens: int
    weight_share: float
    length_ratio: float | None
    wild_ratio: float | None


class Standings:
    """Give it each committed round. cosines: per learner those of its last contributions (`StripeEffects.cosines`)."""

    def __init__(self, cosines: Mapping[str, Sequence[float]]) -> None:
        # By region; worked out once, for documents are made more often than rounds.
        self._rounds: deque[dict[str, _Turn]] = deque(maxlen=ROUNDS_KEPT)
        self._cosines = cosines

    def observe(self, body: RoundBody) -> None:
        """Take a committed round."""
        members = body.members
        lengths = [sqrt(sum(member.contribution.squared_norms)) for member in members]
        # The lower of the middle two: half of the members may be too long.
        usual_length, usual_steps = median_low(lengths), median(member.contribution.steps for member in members)
        weights = sum(member.weight for member in members)
        is_comparable = len(lengths) >= MEMBERS_MIN and usual_length > 0.0
        self._rounds.append(
            {
                member.contribution.learner: _Turn(
                    member.contribution.steps,
                    member.contribution.tokens,
                    member.weight / weights,
                    # More steps go further: up to so many times as far.
                    length / usual_length / pace if is_comparable else None,
                    length / usual_length / min(pace, FASTER_MAX) if is_comparable else None,
                )
                for member, length in zip(members, lengths, strict=True)
                for pace in (max(1.0, member.contribution.steps / usual_steps),)
            }
        )

    def document(self, opposition: Opposition = NO_OPPOSITION) -> list[dict[str, Any]]:
        """A row for each region of the last rounds, for the status: means over those rounds, or the recent ones."""
        turns: defaultdict[str, list[_Turn]] = defaultdict(list)
        for turn_of in self._rounds:
            for name, turn in turn_of.items():
                turns[name].append(turn)
        steps_all = sum(turn.steps for of_region in turns.values() for turn in of_region)
        # A region that merges alone beside a witness outweighs nobody: rounds of two or more say who does.
        shared = [turn_of for turn_of in self._rounds if len(turn_of) > 1] or list(self._rounds)
        opponents = opposition.opposed(sorted(turns))
        return [
            {**self._row(name, turns[name], shared, steps_all), "is_opposed": name in opponents}
            for name in sorted(turns)
        ]

    def _row(
        self, name: str, turns: Sequence[_Turn], shared: Sequence[Mapping[str, _Turn]], steps_all: int
    ) -> dict[str, Any]:
        steps, recent = sum(turn.steps for turn in turns), turns[-TOKEN_ROUNDS:]
        cosines = self._cosines.get(name, ())
        return {
            "region": name,
            "rounds": len(turns),
            "tokens_per_step": sum(turn.tokens for turn in recent) / sum(turn.steps for turn in recent),
            "weight_share": sum(turn_of[name].weight_share for turn_of in shared if name in turn_of) / len(shared),
            "steps_share": steps / steps_all,
            "length_ratio": _telling(turns),
            "cosine": sum(cosines) / len(cosines) if cosines else None,
            "cosine_recent": _recent_mean(cosines),
            "cosines": len(cosines),
            "cosines_negative": sum(value < 0.0 for value in cosines),
        }


def _recent_mean(cosines: Sequence[float]) -> float | None:
    """Return the mean of the last cosines; None if there are too few, or one of them is not negative."""
    recent = list(cosines)[-COSINE_ROUNDS:]
    return sum(recent) / COSINE_ROUNDS if len(recent) == COSINE_ROUNDS and max(recent) < 0.0 else None


def _telling(turns: Sequence[_Turn]) -> float | None:
    """Return the ratio of lengths that tells of a region: the usual one of late, or one of which nothing counted.

    The upper of the middle two: a region may be too long in half of the fragments.
    """
    ratios = [turn.length_ratio for turn in turns if turn.length_ratio is not None]
    wildest = max((turn.wild_ratio for turn in turns if turn.wild_ratio is not None), default=0.0)
    if wildest > WILD_RATIO:
        return wildest
    return median_high(ratios[-LENGTH_ROUNDS:]) if len(ratios) >= LENGTH_ROUNDS else None
