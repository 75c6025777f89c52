"""The book of suspicion: who is left out, for how long, and how a region comes back."""

import pytest

from diloco_node.core.messages import LeftOut
from diloco_node.core.rounds.judge import Judge
from diloco_node.core.rounds.suspicion import (
    CLEAN_BALLOTS,
    DOUBLINGS_MAX,
    LEFT_OUT_SHOWN_MAX,
    PAUSE_BALLOTS,
    REASON_SHOWN_MAX,
    BallotRole,
    Blame,
    SuspicionBook,
)
from tests.kit.rounds_kit import SECOND, context_of, history_of

PAUSE_NS = PAUSE_BALLOTS * SECOND
LATE = Blame("b", BallotRole.MEMBER, "late")
LIED = Blame("b", BallotRole.REDUCER, "lied", is_proved=True)


def book() -> SuspicionBook:
    return SuspicionBook(ballot_ns=SECOND)


def fail(suspicions: SuspicionBook, now_ns: int, blame: Blame = LATE) -> int | None:
    return suspicions.blame(blame, opened_at_ns=now_ns - 1, now_ns=now_ns)


def test_the_second_failure_in_a_row_leaves_a_region_out() -> None:
    suspicions = book()
    assert fail(suspicions, 10) is None
    assert suspicions.suspensions(BallotRole.MEMBER, now_ns=10) == {}
    assert fail(suspicions, 20) == PAUSE_NS
    assert suspicions.suspensions(BallotRole.MEMBER, now_ns=20) == {"b": "late"}
    assert suspicions.suspensions(BallotRole.REDUCER, now_ns=20) == {}, "only in the part that it failed"


def test_who_failed_once_is_in_doubt_until_it_does_its_part_or_is_left_out() -> None:
    suspicions = book()
    fail(suspicions, 10)
    assert suspicions.is_doubted("b", BallotRole.MEMBER)
    assert not suspicions.is_doubted("b", BallotRole.REDUCER)
    assert suspicions.doublings("b") == 0
    suspicions.on_success("b", BallotRole.MEMBER)
    assert not suspicions.is_doubted("b", BallotRole.MEMBER)
    fail(suspicions, 20)
    fail(suspicions, 30)
    assert not suspicions.is_doubted("b", BallotRole.MEMBER), "it is left out, and a probe asks more of it"


def test_a_leader_that_gave_its_place_away_is_left_out_for_the_first_pause() -> None:
    suspicions = book()
    suspicions.begin((), ["a", "b"], predecessor="b", now_ns=10)
    assert {(line.region, line.part) for line in suspicions.left_out()} == {("b", "member"), ("b", "reducer")}
    assert suspicions.next_probe(now_ns=10 + PAUSE_NS - 1) == ""
    assert suspicions.next_probe(now_ns=10 + PAUSE_NS) == "b"
    assert suspicions.on_success("b", BallotRole.MEMBER)
    suspicions.begin((), ["a", "b"], now_ns=20)
    assert suspicions.left_out() == ()


def test_a_part_that_is_done_in_between_begins_the_row_again() -> None:
    suspicions = book()
    for now_ns in range(10, 100, 10):
        assert fail(suspicions, now_ns) is None
        assert not suspicions.on_success("b", BallotRole.MEMBER)
        suspicions.on_success("b", BallotRole.REDUCER)
    assert suspicions.left_out() == ()


def test_ballots_that_were_open_at_the_same_time_fail_once() -> None:
    suspicions = book()
    assert suspicions.blame(LATE, opened_at_ns=5, now_ns=10) is None
    assert suspicions.blame(LATE, opened_at_ns=9, now_ns=11) is None
    assert suspicions.blame(LATE, opened_at_ns=10, now_ns=12) == PAUSE_NS


def test_who_is_proved_wrong_is_left_out_at_once() -> None:
    suspicions = book()
    assert suspicions.blame(LIED, opened_at_ns=5, now_ns=10) == PAUSE_NS
    assert suspicions.left_out() == (LeftOut("b", "reducer", "lied"),)


def test_a_region_is_tried_when_its_pause_is_over_and_each_failure_doubles_it() -> None:
    suspicions, now_ns = book(), 10
    fail(suspicions, now_ns, LIED)
    for level in range(1, DOUBLINGS_MAX + 4):
        pause_ns = PAUSE_NS << min(level - 1, DOUBLINGS_MAX)
        assert suspicions.next_probe(now_ns=now_ns + pause_ns - 1) == ""
        now_ns += pause_ns
        assert suspicions.next_probe(now_ns=now_ns) == "b"
        assert suspicions.suspensions(BallotRole.REDUCER, now_ns=now_ns) == {"b": "lied"}, (
            "in all other ballots it is still left out"
        )
        assert suspicions.suspensions(BallotRole.REDUCER, probe="b", now_ns=now_ns) == {}
        assert suspicions.suspensions(BallotRole.REDUCER, probe="b", now_ns=now_ns - 1) == {"b": "lied"}
        late = Blame("b", BallotRole.REDUCER, "lied")
        assert fail(suspicions, now_ns, late) == PAUSE_NS << min(level, DOUBLINGS_MAX), "one failure is enough now"


def test_who_is_out_is_not_blamed_for_ballots_that_were_open_before() -> None:
    suspicions = book()
    fail(suspicions, 10, LIED)
    assert suspicions.blame(LIED, opened_at_ns=9, now_ns=11) is None
    assert suspicions.next_probe(now_ns=10 + PAUSE_NS) == "b", "the pause is no longer for it"


def test_a_region_that_did_its_part_is_back_and_is_forgiven_in_time() -> None:
    suspicions = book()
    fail(suspicions, 10, LIED)
    assert suspicions.on_success("b", BallotRole.REDUCER)
    assert suspicions.suspensions(BallotRole.REDUCER, now_ns=10) == {}
    for _ in range(CLEAN_BALLOTS - 2):
        assert not suspicions.on_success("b", BallotRole.REDUCER)
    late = Blame("b", BallotRole.REDUCER, "late")
    assert fail(suspicions, 99, late) == 2 * PAUSE_NS, "not forgotten yet"
    for _ in range(2 * CLEAN_BALLOTS):
        suspicions.on_success("b", BallotRole.REDUCER)
    assert fail(suspicions, 199, late) is None, "forgiven"


def test_one_region_is_tried_at_a_time_the_longest_waiting_first() -> None:
    suspicions = book()
    suspicions.blame(Blame("c", BallotRole.MEMBER, "x", is_proved=True), opened_at_ns=0, now_ns=1)
    suspicions.blame(LIED, opened_at_ns=0, now_ns=2)
    assert suspicions.next_probe(now_ns=10 * PAUSE_NS) == "c"
    assert suspicions.suspensions(BallotRole.REDUCER, probe="c", now_ns=10 * PAUSE_NS) == {"b": "lied"}


def test_whom_the_leader_before_left_out_has_failed_once() -> None:
    suspicions = book()
    suspicions.begin(
        (LeftOut("b", "member", "z" * 5000), LeftOut("nobody", "member", ""), LeftOut("b", "king", "")), "abc"
    )
    assert suspicions.left_out() == (), "the word of another leader alone leaves nobody out"
    assert fail(suspicions, 10) == PAUSE_NS


@pytest.mark.parametrize("regions", [LEFT_OUT_SHOWN_MAX + 3])
def test_what_ballots_say_of_it_is_short(regions: int) -> None:
    suspicions = book()
    for number in range(regions):
        suspicions.blame(
            Blame(f"r{number:02}", BallotRole.MEMBER, "y" * 1000, is_proved=True), opened_at_ns=0, now_ns=1
        )
    assert len(suspicions.left_out()) == LEFT_OUT_SHOWN_MAX
    assert max(len(line.reason) for line in suspicions.left_out()) == REASON_SHOWN_MAX


def test_a_region_that_gets_no_part_in_its_ballot_lets_the_next_one_try() -> None:
    """As a reducer of a fragment with fewer blocks than reducers: it must not keep the others out for ever."""
    suspicions, now_ns = book(), 10 * PAUSE_NS
    judge = Judge(context_of(history_of()), suspicions)
    suspicions.blame(LIED, opened_at_ns=0, now_ns=1)
    suspicions.blame(Blame("c", BallotRole.MEMBER, "x", is_proved=True), opened_at_ns=0, now_ns=2)
    assert judge.next_probe([], now_ns=now_ns) == "b"
    assert judge.trials("b", ("a",), ("a", "c"), now_ns=now_ns) == ()
    assert judge.next_probe([], now_ns=now_ns) == "c"
    assert judge.trials("c", ("a", "c"), ("a",), now_ns=now_ns) == (("c", BallotRole.MEMBER),)
    suspicions.on_success("c", BallotRole.MEMBER)
    assert judge.next_probe([], now_ns=now_ns) == "b", "its turn comes again"
