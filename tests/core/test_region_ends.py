"""Regions whose run ends, by steps, tokens or an order."""

import pytest

from diloco_node.core import events as ev
from diloco_node.core.rounds import agenda
from diloco_node.core.types import FinishedBody, RoundBody
from diloco_node.lab.sim.world import SECOND
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


# ---- the end ---------------------------------------------------------------------------------------------------------


def ended(small: Small) -> set[tuple[int, ...]]:
    """The final versions of all regions; every learner has stopped and every file is written."""
    assert all(host.has_final and host.learner.finished for host in small.hosts.values())
    assert all(small.view(name).is_final for name in small.hosts)
    return {small.view(name).versions for name in small.hosts}


def test_run_ends_by_steps_with_equal_final_versions(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, steps_max=80)
    small.go(14)
    assert len(ended(small)) == 1
    view = small.view(small.leader())
    assert "80 steps" in view.finished
    assert view.waiting == "the run is finished"
    last = {body.fragment: body for body in small.bodies() if isinstance(body, RoundBody)}
    assert all(len(body.members) == 4 for body in last.values()), "everybody is in the last round of each fragment"
    assert all(host.learner.step <= 110 for host in small.hosts.values())


def test_run_ends_by_tokens(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, tokens_max=10_000)
    small.go(12)
    ended(small)
    assert small.view(small.leader()).tokens_merged >= 10_000


def test_operator_of_any_region_ends_the_run_even_if_a_region_is_gone(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    dead, orderer = small.others()[:2]
    small.hosts[dead].kill_daemon()
    small.hosts[orderer].post(ev.FinishOrdered("the operator has seen enough"))
    small.go(15)
    assert small.view(orderer).finished == "the operator has seen enough"
    small.hosts[dead].start_daemon()
    small.go(5)
    assert len(ended(small)) == 1


def test_leader_that_dies_while_the_run_ends_is_replaced(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, steps_max=80)
    small.sim.run_until(
        lambda: any(host.core is not None and host.core.leader.is_ending for host in small.hosts.values())
    )
    dead = small.leader()
    small.hosts[dead].kill_daemon()
    small.go(15)
    small.hosts[dead].start_daemon()
    small.go(6)
    assert len(ended(small)) == 1


def test_an_order_outlives_the_region_that_gave_it_and_led(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3, sync_every=40)
    small.go(6)
    dead = small.leader()
    small.hosts[dead].post(ev.FinishOrdered("enough"))
    small.sim.run_until(lambda: small.view(small.leader()).is_ending)
    small.go(0.2)
    small.hosts[dead].kill_daemon()
    small.hosts[dead].kill_learner()
    small.go(20)
    assert [end.reason for end in finished(small)] == ["enough"]


# ---- pauses at the end -----------------------------------------------------------------------------------------------


def finished(small: Small) -> list[FinishedBody]:
    return [body for body in small.bodies() if isinstance(body, FinishedBody)]


def lost_steps(small: Small, limit: int) -> set[str]:
    """Regions with steps up to this one that no version of some fragment includes."""
    covered = small.hosts[small.leader()].core.history.covered_step
    return {name for name in small.hosts for fragment in range(4) if covered(name, 1, fragment) < limit}


@pytest.mark.parametrize("pausing", [1, 2, 3])
def test_the_last_rounds_wait_for_loops_that_evaluate_at_the_end(patch: pytest.MonkeyPatch, pausing: int) -> None:
    small = Small(patch, regions=3, steps_max=60)
    small.go(1)
    for name in sorted(small.hosts)[:pausing]:
        small.pause(name, 12, at_step=60)
    small.go(30)
    assert len(ended(small)) == 1
    assert lost_steps(small, 60) == set()
    assert [note for note in small.alarms() if note.kind == "skipped"] == []


def test_an_order_while_all_loops_evaluate_is_carried_out_when_they_go_on(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(4)
    for name in small.hosts:
        small.pause(name, 15)
    small.go(6)
    steps = min(host.learner.step for host in small.hosts.values())
    small.hosts[small.others()[0]].post(ev.FinishOrdered("enough"))
    small.go(5)
    assert finished(small) == []
    assert "which make no steps" in small.view(small.leader()).waiting
    small.go(20)
    assert len(ended(small)) == 1
    assert lost_steps(small, steps) == set()
    assert small.alarms() == []


@pytest.mark.parametrize("hanging", [1, 3])
def test_a_learner_that_hangs_does_not_keep_the_end(patch: pytest.MonkeyPatch, hanging: int) -> None:
    patch.setattr(agenda, "LAST_WAIT_NS_MAX", 15 * SECOND)
    small = Small(patch, regions=3, steps_max=60)
    small.go(1)
    names = sorted(small.hosts)[:hanging]
    for name in names:
        small.pause(name, 10**6, at_step=60)
    small.go(15)
    assert finished(small) == []
    small.go(25)
    assert len(finished(small)) == 1
    assert lost_steps(small, 60) == set(names)
    cause = "no last round could be held with them" if hanging == 3 else "their contributions to the last round did not"
    text = f"the run ends without the last steps of {', '.join(names)}: {cause}"
    assert small.alarms()
    assert all(note.text.startswith(text) for note in small.alarms())


def test_a_learner_that_makes_a_step_now_and_then_does_not_keep_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agenda, "LAST_WAIT_NS_MAX", 15 * SECOND)
    small = Small(patch, regions=3, steps_max=60)
    liar = sorted(small.hosts)[0]
    small.go(7)
    learner = small.hosts[liar].learner
    learner.take_snapshot = lambda order: None
    for step in range(60, 100):
        small.pause(liar, 4, at_step=step)
    small.go(45)
    assert len(finished(small)) == 1
