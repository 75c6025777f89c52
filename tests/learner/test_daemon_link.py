"""The learner's link thread against a bare socket, which plays daemons of every kind."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import CarryMode, Codec, MergeRule
from diloco_node.errors import LearnerError
from diloco_node.learner import daemon_link as module
from diloco_node.learner import daemon_session
from diloco_node.learner.daemon_link import LearnerLink
from diloco_node.learner.daemon_session import LearnerSession, join
from diloco_node.learner.ranks import WAITING, Ranks
from diloco_node.wire.learner_link import (
    LENGTH_BYTES,
    TO_DAEMON,
    TO_LEARNER,
    Attach,
    Failed,
    InitialState,
    Refuse,
    Report,
    SnapshotRequested,
    Stop,
    ToDaemon,
    ToLearner,
    VersionOffered,
    Welcome,
    frame,
    frame_length,
)
from tests.kit.waiting import until

PATIENCE_S = 120.0
WELCOME = Welcome(
    "us-east", 0, ("us-east",), 1, "run-1", 1, 4, MergeRule.RDA, Codec.INT4, CarryMode.CARRY, 16, 0, "ab", False, "/x"
)


def report(step: int) -> Report:
    return Report(step, step, None, 1, 1, None, None, step, None)


class Daemon:
    """One life of a daemon: a listening socket, and one connection at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(PATIENCE_S)
        self.listener.bind(str(path))
        self.listener.listen()
        self.connection: socket.socket | None = None

    def accept(self, *answers: ToLearner) -> ToDaemon:
        """Take a connection; its Attach."""
        self.hang_up()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(PATIENCE_S)
        attach = self.hear()
        self.say(*answers)
        return attach

    def hear(self) -> ToDaemon:
        length = frame_length(self._read(LENGTH_BYTES))
        return TO_DAEMON.decode(self._read(length))

    def _read(self, count: int) -> bytes:
        assert self.connection is not None
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            assert part, "the learner hung up"
            data += part
        return data

    def say(self, *messages: ToLearner) -> None:
        self.say_bytes(b"".join(frame(TO_LEARNER.encode(message)) for message in messages))

    def say_bytes(self, data: bytes) -> None:
        assert self.connection is not None
        self.connection.sendall(data)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()


class Learner:
    def __init__(self, path: Path) -> None:
        self.attaches = 0
        self.link = LearnerLink(path, self._attach)

    def _attach(self) -> Attach:
        self.attaches += 1
        return Attach(1, 5, (TensorSpec("w", (1,)),), 0, "", self.attaches, 0, 0, (), ())

    def commands(self) -> list[ToLearner]:
        with self.link.lock:
            return list(self.link.commands())

    def wait_for(self, count: int) -> list[ToLearner]:
        found: list[ToLearner] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline_s, found
            self.link.wait(0.05)
            found += self.commands()
        return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "l.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[Daemon]:
    one = Daemon(path)
    yield one
    one.close()


@pytest.fixture
def learner(path: Path) -> Iterator[Learner]:
    one = Learner(path)
    yield one
    one.link.close(0.0)


def test_attach_first_then_both_directions_in_order(daemon: Daemon, learner: Learner) -> None:
    attach = daemon.accept(WELCOME, SnapshotRequested(0, 1, 0))
    assert isinstance(attach, Attach)
    assert learner.wait_for(2) == [WELCOME, SnapshotRequested(0, 1, 0)]
    learner.link.send(InitialState())
    learner.link.send(Failed("x"))
    assert [daemon.hear(), daemon.hear()] == [InitialState(), Failed("x")]


def test_frames_cut_anywhere_are_put_together(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(WELCOME)
    learner.wait_for(1)
    data = b"".join(frame(TO_LEARNER.encode(SnapshotRequested(n, 1, 0))) for n in range(3))
    for byte in data:
        daemon.say_bytes(bytes([byte]))
    assert learner.wait_for(3) == [SnapshotRequested(n, 1, 0) for n in range(3)]


def test_newest_report_replaces_older_ones_that_were_not_sent(daemon: Daemon, learner: Learner) -> None:
    attach = daemon.accept()  # no welcome yet: nothing may be sent
    assert isinstance(attach, Attach)
    for step in range(1, 1001):
        learner.link.send(report(step))
    daemon.say(WELCOME)
    assert daemon.hear() == report(1000)


def test_no_report_overtakes_what_was_said_before_it(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(WELCOME)
    learner.wait_for(1)
    learner.link.send(report(1))
    assert daemon.hear() == report(1)
    learner.link.send(InitialState())
    learner.link.send(report(2))
    assert [daemon.hear(), daemon.hear()] == [InitialState(), report(2)]


def test_daemon_that_does_not_read_never_holds_the_training_thread(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(WELCOME)
    learner.wait_for(1)
    count = 4_000  # far more than the socket's buffer holds
    for step in range(1, count + 1):
        learner.link.send(Failed(f"{step:01000}"))
        learner.link.send(report(step))
    assert learner.link.has_outgoing()
    steps, texts = [0], 0
    while steps[-1] < count:  # and what arrives is whole, in order, and ends with the newest
        message = daemon.hear()
        if isinstance(message, Report):
            steps.append(message.step)
            assert texts >= message.step, "it overtakes nothing"
        else:
            assert isinstance(message, Failed)
            texts += 1
            assert int(message.reason) == texts
    assert steps == sorted(set(steps))


def test_nothing_is_kept_for_a_daemon_that_knows_nothing_of_it(daemon: Daemon, path: Path, learner: Learner) -> None:
    daemon.accept(WELCOME)
    learner.wait_for(1)
    daemon.hang_up()
    until(lambda: not learner.link.is_up)
    learner.link.send(Failed("said while nobody listened"))
    daemon.accept(WELCOME)
    learner.wait_for(1)
    learner.link.send(InitialState())
    assert daemon.hear() == InitialState()


def test_command_of_a_lost_daemon_is_void(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(WELCOME, SnapshotRequested(0, 1, 0))
    until(lambda: len(learner.link.waiting_commands) == 2)
    daemon.accept(WELCOME, Stop("second life"))
    until(lambda: len(learner.link.waiting_commands) == 2)
    assert learner.commands() == [WELCOME, Stop("second life")]
    assert learner.attaches == 2


def test_put_back_command_comes_again_at_the_next_boundary(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(WELCOME)
    learner.wait_for(1)
    daemon.say(SnapshotRequested(0, 1, 0))
    until(lambda: len(learner.link.waiting_commands) == 1)
    with learner.link.lock:
        for command in learner.link.commands():
            learner.link.put_back(command)
    assert learner.commands() == [SnapshotRequested(0, 1, 0)]
    assert learner.commands() == []


def test_what_is_put_back_comes_before_what_has_come_meanwhile(daemon: Daemon, learner: Learner) -> None:
    offers = [VersionOffered(0, 1, -1), VersionOffered(1, 1, -1)]
    daemon.accept(WELCOME)
    learner.wait_for(1)
    daemon.say(*offers)
    until(lambda: len(learner.link.waiting_commands) == 2)
    with learner.link.lock:
        taken = list(learner.link.commands())
        daemon.say(SnapshotRequested(0, 2, 1))
        until(lambda: len(learner.link.waiting_commands) == 1)
        learner.link.put_back(*taken)
    assert learner.commands() == [*offers, SnapshotRequested(0, 2, 1)]


def test_final_refusal_is_raised_in_the_training_thread(daemon: Daemon, learner: Learner) -> None:
    daemon.accept(Refuse("another model", True))
    learner.link.wait(PATIENCE_S)
    with pytest.raises(LearnerError, match="refused this learner: another model"):
        learner.commands()


def test_refusal_for_now_is_tried_again(daemon: Daemon, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_WAIT_S", 0.01)
    daemon.accept(Refuse("still starting", False))
    daemon.accept(WELCOME)
    assert learner.wait_for(1) == [WELCOME]


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", frame(b"\xc1"), frame(TO_LEARNER.encode(Stop("before welcome")))]
)
def test_daemon_that_breaks_the_protocol_is_left(daemon: Daemon, learner: Learner, garbage: bytes) -> None:
    daemon.accept()
    daemon.say_bytes(garbage)
    daemon.accept(WELCOME)
    assert learner.wait_for(1) == [WELCOME]


def test_queues_are_bounded(daemon: Daemon, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 10)
    daemon.accept(WELCOME, *(SnapshotRequested(0, n + 1, n) for n in range(20)))
    daemon.accept(WELCOME)  # the learner attached anew
    until(lambda: list(learner.link.waiting_commands) == [WELCOME])


def test_what_waits_to_be_sent_is_bounded(daemon: Daemon, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 10)
    daemon.accept(WELCOME)
    assert learner.wait_for(1) == [WELCOME]
    with learner.link._queue_lock:
        for number in range(11):
            learner.link.send(Failed(f"{number}"))
    with pytest.raises(AssertionError, match="the learner hung up"):
        daemon.hear()
    daemon.accept(WELCOME)  # the learner attached anew, and says nothing of it
    assert learner.wait_for(1) == [WELCOME]
    assert learner.attaches == 2
    assert not learner.link.has_outgoing()


def test_learner_that_came_first_finds_the_daemon(path: Path, learner: Learner) -> None:
    time.sleep(0.05)
    daemon = Daemon(path)
    try:
        daemon.accept(WELCOME)
        assert learner.wait_for(1) == [WELCOME]
    finally:
        daemon.close()


def test_close_sends_what_is_queued(daemon: Daemon, path: Path) -> None:
    learner = Learner(path)
    daemon.accept(WELCOME)
    learner.wait_for(1)
    learner.link.send(Failed("last word"))
    learner.link.close(PATIENCE_S)
    assert daemon.hear() == Failed("last word")


def test_bug_in_the_thread_is_raised_in_the_training_thread(daemon: Daemon, path: Path) -> None:
    def broken() -> Attach:
        raise ZeroDivisionError("planted")

    link = LearnerLink(path, broken)
    link.wait(PATIENCE_S)
    with link.lock, pytest.raises(LearnerError, match="planted"):
        list(link.commands())
    link.close(0.0)


class LateDaemon:
    """Rank 0's session while the daemon has no answer for long."""

    def join(self, _: Callable[[], bool], tell_waiting: Callable[[], object]) -> Any:
        tell_waiting()
        tell_waiting()
        return WELCOME


def test_the_others_hear_that_rank_0_still_waits_for_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bytes] = []
    first, second = Ranks(), Ranks()

    def share(data: bytes) -> bytes:
        said.append(data)
        return data

    monkeypatch.setattr(first, "share_bytes", share)
    session: Any = LateDaemon()
    assert join(session, first, lambda: False) == WELCOME
    assert said[:2] == [WAITING] * 2
    monkeypatch.setattr(second, "share_bytes", lambda data: said.pop(0))
    assert join(None, second, lambda: False) == WELCOME
    assert not said
    monkeypatch.setattr(daemon_session, "NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(daemon_session, "LearnerLink", lambda *_: MagicMock(may_have_commands=False))
    waits: list[int] = []
    nothing: Any = None
    alone = LearnerSession(Path(), Path(), nothing, b"", specs=(), shards=nothing, ranks=Ranks())
    assert alone.join(lambda: len(waits) == 3, lambda: waits.append(0)) is None
    assert len(waits) == 3
