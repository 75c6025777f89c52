"""An oracle: recomputes every committed merge and every version from the committed history alone.

It knows the encoded bytes of every contribution that a learner ever offered, and takes weights, share and stripes from
the ledger's entries. It computes coefficients, sums, payload digest, factors and the outer step itself, in the order of
learner names. Regions must hold these very bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.core import events as ev
from diloco_node.core.merge import outliers, weights
from diloco_node.core.merge.numbers import MergeNumbers, outer_rates
from diloco_node.core.merge.opposition import MEMBERS_MIN
from diloco_node.core.types import (
    CarryMode,
    Contribution,
    DiscardedBody,
    GenesisBody,
    MergeRule,
    RoundBody,
    Stripe,
)
from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.arithmetic import outer_step
from diloco_node.numeric import F32

if TYPE_CHECKING:
    from diloco_node.lab.sim.setup import Setup

Blocks = tuple[int, int]


class Oracle:
    """Follows the committed history.

    Args:
        payload_of: the bytes that some disk has for a committed round, or None.

    Attributes:
        committed: rounds by (fragment, version).
        liars: regions whose stripes may be wrong. forgers: those of them whose contributions are not what they offered.
        excuses_sums: a liar's wrong stripe may commit.
        wrong_sums: stripes in committed rounds (fragment, version) that a liar summed up wrongly.
    """

    def __init__(
        self, setup: Setup, violate: Callable[[str], None], payload_of: Callable[[RoundBody], bytes | None]
    ) -> None:
        self.committed: dict[tuple[int, int], RoundBody] = {}
        self.liars: frozenset[str] = frozenset()
        self.forgers: frozenset[str] = frozenset()
        self.excuses_sums = True
        self.wrong_sums: list[tuple[int, int]] = []
        self._setup = setup
        # In force at the last committed entry.
        self.settings = setup.settings
        self._violate = violate
        self._payload_of = payload_of
        # By learner, incarnation, fragment and snapshot: never written over.
        self._encoded: dict[tuple[str, int, int, int], tuple[Contribution, bytes]] = {}
        # Per fragment the newest version that is committed; -1 before genesis.
        self._versions = [-1] * len(setup.layouts)
        # By learner, fragment, incarnation and last step, the version since which what follows is carried.
        self._carried: dict[tuple[str, int, int, int], int] = {}
        # Per fragment, as every region has them after the same entries.
        self._recent = [outliers.RecentRounds() for _ in setup.layouts]
        # Per fragment the values at its version; empty before genesis.
        self._theta: list[F32] = []
        self._momentum: list[F32] = []
        # By fragment and version, of all versions so far.
        self._digests: dict[tuple[int, int], bytes] = {}

    def contribution_made(self, contribution: Contribution, body: bytes) -> bool:
        """A learner offers these bytes under this name, which never stands for others. Returns whether it is new."""
        is_new = _name(contribution) not in self._encoded
        first = self._encoded.setdefault(_name(contribution), (contribution, body))
        if first != (contribution, body):
            self._violate(f"contribution: one name, two contents: {first[0]} and {contribution}")
        return is_new

    def discarded(self, body: DiscardedBody) -> None:
        """A learner gave up steps: what it brings next was carried since this version."""
        self._carried[body.learner, body.fragment, body.incarnation, body.step_to] = self._versions[body.fragment]

    def genesis(self, body: GenesisBody, candidates: Sequence[Sequence[F32]]) -> None:
        """Theta_0 of each fragment must be what some region's learner proposed.

        Fragments may come from different regions. A region that was fetching a leader's Theta_0 when that was lost
        may come to lead itself, and proposes what it has by then.
        """
        parameters = {
            (fragment, fragment_digest(values, np.zeros_like(values))): values
            for theta in candidates
            for fragment, values in enumerate(theta)
        }
        if any((fragment, digest) not in parameters for fragment, digest in enumerate(body.fragment_digests)):
            self._violate("genesis: no region ever had this Theta_0")
            return
        for fragment, digest in enumerate(body.fragment_digests):
            values = parameters[fragment, digest]
            self._theta.append(values)
            self._momentum.append(np.zeros_like(values))
            self._digests[fragment, 0] = digest
            self._versions[fragment] = 0

    def digest_seen(self, region: str, event: ev.DigestComputed) -> None:
        """A region's digest of a version must be the oracle's."""
        digest_before = self._digests.get((event.fragment, event.version))
        if digest_before is None:
            self._violate(f"digest: {region} is at {event.fragment}/{event.version}, which is not committed")
        elif digest_before != event.digest:
            self._violate(
                f"digest: {region} has other bytes at {event.fragment}/{event.version} than the history makes"
            )

    def round_committed(self, body: RoundBody) -> None:
        """Recompute a committed round."""
        latest = self._versions[body.fragment]
        if body.version != latest + 1:
            self._violate(f"versions: {body.fragment}/{body.version} committed after version {latest}")
        self._versions[body.fragment] = body.version
        self.committed[body.fragment, body.version] = body
        learners = [member.contribution.learner for member in body.members]
        if learners != sorted(set(learners)):
            self._violate(f"members: {learners} of {body.fragment}/{body.version} are not sorted and distinct")
            return
        self._check_parts(body)
        if not any(learner in self.forgers for learner in learners):
            self._check_weights(body)
        for member in body.members:
            contribution = member.contribution
            self._carried[
                contribution.learner, contribution.fragment, contribution.incarnation, contribution.step_to
            ] = body.version
        self._check_payload(body)

    def digest_of(self, fragment: int, version: int) -> bytes | None:
        """Return what the history makes of this version."""
        return self._digests.get((fragment, version))

    @property
    def has_begun(self) -> bool:
        """Genesis is committed."""
        return min(self._versions) >= 0

    def versions(self) -> tuple[int, ...]:
        """The last committed version of each fragment; -1 before genesis."""
        return tuple(self._versions)

    def _check_parts(self, body: RoundBody) -> None:
        """Nobody decides alone where three or more members weigh something, whatever it says of itself."""
        shares = sorted(member.weight for member in body.members if member.weight > 0.0)
        part_max = max(self.settings.weight_share_max, 1.0 / max(1, len(shares)))
        if len(shares) >= MEMBERS_MIN and shares[-1] > (part_max + 1e-6) * sum(shares):
            self._violate(f"part: one of {body.fragment}/{body.version} has more than {part_max:.3g} of {shares}")

    def _check_weights(self, body: RoundBody) -> None:
        """Weights and share follow from the members' steps, tokens and the versions that they missed."""
        contributions = [member.contribution for member in body.members]
        misses = [self._versions_missed(contribution, body.version) for contribution in contributions]
        sizes = self._setup.manifest.fragments[body.fragment].piece_sizes
        clips = outliers.clips(contributions, sizes, self._recent[body.fragment])
        weights_due = weights.weights(contributions, misses, clips, self.settings)
        weights_named = tuple(member.weight for member in body.members)
        if weights_named != weights_due:
            self._violate(f"weights: {body.fragment}/{body.version} has {weights_named}, expected {weights_due}")
        share = 1.0 if body.is_last else weights.share(weights_named, misses)
        if body.share != share:
            self._violate(f"share: {body.fragment}/{body.version} has {body.share}, expected {share}")

    def _versions_missed(self, contribution: Contribution, version: int) -> int:
        """Versions over which its steps were carried; 0 if they were not."""
        if self._setup.settings.carry is not CarryMode.CARRY:
            return 0
        since = self._carried.get(
            (contribution.learner, contribution.fragment, contribution.incarnation, contribution.step_from)
        )
        return 0 if since is None else version - 1 - since

    def _check_payload(self, body: RoundBody) -> None:
        """The payload must be the sum of the members that the entry names, with its weights.

        Nobody knows the contributions of a forger; a stripe that a liar reduced may be wrong. All else must be right,
        and the outer step is taken with the very bytes that the entry names.
        """
        contributions = [member.contribution for member in body.members]
        is_known = not any(contribution.learner in self.forgers for contribution in contributions)
        for contribution in contributions if is_known else ():
            first = self._encoded.get(_name(contribution))
            if first is None or first[0] != contribution:
                self._violate(f"contribution: {contribution} in {body.fragment}/{body.version} was never offered")
                return
        values = self._sum(body, contributions) if is_known else None
        if values is None and self.liars:
            data = self._payload_of(body)
            values = tensors.decode(data, self._setup.settings.codec_down) if data is not None else None
        self._recent[body.fragment] = outliers.recent_after(self._recent, body)
        if values is None:
            self._violate(f"payload: {body.fragment}/{body.version} of {body.ballot} is not the sum of its members")
            return
        layout = self._setup.layouts[body.fragment]
        norms = tensors.squared_norms(layout, values, 0, layout.block_count)
        if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(norms, body.squared_norms, strict=True)):
            self._violate(f"norms: {body.fragment}/{body.version} has {body.squared_norms}, its payload {norms}")
        self._step(body, values)

    def _sum(self, body: RoundBody, contributions: list[Contribution]) -> F32 | None:
        """The merged values, if all of them are right; None if some are not, which a liar's may be."""
        layout = self._setup.layouts[body.fragment]
        rules = self._setup.manifest.fragments[body.fragment].rules
        if body.is_last:
            rules = (MergeRule.AVG,) * len(rules)
        sizes = self._setup.manifest.fragments[body.fragment].piece_sizes
        clips = outliers.clips(contributions, sizes, self._recent[body.fragment])
        member_weights = tuple(member.weight for member in body.members)
        numbers = MergeNumbers(tuple(contributions), rules, member_weights, clips, body.share)
        rows = numbers.coefficients()
        stripes = [self._merge_stripe(body, index, rows) for index in range(len(body.stripes))]
        if payload_digest(stripe_digest(stripe.encoded) for stripe in stripes) != body.payload_digest:
            if self.liars:
                self._blame_sums(body, self._wrong_reducers(body, stripes))
            return None
        values = np.concatenate([stripe.decoded for stripe in stripes])
        norms = tensors.squared_norms(layout, values, 0, layout.block_count)
        factors_due = numbers.factors(norms)
        if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(factors_due, body.factors, strict=True)):
            self._violate(f"factors: {body.fragment}/{body.version} has {body.factors}, expected {factors_due}")
        return values

    def _wrong_reducers(self, body: RoundBody, stripes: Sequence[tensors.Reduced]) -> set[str]:
        """Return whose stripes are not what an honest reduction gives."""
        data, layout = self._payload_of(body), self._setup.layouts[body.fragment]
        if data is None:
            return {stripe.reducer for stripe in body.stripes}
        ranges = [
            tensors.byte_range(layout, *_blocks(stripe), self._setup.settings.codec_down) for stripe in body.stripes
        ]
        return {
            stripe.reducer
            for stripe, reduction, (low, high) in zip(body.stripes, stripes, ranges, strict=True)
            if reduction.encoded != data[low:high]
        }

    def _blame_sums(self, body: RoundBody, culprits: set[str]) -> None:
        """Wrong stripes are a liar's alone, and only of one that is excused."""
        for name in sorted(culprits):
            if name in self.liars and self.excuses_sums:
                self.wrong_sums.append((body.fragment, body.version))
            else:
                self._violate(
                    f"payload: {name}'s stripe of {body.fragment}/{body.version} is not the sum of its members"
                )

    def _merge_stripe(self, body: RoundBody, index: int, rows: Sequence[Sequence[float]]) -> tensors.Reduced:
        """An honest reduction."""
        layout, blocks = self._setup.layouts[body.fragment], _blocks(body.stripes[index])
        settings = self._setup.settings
        low, high = tensors.byte_range(layout, *blocks, settings.codec_up)
        stripes = [
            tensors.decode(self._encoded[_name(member.contribution)][1][low:high], settings.codec_up)
            for member in body.members
        ]
        return tensors.reduce_stripe(
            stripes, [tensors.spread(layout, row, *blocks) for row in rows], settings.codec_down
        )

    def _step(self, body: RoundBody, values: F32) -> None:
        if not self._theta:
            return
        layout = self._setup.layouts[body.fragment]
        lr, mu = outer_rates(self.settings, is_last=body.is_last)
        if (body.outer_lr, body.outer_momentum) != (lr, mu):
            self._violate(f"rates: {body.fragment}/{body.version} has {body.outer_lr}, {body.outer_momentum}")
        theta, momentum = outer_step(
            self._theta[body.fragment],
            self._momentum[body.fragment],
            tensors.spread(layout, body.factors, 0, layout.block_count) * values,
            lr=lr,
            mu=mu,
        )
        self._theta[body.fragment] = theta
        if not body.is_last:
            self._momentum[body.fragment] = momentum
        self._digests[body.fragment, body.version] = fragment_digest(theta, self._momentum[body.fragment])


def _blocks(stripe: Stripe) -> Blocks:
    return stripe.block_start, stripe.block_stop


def _name(contribution: Contribution) -> tuple[str, int, int, int]:
    return (contribution.learner, contribution.incarnation, contribution.fragment, contribution.snapshot)
