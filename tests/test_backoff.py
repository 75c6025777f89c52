"""Waits double up to a limit, and begin anew when something was of use."""

import pytest

from diloco_node.backoff import Backoff


def test_each_wait_is_twice_the_one_before_up_to_the_limit() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_reset_it_begins_again() -> None:
    backoff = Backoff(0.5, 3.0)
    waits = [backoff.next_s(), backoff.next_s()]
    backoff.reset()
    assert [*waits, backoff.next_s()] == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(("floor", "waits"), [(0.1, [0.5, 1.0]), (1.25, [1.25, 2.5]), (10.0, [10.0, 3.0])])
def test_a_floor_lifts_this_wait_and_those_that_double_from_it(floor: float, waits: list[float]) -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s(at_least_s=floor), backoff.next_s()] == waits
