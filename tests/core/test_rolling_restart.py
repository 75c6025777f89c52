"""All regions are started again, one after the other, as for another version of the operating system."""

import pytest

from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.world import SECOND
from tests.core.test_members import order, start
from tests.kit.small_world import SEED, Small
from tests.lab.sim.test_slow_disks import gaps_between_commits

pytestmark = pytest.mark.world

DOWN_S, WATCHED_S = 2, 8


def test_all_regions_start_again_in_turn_and_merging_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three voters and a contributor, each stopped in order: the leader hands over. The checkers see a round that is
    lost, or merged twice."""
    small = Small(monkeypatch, 4, joiners=1, host_type=DaemonHost)
    (joiner,) = small.sim.setup.joiners
    settings = small.sim.setup.settings
    small.go(6)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    small.go(8)
    usual = gaps_between_commits(small, WATCHED_S)
    # One ballot that has the region may fail; and a leader that goes is followed by an election at worst.
    limit_s = (settings.ballot_deadline_min_ns + settings.election_timeout_ns) / SECOND + 2 * max(usual)
    leaders = {small.leader()}
    for name, host in sorted(small.hosts.items()):
        host.kill_learner()
        host.stop_daemon()
        small.world.after(DOWN_S * SECOND, None, host.start)
        gaps = gaps_between_commits(small, WATCHED_S)
        assert max(gaps) <= limit_s, f"seed {SEED}: {name} was away, usual are {usual}"
        assert host.core is not None
        leaders.add(small.leader())
    assert len(leaders) > 1, "the leader was among them"
    small.settle()
