"""A learner that says what can't be: its proxy ignores it, declines it, or asks again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from diloco_node.core.events import (
    LearnerReported,
    OfferVersion,
    SnapshotRefused,
    TakeSnapshot,
)
from diloco_node.core.types import FragmentPosition
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import (
    Done,
    Leaving,
    OfferApplied,
    SnapshotReady,
)
from tests.kit.node_kit import contribution_of
from tests.kit.proxy_kit import FRAGMENTS, SECOND, Bench, attach, report

# ---- a learner that lies ---------------------------------------------------------------------------------------------


def test_counters_never_go_back(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.on_message(report(10, 1000))
    bench.take()
    for step, tokens in ((9, 1000), (10, 999), (0, 0)):
        bench.side.on_message(report(step, tokens))
        assert f"a report is ignored: {step} steps and {tokens} tokens after 10 and 1000" in bench.take_notes()
    assert bench.take() == []
    assert bench.side.status is not None
    assert (bench.side.status.step, bench.side.status.tokens) == (10, 1000)


@pytest.mark.parametrize(("step", "tokens"), [(1 << 40, 1 << 41), (1 << 48, 5), (10, 1 << 50)])
def test_more_than_a_learner_can_do_is_ignored(bench: Bench, step: int, tokens: int) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.side.on_message(report(step, tokens))
    assert "a report is ignored" in bench.take_notes()
    bench.side.on_message(Done(step, tokens, None, None, 0, None))
    assert "the end of its counters is ignored" in bench.take_notes()
    (event,) = bench.take()
    assert isinstance(event, LearnerReported)
    assert (event.status.step, event.status.tokens, event.status.finished) == (0, 0, True)


@pytest.mark.parametrize(("fragment", "version"), [(0, 2), (0, 0), (1, 1), (999, 1)])
def test_what_was_not_offered_was_not_applied(bench: Bench, fragment: int, version: int) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.offer(0, 1)
    bench.side.on_message(OfferApplied(fragment, version, FragmentPosition(version, 0, 0, 0), 1.0, 0))
    assert f"version {version} of fragment {fragment} was not offered" in bench.take_notes()
    assert bench.take() == []


@pytest.mark.parametrize(("version", "follows"), [(0, False), (2, True)])
def test_a_learner_that_stands_beyond_an_offer_is_offered_the_next_one(
    bench: Bench, version: int, follows: bool
) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.offer(0, 1)
    area = bench.side.version_area
    area.offer(OfferVersion(0, 3, -1))
    assert not area.is_offered(0, 3)
    area._own[0], area.parameters = 1, SimpleNamespace(versions=[3])  # type: ignore[assignment]
    bench.side.on_message(OfferApplied(0, version, FragmentPosition(version, 0, 0, 0), 1.0, 0))
    assert area.is_offered(0, 3) is follows
    assert area.is_offered(0, 1) is not follows


@pytest.mark.parametrize(
    "position",
    [
        FragmentPosition(0, 0, 0, 0),
        FragmentPosition(1 << 40, 0, 0, 0),
        FragmentPosition(1, 1 << 40, 0, 0),
        FragmentPosition(1, 0, 1 << 40, 0),
        FragmentPosition(1, 0, 5, 1 << 50),
    ],
)
def test_a_position_that_can_not_be_is_ignored(bench: Bench, position: FragmentPosition) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.take()
    bench.offer(0, 1)
    bench.side.on_message(OfferApplied(0, 1, position, 1.0, 0))
    assert "an applied version is ignored" in bench.take_notes()
    assert bench.take() == []
    bench.side.on_message(OfferApplied(0, 1, FragmentPosition(1, 0, 0, 0), 1.0, 0))
    assert len(bench.take()) == 1, "the offer still stands"


@pytest.mark.parametrize(
    "change", [{"learner": "b"}, {"incarnation": 2}, {"squared_norms": ()}, {"step_to": 1 << 40}, {"tokens": 1 << 50}]
)
def test_a_snapshot_that_can_not_be_is_declined(bench: Bench, change: dict[str, object]) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.take_snapshot(TakeSnapshot(0, 1, 0))
    bench.take()
    contribution = replace(contribution_of("a", 0, base=0), **change)  # type: ignore[arg-type]
    bench.side.on_message(SnapshotReady(contribution))
    assert bench.take() == [SnapshotRefused(0, 1, "the learner's answer makes no sense")]
    assert "a snapshot is ignored" in bench.take_notes()


def test_what_a_process_says_when_it_attaches_is_asked_for_sense(bench: Bench) -> None:
    bench.side.on_attach(attach(), 1, ())
    bench.side.on_message(report(100, 1000))
    bench.side.on_detach()
    good = replace(attach(100, 1000), incarnation=1, run_id="run")
    assert bench.side.attach_fault(good, run_id="run") == ""
    assert bench.side.attach_fault(attach(), run_id="run") == "", "a new process"
    far = (FragmentPosition(0, 0, 101, 5),) * FRAGMENTS
    for bad, says in (
        (replace(good, run_id="other"), "it is of run other"),
        (replace(good, step=99), "99 steps and 1000 tokens after 100 and 1000"),
        (replace(good, tokens=999), "999 tokens after"),
        (replace(good, tokens=1 << 50), "tokens in 100 steps"),
        (replace(good, positions=far), "a position at step 101"),
        (attach(1, 0), "a new process with 1 steps"),
    ):
        assert says in bench.side.attach_fault(bad, run_id="run")


def test_a_learner_that_leaves_is_reported_as_that_once_until_the_next_attaches(bench: Bench) -> None:
    bench.side.on_message(Leaving())  # of nobody
    bench.side.on_attach(attach(), 1, ())
    bench.side.on_message(report(9, 900))
    before = len(bench.posted)
    bench.side.on_message(Leaving())
    bench.side.on_message(Leaving())
    told = [event.status for event in bench.posted[before:] if isinstance(event, LearnerReported)]
    assert [(status.leaving, status.step) for status in told] == [(True, 9)]
    bench.side.on_message(report(9, 900))
    assert bench.side.status is not None
    assert bench.side.status.leaving
    bench.side.on_detach()
    bench.side.on_attach(attach(), 2, ())
    assert not bench.side.status.leaving


def test_a_pause_is_that_of_the_process_that_is_attached(bench: Bench) -> None:
    area = request_area(bench.memory, PLACE_AREA, PLACE_BYTES)
    area[:] = PlaceMark(7, since_s=1.0, limit_s=60.0, activity="evaluation").encode()
    assert bench.side.pause is None
    bench.side.on_attach(attach(pid=7), 1, ())
    bench.now_ns = SECOND
    bench.side.on_message(report(1, 10))
    assert bench.side.pause is not None
    assert bench.side.pause.activity == "evaluation"
    assert bench.side.place == bench.side.pause
    bench.now_ns = 10_000 * SECOND
    assert bench.side.silence() == ""
    area[:] = PlaceMark(8, since_s=1.0, limit_s=60.0, activity="evaluation").encode()
    assert bench.side.pause is None
    assert bench.side.silence() != ""
    area[:] = PlaceMark(7, step=9, included_step=5, checkpoint_step=2).encode()
    assert bench.side.pause is None
    assert bench.side.place is not None
    assert bench.side.place.losses == {"unsaved_steps": 7, "unmerged_steps": 4}
    area[:] = bytes(PLACE_BYTES)
    assert bench.side.pause is None
