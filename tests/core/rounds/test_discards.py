"""Steps that nobody will merge: found by the region, booked once by the leader."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_node.core.messages import Contributed
from diloco_node.core.rounds.claim_limits import INCARNATIONS_AHEAD_MAX, STEPS_MAX
from diloco_node.core.rounds.discards import BOOKING_MAX, DEATHS_AT_ONCE, REPORTED_MAX, DiscardDesk, DiscardReporter
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import DiscardedBody
from tests.kit.leader_kit import Office, offered
from tests.kit.rounds_kit import (
    GENESIS,
    SECOND,
    Ledger,
    committed_round,
    context_of,
    contribution,
    history_of,
    position,
    status,
)


def test_dead_incarnation_is_reported_from_its_last_inclusion_on() -> None:
    history = history_of(GENESIS, committed_round(0, 1, [contribution("a", steps=(0, 10))]))
    reporter = DiscardReporter(context_of(history))
    assert reporter.bodies() == ()
    reporter.on_attach(status(0, incarnation=2), ((1, 13, 13 * 64),))
    assert reporter.bodies() == (
        DiscardedBody("a", 1, 0, 10, 13, 3 * 64, "its learner ended before it was merged"),
        DiscardedBody("a", 1, 1, 0, 13, 13 * 64, "its learner ended before it was merged"),
    )


def test_report_ends_when_the_ledger_has_it() -> None:
    history, ledger = history_of(), Ledger()
    reporter = DiscardReporter(context_of(history))
    reporter.on_attach(status(0, incarnation=2), ((1, 5, 320),))
    while reporter.bodies():
        history.apply(ledger.add(reporter.bodies()[0]), now_ns=0)
    assert len(ledger.entries) == 2


def test_an_incarnation_that_is_booked_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    history, ledger = history_of(), Ledger()
    reporter = DiscardReporter(context_of(history))
    looked: list[int] = []
    real = history.account.discards_due

    def counted(learner: str, incarnation: int, **kwargs: Any) -> tuple[DiscardedBody, ...]:
        looked.append(incarnation)
        return real(learner, incarnation, **kwargs)

    monkeypatch.setattr(history.account, "discards_due", counted)
    count = 3 * REPORTED_MAX
    reporter.on_attach(
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
    reporter = DiscardReporter(context_of(history))
    reporter.on_attach(status(19, f0=position(base=1, mark=10, step=10, tokens=640)), ((1, 19, 19),))
    assert reporter.bodies() == ()
    assert not reporter.has_news()


def test_overwritten_steps_are_reported_once_the_ledger_knows_the_version() -> None:
    taken = contribution("a", steps=(0, 10))
    reporter = DiscardReporter(context_of(history_of(GENESIS)))
    applied = status(14, f0=position(base=1, mark=12, step=12, tokens=12 * 64))
    reporter.learner_changed(applied)
    assert reporter.bodies() == (), "version 1 may include it: the ledger here does not say yet"
    history = history_of(GENESIS, committed_round(0, 1, [taken]))
    reporter = DiscardReporter(context_of(history))
    reporter.learner_changed(applied)
    assert reporter.has_news()
    assert not reporter.has_news(), "once; it is repeated with the heartbeats"
    (body,) = reporter.bodies()
    assert (body.incarnation, body.fragment, body.step_from, body.step_to, body.tokens) == (1, 0, 10, 12, 128)
    reporter.learner_changed(None)
    assert reporter.bodies() == ()


BODY = DiscardedBody("a", 1, 0, 0, 5, 320, "died")


def test_a_region_sees_in_its_ledger_that_steps_were_booked_which_its_living_learner_never_made() -> None:
    history, ledger = history_of(), Ledger()
    reporter = DiscardReporter(context_of(history))
    for learner, incarnation, steps in (("b", 1, 1 << 20), ("a", 1, 1 << 20), ("a", 2, 9)):
        history.apply(ledger.add(DiscardedBody(learner, incarnation, 1, 0, steps, 0, "it pleases me")), now_ns=0)
        assert reporter.overbooked() == ""
        reporter.learner_changed(status(9, incarnation=2))
    assert reporter.overbooked() == ""
    reporter.learner_changed(status(8, incarnation=2))
    words = "steps up to 9 of incarnation 2 as lost in fragment 1, and the learner has made 8"
    assert reporter.overbooked() == f"the ledger has {words}"


def test_interval_is_booked_once() -> None:
    history, ledger = history_of(), Ledger()
    desk = DiscardDesk(history)
    assert desk.accept(BODY, now_ns=0)
    assert not desk.accept(BODY, now_ns=0), "it is in the log"
    assert desk.is_booking(contribution("a"))
    assert not desk.is_booking(contribution("a", incarnation=2))
    assert not desk.is_booking(contribution("a", 1))
    history.apply(ledger.add(BODY), now_ns=0)
    desk.on_commit(BODY)
    assert not desk.is_booking(contribution("a"))
    assert not desk.accept(BODY, now_ns=0), "it is in the ledger"


def test_interval_that_does_not_follow_is_not_booked() -> None:
    assert not DiscardDesk(history_of()).accept(DiscardedBody("a", 1, 0, 1, 5, 320, "died"), now_ns=0)


def test_leader_that_comes_back_starts_afresh() -> None:
    desk = DiscardDesk(history_of())
    desk.accept(BODY, now_ns=0)
    desk.clear()
    assert desk.accept(BODY, now_ns=0)


def test_intervals_in_the_log_are_limited() -> None:
    desk = DiscardDesk(history_of())
    accepted = [
        desk.accept(DiscardedBody(f"r{number}", 1, 0, 0, 5, 1, ""), now_ns=0) for number in range(BOOKING_MAX + 1)
    ]
    assert accepted == [True] * BOOKING_MAX + [False]


def booked(desk: DiscardDesk, history: RoundHistory, ledger: Ledger, *, seconds: int, rounds: int = 0) -> int:
    """How many intervals of one step each a region gets into the ledger that reports the next one again and again."""
    count = 0
    for _ in range(rounds):
        desk.on_round()
    for tick in range(5 * seconds):
        body = DiscardedBody("a", 1, 0, count, count + 1, 1, "again")
        while desk.accept(body, now_ns=(tick + 1) * SECOND // 5):
            history.apply(ledger.add(body), now_ns=0)
            desk.on_commit(body)
            count += 1
            body = DiscardedBody("a", 1, 0, count, count + 1, 1, "again")
    return count


def test_a_region_that_reports_discards_again_and_again_does_not_fill_the_ledger() -> None:
    history, ledger = history_of(), Ledger()
    desk = DiscardDesk(history)
    assert booked(desk, history, ledger, seconds=10) == DEATHS_AT_ONCE * 2 + 10, "two fragments, one a second"
    assert desk.accept(replace(BODY, learner="b"), now_ns=10 * SECOND), "the others are not to suffer for it"


def test_each_round_allows_an_interval_more_for_what_overwrite_throws_away() -> None:
    history, ledger = history_of(), Ledger()
    desk = DiscardDesk(history)
    assert booked(desk, history, ledger, seconds=1) == DEATHS_AT_ONCE * 2 + 1
    for _ in range(7):
        desk.on_round()
    count = len(ledger.entries)
    accepted = 0
    while desk.accept(DiscardedBody("a", 1, 0, count, count + 1, 1, "x"), now_ns=SECOND):
        body = DiscardedBody("a", 1, 0, count, count + 1, 1, "x")
        history.apply(ledger.add(body), now_ns=0)
        desk.on_commit(body)
        count, accepted = count + 1, accepted + 1
    assert accepted == DEATHS_AT_ONCE * 2, "what was not used up is not saved beyond the limit"


def test_only_the_life_that_an_open_round_has_waits_for_it_and_those_after_it() -> None:
    """Its account is closed when so many lives have followed, whether or not it is whole."""
    office = Office()
    announcement = office.open()
    office.answer("b", Contributed(announcement.ballot, replace(offered("b"), incarnation=3)))
    office.report(status(1, incarnation=5), "b")
    lives = [DiscardedBody("b", incarnation, 0, 0, 5, 320, "died") for incarnation in (1, 2, 3, 4)]
    office.leader.take_discards(lives, now_ns=office.now_ns)
    assert list(office.leader.proposals) == lives[:2]


@pytest.mark.parametrize(
    "lie",
    [
        replace(BODY, incarnation=INCARNATIONS_AHEAD_MAX + 1),
        replace(BODY, incarnation=2**63 - 1),
        replace(BODY, step_to=STEPS_MAX + 1),
        replace(BODY, incarnation=-1),
    ],
)
def test_what_no_learner_can_have_lost_is_not_booked(lie: DiscardedBody) -> None:
    assert not DiscardDesk(history_of()).accept(lie, now_ns=0)
