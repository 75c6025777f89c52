"""The log of rounds in whole regions: what took how long, who was waited for, what failed; and what it never does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core import events as ev
from diloco_node.core.types import Ballot
from diloco_node.core.view import PHASES
from diloco_node.daemon.round_log import ROUNDS_KEPT, RoundLog, TrackedRound
from tests.daemon.test_node import Play, World, play  # noqa: F401 - a fixture

MS = 1_000_000


def log_of(world: World, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.regions[name].node.status()["round_log"]
    return found


def leader_of(world: World) -> str:
    return next(name for name, region in world.regions.items() if region.node.core.is_leader)


def test_every_region_times_the_rounds_and_the_leader_knows_whom_it_waits_for(play: Play) -> None:  # noqa: F811
    async def scenario(world: World) -> None:
        await world.until("there is a leader", lambda: any(one.node.core.is_leader for one in world.regions.values()))
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
        status = world.regions[leader].node.status()
        assert status["run"]["total_steps"] == 80
        assert set(status["voters"]) == set(world.regions)
        assert 0 < status["commit_age_seconds"] < 5
        assert status["usual_commit_seconds"] > 0
        assert sum(one["buckets"][-1][1] for one in status["phase_seconds"].values()) > 0
        await world.finish()
        assert world.regions[leader].node.status()["run"]["eta_seconds"] == 0.0

    play(scenario)


def test_a_cut_member_is_missing_and_failed_ballots_have_their_reason(play: Play) -> None:  # noqa: F811
    async def scenario(world: World) -> None:
        await world.until("some rounds", lambda: world.committed() >= 4)
        leader = leader_of(world)
        cut = next(name for name in world.regions if name != leader)
        for other in world.regions:
            if other != cut:
                world.network.cut(cut, other)
        before = world.committed()
        await world.until("rounds without it", lambda: world.committed() >= before + 6)
        rows = log_of(world, leader)
        assert rows[-1]["missing"] == [cut]
        for row in rows:
            if row["outcome"] == "failed":
                assert row["reason"]
        for other in world.regions:
            if other != cut:
                world.network.heal(cut, other)
        await world.finish()

    play(scenario)


def test_the_time_of_a_phase_is_blamed_on_who_was_late() -> None:
    one = TrackedRound(0, 1, Ballot(1, 1), ("a", "b"), opened_ns=0, since_ns=0)
    one.pass_time("gather", ("a", "b"), now_ns=0)
    one.pass_time("gather", ("b",), now_ns=10 * MS)
    one.pass_time("reduce", ("a",), now_ns=90 * MS)
    one.pass_time("commit", (), now_ns=100 * MS)
    assert one.waited_for() == {"region": "b", "phase": "gather"}
    assert one.spent_ns == {"gather": 90 * MS, "reduce": 10 * MS}


def test_nobody_is_blamed_for_a_phase_that_mostly_waited_for_someone_unknown() -> None:
    one = TrackedRound(0, 1, Ballot(1, 1), (), opened_ns=0, since_ns=0)
    one.pass_time("gather", ("a",), now_ns=0)
    one.pass_time("gather", (), now_ns=10 * MS)
    one.pass_time("reduce", (), now_ns=100 * MS)
    assert one.waited_for() is None
    assert ROUNDS_KEPT == 128


def test_rounds_that_a_region_catches_up_on_are_no_usual_time() -> None:
    """After an outage they come one right after another; then a minute without one would look like a stall."""
    now_ns, standing = [0], [None]
    history = SimpleNamespace(rounds_committed=0, versions=[0])
    core: Any = SimpleNamespace(
        history=history,
        leader=SimpleNamespace(is_acting=False),
        participant=SimpleNamespace(standing=lambda _: standing[0]),
    )
    log = RoundLog(core, region="us", regions=("eu", "us"), now_ns=lambda: now_ns[0], unix_s=lambda: 0.0)

    def commit(version: int, *, is_followed: bool) -> None:
        if is_followed:
            standing[0] = (version, Ballot(1, version), "gather", ())
            log.observe(ev.SnapshotRefused(0, version, ""), [])
        standing[0], history.versions, history.rounds_committed = None, [version], version
        log.observe(ev.TimerFired(), [])

    for version in range(1, 20):
        now_ns[0] += 5 * MS
        commit(version, is_followed=False)
    assert log.commit_age_s() == 0.0
    assert log.usual_commit_s() is None
    for version in range(20, 23):
        now_ns[0] += 60_000 * MS
        commit(version, is_followed=True)
    assert log.usual_commit_s() == 60.0
