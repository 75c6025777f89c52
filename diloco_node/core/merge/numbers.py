"""Numbers of a merge: all that follows from its contributions and the committed past.

The leader decides by them, and every other region works them out again before it takes the entry. So they depend on
nothing else: no clock, no report, no region.

A round's result for one piece is `factor * sum_m c[m] * delta_m`, with every c known before the sum (from the norms in
the contributions) and the factor after it (from the norm of the decoded sum). With weights w, W = sum w:

- AVG: `c[m] = w[m] / W`, `factor = share`: the weighted mean.
- RDA: `c[m] = w[m] / W * R / |delta_m|` with the radius `R = sum w |delta| / W`, so the sum is R times the mean
  direction; `factor = share * R / |sum|` stretches it back to the radius.

A contribution much longer than anybody's counts in part (`core.merge.outliers`): with the part p of a piece, p * delta
takes the place of delta in all of this.

Source: Decoupled DiLoCo (arXiv 2604.21428), appendix D.2 (RDA; its weighted form is printed with vectors in the radial
part, norms are meant). Ours: the bound on the stretch.
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
from diloco_node.core.merge.weights import to_float32
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

NORM_MIN: Final = 2.0**-100
"""Shorter outer gradients count as zero: the encoder flushes blocks below this size."""

DIRECTION_FLOOR: Final = 0.5
"""RDA stretches the mean direction at most as if it were this part of what orthogonal contributions would give.

Orthogonal directions of equal weight have a mean of norm 1/sqrt(M): that is plain noise, and RDA restores its length. A
mean much shorter than that comes from contributions that oppose each other, and points nowhere: stretching it to full
length would make a large step of a rounding error. Below the floor the result shrinks in proportion, to zero. So the
stretch never exceeds `2 * W / sqrt(sum w^2)`, which is `2 * sqrt(M)` for equal weights.
"""

TRIMMED_STRETCH: Final = 3.0
"""With `trimmed` one of three members stands for all: the sum is at most so many times as long as they are together."""

LENGTH_ERROR: Final = 2e-3
"""Norms that are compared may differ by so much: twice the tolerance for those that reducers report."""


@dataclass(frozen=True, slots=True)
class MergeNumbers:
    """Weights and what follows from them.

    contributions: at least one, sorted by learner; none that `weights.refusal` objects to.
    weights, clips: one of each per contribution. Not all weights are 0.
    rules: one per piece. share: part of a full outer step.
    """

    contributions: tuple[Contribution, ...]
    rules: tuple[MergeRule, ...]
    weights: tuple[float, ...]
    clips: Clips
    share: float

    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """Return the factors on the pieces before they are summed: per contribution, per piece; float32-exact, finite.

        0 for a zero outer gradient under RDA.
        """
        radii, total = self.radii(), sum(self.weights)
        rows = []
        for contribution, weight, clips in zip(self.contributions, self.weights, self.clips, strict=True):
            row = []
            for rule, radius, square, clip in zip(self.rules, radii, contribution.squared_norms, clips, strict=True):
                norm = _norm(square)
                if rule is MergeRule.AVG:
                    row.append(to_float32(weight / total * clip))
                else:
                    row.append(to_float32(weight / total * (radius / norm)) if norm > 0.0 else 0.0)
            rows.append(tuple(row))
        return tuple(rows)

    def factors(self, squared_norms: Sequence[float]) -> tuple[float, ...]:
        """Return the factor on each piece of the decoded sum of these norms: float32-exact, finite, not negative."""
        result = []
        for piece, (rule, radius, square) in enumerate(zip(self.rules, self.radii(), squared_norms, strict=True)):
            if rule is MergeRule.AVG:
                result.append(to_float32(self.share))
            elif radius == 0.0:
                result.append(0.0)
            else:
                mean_direction = max(sqrt(square) / radius, DIRECTION_FLOOR * self._orthogonal_norm(piece))
                result.append(to_float32(self.share / mean_direction))
        return tuple(result)

    def radii(self) -> tuple[float, ...]:
        """Return the weighted mean norm per piece, as far as it counts: no sum of these contributions is longer."""
        total = sum(self.weights)
        return tuple(
            sum(
                weight / total * (_norm(contribution.squared_norms[piece]) * clips[piece])
                for contribution, weight, clips in zip(self.contributions, self.weights, self.clips, strict=True)
            )
            for piece in range(len(self.rules))
        )

    def _orthogonal_norm(self, piece: int) -> float:
        """Norm of the mean direction if all non-zero contributions were orthogonal: `sqrt(sum w^2) / W`."""
        total = sum(self.weights)
        return sqrt(
            sum(
                (weight / total) ** 2
                for contribution, weight in zip(self.contributions, self.weights, strict=True)
                if _norm(contribution.squared_norms[piece]) > 0.0
            )
        )


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
    """Work out the numbers of a round that makes a version. contributions: as of `MergeNumbers`.

    carried_since: per contribution, the version since which its learner has carried its steps; None: it has not.
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


def outer_rates(settings: RunSettings, *, is_last: bool) -> tuple[float, float]:
    """Outer learning rate and momentum of a round: the run's, but 1 and 0 in the last round of a fragment (D-Q4).

    The momentum stays as it is there, for a run that is extended.
    """
    return (1.0, 0.0) if is_last else (settings.outer_lr, settings.outer_momentum)


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
    return tuple((1.0 + LENGTH_ERROR) * length * length + NORM_MIN**2 for length in lengths)


def stripe_radii(coefficients: Sequence[Sequence[float]], squared_norms: Sequence[Sequence[float]]) -> list[float]:
    """Return per piece the sum of the weighted lengths of one stripe. All are per contribution, per piece."""
    lengths = (
        [coefficient * sqrt(square) for coefficient, square in zip(row, squares, strict=True)]
        for row, squares in zip(coefficients, squared_norms, strict=True)
    )
    return [fsum(column) for column in zip(*lengths, strict=True)]


def _norm(square: float) -> float:
    norm = sqrt(square)
    return norm if norm >= NORM_MIN else 0.0
