"""The daemon's end of its learner: questions get their own answers, counters survive restarts, memory is shared."""

from dataclasses import replace

import numpy as np
import pytest

from diloco_node.core.events import (
    FinishOrdered,
    LearnerAttached,
    LearnerDetached,
    LearnerReported,
    SnapshotRefused,
    SnapshotTaken,
    TakeSnapshot,
)
from diloco_node.core.types import CarryMode, FragmentPosition
from diloco_node.shared_memory import request_area
from diloco_node.wire.learner_link import (
    CONTRIBUTION_AREA,
    VERSION_AREA,
    Done,
    EndWanted,
    Failed,
    InitialState,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    Stop,
    Warned,
    version_slots,
)
from tests.kit.node_kit import MANIFEST, contribution_of, settle
from tests.kit.proxy_kit import FRAGMENTS, SECOND, Bench, attach, report


def test_reports_reach_the_core_with_what_was_measured(bench: Bench) -> None:
    bench.side.on_attach(attach(), 3, ((1, 10, 100), (2, 5, 50)))
    (event,) = bench.take()
    assert isinstance(event, LearnerAttached)
    assert (event.status.incarnation, event.trained_before) == (3, ((1, 10, 100), (2, 5, 50)))
    bench.side.on_message(report(4, 400, loss=2.5))
    bench.side.on_message(report(5, 500, loss=1.5))
    bench.side.on_message(report(6, 600))
    (*_, last) = bench.take()
    assert isinstance(last, LearnerReported)
    assert (last.status.step, last.status.tokens, last.status.step_time_ns) == (6, 600, 50_000_000)
    assert (bench.side.steps_total, bench.side.tokens_total) == (21, 750)
    assert (bench.side.facts.loss_first, bench.side.facts.loss_last) == (2.5, 1.5)


def test_a_learner_that_stands_still_is_silent_and_has_no_rate(bench: Bench) -> None:
    bench.side.on_attach(attach(), 3, ())
    bench.now_ns = 100 * SECOND
    assert bench.side.silence() == "", "it has reported nothing yet: it may wait for the others"
    for step in range(1, 101):
        bench.now_ns += SECOND // 20
        bench.side.on_message(report(step, 100 * step))
    assert bench.side.facts.tokens.per_second(now_ns=bench.now_ns) == pytest.approx(2000)
    bench.now_ns += 75 * SECOND
    assert bench.side.silence() == "the learner has reported no step for 75 s; a step takes 50 ms"
    assert bench.side.facts.tokens.per_second(now_ns=bench.now_ns) == 0.0
    assert bench.side.facts.resumed_ns == 0, "it never stood still before"
    for step in (101, 102):
        bench.side.on_message(report(step, 100 * step))
        assert bench.side.facts.resumed_ns == bench.now_ns - (step - 101) * SECOND
        bench.now_ns += SECOND
    bench.side.on_attach(attach(), 4, ())
    assert bench.side.silence() == "", "the next one has not begun"
    assert bench.side.facts.tokens.per_second(now_ns=bench.now_ns) is None


def test_a_learner_that_has_its_parameters_and_makes_no_first_step_is_silent(bench: Bench) -> None:
    """Its crash before has told the daemon all versions; the supervisor can't tell a hang from a wait there."""
    bench.side.on_attach(attach(), 3, ())
    bench.now_ns = 3600 * SECOND
    for fragment in range(FRAGMENTS):
        assert bench.side.silence() == "", "it lacks parameters"
        bench.offer(fragment, 4)
        bench.side.on_message(OfferApplied(fragment, 4, FragmentPosition(4, 0, 0, 0), 1.0, 0))
    bench.now_ns += 600 * SECOND
    assert bench.side.silence() == "", "its first step may compile"
    bench.now_ns += 120 * SECOND
    silence = "the learner has reported no step since it attached, and has its parameters for 12 min"
    assert bench.side.silence() == silence
    assert bench.side.status is not None
    placed = replace(attach(pid=8), positions=bench.side.status.positions)
    bench.side.on_attach(placed, 4, ())
    assert bench.side.silence() == "", "another life"
    bench.now_ns += 720 * SECOND
    assert bench.side.silence() == silence
    bench.side.on_message(report(1, 100))
    assert bench.side.silence() == ""
    assert bench.side.facts.ready_ns == 0


def test_the_last_warning_and_a_failure_are_kept_apart(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.now_ns = 5 * SECOND
    facts = bench.side.facts
    bench.side.on_message(Warned("the model has batch normalisation"))
    assert (facts.last_warning, facts.warnings) == ("", 0), "no loss, and no norm"
    bench.side.on_message(report(1, 100))
    bench.side.on_message(Warned("the loss is 9.1 \x1b[2J"))
    assert (facts.last_warning, facts.warnings, facts.has_failed) == ("the loss is 9.1 \\x1b[2J", 1, False)
    bench.side.on_message(Failed("nan"))
    assert (facts.last_warning, facts.warnings, facts.has_failed) == ("the learner failed: nan", 1, True)
    assert facts.last_warning_ns == 5 * SECOND


def test_every_report_reaches_the_core_for_the_learner_leaves_out_those_that_need_not(bench: Bench) -> None:
    bench.side.on_attach(attach(), 3, ())
    bench.take()
    for step in range(1, 21):
        bench.side.on_message(report(step, 100 * step))
    events = bench.take()
    assert [event.status.step for event in events if isinstance(event, LearnerReported)] == list(range(1, 21))


async def test_theta_0_is_stored_when_it_was_asked_for_and_only_then(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, (), writes_initial=True)
    bench.side.on_message(InitialState())
    await bench.tasks.finish()
    assert bench.initial_states == [bench.side.version_area.generation]
    assert bench.take_notes() == ""
    bench.side.on_attach(attach(), 2, ())
    bench.side.on_message(InitialState())
    await bench.tasks.finish()
    assert len(bench.initial_states) == 1
    assert "nobody asked for" in bench.take_notes()


def test_a_report_without_a_learner_is_nothing(bench: Bench) -> None:
    bench.side.on_message(report(4, 400))
    bench.side.on_message(OfferApplied(0, 1, FragmentPosition(1, 0, 0, 0), 1.0, 0))
    bench.side.on_message(Done(1, 1, None, None, 0, None))
    assert bench.take() == []


def test_rates_and_blocked_time_survive_the_restart_of_a_learner(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.now_ns = 10 * SECOND
    bench.side.on_message(report(100, 100_000, blocked_ns=3 * SECOND))
    bench.side.on_detach()
    bench.side.on_attach(attach(), 2, ((1, 100, 100_000),))
    for seconds, tokens in ((20, 1000), (21, 1500)):
        bench.now_ns = seconds * SECOND
        bench.side.on_message(report(tokens // 100, tokens, blocked_ns=SECOND))
    facts, status = bench.side.facts, bench.side.status
    assert status is not None
    assert (facts.tokens_at_first_report, facts.first_report_ns) == (1000, 20 * SECOND)
    assert facts.blocked_ns == 4 * SECOND
    assert bench.side.tokens_total == 101_500


def test_a_successor_keeps_the_counters_of_a_dead_process_and_adds_its_blocked_time(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.now_ns = 10 * SECOND
    bench.side.on_message(report(100, 1000, blocked_ns=3 * SECOND))
    bench.side.on_detach()
    bench.side.on_attach(attach(101, 1010, pid=8), 1, ())
    bench.side.on_message(report(102, 1020, blocked_ns=SECOND))
    assert bench.side.facts.blocked_ns == 4 * SECOND
    assert bench.side.facts.attached_step == 101
    assert bench.side.tokens_total == 1020


def test_a_reconnect_of_the_same_learner_counts_nothing_twice(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.now_ns = 10 * SECOND
    bench.side.on_message(report(100, 1000, blocked_ns=3 * SECOND))
    bench.side.on_detach()
    bench.side.on_attach(attach(100, 1000), 1, ())
    bench.side.on_message(report(101, 1010, blocked_ns=4 * SECOND))
    assert bench.side.facts.blocked_ns == 4 * SECOND
    assert bench.side.facts.first_report_ns == 10 * SECOND


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_asked_for_and_its_answer_handed_on_once(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    assert bench.said == [SnapshotRequested(0, 1, 0)]
    ready = SnapshotReady(contribution_of("a", 0, base=0))
    bench.side.on_message(ready)
    bench.side.on_message(ready)
    assert bench.take() == [SnapshotTaken(ready.contribution)]


def test_a_denial_is_handed_on_once(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    for _ in range(2):
        bench.side.on_message(SnapshotDenied(0, 1, "no steps"))
    assert bench.take() == [SnapshotRefused(0, 1, "no steps")]


def test_a_late_answer_for_the_round_before_does_not_answer_this_one(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    bench.side.take_snapshot(TakeSnapshot(0, 2, 1))
    bench.side.on_message(SnapshotReady(contribution_of("a", 0, base=0)))
    bench.side.on_message(SnapshotDenied(0, 1, "late"))
    assert bench.take() == []
    right = contribution_of("a", 0, base=1, snapshot=2)
    bench.side.on_message(SnapshotReady(right))
    assert bench.take() == [SnapshotTaken(right)]


def test_every_question_is_answered_when_the_learner_goes(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    for fragment in (1, 0):
        bench.side.take_snapshot(TakeSnapshot(fragment, 1, 0))
    bench.take()
    bench.side.on_detach()
    assert bench.take() == [
        SnapshotRefused(0, 1, "the learner is gone"),
        SnapshotRefused(1, 1, "the learner is gone"),
        LearnerDetached(),
    ]
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    assert bench.take() == [SnapshotRefused(0, 1, "no learner is attached")]


def test_the_next_learner_is_not_asked_what_the_one_before_was(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    bench.take()
    bench.side.on_attach(attach(), 2, ())
    first, second = bench.take()
    assert first == SnapshotRefused(0, 1, "the learner restarted")
    assert isinstance(second, LearnerAttached)
    assert bench.side.has_restarted_since(1)
    assert not bench.side.has_restarted_since(2)
    bench.side.on_detach()
    assert not bench.side.has_restarted_since(2), "nobody has written over its contribution area yet"


# ---- versions and the end --------------------------------------------------------------------------------------------


def test_an_applied_version_moves_the_position_of_its_fragment_only(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    position = FragmentPosition(4, 9, 8, 800)
    bench.offer(1, 4)
    bench.side.on_message(OfferApplied(1, 4, position, 0.5, 3))
    (event,) = bench.take()
    assert isinstance(event, LearnerReported)
    assert event.status.positions[1] == position
    assert event.status.positions[0].base_version == -1
    assert bench.side.facts.discounted_versions == 1


def test_steps_that_a_version_ended_before_their_report_are_told_with_it(bench: Bench) -> None:
    """Else the region reports steps as lost, and beside them that its learner has not made so many."""
    bench.side.on_attach(attach(), 1, ())
    bench.side.on_message(report(56, 5600))
    bench.take()
    bench.offer(1, 4)
    bench.side.on_message(OfferApplied(1, 4, FragmentPosition(4, 59, 59, 5900), 0.5, 0))
    (event,) = bench.take()
    assert isinstance(event, LearnerReported)
    assert (event.status.step, event.status.tokens) == (59, 5900)
    assert (bench.side.steps_total, bench.side.tokens_total) == (59, 5900)
    bench.side.on_message(report(59, 5900))
    assert bench.take_notes() == ""


def test_each_held_out_loss_keeps_the_step_of_its_own_evaluation(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.on_message(replace(report(1, 10), val_loss=3.0, val_loss_global=2.5, val_step=100))
    bench.side.on_message(replace(report(2, 20), val_loss=2.0, val_step=150))
    bench.side.on_message(report(3, 30))
    facts = bench.side.facts
    assert (facts.val_loss, facts.val_loss_step) == (2.0, 150)
    assert (facts.val_loss_global, facts.val_loss_global_step) == (2.5, 100)


def test_a_script_that_wants_the_end_votes_for_its_region(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.side.on_message(EndWanted("the loss is flat"))
    assert bench.take() == [FinishOrdered("the loss is flat", is_order=False)]


def test_a_learner_without_its_welcome_is_told_no_end(bench: Bench) -> None:
    """It would take that for another protocol, dial anew, and miss the refusal that follows."""
    bench.side.stop("removed", ())
    assert bench.said == []


def test_the_last_word_of_a_learner_is_kept(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.stop("steps_max", (4, 7))
    assert bench.said == [Stop("steps_max", (4, 7))]
    bench.take()
    bench.side.on_message(Done(50, 5000, 2.25, 2.0, 7, 48))
    (event,) = bench.take()
    assert isinstance(event, LearnerReported)
    assert event.status.finished
    assert (event.status.step, bench.side.steps_total, bench.side.tokens_total) == (50, 50, 5000)
    facts = bench.side.facts
    assert (facts.val_loss, facts.val_loss_global, facts.blocked_ns) == (2.25, 2.0, 7)
    assert (facts.val_loss_step, facts.val_loss_global_step) == (48, 48)
    bench.side.on_detach()
    assert bench.side.done is not None
    assert bench.side.status is None
    status = bench.side.shown_status
    assert status is not None, "the report is written when the learner has gone"
    assert (status.step, status.finished) == (50, True)
    bench.side.on_attach(attach(), 2, ())
    assert bench.side.done is None
    bench.side.on_detach()
    assert bench.side.shown_status is None, "this one died"


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_places_of_fragments_do_not_overlap_and_are_what_the_learner_maps(bench: Bench) -> None:
    slots, values = version_slots(MANIFEST)
    version_area = np.frombuffer(request_area(bench.memory, VERSION_AREA, 4 * slots * values), np.float32)
    contributions_bytes = sum(blocks.encoded_bytes for blocks in bench.side.blocks)
    contribution_area = np.frombuffer(request_area(bench.memory, CONTRIBUTION_AREA, contributions_bytes), np.uint8)
    rng = np.random.default_rng(499)
    contribution_area[:] = rng.integers(0, 256, contributions_bytes, np.uint8)
    area_bytes = b""
    for fragment, blocks in enumerate(bench.side.blocks):
        bench.side.version_area.place(fragment, fragment)[:] = fragment + 1
        half = blocks.block_count // 2
        for start, stop in ((0, half), (half, blocks.block_count)):
            area_bytes += bench.side.contribution_bytes(fragment, start, stop).tobytes()
    assert area_bytes == contribution_area.tobytes()
    places = np.zeros((slots, values), np.float32)
    for fragment in MANIFEST.fragments:
        places[fragment.index, : fragment.size] = fragment.index + 1
    assert version_area.tolist() == places.ravel().tolist()


def test_facts_of_an_attach_are_taken_over(bench: Bench) -> None:
    bench.side.on_attach(attach(12, 1200), 1, ())
    (event,) = bench.take()
    assert isinstance(event, LearnerAttached)
    assert (event.status.step, event.status.tokens) == (12, 1200)


@pytest.mark.parametrize(
    ("carry", "factor", "is_discarding"),
    [(CarryMode.OVERWRITE, 1.0, True), (CarryMode.CARRY, 0.0, True), (CarryMode.CARRY, 0.5, False)],
)
async def test_what_a_living_learner_threw_away_is_told_when_its_counters_are_durable(
    bench: Bench, carry: CarryMode, factor: float, *, is_discarding: bool
) -> None:
    """The core reports every step up to the position that no version includes: a power cut must not forget them."""
    bench_ = Bench(bench.memory, carry)
    bench_.may_sync.clear()
    bench_.side.on_attach(attach(), 3, ())
    bench_.side.on_message(report(12, 1200))
    bench_.take()
    bench_.offer(0, 5)
    bench_.side.on_message(OfferApplied(0, 5, FragmentPosition(5, 12, 12, 1200), factor, 0))
    await settle()
    assert (bench_.take() == []) is is_discarding, "not before"
    assert bench_.side.status is not None
    assert (bench_.side.status.positions[0].base_version == 5) is not is_discarding
    bench_.side.on_message(report(13, 1300))
    assert not any(event.status.positions[0].included_step == 12 for event in bench_.take()) or not is_discarding
    bench_.may_sync.set()
    await bench_.tasks.finish()
    assert bench_.synced == [3] * is_discarding
    assert bench_.side.status.positions[0] == FragmentPosition(5, 12, 12, 1200)
    assert bench_.side.status.step == 13, "what it said meanwhile stays"
    if is_discarding:
        (event,) = bench_.take()
        assert event.status.positions[0].included_step == 12
    bench_.side.close()


async def test_what_was_thrown_away_before_the_learner_attached_anew_is_in_its_attach_alone(bench: Bench) -> None:
    bench_ = Bench(bench.memory, CarryMode.OVERWRITE)
    bench_.may_sync.clear()
    bench_.side.on_attach(attach(), 3, ())
    bench_.offer(0, 5)
    bench_.side.on_message(OfferApplied(0, 5, FragmentPosition(5, 12, 12, 1200), 1.0, 0))
    await settle()
    bench_.side.on_detach()
    bench_.side.on_attach(attach(), 4, ())
    bench_.take()
    bench_.may_sync.set()
    await bench_.tasks.finish()
    assert bench_.take() == []
    assert bench_.side.status is not None
    assert bench_.side.status.positions[0].included_step == 0
    bench_.side.close()
