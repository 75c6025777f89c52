"""Joins that go wrong: several at once, a joiner that dies in each phase or whose disk is full, and who comes back."""

from collections.abc import Callable

import pytest

from diloco_node.core.recovery import fetches
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.world import MS
from tests.core.test_members import merged, order, roster, start, stop
from tests.kit.small_world import Small

pytestmark = pytest.mark.world

PHASES: dict[str, Callable[[Small, str], bool]] = {
    "it does not know the run": lambda small, name: small.hosts[name].core is not None,
    "it fetches the state": lambda small, name: is_fetching(small, name),
    "its folder is not named": lambda small, name: holds_state(small, name),
    "it has no vote": lambda small, name: is_named(small, name),
    "its vote is on its way": lambda small, name: has_order(small, name),
}

GATE = ("it fetches the state", "its vote is on its way")
"""Phases that are tried at each commit; the others with the many seeds."""


def is_fetching(small: Small, name: str) -> bool:
    """A state or payload is on its way to it."""
    core = small.hosts[name].core
    return core is not None and bool(core.view().fetching)


def states_fetched(small: Small, name: str) -> list[int]:
    """Fragments whose state it has sent for, in that order."""
    notes = [note for region, note in small.notes if region == name and note.text.startswith("state from")]
    return [note.fragment for note in notes]


def holds_state(small: Small, name: str) -> bool:
    """It has applied a version of each fragment."""
    core = small.hosts[name].core
    return core is not None and min(core.view().versions) >= 0


def is_named(small: Small, name: str) -> bool:
    """The ledger names its folder."""
    return bool(small.hosts[small.leader()].core.ledger.disks.disk_of(name))


def has_order(small: Small, name: str) -> bool:
    """The order for its vote is taken."""
    return is_named(small, name) and order(small, name, "voter") == ""


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in GATE else pytest.mark.seeds) for phase in PHASES]
)
def test_a_joiner_that_dies_in_a_phase_joins_with_its_next_start(patch: pytest.MonkeyPatch, phase: str) -> None:
    small = Small(patch, 4, joiners=1)
    (joiner,) = small.sim.setup.joiners
    small.go(6)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    until_ns = small.world.now_ns + 20_000 * MS
    small.sim.run_until(lambda: PHASES[phase](small, joiner) or small.world.now_ns > until_ns)
    assert small.world.now_ns <= until_ns, phase
    small.hosts[joiner].kill_daemon()
    small.hosts[joiner].kill_learner()
    count = len(small.bodies())
    small.go(3)
    assert merged(small, count) >= set(small.sim.setup.founders), "the others go on without it"
    small.hosts[joiner].start_daemon()
    small.hosts[joiner].start_learner()
    small.go(8)
    if roster(small, joiner).kind_of(joiner) != "voter":
        assert order(small, joiner, "voter") == ""
        small.go(2)
    assert roster(small, small.leader()).voters == small.sim.setup.regions
    count = len(small.bodies())
    small.go(5)
    assert joiner in merged(small, count)
    small.settle()


def test_a_joiner_that_dies_fetches_no_fragment_again_that_has_come_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetches, "FETCHES_MAX", 1)
    small = Small(patch, 4, joiners=1, summary_entries=12)
    (joiner,) = small.sim.setup.joiners
    host = small.hosts[joiner]
    small.go(12)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)

    def stored() -> set[int]:
        return {fragment for fragment, state in host.disk.states.items() if state.version}

    small.sim.run_until(lambda: len(stored()) == 2)
    kept = stored()
    host.kill_daemon()
    small.notes.clear()
    host.start_daemon()
    small.go(6)
    assert is_named(small, joiner)
    assert set(states_fetched(small, joiner)) == host.disk.states.keys() - kept
    small.settle()


def test_a_joiner_whose_disk_is_full_joins_once_there_is_room(patch: pytest.MonkeyPatch) -> None:
    """With the daemon's effects: a fetch that can't be stored is one that failed, and is made again."""
    small = Small(patch, 4, joiners=1, host_type=DaemonHost)
    (joiner,) = small.sim.setup.joiners
    host = small.hosts[joiner]
    assert isinstance(host, DaemonHost)
    small.go(3)
    assert order(small, joiner, "contributor") == ""
    start(small, joiner)
    small.sim.run_until(lambda: is_fetching(small, joiner))
    host.folder_disk.is_full = True
    count = len(small.bodies())
    small.go(4)
    assert merged(small, count) == set(small.sim.setup.founders), "the others go on without it"
    assert not holds_state(small, joiner)
    assert not is_named(small, joiner)
    host.folder_disk.is_full = False
    small.go(10)
    assert is_named(small, joiner)
    count = len(small.bodies())
    small.go(3)
    assert joiner in merged(small, count)
    small.settle()


def test_a_region_that_was_removed_and_wiped_is_added_again(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4, joiners=1)
    (joiner,) = small.sim.setup.joiners
    host = small.hosts[joiner]
    small.go(6)
    for _ in range(2):
        assert order(small, joiner, "contributor") == ""
        host.is_absent = False
        start(small, joiner)
        small.go(8)
        count = len(small.bodies())
        small.go(5)
        assert joiner in merged(small, count)
        assert order(small, joiner, "former") == ""
        small.go(4)
        assert "was removed from the run" in host.core.farewell.reason
        del small.sim.honest[joiner]
        host.leave()
        host.lose_disk()
    del small.hosts[joiner]
    small.settle()


def test_two_regions_join_at_once(patch: pytest.MonkeyPatch) -> None:
    """Both are started before either is listed, and ordered one right after the other."""
    small = Small(patch, 5, joiners=2)
    small.go(6)
    first, second = small.sim.setup.joiners
    for joiner in (first, second):
        start(small, joiner)
    assert order(small, first, "contributor") == ""
    fault = order(small, second, "contributor")
    assert fault == "" or "change" in fault, fault
    small.go(1)
    if roster(small, small.leader()).kind_of(second) != "contributor":
        assert order(small, second, "contributor") == ""
    small.go(10)
    count = len(small.bodies())
    small.go(5)
    assert merged(small, count) == set(small.hosts)
    for joiner in (first, second):
        assert order(small, joiner, "voter") == ""
        small.go(2)
    assert roster(small, small.leader()).voters == small.sim.setup.regions
    small.settle()


def test_a_leader_that_is_removed_hands_over_and_the_next_leader_removes_it(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 4)
    small.go(6)
    leaver = small.leader()
    assert f"{leaver} leads: asked itself, it hands over" in order(small, leaver, "former")
    stayer = small.others()[0]
    for _ in range(20):  # an operator gives the order again, to the region that leads then
        small.go(1)
        if roster(small, stayer).kind_of(leaver) == "former":
            break
        if any(host.core.ledger.is_leader for host in small.hosts.values()):
            order(small, leaver, "former")
    small.go(2)
    assert small.leader() != leaver
    assert roster(small, small.leader()).kind_of(leaver) == "former"
    stop(small, leaver)
    count = len(small.bodies())
    small.go(5)
    assert merged(small, count) == set(small.hosts)
    small.settle()
