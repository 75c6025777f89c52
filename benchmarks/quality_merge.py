"""Rounds in lock-step virtual time: the real cores, codec and apply rule, and nothing of the network.

`Rounds` plays leader, reducers and regions at once. After every inner step of the stack it commits the rounds whose
overlap is over, hands the new versions to the learners, and opens the rounds that are due. As all regions hold equal
bytes, there is one copy of the global parameters. What a round does is the production code: `core.merge.fragments`,
`core.merge.schedule`, `core.merge.weights`, `core.merge.outliers`, `core.merge.carry`, `codec.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge import outliers, schedule, weights
from diloco_node.core.merge.carry import Anchor, carry_plan, position_after
from diloco_node.core.merge.fragments import Fragment, TensorSpec, build_manifest
from diloco_node.core.merge.numbers import MergeNumbers
from diloco_node.core.types import CarryMode, Contribution, FragmentPosition, MergeRule, RunSettings
from diloco_node.daemon.effects.open_stripes import add_trimmed
from diloco_node.lab.sim.arithmetic import carry_over
from diloco_node.numeric import F32, F64

Attendance = Callable[[int, int], Sequence[int]]
"""(fragment, version) -> the learners that are included in the round, in order."""


@dataclass(slots=True)
class _Snapshot:
    """What a learner contributed: the parameters at that moment, and where it stood."""

    values: F32
    step: int
    tokens: int


@dataclass(slots=True)
class _Copy:
    """One learner's relation to one fragment.

    Attributes:
        base: the version it applied last.
        position: the core's record of it.
        included: newest snapshot that is in a committed version which the learner has not applied yet.
        included_version: the last version that includes it; 0 if none does.
        included_until: the step of its snapshot in that version.
    """

    base: F32
    position: FragmentPosition
    included: _Snapshot | None = None
    included_version: int = 0
    included_until: int = 0


@dataclass(slots=True)
class _Open:
    """A round on its way: snapshots are taken, the result comes at `commit_step`."""

    fragment: int
    version: int
    commit_step: int
    is_last: bool
    snapshots: dict[int, _Snapshot]
    contributions: list[Contribution]
    encoded: list[NDArray[np.uint8]]


@dataclass(slots=True)
class _Global:
    """A fragment's global state, and the clock of its rounds."""

    theta: F32
    momentum: F32
    merged: F32
    version: int = 0
    clock: FragmentPosition = field(default_factory=lambda: FragmentPosition(0, 0, 0, 0))
    recent: outliers.RecentRounds = field(default_factory=outliers.RecentRounds)


def merge_rule(name: str, rule: MergeRule) -> MergeRule:
    """Embeddings, head and the buffers of a router are always averaged."""
    return MergeRule.AVG if any(word in name for word in ("embed", "lm_head", "expert_bias")) else rule


class Rounds:
    """All rounds of one run.

    Call `after_step` once after every inner step; it may change `theta` in place.

    Args:
        settings: H, P, tau, outer optimizer, merge rule, codecs and carry mode come from here.
        shapes: name -> shape, in the order in which the tensors lie in a row of theta.
        theta: shape (M, N), float32; the learners' parameters, all rows equal at the start.
        tokens_per_step: of each learner, or of one where all have the same.
        attendance: who is included.
        cut_steps: the last learner is cut off after step `cut_steps[0]` until `cut_steps[1]`: it trains, contributes
            nothing, gets nothing. None: never.
        keep_cut_work: False throws away what the cut learner did: it returns with the new global parameters.
        outlier: what the last learner offers is so many times as long as what it learnt; 0: it is what it learnt.
        share: scale rounds that hold carried work back to one cycle (the design); False for comparison.
        outer_total: outer momentum is the mean autocorrelation so far, and so much of a constant gradient is taken in
            the end; 0: the settings' rates.

    Attributes:
        bits_up: of all contributions so far, as they would travel.
        cosines: per fragment, of each merged outer gradient with the one before it.
    """

    def __init__(
        self,
        settings: RunSettings,
        shapes: dict[str, tuple[int, ...]],
        theta: F32,
        *,
        tokens_per_step: int | Sequence[int],
        attendance: Attendance | None = None,
        cut_steps: tuple[int, int] | None = None,
        keep_cut_work: bool = True,
        share: bool = True,
        outlier: float = 0.0,
        outer_total: float = 0.0,
    ) -> None:
        self.settings, self.theta = settings, theta
        self.attendance = attendance
        is_one = isinstance(tokens_per_step, int)
        self.tokens_per_step = (tokens_per_step,) * theta.shape[0] if is_one else tuple(tokens_per_step)
        self.outlier = np.float32(outlier)
        self.cut_steps, self.keep_cut_work, self.share = cut_steps, keep_cut_work, share
        specs = [TensorSpec(name, shape, merge_rule(name, settings.merge)) for name, shape in shapes.items()]
        self.fragments = build_manifest(specs, settings.fragments).fragments
        starts = dict(zip(shapes, np.cumsum([0, *(prod(shape) for shape in shapes.values())]).tolist(), strict=False))
        self._where = [_positions(fragment, starts) for fragment in self.fragments]
        self._up = [FragmentBlocks(fragment.piece_sizes, settings.codec_up) for fragment in self.fragments]
        self._down = [FragmentBlocks(fragment.piece_sizes, settings.codec_down) for fragment in self.fragments]
        self.learners, self.outer_total = theta.shape[0], outer_total
        self.bits_up = 0
        self.cosines: list[list[float]] = [[] for _ in self.fragments]
        first = FragmentPosition(base_version=0, cycle_start_step=0, included_step=0, included_tokens=0)
        self.globals = [
            _Global(theta[0, where].copy(), *np.zeros((2, len(where)), np.float32)) for where in self._where
        ]
        self.copies = [[_Copy(state.theta.copy(), first) for state in self.globals] for _ in range(self.learners)]
        self._open: list[_Open] = []
        self._is_last = False
        self._snapshots_taken = 0

    def global_parameters(self) -> F32:
        """The newest version of every fragment, shape (N,)."""
        flat = np.empty(self.theta.shape[1], np.float32)
        for state, where in zip(self.globals, self._where, strict=True):
            flat[where] = state.theta
        return flat

    def after_step(self, step: int) -> None:
        """What happens at the boundary after inner step `step` (from 1)."""
        ready = [one for one in self._open if one.commit_step <= step]
        self._open = [one for one in self._open if one.commit_step > step]
        for one in ready:
            self._commit(one)
            self._offer(one.fragment, step)
        if self.cut_steps and step == self.cut_steps[1]:
            for fragment in range(len(self.fragments)):
                self._apply(self.learners - 1, fragment, step)
        for fragment, state in enumerate(self.globals):
            due = schedule.due_step(
                fragment,
                state.clock,
                sync_every=self.settings.sync_every,
                fragments=self.settings.fragments,
                lead=0,
            )
            if due is not None and step >= due and not any(one.fragment == fragment for one in self._open):
                self._open_round(fragment, step)

    def finish(self, step: int) -> None:
        """After the last step, instead of `after_step`: what is in flight, then one last round with all new steps."""
        for one in sorted(self._open, key=lambda one: (one.commit_step, one.fragment)):
            self._commit(one)
            self._offer(one.fragment, step)
        self._open, self.attendance, self._is_last = [], None, True
        for fragment in range(len(self.fragments)):
            self._open_round(fragment, step)
        for one in self._open:
            self._commit(one)
            self._offer(one.fragment, step)
        self._open = []

    def observe(self, one: _Open, weighed: Sequence[float]) -> None:
        """A round before it is merged, with the weights of its contributions; for who wants to look."""

    def own_step(self, m: int, step: int) -> int:
        """Inner steps that learner m has made after inner step `step` of the stack: all of them make each."""
        return step

    def _reachable(self, step: int) -> list[int]:
        is_cut = self.cut_steps is not None and self.cut_steps[0] <= step < self.cut_steps[1]
        return list(range(self.learners - is_cut))

    def _open_round(self, fragment: int, step: int) -> None:
        state = self.globals[fragment]
        live = self._reachable(step)
        chosen = live if self.attendance is None else self.attendance(fragment, state.version)
        copies = [(m, self.copies[m][fragment]) for m in live if m in chosen]
        members = [m for m, copy in copies if self.own_step(m, step) > copy.position.included_step]
        state.clock = FragmentPosition(1, step, step, 0)
        if not members:
            return
        one = _Open(fragment, state.version + 1, step + self.settings.overlap_steps, self._is_last, {}, [], [])
        for m in members:
            self._contribute(one, m, step)
        self._open.append(one)
        if self.settings.overlap_steps == 0:
            self._open.remove(one)
            self._commit(one)
            self._offer(fragment, step)

    def _contribute(self, one: _Open, m: int, step: int) -> None:
        copy, step = self.copies[m][one.fragment], self.own_step(m, step)
        values = self.theta[m, self._where[one.fragment]]
        is_wild = self.outlier and m == self.learners - 1
        offered = copy.base + self.outlier * (values - copy.base) if is_wild else values
        encoded, norms, bits = self._encoded(m, one.fragment, copy.base, offered, is_last=one.is_last)
        self.bits_up += bits
        tokens = step * self.tokens_per_step[m]
        self._snapshots_taken += 1
        one.snapshots[m] = _Snapshot(values, step, tokens)
        one.encoded.append(encoded)
        one.contributions.append(
            Contribution(
                learner=f"region-{m:02d}",
                incarnation=1,
                fragment=one.fragment,
                base_version=copy.position.base_version,
                snapshot=self._snapshots_taken,
                step_from=copy.position.included_step,
                step_to=step,
                tokens=tokens - copy.position.included_tokens,
                squared_norms=tuple(norms.tolist()),
            )
        )

    def _encoded(
        self, m: int, fragment: int, base: F32, offered: F32, *, is_last: bool
    ) -> tuple[NDArray[np.uint8], F64, int]:
        """Return a contribution as bytes for `_commit`, its squared norms per piece, and the bits that travel."""
        blocks = self._up[fragment]
        encoded = np.empty(blocks.encoded_bytes, np.uint8)
        return encoded, kernels.encode_delta(blocks, base, offered, encoded), 8 * encoded.size

    def autocorrelation(self) -> list[float]:
        """Mean cosine of successive merged outer gradients, per fragment; 0 before there were two."""
        return [float(np.mean(cosines)) if cosines else 0.0 for cosines in self.cosines]

    def _outer_rates(self, one: _Open) -> tuple[float, float]:
        """As `core.merge.numbers.outer_rates`, but for `outer_total`."""
        if one.is_last:
            return 1.0, 0.0
        if not self.outer_total:
            return self.settings.outer_lr, self.settings.outer_momentum
        momentum = min(max(self.autocorrelation()[one.fragment], 0.0), 0.9)
        return self.outer_total * (1.0 - momentum), momentum

    def _commit(self, one: _Open) -> None:
        """Weigh, sum, encode, outer step: what leader, reducers and regions do."""
        settings, rules = self.settings, self.fragments[one.fragment].rules
        if one.is_last:
            rules = (MergeRule.AVG,) * len(rules)
        up, down, state = self._up[one.fragment], self._down[one.fragment], self.globals[one.fragment]
        missed = [self._versions_missed(m, one) for m in one.snapshots]
        clips = outliers.clips(one.contributions, self.fragments[one.fragment].piece_sizes, state.recent)
        weighed = weights.weights(one.contributions, missed, clips, settings)
        self.observe(one, weighed)
        state.recent = state.recent.after(one.contributions)
        total = np.zeros(up.values, np.float32)
        share = weights.share(weighed, missed) if self.share and not one.is_last else 1.0
        numbers = MergeNumbers(tuple(one.contributions), tuple(rules), weighed, clips, share)
        rows = numbers.coefficients()
        is_trimmed = settings.merge is MergeRule.TRIMMED
        values = np.zeros((len(rows), up.values) if is_trimmed else (1, 0), np.float32)
        for place, (row, encoded) in enumerate(zip(rows, one.encoded, strict=True)):
            target = values[place] if is_trimmed else total
            kernels.accumulate(up, encoded, 0, up.block_count, np.array(row, np.float32), target)
        if is_trimmed:
            add_trimmed([line for line, row in zip(values, rows, strict=True) if any(row)], total)
        merged = np.empty(down.encoded_bytes, np.uint8)
        norms = kernels.encode(down, total, merged)
        factors = numbers.factors(norms.tolist())
        lr, mu = self._outer_rates(one)
        decayed = np.float32(mu) * state.momentum
        kernels.outer_step(down, merged, np.array(factors, np.float32), lr, mu, state.theta, state.momentum)
        before, state.merged = state.merged, state.momentum - decayed
        lengths = float(np.linalg.norm(before) * np.linalg.norm(state.merged))
        if lengths and not one.is_last:
            self.cosines[one.fragment].append(float(before @ state.merged) / lengths)
        state.version = one.version
        for m, snapshot in one.snapshots.items():
            copy = self.copies[m][one.fragment]
            copy.included, copy.included_version, copy.included_until = snapshot, one.version, snapshot.step

    def _versions_missed(self, m: int, one: _Open) -> int:
        """As the leader counts them: 0 for a learner that was never included, or gave up what it did since."""
        copy = self.copies[m][one.fragment]
        carried = copy.included_version > 0 and copy.position.included_step == copy.included_until
        carries = self.settings.carry is CarryMode.CARRY and carried
        return one.version - 1 - copy.included_version if carries else 0

    def _offer(self, fragment: int, step: int) -> None:
        """Every learner that can be reached takes the new version."""
        for m in self._reachable(step):
            self._apply(m, fragment, step)

    def _apply(self, m: int, fragment: int, step: int) -> None:
        copy, state, where = self.copies[m][fragment], self.globals[fragment], self._where[fragment]
        if copy.position.base_version == state.version:
            return
        is_returning = self.cut_steps is not None and m == self.learners - 1 and step == self.cut_steps[1]
        mode = CarryMode.OVERWRITE if is_returning and not self.keep_cut_work else self.settings.carry
        step = self.own_step(m, step)
        snapshot = copy.included
        since = step - (snapshot.step if snapshot else copy.position.included_step)
        plan = carry_plan(
            mode,
            is_included=snapshot is not None,
            versions_missed=state.version - (copy.included_version if snapshot else copy.position.base_version),
            steps_since_inclusion=since,
            carry_steps_limit=self.settings.carry_steps_limit,
        )
        anchor = None
        if plan.anchor is Anchor.SNAPSHOT and snapshot:
            anchor = snapshot.values
        elif plan.anchor is Anchor.BASE:
            anchor = copy.base
        self.theta[m, where] = carry_over(plan, new=state.theta, theta=self.theta[m, where], anchor=anchor)
        copy.position = position_after(
            copy.position,
            inclusion=(snapshot.step, snapshot.tokens) if snapshot else None,
            step=step,
            tokens=step * self.tokens_per_step[m],
            version=state.version,
            mode=mode,
            is_kept=plan.anchor is not Anchor.NONE,
        )
        copy.base, copy.included = state.theta.copy(), None


def _positions(fragment: Fragment, starts: dict[str, int]) -> NDArray[np.int64]:
    """Where the fragment's values lie in a row of theta."""
    ranges = [np.arange(starts[p.name] + p.value_start, starts[p.name] + p.value_stop) for p in fragment.pieces]
    return np.concatenate(ranges)
