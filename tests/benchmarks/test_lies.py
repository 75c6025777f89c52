"""Parts of benchmarks/lies.py: its table, a learner's lies, and arms that were measured before."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gray_region
import lies
import numpy as np
import pytest

import diloco_node
from diloco_node.core.types import Codec
from diloco_node.learner.attach import Diloco
from diloco_node.learner.contribution_area import ContributionArea
from tests.kit.fake_daemon import FakeDaemon, SnapshotReady
from tests.kit.learner_kit import Toy, region_folder


def an_arm(loss: float, *, named_after: int | None = None, rounds: int = 40) -> dict[str, Any]:
    return {
        "liars": ["eu"],
        "rounds": rounds,
        "steps": 320.0,
        "named_after": named_after,
        "reason": "" if named_after is None else "its sum",
        "wronged": [],
        "cosines": {"eu": -0.25, "us": 0.5},
        "losses": [[step, loss] for step in range(8, 80, 8)],
    }


def test_a_row_compares_with_the_run_without_the_liar_and_with_the_honest_one() -> None:
    arms = {"honest": an_arm(2.0), "without": an_arm(2.0), "flipped": an_arm(2.1, named_after=3, rounds=30)}
    arms["flipped"]["losses"].append([400, 9.9])  # no other arm came so far
    assert lies.lines(arms)[0].startswith("| arm | named | loss at step 72 |")
    assert lies.lines(arms)[-1] == "| flipped | 3 | 2.1000 | +5.0% | 75% | -0.25 | 0 | its sum |"


def test_arms_of_other_conditions_are_not_taken_over(tmp_path: Path) -> None:
    file, conditions = tmp_path / "arms.json", {"seconds": 120.0}
    assert lies.load_arms(file, conditions) == {}
    file.write_text(json.dumps({"conditions": conditions, "arms": {"honest": an_arm(2.0)}}))
    assert list(lies.load_arms(file, conditions)) == ["honest"]
    with pytest.raises(ValueError, match="name another file"):
        lies.load_arms(file, {"seconds": 30.0})


def test_a_lying_learner_claims_and_turns_only_while_it_is_ordered_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, toy, region = tmp_path / "fault", Toy(), contextmanager(region_folder)(tmp_path, monkeypatch)
    monkeypatch.setattr(Diloco, "step", Diloco.step)
    monkeypatch.setattr(ContributionArea, "encode", ContributionArea.encode)
    gray_region.install_claims(fault)
    with (
        region as folder,
        FakeDaemon(folder, codec=Codec.FP32) as daemon,
        diloco_node.attach(toy.model, toy.optimizer) as diloco,
    ):
        for fragment, words, tokens, factor in ((0, "", 7, 1.0), (1, "tokens_x8,flipped", 56, -1.0)):
            before = diloco.steps
            fault.write_text(words)
            daemon.want(fragment)
            toy.steps_until(diloco, daemon, SnapshotReady, 1 + fragment)
            ready = daemon.wait_for(SnapshotReady, 1 + fragment).contribution
            assert ready.tokens == 7 * before + tokens * (ready.step_to - before)
            np.testing.assert_allclose(daemon.decoded(fragment), factor * 0.25 * ready.step_to, rtol=1e-5)
