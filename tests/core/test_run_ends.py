"""Ends of whole runs in the simulator: by votes, not by one learner alone, and gone on with after the end."""

from dataclasses import replace

import pytest

from diloco_node.core import events as ev
from diloco_node.core.types import ExtendedBody, FinishedBody, RoundBody
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


def ends(small: Small) -> list[FinishedBody]:
    return [body for body in small.bodies() if isinstance(body, FinishedBody)]


def vote(small: Small, *names: str) -> None:
    for name in names:
        small.hosts[name].post(ev.FinishOrdered(f"{name} has seen enough", is_order=False))


def test_one_script_does_not_end_the_run_and_a_majority_does(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(4)
    first, second = small.others()
    vote(small, first)
    small.go(6)
    assert ends(small) == []
    leader = small.view(small.leader())
    assert (
        leader.waiting
        == f"scripts of 1 regions want the end: {first} ({first} has seen enough); it takes 2, or an operator"
    )
    vote(small, second)
    small.go(12)
    reason = "; ".join(f"{name} has seen enough" for name in sorted((first, second)))
    assert [end.reason for end in ends(small)] == [reason]
    assert all(host.learner.finished for host in small.hosts.values())
    assert {small.view(name).finished for name in small.hosts} == {reason}


def test_votes_before_the_first_merge_end_the_run_after_last_rounds(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3, sync_every=500)
    small.go(2)
    vote(small, *small.hosts)
    small.go(25)
    assert len(ends(small)) == 1
    assert all(small.view(name).is_final for name in small.hosts)


def test_a_learner_that_is_alone_trains_past_the_limit_and_does_not_end_the_run(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3, steps_max=60)
    lone = sorted(small.hosts)[0]
    small.go(1)  # all have started by then
    for name, host in small.hosts.items():
        if name != lone:
            host.kill_learner()
    small.go(12)
    assert small.hosts[lone].learner.step > 60
    assert ends(small) == []
    position = small.hosts[lone].core.leader.progress.position(now_ns=small.world.now_ns)
    assert position.steps == 60, "never beyond the limit"
    for host in small.hosts.values():
        host.start_learner()
    small.go(3)
    position = small.hosts[lone].core.leader.progress.position(now_ns=small.world.now_ns)
    assert position.steps == 60, "learners that join later do not take it back"
    small.go(15)
    assert [end.reason for end in ends(small)] == ["the median learner made 60 of 60 steps"]


def test_a_finished_run_goes_on_in_the_same_ledger(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3, steps_max=50)
    small.go(14)
    assert len(ends(small)) == 1
    assert all(small.view(name).is_final for name in small.hosts)
    merged = small.view(small.leader()).tokens_merged
    for host in small.hosts.values():
        host.kill_learner()
        host.kill_daemon()
    for host in small.hosts.values():
        host.setup = replace(host.setup, settings=replace(host.setup.settings, steps_max=110))
        host.start()
    small.go(4)
    assert [body for body in small.bodies() if isinstance(body, ExtendedBody)] == [ExtendedBody(110, 0)]
    assert len(ends(small)) == 1
    small.go(16)
    first, second = ends(small)
    assert (first.steps_max, second.steps_max) == (50, 110)
    assert all(new > old for old, new in zip(first.versions, second.versions, strict=True))
    assert all(small.view(name).is_final for name in small.hosts)
    assert small.view(small.leader()).tokens_merged > merged
    last = {body.fragment: body.version for body in small.bodies() if isinstance(body, RoundBody) and body.is_last}
    assert tuple(last[fragment] for fragment in sorted(last)) == second.versions


def test_regions_with_the_old_limits_stay_finished(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3, steps_max=50)
    small.go(14)
    for host in small.hosts.values():
        host.kill_daemon()
        host.start_daemon()
    small.go(5)
    assert not any(isinstance(body, ExtendedBody) for body in small.bodies())
    assert {small.view(name).finished for name in small.hosts} == {ends(small)[0].reason}
