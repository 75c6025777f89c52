"""The fake data plane of one daemon: stripes and Theta in memory, payloads and states on the simulated disk.

It computes with the real layouts and the real outer step and answers in whatever time it likes; its rules are those of
`core/events.py`. Where a core asks for something it may not (bytes that are not there, a version out of order) it
complains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diloco_node.codec.digest import stripe_digest
from diloco_node.codec.projection import project_values
from diloco_node.core.events import CloseBallot, ReduceStripe, ReductionDone, StorePayload
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.core.projections import ProjectContributions, Window
from diloco_node.core.types import Ballot, Codec, Contribution, RoundBody, Stripe
from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.arithmetic import outer_step
from diloco_node.lab.sim.disk import Disk, DiskPayload, DiskState
from diloco_node.numeric import F32

if TYPE_CHECKING:
    from diloco_node.lab.sim.setup import Setup


class ContributionKey(NamedTuple):
    """A stripe of a contribution, whatever the ballot that asked for it."""

    learner: str
    incarnation: int
    fragment: int
    snapshot: int
    block_start: int
    block_stop: int


class MergedBlocks(NamedTuple):
    """A merged stripe in memory."""

    block_start: int
    block_stop: int
    encoded: bytes


def contribution_key(contribution: Contribution, block_start: int, block_stop: int) -> ContributionKey:
    """Where a reducer keeps this stripe."""
    name = (contribution.learner, contribution.incarnation, contribution.fragment, contribution.snapshot)
    return ContributionKey(*name, block_start, block_stop)


class DataPlane:
    """Memory of one daemon's life.

    Attributes:
        versions: per fragment the version of Theta in memory, -1 before there is one.
        theta, momentum: per fragment, shape (n,), float32; replaced, never changed.
        is_order_loose: plants a fault: contributions are summed in the order in which they arrived.
        spoil_sum: of a cheat: what it makes of each sum.
    """

    def __init__(self, setup: Setup, disk: Disk, complain: Callable[[str], None]) -> None:
        fragments = len(setup.layouts)
        self.versions = [-1] * fragments
        self.theta: list[F32] = [np.zeros(0, np.float32)] * fragments
        self.momentum: list[F32] = [np.zeros(0, np.float32)] * fragments
        self.is_order_loose = False
        self.spoil_sum: Callable[[F32], F32] | None = None
        self._setup = setup
        self._disk = disk
        self._complain = complain
        self._contributions: dict[ContributionKey, tuple[int, bytes]] = {}
        self._merged: dict[Ballot, dict[int, MergedBlocks]] = {}

    def keep_contribution(self, header: ContributionStripe, body: bytes) -> bool:
        """Keep a stripe that arrived whole; False if it is not what its header says."""
        layout = self._setup.layouts[header.contribution.fragment]
        low, high = tensors.byte_range(layout, header.block_start, header.block_stop, self._setup.settings.codec_up)
        if len(body) != high - low:
            self._complain(f"stripe of {len(body)} bytes, expected {high - low}: {header}")
            return False
        key = contribution_key(header.contribution, header.block_start, header.block_stop)
        self._contributions.pop(key, None)
        self._contributions[key] = (header.version, body)
        return True

    def keep_merged(self, header: MergedStripe, body: bytes) -> bool:
        """Keep a merged stripe; False if its bytes are not those of its digest."""
        if stripe_digest(body) != header.digest:
            self._complain(f"merged stripe with other bytes than its digest: {header}")
            return False
        blocks = MergedBlocks(header.block_start, header.block_stop, body)
        self._merged.setdefault(header.ballot, {})[header.stripe] = blocks
        return True

    def norms_of(self, fragment: int, blocks: tuple[int, int], body: bytes) -> tuple[float, ...]:
        """The squared norm of each piece of encoded merged blocks."""
        values = tensors.decode(body, self._setup.settings.codec_down)
        return tensors.squared_norms(self._setup.layouts[fragment], values, *blocks)

    def merged_part(self, ballot: Ballot, stripe: int) -> MergedBlocks | None:
        """A merged stripe in memory."""
        return self._merged.get(ballot, {}).get(stripe)

    def reduce(self, effect: ReduceStripe) -> ReductionDone | None:
        """Carry out ReduceStripe; None (with a complaint) if a stripe that it names is not here."""
        layout = self._setup.layouts[effect.fragment]
        codec_up, codec_down = self._setup.settings.codec_up, self._setup.settings.codec_down
        pairs = list(zip(effect.contributions, effect.coefficients, strict=True))
        if self.is_order_loose:
            arrivals = list(self._contributions)
            keys = [
                contribution_key(contribution, effect.block_start, effect.block_stop)
                for contribution in effect.contributions
            ]
            order = sorted(range(len(pairs)), key=lambda at: -arrivals.index(keys[at]) if keys[at] in arrivals else 0)
            pairs = [pairs[at] for at in order]
        contributions, spreads = [], []
        for contribution, row in pairs:
            stored = self._contributions.get(contribution_key(contribution, effect.block_start, effect.block_stop))
            if stored is None:
                self._complain(f"asked to reduce a stripe that is not here: {effect.ballot} {contribution}")
                return None
            contributions.append(tensors.decode(stored[1], codec_up))
            spreads.append(tensors.spread(layout, row, effect.block_start, effect.block_stop))
        reduction = tensors.reduce_stripe(contributions, spreads, codec_down)
        if self.spoil_sum is not None:
            encoded = tensors.encode(self.spoil_sum(reduction.decoded), codec_down)
            reduction = tensors.Reduced(encoded, tensors.decode(encoded, codec_down))
        blocks = (effect.block_start, effect.block_stop)
        self._merged.setdefault(effect.ballot, {})[effect.stripe] = MergedBlocks(*blocks, reduction.encoded)
        return ReductionDone(
            ballot=effect.ballot,
            stripe=effect.stripe,
            squared_norms=tensors.squared_norms(layout, reduction.decoded, *blocks),
            contribution_norms=tuple(
                tensors.squared_norms(layout, contribution, *blocks) for contribution in contributions
            ),
            digest=stripe_digest(reduction.encoded),
        )

    def close(self, effect: CloseBallot) -> None:
        """Free the ballot's stripes."""
        self._merged.pop(effect.ballot, None)
        if not effect.committed:
            return
        for key, (version, _) in list(self._contributions.items()):
            if key.fragment == effect.fragment and version <= effect.version:
                del self._contributions[key]

    def assemble(self, effect: StorePayload) -> DiskPayload | None:
        """The payload of a ballot from its merged stripes; None (with a complaint) if it is not whole."""
        payload = self.merged_payload(effect.ballot)
        if self.digest_of(effect.fragment, payload) != effect.digest:
            self._complain(f"asked to store a payload that is not here: {effect}")
            return None
        return payload

    def merged_payload(self, ballot: Ballot) -> DiskPayload:
        """The merged stripes of a ballot that are here."""
        merged_blocks = [blocks for _, blocks in sorted(self._merged.get(ballot, {}).items())]
        ranges = tuple((blocks.block_start, blocks.block_stop) for blocks in merged_blocks)
        return DiskPayload(ranges, b"".join(blocks.encoded for blocks in merged_blocks))

    def project(self, windows: Sequence[Window], fragment: int, body: bytes, codec: Codec) -> list[tuple[float, float]]:
        """The projections of a whole encoded fragment, each with the square of what encoding may change."""
        layout, values = self._setup.layouts[fragment], tensors.decode(body, codec)
        return [
            project_values(values[layout.value_slice(window.block_start, window.block_stop)], window, codec)
            for window in windows
        ]

    def project_contributions(self, effect: ProjectContributions) -> tuple[tuple[float, ...], ...]:
        """The projections of contributions whose stripes are all here; nothing (with a complaint) if they are not."""
        rows = []
        for contribution in effect.contributions:
            keys = [contribution_key(contribution, stripe.block_start, stripe.block_stop) for stripe in effect.stripes]
            if not all(key in self._contributions for key in keys):
                self._complain(f"asked to project a contribution that is not here: {contribution}")
                return ()
            body = b"".join(self._contributions[key][1] for key in keys)
            pairs = self.project(effect.windows, effect.fragment, body, self._setup.settings.codec_up)
            rows.append(tuple(value for value, _ in pairs))
        return tuple(rows)

    def digest_of(self, fragment: int, payload: DiskPayload) -> bytes:
        """The digest of a payload; empty if its stripes don't cover the fragment, or its bytes are more than theirs."""
        layout, codec = self._setup.layouts[fragment], self._setup.settings.codec_down
        edges = [0, *(stop for _, stop in payload.ranges)]
        if [start for start, _ in payload.ranges] != edges[:-1] or edges[-1] != layout.block_count:
            return b""
        if len(payload.data) != tensors.byte_range(layout, 0, layout.block_count, codec)[1]:
            return b""
        return tensors.payload_digest(payload.data, layout, payload.ranges, codec)

    def apply(self, body: RoundBody) -> bool:
        """The outer step of a committed round; False (with a complaint) if it can't be done."""
        payload = self._disk.payloads.get((body.fragment, body.version, body.payload_digest))
        if self.versions[body.fragment] != body.version - 1 or payload is None:
            at = self.versions[body.fragment]
            self._complain(f"asked to apply {body.fragment}/{body.version} at {at}, payload: {payload is not None}")
            return False
        layout = self._setup.layouts[body.fragment]
        values = tensors.decode(payload.data, self._setup.settings.codec_down)
        theta, momentum = outer_step(
            self.theta[body.fragment],
            self.momentum[body.fragment],
            tensors.spread(layout, body.factors, 0, layout.block_count) * values,
            lr=body.outer_lr,
            mu=body.outer_momentum,
        )
        self.theta[body.fragment] = theta
        if not body.is_last:
            self.momentum[body.fragment] = momentum
        self.versions[body.fragment] = body.version
        return True

    def adopt(self, fragment: int, version: int) -> bool:
        """Take a state on disk, perhaps not the newest one; False (with a complaint) if it is not there."""
        state = self._disk.older_states.get((fragment, version))
        if state is None:
            self._complain(f"asked to adopt {fragment}/{version}, which is not on disk")
            return False
        self.theta[fragment], self.momentum[fragment] = state.theta, state.momentum
        self.versions[fragment] = version
        return True

    def state(self, fragment: int) -> DiskState:
        """The state in memory."""
        return DiskState(self.versions[fragment], self.theta[fragment], self.momentum[fragment])

    def digest(self, fragment: int) -> bytes:
        """Digest of parameters and momentum in memory."""
        return self.state(fragment).digest()


def block_ranges(stripes: tuple[Stripe, ...]) -> tuple[tuple[int, int], ...]:
    """The block ranges of a ledger entry's stripes."""
    return tuple((stripe.block_start, stripe.block_stop) for stripe in stripes)
