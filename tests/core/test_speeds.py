"""Learners of different speed in one run: who is in the merges, how often there are any, and when the run ends."""

from collections import Counter

import pytest

from diloco_node.core.types import RoundBody
from tests.kit.small_world import Small

pytestmark = pytest.mark.world

SPEEDS = {"mixed": (4, 4, 2, 1), "one_fast": (10, 10, 10, 1)}
"""How many times as long the steps of each region take."""
# A minute and a half of a run is ten seconds of a core: in the fast tier are the two quickest.


def participation(small: Small) -> dict[str, float]:
    rounds = [body for body in small.bodies() if isinstance(body, RoundBody)]
    records = Counter(member.contribution.learner for body in rounds for member in body.members)
    return {name: records[name] / len(rounds) for name in small.hosts}


@pytest.mark.seeds
@pytest.mark.parametrize("mix", ["one_fast", "mixed"])
def test_nobody_starves_and_rounds_follow_the_majority(patch: pytest.MonkeyPatch, mix: str) -> None:
    small = Small(patch, slower=SPEEDS[mix])
    small.go(90)
    result = participation(small)
    assert min(result.values()) > 0.9, result
    if mix == "mixed":
        assert cycles(small, 90, steps_per_s=2.5) < 9, "the third fastest decides, and makes 2.5 steps a second"
    small.settle()


def cycles(small: Small, seconds: float, *, steps_per_s: float) -> float:
    """Inner steps of a learner of this speed between two merges of one fragment, H = 8 where all is well."""
    rounds = sum(isinstance(body, RoundBody) for body in small.bodies())
    return steps_per_s * seconds / (rounds / 4)


@pytest.mark.seeds
@pytest.mark.parametrize(("times", "steps_max"), [(4, 11), (10, 22)])
def test_one_slow_learner_slows_the_others_by_two_of_its_steps_at_most(
    patch: pytest.MonkeyPatch, times: int, steps_max: int
) -> None:
    """A round waits for a step boundary of each member: with H = 8 below two steps of the slow one that shows."""
    small = Small(patch, slower=(times, 1, 1, 1))
    small.go(5)
    first = [host.learner.step for _, host in sorted(small.hosts.items())][1:]
    small.go(35)
    assert 7 < cycles(small, 40, steps_per_s=10) < steps_max
    assert min(participation(small).values()) > 0.8
    fast = [host.learner.step for name, host in sorted(small.hosts.items())][1:]
    pairs = zip(first, fast, strict=True)
    assert min(last - before for before, last in pairs) > 340, "nobody's training waits: ten steps a second"


@pytest.mark.seeds
def test_a_slow_region_can_lead(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(3)
    names = sorted(small.hosts)
    place = names.index(small.leader())
    slower = tuple(4 if at == place else 1 for at in range(4))
    again = Small(patch, slower=slower)
    again.go(60)
    assert again.leader() == names[place], "the same seed, so the same leader"
    result = participation(again)
    assert min(result.values()) > 0.9, result


def test_a_restart_of_a_slow_learner_does_not_end_the_run(patch: pytest.MonkeyPatch) -> None:
    """The median of the remaining learners is a fast one, which has made all the run's steps long ago."""
    small = Small(patch, slower=SPEEDS["mixed"], steps_max=100)
    small.go(25)
    slow = small.hosts[sorted(small.hosts)[0]]
    assert slow.learner.step < 80
    slow.kill_learner()
    small.go(5)
    slow.start_learner()
    small.go(5)
    assert not any(small.view(name).finished for name in small.hosts)
    small.go(25)
    assert "of 100 steps" in small.view(small.leader()).finished
    totals = sorted(host.learner.step for host in small.hosts.values())
    assert totals[1] >= 95, totals
