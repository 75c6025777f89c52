"""The built-in trainer on a fake run: schedule, data position, moments, held-out losses, and settings."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_node.core.data_shards import SHARDS, region_shards
from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.builtin import trainer as module
from diloco_node.learner.builtin.data import SIDE_BYTES_MIN, Corpus
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.trainer import (
    Trainer,
    TrainerSettings,
    held_out_loss,
    read_settings_file,
    settings_from,
)
from diloco_node.learner.region_shards import HERE
from tests.kit.repository import ROOT
from tests.kit.shards_given import begin

TINY = ModelSettings(layers=1, dim=16, heads=2, context=16)


@pytest.fixture(autouse=True)
def _trainers_own_device() -> None:
    """The trainer takes its model to a device by itself, where there is one."""
    torch.set_default_device("cpu")


def corpus_of_words(seed: int = 11) -> Corpus:
    random = np.random.default_rng(seed)
    words = [b"alpha ", b"beta ", b"gamma ", b"delta\n"]
    text = b"".join(words[i] for i in random.integers(4, size=12_000))
    whole = np.frombuffer(text, np.uint8)
    return Corpus(train=whole[: 3 * SIDE_BYTES_MIN], held_out=whole[3 * SIDE_BYTES_MIN :])


def settings_with(**changes: object) -> TrainerSettings:
    shape = asdict(TINY)
    return TrainerSettings(**{**shape, "batch": 4, "schedule_steps": 30, "warmup_steps": 5, "eval_every": 0, **changes})


class FakeRun:
    """Stands in for what `attach` yields: records, and says stop after some steps."""

    def __init__(
        self, stop_after: int, *, shards: tuple[int, ...] = tuple(range(SHARDS)), global_step: int = 0
    ) -> None:
        self.stop_after, self.shards, self.global_step = stop_after, shards, global_step
        self.steps: list[tuple[int, float]] = []
        self.losses: list[tuple[float | None, float | None]] = []
        self.rates: list[float] = []
        self.everybodys: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] = {}
        self.settled = 0.0
        self.is_attached = True
        self.is_interrupted = False
        self.progress: float | None = None

    @contextmanager
    def attach(self, model: ByteGPT, optimizer: torch.optim.Optimizer) -> Iterator[FakeRun]:
        self.model, self.optimizer = model, optimizer
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
    outcome = trained(settings_with(schedule_steps=60, lr=2e-2), run)
    assert outcome.steps == len(run.steps) == 60
    assert outcome.tokens == 60 * 4 * 16
    assert outcome.val_loss < outcome.loss_first - 1.5
    assert outcome.val_loss_global is None


def test_attached_it_stops_when_told_and_measures_both_losses():
    run = FakeRun(7)
    run.everybodys = {name: p.detach() for name, p in ByteGPT(TINY, seed=99).named_parameters()}
    run.own = {name: p.detach() for name, p in ByteGPT(TINY, seed=98).named_parameters()}
    outcome = trained(settings_with(schedule_steps=3, eval_every=3), run)
    assert outcome.steps == 7
    assert run.settled == 1.0
    assert len(run.losses) == 3
    windows = corpus_of_words().held_out_windows(64, TINY.context)
    assert outcome.val_loss == pytest.approx(held_out_loss(ByteGPT(TINY, seed=98), windows))
    assert outcome.val_loss_global == pytest.approx(held_out_loss(ByteGPT(TINY, seed=99), windows))
    assert run.losses[-1] == (outcome.val_loss, outcome.val_loss_global)


def test_one_that_is_taken_away_leaves_at_once():
    run = FakeRun(7)
    run.is_interrupted = True
    outcome = trained(settings_with(schedule_steps=3), run)
    assert (outcome.steps, outcome.val_loss, run.settled, run.losses) == (7, None, 0.0, [])


def test_a_run_that_ends_before_its_first_step_has_no_loss_and_is_still_json():
    outcome = trained(settings_with(schedule_steps=3), FakeRun(0))
    assert (outcome.steps, outcome.loss_first, outcome.loss_last) == (0, None, None)
    assert outcome.val_loss > 0
    assert json.loads(json.dumps(asdict(outcome), allow_nan=False))["loss_last"] is None


def test_the_schedule_follows_the_global_step():
    settings = settings_with(schedule_steps=100, warmup_steps=10, lr=1e-3)
    run = FakeRun(3, global_step=54)
    trained(settings, run)
    assert run.rates == [settings.lr_at(55), settings.lr_at(56), settings.lr_at(57)]


@pytest.mark.no_device("it counts windows")
def test_no_window_is_trained_twice_in_a_pass_of_all_regions_even_over_a_restart(monkeypatch: pytest.MonkeyPatch):
    """Each region trains its part to the last window, in two lives."""
    text = np.arange(100_000, dtype="<u4").view(np.uint8)
    corpus = Corpus(train=text, held_out=text[:4000])
    windows_: list[bytes] = []
    plain = Trainer._inner_step
    monkeypatch.setattr(
        Trainer,
        "_inner_step",
        lambda self, windows, **more: (windows_.extend(map(bytes, windows)), plain(self, windows, **more))[1],
    )
    settings = settings_with(context=500, batch=8, eval_windows=1)
    whole = (400_000 - 1) // 500 - 1
    all_windows: list[bytes] = []
    for region in ("a", "b"):
        rows: dict[int, int] = {}
        shards = region_shards("run", region, ("a", "b"))
        samples = sum(shard < whole for shard in shards)
        for steps in (3, -(-samples // 8) - 3):
            begin("run", region, ("a", "b"), starts=rows)
            Trainer(settings, corpus=corpus, say=lambda line: None).run(FakeRun(steps, shards=shards).attach)
            rows = dict(enumerate(HERE.starts.tolist()))  # as its contributions say, and the daemon tells the next life
        assert sum(rows.values()) == -(-samples // 8) * 8
        HERE.clear()
        all_windows += windows_[:samples]
        windows_.clear()
    assert len(all_windows) == len(set(all_windows)) == whole


def test_a_loss_that_is_not_finite_ends_the_run_with_advice():
    trainer = Trainer(settings_with(), corpus=corpus_of_words(), say=lambda line: None)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.nan)
    # A device is not waited for: `step` ends such a loop, which a fake run does not.
    step = 1 if trainer.place.device.type == "cpu" else 5
    with pytest.raises(LearnerError, match=rf"nan at step {step}.*model\.lr"):
        trainer.run(FakeRun(5).attach)


def test_a_step_is_stretched_to_its_least_time(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: 5.0)
    trained(settings_with(step_time_min=0.25), FakeRun(2))
    assert slept == [0.25, 0.25]


def test_evaluations_follow_the_run_and_not_the_life_of_the_process() -> None:
    run = FakeRun(5, global_step=198)
    trained(settings_with(eval_every=200), run)
    assert len(run.losses) == 2  # at the run's step 200, and at the end
    late = FakeRun(5, global_step=200)
    trained(settings_with(eval_every=200), late)
    assert len(late.losses) == 1


@pytest.mark.no_device("a process of its own, without one")
def test_a_region_that_starts_does_not_import_the_compiler() -> None:
    # A second of processor time at each start. In a process of its own: this one has imported it long since.
    program = (
        "import sys; from tests.learner.builtin.test_trainer import FakeRun, settings_with, trained; "
        "run = FakeRun(4); trained(settings_with(eval_every=2), run); "
        "run.optimizer.load_state_dict(run.optimizer.state_dict()); "
        "sys.exit(1 if 'torch._dynamo' in sys.modules else 0)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_the_schedule_is_as_long_as_a_run_that_says_how_far_it_is_and_ends_at_zero():
    settings = settings_with(schedule_steps=0, warmup_steps=10, lr=1e-3)
    run = FakeRun(1, global_step=999)
    run.progress = 0.25
    trained(settings, run)
    assert run.rates == [pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi / 4)))]
    assert settings.lr_at(5000, 1.0) == 0.0


def test_a_schedule_of_its_own_length_or_of_an_open_run_ends_at_a_tenth_of_the_peak():
    for schedule_steps, steps in ((100, 100), (0, 1000)):
        settings = settings_with(schedule_steps=schedule_steps, warmup_steps=10, lr=1.0)
        assert settings.lr_at(1) == pytest.approx(0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi / steps))))
        assert settings.lr_at(steps // 2) == pytest.approx(0.55)
        assert settings.lr_at(steps) == pytest.approx(0.1)
        assert settings.lr_at(5000) == pytest.approx(0.1)
    assert settings_with(schedule_steps=100, lr=1.0).lr_at(100, 0.25) == pytest.approx(0.1), "its own length goes first"


def test_text_that_is_shorter_than_a_window_is_refused_before_it_joins():
    with pytest.raises(ConfigError, match=r"held-out .*model\.context 60000"):
        Trainer(settings_with(context=60_000), corpus=corpus_of_words())


def test_the_gradient_is_cut_to_its_greatest_norm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GRADIENT_NORM_MAX", 0.01)
    trainer = Trainer(settings_with(), corpus=corpus_of_words(), say=lambda line: None)
    norms: list[float] = []
    plain = trainer.optimizer.step

    def step() -> None:
        norms.append(math.hypot(*(float(parameter.grad.norm()) for parameter in trainer.model.parameters())))
        plain()

    monkeypatch.setattr(trainer.optimizer, "step", step)
    trainer.run(FakeRun(3).attach)
    assert norms == [pytest.approx(0.01, rel=1e-3)] * 3


def test_settings_come_from_the_file_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trainer.json"
    sections = {
        "run": {"seed": 3, "steps": 9},
        "model": {"dim": 32, "lr": 0.01, "hf": None},
        "data": {"paths": ["x.txt"]},
    }
    path.write_text(json.dumps(sections))
    monkeypatch.setenv("DILOCO_TRAINER", str(path))
    settings = TrainerSettings(dim=32, lr=0.01, paths=("x.txt",), seed=3)
    assert settings_from(read_settings_file()) == settings
    assert settings.hidden == ModelSettings(dim=32).hidden
    monkeypatch.delenv("DILOCO_TRAINER")
    assert settings_from(read_settings_file()) == TrainerSettings()


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unusable_settings_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None):
    path = tmp_path / "trainer.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("DILOCO_TRAINER", str(path))
    with pytest.raises(ConfigError, match=r"trainer\.json.*diloco-node start writes it"):
        read_settings_file()
