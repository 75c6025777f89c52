"""The parts of quality.py and quality_storm.py: stacked learners are real ones, rounds average, a storm strikes."""

import math
from collections import Counter
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
import quality
import torch
from quality_lines import Lines
from quality_merge import Rounds
from quality_stack import Inner, Stack
from quality_storm import LEARNERS, StormRounds, storm

from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings

TINY = ModelSettings(layers=1, dim=16, heads=2, context=12)
SHAPES = {"a.weight": (64, 80), "embed.weight": (20, 16), "c.bias": (7,)}
INNER = Inner(lr=1e-2, steps=20, warmup=3)


def windows_of(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def trained_with_torch(windows: np.ndarray, steps: int) -> np.ndarray:
    model = ByteGPT(TINY, seed=1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": INNER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(INNER.beta1, INNER.beta2))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = INNER.lr_at(step)
        optimizer.zero_grad()
        model.loss(torch.from_numpy(windows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), INNER.clip)
        optimizer.step()
    parameters = dict(model.named_parameters())
    return np.concatenate(
        [parameters[name].detach().numpy().ravel() for name in Stack(TINY, INNER, replicas=1, seed=1).shapes]
    )


def settings_with(**changed: object) -> RunSettings:
    plain = {
        "fragments": 1,
        "sync_every": 4,
        "overlap_steps": 0,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "merge": MergeRule.AVG,
        "codec_up": Codec.FP32,
        "codec_down": Codec.FP32,
    }
    return RunSettings(**{**plain, **changed})


def moved(theta: np.ndarray, seed: int) -> np.ndarray:
    return (theta + np.random.default_rng(seed).normal(0, 0.1, theta.shape)).astype(np.float32)


def rounds_of(settings: RunSettings, learners: int = 3, **more: object) -> tuple[Rounds, np.ndarray]:
    theta = np.tile(np.random.default_rng(0).normal(size=64 * 80 + 20 * 16 + 7).astype(np.float32), (learners, 1))
    return Rounds(settings, SHAPES, theta, tokens_per_step=10, **more), theta


def test_a_replica_trains_exactly_as_torch_trains_it_alone():
    stack = Stack(TINY, INNER, replicas=3, seed=1)
    windows = windows_of(3, 4, 13)
    for _ in range(6):
        stack.step(windows)
    for replica in range(3):
        np.testing.assert_allclose(stack.theta[replica], trained_with_torch(windows[replica], 6), rtol=0, atol=2e-5)
    assert np.abs(stack.theta[0] - stack.theta[1]).max() > 1e-3


def test_held_out_loss_is_the_models_own():
    stack = Stack(TINY, INNER, replicas=2, seed=1)
    windows = windows_of(5, 13)
    assert stack.loss(stack.theta[1], windows) == pytest.approx(
        float(ByteGPT(TINY, seed=1).loss(torch.from_numpy(windows)).detach()), rel=1e-5
    )


def test_without_overlap_a_plain_average_leaves_everybody_at_the_mean():
    rounds, theta = rounds_of(settings_with())
    theta[:] = moved(theta, 5)
    mean = theta.mean(0)
    rounds.after_step(4)
    for learner in range(3):
        np.testing.assert_allclose(theta[learner], mean, atol=1e-6)
    np.testing.assert_allclose(rounds.global_parameters(), mean, atol=1e-6)


def test_steps_during_the_overlap_are_carried_or_overwritten():
    for carry in CarryMode:
        rounds, theta = rounds_of(settings_with(overlap_steps=2, carry=carry))
        first = moved(theta, 5)
        theta[:] = first
        rounds.after_step(4)
        own = moved(np.zeros_like(theta), 6)
        theta += own
        rounds.after_step(6)
        kept = own if carry is CarryMode.CARRY else 0.0
        np.testing.assert_allclose(theta, first.mean(0, keepdims=True) + kept + 0 * own, atol=1e-5)


def test_a_fragment_is_merged_every_h_steps_and_the_cycle_is_staggered():
    rounds, _ = rounds_of(settings_with(fragments=2, overlap_steps=1))
    versions = []
    for step in range(1, 14):
        rounds.after_step(step)
        versions.append([state.version for state in rounds.globals])
    # Fragment 0 opens at 2, 6, 10, fragment 1 at 4, 8, 12; each commits one step later.
    assert [v[0] for v in versions] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert [v[1] for v in versions] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_only_those_who_attend_are_merged_and_share_scales_what_they_carried():
    for share, part in ((True, 1 / 1.5), (False, 1.0)):
        rounds, theta = rounds_of(settings_with(), attendance=turns, share=share)
        rounds.after_step(4)
        start = theta[0].copy()
        theta[:] = moved(theta, 5)
        first = theta.copy()
        rounds.after_step(8)
        np.testing.assert_allclose(rounds.global_parameters(), first[0], atol=1e-5)
        np.testing.assert_allclose(theta[1], first[0] + (first[1] - start) / 2, atol=1e-5)
        rounds.after_step(12)
        expected = first[0] + part * (first[1] - start) / 2
        np.testing.assert_allclose(rounds.global_parameters(), expected, atol=1e-5)


def turns(fragment: int, version: int) -> list[int]:
    """All learners in the first round, then one after the other."""
    return [version - 1] if version else [0, 1, 2]


def test_where_its_work_is_dropped_a_learner_returns_at_the_global_parameters():
    rounds, theta = rounds_of(settings_with(), cut_steps=(4, 13), keep_cut_work=False)
    for step in range(1, 13):
        theta[:] = moved(theta, step)
        rounds.after_step(step)
    assert np.abs(theta[2] - rounds.global_parameters()).max() > 0.2
    np.testing.assert_allclose(theta[0], rounds.global_parameters(), atol=1e-6)
    assert rounds.copies[2][0].position.base_version == 0
    rounds.after_step(13)
    np.testing.assert_array_equal(theta[2], rounds.global_parameters())
    assert rounds.copies[2][0].position.included_step == 13


def test_after_a_cut_too_long_to_carry_it_all_goes_on_as_if_the_work_were_thrown_away():
    ends = []
    for keep in (True, False):
        rounds, theta = rounds_of(settings_with(), cut_steps=(5, 40), keep_cut_work=keep)
        for step in range(1, 45):
            theta += moved(np.zeros_like(theta), step)
            mean = theta.mean(0)
            rounds.after_step(step)
        np.testing.assert_allclose(rounds.global_parameters(), mean, atol=2e-5)  # all weigh the same, taken whole
        ends.append(theta.copy())
    np.testing.assert_array_equal(*ends)


def test_a_run_ends_at_the_plain_mean_of_its_learners():
    rounds, theta = rounds_of(
        settings_with(fragments=2, overlap_steps=2, outer_lr=0.5, outer_momentum=0.9, merge=MergeRule.RDA)
    )
    for step in range(1, 11):
        theta[:] = moved(theta, step)
        if step < 10:
            rounds.after_step(step)
    rounds.finish(10)
    np.testing.assert_allclose(rounds.global_parameters(), theta.mean(0), atol=1e-5)


@pytest.mark.parametrize("included", [1, 2])
def test_everybody_attends_equally_often(included: int):
    members = quality.attendance(included, seed=9)
    assert members is not None
    count = Counter(m for version in range(40) for m in members(3, version))
    assert count == dict.fromkeys(range(4), 40 * included // 4)
    assert quality.attendance(0, seed=9) is None


def fake_loss(job: quality.Job) -> float:
    rounds = job.arm.rounds
    return (
        (1 + abs(math.log(job.rate / 6e-3))) * (1 + job.seed / 100) * (1 + abs(rounds.outer_lr - 0.7) if rounds else 1)
    )


def test_each_arm_is_tuned_and_measured_on_all_seeds():
    arms = quality.arms_for(4000)
    asked: list[quality.Job] = []

    def loss(job: quality.Job) -> float:
        asked.append(job)
        return fake_loss(job)

    wanted = [arm for arm in arms if arm.name in ("sync_diloco", "cut_4")]
    sync, cut = quality.summarise(wanted, quality.Plan(4000, 700, (1, 2)), loss, arms)
    assert (sync.rate, sync.outer[0], len(sync.losses)) == (6e-3, 0.7, 2)
    assert cut.rate == 6e-3
    assert {job.rate for job in asked if job.arm.name == "cut_4"} == {6e-3}
    assert all(job.steps == 700 for job in asked if job.rate != 6e-3)
    assert {(job.rate, job.seed) for job in asked if job.steps == 700} == set(product(quality.RATES, (1, 2)))
    assert {
        job.rounds.outer_lr for job in (one.arm for one in asked if one.steps == 4000) if job.name == "sync_diloco"
    } == {lr for lr, _ in quality.SYNC_OUTER}


def test_the_rate_that_one_seed_likes_best_is_not_chosen():
    arms = {arm.name: arm for arm in quality.arms_for(4000)}
    table = {3e-3: (1.5, 1.5), 4e-3: (1.4, 1.5), 6e-3: (1.3, 1.7)}
    (ours,) = quality.summarise(
        [arms["ours"]], quality.Plan(4000, 4000, (1, 2)), lambda job: table[job.rate][job.seed - 1], list(arms.values())
    )
    assert (ours.rate, ours.losses) == (4e-3, [1.4, 1.5])


def test_of_one_rate_nothing_is_tuned():
    arms = quality.arms_for(4000)
    asked: list[quality.Job] = []

    def loss(job: quality.Job) -> float:
        asked.append(job)
        return fake_loss(job)

    (half,) = quality.summarise(
        [arm for arm in arms if arm.name == "half"], quality.Plan(4000, 700, (1,), (4e-3,)), loss, arms
    )
    assert (half.rate, half.losses) == (4e-3, [fake_loss(asked[0])])
    assert [(job.arm.name, job.rate, job.steps) for job in asked] == [("half", 4e-3, 4000)]


def test_a_finished_run_is_not_run_again(tmp_path: Path):
    keys = [quality.Job(quality.arms_for(1200)[2], 6e-3, seed, 1200).key() for seed in (1, 2, 3)]
    path, run = tmp_path / "runs" / "c.jsonl", count()

    def losses(*keys: str) -> list[int]:
        lines = Lines(path)
        return [lines.record(key, lambda: {"loss": next(run)})["loss"] for key in keys]

    assert losses(keys[0]) == [0]
    assert losses(*keys[:2]) == [0, 1]
    path.write_bytes(path.read_bytes()[:-9])
    assert losses(*keys) == [0, 2, 3], "a line that was cut off is no run"
    assert losses(*keys) == [0, 2, 3]


def test_verdicts_name_what_does_not_hold():
    arms = [("ours", 1.02), ("sync_diloco", 1.01), ("data_parallel", 1.0), ("cut_4", 1.0), ("cut_4_dropped", 1.001)]
    arms[0] = ("ours", 1.019)
    checks = quality.verdicts([quality.Summary(name, 6e-3, None, [loss]) for name, loss in arms])
    assert {name: one["holds"] for name, one in checks.items()} == {
        "ours is no worse than synchronous DiLoCo": False,
        "ours is within 2 % of data-parallel": True,
        "cut_4: no worse than work thrown away": True,
    }


def test_cuts_that_do_not_fit_into_the_run_are_left_out():
    names = {arm.name for arm in quality.arms_for(1200)}
    assert "cut_25" in names
    assert "cut_100" not in names
    assert "cut_100_dropped" in {arm.name for arm in quality.arms_for(4000)}


def test_a_replica_that_rests_stays_as_it_is_and_the_others_do_not_notice():
    both, alone = (Stack(TINY, INNER, replicas=2, seed=1) for _ in range(2))
    windows = windows_of(2, 4, 13)
    for step in range(3):
        both.step(windows, resting=np.array([False, step == 1]))
        alone.step(windows)
    np.testing.assert_array_equal(both.theta[0], alone.theta[0])
    assert np.abs(both.theta[1] - alone.theta[1]).max() > 1e-4
    before = both.theta[1].copy()
    both.step(windows, resting=np.array([False, True]))
    np.testing.assert_array_equal(both.theta[1], before)


def stormy(away: np.ndarray, steps: int, *, quorum: int = 3) -> tuple[StormRounds, np.ndarray]:
    """Learners whose parameters move at random, each step of each another way."""
    settings = settings_with(fragments=4, overlap_steps=2, outer_lr=0.5, outer_momentum=0.6)
    _, theta = rounds_of(settings, LEARNERS)
    rounds = StormRounds(settings, SHAPES, theta, tokens_per_step=10, away=away, quorum=quorum)
    for step in range(1, steps + 1):
        theta[:] = moved(theta, step)
        rounds.own += 1
        if step < steps:
            rounds.after_step(step)
    return rounds, theta


def test_a_storm_that_strikes_nobody_is_no_storm():
    rounds, _ = stormy(np.zeros((LEARNERS, 41), bool), 40)
    plain, theta = rounds_of(settings_with(fragments=4, overlap_steps=2, outer_lr=0.5, outer_momentum=0.6), LEARNERS)
    for step in range(1, 41):
        theta[:] = moved(theta, step)
        if step < 40:
            plain.after_step(step)
    for one in (rounds, plain):
        one.finish(40)
    np.testing.assert_array_equal(rounds.global_parameters(), plain.global_parameters())
    assert set(rounds.steps_held) >= {4}


def test_who_is_away_is_in_no_round_and_with_two_of_four_there_is_none():
    away = np.zeros((LEARNERS, 41), bool)
    away[3, 8:30] = True
    rounds, _ = stormy(away, 24)
    assert rounds.copies[3][0].position.base_version < rounds.copies[0][0].position.base_version
    versions = [state.version for state in rounds.globals]
    away[2, 24:41] = True
    rounds, _ = stormy(away, 29)
    assert [state.version for state in rounds.globals] == versions
    rounds, _ = stormy(away, 38)
    assert min(state.version for state in rounds.globals) > max(versions)
    unmerged = [38 - min(copy.position.included_step for copy in copies) for copies in rounds.copies]
    assert unmerged[2] > 10 > unmerged[3]


def test_where_two_of_four_are_enough_their_rounds_go_on():
    away = np.zeros((LEARNERS, 41), bool)
    away[2:, 8:41] = True
    stands, _ = stormy(away, 38)
    goes_on, _ = stormy(away, 38, quorum=2)
    assert max(state.version for state in stands.globals) < min(state.version for state in goes_on.globals)


def test_a_storm_takes_regions_and_learners_now_and_then():
    away, idle = storm(1, 3000, kill_every=11.0)
    assert away.shape == idle.shape == (LEARNERS, 3000)
    assert 0.3 < away.mean() < 0.6
    assert 0.2 < idle.mean() < 0.5
    assert (away & ~idle).any()
    assert (idle & ~away).any()
    np.testing.assert_array_equal(storm(1, 3000, kill_every=11.0)[0], away)
    assert storm(1, 3000, kill_every=55.0)[0].mean() < 0.5 * away.mean()


@pytest.fixture(scope="module")
def corpus() -> quality.Corpus:
    return quality.load_corpus()


def trained(corpus: quality.Corpus, learners: int, *, merge: MergeRule = MergeRule.RDA, **mistake: float) -> np.ndarray:
    """Return the demo's model after four cycles in the first of four regions; the last one makes the mistake."""
    steps = 4 * quality.SYNC_EVERY
    settings = RunSettings(
        fragments=4,
        sync_every=quality.SYNC_EVERY,
        outer_lr=1.0,
        outer_momentum=0.0,
        merge=merge,
        tokens_ratio_max=mistake.get("ratio_max", 4.0),
    )
    stack = Stack(ModelSettings(context=16), Inner(lr=4e-3, steps=steps, warmup=8), replicas=learners, seed=1)
    data = quality.Batches(corpus, learners=4, batch=4, context=16, seed=1)
    tokens = [64] * (learners - 1) + [int(64 * mistake.get("tokens", 1.0))]
    rounds = Rounds(settings, stack.shapes, stack.theta, tokens_per_step=tokens, outlier=mistake.get("outlier", 0.0))
    for step in range(1, steps):
        stack.step(data.separate(step - 1)[:learners])
        rounds.after_step(step)
    stack.step(data.separate(steps - 1)[:learners])
    rounds.finish(steps)
    return rounds.global_parameters()


def held_out(corpus: quality.Corpus, parameters: np.ndarray) -> float:
    stack = Stack(ModelSettings(context=16), Inner(lr=4e-3, steps=1), replicas=1, seed=1)
    return float(stack.loss(parameters, corpus.held_out_windows(256, 16)))


@pytest.mark.seeds
def test_the_mistakes_of_one_region_do_not_move_the_model(corpus: quality.Corpus) -> None:
    """Tokens 8 and 64 times too high change no bit; who loaded other weights is not there, to the bit."""
    right, without = trained(corpus, 4), trained(corpus, 3)
    for tokens in (8.0, 64.0):
        assert np.array_equal(trained(corpus, 4, tokens=tokens), right)
    assert np.array_equal(trained(corpus, 4, outlier=1000.0), without)
    loss = held_out(corpus, without)
    assert loss < 0.8 * math.log(256)
    assert held_out(corpus, right) < 1.02 * loss
    assert held_out(corpus, trained(corpus, 4, tokens=2.0)) < 1.02 * loss
    assert held_out(corpus, trained(corpus, 4, outlier=-5.0, merge=MergeRule.TRIMMED)) < 1.02 * loss
    flipped = trained(corpus, 4, outlier=-1.0, tokens=64.0, merge=MergeRule.TRIMMED)
    assert held_out(corpus, flipped) < 1.02 * loss
    twice = trained(corpus, 4, outlier=-1.0, tokens=2.0, ratio_max=1.0, merge=MergeRule.TRIMMED)
    assert np.array_equal(twice, flipped), "where the operator says that all batches are alike"
