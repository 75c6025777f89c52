"""core/ledger/account.py: which steps are booked, which may be, and that entries can be taken back."""

import random
from dataclasses import replace

import pytest

from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.summary import Included
from diloco_node.core.types import Contribution, DiscardedBody, EntryBody, LeaderBody
from tests.kit.account_kit import TOKENS_PER_STEP, account_round, offer, seal_all


def applied(*bodies: EntryBody) -> Account:
    account = Account()
    for entry in seal_all(*bodies):
        account.take(entry)
    return account


def test_last_inclusion_is_the_newest_of_that_learner_and_fragment() -> None:
    account = applied(
        LeaderBody("a"),
        account_round(1, offer("a", 0, 0, 10, snapshot=3), offer("b", 0, 0, 8, snapshot=2)),
        account_round(2, offer("a", 0, 10, 25, base=1, snapshot=4)),
    )
    assert account.last_inclusion("a", 0) == Included("a", 0, 1, 2, 4, 25, 25 * TOKENS_PER_STEP)
    assert account.last_inclusion("b", 0) == Included("b", 0, 1, 1, 2, 8, 8 * TOKENS_PER_STEP)
    assert account.last_inclusion("a", 1) is None


def test_discards_count_as_covered_but_not_as_included() -> None:
    account = applied(
        account_round(1, offer("a", 0, 0, 10)), DiscardedBody("a", 1, 0, 10, 13, 3 * TOKENS_PER_STEP, "killed")
    )
    assert account.covered("a", 1, 0) == (13, 13 * TOKENS_PER_STEP)
    inclusion = account.last_inclusion("a", 0)
    assert inclusion is not None
    assert inclusion.step_to == 10
    assert account.merged_tokens(1) == 10 * TOKENS_PER_STEP


@pytest.mark.parametrize("late", [(), (DiscardedBody("a", 1, 0, 10, 13, 1, "died"),)])
def test_what_a_living_learner_gave_up_stays_known_when_an_earlier_life_is_booked_late(
    late: tuple[DiscardedBody, ...],
) -> None:
    """A merge that is decided, and not in the log yet, goes by it."""
    account = applied(
        account_round(1, offer("a", 0, 0, 10)),
        DiscardedBody("a", 2, 0, 0, 5, 1, "overwritten"),
        account_round(2, offer("b", 0, 0, 8)),
        *late,
    )
    assert account.carried_since(offer("a", 0, 5, 9, incarnation=2, base=1)) == 1


def test_a_new_incarnation_counts_from_zero() -> None:
    account = applied(
        account_round(1, offer("a", 0, 0, 10)), account_round(2, offer("a", 0, 0, 7, incarnation=2, base=1))
    )
    assert account.covered("a", 2, 0) == (7, 7 * TOKENS_PER_STEP)
    inclusion = account.last_inclusion("a", 0)
    assert inclusion is not None
    assert (inclusion.incarnation, inclusion.tokens_to) == (2, 7 * TOKENS_PER_STEP)


def test_entries_are_applied_once_and_in_order() -> None:
    entries = seal_all(LeaderBody("a"), LeaderBody("b"))
    account = Account()
    with pytest.raises(AssertionError):
        account.take(entries[1])
    account.take(entries[0])
    with pytest.raises(AssertionError):
        account.take(entries[0])
    assert account.index == 1


@pytest.mark.parametrize(
    ("contribution", "reason"),
    [
        (offer("a", 0, 10, 12, base=1), ""),
        (offer("a", 0, 9, 12, base=1), "(9, 12] of a's incarnation 1 does not follow step 10"),
        (offer("a", 0, 11, 12, base=1), "(11, 12] of a's incarnation 1 does not follow step 10"),
        (offer("a", 0, 10, 10, base=1), "(10, 10] of a's incarnation 1 does not follow"),
        (offer("a", 0, 10, 12, base=0), "base is version 0, it was included in 1"),
        (offer("a", 0, 0, 12, base=1, incarnation=0), "incarnation 0 of a after 1"),
        (offer("a", 0, 0, 12, base=0, incarnation=2), ""),
        (offer("b", 0, 0, 12), ""),
        (offer("a", 1, 0, 12), ""),
    ],
)
def test_a_fault_names_what_would_count_twice(contribution: Contribution, reason: str) -> None:
    account = applied(account_round(1, offer("a", 0, 0, 10)))
    fault = account.fault(contribution)
    assert (reason in fault) if reason else (fault == "")


@pytest.mark.parametrize(
    ("discard", "reason"),
    [
        (DiscardedBody("a", 1, 0, 10, 12, 1, "died"), ""),
        (DiscardedBody("a", 1, 0, 9, 12, 1, "died"), "does not follow step 10"),
        (DiscardedBody("a", 1, 0, 10, 10, 1, "died"), "does not follow"),
        (DiscardedBody("a", 1, 0, 10, 12, -1, "died"), "does not follow"),
        (DiscardedBody("a", 0, 0, 0, 12, 1, "died"), ""),
    ],
)
def test_a_discard_follows_the_account_of_its_incarnation(discard: DiscardedBody, reason: str) -> None:
    account = applied(account_round(1, offer("a", 0, 0, 10)))
    fault = account.fault(discard)
    assert (reason in fault) if reason else (fault == "")


def test_discards_due_are_what_no_merge_holds() -> None:
    account = applied(account_round(1, offer("a", 0, 0, 10)), account_round(1, offer("a", 1, 0, 14)))
    due = account.discards_due("a", 1, steps=14, tokens=14 * TOKENS_PER_STEP, fragments=3, reason="killed")
    assert due == (
        DiscardedBody("a", 1, 0, 10, 14, 4 * TOKENS_PER_STEP, "killed"),
        DiscardedBody("a", 1, 2, 0, 14, 14 * TOKENS_PER_STEP, "killed"),
    )


def test_merged_tokens_are_a_mean_over_the_fragments() -> None:
    account = applied(
        account_round(1, offer("a", 0, 0, 10)),
        account_round(2, offer("a", 0, 10, 21, base=1)),
        account_round(1, offer("b", 1, 0, 4)),
    )
    assert account.merged_tokens(2) == (10 + 11 + 4) * TOKENS_PER_STEP // 2


def test_a_member_of_which_nothing_counts_is_discarded() -> None:
    """A contribution of twenty times the usual length weighs 0; its learner goes on from a result without it."""
    body = account_round(1, offer("a", 0, 0, 10), offer("b", 0, 0, 8))
    members = (body.members[0], replace(body.members[1], weight=0.0))
    account = applied(replace(body, members=members))
    assert account.totals(1) == ((10 * TOKENS_PER_STEP,), (8 * TOKENS_PER_STEP,))
    inclusion = account.last_inclusion("b", 0)
    assert inclusion is not None
    assert inclusion.step_to == 8


def state_of(account: Account) -> tuple[object, ...]:
    """Everything that a summary says of an account, and where it is."""
    lines = (account.covered_lines(2), account.closed_lines(), account.included_lines(), account.totals(2))
    return account.index, lines, [account.newest_incarnation(name) for name in "ab"]


def random_bodies(rng: random.Random, number: int) -> list[EntryBody]:
    """Rounds and discards that follow each other, of learners that die often."""
    steps: dict[tuple[str, int, int], int] = {}
    lives, bodies = dict.fromkeys("ab", 0), []
    for version in range(1, number + 1):
        name, fragment = rng.choice("ab"), rng.randrange(2)
        lives[name] += rng.random() < 0.5
        line = (name, lives[name], fragment)
        step_from = steps.get(line, 0)
        steps[line] = step_to = step_from + rng.randint(1, 5)
        if rng.random() < 0.5:
            bodies.append(DiscardedBody(*line, step_from, step_to, rng.randrange(100), "died"))
        else:
            bodies.append(account_round(version, offer(name, fragment, step_from, step_to, incarnation=lives[name])))
    return bodies


@pytest.mark.parametrize("seed", range(10))
def test_closing_old_lives_changes_no_sum_of_steps_or_tokens(seed: int) -> None:
    entries = seal_all(*random_bodies(random.Random(seed), 80))
    closed, whole = Account(), Account()
    for entry in entries:
        closed.take(entry)
        whole.take(entry)
        closed.close_old(2)
        for name in "ab":
            newest = whole.newest_incarnation(name)
            for incarnation in (newest, newest + 1):
                assert closed.steps_before(name, incarnation) == whole.steps_before(name, incarnation), f"seed {seed}"
            assert closed.covered_tokens(name, 1) == whole.covered_tokens(name, 1), f"seed {seed}"
    assert all(line.steps and line.tokens for line in closed.closed_lines())
    assert len(closed.closed_lines()) == 2, "no incarnation was closed"


@pytest.mark.parametrize("seed", range(10))
def test_entries_that_are_taken_back_leave_no_trace(seed: int) -> None:
    rng = random.Random(seed)
    entries = seal_all(*random_bodies(rng, 60))
    states, account, settled = [state_of(Account())], Account(), 0
    while account.index < len(entries):
        account.take(entries[account.index])
        if account.index % 5 == 0:
            account.close_old(2)
        del states[account.index :]
        states.append(state_of(account))
        if rng.random() < 0.2:
            settled = rng.randint(settled, account.index)
            account.settle(settled)
        if rng.random() < 0.2:
            account.back_to(rng.randint(settled, account.index))
            assert state_of(account) == states[account.index], f"seed {seed}"
    assert account.closed_lines(), "no incarnation was closed"
    with pytest.raises(AssertionError):
        account.back_to(settled - 1)
