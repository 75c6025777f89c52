"""The committed past and what it allows: no step counts twice, nothing of an incarnation that is over."""

from dataclasses import replace

import pytest

from diloco_node.core.types import DiscardedBody, FinishedBody
from tests.kit.rounds_kit import GENESIS, committed_round, contribution, history_of


def test_versions_begin_with_genesis_and_grow_with_rounds() -> None:
    history = history_of()
    assert history.versions == [-1, -1]
    history = history_of(GENESIS, committed_round(1, 1, [contribution("a", 1)]), now_ns=13)
    assert history.versions == [0, 1]
    assert history.version_entries == [1, 2]
    assert history.committed_at_ns == [13, 13]
    assert history.rounds_committed == 1
    assert history.rounds_included == {"a": 1}


def test_how_long_contributions_are_is_remembered_for_each_fragment_by_itself() -> None:
    of_one = contribution("a", 1)
    long = replace(of_one, squared_norms=tuple(100.0 for _ in of_one.squared_norms))
    short = replace(of_one, squared_norms=tuple(1.0 for _ in of_one.squared_norms))
    history = history_of(GENESIS, committed_round(1, 1, [long]))
    assert history.recent[1].usual([short]).pieces == tuple(10.0 for _ in of_one.squared_norms)
    assert history.recent[0].usual([short]).pieces == tuple(1.0 for _ in of_one.squared_norms)


def test_end_of_the_run_is_remembered() -> None:
    assert history_of(GENESIS).finished is None
    assert history_of(GENESIS, FinishedBody((0, 0), "enough")).finished == FinishedBody((0, 0), "enough")


FIRST = contribution("a", steps=(0, 10), snapshot=5)
NEXT = contribution("a", base=1, steps=(10, 16), snapshot=6)


def test_next_contribution_follows_the_last_one() -> None:
    history = history_of(GENESIS, committed_round(0, 1, [FIRST]))
    assert history.contribution_fault(NEXT, version=2, incarnation_min=0) == ""


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (replace(NEXT, base_version=0), "base is version 0, it was included in"),
        (replace(NEXT, base_version=2), "base version 2"),
        (replace(NEXT, base_version=-1), "base version -1"),
        (replace(NEXT, step_from=9), "9"),
        (replace(NEXT, step_from=11), "11"),
        (replace(NEXT, step_to=10), "(10, 10]"),
        (replace(NEXT, incarnation=0), "over"),
    ],
)
def test_contribution_that_would_count_steps_twice_is_refused(wrong: object, word: str) -> None:
    history = history_of(GENESIS, committed_round(0, 1, [FIRST]))
    assert word in history.contribution_fault(wrong, version=2, incarnation_min=0)  # type: ignore[arg-type]


def test_older_incarnation_is_refused_once_a_newer_one_is_known() -> None:
    history = history_of(GENESIS)
    assert history.contribution_fault(FIRST, version=1, incarnation_min=1) == ""
    assert "is over" in history.contribution_fault(FIRST, version=1, incarnation_min=2)
    newer = history_of(GENESIS, committed_round(1, 1, [contribution("a", 1, incarnation=2)]))
    assert "is over" in newer.contribution_fault(FIRST, version=1, incarnation_min=0)


def test_discarded_steps_are_covered_like_merged_ones() -> None:
    body = DiscardedBody("a", 1, 0, 10, 14, 256, "died")
    history = history_of(GENESIS, committed_round(0, 1, [FIRST]))
    assert history.account.fault(body) == ""
    history = history_of(GENESIS, committed_round(0, 1, [FIRST]), body)
    assert history.covered_step("a", 1, 0) == 14
    assert history.covered_step("a", 1, 1) == 0
    assert "14" in history.account.fault(body)
    assert "14" in history.contribution_fault(NEXT, version=2, incarnation_min=0)


@pytest.mark.parametrize(
    "wrong",
    [
        DiscardedBody("a", 1, 0, 9, 14, 1, ""),
        DiscardedBody("a", 1, 0, 10, 10, 1, ""),
        DiscardedBody("a", 1, 0, 10, 14, -1, ""),
    ],
)
def test_discard_that_does_not_follow_is_refused(wrong: DiscardedBody) -> None:
    assert history_of(GENESIS, committed_round(0, 1, [FIRST])).account.fault(wrong)


def test_offer_names_the_snapshot_that_the_versions_since_the_base_include() -> None:
    history = history_of(
        GENESIS,
        committed_round(0, 1, [FIRST, contribution("b")]),
        committed_round(0, 2, [contribution("b", base=1, steps=(10, 11), snapshot=9)]),
    )

    def snapshot(base: int, version: int, incarnation: int = 1) -> int:
        return history.included_snapshot("a", incarnation, 0, base=base, version=version)

    assert snapshot(0, 1) == 5
    assert snapshot(0, 2) == 5, "a jump over several versions"
    assert snapshot(1, 2) == -1
    assert snapshot(0, 0) == -1, "the ledger may be ahead of what is applied"
    assert snapshot(0, 2, incarnation=2) == -1, "another incarnation's snapshot"
    assert history.included_snapshot("a", 1, 1, base=0, version=2) == -1
    assert history.last_version("a", 0) == 1
    assert history.last_version("a", 1) == -1


def test_learner_back_from_an_old_checkpoint_gets_its_newest_snapshot() -> None:
    history = history_of(GENESIS, committed_round(0, 1, [FIRST]), committed_round(0, 2, [NEXT]))
    assert history.included_snapshot("a", 1, 0, base=0, version=2) == 6


def test_steps_of_earlier_incarnations_are_counted_once_each() -> None:
    history = history_of(
        GENESIS,
        committed_round(0, 1, [contribution("a", steps=(0, 10))]),
        committed_round(1, 1, [contribution("a", 1, steps=(0, 12))]),
        DiscardedBody("a", 2, 0, 0, 7, 1, "died"),
        DiscardedBody("b", 1, 0, 0, 99, 1, "died"),
    )
    assert history.account.steps_before("a", 3) == 12 + 7
    assert history.account.steps_before("a", 2) == 12
    assert history.account.steps_before("a", 1) == 0
