"""The built-in trainer on a fake run: schedule, data position, moments, held-out losses, and settings."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.builtin import trainer as module
from diloco_node.learner.builtin.data import SHARD_BYTES, Corpus, RegionSampler
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.trainer import (
    Trainer,
    TrainerSettings,
    held_out_loss,
    make_optimizer,
    settings_from,
    settings_from_environment,
)
from diloco_node.learner.checkpoint import Stateful
from tests.kit.data_kit import datasets_library, rows_of, write_jsonl, write_tokenizer
from tests.kit.repository import ROOT

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)


def corpus_of_words(seed: int = 11) -> Corpus:
    random = np.random.default_rng(seed)
    words = [b"alpha ", b"beta ", b"gamma ", b"delta\n"]
    text = b"".join(words[i] for i in random.integers(4, size=12_000))
    whole = np.frombuffer(text, np.uint8)
    return Corpus(train=whole[: 3 * SHARD_BYTES], held_out=whole[3 * SHARD_BYTES :], files=1, skipped=0)


def settings_with(**changed: object) -> TrainerSettings:
    return TrainerSettings(**{"model": TINY, "batch": 4, "steps": 30, "warmup": 5, "eval_every": 0, **changed})


class FakeRun:
    """Stands in for what `attach` yields: records, and says stop after some steps."""

    def __init__(self, stop_after: int, *, region_index: int = 0, regions: int = 1, global_step: int = 0) -> None:
        self.stop_after, self.region_index, self.regions, self.global_step = (
            stop_after,
            region_index,
            regions,
            global_step,
        )
        self.steps: list[tuple[int, float]] = []
        self.losses: list[tuple[float | None, float | None]] = []
        self.rates: list[float] = []
        self.everybodys: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] = {}
        self.kept: dict[str, dict[str, int]] = {}
        self.settled = 0.0
        self.is_attached = True
        self.progress: float | None = None

    @contextmanager
    def attach(
        self, model: ByteGPT, optimizer: torch.optim.Optimizer, *, stateful: Mapping[str, Stateful]
    ) -> Iterator[FakeRun]:
        self.model, self.optimizer, self.stateful = model, optimizer, stateful
        for name, state in self.kept.items():
            stateful[name].load_state_dict(state)
        yield self

    @property
    def should_stop(self) -> bool:
        return len(self.steps) >= self.stop_after

    def step(self, *, tokens: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.steps.append((tokens, float(loss)))
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.global_step += 1

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        return self.everybodys or {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def own_state_dict(self) -> dict[str, torch.Tensor]:
        return self.own or {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def settle(self, seconds: float) -> None:
        self.settled += seconds

    def evaluated(self, *, val_loss: float | None = None, val_loss_global: float | None = None) -> None:
        self.losses.append((val_loss, val_loss_global))


def trained(settings: TrainerSettings, run: FakeRun) -> module.Outcome:
    return Trainer(settings, corpus=corpus_of_words(), say=lambda line: None).run(run.attach)


def test_alone_it_stops_after_its_steps_and_has_learnt():
    run = FakeRun(10**9)
    run.is_attached = False
    outcome = trained(settings_with(steps=60, lr=2e-2), run)
    assert outcome.steps == len(run.steps) == 60
    assert outcome.tokens == 60 * 4 * 16
    assert outcome.val_loss < outcome.loss_first - 1.5
    assert outcome.val_loss_global is None


def test_attached_it_stops_when_told_and_measures_both_losses():
    run = FakeRun(7)
    run.everybodys = {name: p.detach() for name, p in ByteGPT(TINY, seed=99).named_parameters()}
    run.own = {name: p.detach() for name, p in ByteGPT(TINY, seed=98).named_parameters()}
    outcome = trained(settings_with(steps=3, eval_every=3), run)
    assert outcome.steps == 7
    assert run.settled == 1.0
    assert len(run.losses) == 3
    windows = corpus_of_words().held_out_windows(64, TINY.context)
    assert outcome.val_loss == pytest.approx(held_out_loss(ByteGPT(TINY, seed=98), windows))
    assert outcome.val_loss_global == pytest.approx(held_out_loss(ByteGPT(TINY, seed=99), windows))
    assert run.losses[-1] == (outcome.val_loss, outcome.val_loss_global)


def test_a_run_that_ends_before_its_first_step_has_no_loss_and_is_still_json():
    outcome = trained(settings_with(steps=3), FakeRun(0))
    assert (outcome.steps, outcome.loss_first, outcome.loss_last) == (0, None, None)
    assert outcome.val_loss > 0
    assert json.loads(json.dumps(asdict(outcome), allow_nan=False))["loss_last"] is None


def test_the_schedule_follows_the_global_step():
    settings = settings_with(steps=100, warmup=10, lr=1e-3)
    run = FakeRun(3, global_step=54)
    trained(settings, run)
    assert run.rates == [settings.lr_at(55), settings.lr_at(56), settings.lr_at(57)]


def test_the_schedule_is_as_long_as_a_run_that_says_how_far_it_is():
    run = FakeRun(1, global_step=999)
    run.progress = 0.25
    settings = settings_with(steps=100, warmup=10, lr=1e-3)
    trained(settings, run)
    assert run.rates == [pytest.approx(1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4))))]
    own = settings_with(steps=2000, warmup=10, lr=1e-3, ends_with_run=False)
    run = FakeRun(1, global_step=999)
    run.progress = 0.25
    trained(own, run)
    assert run.rates == [pytest.approx(1e-3 * 0.55)]
    with pytest.raises(ConfigError, match=r"trainer\.ends_with_run"):
        settings_with(ends_with_run=1)


def test_learning_rate_by_hand():
    settings = settings_with(steps=100, warmup=10, lr=1.0)
    assert settings.lr_at(1) == pytest.approx(0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi * 0.01))))
    assert settings.lr_at(50) == pytest.approx(0.55)
    assert settings.lr_at(100) == pytest.approx(0.1)
    assert settings.lr_at(5000) == pytest.approx(0.1)


def test_the_schedule_ends_at_its_floor():
    settings = settings_with(steps=100, warmup=10, lr=1.0, lr_floor=0.0)
    assert settings.lr_at(50) == pytest.approx(0.5)
    assert settings.lr_at(100) == settings.lr_at(5000) == 0.0
    for wrong in (-0.1, 1.1, True, "0"):
        with pytest.raises(ConfigError, match=r"trainer\.lr_floor"):
            settings_with(lr_floor=wrong)


def test_the_second_life_trains_the_batches_that_the_first_did_not(monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []
    plain = RegionSampler.batch_at
    monkeypatch.setattr(RegionSampler, "batch_at", lambda self, at: (drawn.append(at), plain(self, at))[1])
    first, second = FakeRun(5, region_index=1, regions=3), FakeRun(4, region_index=1, regions=3)
    trained(settings_with(), first)
    second.kept = {name: part.state_dict() for name, part in first.stateful.items()}
    trained(settings_with(), second)
    assert drawn == list(range(9))
    assert second.stateful["data"].state_dict()["position"] == 9


def test_no_window_is_trained_twice_in_an_epoch_of_all_regions_even_over_a_restart(monkeypatch: pytest.MonkeyPatch):
    """Each region trains its part to the last window, in two lives, and the batch after that begins the next epoch."""
    text = np.arange(3 * SHARD_BYTES // 4, dtype="<u4").view(np.uint8)
    corpus = Corpus(train=text, held_out=text[:4000], files=1, skipped=0)
    trained: list[bytes] = []
    plain = Trainer._inner_step
    monkeypatch.setattr(
        Trainer,
        "_inner_step",
        lambda self, windows, **more: (trained.extend(map(bytes, windows)), plain(self, windows, **more))[1],
    )
    settings = settings_with(model=ModelSettings(layers=1, dim=16, heads=2, context=500), batch=8, eval_windows=1)
    whole = 3 * ((SHARD_BYTES - 1) // 500)
    found: list[bytes] = []
    for region in range(2):
        kept: dict[str, dict[str, int]] = {}
        samples = (2, 1)[region] * ((SHARD_BYTES - 1) // 500)
        for steps in (3, -(-samples // 8) - 3):
            run = FakeRun(steps, region_index=region, regions=2)
            run.kept = kept
            Trainer(settings, corpus=corpus, say=lambda line: None).run(run.attach)
            kept = {name: part.state_dict() for name, part in run.stateful.items()}
        found += trained[:samples]
        trained.clear()
    assert len(found) == len(set(found)) == whole


def test_it_learns_tokens_of_rows_from_files_and_from_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets_library().config, "HF_DATASETS_CACHE", tmp_path / "hf")
    rows = rows_of(3000)
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", rows[n::2], "body")) for n in range(2)]
    values = {
        "data": files,
        "tokenizer": str(write_tokenizer(tmp_path / "tokenizer", 3000)),
        "text_field": "body",
        "cache": str(tmp_path / "cache"),
        "model": {"layers": 1, "dim": 16, "heads": 2, "context": 16, "vocabulary": 3072},
        **{"batch": 4, "steps": 40, "warmup": 5, "lr": 0.02, "eval_every": 0, "eval_windows": 8},
    }
    for streaming in (False, True):
        first, second = FakeRun(30), FakeRun(2)
        settings = settings_from({**values, "streaming": streaming})
        outcome = Trainer(settings, say=lambda line: None).run(first.attach)
        assert outcome.loss_first == pytest.approx(math.log(3072), rel=0.1)
        assert outcome.val_loss < outcome.loss_first - 1.0
        second.kept = {name: part.state_dict() for name, part in first.stateful.items()}
        Trainer(settings, say=lambda line: None).run(second.attach)
        assert second.stateful["data"].state_dict()["position"] == 32


def test_a_model_that_has_fewer_tokens_or_wants_longer_text_is_refused_before_it_joins():
    with pytest.raises(ConfigError, match=r"model\.vocabulary is 100: set .* to 256"):
        Trainer(settings_with(model=ModelSettings(vocabulary=100)), corpus=corpus_of_words())
    with pytest.raises(ConfigError, match=r"held-out .*model\.context 60000"):
        Trainer(settings_with(model=ModelSettings(context=60_000)), corpus=corpus_of_words())


def test_a_loss_that_is_not_finite_ends_the_run_with_advice():
    one = Trainer(settings_with(), corpus=corpus_of_words(), say=lambda line: None)
    with torch.no_grad():
        next(one.model.parameters()).fill_(math.nan)
    with pytest.raises(LearnerError, match=r"nan at step 1.*trainer\.lr"):
        one.run(FakeRun(5).attach)


def test_only_matrices_decay():
    optimizer = make_optimizer(ByteGPT(TINY, seed=0), settings_with(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(p.dim() == 2 for p in optimizer.param_groups[0]["params"])
    assert all(p.dim() == 1 for p in optimizer.param_groups[1]["params"])


def test_a_step_is_stretched_to_its_least_time(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: 5.0)
    trained(settings_with(min_step_seconds=0.25), FakeRun(2))
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch": 0}, "trainer.batch"),
        ({"lr": "fast"}, "trainer.lr"),
        ({"steps": True}, "trainer.steps"),
        ({"min_step_seconds": -1}, "trainer.min_step_seconds"),
        ({"learning_rate": 1}, "learning_rate"),
        ({"model": {"heads": 7}}, "model.heads"),
        ({"model": 3}, "trainer.model"),
        ({"data": "text"}, "trainer.data"),
        ({"accumulate": 3}, "trainer.accumulate is 3: it must divide trainer.batch, which is 8"),
        ({"accumulate": 0}, "trainer.accumulate"),
        ({"clip": -1}, "trainer.clip"),
        ({"precision": "fp8"}, "trainer.precision"),
        ({"optimizer": "sgd"}, "trainer.optimizer"),
        ({"compile": 1}, "trainer.compile"),
        ({"streaming": 1}, "trainer.streaming"),
        ({"tokenizer": None}, "trainer.tokenizer"),
        ({"text_field": 3}, "trainer.text_field"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=named):
        settings_from(values)


def test_settings_come_from_the_file_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps({"model": {"dim": 32}, "data": ["x.txt"], "lr": 0.01}))
    monkeypatch.setenv("DILOCO_TRAINER", str(path))
    found = settings_from_environment()
    assert (found.model.dim, found.data, found.lr, found.batch) == (32, ("x.txt",), 0.01, 8)
    monkeypatch.delenv("DILOCO_TRAINER")
    assert settings_from_environment() == TrainerSettings()


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unusable_settings_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None):
    path = tmp_path / "trainer.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("DILOCO_TRAINER", str(path))
    with pytest.raises(ConfigError, match=r"trainer\.json"):
        settings_from_environment()


def test_micro_batches_make_the_step_of_the_whole_batch():
    whole, parts = FakeRun(3), FakeRun(3)
    trained(settings_with(), whole)
    trained(settings_with(accumulate=4), parts)
    assert [tokens for tokens, _ in parts.steps] == [64, 64, 64]
    for (_, one), (_, other) in zip(whole.steps, parts.steps, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_the_gradient_is_cut_to_the_norm_that_is_set(monkeypatch: pytest.MonkeyPatch):
    norms: list[float] = []

    def stepping(clip: float) -> list[float]:
        norms.clear()
        one = Trainer(settings_with(clip=clip), corpus=corpus_of_words(), say=lambda line: None)
        plain = one.optimizer.step
        monkeypatch.setattr(
            one.optimizer,
            "step",
            lambda: (norms.append(math.hypot(*(float(p.grad.norm()) for p in one.model.parameters()))), plain())[1],
        )
        one.run(FakeRun(3).attach)
        return list(norms)

    assert stepping(0.01) == [pytest.approx(0.01, rel=1e-3)] * 3
    free = stepping(0.0)
    assert min(free) > 0.01
    assert free != stepping(1.0)


def test_bf16_and_checkpointing_change_the_arithmetic_and_not_the_parameters_type():
    plain, coarse, saving = FakeRun(3), FakeRun(3), FakeRun(3)
    trained(settings_with(), plain)
    trained(settings_with(precision="bf16"), coarse)
    trained(settings_with(checkpoint_activations=True), saving)
    assert {one.dtype for one in coarse.model.parameters()} == {torch.float32}
    assert coarse.steps != plain.steps
    assert coarse.steps[-1][1] == pytest.approx(plain.steps[-1][1], rel=0.02)
    assert [loss for _, loss in saving.steps] == pytest.approx([loss for _, loss in plain.steps], rel=1e-6)


def test_muon_trains_it_too():
    run = FakeRun(10**9)
    run.is_attached = False
    outcome = trained(settings_with(steps=60, lr=2e-2, optimizer="muon"), run)
    assert outcome.val_loss < outcome.loss_first - 1.5


def test_what_is_compiled_is_the_loss(monkeypatch: pytest.MonkeyPatch):
    compiled: list[object] = []
    monkeypatch.setattr(module.torch, "compile", lambda what: (compiled.append(what), what)[1])
    one = Trainer(settings_with(compile=True), corpus=corpus_of_words(), say=lambda line: None)
    assert compiled == [one.model.loss]
    one.run(FakeRun(1).attach)


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="no C++ compiler: [model] compile is NOT tested (apt-get install g++)",
)
def test_a_compiled_loss_makes_the_steps_of_the_plain_one():
    """The first step waits for the compiler."""
    plain, compiled = FakeRun(3), FakeRun(3)
    trained(settings_with(), plain)
    trained(settings_with(compile=True), compiled)
    assert [tokens for tokens, _ in compiled.steps] == [64, 64, 64]
    assert [loss for _, loss in compiled.steps] == pytest.approx([loss for _, loss in plain.steps], rel=1e-4)


def test_evaluations_follow_the_run_and_not_the_life_of_the_process() -> None:
    run = FakeRun(5, global_step=198)
    trained(settings_with(eval_every=200), run)
    assert len(run.losses) == 2  # at the run's step 200, and at the end
    late = FakeRun(5, global_step=200)
    trained(settings_with(eval_every=200), late)
    assert len(late.losses) == 1


def test_a_region_that_starts_does_not_import_the_compiler() -> None:
    # A second of processor time at each start. In a process of its own: this one has imported it long since.
    program = (
        "import sys; from tests.learner.builtin.test_trainer import FakeRun, settings_with, trained; "
        "run = FakeRun(4); trained(settings_with(eval_every=2), run); "
        "run.optimizer.load_state_dict(run.optimizer.state_dict()); "
        "sys.exit(1 if 'torch._dynamo' in sys.modules else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
