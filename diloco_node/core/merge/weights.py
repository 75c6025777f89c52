"""Weights of the contributions to a merge, decided once by the leader and shipped as float32 bits.

A learner that missed n versions brings its last cycle and what it carried of the n before: `cycles(n)` cycles' worth.
It weighs so much more, and the share scales the round back to one cycle, as all learners make one cycle at a time.

No member decides alone (D-S3). Tokens are its own word: a script that counts bytes, or every rank's batch on each
rank, says eight times too much, and weighs 64 times too much. So what is far beyond the others' tokens per step counts
as theirs, and of three or more members none has more than a part of the weight.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3.2. Ours: share and the caps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isnan
from statistics import median
from typing import Final

from diloco_node.core.bounds import FLOAT32_MAX
from diloco_node.core.merge.carry import MISSED_KEEP
from diloco_node.core.merge.opposition import MEMBERS_MIN
from diloco_node.core.merge.outliers import Clips
from diloco_node.core.types import Contribution, RunSettings

NORM_MAX: Final = 2.0**100
"""No outer gradient is longer. The radius is at most the longest norm that was named, and no coefficient makes a sum
longer than the radius: with this limit all that is computed from norms stays finite, whatever one learner claims."""

SQUARED_NORM_MAX: Final = NORM_MAX * NORM_MAX

ROUNDED: Final = 1.0 + 2.0**-30
"""Above all errors of rounding in the search of a limit."""


def to_float32(value: float) -> float:
    """The nearest float32, as a float; beyond its range the largest finite one. NaN is refused with ValueError."""
    if isnan(value):
        raise ValueError("NaN can't be a weight, coefficient or factor")
    bounded = min(max(value, -FLOAT32_MAX), FLOAT32_MAX)
    (float32,) = struct.unpack("<f", struct.pack("<f", bounded))
    return float(float32)


def weight(tokens: float, steps: int) -> float:
    """`tokens^2 / steps`: how much was learnt, times how much each step learnt. 0 for no steps or no tokens."""
    return to_float32(tokens * tokens / steps) if steps > 0 and tokens > 0 else 0.0


def cycles(versions_missed: int) -> float:
    """How many cycles' worth of steps a contribution holds: the last one whole, each one before discounted once more.

    `1 + keep + keep^2 + ...` with `carry.MISSED_KEEP`: 1 for a learner that was in the last round, at most 2.
    """
    return float((1.0 - MISSED_KEEP ** (versions_missed + 1)) / (1.0 - MISSED_KEEP))


def believed_tokens(contributions: Sequence[Contribution], ratio_max: float) -> tuple[float, ...]:
    """Return the tokens of each contribution as far as the others bear them out.

    Tokens per step beyond `ratio_max` times the median of the others count as that median: they are a mistake, or
    something that the operator has to name. The larger of two members is compared with the other. Nobody is compared
    with members that count none.
    """
    rates = [contribution.tokens / contribution.steps for contribution in contributions]
    tokens: list[float] = []
    for place, (contribution, rate) in enumerate(zip(contributions, rates, strict=True)):
        rivals = [rival for rival in rates[:place] + rates[place + 1 :] if rival > 0.0]
        usual = median(rivals) if rivals else rate
        tokens.append(usual * contribution.steps if rate > ratio_max * usual else contribution.tokens)
    return tuple(tokens)


def weights(
    contributions: Sequence[Contribution], versions_missed: Sequence[int], clips: Clips, settings: RunSettings
) -> tuple[float, ...]:
    """The weight of each contribution of a round, in their order; float32-exact, at least 0.

    The steps of a learner that missed versions count as far as it has carried them: `cycles(n) / (n + 1)`. A learner
    that was away (more steps than `carry_steps_limit`) weighs at most `weight_cap` times the median of the members that
    were not: its long trajectory went over ground that the others covered meanwhile.

    Nobody of three or more has more than `weight_share_max` of the weight, or 1/n if n weigh something. All that count
    are equal to 1 if none has any weight, so that a round never divides by 0.

    versions_missed: per contribution, versions since its learner was last included, the new one not counted.
    clips: from `core.merge.outliers.clips`; a contribution of which nothing counts weighs nothing.
    """
    counts = [any(row) for row in clips]
    tokens = believed_tokens(contributions, settings.tokens_ratio_max)
    raw = [
        to_float32(weight(tokens_, contribution.steps) * (cycles(versions) / (versions + 1))) if is_counted else 0.0
        for contribution, tokens_, versions, is_counted in zip(
            contributions, tokens, versions_missed, counts, strict=True
        )
    ]
    if not any(raw):
        return tuple(map(float, counts))
    is_away = [contribution.steps > settings.carry_steps_limit for contribution in contributions]
    # Members without tokens say nothing about what is usual: with them the cap of all others could be 0.
    weighty = [(value, away) for value, away in zip(raw, is_away, strict=True) if value > 0.0]
    cap = settings.weight_cap * median(
        [value for value, away in weighty if not away] or [value for value, _ in weighty]
    )
    limits = [min(value, cap) if away else value for value, away in zip(raw, is_away, strict=True)]
    if len(contributions) >= MEMBERS_MIN:
        limit = _share_limit(limits, settings.weight_share_max)
        limits = [min(value, limit) for value in limits]
    float32s = tuple(map(to_float32, limits))
    return float32s if any(float32s) else tuple(map(float, counts))


def _share_limit(values: Sequence[float], share_max: float) -> float:
    """Return the weight that nobody may exceed, so that nobody has more than a part of their sum.

    With n members the part is at least 1/n: less would leave none.
    """
    falling = sorted((value for value in values if value > 0.0), reverse=True)
    ceiling = max(share_max, 1.0 / len(falling))
    for place, value in enumerate(falling[:-1]):
        limit = ceiling * sum(falling[place:]) / (1.0 - ceiling * place)
        if value <= limit * ROUNDED:
            return limit
    return falling[-1]


def share(weights: Sequence[float], versions_missed: Sequence[int]) -> float:
    """The part of a full outer step that this round takes, float32-exact: one over the mean of the members' `cycles`.

    1 when everybody was in the last round. Taken whole, a contribution that holds more than a cycle would move the
    model as if time ran faster than the learners train. versions_missed: as of `weights`; not all weights are 0.
    """
    cycles_held = sum(weight_ * cycles(versions) for weight_, versions in zip(weights, versions_missed, strict=True))
    return to_float32(sum(weights) / cycles_held)


def refusal(contribution: Contribution, pieces: int) -> str:
    """Why a contribution's numbers can't be used; empty if they can. pieces: pieces of the fragment."""
    if len(contribution.squared_norms) != pieces:
        return f"{len(contribution.squared_norms)} squared norms for {pieces} pieces"
    if contribution.steps < 1:
        return f"covers {contribution.steps} steps; at least 1 is needed"
    if contribution.tokens < 0:
        return f"counts {contribution.tokens} tokens"
    for piece, norm in enumerate(contribution.squared_norms):
        if not 0.0 <= norm <= SQUARED_NORM_MAX:
            return f"squared norm of piece {piece} is {norm}"
    return ""
