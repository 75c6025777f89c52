"""What `demo --speeds`, `--batches`, `--ranks` and `--shard` ask of each region."""

import pytest

from diloco_node.errors import ConfigError
from diloco_node.lab.demo.mix import LearnerMix, parse_mix

NAMES = ("a", "b", "c", "d")


def test_the_fastest_steps_as_ever_and_the_others_take_longer() -> None:
    mix = parse_mix("1,1,2,4", "8,8,4,16", NAMES)
    assert [mix.settings(0.05, at) for at in range(4)] == [
        ("model.step_time_min=200ms", "model.batch=8"),
        ("model.step_time_min=200ms", "model.batch=8"),
        ("model.step_time_min=100ms", "model.batch=4"),
        ("model.step_time_min=50ms", "model.batch=16"),
    ]


@pytest.mark.parametrize(("speeds", "median"), [("1,1,2,4", 0.2), ("1,2,2,4", 0.1), ("0.5,1,1,1", 0.05)])
def test_the_schedule_is_laid_out_for_the_learner_that_says_where_the_run_is(speeds: str, median: float) -> None:
    assert parse_mix(speeds, "", NAMES).median_step_seconds(0.05) == pytest.approx(median)


def test_regions_may_have_ranks_and_cut_their_models_as_they_like() -> None:
    mix = parse_mix("", "4,4,8,4", NAMES, ranks="2,2,1,2", shards="fsdp,fsdp,none,ddp")
    assert [mix.settings(0.05, at) for at in range(4)] == [
        ("model.batch=4", "model.ranks=2", "model.shard=fsdp"),
        ("model.batch=4", "model.ranks=2", "model.shard=fsdp"),
        ("model.batch=8", "model.ranks=1", "model.shard=none"),
        ("model.batch=4", "model.ranks=2", "model.shard=ddp"),
    ]


@pytest.mark.parametrize(
    ("ranks", "shards", "words"),
    [
        ("2,2", "", "--ranks has 2 values for 4 regions"),
        ("1,1,1,0", "", "whole numbers from 1 to 16"),
        ("", "fsdp,fsdp,none,zero", "use none, ddp, fsdp"),
    ],
)
def test_ranks_that_can_not_be_are_refused(ranks: str, shards: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_mix("", "", NAMES, ranks=ranks, shards=shards)


def test_without_them_nothing_changes() -> None:
    mix = parse_mix("", "", NAMES)
    assert mix == LearnerMix()
    assert (mix.settings(0.05, 3), mix.median_step_seconds(0.05)) == ((), 0.05)


@pytest.mark.parametrize(
    ("speeds", "batches", "words"),
    [
        ("1,2", "", "--speeds has 2 values for 4 regions"),
        ("", "8,8,8", "--batches has 3 values for 4 regions"),
        ("1,1,1,17", "", "at most 16 times the smallest"),
        ("1,1,1,0", "", "positive numbers"),
        ("1,1,1,nan", "", "--speeds is"),
        ("inf,inf,inf,inf", "", "positive numbers"),
        ("1,1,1,fast", "", "--speeds is"),
        ("", "8,8,8,0", "from 1 to 1024"),
        ("", "8,8,8,2.5", "--batches is"),
    ],
)
def test_what_can_not_be_is_refused(speeds: str, batches: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_mix(speeds, batches, NAMES)


def test_the_tokens_of_a_second_are_those_of_each_batch_at_each_speed() -> None:
    alike = parse_mix("", "", ["a", "b"])
    assert alike.tokens_per_second(0.1, 2, batch=8, context=64) == pytest.approx(2 * 8 * 64 / 0.1)
    mixed = parse_mix("1,4", "8,2", ["a", "b"])
    assert mixed.tokens_per_second(0.1, 2, batch=8, context=64) == pytest.approx(8 * 64 / 0.4 + 2 * 64 / 0.1)
