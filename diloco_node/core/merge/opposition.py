"""Members whose contributions point against the others', by the projections that audits leave in the ledger.

A gradient that is turned around is as long as an honest one, and RDA restores the length of the mean: one of four
costs 9 % of the loss, twice as long or with twice the weight far more. No limit of length or weight finds it (D-S3).
But each audited entry has projections of every contribution on the same random signs. Their weighted sum is that of
the payload (`core.merge.freivalds`), so only a leader can make up rows, its own against another's. The cosine of a
member's row with the weighted sum of the others' is that of the contributions, give or take one over the root of the
windows.

A member's score adds these cosines up and forgets. It is never above zero, so that nobody earns credit. It takes a
cosine under about -0.2 in some dozen audits. Nothing of an opposed member counts, until its score is above `FREE_ABOVE`
again. It is merged with weight 0, so no sum binds its rows: they speak against it alone. A member whose rows do not is
freed by time, after 20 audits at least; if its gradients still do, six oppose it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import Final

from diloco_node.core.types import Contribution
from diloco_node.errors import ProtocolViolation

MEMBERS_MIN: Final = 3
"""Among two nobody knows who points the wrong way."""

KEEP: Final = 15 / 16
"""Part of a score that the next audited round keeps."""

OPPOSED_BELOW: Final = -16.0
"""Noise alone has a standard deviation of 1 / sqrt(1 - KEEP^2) = 2.9: this is 5.6 of them. Four regions with a language
each came to -8.4 in 500 rounds."""

FREE_ABOVE: Final = -4.0
GONE_ABOVE: Final = -0.1
"""Scores nearer to zero are dropped."""

LENGTH_MIN: Final = 2.0**-100
"""A shorter contribution has no direction, and its row is bound by nothing."""

SCORE_MIN: Final = -16.0 * 16.0
"""No score is lower: a row of 128 windows adds 11.4 at most."""


@dataclass(frozen=True, slots=True)
class Score:
    """A member's score, at most 0, and whether nothing of it counts."""

    value: float
    is_opposed: bool


@dataclass(frozen=True, slots=True)
class Opposition:
    """Scores after some rounds. audits: rounds that were counted. scores: by learner, of those below zero."""

    audits: int = 0
    scores: Mapping[str, Score] = field(default_factory=dict)

    def opposed(self, names: Sequence[str]) -> frozenset[str]:
        """Return the members of a round that do not count; none of fewer than three, and never half of them."""
        opponents = frozenset(names) & {name for name, score in self.scores.items() if score.is_opposed}
        return opponents if len(names) >= MEMBERS_MIN and 2 * len(opponents) < len(names) else frozenset()

    def after(
        self, contributions: Sequence[Contribution], weights: Sequence[float], rows: Sequence[Sequence[float]]
    ) -> Opposition:
        """Return the scores after one more round.

        weights: in the sum; 0: nothing of it counts, so it may tell any row, or none. rows: the projections in its
        entry; empty if it was not audited. Where another member tells none the sum binds nobody, and nobody is judged.
        """
        units, weight_of = {}, {}
        for contribution, weight, row in zip(contributions, weights, rows, strict=False):
            length = sqrt(fsum(contribution.squared_norms))
            if length >= LENGTH_MIN and (row or weight > 0.0):
                units[contribution.learner] = [value / length for value in row]
                weight_of[contribution.learner] = weight
        if len(units) < MEMBERS_MIN or not all(units.values()):
            return self
        cosines = _cosines(units, weight_of)
        members = {contribution.learner for contribution in contributions}
        scores = {}
        for name in sorted({*self.scores, *cosines}):
            before = self.scores.get(name, Score(0.0, is_opposed=False))
            if name in members and name not in cosines:
                scores[name] = before  # Who brings nothing is not forgiven for that.
                continue
            cosine = cosines.get(name, 0.0)
            value = min(0.0, KEEP * before.value + (cosine if weight_of.get(name) else min(0.0, cosine)))
            if value <= GONE_ABOVE:
                limit = FREE_ABOVE if before.is_opposed else OPPOSED_BELOW
                scores[name] = Score(value, is_opposed=value < limit)
        return Opposition(self.audits + 1, scores)

    def packed(self) -> bytes:
        """As bytes, of learners in the order of their names."""
        lines = [struct.pack("<I", self.audits)]
        for name, score in sorted(self.scores.items()):
            text = name.encode()
            lines.append(struct.pack("<B?d", len(text), score.is_opposed, score.value) + text)
        return b"".join(lines)

    @classmethod
    def unpacked(cls, data: bytes) -> Opposition:
        """Read what `packed` wrote; nothing is nobody's score. Raises ProtocolViolation: it is not that."""
        if not data:
            return cls()
        try:
            (audits,), at, scores = struct.unpack_from("<I", data), 4, {}
            while at < len(data):
                size, is_opposed, value = struct.unpack_from("<B?d", data, at)
                at += struct.calcsize("<B?d") + size
                scores[data[at - size : at].decode()] = Score(value, is_opposed)
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"not the norms of recent rounds: scores in {len(data)} bytes: {error}") from error
        opposition = cls(audits, scores)
        # Also in another order, twice, or cut off: nothing else packs so.
        if not all(SCORE_MIN <= score.value <= 0.0 for score in scores.values()) or opposition.packed() != data:
            raise ProtocolViolation(f"not the norms of recent rounds: scores {scores}")
        return opposition


NO_OPPOSITION: Final = Opposition()


def _cosines(units: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> dict[str, float]:
    """Return per learner the cosine of its row with the weighted sum of the others', times the root of their windows.

    Windows lie in pieces of different size: each counts alike, by the mean square of its values.
    """
    merged = {name: [weights[name] * value for value in unit] for name, unit in units.items()}
    columns = list(zip(*merged.values(), strict=True))
    scales = [sqrt(fsum(value * value for value in column)) for column in columns]
    cosines = {}
    for name, unit in units.items():
        own = [value / scale for value, scale in zip(unit, scales, strict=True) if scale > 0.0]
        # Not the sum less its own: that would lose small values beside a large one.
        others = zip(*(row for rival, row in merged.items() if rival != name), strict=True)
        rivals = [fsum(column) / scale for column, scale in zip(others, scales, strict=True) if scale > 0.0]
        lengths = fsum(value * value for value in own) * fsum(value * value for value in rivals)
        dot = fsum(first * second for first, second in zip(own, rivals, strict=True))
        cosine = dot / sqrt(lengths) if lengths > 0.0 else 0.0
        cosines[name] = sqrt(len(columns)) * min(max(cosine, -1.0), 1.0)
    return cosines
