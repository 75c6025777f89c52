"""The log of rounds in whole regions: what took how long, who was waited for, what failed; and what it never does."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core import events as ev
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.types import Ballot
from diloco_node.core.view import PHASES
from diloco_node.daemon.round_log import REASON_CHARS_MAX, ROUNDS_KEPT, RoundLog, TrackedRound
from tests.daemon.test_node import Play, World, play  # noqa: F401 - a fixture

MS = 1_000_000


def log_of(world: World, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = world.regions[name].node.status.document()["round_log"]
    return rows


def leader_of(world: World) -> str:
    return next(name for name, region in world.regions.items() if region.node.core.ledger.is_leader)


def test_every_region_times_the_rounds_and_the_leader_knows_whom_it_waits_for(play: Play) -> None:  # noqa: F811
    async def scenario(world: World) -> None:
        await world.until(
            "there is a leader", lambda: any(region.node.core.ledger.is_leader for region in world.regions.values())
        )
        leader = leader_of(world)
        slow = next(name for name in world.regions if name != leader)
        world.regions[slow].learner.step_s *= 3
        await world.until("some rounds", lambda: world.committed() >= 10)
        for name in world.regions:
            rows = log_of(world, name)
            assert len(rows) >= 6
            for row in rows:
                assert row["outcome"] == "committed"
                assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
                assert set(row["phases"]) <= set(PHASES)
                assert row["members"]
                assert set(row["members"]) | set(row["missing"]) == set(world.regions)
            keys = [(row["fragment"], row["version"]) for row in rows]
            assert len(set(keys)) == len(keys), "each round once"
        late = [row["waited_for"] for row in log_of(world, leader)[2:]]
        assert late.count({"region": slow, "phase": "gather"}) > len(late) / 2
        status = world.regions[leader].node.status.document()
        assert status["run"]["total_steps"] == 80
        assert set(status["voters"]) == set(world.regions)
        assert 0 < status["commit_age_seconds"] < 5
        assert status["usual_commit_seconds"] > 0
        assert sum(histogram["buckets"][-1][1] for histogram in status["phase_seconds"].values()) > 0
        await world.finish()
        assert world.regions[leader].node.status.document()["run"]["eta_seconds"] == 0.0

    play(scenario)


def test_a_cut_member_is_missing_and_failed_ballots_have_their_reason(play: Play) -> None:  # noqa: F811
    async def scenario(world: World) -> None:
        await world.until("some rounds", lambda: world.committed() >= 4)
        leader = leader_of(world)
        cut = next(name for name in world.regions if name != leader)
        for peer in world.regions:
            if peer != cut:
                world.network.cut(cut, peer)
        before = world.committed()
        await world.until("rounds without it", lambda: world.committed() >= before + 6)
        rows = log_of(world, leader)
        assert rows[-1]["missing"] == [cut]
        for row in rows:
            if row["outcome"] == "failed":
                assert row["reason"]
        for peer in world.regions:
            if peer != cut:
                world.network.heal(cut, peer)
        await world.finish()

    play(scenario)


def test_the_time_of_a_phase_is_blamed_on_who_was_late() -> None:
    round_ = TrackedRound(0, 1, Ballot(1, 1), ("a", "b"), opened_ns=0, since_ns=0)
    round_.pass_time("gather", ("a", "b"), now_ns=0)
    round_.pass_time("gather", ("b",), now_ns=10 * MS)
    round_.pass_time("reduce", ("a",), now_ns=90 * MS)
    round_.pass_time("commit", (), now_ns=100 * MS)
    assert round_.waited_for() == {"region": "b", "phase": "gather"}
    assert round_.spent_ns == {"gather": 90 * MS, "reduce": 10 * MS}


def test_nobody_is_blamed_for_a_phase_that_mostly_waited_for_someone_unknown() -> None:
    round_ = TrackedRound(0, 1, Ballot(1, 1), (), opened_ns=0, since_ns=0)
    round_.pass_time("gather", ("a",), now_ns=0)
    round_.pass_time("gather", (), now_ns=10 * MS)
    round_.pass_time("reduce", (), now_ns=100 * MS)
    assert round_.waited_for() is None


class Script:
    """A core that is as far as the test says, its clock, and the log of its rounds."""

    def __init__(self, *, leads: bool) -> None:
        self.now_ns = 0
        self.history = SimpleNamespace(rounds_committed=0, versions=[0, 0], roster=Roster.of_voters(("eu", "us")))
        self.leader = SimpleNamespace(is_acting=leads, rounds={})
        self.participant = SimpleNamespace(standing=self.standing)
        self.followed: dict[int, tuple[int, Ballot, str, tuple[str, ...]]] = {}
        core: Any = self
        self.log = RoundLog(core, region="us", now_ns=lambda: self.now_ns, unix_s=lambda: 0.0)

    def standing(self, fragment: int) -> tuple[int, Ballot, str, tuple[str, ...]] | None:
        return self.followed.get(fragment)

    def open(self, version: int, *, ballot: int, fragment: int = 0, late: tuple[str, ...] = ()) -> None:
        round_ = SimpleNamespace(version=version, ballot=Ballot(1, ballot), members=("us",), phase="gather")
        round_.late_regions = lambda _: late
        self.leader.rounds[fragment] = round_
        self.log.observe(ev.TimerFired(), [])

    def commit(self, version: int, effects: Sequence[ev.Effect] = (), *, fragment: int = 0) -> None:
        self.leader.rounds.pop(fragment, None)
        self.followed.pop(fragment, None)
        self.history.versions[fragment] = version
        self.history.rounds_committed += 1
        self.log.observe(ev.TimerFired(), effects)


def test_rounds_that_a_region_catches_up_on_are_no_usual_time() -> None:
    """After an outage they come one right after another; then a minute without one would look like a stall."""
    script = Script(leads=False)
    for version in range(1, 20):
        script.now_ns += 5 * MS
        script.commit(version)
    assert script.log.commit_age_s() == 0.0
    assert script.log.usual_commit_s() is None
    for version in range(20, 23):
        script.now_ns += 60_000 * MS
        script.followed[0] = (version, Ballot(1, version), "gather", ())
        script.log.observe(ev.SnapshotRefused(0, version, ""), [])
        script.commit(version)
    assert script.log.usual_commit_s() == 60.0


def test_of_a_long_run_the_last_rounds_are_kept_and_nothing_else() -> None:
    script = Script(leads=True)
    member: Any = SimpleNamespace(contribution=SimpleNamespace(learner="us"))
    for version in range(1, 301):
        body: Any = SimpleNamespace(fragment=0, version=version, members=(member,))
        script.open(version, ballot=version)
        script.now_ns += 10 * MS
        script.commit(version, [ev.ApplyVersion(body)])
        script.log.observe(ev.VersionApplied(0, version), [])
    rows = script.log.rows()
    assert [row["version"] for row in rows] == list(range(301 - ROUNDS_KEPT, 301))
    assert (rows[-1]["members"], rows[-1]["missing"], rows[-1]["seconds"]) == (["us"], ["eu"], 0.01)
    log = script.log
    assert [log._open, log._applying, log._merged, log._reasons] == [{}] * 4


def test_a_round_that_the_next_version_follows_has_not_failed() -> None:
    script = Script(leads=False)
    for version in (1, 2):
        script.followed[0] = (version, Ballot(1, version), "reduce", ("eu",))
        script.log.observe(ev.SnapshotRefused(0, version, ""), [])
    assert script.log.rows() == [], "a region that catches up hears of the next round before its ledger has the last"


def test_a_ballot_that_another_follows_has_failed_for_its_own_reason() -> None:
    script = Script(leads=True)
    script.open(1, ballot=1, late=("eu",))
    script.log.observe(ev.TimerFired(), [ev.Note("abandoned", "of another event", 0, 1)])
    script.now_ns += 10 * MS
    script.open(1, ballot=2)
    (row,) = script.log.rows()
    assert (row["ballot"], row["outcome"], row["missing"]) == ("1.1", "failed", ["eu"])
    assert row["reason"] == "another ballot took its place"
    script.leader.rounds.clear()
    script.log.observe(ev.TimerFired(), [ev.Note("abandoned", 999 * "long ", 0, 1)])
    assert script.log.rows()[-1]["reason"] == (999 * "long ")[:REASON_CHARS_MAX]


def test_a_fragment_that_a_peer_made_up_is_no_round() -> None:
    script = Script(leads=False)
    for fragment in (-1, 2, 2**40):
        script.followed[fragment] = (1, Ballot(1, 1), "gather", ())
        script.log.observe(ev.SnapshotRefused(fragment, 1, ""), [])
    log = script.log
    assert [log._open, log._applying, log._merged, log._reasons] == [{}] * 4


def test_a_reason_with_a_peers_words_is_fit_to_be_shown() -> None:
    script = Script(leads=True)
    script.open(1, ballot=1)
    script.leader.rounds.clear()
    script.log.observe(ev.TimerFired(), [ev.Note("abandoned", "declined: \x1b[2J\u202e", 0, 1)])
    assert script.log.rows()[-1]["reason"] == "declined: \\x1b[2J\\u202e"
