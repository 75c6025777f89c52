"""A learner that hangs is found, one that only pauses is not; a crash loop stops it, kills from outside never do."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.shared_memory import BUSY_MAX_S, PlaceMark
from diloco_node.supervisor.learner_watch import (
    ABORT_S,
    ASLEEP_S,
    CRASHES_MAX,
    CRASHES_WITHIN_S,
    FORGIVEN_S,
    HANG_FACTOR,
    REFUSALS_MAX,
    REFUSED_S,
    STUCK_S,
    TRAINED_S,
    Action,
    LearnerWatch,
)

HANG_S = 60.0


def running(now_s: float = 0.0) -> LearnerWatch:
    watch = LearnerWatch(HANG_S, log="/logs/learner.log")
    watch.started(b"0", now_s=now_s)
    return watch


def looks(watch: LearnerWatch, mark: bytes, from_s: float, to_s: float) -> list[tuple[float, Action]]:
    """A look each second; those that ask for something."""
    found = []
    at_s = from_s
    while at_s <= to_s:
        action = watch.look(mark, now_s=at_s)
        if action is not Action.NOTHING:
            found.append((at_s, action))
        at_s += 1
    return found


def test_a_learner_that_stops_stepping_is_aborted_then_killed_then_told_of() -> None:
    watch = running()
    assert looks(watch, b"1", 1, 1) == []
    end_s = 2 + HANG_S + ABORT_S + STUCK_S + 100
    found = looks(watch, b"1", 2, end_s)
    assert [action for _, action in found] == [Action.ABORT, Action.KILL, Action.SAY]
    assert [at_s for at_s, _ in found] == [HANG_S + 2, HANG_S + 2 + ABORT_S, HANG_S + 2 + ABORT_S + STUCK_S]
    assert watch.reason.startswith("hung: no step for 61 s, its longest pause before was 0.0 s")
    assert "is its device stuck?" in watch.reason
    assert watch.ended(-signal.SIGKILL, lived_s=90, now_s=end_s)
    assert (watch.state, watch.hangs, watch.crashes) == ("waiting", 1, 0)
    assert watch.reason.startswith("hung"), "the signal was ours"


def test_before_its_first_step_nobody_can_tell() -> None:
    assert looks(running(), b"0", 1, 100 * HANG_S) == []


def test_counters_that_the_daemon_has_just_made_are_no_step() -> None:
    watch = LearnerWatch(HANG_S)
    watch.started(None, now_s=0)
    assert looks(watch, bytes(8), 1, 10 * HANG_S) == []
    watch.look(b"1", now_s=11 * HANG_S)
    assert watch.look(bytes(8), now_s=11 * HANG_S + 1) is Action.NOTHING
    [(at_s, _)] = looks(watch, bytes(8), 11 * HANG_S + 2, 12 * HANG_S + 1)
    assert at_s == 12 * HANG_S + 1, "a new area of a restarted daemon is none either"


def test_a_long_pause_that_ended_makes_the_next_one_usual() -> None:
    watch = running()
    watch.look(b"1", now_s=1)
    assert looks(watch, b"1", 2, 31) == []
    assert looks(watch, b"2", 32, 32) == []
    limit_s = HANG_FACTOR * 31
    assert watch.limit_s == limit_s
    assert [at_s for at_s, _ in looks(watch, b"2", 33, 32 + limit_s + 1)] == [32 + limit_s + 1]


def test_each_hang_doubles_the_time_for_the_next_one() -> None:
    """An evaluation that takes longer than the limit is not killed for ever."""
    watch, now_s = running(), 0.0
    for hangs in range(3):
        assert watch.limit_s == HANG_S * 2**hangs
        watch.look(b"%d" % (hangs + 1), now_s=now_s + 1)
        [(at_s, _)] = looks(watch, b"%d" % (hangs + 1), now_s + 2, now_s + 2 + watch.limit_s)
        watch.ended(-signal.SIGABRT, lived_s=1, now_s=at_s)
        now_s = at_s
        watch.started(b"%d" % (hangs + 1), now_s=now_s)


def test_when_the_supervisor_itself_stood_still_the_learner_did_perhaps_too() -> None:
    watch = running()
    watch.look(b"1", now_s=1)
    assert watch.look(b"1", now_s=1 + ASLEEP_S + 10 * HANG_S) is Action.NOTHING
    assert looks(watch, b"1", 12 + 10 * HANG_S, 10 + 11 * HANG_S) == []
    watch = running()
    watch.look(b"1", now_s=1)
    watch.look(b"2", now_s=3600)
    assert watch.limit_s == HANG_S, "and that was no pause of the learner"


@pytest.mark.parametrize("sleep_s", [7200, 60])
def test_a_frozen_container_uses_up_no_limit_of_a_pause_or_of_a_refused_script(sleep_s: int) -> None:
    """`docker pause` in a validation, or while a script ends its other ranks."""
    refused = PlaceMark(7, fault="LearnerError: no")
    saves = PlaceMark(7, fault="LearnerError: no", activity="saving", since_s=2.0, limit_s=2 * REFUSED_S)
    for place, limit_s in ((busy(2.0), 500), (refused, REFUSED_S), (saves, 2 * REFUSED_S)):
        watch = running()
        watch.look(b"1", now_s=1.0)
        before_s = 100
        assert {watch.look(b"1", now_s=at_s, place=place) for at_s in range(2, before_s)} == {Action.NOTHING}
        woken_s = before_s - 1 + sleep_s
        ends = [at_s for at_s in range(woken_s, woken_s + 1300) if watch.look(b"1", now_s=at_s, place=place) == "abort"]
        assert ends == [3 + limit_s + sleep_s]
        assert watch.awake_s(2.0) == woken_s + 1299 - 2 - sleep_s


def test_nothing_hangs_when_no_time_is_set() -> None:
    watch = LearnerWatch(0.0)
    watch.started(None, now_s=0)
    assert looks(watch, b"1", 1, 10_000) == []


def test_a_crash_loop_stops_the_learner_and_says_how_to_go_on() -> None:
    watch = running()
    for crash in range(CRASHES_MAX):
        watch.started(b"", now_s=10 * crash)
        assert watch.ended(1, lived_s=3.0, now_s=10 * crash + 3) is (crash < CRASHES_MAX - 1)
    assert watch.document() == {
        "state": "stopped",
        "reason": "crashed 10 times in 2 min, the last time: exit code 1 after 3.0 s. "
        "Look at logs/learner.log, then `diloco-node learner start`",
        "crashes": CRASHES_MAX,
        "hangs": 0,
        "exit_code": 1,
        "restarts": CRASHES_MAX,
        "log": "/logs/learner.log",
        "lost": None,
    }
    watch.revived()
    watch.started(b"", now_s=200)
    assert watch.ended(1, lived_s=3.0, now_s=203), "it has all of its tries again"


def test_the_last_line_is_that_of_a_crash_and_of_nothing_else() -> None:
    watch = running()
    watch.ended(1, lived_s=3.0, now_s=3, last_line="ValueError: no data")
    assert watch.reason == "exit code 1 after 3.0 s: ValueError: no data"
    watch.started(b"", now_s=4)
    watch.ended(-signal.SIGKILL, lived_s=3.0, now_s=6, last_line="step 7", memory_kills=1)
    assert watch.reason == "ended by SIGKILL after 3.0 s: the kernel had no memory left"
    watch.started(b"", now_s=6, memory_kills=1)
    watch.ended(-signal.SIGKILL, lived_s=3.0, now_s=7, last_line="step 7", memory_kills=1)
    assert watch.reason == "ended by SIGKILL after 3.0 s", "who was killed from outside had not said why"


def test_crashes_that_are_far_apart_are_no_loop() -> None:
    watch = running()
    for crash in range(5 * CRASHES_MAX):
        assert watch.ended(-signal.SIGSEGV, lived_s=3.0, now_s=crash * (CRASHES_WITHIN_S / (CRASHES_MAX - 1) + 1))
    assert watch.crashes == 5 * CRASHES_MAX


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_from_outside_is_started_again_as_often_as_it_happens(number: int) -> None:
    watch = running()
    assert all(watch.ended(-number, lived_s=1.0, now_s=life) for life in range(100))
    assert watch.state == "waiting"
    assert watch.reason == f"ended by {signal.Signals(number).name} after 1.0 s"


def hang(watch: LearnerWatch, now_s: float) -> float:
    """A life of one step that then hangs; when it was over."""
    watch.started(b"0", now_s=now_s)
    watch.look(b"1", now_s=now_s + 1)
    [(at_s, _)] = looks(watch, b"1", now_s + 2, now_s + 2 + watch.limit_s)
    assert watch.ended(-signal.SIGABRT, lived_s=at_s - now_s, now_s=at_s)
    return at_s


def test_hours_without_a_hang_take_the_doublings_back() -> None:
    watch = running()
    now_s = hang(watch, hang(watch, 0.0))
    assert watch.limit_s == 4 * HANG_S
    watch.started(b"0", now_s=now_s)
    for hour in range(1, 4):
        watch.look(b"%d" % hour, now_s=now_s + hour * (FORGIVEN_S + 1))
        assert watch.limit_s == HANG_S * max(1, 2 ** (2 - hour))
    assert watch.hangs == 2


def test_who_wants_it_started_again_gives_it_the_first_limit() -> None:
    watch = running()
    hang(watch, 0.0)
    watch.revived()
    assert watch.limit_s == HANG_S


def test_one_that_ends_by_itself_is_done() -> None:
    watch = running()
    assert not watch.ended(0, lived_s=5.0, now_s=5, place=PlaceMark(7, step=3, has_left=True))
    assert watch.document() == {
        "state": "done",
        "reason": "",
        "crashes": 0,
        "hangs": 0,
        "exit_code": 0,
        "restarts": 0,
        "log": "/logs/learner.log",
        "lost": None,
    }


def test_one_that_ends_in_mid_run_as_if_it_were_done_says_what_is_lost() -> None:
    """Its script never calls close()."""
    watch = running()
    assert not watch.ended(0, lived_s=5.0, now_s=5, place=PlaceMark(7, step=3, has_ended=True))
    assert (watch.state, watch.crashes) == ("done", 0)
    assert watch.reason.startswith("it ended without close() or a `with` block: its last steps are in no merge")


def test_one_that_was_asked_to_stop_from_outside_is_not_done() -> None:
    watch = running()
    assert watch.ended(0, lived_s=5.0, now_s=5, place=PlaceMark(7, step=3, is_interrupted=True))
    assert (watch.state, watch.crashes) == ("waiting", 0)
    assert watch.reason == "a signal from outside asked it to stop, and the run goes on"
    watch.started(None, now_s=6, place=PlaceMark(7, step=3, is_interrupted=True))
    assert not watch.ended(0, lived_s=5.0, now_s=11, place=PlaceMark(8, step=9, has_left=True)), (
        "this life ended by itself"
    )


@pytest.mark.parametrize(
    ("code", "has_ended", "crashes"), [(143, True, 0), (143, False, 1), (-signal.SIGSEGV, True, 1)]
)
def test_one_whose_handler_of_a_stop_signal_exits_with_a_code_has_not_crashed(
    code: int, has_ended: bool, crashes: int
) -> None:
    watch = running()
    place = PlaceMark(7, step=3, is_interrupted=True, has_ended=has_ended)
    assert watch.ended(code, lived_s=5.0, now_s=5, place=place)
    assert watch.crashes == crashes
    assert watch.reason.startswith("a signal from outside" if not crashes else "")


def test_one_whose_script_hides_a_refusal_has_crashed_whatever_its_exit_code() -> None:
    watch, place = running(), PlaceMark(7, step=3, fault="LearnerError: weights were loaded")
    assert watch.ended(0, lived_s=5.0, now_s=5, place=place)
    assert (watch.state, watch.crashes) == ("waiting", 1)
    assert watch.reason == "exit code 0 after 5.0 s: its script hides an error: LearnerError: weights were loaded"
    watch.started(None, now_s=6, place=place)
    assert watch.ended(0, lived_s=1.0, now_s=7, place=place), "this life has not attached"
    assert watch.crashes == 2
    for life in range(8):
        watch.started(None, now_s=10 + life)
        goes_on = watch.ended(0, lived_s=0.5, now_s=10 + life, place=PlaceMark(8 + life, fault="LearnerError: no"))
        assert goes_on is (life < 7)
    assert watch.state == "stopped"
    assert "the last time: exit code 0 after 0.5 s: its script hides an error: LearnerError: no" in watch.reason


@pytest.mark.parametrize("kills", [0, 1])
def test_one_that_was_killed_below_a_shell_has_crashed_though_the_shell_ends_with_0(kills: int) -> None:
    watch = running()
    assert watch.ended(0, lived_s=5.0, now_s=5, place=PlaceMark(7, step=3), memory_kills=kills)
    assert (watch.state, watch.crashes) == ("waiting", 1)
    assert ("the kernel killed something for memory" in watch.reason) is bool(kills)
    assert (
        "it never left the run: was it killed, or had it an error, which a shell or its script hides?" in watch.reason
    )


def refused_looks(watch: LearnerWatch, place: PlaceMark, to_s: int, mark: bytes = b"1") -> list[tuple[int, Action]]:
    """A look each second, from the first one on."""
    actions = [(at_s, watch.look(mark, now_s=at_s, place=place)) for at_s in range(1, to_s)]
    return [(at_s, action) for at_s, action in actions if action is not Action.NOTHING]


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGKILL, 0, 1])
@pytest.mark.parametrize("hang_s", [HANG_S, 5.0, 0.0])
def test_one_whose_script_hides_a_refusal_and_trains_on_is_ended_and_has_crashed(hang_s: float, code: int) -> None:
    watch, place = LearnerWatch(hang_s), PlaceMark(7, fault="LearnerError: no")
    watch.started(b"0", now_s=0.0)
    ends = refused_looks(watch, place, int(REFUSED_S + ABORT_S) + 2)
    assert ends == [(REFUSED_S + 2, Action.ABORT)]
    assert watch.reason == "goes on outside of the run: its script hides an error: LearnerError: no"
    assert watch.ended(code, lived_s=44.0, now_s=44, place=place)
    assert (watch.state, watch.crashes, watch.hangs) == ("waiting", 1, 0)
    assert watch.reason.endswith(" after 44.0 s: its script hides an error: LearnerError: no")
    watch.started(b"1", now_s=45.0, place=place)
    assert refused_looks(watch, place, 300, b"1") == [], "of the life before"


@pytest.mark.parametrize("between", [None, "killed", "trained"])
def test_one_that_hides_refusals_three_times_in_a_row_stays_stopped(between: str | None) -> None:
    watch, place = LearnerWatch(HANG_S), PlaceMark(7, fault="LearnerError: no")
    for life in range(REFUSALS_MAX):
        watch.started(b"0", now_s=0.0)
        assert refused_looks(watch, place, int(REFUSED_S) + 3)[0][1] is Action.ABORT
        lived_s = TRAINED_S if between == "trained" and life == 1 else REFUSED_S
        goes_on = watch.ended(-signal.SIGABRT, lived_s=lived_s, now_s=(1.0 + life) * REFUSED_S, place=place)
        assert goes_on is (life < REFUSALS_MAX - 1 or between is not None)
        if between == "killed":
            watch.started(b"0", now_s=0.0)
            assert watch.ended(-signal.SIGKILL, lived_s=5.0, now_s=(1.5 + life) * REFUSED_S)
    if between is None:
        assert watch.state == "stopped"
        assert watch.reason.startswith("went on outside of the run 3 times, the last time: ")
        assert "its script hides an error: LearnerError: no. Look at logs/learner.log, then" in watch.reason
        watch.revived()
        watch.started(b"0", now_s=0.0)
        refused_looks(watch, place, int(REFUSED_S) + 3)
        assert watch.ended(-signal.SIGABRT, lived_s=REFUSED_S, now_s=9 * REFUSED_S, place=place)


def test_one_that_attaches_again_after_a_refusal_is_a_learner_as_any_other() -> None:
    watch, place = running(), PlaceMark(7, fault="LearnerError: no")
    assert refused_looks(watch, place, int(REFUSED_S)) == []
    assert refused_looks(watch, PlaceMark(7, step=1), 50) == []
    assert refused_looks(watch, place, int(REFUSED_S)) == [], "the time begins anew"


def test_what_is_refused_after_a_learner_has_left_is_no_crash_and_that_of_the_next_life_is_one() -> None:
    watch, place = running(), PlaceMark(7, step=3, has_left=True)
    refused = PlaceMark(7, step=3, has_left=True, fault="LearnerError: no")
    assert not watch.ended(0, lived_s=5.0, now_s=5, place=refused), "a process after the learner's, in one command"
    assert (watch.state, watch.crashes, watch.reason) == ("done", 0, "")
    watch.started(None, now_s=6, place=place)
    assert watch.ended(0, lived_s=1.0, now_s=7, place=refused)
    assert watch.crashes == 1
    assert watch.reason.endswith("its script hides an error: LearnerError: no")
    watch.started(None, now_s=8, place=place)
    assert refused_looks(watch, refused, int(REFUSED_S) + 10)[0][1] is Action.ABORT


def test_one_that_ends_before_it_attaches_though_the_life_before_did_is_believed_the_second_time() -> None:
    watch, place = running(), PlaceMark(7, step=3)
    watch.ended(-9, lived_s=5.0, now_s=5, place=place)
    for code, state in ((0, "waiting"), (-9, "waiting"), (0, "waiting"), (0, "done")):
        watch.started(None, now_s=6, place=place)
        assert watch.ended(code, lived_s=1.0, now_s=7, place=place) is (state == "waiting")
        assert watch.state == state
    assert watch.reason == "it ended before attach(), which the life before it had called"


def test_one_that_ends_without_attach_is_done_and_says_so() -> None:
    watch = running()
    assert not watch.ended(0, lived_s=1.0, now_s=1)
    assert (watch.state, watch.reason) == ("done", "it ended before attach()")
    watch.started(None, now_s=2)
    assert not watch.ended(0, lived_s=1.0, now_s=3, place=PlaceMark(7, step=3, has_left=True))
    assert (watch.state, watch.reason) == ("done", "")


def test_a_launcher_whose_rank_the_kernel_has_killed_for_want_of_memory_says_so() -> None:
    watch = running()
    watch.started(None, now_s=0, memory_kills=3)
    assert watch.ended(1, lived_s=9.0, now_s=9, last_line="train.py FAILED", memory_kills=4)
    assert watch.reason == "exit code 1 after 9.0 s: the kernel killed something for memory: train.py FAILED"


def test_a_signal_that_python_does_not_know_has_its_number() -> None:
    watch = running()
    watch.ended(-77, lived_s=1.0, now_s=1)
    assert watch.reason == "ended by signal 77 after 1.0 s"


@given(st.lists(st.floats(0.1, HANG_S / 2), min_size=1, max_size=100))
def test_who_steps_within_the_limit_is_never_touched(pauses_s: list[float]) -> None:
    watch, now_s = running(), 0.0
    for number, pause_s in enumerate(pauses_s):
        until_s = now_s + pause_s
        while now_s < until_s:
            assert watch.look(b"%d" % number, now_s=now_s) is Action.NOTHING
            now_s += 1
    assert watch.hangs == 0


# ---- announced pauses ------------------------------------------------------------------------------------------------


def busy(since_s: float, limit_s: float = 500.0) -> PlaceMark:
    return PlaceMark(7, step=1, since_s=since_s, limit_s=limit_s, activity="evaluation")


def test_an_announced_pause_is_no_hang_before_its_own_limit_and_then_it_is() -> None:
    watch = running()
    watch.look(b"1", now_s=1.0)
    for at_s in range(2, 503):
        assert watch.look(b"1", now_s=at_s, place=busy(2.0)) is Action.NOTHING
    assert watch.look(b"1", now_s=503.0, place=busy(2.0)) is Action.ABORT
    assert watch.reason == "hung: evaluation takes more than its limit of 500 s"
    watch.ended(-signal.SIGABRT, lived_s=503, now_s=504)
    watch.started(b"1", now_s=504.0, place=busy(2.0))
    watch.look(b"2", now_s=505.0, place=busy(2.0))
    assert watch.look(b"2", now_s=1400.0, place=busy(505.0)) is Action.NOTHING, "the next one gets twice the time"


@pytest.mark.parametrize(("limit_s", "hung_s"), [(BUSY_MAX_S, 2 * BUSY_MAX_S), (500.0, 500.0)])
def test_a_pause_without_a_limit_of_its_own_may_last_as_long_as_a_step(limit_s: float, hung_s: float) -> None:
    watch, mark = LearnerWatch(2 * BUSY_MAX_S), busy(1.0, limit_s)
    watch.started(b"0", now_s=0.0)
    watch.look(b"1", now_s=1.0)
    looks_s = range(2, 10_000)
    assert next(at_s for at_s in looks_s if watch.look(b"1", now_s=at_s, place=mark) is Action.ABORT) == 2 + hung_s
    assert watch.reason == f"hung: evaluation takes more than its limit of {hung_s:.0f} s"


def test_after_a_pause_the_time_without_steps_begins_anew_and_it_counts_as_no_usual_one() -> None:
    watch = running()
    watch.look(b"1", now_s=1.0)
    for at_s in range(2, 400):
        watch.look(b"1", now_s=at_s, place=busy(2.0))
    ended = PlaceMark(7, step=1)
    assert [at_s for at_s in range(400, 470) if watch.look(b"1", now_s=at_s, place=ended) is Action.ABORT] == [461]
    assert "belong into `with diloco.busy" in watch.reason


def test_a_pause_that_nobody_ends_is_no_hang_while_the_loop_makes_steps() -> None:
    watch = running()
    watch.look(b"1", now_s=1.0)
    for at_s in range(2, 4000):
        assert watch.look(b"%d" % (at_s // 100), now_s=at_s, place=busy(2.0)) is Action.NOTHING
    hung = [at_s for at_s in range(4000, 4600) if watch.look(b"39", now_s=at_s, place=busy(2.0)) is Action.ABORT]
    assert hung == [3900 + 501], "from its last step on the limit counts"
    assert watch.reason.startswith("hung: evaluation takes more than its limit of 500 s")


def test_steps_in_a_pause_are_no_usual_pauses() -> None:
    watch = running()
    watch.look(b"1", now_s=1.0)
    watch.look(b"2", now_s=400.0, place=busy(2.0))
    watch.look(b"3", now_s=405.0, place=PlaceMark(7, step=3))
    assert watch.limit_s == HANG_S


def test_a_script_that_has_had_its_part_never_hangs_but_its_next_life_may() -> None:
    watch, left = running(), PlaceMark(7, step=3, has_left=True)
    watch.look(b"1", now_s=1.0)
    for at_s in range(2, 4000):
        assert watch.look(b"1", now_s=at_s, place=left) is Action.NOTHING
    again = PlaceMark(7, step=3)
    assert watch.look(b"1", now_s=4000, place=again) is Action.NOTHING, "it attaches again, and has made no step yet"
    watch.look(b"2", now_s=4000, place=again)
    assert watch.limit_s == HANG_S, "what it did in between was no pause of its loop"
    watch.ended(1, lived_s=4000, now_s=4000)
    watch.started(b"1", now_s=4000.0, place=left)
    watch.look(b"2", now_s=4001.0, place=left)
    assert Action.ABORT in [watch.look(b"2", now_s=at_s, place=left) for at_s in range(4002, 4600)]


def test_a_pause_of_the_life_before_excuses_nothing() -> None:
    watch = LearnerWatch(HANG_S)
    watch.started(b"0", now_s=0.0, place=busy(-50.0))
    watch.look(b"1", now_s=1.0, place=busy(-50.0))
    hung = [at_s for at_s in range(2, 100) if watch.look(b"1", now_s=at_s, place=busy(-50.0)) is Action.ABORT]
    assert hung == [62]


def test_no_pause_hangs_where_nothing_does() -> None:
    watch = LearnerWatch(0.0)
    watch.started(b"0", now_s=0.0)
    watch.look(b"1", now_s=1.0)
    for at_s in range(2, 3000, 5):
        assert watch.look(b"1", now_s=at_s, place=busy(2.0)) is Action.NOTHING


def test_what_a_refused_script_has_announced_is_not_cut_off() -> None:
    watch = running()
    save = PlaceMark(7, fault="LearnerError: no", activity="saving", since_s=10.0, limit_s=2 * REFUSED_S)
    assert refused_looks(watch, save, int(2 * REFUSED_S) + 20)[0] == (2 * REFUSED_S + 11, Action.ABORT)


def test_what_follows_a_script_that_has_come_to_its_end_without_close_is_no_hang() -> None:
    """A command may evaluate in a process of its own."""
    watch = running()
    assert watch.look(b"1", now_s=10 * HANG_S, place=PlaceMark(7, step=3, has_ended=True)) is Action.NOTHING
