"""Disk, certificate and the time that is left, in the status document."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.merge.outliers import RecentRounds
from diloco_node.core.rounds.progress import RunPosition
from diloco_node.core.types import RunSettings
from diloco_node.daemon.admin import run_facts
from diloco_node.daemon.admin.run_facts import RunFacts, cpu_pressure, disk_space
from diloco_node.daemon.learner.proxy import LearnerFacts

SECOND = 1_000_000_000
ACCOUNT: Any = SimpleNamespace(
    merged_tokens=lambda _: 900, totals=lambda _: ((600, 800), (4, 6)), covered_tokens=lambda _region, _: 700
)


class Scripted:
    """A core that is as far as the test says, and the clock."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 0
        self.part: float | None = 0.0
        self.liveness = SimpleNamespace(late_ns=1_500_000_000, alive=lambda now_ns: ["eu"])
        self.refusals = ""
        self.history = SimpleNamespace(
            rounds_committed=0,
            versions=[0, 0],
            account=ACCOUNT,
            finished=None,
            settings=SimpleNamespace(tokens_ratio_max=8.0),
            recent=[RecentRounds()],
        )
        progress = SimpleNamespace(
            position=lambda now_ns: RunPosition(int(250 * (self.part or 0.0)), self.part),
            steps_of=lambda name: len(name),
        )
        self.leader = SimpleNamespace(progress=progress)
        self.ledger = SimpleNamespace(disks=DiskView(("eu", "us")), last_index=0)
        spec: Any = SimpleNamespace(
            region="us", regions=("eu", "us"), run_id="try", settings=RunSettings(steps_max=250), state_dir=folder
        )
        core: Any = self
        self.leader.rounds = {}
        self.facts = RunFacts(
            core,
            spec,
            certificate=lambda: {"days_left": 12.0},
            cosines={},
            refusals=lambda: self.refusals,
            now_ns=lambda: self.now_ns,
        )

    def document(self, tokens: int = 1000, **facts: Any) -> dict[str, Any]:
        learner: Any = SimpleNamespace(facts=LearnerFacts(**facts), tokens_total=tokens)
        return self.facts.document(learner)


@pytest.fixture
def script(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def test_the_time_that_is_left_follows_the_pace(script: Scripted) -> None:
    assert script.document()["run"]["eta_seconds"] is None, "one look is no pace"
    for at in range(11):
        script.now_ns, script.part = (10 + at * 2) * SECOND, 0.01 * at
        script.facts.mark()
    run = script.document()["run"]
    assert run["eta_seconds"] == pytest.approx(0.9 / 0.005)
    assert (run["id"], run["step"], run["total_steps"], run["tokens"]) == ("try", 25, 250, 900)
    for _ in range(300):  # nothing moves any more
        script.now_ns += 2 * SECOND
        script.facts.mark()
    assert script.document()["run"]["eta_seconds"] is None or script.document()["run"]["eta_seconds"] > 4000


def test_what_is_first_heard_after_a_start_is_no_pace(script: Scripted) -> None:
    """The ledger says 50 %, the learners that are heard a moment later 55 %; a percent takes an hour."""
    for at_s, progress in ((2, 0.5), (4, 0.55), *((at, 0.55 + at / 360_000) for at in range(12, 73, 2))):
        script.now_ns, script.part = at_s * SECOND, progress
        script.facts.mark()
    assert script.document()["run"]["eta_seconds"] == pytest.approx(0.45 * 360_000, rel=0.01)


def test_a_run_that_moves_with_rare_merges_has_a_pace(script: Scripted) -> None:
    for at_s in range(20, 6000, 2):
        script.now_ns, script.part = at_s * SECOND, 0.01 * (at_s // 1200)
        script.facts.mark()
        if at_s > 2500:
            eta_s = script.document()["run"]["eta_seconds"]
            assert eta_s == pytest.approx((1.0 - script.part) * 120_000, rel=0.02)


def test_a_run_without_an_end_has_none(script: Scripted) -> None:
    script.part = None
    script.facts.mark()
    assert script.document()["run"]["eta_seconds"] is None
    script.history.finished = SimpleNamespace(reason="enough")
    assert script.document()["run"]["eta_seconds"] == 0.0


def test_a_region_votes_while_the_ledger_names_its_folder(script: Scripted) -> None:
    assert script.document()["voters"] is None, "before the run has begun nobody is named"
    script.ledger.disks.begin(Roster.of_voters(("eu", "us"), {"eu": b"e", "us": b"u"}), 1)
    assert script.document()["voters"] == ["eu", "us"]
    script.ledger.disks.begin(Roster.of_voters(("eu", "us"), {"us": b"u"}), 2)
    assert script.document()["voters"] == ["us"]


def test_a_change_of_the_members_is_dated_unless_it_is_old(script: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_facts, "wall_clock_s", lambda: 7.0)
    script.facts.rounds = SimpleNamespace(observe=lambda event, effects: None)  # type: ignore[assignment]
    roster, event = Roster.of_voters(("eu", "us"), since=1), Any

    def follow(roster: Roster, last_index: int) -> dict[str, float]:
        script.ledger.disks.begin(roster, last_index)
        script.ledger.last_index = last_index
        script.facts.observe(event, ())
        return dict(script.facts.dates.since_unix)

    assert follow(roster, 90) == {}, "the log was read to its end before: nobody here saw when"
    added = roster.changed(MembershipBody("ap", "contributor"), 91)
    assert follow(added, 91) == {"ap": 7.0}
    assert follow(added.changed(MembershipBody("ap", "voter"), 92), 200) == {}, "of another kind since, when is unknown"


def test_disk_certificate_and_tokens_are_shown(script: Scripted, tmp_path: Path) -> None:
    script.facts.look()
    script.refusals = "ledger: No space left on device"
    document = script.document()
    assert document["disk"]["refused"] == "ledger: No space left on device"
    assert 0 < document["disk"]["free_bytes"] < document["disk"]["total_bytes"]
    assert document["certificate"]["days_left"] == pytest.approx(12, abs=0.1)
    assert document["token_account"] == {"trained": 1000, "carried": 300, "run_merged": 700, "run_discarded": 5}
    assert document["steps_of"] == {"eu": 2, "us": 2}
    assert script.document(tokens=600)["token_account"]["carried"] == 0, "the folder was lost, the ledger was not"
    assert disk_space(tmp_path / "gone") == {}


def test_it_is_shown_how_late_this_process_is_and_how_many_wait(script: Scripted, tmp_path: Path) -> None:
    assert script.document()["machine"] == {"late_seconds": 1.5, "cpu_pressure_percent": None}
    pressure = tmp_path / "cpu"
    assert cpu_pressure(pressure) is None, "a kernel without PSI"
    pressure.write_text(
        "some avg10=99.46 avg60=99.37 avg300=95.57 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    assert cpu_pressure(pressure) == 99.46
    for text in (b"", b"some avg10=", b"\xff", b"full avg10=1.00 "):
        pressure.write_bytes(text)
        assert cpu_pressure(pressure) is None


def test_a_warning_of_the_learner_has_its_age(script: Scripted) -> None:
    assert script.document()["learner_warning"] is None
    script.now_ns = 40 * SECOND
    document = script.document(last_warning="nan", last_warning_ns=10 * SECOND, has_failed=True)["learner_warning"]
    assert document == {"text": "nan", "age_seconds": 30.0, "is_failure": True}
