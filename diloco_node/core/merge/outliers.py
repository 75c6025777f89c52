"""Outer gradients much longer than anybody's: how much of each contribution counts, decided once by the leader.

A learner that diverges, or lies about nothing but its values, may send an outer gradient a thousand times as long as
the others'. So a contribution longer than twice the usual counts as twice. A wildly longer one says nothing about where
the model should go: its learner diverged, or loaded other weights. It does not count.

The usual length is the median of the round's members. For who made many more steps it is that of the fragment's last
rounds if that is longer: in the last round of a run most members have made a step or two, the others a cycle. Both are
taken over the whole fragment and over each piece. A piece may always be as long as one of its size is on average. Among
fewer than `MEMBERS_MIN` members nobody can say who is the outlier: there only the last `ROUNDS_KEPT` rounds tell the
usual length, or nothing does.

Measured with honest learners (built-in model, H = 16, four learners, all or three in each round, one that comes in
every fourth, one cut off for four cycles): at most 1.4 times the usual, of a piece 1.7; with one learner four times as
fast as the others 5.0, of a piece 6.0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import median_low
from typing import Final

from diloco_node.core.bounds import FLOAT32_MAX
from diloco_node.core.merge.opposition import MEMBERS_MIN, NO_OPPOSITION, Opposition
from diloco_node.core.types import Contribution, RoundBody
from diloco_node.errors import ProtocolViolation

ROUNDS_KEPT: Final = 8
"""Rounds of a fragment that say what is usual."""

RATIO_MAX: Final = 2.0
"""A contribution is at most this many times as long as usual."""

PIECE_RATIO_MAX: Final = 3.0
"""So for one piece: learners with other data may learn mostly in other places."""

WILD_RATIO: Final = 20.0
"""Beyond this nothing of it counts, unless all members of the round are so long: then each counts as if usual."""

FASTER_MAX: Final = 2.0
"""Limit of the factor by which a gradient may be longer because its learner made more steps than the median."""

Clips = tuple[tuple[float, ...], ...]
"""Per contribution, per piece of the fragment: the part that counts; 1 for all of it, 0 in each for none."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of an outer gradient: of all of it, and of each piece."""

    total: float
    pieces: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecentRounds:
    """The last rounds of one fragment, whoever was in them. Norms are float32, as a summary of the ledger has them.

    Attributes:
        rounds: norms of the median member, oldest round first. sums: norm of each piece of the last merged payload.
        opposition: of all fragments, as of the last of these rounds: a ballot may be open while another fragment's
            round commits.
    """

    rounds: tuple[Norms, ...] = ()
    sums: tuple[float, ...] = ()
    opposition: Opposition = NO_OPPOSITION

    def after(
        self,
        contributions: Sequence[Contribution],
        squared_norms: Sequence[float] = (),
        opposition: Opposition = NO_OPPOSITION,
    ) -> RecentRounds:
        """Return the rounds after one more. squared_norms: of the pieces of its decoded payload."""
        if not contributions:
            return self
        now = _median_norms(contributions)
        row = Norms(_floats32(now.total)[0], _floats32(*now.pieces))
        return RecentRounds((*self.rounds, row)[-ROUNDS_KEPT:], _floats32(*map(sqrt, squared_norms)), opposition)

    def packed(self) -> bytes:
        """As bytes: the numbers of rounds and pieces, float32 of each round and of the sums, then the opposition."""
        values = [value for norms in self.rounds for value in (norms.total, *norms.pieces)]
        head = struct.pack("<II", len(self.rounds), len(self.sums))
        tail = self.opposition.packed() if self.opposition.audits else b""
        return head + struct.pack(f"<{len(values) + len(self.sums)}f", *values, *self.sums) + tail

    @classmethod
    def unpacked(cls, data: bytes) -> RecentRounds:
        """Read what `packed` wrote. Raises ProtocolViolation: it is not that."""
        try:
            count, pieces = struct.unpack_from("<II", data)
            width = 1 + pieces
            size = count * width + pieces
            is_whole = count <= ROUNDS_KEPT and 8 + 4 * size <= len(data)
            values = struct.unpack_from(f"<{size}f", data, 8) if is_whole else ()
        except struct.error as error:
            raise ProtocolViolation(f"not the norms of recent rounds: {error}") from error
        if not is_whole or not all(0.0 <= value <= FLOAT32_MAX for value in values):
            raise ProtocolViolation(f"not the norms of recent rounds: {count} of {pieces} pieces in {len(data)} bytes")
        starts = range(0, count * width, width)
        rounds = tuple(Norms(values[start], values[start + 1 : start + width]) for start in starts)
        return cls(rounds, values[count * width :], Opposition.unpacked(data[8 + 4 * size :]))

    def usual(self, contributions: Sequence[Contribution]) -> Norms:
        """Return the usual norms for a round with these contributions, at least one."""
        now, before = _median_norms(contributions), self.rounds
        if not before:
            return now
        usual = Norms(
            median_low([norms.total for norms in before]),
            tuple(median_low(column) for column in zip(*(norms.pieces for norms in before), strict=True)),
        )
        if len(contributions) < MEMBERS_MIN and self.is_full:
            return usual
        pieces = zip(now.pieces, usual.pieces, strict=True)
        return Norms(max(now.total, usual.total), tuple(max(pair) for pair in pieces))

    @property
    def is_full(self) -> bool:
        """Whether there were as many rounds as are kept; the first ones of a run are shorter than later ones."""
        return len(self.rounds) == ROUNDS_KEPT


def newest_opposition(recent: Sequence[RecentRounds]) -> Opposition:
    """Return the opposition as of the last round of any fragment. recent: of all fragments."""
    return max((rounds.opposition for rounds in recent), key=lambda opposition: opposition.audits)


def recent_after(recent: Sequence[RecentRounds], body: RoundBody) -> RecentRounds:
    """Return the last rounds of a fragment after one more. recent: of all fragments, before it."""
    contributions = [member.contribution for member in body.members]
    weights = [member.weight for member in body.members]
    opposition = newest_opposition(recent).after(contributions, weights, body.projections)
    return recent[body.fragment].after(contributions, body.squared_norms, opposition)


def clips(contributions: Sequence[Contribution], sizes: Sequence[int], recent: RecentRounds) -> Clips:
    """How much of each contribution of a round counts.

    sizes: values of each piece of the fragment. recent: the rounds of the fragment before this one.
    """
    opponents = recent.opposition.opposed([contribution.learner for contribution in contributions])
    rows = _length_clips(contributions, sizes, recent)
    agreeing = tuple(
        (0.0,) * len(row) if contribution.learner in opponents else row
        for contribution, row in zip(contributions, rows, strict=True)
    )
    return agreeing if any(map(any, agreeing)) else rows


def _length_clips(contributions: Sequence[Contribution], sizes: Sequence[int], recent: RecentRounds) -> Clips:
    if len(contributions) < MEMBERS_MIN and not recent.is_full:
        return _whole(contributions)
    usual = _usual(contributions, recent)
    if min(norms.total for norms in usual) == 0.0:
        return _whole(contributions)
    size = sum(sizes)
    steps = median_low([float(contribution.steps) for contribution in contributions])
    rows = []
    for contribution, norms in zip(contributions, usual, strict=True):
        pieces = [max(norm, norms.total * sqrt(size_ / size)) for norm, size_ in zip(norms.pieces, sizes, strict=True)]
        faster = min(max(contribution.steps / steps, 1.0), FASTER_MAX)
        rows.append(_clip(contribution, norms.total, pieces, faster))
    if any(map(any, rows)):
        return tuple(rows)
    lengths = [sqrt(sum(contribution.squared_norms)) for contribution in contributions]
    return tuple((norms.total / length,) * len(row) for norms, length, row in zip(usual, lengths, rows, strict=True))


def _usual(contributions: Sequence[Contribution], recent: RecentRounds) -> list[Norms]:
    """Return the usual norms for each contribution; with earlier rounds only if it covers more steps than the median.

    A member that made a step or two, as most did, may not be as long as a cycle.
    """
    usual = recent.usual(contributions)
    if len(contributions) < MEMBERS_MIN:
        return [usual] * len(contributions)
    now, steps = _median_norms(contributions), median_low([float(contribution.steps) for contribution in contributions])
    is_long = [contribution.steps > FASTER_MAX * steps or now.total == 0.0 for contribution in contributions]
    return [usual if long else now for long in is_long]


def _clip(contribution: Contribution, usual: float, usual_pieces: Sequence[float], faster: float) -> tuple[float, ...]:
    norms = [sqrt(square) for square in contribution.squared_norms]
    if sqrt(sum(contribution.squared_norms)) > WILD_RATIO * faster * usual:
        return (0.0,) * len(norms)
    limits = [PIECE_RATIO_MAX * faster * limit for limit in usual_pieces]
    ratios = [limit / norm if norm > limit else 1.0 for norm, limit in zip(norms, limits, strict=True)]
    length = sqrt(sum((norm * ratio) ** 2 for norm, ratio in zip(norms, ratios, strict=True)))
    limit = RATIO_MAX * faster * usual
    if length <= limit:
        return tuple(ratios)
    return tuple(ratio * limit / length for ratio in ratios)


def excess(contributions: Sequence[Contribution], clips: Clips, recent: RecentRounds) -> dict[str, str]:
    """Return learners whose contribution does not count as a whole, in its order, each with the reason in words."""
    if not any(min(row, default=1.0) < 1.0 for row in clips):
        return {}
    opponents = recent.opposition.opposed([contribution.learner for contribution in contributions])
    reasons = {}
    for contribution, row, norms in zip(contributions, clips, _usual(contributions, recent), strict=True):
        ratio = min(row, default=1.0)
        if contribution.learner in opponents:
            reasons[contribution.learner] = "it points against the others in audit after audit, nothing of it counts"
        elif ratio < 1.0:
            length, usual = sqrt(sum(contribution.squared_norms)), norms.total
            extent = "it" if len(set(row)) == 1 else "its longest piece"
            reasons[contribution.learner] = (
                f"length {length:.3g} is {length / usual:.3g} times the usual {usual:.3g}, "
                f"{f'{ratio:.3g}' if ratio else 'nothing'} of {extent} counts"
            )
    return reasons


def _floats32(*values: float) -> tuple[float, ...]:
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))


def _whole(contributions: Sequence[Contribution]) -> Clips:
    return tuple((1.0,) * len(contribution.squared_norms) for contribution in contributions)


def _median_norms(contributions: Sequence[Contribution]) -> Norms:
    # The lower one of two: half of the members may be outliers.
    columns = zip(*(contribution.squared_norms for contribution in contributions), strict=True)
    return Norms(
        sqrt(median_low([fsum(contribution.squared_norms) for contribution in contributions])),
        tuple(sqrt(median_low(column)) for column in columns),
    )
