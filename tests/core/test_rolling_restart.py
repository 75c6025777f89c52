"""All regions are started again: one after the other for another operating system, all at once for another wire."""

from dataclasses import replace
from itertools import permutations

import pytest

from diloco_node.errors import PeerIncompatible
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.world import SECOND
from diloco_node.wire.envelope import Hello, Lane, check_hello
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from tests.core.test_members import merged, order, start
from tests.kit.small_world import SEED, Small
from tests.lab.sim.test_slow_disks import gaps_between_commits

pytestmark = pytest.mark.world

DOWN_S, WATCHED_S = 2, 5


def test_all_regions_start_again_in_turn_and_merging_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three voters and a contributor, each stopped in order: the leader hands over. The checkers see a round that is
    lost, or merged twice."""
    small = Small(monkeypatch, 4, joiners=1, host_type=DaemonHost)
    (joiner,) = small.sim.setup.joiners
    settings = small.sim.setup.settings
    small.go(3)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    small.go(5)
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


def differ(first: str, second: str, upgraded: set[str]) -> bool:
    """Whether two regions refuse each other's hello, as only those of two versions do here."""
    hello = Hello(PROTOCOL_VERSION, "run", "", "", "settings", "manifest", bytes(16), Lane.CONTROL, 0)
    ours, theirs = (
        replace(hello, region=name, protocol_version=PROTOCOL_VERSION + (name in upgraded)) for name in (first, second)
    )
    try:
        check_hello(ours, theirs, certificate_region=second)
    except PeerIncompatible:
        return True
    return False


def test_an_upgrade_of_the_wire_stops_all_regions_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is upgraded before the others waits for them, and costs them no round."""
    small = Small(monkeypatch, 4, host_type=DaemonHost)
    small.go(8)
    early, *late = small.others()
    late.append(small.leader())
    upgraded: set[str] = set()
    link_all = small.sim.network.cut_all([])
    for names in ([early], late):
        for name in names:
            small.hosts[name].kill_learner()
            small.hosts[name].stop_daemon()
        small.go(DOWN_S)
        before = small.bodies()
        link_all()
        upgraded.update(names)
        link_all = small.sim.network.cut_all([p for p in permutations(small.hosts, 2) if differ(*p, upgraded)])
        for name in names:
            small.hosts[name].start()
        small.go(WATCHED_S)
        assert small.bodies()[: len(before)] == before
        assert merged(small, len(before)) == (set(late) if names == [early] else set(small.hosts)), f"seed {SEED}"
    small.settle()
