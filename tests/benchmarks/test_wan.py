"""The pure parts of benchmarks/wan.py: scaling, what logs add up to, the report; and one learner."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import wan
import wan_learner
import wan_scale
from region_sampler import SHARD_BYTES
from wan_scale import Scale, Target

from diloco_node.config.units import parse_rate
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.lab.wan.topology import parse_topology
from diloco_node.learner.builtin.data import Corpus
from tests.kit.wan_probe import rate_of, rtt_ns_of


def log(*, step_s: float, steps: int, sent: int, first_s: float = 100.0) -> list[dict[str, Any]]:
    return [
        {"seconds": first_s + step_s * number, "sent": sent * number, "received": 2 * sent * number, "loss": 1.0}
        for number in range(1, steps + 1)
    ]


def test_scaled_link_takes_the_same_part_of_a_step_for_the_same_part_of_the_model() -> None:
    scale = Scale(Target(), parameters=1_000_000, step_s=0.25)
    # By hand: 2 Gbit/s x 1e6 / 5e9 x 1 s / 0.25 s, 40 ms x 0.25 s / 1 s.
    assert scale.rate_bits_per_s == pytest.approx(1.6e6)
    assert scale.rtt_s == pytest.approx(0.010)
    target_steps = wan_scale.ring_bytes(5e9, 4) * 8 / 2e9 / 1.0
    small_steps = wan_scale.ring_bytes(1e6, 4) * 8 / scale.rate_bits_per_s / 0.25
    assert small_steps == pytest.approx(target_steps) == pytest.approx(120.0)


def test_figures_scale_back_to_the_target() -> None:
    scale = Scale(Target(parameters=8e9, step_s=3.0), parameters=2_000_000, step_s=0.5)
    assert scale.unscaled_s(7.0) == pytest.approx(42.0)
    assert scale.unscaled_bytes(5.0) == pytest.approx(20_000.0)


def test_step_figures_leave_the_warm_up_out_and_average_over_regions() -> None:
    slow, fast = log(step_s=0.5, steps=11, sent=300), log(step_s=0.3, steps=9, sent=100)
    slow[0]["seconds"] -= 50.0  # the first step took long: it is not counted
    figures = wan_scale.step_figures([slow, fast], warm_up=2)
    assert figures["step_seconds"] == pytest.approx(0.4)
    assert figures["step_seconds_max"] == pytest.approx(0.5)
    assert figures["sent_bytes_per_step"] == pytest.approx(200)
    assert figures["received_bytes_per_step"] == pytest.approx(400)
    assert figures["steps"] == 7


def test_rare_long_steps_count_in_the_mean_and_not_in_the_median() -> None:
    one = log(step_s=0.1, steps=11, sent=0)
    for record in one[5:]:
        record["seconds"] += 5.0  # an all-reduce after the fifth step
    figures = wan_scale.step_figures([one], warm_up=1)
    assert figures["step_seconds"] == pytest.approx(0.6)
    assert figures["step_seconds_median"] == pytest.approx(0.1)
    assert figures["step_seconds_max"] == pytest.approx(5.1)


@pytest.mark.parametrize("warm_up", [0, 3, 4])
def test_logs_without_a_counted_step_are_refused(warm_up: int) -> None:
    with pytest.raises(ValueError, match="shortest log has 3 steps"):
        wan_scale.step_figures([log(step_s=1.0, steps=3, sent=0), log(step_s=1.0, steps=9, sent=0)], warm_up=warm_up)


def test_steps_to_a_loss_is_the_first_time_it_is_reached() -> None:
    curve = [(20, 3.0), (40, 2.5), (60, 2.7), (80, 2.4)]
    assert wan_scale.steps_to(curve, 2.5) == 40
    assert wan_scale.steps_to(curve, 2.45) == 80
    assert wan_scale.steps_to(curve, 2.0) is None


def test_same_losses_compares_the_common_steps() -> None:
    assert wan_scale.same_losses([5.0, 4.0], [5.0, 4.0000001, 3.0])
    assert not wan_scale.same_losses([5.0, 4.0], [5.0, 4.01, 3.0])
    assert not wan_scale.same_losses([], [5.0])


def arm(step_seconds: float, **more: Any) -> dict[str, Any]:
    figures = {"step_seconds": step_seconds, "step_seconds_median": step_seconds, "sent_bytes_per_step": 1e5}
    return {"steps_to_loss": None, "seconds_to_loss": None, **figures, **more}


def test_comparison_divides_by_ours_and_leaves_out_what_is_not_there() -> None:
    arms = {
        "alone": arm(0.20),
        "ours": arm(0.21, steps_to_loss=100, seconds_to_loss=21.0),
        "ddp": arm(21.0, steps_to_loss=60, seconds_to_loss=1260.0),
    }
    found = wan_scale.comparison(arms)
    assert found["ddp_over_ours"] == pytest.approx(100.0)
    assert found["ours_over_alone"] == pytest.approx(1.05)
    assert found["loss_time_ddp_over_ours"] == pytest.approx(60.0)
    assert found["sync_over_ours"] is None
    assert found["loss_time_sync_over_ours"] is None


def test_report_shows_the_formulas_both_scales_and_every_arm() -> None:
    arms = {"ours": arm(0.2, steps_to_loss=100, seconds_to_loss=20.0), "ddp": arm(25.0)}
    shown = "\n".join(
        wan_scale.lines(
            {
                "target": asdict(Target()),
                "parameters": 1_000_000,
                "paced_step_seconds": 0.2,
                "regions": 4,
                "sync_every": 48,
                "fragments": 12,
                "loss": 2.6,
                "notes": ["ddp: 3 steps"],
                "arms": arms,
                "comparison": wan_scale.comparison(arms),
            }
        )
    )
    assert "rate x N/N_large x t_large/t = 2.00 Mbit/s, RTT x t/t_large = 8 ms" in shown
    assert "100 steps, 20 s" in shown
    assert "100 s" in shown, "20 s of the small run are 100 s of the target"
    assert "500 MB" in shown, "100 kB of 1 M parameters are 500 MB of 5 B"
    assert "not reached" in shown
    assert "ddp_over_ours             125" in shown
    assert "ddp: 3 steps" in shown


def test_topology_and_settings_of_the_benchmark_are_valid() -> None:
    rate, name = int(Scale(Target(), wan.parameters_of_model(), 0.2).rate_bits_per_s), "us-east"
    text = wan.TOPOLOGY.format(queue_ms=wan.QUEUE_MS, rtt_us=8000)
    text += "".join(f'\n[regions.{region}]\negress = "{rate}bit/s"\n' for region in wan.REGIONS)
    topology = parse_topology(text, name="scaled")
    assert rtt_ns_of(topology, name, "us-west") == 8_000_000
    assert rate_of(topology, name, "us-west") == parse_rate(f"{rate}bit/s")


def spec(folder: Path, **changes: Any) -> wan_learner.Spec:
    values: dict[str, Any] = {
        **{"arm": "alone", "regions": 2, "steps": 6, "step_s": 0.0, "sync_every": 2, "outer_lr": 0.7},
        **{"outer_momentum": 0.0, "interface": "lo", "master": "", "log": str(folder), "snapshot_every": 2},
        **{"waits": False, "layers": 1, "dim": 16, "heads": 2, "context": 12, "batch": 2, "lr": 1e-2},
        **{"warmup": 2, "schedule_steps": 6, "seed": 0},
    }
    return wan_learner.Spec(**(values | changes))


def test_learner_logs_each_step_and_writes_the_parameters_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    text = (np.arange(4 * SHARD_BYTES) % 251).astype(np.uint8)
    monkeypatch.setattr(wan_learner, "load_corpus", lambda: Corpus(text, text))
    wan_learner.run(spec(tmp_path, steps=40, snapshot_every=10), 0)
    records = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(after["seconds"] > before["seconds"] for before, after in pairwise(records))
    taken = {path.name: np.load(path) for path in tmp_path.glob("*.npy")}
    assert sorted(taken) == ["10.npy", "20.npy", "30.npy"], "of steps before the last one"
    assert not np.array_equal(taken["10.npy"], taken["20.npy"])
    assert wan.read_logs(tmp_path, 1, steps=3) == [records[:3]]


def test_fragments_of_the_benchmark_are_balanced() -> None:
    from diloco_node.learner.builtin.model import ByteGPT
    from diloco_node.learner.builtin.shape import ModelSettings
    from diloco_node.learner.layouts.tensors import ModelTensors

    manifest = build_manifest(ModelTensors(ByteGPT(ModelSettings(**wan.MODEL), seed=0)).specs, 12)
    sizes = [fragment.size for fragment in manifest.fragments]
    assert sum(sizes) == wan.parameters_of_model()
    assert max(sizes) < 1.3 * min(sizes), "a large fragment would set the rate that is needed"
