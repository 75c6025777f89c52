"""lab/chaos/story.py: the figures of a report, from samples and ledgers that a person can recompute."""

from dataclasses import replace
from itertools import pairwise

import pytest

from diloco_node.core.ledger.entries import seal
from diloco_node.core.types import Ballot, Contribution, Entry, FinishedBody, Member, RoundBody
from diloco_node.lab.chaos.executor import StruckFault
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.chaos.story import (
    LifeSpan,
    LifeState,
    MergeMember,
    RegionSample,
    RunSample,
    TimedMerge,
    compare,
    goodput_there,
    life,
    longest_gap,
    longest_gap_ns,
    merged_at_ns,
    outage_document,
    rejoin_ns,
    rejoins,
    timed_merges,
    training,
)
from diloco_node.lab.wan.topology import Outage, Scope
from diloco_node.numeric import NS_PER_S

S = NS_PER_S
UP = RegionSample(has_daemon=True, has_learner=True, incarnation=1)


def sample(at_s: float, *, rounds: int = 0, tokens: int = 0, index: int = 0, **regions: RegionSample) -> RunSample:
    """Region `z` knows rounds, tokens and index; the others as given."""
    known = RegionSample(True, True, commit_index=index, rounds=rounds, tokens_merged=tokens)
    return RunSample(int(at_s * S), {**regions, "z": known})


def merge(at_s: float, **members: tuple[int, int, float]) -> TimedMerge:
    return TimedMerge(int(at_s * S), {name: MergeMember(*one) for name, one in members.items()})


def death(at_s: float, part: str = "learner", *, kind: str = "kill", region: str = "a", pids: int = 1) -> StruckFault:
    fault = PlannedFault(int(at_s * S), kind, FaultTarget(region, part))
    return StruckFault(int(at_s * S), fault, tuple(range(pids)))


def ledger(*bodies: object) -> list[Entry]:
    entries: list[Entry] = []
    for body in bodies:
        previous = entries[-1].hash if entries else bytes(32)
        entries.append(seal(len(entries) + 1, 1, previous, body))  # type: ignore[arg-type]
    return entries


def round_of(fragment: int, **tokens: int) -> RoundBody:
    members = tuple(
        Member(Contribution(name, 2, fragment, 0, 1, 0, 30, count, ()), 1.0) for name, count in tokens.items()
    )
    return RoundBody(fragment, 1, Ballot(1, 1), members, 1.0, (), (), bytes(32))


def test_a_merge_has_the_time_at_which_its_entry_was_first_known_as_committed() -> None:
    entries = ledger(
        round_of(0, a=100), FinishedBody((1,), ""), round_of(1, a=40, b=8), round_of(0, b=60), round_of(0, a=1)
    )
    samples = [sample(-1, index=0), sample(0.5, index=1), sample(1, index=1), sample(2, index=4), sample(3, index=2)]
    found = timed_merges(entries, samples, sizes=[300, 100])
    assert found == [
        TimedMerge(S // 2, {"a": MergeMember(2, 30, 75.0)}),
        TimedMerge(2 * S, {"a": MergeMember(2, 30, 10.0), "b": MergeMember(2, 30, 2.0)}),
        TimedMerge(2 * S, {"b": MergeMember(2, 30, 45.0)}),
    ]
    assert timed_merges(entries, [], sizes=[300, 100]) == []
    assert timed_merges([], samples, sizes=[300, 100]) == []


def test_a_ledger_whose_first_entries_are_gone_has_times_all_the_same() -> None:
    entries = ledger(*[round_of(0, a=4)] * 6)[3:]
    found = timed_merges(entries, [sample(1, index=5), sample(2, index=6)], sizes=[1])
    assert [one.at_ns for one in found] == [S, S, 2 * S]


def test_the_window_counts_from_its_beginning_to_its_end() -> None:
    samples = [
        sample(-5, rounds=1, tokens=100),
        sample(0, rounds=2, tokens=200),
        sample(10, rounds=20, tokens=1000),
        sample(20, rounds=42, tokens=2200),
        sample(21, rounds=50, tokens=9999),
    ]
    merges = [
        merge(-1, a=(1, 5, 500.0)),
        merge(10, a=(1, 9, 10.4), b=(1, 9, 3.0)),
        merge(15, a=(1, 12, 1.2)),
        merge(20.5, b=(1, 99, 500.0)),
    ]
    done = training(samples, merges, regions=["a", "b", "c"], end_ns=20 * S, final=(9999, 2.5))
    assert done["seconds"] == 20
    assert done["tokens_merged"] == 2000
    assert done["tokens_merged_of"] == {"a": 12, "b": 3, "c": 0}
    assert done["participation_of"] == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert done["commits"] == 40
    assert done["commits_per_minute"] == 120
    assert done["longest_gap_seconds"] == 10
    assert done["final"] == {"tokens": 9999, "val_loss": 2.5}


def test_where_not_all_merges_are_known_nothing_is_said_of_single_regions() -> None:
    done = training([sample(1, rounds=4, tokens=90)], None, regions=["a"], end_ns=20 * S, final=(95, None))
    assert (done["tokens_merged"], done["commits"]) == (90, 4)
    assert (done["tokens_merged_of"], done["participation_of"]) == (None, None)
    known = {**done, "tokens_merged_of": {"a": 90}}
    for own, other in ((done, known), (known, done)):
        found = compare(own, other, ends_by_tokens=False)
        assert (found["goodput"], found["goodput_of"]) == (1.0, None)


def test_a_run_without_samples_or_merges_has_no_figures() -> None:
    done = training([], [], regions=["a"], end_ns=20 * S, final=(0, None))
    assert (done["tokens_merged"], done["commits"], done["participation_of"]) == (0, 0, {"a": None})
    assert done["longest_gap_seconds"] == 20


def test_the_longest_gap_may_lie_at_either_end() -> None:
    assert longest_gap_ns([sample(7, rounds=1), sample(9, rounds=2)], 12 * S) == 7 * S
    assert longest_gap_ns([sample(1, rounds=1), sample(4, rounds=2), sample(11, rounds=2)], 12 * S) == 8 * S
    # A region that lags behind knows fewer rounds: that is no new one.
    assert longest_gap_ns([sample(1, rounds=9), sample(2, rounds=8), sample(3, rounds=9)], 4 * S) == 3 * S


def test_a_gap_reaches_from_the_windows_edges() -> None:
    assert longest_gap([], 1.0, 9.0) == 8.0
    assert longest_gap([2.0, 8.5], 1.0, 9.0) == 6.5
    assert longest_gap([2.0, 3.0], 1.0, 9.0) == 6.0


def test_goodput_is_the_tokens_merged_over_those_of_the_undisturbed_run() -> None:
    own = {"seconds": 50, "tokens_merged": 880, "tokens_merged_of": {"a": 400, "b": 480}}
    own["final"] = {"tokens": 800, "val_loss": 2.02}
    undisturbed = {
        "seconds": 50,
        "tokens_merged": 1000,
        "tokens_merged_of": {"a": 500, "b": 0},
        "final": {"tokens": 1100, "val_loss": 1.4},
    }
    found = compare(own, undisturbed, ends_by_tokens=False)
    assert found["goodput"] == 0.88
    assert found["goodput_of"] == {"a": 0.8, "b": None}
    assert found["loss"] is None, "of an unfinished model at other tokens nothing is said"


def test_runs_that_end_with_as_many_tokens_are_compared_by_their_final_models() -> None:
    """The last rounds merge what is left, so neither ends exactly there."""
    own = {"seconds": 80, "tokens_merged": 1000, "tokens_merged_of": {"a": 500}}
    own["final"] = {"tokens": 1015, "val_loss": 1.515}
    undisturbed = {**own, "seconds": 60, "final": {"tokens": 1010, "val_loss": 1.5}}
    found = compare(own, undisturbed, ends_by_tokens=True)
    assert (found["goodput"], found["goodput_of"]) == (0.75, {"a": 0.75})
    assert found["loss"]["change"] == pytest.approx(0.01)
    assert (found["loss"]["tokens"], found["loss"]["undisturbed_tokens"]) == (1015, 1010)


def test_a_number_of_tokens_is_reached_with_the_first_sample_that_has_them() -> None:
    samples = [sample(1, tokens=90), sample(2, tokens=100), sample(3, tokens=110)]
    assert [merged_at_ns(samples, tokens) for tokens in (90, 91, 100, 111)] == [S, 2 * S, 2 * S, 3 * S]
    assert merged_at_ns([], 1) == 0
    assert merged_at_ns([sample(-1, tokens=90), *samples], 80) == S  # the training had not begun


def test_a_run_that_measured_no_loss_has_none_to_compare() -> None:
    none = {"tokens": 1, "val_loss": None}
    own = {"seconds": 1, "tokens_merged": 1, "tokens_merged_of": {}, "final": none}
    measured = {**own, "final": {"tokens": 1, "val_loss": 1.0}}
    assert [compare(*runs, ends_by_tokens=True)["loss"] for runs in ((own, measured), (measured, own))] == [None, None]
    assert compare({**own, "tokens_merged": 5}, {**own, "tokens_merged": 0}, ends_by_tokens=False)["goodput"] is None


def test_who_died_is_back_with_the_first_merge_of_its_next_incarnation() -> None:
    samples = [sample(0, a=UP), sample(10, a=UP)]
    merges = [
        merge(9, a=(1, 50, 1.0)),
        merge(10.5, a=(1, 60, 1.0)),  # on its way when it died
        merge(12, b=(1, 60, 1.0)),
        merge(14, a=(2, 3, 1.0)),
        merge(15, a=(2, 9, 1.0)),
    ]
    for part in ("learner", "supervisor", "region"):
        assert rejoin_ns(death(10, part), samples, merges) == 4 * S
    assert rejoin_ns(death(10), samples, merges[:3]) is None


def test_a_learner_that_outlives_its_daemon_is_back_with_later_steps() -> None:
    samples = [sample(0, a=UP), sample(9.75, a=RegionSample(True, True, incarnation=1, step=60))]
    merges = [merge(10.5, a=(1, 60, 1.0)), merge(13, a=(1, 61, 1.0))]
    assert rejoin_ns(death(10, "daemon"), samples, merges) == 3 * S
    assert rejoin_ns(death(10, "learner"), samples, merges) is None
    # It died with its daemon after all.
    assert rejoin_ns(death(10, "daemon"), samples, [merge(11, a=(2, 1, 1.0))]) == S


def test_times_to_rejoin_are_told_per_victim_and_double_deaths_apart() -> None:
    samples = [sample(0, a=UP, b=UP), sample(20, a=RegionSample(True, True, incarnation=2), b=UP)]
    merges = [merge(12, a=(2, 1, 1.0)), merge(29, a=(4, 1, 1.0)), merge(30, a=(4, 2, 1.0))]
    faults = [
        death(10),
        death(20),  # struck again before it was back
        death(23),
        death(25, "daemon", kind="pause"),  # no death
        death(26, pids=0),  # nobody was there
        death(27, region="b", part="supervisor"),  # never back
    ]
    samples.append(sample(22, a=RegionSample(True, True, incarnation=3), b=UP))
    found = rejoins(faults, samples, merges)
    assert found == {
        "learner": {"count": 3, "seconds_median": 4.0, "seconds_most": 6.0, "struck_again": 1, "never": 0},
        "supervisor": {"count": 1, "seconds_median": None, "seconds_most": None, "struck_again": 0, "never": 1},
    }


def test_a_region_is_dead_then_catches_up_until_its_next_incarnation_is_in_a_merge() -> None:
    back = RegionSample(True, True, incarnation=2)
    gone = RegionSample(has_daemon=True, has_learner=False, incarnation=1)
    samples = [sample(-2, a=gone), sample(-1, a=UP)]
    samples += [sample(at, a=UP) for at in (1, 2)]
    samples += [sample(3, a=gone), sample(4, a=gone), sample(6, a=back), sample(7, a=back), sample(8, a=back)]
    # What the dead one had sent comes into merges also after its successor has come.
    sent = [merge(at, a=(1, 9, 1.0)) for at in (3.5, 5.5, 6)]
    merges = [merge(-0.5, a=(1, 1, 1.0)), *sent, merge(6.5, b=(1, 9, 1.0)), merge(7, a=(2, 2, 1.0))]
    assert life("a", samples, merges, end_ns=10 * S) == [
        LifeSpan(0, 1 * S, LifeState.CATCHING_UP),
        LifeSpan(1 * S, 3 * S, LifeState.TRAINING),
        LifeSpan(3 * S, 6 * S, LifeState.DEAD),
        LifeSpan(6 * S, 7 * S, LifeState.CATCHING_UP),
        LifeSpan(7 * S, 10 * S, LifeState.TRAINING),
    ]


def test_a_region_that_goes_on_catches_up_until_steps_from_then_on_are_merged() -> None:
    gone = RegionSample(has_daemon=True, has_learner=False, incarnation=1, step=9)
    back = RegionSample(True, True, incarnation=1, step=9, attached_step=9)
    samples = [sample(-1, a=UP), sample(2, a=gone), sample(4, a=back), sample(6, a=back)]
    merges = [merge(at, a=(1, step, 1.0)) for at, step in ((0, 4), (3, 9), (5, 9), (6, 10))]
    assert [(span.to_ns // S, span.state) for span in life("a", samples, merges, end_ns=8 * S)] == [
        (2, LifeState.TRAINING),
        (4, LifeState.DEAD),
        (6, LifeState.CATCHING_UP),
        (8, LifeState.TRAINING),
    ]


def test_a_learner_without_its_daemon_trains_alone() -> None:
    alone = RegionSample(has_daemon=False, has_learner=True, incarnation=1)
    samples = [sample(-3, a=UP), sample(0, a=UP), sample(2, a=alone), sample(5, a=UP), sample(6, a=UP)]
    merges = [merge(1, a=(1, 1, 1.0)), merge(5.5, a=(1, 2, 1.0))]
    assert [(span.to_ns // S, span.state) for span in life("a", samples, merges, end_ns=8 * S)] == [
        (2, LifeState.TRAINING),
        (5, LifeState.ALONE),
        (6, LifeState.CATCHING_UP),
        (8, LifeState.TRAINING),
    ]


def test_a_learner_that_stands_still_does_not_train_whether_its_daemon_answers_or_not() -> None:
    still = RegionSample(has_daemon=True, has_learner=True, incarnation=1, is_stopped=True)
    samples = [sample(0, a=UP), sample(2, a=still), sample(3, a=replace(still, has_daemon=False)), sample(5, a=UP)]
    assert [(span.to_ns // S, span.state) for span in life("a", samples, [], end_ns=8 * S)] == [
        (2, LifeState.TRAINING),
        (5, LifeState.STOPPED),
        (8, LifeState.CATCHING_UP),
    ]


def test_spans_fill_the_window_and_end_with_it() -> None:
    samples = [sample(at / 4, a=UP if at % 3 else RegionSample(False, False)) for at in range(-8, 60)]
    spans = life("a", samples, [], end_ns=10 * S)
    assert spans[0].from_ns == 0
    assert spans[-1].to_ns == 10 * S
    pairs = list(pairwise(spans))
    assert all(one.to_ns == other.from_ns and one.state != other.state for one, other in pairs)


def test_goodput_of_the_time_in_which_learners_were_there() -> None:
    baseline = {"seconds": 100.0, "tokens_merged_of": {"a": 1000, "b": 3000}}
    training = {"seconds": 50.0, "tokens_merged": 1400}
    # a: 10 a second for 40 s; b: 30 a second for 40 s
    there = goodput_there(training, baseline, {"a": 10.0, "b": 10.0})
    assert there == pytest.approx(1400 / 1600)
    assert goodput_there(training, baseline, {"a": 0.0}) is None
    assert goodput_there(training, baseline, {"a": 50.0, "b": 50.0}) is None
    assert goodput_there(training, baseline | {"tokens_merged_of": None}, {}) is None


def test_an_outage_is_told_by_what_the_region_did_alone_and_by_its_next_merge() -> None:
    up = RegionSample(True, True, incarnation=1)
    samples = [
        RunSample(at * S, {"a": replace(up, rounds=2 * at, step=10 * at), "b": replace(up, step=7 * at)})
        for at in range(10)
    ]
    outage = Outage(2 * S, 3 * S, Scope("b"))
    merges = [
        TimedMerge(4 * S, {"a": MergeMember(1, 40, 1.0)}),
        TimedMerge(6 * S, {"b": MergeMember(1, 35, 1.0)}),  # steps that it had sent before
        TimedMerge(7 * S, {"a": MergeMember(1, 60, 1.0), "b": MergeMember(1, 36, 1.0)}),
    ]
    assert outage_document(outage, samples, merges) == {
        "region": "b", "seconds": 3.0, "inner_steps": 21, "commits_of_others": 6, "seconds_to_merge": 2.0
    }  # fmt: skip
    assert outage_document(outage, samples, merges[:2])["seconds_to_merge"] is None
    assert outage_document(outage, [], [])["inner_steps"] == 0
