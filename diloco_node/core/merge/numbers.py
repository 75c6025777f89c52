"""Numbers of a merge: all that follows from its contributions and the committed past.

The leader decides by them, and every other region works them out again before it takes the entry. So they depend on
nothing else: no clock, no report, no region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Final

from diloco_node.core.merge import outliers
from diloco_node.core.merge import weights as weighing
from diloco_node.core.merge.fragments import Fragment
from diloco_node.core.merge.outliers import Clips, RecentRounds
from diloco_node.core.types import CarryMode, Codec, Contribution, MergeRule, RunSettings

FLOAT32_ERROR: Final = 2.0**-20
"""Two regions may differ by so much of a number: another Python may round a sum otherwise in the last bit."""

ROUNDING: Final = {Codec.INT4: 16 / 14, Codec.INT8: 16 / 254, Codec.BF16: 2.0**-8, Codec.FP32: 2.0**-20}
"""Length that encoding adds to a block or takes from it, at most, as a part of the block's: half a step for each of 256
values, where the step is the largest value by the levels."""

NORM_TOLERANCE: Final = 1e-3
"""Squared norms summed stripe by stripe may differ by this part from those in a contribution's header."""

NORM_FLOOR: Final = 2.0**-200
"""Squares of values that the encoder flushes to zero."""

TRIMMED_STRETCH: Final = 3.0
"""With `trimmed` one of three members stands for all: the sum is at most so many times as long as they are together."""

LENGTH_ERROR: Final = 2e-3
"""Norms that are compared may differ by so much: twice the tolerance for those that reducers report."""


@dataclass(frozen=True, slots=True)
class MergeNumbers:
    """Weights and what follows from them.

    contributions: at least one, sorted by learner. weights, clips: one of each per contribution.
    rules: one per piece. share: part of a full outer step.
    """

    contributions: tuple[Contribution, ...]
    rules: tuple[MergeRule, ...]
    weights: tuple[float, ...]
    clips: Clips
    share: float

    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """Return the factors on each contribution's pieces before they are summed (`weights.coefficients`)."""
        return weighing.coefficients(self.contributions, self.weights, self.rules, self.clips)

    def factors(self, squared_norms: Sequence[float]) -> tuple[float, ...]:
        """Return the factor on each piece of the decoded sum, of these squared norms per piece (`weights.factors`)."""
        return weighing.factors(
            self.contributions, self.weights, self.rules, self.clips, squared_norms, share=self.share
        )

    def radii(self) -> tuple[float, ...]:
        """Return per piece the sum of the weighted lengths: no sum of these contributions is longer."""
        return weighing.radii(self.contributions, self.weights, self.rules, self.clips)


def merge_numbers(
    fragment: Fragment,
    settings: RunSettings,
    contributions: tuple[Contribution, ...],
    *,
    carried_since: Sequence[int | None],
    recent: RecentRounds,
    version: int,
    is_last: bool,
) -> MergeNumbers:
    """Work out the numbers of a round.

    Args:
        fragment: of the round. settings: of the run.
        contributions: at least one, sorted by learner; none that `weights.refusal` objects to.
        carried_since: per contribution, the version since which its learner has carried its steps; None: it has not.
        recent: the rounds of the fragment before. version: what the round makes.
        is_last: it is the run's last round of the fragment: a plain mean, taken whole.
    """
    # A learner that gave its steps up after a long cut has carried nothing over the versions before that. Its
    # contribution holds a cycle like anybody's, and the steps that it has carried since.
    is_carrying = settings.carry is CarryMode.CARRY
    gaps = [0 if since is None or not is_carrying else version - 1 - since for since in carried_since]
    clips = outliers.clips(contributions, fragment.piece_sizes, recent)
    weights = weighing.weights(contributions, gaps, clips, settings)
    return MergeNumbers(
        contributions,
        (MergeRule.AVG,) * len(fragment.rules) if is_last else tuple(fragment.rules),
        weights,
        clips,
        1.0 if is_last else weighing.share(weights, gaps),
    )


def is_same_number(first: float, second: float) -> bool:
    """Whether two regions' results of the same arithmetic agree; 0 is only equal to itself."""
    return first == second or abs(first - second) < FLOAT32_ERROR * max(abs(first), abs(second))


def is_same_norm(first: float, second: float) -> bool:
    """Whether two squared norms of the same values agree, whoever added them up in whatever order."""
    return abs(first - second) <= NORM_TOLERANCE * max(first, second) + NORM_FLOOR


def length_limits(radii: Sequence[float], settings: RunSettings) -> tuple[float, ...]:
    """Return per piece the largest squared norm that a decoded sum can have.

    radii: per piece, sum of the weighted lengths of what is summed.
    """
    stretch = TRIMMED_STRETCH if settings.merge is MergeRule.TRIMMED else 1.0
    lengths = ((1.0 + ROUNDING[settings.codec_down]) * stretch * radius for radius in radii)
    return tuple((1.0 + LENGTH_ERROR) * length * length + weighing.NORM_MIN**2 for length in lengths)


def stripe_radii(coefficients: Sequence[Sequence[float]], squared_norms: Sequence[Sequence[float]]) -> list[float]:
    """Return per piece the sum of the weighted lengths of one stripe. All are per contribution, per piece."""
    lengths = (
        [coefficient * sqrt(square) for coefficient, square in zip(row, squares, strict=True)]
        for row, squares in zip(coefficients, squared_norms, strict=True)
    )
    return [fsum(column) for column in zip(*lengths, strict=True)]
