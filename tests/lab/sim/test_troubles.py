"""Faults around the daemon's own effects: what they do, and that they stay within what the protocol promises."""

from typing import cast

import pytest

from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.fault_storm import OF_FAST_EFFECTS, SWARM, Chaos
from diloco_node.lab.sim.simulation import Simulation
from diloco_node.lab.sim.troubles import TROUBLES, Troubles
from diloco_node.lab.sim.world import SECOND

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """Three regions that have committed rounds, without any fault so far."""
    made = Simulation(3, regions=3, host_type=DaemonHost)
    made.start()
    made.run_until(lambda: made.checkers.commits >= 6)
    assert not made.checkers.violations
    return made


def test_a_swarm_draws_troubles_of_disks_too() -> None:
    made = Simulation(3, regions=3, host_type=DaemonHost)
    kinds = {kind for odds in TROUBLES.values() for kind in odds}

    def draw() -> set[str]:
        chaos = Chaos(made.world, made.network, made.hosts, made.checkers, schedule=SWARM, mean_gap_events=100)
        return {*chaos._odds}

    drawn = set().union(*(draw() for _ in range(40)))
    assert kinds <= drawn
    assert not drawn & OF_FAST_EFFECTS


def hosts_of(simulation: Simulation) -> list[DaemonHost]:
    return [cast(DaemonHost, host) for host in simulation.hosts.values()]


def wait(simulation: Simulation, ns: int) -> None:
    until_ns = simulation.world.now_ns + ns
    simulation.run_until(lambda: simulation.world.now_ns >= until_ns)


def catches_up(simulation: Simulation, host: DaemonHost) -> bool:
    """Whether there is a moment in the next seconds when it has applied all that is committed."""
    until_ns = simulation.world.now_ns + 8 * SECOND

    def is_level() -> bool:
        return tuple(host.plane.versions) == simulation.checkers.oracle.versions()

    simulation.run_until(lambda: is_level() or simulation.world.now_ns >= until_ns)
    return is_level()


def test_hosts_of_fakes_have_none_of_them() -> None:
    fakes = Simulation(3, regions=3)
    assert Troubles.of(fakes.world, fakes.hosts) == {}


def test_rot_spares_the_last_good_copy_and_strikes_a_fragment_in_one_region(simulation: Simulation) -> None:
    troubles = Troubles(simulation.world, simulation.hosts)
    assert [troubles.rot() for _ in range(40)].count(None) >= 30
    rotten = [{key[0] for key in host.folder_disk.damaged} for host in hosts_of(simulation)]
    assert sum(map(len, rotten)) == len(set().union(*rotten)) > 0
    wait(simulation, 8 * SECOND)
    assert not simulation.checkers.violations


def last_index_of(host: DaemonHost) -> int:
    """Of the last entry on its disk; the ledger may have been summed up meanwhile."""
    return host.folder_disk.base.index + len(host.folder_disk.entries)


def test_a_full_disk_stops_commits_of_nobody_else_and_what_waited_is_written_afterwards(simulation: Simulation) -> None:
    host = next(host for host in hosts_of(simulation) if not host.core.ledger.is_leader)
    host.folder_disk.is_full = True
    last_index, commits = last_index_of(host), simulation.checkers.commits
    wait(simulation, 8 * SECOND)
    assert simulation.checkers.commits > commits
    assert last_index_of(host) == last_index
    host.folder_disk.is_full = False
    wait(simulation, 8 * SECOND)
    assert last_index_of(host) > last_index
    assert not simulation.checkers.violations


def test_one_folder_is_lost_at_a_time_and_its_successor_is_named_and_catches_up(simulation: Simulation) -> None:
    troubles = Troubles(simulation.world, simulation.hosts)
    before = {host.name: host.disk.id for host in hosts_of(simulation)}
    undo = None
    for _ in range(10):
        undo = undo or troubles.lose_disk()
        if undo is None:
            wait(simulation, SECOND)  # until all have what is committed
    assert undo is not None
    assert troubles.lose_disk() is None
    (lost,) = [host for host in hosts_of(simulation) if host.disk.id != before[host.name]]
    undo()
    assert not lost.disk.entries
    assert troubles.lose_disk() is None, "its new folder is not named"
    wait(simulation, 25 * SECOND)
    assert lost.core.may_allot_incarnation
    assert lost.learner is not None
    assert lost.learner.is_training
    assert lost.learner.incarnation > 1
    assert catches_up(simulation, lost)
    assert not simulation.checkers.violations


def test_a_daemon_whose_payload_rotted_before_it_was_applied_starts_again_and_fetches_it(
    simulation: Simulation,
) -> None:
    host = hosts_of(simulation)[0]
    host.kill_daemon()
    newest = max(key for key in host.folder_disk.payloads if key[0] == 0)
    del host.folder_disk.older_states[0, max(host.folder_disk.versions(0))]
    host.folder_disk.find_newest(0)
    host.folder_disk.damaged.add(newest)
    host.start_daemon()
    wait(simulation, 8 * SECOND)
    assert newest not in host.folder_disk.damaged
    assert catches_up(simulation, host)
    assert not simulation.checkers.violations
