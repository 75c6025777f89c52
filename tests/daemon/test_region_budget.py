"""daemon/region_budget.py: what an operator asks for, what run.toml says now, and the one line when it is too small."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.types import RateLimits, RunSettings
from diloco_node.core.view import PeerView
from diloco_node.daemon.region_budget import BudgetWatch, changed_plan, plan_of_file
from diloco_node.errors import ConfigError
from tests.daemon.admin.test_status_document import view_of

PLAN = BudgetPlan(RateLimits(1000, 2000), (("b", RateLimits(7, None)),))
PEERS = ("b", "c")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"egress": "8Mbit/s"}, BudgetPlan(RateLimits(10**6, 2000), PLAN.peers)),
        ({"egress": "none", "ingress": "1MB/s"}, BudgetPlan(RateLimits(None, 10**6), PLAN.peers)),
        ({"ingress": "1MB/s", "peer": "b"}, BudgetPlan(PLAN.limits, (("b", RateLimits(7, 10**6)),))),
        ({"egress": "1MB/s", "ingress": None, "peer": None}, BudgetPlan(RateLimits(10**6, 2000), PLAN.peers)),
    ],
)
def test_what_is_asked_for_changes_and_nothing_else(document: dict[str, Any], expected: BudgetPlan) -> None:
    assert changed_plan(PLAN, document, PEERS) == expected


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({}, "nothing to set"),
        ({"peer": "b"}, "nothing to set"),
        ({"egress": "25"}, "egress is '25': it has no unit"),
        ({"egress": 25}, "egress is 25: write a rate with its unit"),
        ({"egress": ["1MB/s"]}, "write a rate"),
        ({"egress": "1kbit/s"}, "the least that can be kept"),
        ({"egress": "1MB/s", "peer": "z"}, "peer 'z' is none of this region's: b, c"),
        ({"egress": "1MB/s", "peer": 5}, "peer 5"),
        ({"egress": "1MB/s", "peer": ""}, "peer '' is none"),
        ({"outgress": "1MB/s"}, "'outgress' is no part of a budget; there are egress, ingress, peer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        changed_plan(PLAN, document, PEERS)


def test_the_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = '[run]\nid = "try"\n[budget]\negress = "{}"\n[regions.eu]\naddress = "10.0.0.1:7400"\n'
    path.write_text(text.format("8Mbit/s"))
    assert plan_of_file(path, "eu") == (BudgetPlan(RateLimits(10**6, None)), str(path))
    path.write_text(text.format("16Mbit/s"))
    assert plan_of_file(path, "eu") == (BudgetPlan(RateLimits(2 * 10**6, None)), str(path))
    with pytest.raises(ConfigError, match="'us'"):
        plan_of_file(path, "us")
    path.write_text(text.format("16"))
    with pytest.raises(ConfigError, match="no unit"):
        plan_of_file(path, "eu")


@pytest.mark.parametrize("name", ["DILOCO_BUDGET__EGRESS", "DILOCO_REGIONS__EU__EGRESS"])
def test_who_edits_a_file_that_a_variable_beats_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nid = "try"\n[budget]\negress = "8Mbit/s"\n[regions.eu]\naddress = "10.0.0.1:7400"\n')
    monkeypatch.setenv(name, "16Mbit/s")
    plan, source = plan_of_file(path, "eu")
    assert plan.limits == RateLimits(2 * 10**6, None)
    assert source == f"{path}, which {name} in this region's environment beats"


def test_a_plan_says_itself_in_one_line() -> None:
    assert str(BudgetPlan()) == "no limit"
    assert str(PLAN) == "egress 8,000 bit/s, ingress 16,000 bit/s, b egress 56 bit/s"


SETTINGS = RunSettings(fragments=2, sync_every=8)
MANIFEST = build_manifest((TensorSpec("a", (1000, 1000)), TensorSpec("b", (1000, 1000))), 2)
STEP_NS = 100_000_000
SMALL, LARGE = 500_000, 500_000_000
"""A cycle of 0.8 s has to move some 1.6 MB each way."""


def budget(egress: int | None, ingress: int | None = None) -> dict[str, Any]:
    return {
        "egress_bytes_per_s": egress,
        "ingress_bytes_per_s": ingress,
        "peers": {"eu": {"overhead": 1.05}, "ap": {"overhead": 1.07}},
    }


class Region:
    """A learner that steps, and a ledger that merges every so many steps."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.watch = BudgetWatch(MANIFEST, SETTINGS)
        self.step = self.rounds = 0

    def run(self, steps: int, period: int, limits: dict[str, Any], **changes: Any) -> str:
        """Steps, with one round every `period`; the line at the end."""
        for _ in range(steps):
            self.step += 1
            self.rounds += self.step % period == 0
            base = view_of()
            assert base.learner is not None
            learner = dataclasses.replace(base.learner, step=self.step, step_time_ns=STEP_NS)
            peers = tuple(
                PeerView(name, True, 20_000_000, ("us",), dataclasses.replace(learner, step_time_ns=2 * STEP_NS), 9)
                for name in ("eu", "ap")
            )
            fields = {"learner": learner, "rounds_committed": self.rounds, "peers": peers, **changes}
            note = self.watch.look(dataclasses.replace(base, **fields), limits)
            self.notes += [note] if note is not None else []
        return self.watch.text


def test_a_schedule_that_is_kept_is_nothing_to_speak_of() -> None:
    region = Region()
    assert region.run(100, 4, budget(LARGE)) == ""
    assert region.run(100, 4, budget(SMALL)) == "", "the plan says no, but zstd may make it fit: merges are on time"
    assert region.notes == []


def test_late_merges_that_the_budget_does_not_explain_are_not_its_fault() -> None:
    region = Region()
    assert region.run(100, 40, budget(LARGE)) == ""
    assert region.run(100, 40, budget(None)) == ""
    assert region.notes == []


def test_a_budget_that_is_too_small_is_said_once_with_what_would_do() -> None:
    region = Region()
    text = region.run(100, 40, budget(SMALL, SMALL))
    assert text.startswith("the schedule can't be kept within the budget, H = 8 at 0.2 s a step: ")
    assert "rounds.sync_every = " in text
    assert 'budget = "' in text
    assert "; measured: every " in text
    assert [note.kind for note in region.notes] == ["budget"]
    assert region.notes[0].text.split("; measured")[0] == text.split("; measured")[0]
    region.run(100, 40, budget(SMALL - 1, SMALL))
    assert len(region.notes) == 2, "said again about another budget"
    assert region.run(100, 4, budget(LARGE)) == ""
    assert region.notes[2].text == "the schedule is kept again"
    assert len(region.notes) == 3


def test_a_budget_is_not_to_blame_where_the_daemon_waits_for_a_processor() -> None:
    region, late_ns = Region(), 2 * SETTINGS.sync_every * STEP_NS // 10
    look = region.watch.look
    region.watch.look = lambda view, limits: look(view, limits, late_ns=late_ns)  # type: ignore[method-assign]
    unused = budget(SMALL, SMALL) | {"share_used": 0.5}
    assert region.run(100, 40, unused) == ""
    assert region.notes == []
    assert region.watch.pace() == {"steps": 64.0, "sync_every": 8, "is_late": True, "is_starved": True}
    assert region.run(100, 40, unused | {"share_used": 0.95}) != "", "it is used up all the same"
    assert region.watch.pace()["is_starved"] is False
    late_ns = SETTINGS.sync_every * STEP_NS // 11
    assert region.run(8, 40, unused) != "", "timers that are so little late cost no tenth of a cycle"
    late_ns *= 2
    assert region.run(100, 4, unused) == ""
    assert region.watch.pace()["is_starved"] is False, "nothing is late"


def test_nothing_is_said_without_a_learner_or_at_the_end() -> None:
    for changes in ({"learner": None}, {"is_ending": True}, {"finished": "steps"}):
        assert Region().run(100, 40, budget(SMALL), **changes) == ""


def test_what_was_said_stays_when_the_run_ends() -> None:
    region = Region()
    text = region.run(100, 40, budget(SMALL, SMALL))
    assert region.run(10, 40, budget(SMALL, SMALL), is_ending=True) == text
    assert len(region.notes) == 1


def test_a_region_alone_sends_nothing() -> None:
    assert Region().run(100, 40, budget(SMALL), peers=()) == ""
