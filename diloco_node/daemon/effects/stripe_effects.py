"""Effects on stripes: contributions to their reducers, the reduction, merged stripes to everybody; what peers send."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.kernels import squared_norms
from diloco_node.codec.projection import project
from diloco_node.core import events as ev
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.core.projections import (
    ContributionsProjected,
    Project,
    ProjectContributions,
    Projected,
    Projection,
    Window,
)
from diloco_node.core.types import Stripe
from diloco_node.daemon.effects.open_stripes import (
    MergedPart,
    StripeTable,
    checked_digest,
    cosines,
    is_contiguous,
    reduce_stripe,
)
from diloco_node.daemon.effects.sending import EffectContext, Sending
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.work import beside_loop, in_thread
from diloco_node.errors import PayloadCorrupt, PeerError
from diloco_node.numeric import U8

REDUCTIONS_MAX: Final = max(1, (os.cpu_count() or 1) // 2)
"""Reductions run one after the other: the first is sent while the next is summed. Several where cores allow."""

COSINES_KEPT: Final = 64
"""For each learner, over all stripes that were reduced here."""

VERSIONS_AHEAD_MAX: Final = 3
"""How far a stripe may be ahead of the parameters: the open round, and what commits while this region applies."""

KEPT_FRAGMENTS_MAX: Final = 2
"""A region may keep so many fragments of contributions here for a round, and as many of merged stripes."""


@dataclass(slots=True, kw_only=True)
class StripeEffects(EffectContext):
    """Moves and merges the stripes of open rounds.

    A stripe counts once every block of it was checked. The own learner's are checked before they are sent, so one that
    does not decode is the fault of the region that sent it: a single strike, however many stripes of that contribution
    come.

    Attributes:
        region: our name. is_trimmed: `[rounds] merge` is `trimmed`. learner: has the own contribution's bytes.
        reject: counts what a peer did that no honest one does, as a strike.
        cosines: per learner, of its last contributions that were reduced here with the mean of the others.
    """

    region: str
    is_trimmed: bool
    learner: LearnerProxy
    table: StripeTable
    sending: Sending
    reject: Callable[[str, PeerError], None]
    cosines: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _struck: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict, init=False)
    """By region and fragment: incarnation and snapshot of the last contribution that was a strike."""
    _reducing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REDUCTIONS_MAX), init=False)

    async def send_contribution(self, order: ev.SendContribution) -> None:
        """Stream each stripe of the learner's contribution to its reducer; the own one is kept here."""
        contribution = order.contribution
        fragment = contribution.fragment
        blocks = self.learner.blocks[fragment]
        self.table.note_ballot(order.ballot, fragment, order.version, order.stripes)
        self.sending.drop_earlier_ballots(fragment, order.ballot)
        missing = [(index, stripe) for index, stripe in enumerate(order.stripes) if index not in order.skip]
        missing.sort(key=lambda pair: (pair[1].reducer == self.region, pair[0]))  # those that have a way to go first

        def copy(stripe: Stripe) -> U8:
            # The learner's next snapshot of the fragment, and the first one of a restarted learner, overwrite the
            # bytes, while this may still wait for a slow link.
            return self.learner.contribution_bytes(fragment, stripe.block_start, stripe.block_stop).copy()

        sizes = [blocks.span_bytes(stripe.block_start, stripe.block_stop) for _, stripe in missing]
        copies = [beside_loop(self.pool, size, copy, stripe) for size, (_, stripe) in zip(sizes, missing, strict=True)]
        own_stripes: list[tuple[ContributionStripe, U8]] = []
        for (index, stripe), copying in zip(missing, copies, strict=True):
            body = await copying
            if self.learner.has_restarted_since(contribution.incarnation):
                self.note(ev.Note("contribute", "the learner has restarted: not sent", fragment, order.version))
                return
            start, stop = stripe.block_start, stripe.block_stop
            header = ContributionStripe(order.ballot, index, order.version, contribution, start, stop)
            if stripe.reducer == self.region:
                own_stripes.append((header, body))
                continue
            try:
                await beside_loop(self.pool, body.nbytes, squared_norms, blocks, body, start, stop)
            except PayloadCorrupt as error:
                text = f"the own contribution is not sent to {stripe.reducer}: {error}"
                self.note(ev.Note("corrupt", text, fragment, order.version, is_alarm=True))
                continue
            self.sending.send(stripe.reducer, header, body)
        await asyncio.gather(*(self.contribution_arrived(header, body) for header, body in own_stripes))

    async def contribution_arrived(self, header: ContributionStripe, body: U8) -> None:
        """Check a stripe, uint8, of the own learner or of the peer that sent it, and keep it for the reduction."""
        contribution, start, stop = header.contribution, header.block_start, header.block_stop
        fragment = contribution.fragment
        blocks = self.learner.blocks[fragment]
        try:
            await beside_loop(self.pool, body.nbytes, squared_norms, blocks, body, start, stop)
        except PayloadCorrupt as error:
            self._refuse(header, error)
            return
        if header.version <= self.parameters.versions[fragment]:
            return
        limit_bytes = KEPT_FRAGMENTS_MAX * blocks.encoded_bytes
        self.table.keep_contribution(header.version, contribution, start, stop, body, limit_bytes=limit_bytes)
        self.post(ev.ContributionStripeArrived(header.ballot, header.stripe, contribution, (start, stop)))

    def _refuse(self, header: ContributionStripe, error: PayloadCorrupt) -> None:
        """Say what is wrong with a stripe of a contribution; a strike for its region, if it is none for it already."""
        contribution = header.contribution
        text = f"stripe {header.stripe} of the contribution of {contribution.learner}: {error}"
        self.note(ev.Note("corrupt", text, contribution.fragment, header.version, is_alarm=True))
        # One contribution has several stripes here, and comes again in each ballot until its round commits.
        name, place = (contribution.incarnation, contribution.snapshot), (contribution.learner, contribution.fragment)
        if contribution.learner != self.region and self._struck.get(place) != name:
            self._struck[place] = name
            self.reject(contribution.learner, PayloadCorrupt(text))

    async def reduce(self, order: ev.ReduceStripe) -> None:
        """Merge a stripe of the contributions."""
        fragment, version, start, stop = order.fragment, order.version, order.block_start, order.block_stop
        bodies: list[U8] = []
        for contribution in order.contributions:
            body = self.table.contribution(version, contribution, start, stop)
            if body is None:
                # The round was closed in between; the ballot's deadline takes care of it otherwise.
                self.note(ev.Note("reduce", f"no bytes from {contribution.learner}", fragment, version))
                return
            bodies.append(body)
        up, down = self.learner.blocks[fragment], self.parameters.blocks[fragment]
        try:
            async with self._reducing:
                reduction, merged_body = await beside_loop(
                    self.pool,
                    sum(body.nbytes for body in bodies),
                    lambda: reduce_stripe(order, bodies, up, down, is_trimmed=self.is_trimmed),
                )
        except PayloadCorrupt as error:
            self.note(ev.Note("corrupt", str(error), fragment, version, is_alarm=True))
            return
        if version <= self.parameters.versions[fragment]:
            return
        header = MergedStripe(order.ballot, order.stripe, fragment, version, reduction.digest, start, stop)
        self._keep_merged(self.region, header, merged_body)
        self.post(reduction)
        self._post_merged(self.region, header, reduction.squared_norms)
        if len(bodies) > 1:
            values = await beside_loop(self.pool, sum(body.nbytes for body in bodies), cosines, order, bodies, up)
            for contribution, value in zip(order.contributions, values, strict=True):
                self.cosines.setdefault(contribution.learner, deque(maxlen=COSINES_KEPT)).append(value)

    def send_merged(self, order: ev.SendMerged) -> None:
        """Stream a stripe that was reduced here to peers."""
        header = order.header
        name = (header.ballot, header.stripe, header.fragment, header.version)
        stripe = self.table.merged_stripe(*name, sender=self.region)
        if stripe is not None:
            for peer in order.peers:
                self.sending.send(peer, header, stripe.encoded)

    async def merged_arrived(self, peer: str, header: MergedStripe, body: U8) -> None:
        """Check a merged stripe and keep it for the payload. body: shape (bytes,), uint8; not changed any more."""
        fragment, version, start, stop = header.fragment, header.version, header.block_start, header.block_stop
        if version <= self.parameters.versions[fragment]:
            return
        blocks = self.parameters.blocks[fragment]
        try:
            digest, norms = await beside_loop(self.pool, body.nbytes, checked_digest, blocks, body, start, stop)
            if digest != header.digest:
                raise PayloadCorrupt("it does not match its digest")
        except PayloadCorrupt as error:
            text = f"merged stripe {header.stripe} from {peer}: {error}"
            self.note(ev.Note("corrupt", text, fragment, version, is_alarm=True))
            return
        if version > self.parameters.versions[fragment] and self._keep_merged(peer, header, body):
            self._post_merged(peer, header, norms)

    def _keep_merged(self, sender: str, header: MergedStripe, body: U8) -> bool:
        """In memory; False if there is one already."""
        name = (header.ballot, header.stripe, header.fragment, header.version)
        merged_stripe = MergedPart(body, header.digest, header.block_start, header.block_stop, sender)
        limit_bytes = KEPT_FRAGMENTS_MAX * self.parameters.blocks[header.fragment].encoded_bytes
        return self.table.keep_merged(*name, merged_stripe, limit_bytes=limit_bytes)

    def _post_merged(self, sender: str, header: MergedStripe, norms: tuple[float, ...]) -> None:
        cut = Stripe(sender, header.block_start, header.block_stop)
        name = (header.ballot, header.stripe, header.fragment, header.version)
        self.post(ev.MergedStripeArrived(*name, header.digest, cut, norms))

    async def project(self, order: Project, stripes: list[MergedPart]) -> None:
        """Project an audited payload, of stripes in memory in block order, the own contribution to it, or both."""
        fragment, own = order.fragment, order.contribution
        down, up = self.parameters.blocks[fragment], self.learner.blocks[fragment]
        is_whole = bool(order.stripes) and is_contiguous(stripes, down.block_count)

        def work() -> Projection:
            pairs = []
            for window in order.windows if is_whole else ():
                stripe = next(cut for cut in stripes if window.block_start < cut.block_stop)
                pairs.append(project(down, _slice(down, stripe.encoded, stripe.block_start, window), window))
            row = []
            # A learner that died, or was restarted, may have written over the bytes.
            with contextlib.suppress(PayloadCorrupt):
                for window in order.windows if own is not None else ():
                    values = self.learner.contribution_bytes(fragment, window.block_start, window.block_stop)
                    row.append(project(up, values, window)[0])
            sums, errors = tuple(value for value, _ in pairs), tuple(error for _, error in pairs)
            return Projection(sums, errors, tuple(row) if len(row) == len(order.windows) else ())

        projection = await in_thread(self.pool, work)
        if own is not None and self.learner.has_restarted_since(own.incarnation):
            projection = replace(projection, contribution=())
        self.post(Projected(order.ballot, projection))

    async def project_contributions(self, order: ProjectContributions) -> None:
        """Project all contributions to a round, whose stripes were all reduced here."""
        fragment, version, blocks = order.fragment, order.version, self.learner.blocks[order.fragment]
        places = [(stripe.block_start, stripe.block_stop) for stripe in order.stripes]
        bodies = [
            [self.table.contribution(version, contribution, *place) for place in places]
            for contribution in order.contributions
        ]

        def row_of(contribution_bodies: list[U8 | None]) -> tuple[float, ...]:
            row = []
            for window in order.windows:
                place = next(index for index, (_, stop) in enumerate(places) if window.block_start < stop)
                body = contribution_bodies[place]
                assert body is not None
                row.append(project(blocks, _slice(blocks, body, places[place][0], window), window)[0])
            return tuple(row)

        rows: tuple[tuple[float, ...], ...] = ()
        if all(body is not None for contribution_bodies in bodies for body in contribution_bodies):
            rows = await in_thread(self.pool, lambda: tuple(map(row_of, bodies)))
        self.post(ContributionsProjected(fragment, version, order.windows, rows))

    def close_ballot(self, order: ev.CloseBallot) -> None:
        """Free what nobody asks about any more, and stop its transfers."""
        fragment, version = order.fragment, order.version
        self.table.close(order.ballot, fragment, version, is_committed=order.committed)
        if order.committed:
            self.sending.drop_older_rounds(fragment, version)
        elif version <= self.parameters.versions[fragment]:
            # Late bytes of a round that is over; its merged stripes may still be on their way to slower regions.
            self.table.forget(fragment, version)
        else:
            self.sending.drop_ballot(order.ballot)

    def expects(self, peer: str, header: ContributionStripe | MergedStripe, raw_bytes: int) -> bool:
        """Whether a stripe that a peer begins to send makes sense."""
        if isinstance(header, MergedStripe):
            fault = _shape_fault(self.parameters.blocks, header.fragment, header, raw_bytes)
            return not fault and self._is_next(header.fragment, header.version) and self.table.fits(header, peer)
        contribution = header.contribution
        if contribution.learner != peer:
            return False
        fault = _shape_fault(self.learner.blocks, contribution.fragment, header, raw_bytes)
        if fault:
            self._refuse(header, PayloadCorrupt(fault))
            return False
        return contribution.base_version == header.version - 1 and self._is_next(contribution.fragment, header.version)

    def _is_next(self, fragment: int, version: int) -> bool:
        """Whether it is of one of the next versions. A region that is further behind fetches payloads."""
        return 0 < version - self.parameters.versions[fragment] <= VERSIONS_AHEAD_MAX


def _slice(blocks: FragmentBlocks, body: U8, block_start: int, window: Window) -> U8:
    """Return the bytes of a window from a stripe that begins at `block_start`."""
    offset = blocks.span_bytes(block_start, window.block_start)
    return body[offset : offset + blocks.span_bytes(window.block_start, window.block_stop)]


def _shape_fault(
    layouts: list[FragmentBlocks], fragment: int, header: ContributionStripe | MergedStripe, raw_bytes: int
) -> str:
    """Why a stripe can't be one of this model; empty when it lies in its fragment and has its blocks' bytes."""
    if not 0 <= fragment < len(layouts):
        return f"fragment {fragment} of {len(layouts)}"
    blocks, start, stop = layouts[fragment], header.block_start, header.block_stop
    if not 0 <= start < stop <= blocks.block_count:
        return f"blocks [{start}, {stop}) of a fragment of {blocks.block_count}"
    size_bytes = blocks.span_bytes(start, stop)
    return "" if raw_bytes == size_bytes else f"{raw_bytes} bytes for blocks [{start}, {stop}), which have {size_bytes}"
