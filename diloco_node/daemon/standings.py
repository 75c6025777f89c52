"""What each region brought to the last rounds: tokens per step, weight, length, and whether it agrees with the others.

All but the cosines is in the ledger, so every region shows the same. Reads committed rounds, and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Final

from diloco_node.core.merge.outliers import MEMBERS_MIN
from diloco_node.core.types import Member, RoundBody

ROUNDS_KEPT: Final = 64


class Standings:
    """Give it each committed round.

    Args:
        cosines: per learner those of its last contributions, oldest first (`StripeEffects.cosines`).
    """

    def __init__(self, cosines: Mapping[str, Sequence[float]]) -> None:
        self._rounds: deque[tuple[Member, ...]] = deque(maxlen=ROUNDS_KEPT)
        self._cosines = cosines

    def observe(self, body: RoundBody) -> None:
        """Take a committed round."""
        self._rounds.append(body.members)

    def document(self) -> list[dict[str, Any]]:
        """A row for each region of the last rounds, for the status; means over those rounds."""
        names = sorted({member.contribution.learner for members in self._rounds for member in members})
        steps_all = sum(member.contribution.steps for members in self._rounds for member in members)
        return [self._row(name, steps_all) for name in names]

    def _row(self, name: str, steps_all: int) -> dict[str, Any]:
        rounds = [
            (member, members) for members in self._rounds for member in members if member.contribution.learner == name
        ]
        steps = sum(member.contribution.steps for member, _ in rounds)
        shares = [member.weight / sum(other.weight for other in members) for member, members in rounds]
        lengths = [
            (_length(member), _median(map(_length, members)))
            for member, members in rounds
            if len(members) >= MEMBERS_MIN
        ]
        length, usual_length = max(lengths, key=lambda pair: pair[0] / (pair[1] or 1.0), default=(None, None))
        cosines = self._cosines.get(name, ())
        return {
            "region": name,
            "rounds": len(rounds),
            "tokens_per_step": sum(member.contribution.tokens for member, _ in rounds) / steps,
            "weight_share": sum(shares) / len(self._rounds),
            "steps_share": steps / steps_all,
            # Of the round in which it was longest compared with the median member.
            "length": length,
            "usual_length": usual_length,
            "cosine": sum(cosines) / len(cosines) if cosines else None,
            "cosines": len(cosines),
            "cosines_negative": sum(value < 0.0 for value in cosines),
        }


def _length(member: Member) -> float:
    return sqrt(sum(member.contribution.squared_norms))


def _median(values: Iterable[float]) -> float:
    """The median, the lower of the middle two: half of the members may be too long."""
    in_order = sorted(values)
    return in_order[(len(in_order) - 1) // 2]
