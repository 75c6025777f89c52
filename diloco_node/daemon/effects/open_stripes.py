"""The bytes of open rounds: contributions' stripes that came in, merged stripes, and the reduction between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import stripe_digest
from diloco_node.core.events import ReduceStripe, ReductionDone
from diloco_node.core.merge.opposition import MEMBERS_MIN
from diloco_node.core.messages import MergedStripe
from diloco_node.core.types import Ballot, Contribution, Stripe
from diloco_node.errors import PayloadCorrupt
from diloco_node.numeric import F32, U8

K = TypeVar("K")

ContributionKey = tuple[str, int, int, int, int, int]
"""(learner, incarnation, fragment, snapshot, block_start, block_stop): names a stripe whatever the ballot."""


def _key(contribution: Contribution, block_start: int, block_stop: int) -> ContributionKey:
    author = contribution.learner, contribution.incarnation
    return *author, contribution.fragment, contribution.snapshot, block_start, block_stop


@dataclass(frozen=True, slots=True)
class MergedPart:
    """A merged stripe in memory, from a region.

    encoded: shape (bytes,), uint8; checked block by block. digest: of it, computed here.
    """

    encoded: U8
    digest: bytes
    block_start: int
    block_stop: int
    sender: str


@dataclass(slots=True)
class OpenRoundBytes:
    """The bytes in memory for a (fragment, version).

    Attributes:
        contributions: kept from ballot to ballot. merged: by (ballot, stripe index, sender).
        layouts: by ballot, how its stripes are cut and who reduces them, where the shell knows.
    """

    contributions: dict[ContributionKey, U8] = field(default_factory=dict)
    merged: dict[tuple[Ballot, int, str], MergedPart] = field(default_factory=dict)
    layouts: dict[Ballot, tuple[Stripe, ...]] = field(default_factory=dict)


_NOTHING: Final = OpenRoundBytes()

SAMPLE_BLOCKS: Final = 256
"""Blocks of a stripe in which contributions are compared: 65,536 values say the cosine to 0.4 percent."""


class StripeTable:
    """All bytes of open rounds. Nothing here blocks; the reduction is a pure function over what the table hands out.

    Each region may keep `limit_bytes` here for a round: beyond that its oldest bytes go.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], OpenRoundBytes] = {}

    def buffered_bytes(self) -> int:
        """All of them, for the memory metric."""
        return sum(
            sum(stripe.nbytes for stripe in round_.contributions.values())
            + sum(stripe.encoded.nbytes for stripe in round_.merged.values())
            for round_ in self._rounds.values()
        )

    def note_ballot(self, ballot: Ballot, fragment: int, version: int, stripes: tuple[Stripe, ...]) -> None:
        """How a ballot cuts the fragment: merged stripes that do not fit are refused from now on."""
        self._open(fragment, version).layouts[ballot] = stripes

    def fits(self, header: MergedStripe, sender: str) -> bool:
        """Whether a merged stripe may be what its reducer made in its ballot, as far as the ballot is known."""
        round_ = self._find(header.fragment, header.version)
        if (header.ballot, header.stripe, sender) in round_.merged:
            return False
        stripes = round_.layouts.get(header.ballot)
        if stripes is None:
            return True
        cut = Stripe(sender, header.block_start, header.block_stop)
        return 0 <= header.stripe < len(stripes) and stripes[header.stripe] == cut

    def keep_contribution(
        self, version: int, contribution: Contribution, block_start: int, block_stop: int, body: U8, *, limit_bytes: int
    ) -> None:
        """Keep a stripe of a contribution to the round of `version`. limit_bytes: of its learner, for the round."""
        contributions = self._open(contribution.fragment, version).contributions
        key = _key(contribution, block_start, block_stop)
        contributions.pop(key, None)  # what came again is the newest
        contributions[key] = body
        sizes = {key: stripe.nbytes for key, stripe in contributions.items() if key[0] == contribution.learner}
        for old in _oldest_beyond(limit_bytes, sizes):
            del contributions[old]

    def keep_merged(
        self, ballot: Ballot, stripe: int, fragment: int, version: int, merged_stripe: MergedPart, *, limit_bytes: int
    ) -> bool:
        """Keep a merged stripe; False if its sender sent one: that holds. limit_bytes: of the sender."""
        table = self._open(fragment, version).merged
        if (ballot, stripe, merged_stripe.sender) in table:
            return False
        table[ballot, stripe, merged_stripe.sender] = merged_stripe
        sizes = {key: entry.encoded.nbytes for key, entry in table.items() if entry.sender == merged_stripe.sender}
        for old in _oldest_beyond(limit_bytes, sizes):
            del table[old]
        return True

    def contribution(self, version: int, contribution: Contribution, block_start: int, block_stop: int) -> U8 | None:
        """A stripe of a contribution, whichever ballot brought it; None if it is not here."""
        return self._find(contribution.fragment, version).contributions.get(_key(contribution, block_start, block_stop))

    def merged_stripe(
        self, ballot: Ballot, stripe: int, fragment: int, version: int, *, sender: str
    ) -> MergedPart | None:
        """A merged stripe; None while it is not there."""
        return self._find(fragment, version).merged.get((ballot, stripe, sender))

    def payload(self, ballot: Ballot, fragment: int, version: int, stripes: Sequence[Stripe]) -> list[MergedPart]:
        """The merged stripes of a ballot in block order, each from its reducer, as far as they are here."""
        table = self._find(fragment, version).merged
        entries = (table.get((ballot, index, stripe.reducer)) for index, stripe in enumerate(stripes))
        return [entry for entry in entries if entry is not None]

    def close(self, ballot: Ballot, fragment: int, version: int, *, is_committed: bool) -> None:
        """Forget a ballot. When it committed, the whole round goes."""
        round_ = self._rounds.get((fragment, version))
        if round_ is None:
            return
        round_.layouts.pop(ballot, None)
        for key in [key for key in round_.merged if key[0] == ballot]:
            del round_.merged[key]
        if is_committed:
            self.forget(fragment, version)

    def forget(self, fragment: int, version: int) -> None:
        """Drop everything of rounds up to `version`: they are over, and what comes of them is late."""
        for key in [key for key in self._rounds if key[0] == fragment and key[1] <= version]:
            del self._rounds[key]

    def _open(self, fragment: int, version: int) -> OpenRoundBytes:
        return self._rounds.setdefault((fragment, version), OpenRoundBytes())

    def _find(self, fragment: int, version: int) -> OpenRoundBytes:
        """Without making one: a question must leave nothing behind."""
        return self._rounds.get((fragment, version), _NOTHING)


def _oldest_beyond(limit_bytes: int, sizes: dict[K, int]) -> list[K]:
    """The first of these, oldest first, whose bytes are over the limit together with the later ones; never the last."""
    total, over = sum(sizes.values()), []
    for key in list(sizes)[:-1]:
        if total <= limit_bytes:
            break
        total -= sizes[key]
        over.append(key)
    return over


def is_contiguous(stripes: Sequence[MergedPart], block_count: int) -> bool:
    """Whether these stripes, one after the other, are a whole fragment."""
    edges = [0, *(stripe.block_stop for stripe in stripes)]
    return edges[-1] == block_count and all(
        stripe.block_start == edge for stripe, edge in zip(stripes, edges, strict=False)
    )


_free: Final[list[F32]] = []


@contextlib.contextmanager
def _zeros(size: int) -> Iterator[F32]:
    """A vector of zeros, shape (size,), float32, whose memory is kept for the next reduction in any thread.

    Fresh memory of this size would be returned to the kernel and cleared page by page for each round: a third of the
    time of a reduction. There are never more than reductions at once.
    """
    try:
        memory = _free.pop()
    except IndexError:
        memory = np.empty(size, np.float32)
    if memory.size < size:
        memory = np.empty(size, np.float32)
    zeros = memory[:size]
    zeros.fill(0.0)
    try:
        yield zeros
    finally:
        _free.append(memory)


def reduce_stripe(
    order: ReduceStripe,
    bodies: list[U8],
    blocks_up: FragmentBlocks,
    blocks_down: FragmentBlocks,
    *,
    is_trimmed: bool = False,
) -> tuple[ReductionDone, U8]:
    """Decode in the given order, sum with the leader's coefficients, encode. Runs in a thread.

    Args:
        bodies: encoded, in the order of `order.contributions`. blocks_up: their layout; blocks_down: of the merged one.
        is_trimmed: sum by `add_trimmed`.

    Returns: the core's event; the encoded stripe, shape (bytes,), uint8. Raises PayloadCorrupt.
    """
    start, stop = order.block_start, order.block_stop
    expected_bytes = blocks_up.span_bytes(start, stop)
    with _zeros(blocks_up.span_values(start, stop)) as total:
        norms: list[tuple[float, ...]] = []
        rows = np.zeros((len(bodies), total.size) if is_trimmed else (0, 0), np.float32)
        for place, (contribution, body, coefficients) in enumerate(
            zip(order.contributions, bodies, order.coefficients, strict=True)
        ):
            if body.nbytes != expected_bytes:
                raise PayloadCorrupt(
                    f"stripe {order.stripe} of {contribution.learner} for fragment {order.fragment} has "
                    f"{body.nbytes} bytes, expected {expected_bytes}"
                )
            target = rows[place] if is_trimmed else total
            squares = kernels.accumulate(blocks_up, body, start, stop, np.array(coefficients, np.float32), target)
            norms.append(tuple(squares.tolist()))
        if is_trimmed:
            add_trimmed([row for row, parts in zip(rows, order.coefficients, strict=True) if any(parts)], total)
        merged_body = np.empty(blocks_down.span_bytes(start, stop), np.uint8)
        squares = kernels.encode(blocks_down, total, merged_body, start, stop)
        digest = stripe_digest(merged_body)
        return ReductionDone(order.ballot, order.stripe, tuple(squares.tolist()), tuple(norms), digest), merged_body


def add_trimmed(rows: list[F32], total: F32) -> None:
    """Add the trimmed sum: of each value, the members' largest and smallest are left out, and the others stand for all.

    One of three to seven members is left out at each end, two of eight to eleven, and so on; none of two. The bits are
    the same everywhere: sorting moves values, and the sum follows their order.

    Args:
        rows: one per member, shape (values,), float32, each times its coefficient; sorted in place.
        total: shape (values,), float32; changed in place.
    """
    members = len(rows)
    cut = max(1, members // 4) if members >= MEMBERS_MIN else 0
    larger = np.empty_like(total)
    for turn in range(members if cut else 0):
        # Odd-even transposition: after as many turns as members each value is in order.
        for first, second in zip(rows[turn % 2 :: 2], rows[turn % 2 + 1 :: 2], strict=False):
            np.maximum(first, second, out=larger)
            np.minimum(first, second, out=first)
            second[:] = larger
    for row in rows[cut : members - cut]:
        total += row
    total *= np.float32(members / max(1, members - 2 * cut))


def cosines(order: ReduceStripe, bodies: list[U8], blocks: FragmentBlocks) -> tuple[float, ...]:
    """Return the cosine of each contribution with the mean direction of the others; 0 where one of them is zero.

    All others count alike, whatever they weigh: one that decides too much must not make the others look wrong. The
    window that is looked at moves with the version. order, bodies, blocks: as `reduce_stripe` has checked them; two or
    more.
    """
    first, stop = order.block_start, order.block_stop
    if stop - first > SAMPLE_BLOCKS:
        first += order.version * SAMPLE_BLOCKS % (stop - first - SAMPLE_BLOCKS + 1)
        stop = first + SAMPLE_BLOCKS
    offset, size = blocks.span_bytes(order.block_start, first), blocks.span_bytes(first, stop)
    units = np.empty((len(bodies), blocks.span_values(first, stop)), np.float32)
    for unit, body in zip(units, bodies, strict=True):
        kernels.decode(blocks, body[offset : offset + size], unit, first, stop)
        np.divide(unit, np.linalg.norm(unit) or 1.0, out=unit)
    gram = np.matmul(units, units.T, dtype=np.float64)
    own, rows = gram.diagonal(), gram.sum(axis=1)
    lengths = np.sqrt(np.maximum(gram.sum() - 2 * rows + own, 0.0) * own)
    return tuple(float(dot / length) if length > 0.0 else 0.0 for dot, length in zip(rows - own, lengths, strict=True))


def checked_digest(
    blocks: FragmentBlocks, body: U8, block_start: int, block_stop: int
) -> tuple[bytes, tuple[float, ...]]:
    """The digest of a merged stripe, and the squared norm of each piece. Raises PayloadCorrupt: no encoder wrote it.
    Committed, it would break the outer step on every region."""
    norms = kernels.squared_norms(blocks, body, block_start, block_stop)
    return stripe_digest(body), tuple(norms.tolist())


def cut_payload(body: U8, blocks: FragmentBlocks, stripes: tuple[Stripe, ...]) -> list[U8]:
    """The payload's stripes, in block order, as slices."""
    bodies: list[U8] = []
    start = 0
    for stripe in stripes:
        stop = start + blocks.span_bytes(stripe.block_start, stripe.block_stop)
        bodies.append(body[start:stop])
        start = stop
    return bodies
