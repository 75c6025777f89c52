"""Random projections by which a merged payload is compared with the contributions of its members.

A sum is linear: for signs r, `<r, sum>` is the sum of `c[m] * <r, delta_m>`. The signs, and the few blocks in which
they are taken, follow from nonces that nobody knows before all stripes are fixed (`core.rounds.audit_draw`). Each
member tells its own projections, and everybody has the payload. A payload that is not the sum differs by as much as it
is wrong, times a number that is normally distributed (R. Freivalds, 1977).

A part of the payloads is audited, and nobody knows before which. `trimmed` is no sum: it has no audit. A sum is
compared with nothing while a row is missing, so some entries must have all rows: who tells none hides nothing for long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from math import sqrt
from typing import Final

from diloco_node.core.merge.numbers import NORM_FLOOR
from diloco_node.core.projections import Projection, Window
from diloco_node.core.types import Contribution, Stripe

AUDIT_EVERY: Final = 2
"""One of so many payloads is audited: the leader waits for the projections of all members, which takes longer."""

ROWS_DUE_EVERY: Final = 4
"""One of so many audited payloads must have all rows: who lacks some reduces again, alone. So a region that tells none
costs one round of eight a second ballot."""

CHECKED_EVERY: Final = 8
"""One of so many of these has the leader reduce again, alone, and look at the contributions: a reducer may add to its
own row what its sum lacks. That is one round of 64, whose bytes go twice."""

WINDOWS: Final = 32
"""Windows of a payload, shared by its reducers; each has two at least."""

WINDOW_BLOCKS: Final = 16
"""Blocks of a window: 4,096 values, 0.1 ms to decode."""

DEVIATION_MAX: Final = 8.0
"""Square of the deviation from the sum, by the square of what encoding may change at most, in the mean over a reducer's
windows. Honest ones have a third at most; beyond 8 is one of 10^10 with two windows."""

FLUSHED: Final = WINDOW_BLOCKS**2 * NORM_FLOOR
"""Square of what the encoder may flush to zero in a window."""

PROJECTION_ERROR: Final = 1e-6
"""Two regions may differ by so much of a contribution's length in its projection: they add up in another order."""


def draw_windows(nonces: Sequence[bytes], stripes: Sequence[Stripe], piece_blocks: Sequence[int]) -> tuple[Window, ...]:
    """Draw the windows of a payload, by reducer in the order of their stripes; none if it is not audited.

    nonces: of the audit; none: nothing is drawn. piece_blocks: blocks of each piece.
    """
    draw = _draw(nonces)
    if not draw:
        return ()
    piece_ends = list(accumulate(piece_blocks))
    blocks_by_reducer: dict[str, list[tuple[int, int]]] = {}
    for stripe in stripes:
        blocks_by_reducer.setdefault(stripe.reducer, []).append((stripe.block_start, stripe.block_stop))
    windows = []
    for place, (reducer, spans) in enumerate(blocks_by_reducer.items()):
        for turn in range(max(2, WINDOWS // len(blocks_by_reducer))):
            seed = hashlib.sha256(draw + place.to_bytes(2, "big") + turn.to_bytes(2, "big")).digest()
            offset = int.from_bytes(seed[:8], "big") % sum(stop - first for first, stop in spans)
            for first, stop in spans:
                if offset < stop - first:
                    break
                offset -= stop - first
            start = first + offset
            piece = next(index for index, end in enumerate(piece_ends) if start < end)
            end = min(start + WINDOW_BLOCKS, stop, piece_ends[piece])
            windows.append(Window(reducer, piece, start, end, seed))
    return tuple(windows)


def _draw(nonces: Sequence[bytes]) -> bytes:
    """Return what the nonces draw; nothing if they draw no audit."""
    draw = hashlib.sha256(b"".join(nonces)).digest() if nonces else b""
    return b"" if not draw or draw[0] % AUDIT_EVERY else draw


def are_rows_due(nonces: Sequence[bytes]) -> bool:
    """Whether an entry with these nonces must have the rows of all members that are in its sum."""
    draw = _draw(nonces)
    return bool(draw) and draw[1] % ROWS_DUE_EVERY == 0


def is_checked(nonces: Sequence[bytes]) -> bool:
    """Whether the rows of an entry with these nonces are compared with the contributions themselves."""
    return are_rows_due(nonces) and _draw(nonces)[2] % CHECKED_EVERY == 0


def lacking_rows(coefficients: Sequence[Sequence[float]], rows: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of members that are in a sum, and whose row is missing. rows: none: nobody's is there."""
    return [place for place, factors in enumerate(coefficients) if any(factors) and not (rows and rows[place])]


def wrong_reducers(
    windows: Sequence[Window],
    projection: Projection,
    coefficients: Sequence[Sequence[float]],
    rows: Sequence[Sequence[float]],
) -> dict[str, str]:
    """Find reducers whose merged stripes are not the sum, each with the figures; none while one of its rows is missing.

    projection: of the payload, as worked out here, if it is.
    coefficients: per member, per piece. rows: per member, per window, the projection of its contribution.
    """
    if not windows or not rows or len(projection.sums) != len(windows) or lacking_rows(coefficients, rows):
        return {}
    squares: dict[str, list[float]] = {}
    for place, window in enumerate(windows):
        terms = [row[place] * factors[window.piece] for row, factors in zip(rows, coefficients, strict=True) if row]
        square = (projection.sums[place] - sum(terms)) ** 2
        # Float32 sums of terms that cancel each other lose bits that the encoding of the sum does not show.
        error = projection.errors[place] + (PROJECTION_ERROR * sum(map(abs, terms))) ** 2 + FLUSHED
        squares.setdefault(window.reducer, []).append(square / error)
    means = {reducer: sum(values) / len(values) for reducer, values in squares.items()}
    return {
        reducer: f"its merged stripe is not the sum of the contributions: it deviates by {sqrt(mean):.3g} times what "
        "encoding may change"
        for reducer, mean in means.items()
        if mean > DEVIATION_MAX
    }


def has_other_projections(
    contribution: Contribution, windows: Sequence[Window], claims: Sequence[float], values: Sequence[float]
) -> bool:
    """Whether two regions' projections of a contribution differ by more than the order of their sums explains."""
    return any(
        abs(claim - value) > PROJECTION_ERROR * sqrt(contribution.squared_norms[window.piece])
        for window, claim, value in zip(windows, claims, values, strict=True)
    )
