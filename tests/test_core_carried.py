"""core/carried.py: what was carried lately, at most, and while a queue stood."""

from __future__ import annotations

from diloco_node.core.carried import FULL_NS, FULL_SAMPLES, Carried
from diloco_node.transport.pacing.budget import NS_PER_S

MS = 1_000_000


def carried_of(*samples: tuple[int, int], step_ms: int = 50, is_queueing: bool = False) -> Carried:
    """(sent, carried) in bytes/s, one sample after the other."""
    carried = Carried()
    for sent, rate in samples:
        carried.remember(step_ms * MS, sent_bytes_per_s=sent, carried_bytes_per_s=rate, is_queueing=is_queueing)
    return carried


def test_nothing_is_known_at_first() -> None:
    carried = Carried()
    assert (carried.full, carried.most, carried.sent, carried.sent_most, carried.lately(NS_PER_S)) == (0, 0, 0, 0, 0)
    assert not carried.is_whole


def test_lately_is_a_mean_and_never_more_than_was_sent() -> None:
    assert carried_of((900, 400), (900, 600), (900, 800)).lately(100 * MS) == 700
    assert carried_of((500, 400), (500, 600), (500, 800)).lately(100 * MS) == 500
    assert carried_of((900, 400)).lately(100 * MS) == 400, "so much as there is"


def test_a_second_is_kept() -> None:
    carried = carried_of(*[(1_000, 9_000)] * 10, *[(3_000, 2_000)] * 10, step_ms=100)
    assert carried.is_whole
    assert (carried.sent, carried.sent_most, carried.most) == (3_000, 3_000, 2_000)


def test_the_most_is_of_a_tenth_of_a_second() -> None:
    assert carried_of((1, 100), (1, 900), (1, 500), (1, 700)).most == 600
    assert carried_of((1, 100)).most == 0


def test_one_bunch_of_acknowledgements_does_not_tell_what_a_full_link_carries() -> None:
    assert carried_of(*[(500, 1_000)] * 4, (500, 9_000), is_queueing=True).full == 1_000
    assert carried_of((500, 1_000), (500, 1_000), (500, 9_000), (500, 9_000), is_queueing=True).full == 1_000
    too_few = FULL_NS // (50 * MS) - 1
    assert carried_of(*[(500, 1_000)] * too_few, is_queueing=True).full == 0
    assert carried_of(*[(500, 1_000)] * 9).full == 0, "there was no queue"


def test_a_queue_that_is_gone_says_nothing_of_the_next_and_one_that_stands_forgets_its_beginning() -> None:
    carried = carried_of(*[(500, 1_000)] * 9, is_queueing=True)
    carried.drained()
    assert carried.full == 0
    assert carried.sent == 500
    carried.clear()
    assert carried.sent == 0
    assert carried_of(*[(1, 1_000)] * FULL_SAMPLES, *[(1, 50)] * FULL_SAMPLES, is_queueing=True).full == 50
