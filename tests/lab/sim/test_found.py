"""Seeds that once found something: what it was stays found."""

import pytest

from diloco_node.lab.sim.audit import Audit, Line
from diloco_node.lab.sim.fault_storm import Chaos
from diloco_node.lab.sim.simulation import Simulation, simulate

pytestmark = pytest.mark.world

FOUND = {
    249: "versions that overwrite what learners do: something always waits to be booked",
    695: "a reducer's stripes of a learner that died were taken for those of the next one, ballot after ballot",
    1594: "the same with three regions, before the first commit",
    3408: "a ballot decided while a learner lived commits after its next incarnation was merged elsewhere",
    4402: "a vote was judged by entries that joined the log while it was written",
    7963: "a fake learner told that it gave its steps up before their count was on disk",
    8212: "entries of another log, behind a base that replaced it, counted as durable ones of the new log",
    469: "behind a base an entry names an older sum, after a new leader's election",
}

SCHEDULES_THEN = {469: "elections", 3408: "gray", 4402: "usual"}
"""What these drew when they found something: they draw a swarm now."""


def test_a_leader_that_decides_about_another_fragment_is_not_followed() -> None:
    report = simulate(2, liar="words")
    assert report.is_good, report.violations


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something_finds_nothing_any_more(seed: int) -> None:
    report = simulate(seed, joiners=0, schedule=SCHEDULES_THEN.get(seed, ""))
    assert report.is_good, (FOUND[seed], report.violations)


def test_what_a_core_raises_when_a_fault_is_ended_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(*_: object) -> None:
        raise ValueError("the ledger makes no sense")

    monkeypatch.setattr(Chaos, "heal", heal)
    report = simulate(1, regions=3, events=300, commits_min=0, faults_min=0)
    assert "crash: ValueError: the ledger makes no sense in heal" in report.violations[0]


def test_an_account_that_still_waits_after_healing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if every discard were lost. Seed 110 carries over, and one of its learners dies before its first merge.
    monkeypatch.setattr(Audit, "_check_discarded", lambda *_: None)
    monkeypatch.setattr(Audit, "is_booked", lambda *_: True)
    report = simulate(110, regions=3, events=600, commits_min=0, faults_min=0, liar="")
    assert "and is gone, but (0, 0) are booked" in report.violations[0]


def test_what_is_due_is_booked_when_the_account_has_reached_it() -> None:
    audit = Audit(Simulation(1, regions=3).setup, lambda _: None)
    audit.lines["a", 1, 0] = Line(end=5)
    assert audit.is_booked({("a", 1, 0): 5})
    assert not audit.is_booked({("a", 1, 0): 6})
    assert not audit.is_booked({("a", 1, 1): 1})
