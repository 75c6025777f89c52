"""learner/process_signals.py, in processes of their own: what SIGTERM and the supervisor's death do to a learner."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

import pytest

from diloco_node.errors import LearnerError
from diloco_node.learner import process_signals
from diloco_node.learner.process_signals import STOP_LASTS_S, STOP_SIGNALS, TerminateFlag

PATIENCE_S = 180.0


@pytest.fixture
def before() -> Iterator[None]:
    """SIGTERM as it is in a fresh process, and afterwards as it was."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("before")
def test_sigterm_sets_the_flag_until_it_is_given_back() -> None:
    flag = TerminateFlag()
    flag.restore()  # nothing was taken
    flag.install()
    assert not flag.is_set
    signal.raise_signal(signal.SIGTERM)
    assert flag.is_set
    flag.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    flag.restore()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_nobody_handles_but_sigterm_does_what_it_does_without_a_learner(number: int) -> None:
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    earlier = signal.signal(number, default)
    flag = TerminateFlag()
    try:
        flag.install()
        flag.is_asked()
        assert signal.getsignal(number) is default
    finally:
        flag.restore()
        signal.signal(number, earlier)


@pytest.mark.usefixtures("before")
def test_a_signal_that_the_script_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flag = TerminateFlag()
    flag.install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.raise_signal(signal.SIGTERM)
    assert not flag.has_stop


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_handler_of_the_script_is_called_and_the_signal_is_seen(number: int) -> None:
    calls: list[object] = []
    earlier = signal.getsignal(number)

    def theirs(*arguments: object) -> None:
        calls.append(arguments[0])
        raise SystemExit

    signal.signal(number, theirs)
    flag, notes = TerminateFlag(), []
    try:
        flag.install()
        flag.note = lambda: notes.append(len(calls))
        with pytest.raises(SystemExit):
            signal.raise_signal(number)
        assert (calls, notes) == ([number], [0]), "it is noted first, for theirs may end the process"
        assert (flag.is_asked(), flag.has_stop) == (number == signal.SIGTERM, True)
        with flag.leaving(is_alone=True):
            assert flag.is_asked()
        flag.restore()
        assert signal.getsignal(number) is theirs
    finally:
        signal.signal(number, earlier)
        flag.restore()
        assert signal.getsignal(number) is earlier


class Profile:
    """Handlers need not be functions."""

    calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1


@pytest.mark.usefixtures("before")
def test_a_signal_that_was_for_something_else_ends_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, profile = [1000.0], Profile()
    monkeypatch.setattr(process_signals.time, "monotonic", lambda: now_s[0])
    earlier = signal.signal(signal.SIGUSR1, partial(profile))
    flag = TerminateFlag()
    try:
        flag.install()
        signal.raise_signal(signal.SIGUSR1)
        assert (profile.calls, flag.has_stop) == (1, True)
        now_s[0] += STOP_LASTS_S
        assert not flag.has_stop
        with flag.leaving(is_alone=True):
            assert not flag.is_asked(), "the loop ends for another reason"
        now_s[0] += 3600.0
        signal.raise_signal(signal.SIGTERM)
        assert flag.deadline_s > now_s[0], "of this signal, and not of the one an hour ago"
        now_s[0] += 3600.0
        assert flag.has_stop
    finally:
        flag.restore()
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.usefixtures("before")
def test_a_handler_that_is_set_later_may_call_the_one_before() -> None:
    calls: list[int] = []
    flag = TerminateFlag()
    flag.install()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)

    def theirs(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    assert not flag.is_asked()
    signal.raise_signal(signal.SIGTERM)
    assert flag.is_asked()
    assert calls == [signal.SIGTERM]
    flag.restore()
    assert signal.getsignal(signal.SIGTERM) is theirs


@pytest.mark.usefixtures("before")
def test_a_loop_in_a_thread_leaves_it_alone() -> None:
    flag = TerminateFlag()
    thread = threading.Thread(target=flag.install)
    thread.start()
    thread.join(PATIENCE_S)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_a_forked_worker_dies_of_sigterm_and_the_loop_does_not_end() -> None:
    code = """
        import os, signal, time
        from diloco_node.learner.process_signals import TerminateFlag
        flag = TerminateFlag()
        flag.install()
        heard, tell = os.pipe()
        worker = os.fork()
        if not worker:
            os.write(tell, b"!")  # from here on: Python forgets what came before a fork was over
            time.sleep(150)
            os._exit(0)
        os.read(heard, 1)
        os.kill(worker, signal.SIGTERM)
        print(-os.WTERMSIG(os.waitpid(worker, 0)[1]), flag.is_set)
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == [str(-signal.SIGTERM), "False"]


LEARNER = """
import signal
from diloco_node.learner.process_signals import die_with_supervisor
die_with_supervisor()
print("ready", flush=True)
signal.pause()
"""

SUPERVISOR = f"""
import os, signal, subprocess, sys
number = os.getpid() if sys.argv[1] == "supervised" else os.getppid()
learner = subprocess.Popen(
    [sys.executable, "-c", {LEARNER!r}], env={{**os.environ, "DILOCO_SUPERVISOR_PID": str(number)}}
)
print(learner.pid, flush=True)
signal.pause()
"""


def orphaned(how: str) -> tuple[int, subprocess.Popen[str]]:
    """A learner whose parent has been killed: its process id, and the parent with the pipe that both write to."""
    parent = subprocess.Popen([*python(SUPERVISOR), how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    said = sorted(parent.stdout.readline().strip() for _ in range(2))
    assert said[1] == "ready"
    parent.kill()
    parent.wait(PATIENCE_S)
    return int(said[0]), parent


def test_a_learner_dies_with_its_supervisor() -> None:
    _, parent = orphaned("supervised")
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.read() == "", "ends when nobody has the other end any more"


def test_a_learner_that_was_started_by_somebody_else_lives_on() -> None:
    pid, parent = orphaned("by hand")
    try:
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert parent.stdout is not None
        with parent.stdout:
            parent.stdout.read()


@pytest.mark.usefixtures("before")
def test_only_an_exit_by_the_handler_of_a_stop_signal_is_in_order_and_only_without_other_ranks() -> None:
    def handler(*_: object) -> None:
        raise SystemExit(143)

    earlier = signal.signal(signal.SIGUSR1, handler)
    flag = TerminateFlag()
    try:
        flag.install()
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert flag.is_orderly(caught.value, is_alone=True)
        assert not flag.is_orderly(caught.value, is_alone=False), "the others may be in the middle of a step"
        assert flag.has_stop
        assert not flag.is_orderly(SystemExit("the loss is NaN"), is_alone=True), "the loop's own"
        assert flag.is_orderly(SystemExit(0), is_alone=False)
    finally:
        flag.restore()
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.usefixtures("before")
def test_an_exit_that_waits_is_raised_once_at_the_end_or_where_somebody_insists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks may be in the middle of a step. One stop may be delivered twice: to the group, and forwarded."""
    now_s = 1000.0
    monkeypatch.setattr(process_signals.time, "monotonic", lambda: now_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for is_insisting in (False, True):
        flag = TerminateFlag()
        try:
            flag.install()
            flag.is_holding = True
            for pause_s in (0.0, 0.5):
                now_s += pause_s
                with flag.held():
                    signal.raise_signal(signal.SIGTERM)
            assert (flag.is_set, flag.has_exit) == (True, True)
            if is_insisting:
                now_s += process_signals.AGAIN_S
                with pytest.raises(SystemExit):
                    signal.raise_signal(signal.SIGTERM)
            else:
                with pytest.raises(SystemExit), flag.leaving(is_alone=True):
                    signal.raise_signal(signal.SIGTERM)  # passed on late: the last merge is under way
            flag.exit_late()  # once is enough
        finally:
            flag.restore()


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(("kind", "is_exiting"), [("handled", True), ("failing", False), ("none", True)])
def test_an_exit_that_comes_while_the_learner_leaves_waits_and_gives_way_to_an_error_alone(
    kind: str, is_exiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    flag, codes = TerminateFlag(), []

    def train() -> None:
        flag.install()
        try:
            with flag.leaving(is_alone=True):
                signal.raise_signal(signal.SIGTERM)
        except SystemExit as error:
            codes.append(error.code)
        flag.restore()

    if kind == "handled":
        try:
            raise FileNotFoundError
        except FileNotFoundError:  # there was nothing to go on from
            train()
    elif kind == "failing":
        flag.install()
        try:
            raise ValueError
        except ValueError:
            with flag.leaving(is_alone=True):
                signal.raise_signal(signal.SIGTERM)
        flag.restore()
    else:
        train()
    assert codes == ([7] if is_exiting else [])
    assert ("is left out" in caplog.text) is not is_exiting


@pytest.mark.usefixtures("before")
def test_an_exit_that_waits_is_not_lost_where_another_rank_has_exited_already() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    flag = TerminateFlag()
    flag.install()

    def leave() -> None:
        with flag.leaving(is_alone=False):
            signal.raise_signal(signal.SIGTERM)
            raise LearnerError("another rank has ended") from RuntimeError("connection closed by peer")

    with pytest.raises(SystemExit, match="7"):
        leave()
    flag.restore()
