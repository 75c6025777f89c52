"""Regions whose run ends, by steps, tokens or an order."""

import pytest

from diloco_node.core import events as ev
from diloco_node.core.types import (
    RoundBody,
)
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
