"""A region whose disk takes ten seconds for a sync: how long the others wait for it, in virtual time."""

from itertools import pairwise

import pytest

from diloco_node.core.types import RoundBody
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.world import SECOND
from tests.kit.small_world import SEED, Small

pytestmark = pytest.mark.world

SLOW = 2500
"""Times as slow as usual: syncs take 1 to 20 s."""

USUAL_S = 4
SLOW_S = 20
"""Some syncs come through in this time, so that the region seems to be back."""


def gaps_between_commits(small: Small, seconds: int) -> list[float]:
    """The times between commits from now on, in seconds; the last one ends with the time given."""
    marks, commits = [small.world.now_ns], small.sim.checkers.commits
    until_ns = marks[0] + seconds * SECOND

    def note() -> bool:
        nonlocal commits
        if small.sim.checkers.commits > commits:
            commits = small.sim.checkers.commits
            marks.append(small.world.now_ns)
        return small.world.now_ns > until_ns

    small.sim.run_until(note)
    marks.append(small.world.now_ns)
    return [(after - before) / SECOND for before, after in pairwise(marks)]


@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_a_slow_disk_costs_the_others_one_ballot_at_most(monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    small = Small(monkeypatch, 3, host_type=DaemonHost)
    settings = small.sim.setup.settings
    small.go(4)
    usual = gaps_between_commits(small, USUAL_S)
    name = small.leader() if leads else small.others()[0]
    small.hosts[name].disk_factor = SLOW
    gaps = gaps_between_commits(small, SLOW_S)
    # A follower fails one ballot, before that nobody can know. A leader gets three heartbeats, and gives its place away
    # with the next one; two more are for the election and the first ballot of its successor.
    known_ns = 6 * settings.heartbeat_ns if leads else settings.ballot_deadline_min_ns
    known_s = known_ns / SECOND
    assert max(gaps) <= known_s + 2 * max(usual), f"seed {SEED}"
    # One more or less begins in the usual time.
    assert len(gaps) >= (len(usual) - 1) / USUAL_S * (SLOW_S - 1.6 * known_s), f"seed {SEED}"
    assert small.sim.checkers.violations == [], f"seed {SEED}"


def test_a_daemon_sums_and_sends_while_all_threads_for_files_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(monkeypatch, 3, host_type=DaemonHost)
    small.go(4)
    usual = gaps_between_commits(small, USUAL_S)
    host = small.hosts[small.others()[0]]
    assert isinstance(host, DaemonHost)
    monkeypatch.setattr(host.hands.disk.files, "_free", 0)
    # For a second it is a member and a reducer of each round, then it counts as behind.
    known = len(small.bodies())
    assert max(gaps_between_commits(small, 1)) <= 2 * max(usual), f"seed {SEED}"
    rounds = [body for body in small.bodies()[known:] if isinstance(body, RoundBody)]
    assert sum(host.name in {cut.reducer for cut in body.stripes} for body in rounds) >= 2
