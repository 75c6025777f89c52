"""Standings of the regions in the last rounds: tokens per step, weight, length, and whether it agrees with the others.

All but the cosines is in the ledger, so every region shows the same. Reads committed rounds, and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Final, NamedTuple

from diloco_node.core.merge.outliers import MEMBERS_MIN
from diloco_node.core.types import RoundBody

ROUNDS_KEPT: Final = 64
ROUNDS_RECENT: Final = 8
"""Tokens per step are a mean over so many: over all that are kept, a wrong count would be named 28 rounds later."""


class _Turn(NamedTuple):
    """A region in one round; `usual_length` is the median's, both lengths None where too few can be compared."""

    steps: int
    tokens: int
    weight_share: float
    length: float | None
    usual_length: float | None


class Standings:
    """Give it each committed round. cosines: per learner those of its last contributions (`StripeEffects.cosines`)."""

    def __init__(self, cosines: Mapping[str, Sequence[float]]) -> None:
        # By region; worked out once, for documents are made more often than rounds.
        self._rounds: deque[dict[str, _Turn]] = deque(maxlen=ROUNDS_KEPT)
        self._cosines = cosines

    def observe(self, body: RoundBody) -> None:
        """Take a committed round."""
        lengths = [sqrt(sum(member.contribution.squared_norms)) for member in body.members]
        # The lower of the middle two: half of the members may be too long.
        usual_length = sorted(lengths)[(len(lengths) - 1) // 2]
        weights = sum(member.weight for member in body.members)
        is_comparable = len(lengths) >= MEMBERS_MIN
        self._rounds.append(
            {
                member.contribution.learner: _Turn(
                    member.contribution.steps,
                    member.contribution.tokens,
                    member.weight / weights,
                    length if is_comparable else None,
                    usual_length if is_comparable else None,
                )
                for member, length in zip(body.members, lengths, strict=True)
            }
        )

    def document(self) -> list[dict[str, Any]]:
        """A row for each region of the last rounds, for the status: means over those rounds, or the recent ones."""
        turns: defaultdict[str, list[_Turn]] = defaultdict(list)
        for turn_of in self._rounds:
            for name, turn in turn_of.items():
                turns[name].append(turn)
        steps_all = sum(turn.steps for of_region in turns.values() for turn in of_region)
        return [self._row(name, turns[name], steps_all) for name in sorted(turns)]

    def _row(self, name: str, turns: Sequence[_Turn], steps_all: int) -> dict[str, Any]:
        steps, recent = sum(turn.steps for turn in turns), turns[-ROUNDS_RECENT:]
        lengths = [(turn.length, turn.usual_length) for turn in turns if turn.length is not None]
        length, usual_length = max(lengths, key=lambda pair: pair[0] / (pair[1] or 1.0), default=(None, None))
        cosines = self._cosines.get(name, ())
        return {
            "region": name,
            "rounds": len(turns),
            "tokens_per_step": sum(turn.tokens for turn in recent) / sum(turn.steps for turn in recent),
            "weight_share": sum(turn.weight_share for turn in turns) / len(self._rounds),
            "steps_share": steps / steps_all,
            # Of the round in which it was longest compared with the median member.
            "length": length,
            "usual_length": usual_length,
            "cosine": sum(cosines) / len(cosines) if cosines else None,
            "cosines": len(cosines),
            "cosines_negative": sum(value < 0.0 for value in cosines),
        }
