"""Learners of different speed in one run: who is in the merges, how often there are any, and when the run ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from diloco_node.core.types import RoundBody
from tests.kit.small_world import Small

SPEEDS = {"mixed": (4, 4, 2, 1), "one_slow": (10, 1, 1, 1), "one_fast": (10, 10, 10, 1)}
"""How many times as long the steps of each region take."""


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as one:
        yield one


def participation(small: Small) -> dict[str, float]:
    rounds = [body for body in small.bodies() if isinstance(body, RoundBody)]
    seen = Counter(member.contribution.learner for body in rounds for member in body.members)
    return {name: seen[name] / len(rounds) for name in small.hosts}


@pytest.mark.parametrize("mix", sorted(SPEEDS))
def test_nobody_starves(patch: pytest.MonkeyPatch, mix: str) -> None:
    small = Small(patch, slower=SPEEDS[mix], rounds_in_flight_max=2)
    small.go(90)
    found = participation(small)
    rounds = sum(isinstance(body, RoundBody) for body in small.bodies())
    print(mix, rounds, found, {name: host.learner.step for name, host in small.hosts.items()})
    assert min(found.values()) > 0.5, found
    small.settle()
