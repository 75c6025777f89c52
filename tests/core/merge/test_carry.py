import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.carry import CARRY_FACTOR_MIN, Anchor, CarryPlan, carry_plan, position_after
from diloco_node.core.merge.weights import cycles
from diloco_node.core.types import CarryMode, FragmentPosition
from diloco_node.lab.sim.arithmetic import carry_over
from diloco_node.numeric import F32

CARRY, OVERWRITE = CarryMode.CARRY, CarryMode.OVERWRITE


def f32(*values: float) -> F32:
    return np.array(values, dtype=np.float32)


def plan(mode: CarryMode, steps: int, *, included: bool, versions_missed: int | None = None) -> CarryPlan:
    versions = int(not included) if versions_missed is None else versions_missed
    return carry_plan(
        mode, is_included=included, versions_missed=versions, steps_since_inclusion=steps, carry_steps_limit=64
    )


def test_the_table_of_plans() -> None:
    assert plan(CARRY, 2, included=True) == CarryPlan(Anchor.SNAPSHOT, 1.0)
    assert plan(CARRY, 64, included=True) == CarryPlan(Anchor.SNAPSHOT, 1.0)
    assert plan(CARRY, 128, included=True) == CarryPlan(Anchor.SNAPSHOT, 0.5)
    assert plan(CARRY, 2, included=False) == CarryPlan(Anchor.BASE, 0.5)
    assert plan(CARRY, 64, included=False) == CarryPlan(Anchor.BASE, 0.5)
    assert plan(CARRY, 65, included=False) == CarryPlan(Anchor.BASE, 0.5 * (64 / 65))
    assert plan(OVERWRITE, 2, included=True) == CarryPlan(Anchor.NONE, 0.0)
    assert plan(OVERWRITE, 999, included=False) == CarryPlan(Anchor.NONE, 0.0)


def test_every_version_missed_halves_what_is_carried() -> None:
    assert plan(CARRY, 30, included=False, versions_missed=3) == CarryPlan(Anchor.BASE, 0.125)
    # Included in the first of three versions of a jump: two came after it.
    assert plan(CARRY, 30, included=True, versions_missed=2) == CarryPlan(Anchor.SNAPSHOT, 0.25)


def test_too_little_to_carry_is_not_carried() -> None:
    assert plan(CARRY, 60, included=False, versions_missed=6) == CarryPlan(Anchor.BASE, CARRY_FACTOR_MIN)
    assert plan(CARRY, 60, included=False, versions_missed=7) == CarryPlan(Anchor.NONE, 0.0)
    assert plan(CARRY, 6400, included=False, versions_missed=1) == CarryPlan(Anchor.NONE, 0.0)
    assert plan(CARRY, 400, included=False, versions_missed=10**6) == CarryPlan(Anchor.NONE, 0.0)


@pytest.mark.parametrize(
    ("steps", "limit", "included", "versions_missed"), [(-1, 64, 1, 0), (3, 0, 1, 0), (3, 64, 1, -1), (3, 64, 0, 0)]
)
def test_a_plan_without_sense_is_a_bug(steps: int, limit: int, included: int, versions_missed: int) -> None:
    with pytest.raises(ValueError, match=r"no limit|missed"):
        carry_plan(
            CARRY,
            is_included=bool(included),
            versions_missed=versions_missed,
            steps_since_inclusion=steps,
            carry_steps_limit=limit,
        )


def test_a_constant_gradient_by_hand() -> None:
    """A single learner, -1 a step, outer lr 1, momentum 0: carry-over loses nothing, overwrite tau of H steps."""
    for mode, expected in ((CARRY, [0, -4, -8, -12]), (OVERWRITE, [0, -4, -6, -8])):
        theta, base, snapshot = f32(0), f32(0), f32(0)
        global_theta, records = f32(0), [0.0]
        for step in range(1, 15):
            theta = theta - f32(1)
            if step % 4 == 0:
                snapshot = theta.copy()
            if step % 4 == 2 and step > 2:  # arrives two steps after the snapshot
                global_theta = global_theta - (base - snapshot)
                anchor = snapshot if mode is CARRY else None
                theta = carry_over(plan(mode, 2, included=True), new=global_theta, theta=theta, anchor=anchor)
                base = global_theta.copy()
                records.append(float(global_theta[0]))
        assert records == expected


def test_not_included_keeps_half_of_what_was_done_since_the_base() -> None:
    kept = carry_over(plan(CARRY, 9, included=False), new=f32(10), theta=f32(3), anchor=f32(5))
    assert kept.tolist() == [9.0]


def test_work_in_every_second_round_adds_up_to_one_and_a_half_cycles() -> None:
    """A single learner, -1 a step, H = 4: in rounds 2, 4, ..., it brings its last cycle and half of the other."""
    theta, base, global_theta = f32(0), f32(0), f32(100)
    theta = theta + global_theta
    base, records = global_theta.copy(), []
    for version in range(1, 7):
        theta = theta - f32(4)
        if version % 2 == 0:
            records.append(float((base - theta)[0]))
            theta = carry_over(plan(CARRY, 0, included=True), new=global_theta, theta=theta, anchor=theta.copy())
        else:
            theta = carry_over(plan(CARRY, 4, included=False), new=global_theta, theta=theta, anchor=base)
    assert records == [4.0 * cycles(1)] * 3 == [6.0, 6.0, 6.0]


def test_overwrite_is_exact_and_does_not_alias() -> None:
    new = f32(1.5, -0.0)
    kept = carry_over(CarryPlan(Anchor.NONE, 0.0), new=new, theta=f32(3e38, -3e38), anchor=None)
    assert kept.tobytes() == new.tobytes()
    assert kept is not new


@given(st.integers(0, 2**32 - 1))
def test_a_learner_that_did_not_move_gets_the_new_version_bit_by_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    new, theta = rng.standard_normal((2, 33)).astype(np.float32)
    for anchor, carry_factor in ((Anchor.SNAPSHOT, 1.0), (Anchor.BASE, 0.37)):
        kept = carry_over(CarryPlan(anchor, carry_factor), new=new, theta=theta, anchor=theta.copy())
        assert kept.dtype == np.float32
        assert kept.tobytes() == new.tobytes()


@pytest.mark.parametrize(("anchor", "given"), [(Anchor.BASE, None), (Anchor.NONE, f32(1))])
def test_the_anchor_must_be_the_one_of_the_plan(anchor: Anchor, given: F32 | None) -> None:
    with pytest.raises(ValueError, match="anchor"):
        carry_over(CarryPlan(anchor, 1.0), new=f32(1), theta=f32(1), anchor=given)


BEFORE = FragmentPosition(base_version=3, cycle_start_step=40, included_step=40, included_tokens=400)


def test_positions_under_carry_restart_from_the_snapshot_or_go_on() -> None:
    included = position_after(BEFORE, inclusion=(64, 640), step=66, tokens=660, version=4, mode=CARRY)
    assert included == FragmentPosition(4, 64, 64, 640)
    versions_missed = position_after(BEFORE, inclusion=None, step=66, tokens=660, version=4, mode=CARRY)
    assert versions_missed == FragmentPosition(4, 66, 40, 400)
    # Then a jump over two versions, one of which includes a snapshot.
    assert position_after(
        versions_missed, inclusion=(80, 800), step=85, tokens=850, version=6, mode=CARRY
    ) == FragmentPosition(6, 80, 80, 800)


def test_positions_under_overwrite_restart_from_the_apply() -> None:
    included = position_after(BEFORE, inclusion=(64, 640), step=66, tokens=660, version=4, mode=OVERWRITE)
    assert included == FragmentPosition(4, 64, 66, 660)
    versions_missed = position_after(BEFORE, inclusion=None, step=66, tokens=660, version=4, mode=OVERWRITE)
    assert versions_missed == FragmentPosition(4, 66, 66, 660)


def test_versions_only_grow_and_snapshots_lie_between() -> None:
    for version in (3, 2):
        with pytest.raises(ValueError, match="does not follow"):
            position_after(BEFORE, inclusion=None, step=66, tokens=660, version=version, mode=CARRY)
    for snapshot in (40, 39, 67):
        with pytest.raises(ValueError, match="snapshot at step"):
            position_after(BEFORE, inclusion=(snapshot, 1), step=66, tokens=660, version=4, mode=CARRY)
    assert position_after(BEFORE, inclusion=(66, 660), step=66, tokens=660, version=4, mode=CARRY).included_step == 66


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20), st.sampled_from(list(CarryMode)))
def test_covered_intervals_never_overlap(rounds: list[tuple[int, bool]], mode: CarryMode) -> None:
    position, step, covered = FragmentPosition(0, 0, 0, 0), 0, 0
    for version, (steps, included) in enumerate(rounds, start=1):
        step += steps
        snapshot = (step, 10 * step) if included else None
        if included:
            assert position.included_step >= covered  # (included_step, step] begins where the last one ended
            covered = step
        step += 2
        position = position_after(position, inclusion=snapshot, step=step, tokens=10 * step, version=version, mode=mode)
        if mode is CARRY:
            assert position.included_step == covered


def test_steps_that_were_not_worth_carrying_are_counted_as_gone() -> None:
    before = FragmentPosition(base_version=3, cycle_start_step=40, included_step=40, included_tokens=400)
    after = position_after(
        before, inclusion=None, step=500, tokens=5000, version=30, mode=CarryMode.CARRY, is_kept=False
    )
    # Its next contribution begins here; (40, 500] is for the ledger to discard.
    assert (after.included_step, after.included_tokens, after.cycle_start_step) == (500, 5000, 500)
    kept = position_after(before, inclusion=None, step=500, tokens=5000, version=30, mode=CarryMode.CARRY)
    assert (kept.included_step, kept.included_tokens) == (40, 400)
