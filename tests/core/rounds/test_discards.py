"""Steps that nobody will merge: found by the region, booked once by the leader."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_node.core.rounds.discards import BOOKING_MAX, REPORTED_MAX, DiscardDesk, DiscardReporter
from diloco_node.core.types import DiscardedBody
from tests.kit.rounds_kit import GENESIS, Ledger, committed_round, contribution, history_of, position, status


def test_dead_incarnation_is_reported_from_its_last_inclusion_on() -> None:
    history = history_of(GENESIS, committed_round(0, 1, [contribution("a", steps=(0, 10))]))
    reporter = DiscardReporter(region="a", fragments=2, history=history)
    assert reporter.bodies() == ()
    reporter.attached(status(0, incarnation=2), ((1, 13, 13 * 64),))
    assert reporter.bodies() == (
        DiscardedBody("a", 1, 0, 10, 13, 3 * 64, "the learner died"),
        DiscardedBody("a", 1, 1, 0, 13, 13 * 64, "the learner died"),
    )


def test_report_ends_when_the_ledger_has_it() -> None:
    history, ledger = history_of(), Ledger()
    reporter = DiscardReporter(region="a", fragments=2, history=history)
    reporter.attached(status(0, incarnation=2), ((1, 5, 320),))
    while reporter.bodies():
        history.apply(ledger.add(reporter.bodies()[0]), now_ns=0)
    assert len(ledger.entries) == 2


def test_an_incarnation_that_is_booked_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    history, ledger = history_of(), Ledger()
    reporter = DiscardReporter(region="a", fragments=2, history=history)
    looked: list[int] = []
    real = history.account.discards_due

    def counted(learner: str, incarnation: int, **kwargs: Any) -> tuple[DiscardedBody, ...]:
        looked.append(incarnation)
        return real(learner, incarnation, **kwargs)

    monkeypatch.setattr(history.account, "discards_due", counted)
    count = 3 * REPORTED_MAX
    reporter.attached(
        status(0, incarnation=count + 1), tuple((number, number % 2, 64) for number in range(1, count + 1))
    )
    assert len(reporter.bodies()) == REPORTED_MAX
    assert len(looked) == REPORTED_MAX - 1, "two fragments of every second incarnation: the rest is asked for later"
    while bodies := reporter.bodies():
        for body in bodies:
            history.apply(ledger.add(body), now_ns=0)
    assert len(ledger.entries) == count, "one step of every second incarnation, in both fragments"
    looked.clear()
    assert reporter.bodies() == ()
    assert looked == []


def test_what_a_living_learner_carries_is_not_reported() -> None:
    history = history_of(GENESIS, committed_round(0, 1, [contribution("a", steps=(0, 10))]))
    reporter = DiscardReporter(region="a", fragments=2, history=history)
    reporter.attached(status(19, f0=position(base=1, mark=10, step=10, tokens=640)), ((1, 19, 19),))
    assert reporter.bodies() == ()
    assert not reporter.has_news()


def test_overwritten_steps_are_reported_once_the_ledger_knows_the_version() -> None:
    taken = contribution("a", steps=(0, 10))
    reporter = DiscardReporter(region="a", fragments=2, history=history_of(GENESIS))
    applied = status(14, f0=position(base=1, mark=12, step=12, tokens=12 * 64))
    reporter.learner_changed(applied)
    assert reporter.bodies() == (), "version 1 may include it: the ledger here does not say yet"
    history = history_of(GENESIS, committed_round(0, 1, [taken]))
    reporter = DiscardReporter(region="a", fragments=2, history=history)
    reporter.learner_changed(applied)
    assert reporter.has_news()
    assert not reporter.has_news(), "once; it is repeated with the heartbeats"
    (body,) = reporter.bodies()
    assert (body.incarnation, body.fragment, body.step_from, body.step_to, body.tokens) == (1, 0, 10, 12, 128)
    reporter.learner_changed(None)
    assert reporter.bodies() == ()


BODY = DiscardedBody("a", 1, 0, 0, 5, 320, "died")


def test_interval_is_booked_once() -> None:
    history, ledger = history_of(), Ledger()
    desk = DiscardDesk(history)
    assert desk.accept(BODY)
    assert not desk.accept(BODY), "it is in the log"
    assert desk.is_booking(contribution("a"))
    assert not desk.is_booking(contribution("a", incarnation=2))
    assert not desk.is_booking(contribution("a", 1))
    history.apply(ledger.add(BODY), now_ns=0)
    desk.booked(BODY)
    assert not desk.is_booking(contribution("a"))
    assert not desk.accept(BODY), "it is in the ledger"


def test_interval_that_does_not_follow_is_not_booked() -> None:
    assert not DiscardDesk(history_of()).accept(DiscardedBody("a", 1, 0, 1, 5, 320, "died"))


def test_leader_that_comes_back_starts_afresh() -> None:
    desk = DiscardDesk(history_of())
    desk.accept(BODY)
    desk.clear()
    assert desk.accept(BODY)


def test_intervals_in_the_log_are_limited() -> None:
    desk = DiscardDesk(history_of())
    accepted = [desk.accept(DiscardedBody(f"r{number}", 1, 0, 0, 5, 1, "")) for number in range(BOOKING_MAX + 1)]
    assert accepted == [True] * BOOKING_MAX + [False]
