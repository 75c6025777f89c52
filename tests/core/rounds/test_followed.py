"""Stripes before their ballot: kept in order, taken once, limited, forgotten with their round."""

from dataclasses import replace

from diloco_node.core.events import ContributionStripeArrived, MergedStripeArrived
from diloco_node.core.rounds.followed import EARLY_MAX, EarlyArrivals
from diloco_node.core.types import Ballot, Stripe
from tests.kit.rounds_kit import contribution


def stripe(number: int, fragment: int = 0) -> ContributionStripeArrived:
    return ContributionStripeArrived(Ballot(1, number), 0, contribution("a", fragment), (0, 2))


def merged(number: int, fragment: int = 0) -> MergedStripeArrived:
    return MergedStripeArrived(Ballot(1, number), 0, fragment, 1, b"d" * 32, Stripe("a", 0, 2), (4.0,))


def test_arrivals_are_taken_once_in_their_order() -> None:
    early = EarlyArrivals()
    assert not early.has_any
    early.keep(merged(1))
    early.keep(stripe(2))
    early.keep(stripe(1))
    assert early.take(Ballot(1, 1), 0) == [merged(1), stripe(1)]
    assert early.take(Ballot(1, 1), 0) == []
    assert early.has_any


def test_another_fragment_is_not_mixed_in() -> None:
    early = EarlyArrivals()
    early.keep(stripe(1, fragment=1))
    assert early.take(Ballot(1, 1), 0) == []


def test_oldest_ballot_is_dropped_when_there_are_too_many() -> None:
    early = EarlyArrivals()
    for number in (3, 1, 2):
        early.keep(stripe(number))
    for _ in range(EARLY_MAX - 3):
        early.keep(merged(4))
    assert early.take(Ballot(1, 1), 0) == [stripe(1)]
    early.keep(stripe(1))
    early.keep(merged(4))
    assert early.take(Ballot(1, 1), 0) == []
    assert early.take(Ballot(1, 2), 0) == [stripe(2)]


def test_one_sender_pushes_out_nobody_else() -> None:
    early = EarlyArrivals()
    early.keep(stripe(1))
    other = replace(merged(9), cut=Stripe("b", 0, 2))
    for number in range(3 * EARLY_MAX):
        early.keep(replace(other, ballot=Ballot(9, number)))
    assert early.take(Ballot(1, 1), 0) == [stripe(1)]
    assert sum(len(events) for events in early._arrivals.values()) == EARLY_MAX
    assert early.take(Ballot(9, 3 * EARLY_MAX - 1), 0), "its newest stay"


def test_round_that_is_over_takes_its_arrivals_with_it() -> None:
    early = EarlyArrivals()
    for number in (1, 2, 3):
        early.keep(stripe(number))
        early.keep(merged(number, fragment=1))
    early.forget(0, Ballot(1, 2))
    assert early.take(Ballot(1, 3), 0) == [stripe(3)]
    assert early.take(Ballot(1, 2), 1) == [merged(2, fragment=1)]
    early.forget(1, Ballot(1, 9))
    assert not early.has_any
