"""A fake learner: steps at a rate, holds parameters, base and snapshots, and follows the real carry-over rule.

It is a process of its own: it survives its daemon, and dies and returns as a new incarnation by itself. Each inner
step adds a vector from a pool whose values have very different magnitudes, so that sums taken in another order have
other bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.data_shards import ShardRows
from diloco_node.core.events import (
    LearnerAttached,
    LearnerReported,
    SnapshotRefused,
    SnapshotTaken,
    TakeSnapshot,
)
from diloco_node.core.merge.carry import Anchor, carry_plan, position_after
from diloco_node.core.row_book import RowBook
from diloco_node.core.types import NO_STEPS, CarryMode, Contribution, FragmentPosition, LearnerStatus
from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.arithmetic import carry_over
from diloco_node.lab.sim.world import Life, World
from diloco_node.numeric import F32, F64

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host
    from diloco_node.lab.sim.setup import Setup

POOL_VECTORS = 64
ROWS_A_STEP = 3
ROWS_A_PASS = 7
"""Rows of a shard. So a step moves two shards at times."""

NOWHERE = FragmentPosition(-1, 0, 0, 0)

Pool = list[list[F32]]
"""Per fragment, inner updates to draw from."""


@dataclass(slots=True)
class FakeSnapshot:
    """A copy of a fragment that was offered to a round, until the learner applies a version that resolves it.

    Attributes:
        values: the parameters when it was taken, shape (n,), float32.
        work: the sum of all inner updates of this incarnation up to then, shape (n,), float64.
        encoded: the outer gradient against the base, bf16. version: what the round that it was last wanted for makes.
    """

    contribution: Contribution
    values: F32
    work: F64
    encoded: bytes
    version: int = 0


@dataclass(slots=True)
class Part:
    """A fragment in the learner.

    Attributes:
        theta, base: shape (n,), float32.
        position: where it stands. last_included: the number of the last snapshot that became part of a version.
        work: the sum of all inner updates of this incarnation, float64.
        included_work: the part of `work` that is not in theta - base: included in versions, or not carried.
        snapshot: unresolved, or None.
    """

    theta: F32
    base: F32
    work: F64
    included_work: F64
    position: FragmentPosition = NOWHERE
    last_included: int = -1
    snapshot: FakeSnapshot | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that waits for the next step boundary."""

    fragment: int
    version: int
    included_snapshot: int
    theta: F32


class FakeLearner:
    """An incarnation of a region's learner.

    Attributes:
        life: over when the process is dead. step, tokens: since the start of this incarnation. parts: per fragment.
        book: of the rows of the data that it trains.
    """

    def __init__(
        self,
        world: World,
        setup: Setup,
        port: Host,
        *,
        region: str,
        incarnation: int,
        pool: Pool,
        row_marks: Mapping[int, int],
    ) -> None:
        self.life = Life()
        self._region = region
        self.incarnation = incarnation
        self.step = 0
        self.tokens = 0
        # More than 1: its script counts wrongly.
        self.token_factor = 1
        # True once the run has told it to stop; no step follows.
        self.finished = False
        self.parts = [_blank(layout) for layout in setup.layouts]
        self.book = RowBook(len(setup.layouts), row_marks)
        # The shards that it may train, by which change of the members, and the row that is next in each.
        self._shards: tuple[int, ...] = ()
        self._changes = 0
        self._rows: dict[int, int] = {}
        # The shard that was trained last, and whether it has heard of any.
        self._shard = 0
        self._has_shards = False
        self._world = world
        self._setup = setup
        self._port = port
        self._pool = pool
        # The number of the newest snapshot; no number is used twice.
        self._snapshots = 0
        # By fragment, the newest version that waits for a step boundary.
        self._offers: dict[int, Offer] = {}
        # By fragment, the first boundary that may apply its offer.
        self._apply_from: dict[int, int] = {}
        # Step boundaries so far; it only grows.
        self._boundaries = 0
        # By fragment, the order that waits for a step boundary; void when the daemon dies.
        self._snapshot_orders: dict[int, TakeSnapshot] = {}
        # Empty until the run is finished.
        self._stop_reason = ""
        # The highest step of a report.
        self._reported_step = 0
        # Set when applying a version first drops steps; it stays set.
        self._has_thrown_away = False
        self._step_time_ns = setup.slower.get(region, 1) * world.draw_ns(setup.step_ns_min, setup.step_ns_max)
        self._boundary(is_first=True)

    @property
    def is_training(self) -> bool:
        """Every fragment has been given its first version, there are rows to train, and nobody said stop."""
        return (
            not self.finished and bool(self._shards) and all(local.position.base_version >= 0 for local in self.parts)
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """Per fragment the version that it has, or the newer one that waits for a step boundary."""
        return tuple(
            self._offers[fragment].version if fragment in self._offers else local.position.base_version
            for fragment, local in enumerate(self.parts)
        )

    def status(self) -> LearnerStatus:
        """Report as the learner sends it."""
        return LearnerStatus(
            incarnation=self.incarnation,
            step=self.step,
            tokens=self.tokens,
            step_time_ns=self._step_time_ns,
            positions=tuple(local.position for local in self.parts),
            finished=self.finished,
        )

    def attachment(self, trained_before: tuple[tuple[int, int, int], ...]) -> LearnerAttached:
        """Return the words of a learner to a new daemon."""
        return LearnerAttached(self.status(), trained_before)

    def snapshot_numbers(self) -> tuple[int, ...]:
        """Return the number of each fragment's unresolved snapshot, or -1."""
        return tuple(local.snapshot.contribution.snapshot if local.snapshot else -1 for local in self.parts)

    def ask_snapshot(self, effect: TakeSnapshot) -> None:
        """The daemon wants a snapshot at the next step boundary."""
        self._snapshot_orders[effect.fragment] = effect

    def offer(self, offer: Offer) -> None:
        """The daemon has a version for the next step boundary; a newer offer replaces one that waits."""
        waiting = self._offers.get(offer.fragment)
        if waiting is None:
            lag = self._world.rng.randint(0, self._setup.apply_lag_max)
            self._apply_from[offer.fragment] = self._boundaries + 1 + lag
        if waiting is None or waiting.version < offer.version:
            self._offers[offer.fragment] = offer

    def stop(self, reason: str) -> None:
        """The run is finished."""
        self._stop_reason = reason

    def follow_shards(self, changes: int, shards: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """The daemon says which shards of the data are the region's, and where each is begun; see `RegionShards`."""
        if changes < self._changes:
            return
        if not self._has_shards:
            self._has_shards = True
            self.book.inherit(shards, starts)
        self._changes = changes
        places = dict(zip(shards, self.book.behind(shards, starts), strict=True))
        self._rows.update({shard: max(row, self._rows.get(shard, 0)) for shard, row in places.items()})
        self._shards = tuple(shard for shard, row in places.items() if row >= 0)

    def forget_daemon(self) -> None:
        """The daemon died: what it asked for is void, what it offered was in its memory."""
        self._snapshot_orders.clear()
        self._offers.clear()

    def _boundary(self, *, is_first: bool = False) -> None:
        if not is_first:
            if self.is_training:
                self._train()
            self._boundaries += 1
            for fragment in sorted(self._offers):
                if self._boundaries >= self._apply_from.get(fragment, 0):
                    self._apply(self._offers.pop(fragment))
            orders, self._snapshot_orders = self._snapshot_orders, {}
            for fragment in sorted(orders):
                self.take_snapshot(orders[fragment])
            if self._stop_reason:
                self.finished = True
            self._report()
        jitter_ns = self._world.draw_ns(-self._step_time_ns // 10, self._step_time_ns // 10)
        self._world.after(self._step_time_ns + jitter_ns, self.life, self._boundary)

    def _report(self) -> None:
        """After an apply that threw steps away a report says which are to be booked as discarded: only once they are on
        disk. So do those after it.
        """
        status = self.status()
        is_booked = self._setup.settings.carry is CarryMode.OVERWRITE or self._has_thrown_away
        if not is_booked:
            self._port.tell_daemon(LearnerReported(status))
        self._port.persist_counters(
            self.incarnation, self.step, self.tokens, (lambda: self._tell(status)) if is_booked else None
        )

    def _tell(self, status: LearnerStatus) -> None:
        if status.step >= self._reported_step:
            self._reported_step = status.step
            self._port.tell_daemon(LearnerReported(status))

    def _train(self) -> None:
        self.step += 1
        self._train_rows()
        self.tokens += self.token_factor * self._world.rng.randint(60, 70)
        for fragment, local in enumerate(self.parts):
            update = self._pool[fragment][self._world.rng.randrange(POOL_VECTORS)]
            local.theta = local.theta + update
            local.work += update

    def _train_rows(self) -> None:
        """Train one shard after another, each a pass at a time."""
        begun, shards = dict[int, int](), self._shards
        for _ in range(ROWS_A_STEP):
            place = bisect_left(shards, self._shard)
            is_there = place < len(shards) and shards[place] == self._shard
            if not is_there or not self._rows[self._shard] % ROWS_A_PASS:
                self._shard = shards[(place + is_there) % len(shards)]
            begun.setdefault(self._shard, self._rows[self._shard])
            self._rows[self._shard] += 1
        ranges = [ShardRows(shard, row, self._rows[shard]) for shard, row in begun.items()]
        self.book.add(ranges, self._changes)
        self._port.rows_trained(self.incarnation, ranges)

    def take_snapshot(self, order: TakeSnapshot) -> None:
        """Take the snapshot that is ordered, or say why not."""
        local = self.parts[order.fragment]
        if local.position.base_version != order.base_version:
            self._refuse(order, f"the learner is at version {local.position.base_version}")
            return
        if local.snapshot is None:
            if self.step == local.position.included_step:
                self._refuse(order, NO_STEPS)
                return
            local.snapshot = self.make_snapshot(order.fragment, local)
        snapshot = local.snapshot
        snapshot.version = order.version
        self._port.offer_contribution(snapshot)
        self._port.persist_counters(
            self.incarnation,
            self.step,
            self.tokens,
            lambda: self._port.tell_daemon(SnapshotTaken(snapshot.contribution)),
        )

    def _refuse(self, order: TakeSnapshot, reason: str) -> None:
        self._port.tell_daemon(SnapshotRefused(order.fragment, order.version, reason))

    def make_snapshot(self, fragment: int, local: Part) -> FakeSnapshot:
        """Encode what was trained since the base, under the next number."""
        layout = self._setup.layouts[fragment]
        body = tensors.encode(local.base - local.theta, self._setup.settings.codec_up)
        values = tensors.decode(body, self._setup.settings.codec_up)
        self._snapshots += 1
        contribution = Contribution(
            learner=self._region,
            incarnation=self.incarnation,
            fragment=fragment,
            base_version=local.position.base_version,
            snapshot=self._snapshots,
            step_from=local.position.included_step,
            step_to=self.step,
            tokens=self.tokens - local.position.included_tokens,
            squared_norms=tensors.squared_norms(layout, values, 0, layout.block_count),
            rows=self.book.rows(fragment, self.step, self._changes),
        )
        self._check_work(local, values, contribution)
        return FakeSnapshot(contribution, local.theta, local.work.copy(), body)

    def _check_work(self, local: Part, values: F32, contribution: Contribution) -> None:
        """The outer gradient must hold the work of exactly the steps it names, within float32 and bf16 rounding."""
        work = local.work - local.included_work
        error = float(np.abs(values + work).max())
        if error > 0.02 * float(np.abs(work).max()) + 1e-3:
            self._port.complain(f"work: {contribution} is off by {error:.3g} from the steps it names")

    def _apply(self, offer: Offer) -> None:
        local = self.parts[offer.fragment]
        if offer.version <= local.position.base_version:
            return
        if local.position.base_version < 0:
            local.theta = local.base = offer.theta
            local.position = replace(local.position, base_version=offer.version, cycle_start_step=self.step)
            return
        self._carry(local, offer)

    def _carry(self, local: Part, offer: Offer) -> None:
        mode, snapshot = self._setup.settings.carry, local.snapshot
        counters: tuple[int, int] | None = None
        # An offer may have crossed the report of the version that includes the same snapshot: it is in the base then.
        if offer.included_snapshot > local.last_included:
            if snapshot is None or snapshot.contribution.snapshot != offer.included_snapshot:
                self._port.complain(
                    f"carry: version {offer.version} includes unknown snapshot {offer.included_snapshot}"
                )
                return
            tokens = local.position.included_tokens + snapshot.contribution.tokens
            counters = (snapshot.contribution.step_to, tokens)
            local.included_work = snapshot.work
            local.last_included = offer.included_snapshot
            self.book.include(offer.fragment, counters[0])
        since = counters[0] if counters is not None else local.position.included_step
        base_version = local.position.base_version
        plan = carry_plan(
            mode,
            is_included=counters is not None,
            # Planted faults include a snapshot again under a later version: that is for the checkers to find.
            versions_missed=max(0, offer.version - (snapshot.version if counters and snapshot else base_version)),
            steps_since_inclusion=self.step - since,
            carry_steps_limit=self._setup.settings.carry_steps_limit,
        )
        anchors = {Anchor.BASE: local.base, Anchor.SNAPSHOT: snapshot.values if snapshot else None, Anchor.NONE: None}
        local.theta = carry_over(plan, new=offer.theta, theta=local.theta, anchor=anchors[plan.anchor])
        self._has_thrown_away |= plan.anchor is Anchor.NONE or plan.carry_factor <= 0.0
        # Of the work that is in no version, lam of it is still in theta - base.
        local.included_work = local.work - plan.carry_factor * (local.work - local.included_work)
        local.base = offer.theta
        local.position = position_after(
            local.position,
            inclusion=counters,
            step=self.step,
            tokens=self.tokens,
            version=offer.version,
            mode=mode,
            is_kept=plan.anchor is not Anchor.NONE,
        )
        local.snapshot = None


def update_pool(world: World, layouts: tuple[FragmentBlocks, ...]) -> Pool:
    """Per fragment a pool of inner updates, shape (n,), float32; magnitudes from 1e-4 to 1e2, so order matters."""
    generator = np.random.default_rng(world.rng.getrandbits(32))
    pool = []
    for layout in layouts:
        exponents = generator.uniform(-4.0, 2.0, size=(POOL_VECTORS, layout.values))
        signs = generator.choice([-1.0, 1.0], size=(POOL_VECTORS, layout.values))
        pool.append(list((signs * 10.0**exponents).astype(np.float32)))
    return pool


def _blank(layout: FragmentBlocks) -> Part:
    zeros = np.zeros(layout.values, np.float32)
    return Part(theta=zeros, base=zeros, work=np.zeros(layout.values), included_work=np.zeros(layout.values))
