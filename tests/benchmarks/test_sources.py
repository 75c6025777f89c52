"""The parts of sources.py and experts.py: clean pages, the same windows in all arms, alarms, even experts."""

from pathlib import Path

import numpy as np
import pytest
import sources
import torch
from experts import EXPERTS, ExpertArm, Mixture
from experts import train as train_experts
from quality_lines import Lines
from sources import ARMS, SOURCES, Arm, WatchedRounds, Windows, key_of, plain, settings, table, train

from diloco_node.core.types import MergeRule
from diloco_node.learner.builtin.data import Corpus


def text(seed: int) -> np.ndarray:
    """Words of a language of its own: a source draws from eight letters that no other has."""
    return (np.random.default_rng(seed).integers(0, 8, 1 << 17) + 65 + 8 * seed).astype(np.uint8)


CORPORA = [Corpus(text(m), text(m)[:8192]) for m in range(len(SOURCES))]


def test_a_manual_page_is_stripped_of_its_markup() -> None:
    page = (
        '.\\" a comment\n.TH LS 1 "May 2022"\n.SH BEZEICHNUNG\nls \\- zeigt \\fIDateien\\fP\\f[R] an\n.PP\n'
        '.BR stat (2)\\&, \\(aqx\\(aq\\*(lqy\\[rq]\\e0\n.if n .ad l\n.SH "SIEHE AUCH"\n.nf\nzwei\n'
    )
    assert plain(page) == "\nBEZEICHNUNG\nls - zeigt Dateien an\n\nstat (2), 'x'“y”\\0\n\nSIEHE AUCH\nzwei"


def test_every_arm_sees_the_same_windows_in_a_step() -> None:
    streams = {name: Windows(Arm(name, name), CORPORA, seed=1).at(3, is_over=False) for name in ("own", "mix", "all")}
    assert [len(batches) for batches in streams.values()] == [4, 4, 1]
    rows = {name: sorted(map(bytes, np.concatenate(batches))) for name, batches in streams.items()}
    assert rows["own"] == rows["mix"] == rows["all"]
    (without,) = Windows(Arm("all", "all"), CORPORA, seed=1).at(3, is_over=True)
    assert sorted(map(bytes, without)) == sorted(map(bytes, np.concatenate(streams["own"][:3])))
    letters = [(batch - 65) // 8 for batch in streams["own"]]
    assert [set(batch.ravel()) for batch in letters] == [{0}, {1}, {2}, {3}]
    assert [set(batch.ravel()) for batch in ((streams["mix"][m] - 65) // 8 for m in range(4))] == [{0, 1, 2, 3}] * 4


def opposed(gain: float) -> WatchedRounds:
    """Twelve rounds in which the last region learns the opposite of the others, so many times as fast."""
    theta = np.zeros((4, 4096), np.float32)
    plain_rounds = settings(Arm("", merge=MergeRule.AVG, sync_every=4), 48)
    rounds = WatchedRounds(plain_rounds, {"a.weight": (64, 64)}, theta, tokens_per_step=8)
    way = np.random.default_rng(1).normal(size=4096).astype(np.float32)
    for step in range(1, 49):
        theta[:3] += way
        theta[3] -= np.float32(gain) * way
        rounds.after_step(step)
    return rounds


def test_the_alarms_are_the_products() -> None:
    against, honest = opposed(1.0), opposed(-1.0)
    assert against.rounds == honest.rounds >= 40
    assert set(against.alarms) == {"A-AGAINST ru"}
    assert not honest.alarms
    assert np.mean(against.seen[3]) == pytest.approx(-1.0, abs=0.01)
    assert np.mean(honest.seen[0]) == pytest.approx(1.0, abs=0.01)
    assert "A-TOO-LONG ru" in opposed(-3.0).alarms


def test_a_run_on_languages_of_their_own_tells_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HELD_OUT_WINDOWS", 64)
    monkeypatch.setattr(sources, "POINT_WINDOWS", 16)
    lines = Lines(tmp_path / "r.jsonl")
    chosen = [arm for arm in ARMS if arm.name in ("own", "alone", "leaves")]
    ran = []

    def run(arm: Arm) -> dict[str, object]:
        ran.append(arm.name)
        return train(arm, steps=64, seed=1, corpora=CORPORA)

    results = [lines.record(key_of(arm, 64, 1, "x"), lambda arm=arm: run(arm)) for arm in chosen * 2]
    assert ran == ["own", "alone", "leaves"], "a finished run is not run again"
    own, alone, leaves = results[:3]
    assert (np.shape(own["losses"]), np.shape(alone["losses"])) == ((1, 4), (4, 4))
    assert np.diag(alone["losses"]).max() < 3.0
    assert np.min([alone["losses"][0][1:], alone["losses"][3][:3]]) > 5.0
    assert max(own["losses"][0]) < 5.0, "the merged model knows every language somewhat"
    assert leaves["left"][3] < leaves["losses"][0][3]
    assert own["points"][-1]["step"] == 64
    assert "| leaves, who left |" in table(results[:3])


def test_the_auxiliary_loss_reaches_the_routers() -> None:
    record = train_experts(ExpertArm("", "all", balance="aux"), steps=16, seed=1, corpora=CORPORA)
    plain_record = train_experts(ExpertArm("", "all"), steps=16, seed=1, corpora=CORPORA)
    assert record["points"][-1]["merged"][0] != plain_record["points"][-1]["merged"][0]


def test_biases_push_the_load_of_the_experts_towards_even() -> None:
    torch.manual_seed(1)
    model, windows = Mixture(), np.random.default_rng(1).integers(0, 256, (8, 33)).astype(np.uint8)
    before = model.figures(windows)[1]
    for _ in range(200):
        model.figures(windows)
        model.expert_bias.add_(torch.sign(1 / EXPERTS - model.loads), alpha=1e-3)
    _, load, entropy = model.figures(windows)
    assert load < 1.1 < before
    assert entropy > 0.99
    assert model.loads.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("way", "count"), [("bias_mean", 1), ("bias_local", 4)])
def test_merged_biases_are_the_same_everywhere_and_others_are_the_regions_own(way: str, count: int) -> None:
    record = train_experts(ExpertArm("", balance=way), steps=32, seed=1, corpora=CORPORA)
    assert [point["step"] for point in record["points"]] == [2, 18, 32]
    assert len(record["points"][-1]["merged"]) == count
    before, after = (np.array(record["points"][-1][kind]) for kind in ("before", "after"))
    assert before.shape == after.shape == (4, 3)
    assert (before[:, 0] < after[:, 0]).all(), "on its own language each region was better before the last merge"
