"""A finished region stays as long as it is of use, and no longer."""

from diloco_node.daemon.linger import LINGER_MAX_S, LINGER_S, Linger


def test_everybody_is_at_the_end_and_the_learner_is_done() -> None:
    linger = Linger(10, now_s=0.0)
    assert linger.is_over([10, 12], learner_is_done=True, serves=0, now_s=0.0)


def test_the_learner_is_waited_for() -> None:
    linger = Linger(10, now_s=0.0)
    assert not linger.is_over([10], learner_is_done=False, serves=0, now_s=0.0)
    assert linger.is_over([10], learner_is_done=True, serves=0, now_s=1.0)


def test_a_region_that_lags_is_waited_for_as_long_as_it_gets_on() -> None:
    linger = Linger(10, now_s=0.0)
    now_s = 0.0
    for index in range(10):
        assert not linger.is_over([index, 10], learner_is_done=True, serves=0, now_s=now_s)
        now_s += LINGER_S - 1
    assert linger.is_over([10, 10], learner_is_done=True, serves=0, now_s=now_s)


def test_a_region_that_stands_still_is_left_alone() -> None:
    linger = Linger(10, now_s=0.0)
    assert not linger.is_over([9], learner_is_done=True, serves=0, now_s=0.0)
    assert not linger.is_over([9], learner_is_done=True, serves=0, now_s=LINGER_S - 0.1)
    assert linger.is_over([9], learner_is_done=True, serves=0, now_s=LINGER_S)


def test_a_long_transfer_is_progress() -> None:
    linger = Linger(10, now_s=0.0)
    for second in range(0, 600, 10):
        assert not linger.is_over([3], learner_is_done=True, serves=1, now_s=float(second))
    assert not linger.is_over([3], learner_is_done=True, serves=0, now_s=600.0)
    assert linger.is_over([3], learner_is_done=True, serves=0, now_s=600.0 + LINGER_S)


def test_nobody_keeps_a_region_for_ever() -> None:
    linger = Linger(10, now_s=100.0)
    assert not linger.is_over([3], learner_is_done=True, serves=1, now_s=100.0 + LINGER_MAX_S - 1)
    assert linger.is_over([3], learner_is_done=True, serves=1, now_s=100.0 + LINGER_MAX_S)


def test_entries_after_the_end_are_no_reason_to_stay() -> None:
    """Leaders change while regions go: who has left can't apply what came after."""
    linger = Linger(10, now_s=0.0)
    assert linger.is_over([10, 11], learner_is_done=True, serves=0, now_s=0.0)
