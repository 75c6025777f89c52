"""All living objects of some classes: a new one is found, whatever went meanwhile, and nothing new is no search."""

import gc
import random
from typing import Any

import numpy as np
import pytest

from diloco_node.learner.living_objects import LivingObjects


class Kind:
    """Objects that are looked for."""


class Derived(Kind):
    """So are these."""


class Other:
    """These are not."""


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each search of the process."""
    counts: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: counts.append(1) or get_objects())
    return counts


def test_without_new_objects_there_is_no_search(searches: list[int]) -> None:
    members: list[Any] = [Kind(), Derived()]
    living = LivingObjects(Kind)
    assert set(living.now()) == set(members)
    assert set(living.now()) == set(members)
    Other()
    assert set(living.now()) == set(members)
    assert len(searches) == 1


@pytest.mark.parametrize("kind", [Kind, Derived])
def test_a_new_one_is_found(kind: type, searches: list[int]) -> None:
    members = [Kind(), Derived()]
    living = LivingObjects(Kind)
    living.now()
    members.append(kind())
    assert set(living.now()) == set(members)
    members[0] = kind()  # as many as before
    assert set(living.now()) == set(members)
    assert len(searches) == 3


def test_one_of_a_new_class_is_found() -> None:
    members = [Kind()]
    living = LivingObjects(Kind)
    living.now()
    new = type("New", (Derived,), {})()
    assert set(living.now()) == {*members, new}
    del new


def test_objects_are_not_kept() -> None:
    members = [Kind(), Kind()]
    living = LivingObjects(Kind)
    living.now()
    members.pop()
    assert living.now() == members


def test_generators_are_found_and_may_lack_weak_references() -> None:
    draw, drawn = np.random.default_rng(1), random.Random(1)
    living = LivingObjects(np.random.Generator, random.Random)
    for _ in range(2):
        assert {id(draw), id(drawn)} <= {id(item) for item in living.now()}
