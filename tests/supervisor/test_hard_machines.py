"""A supervisor on a machine that refuses something: processes, threads, a terminal that takes what is shown."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco_node.backoff import Backoff
from diloco_node.supervisor import child, preload
from diloco_node.supervisor.screen import WAITING_BYTES_MAX, Screen
from diloco_node.supervisor.supervisor import run_supervisor
from tests.kit.supervisor_kit import MAIN, NOTE, PATIENCE_S, WAIT, is_gone, lives, spec
from tests.kit.waiting import until

TRAIN = (
    NOTE
    + """
import signal, time
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
area = request_area(pathlib.Path(os.environ["DILOCO_SUPERVISOR"]), PLACE_AREA, PLACE_BYTES)
area[:] = PlaceMark(os.getpid(), step=9).encode()
note("trainer")
signal.sigwait([signal.SIGTERM])
time.sleep(1)
(place / "saved").touch()
"""
)

LAUNCH = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda number, _: rank.send_signal(number))
sys.exit(rank.wait())
"""


@pytest.mark.parametrize("trainer", ["train.py", "launch.py train.py"])
def test_a_learner_below_a_shell_is_stopped_before_the_shell_would_take_it_along(tmp_path: Path, trainer: str) -> None:
    """At SIGTERM the shell ends at once. The learner, or the launcher of its ranks, needs its time to save."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.py").write_text(LAUNCH)
    command = f"cd {tmp_path} && {sys.executable} {trainer}; true"
    learner = f"import os\nos.execvp('bash', ['bash', '-c', {command!r}])"
    process = subprocess.Popen([sys.executable, "-c", MAIN, str(tmp_path), WAIT, learner, "60"])
    until(lambda: lives(tmp_path, "trainer"))
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "saved").exists()
    assert is_gone(lives(tmp_path, "trainer")[0])


def test_a_terminal_that_takes_nothing_stops_neither_the_learner_nor_the_supervisor(tmp_path: Path) -> None:
    learner = NOTE + f"print('x' * 1000 + '\\n' * {WAITING_BYTES_MAX // 200})\nnote('learner')\n{WAIT}"
    learner = learner.replace("print(", "[print('x' * 1000) for _ in range(3000)]\nprint(")
    program = MAIN.replace("is_echoing=False", "is_echoing=True")
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), WAIT, learner, "60"], stderr=write)
    os.close(write)
    until(lambda: lives(tmp_path, "learner"))
    process.terminate()
    try:
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        os.close(read)
    assert (tmp_path / "logs" / "learner.log").read_bytes().count(b"x" * 1000) == 3001


def test_a_terminal_that_takes_something_again_is_told_how_much_it_has_missed() -> None:
    read, write = os.pipe()
    screen = Screen(write)
    line = b"y" * 1023 + b"\n"
    for _ in range(2 * WAITING_BYTES_MAX // len(line)):
        screen.write(line)
    output = bytearray()

    def take() -> None:
        while data := os.read(read, 65_536):
            output.extend(data)

    reader = threading.Thread(target=take)
    reader.start()
    screen.flush()
    screen.write(b"the end\n")
    screen.flush()
    os.close(write)
    reader.join(PATIENCE_S)
    os.close(read)
    lines = bytes(output).splitlines()
    missed = 2 * WAITING_BYTES_MAX // len(line) - lines.count(line.strip())
    assert missed > 0
    assert lines[-2:] == [
        b"%d lines are not shown, for this terminal took none: see the folder logs" % missed,
        b"the end",
    ]


@pytest.mark.parametrize("refused", [1, 2, 3])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_process_or_thread_that_is_refused_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: int
) -> None:
    starts = [0]

    class Scarce(subprocess.Popen[bytes]):
        def __init__(self, *words: object, **settings: object) -> None:
            starts[0] += 1
            if starts[0] == refused:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*words, **settings)  # type: ignore[call-overload]

    start = threading.Thread.start

    def start_scarce(thread: threading.Thread) -> None:
        starts[0] += 1
        if starts[0] == refused + 1:  # the first one is that of the memory
            raise RuntimeError("can't start new thread")
        start(thread)

    if kind == "process":
        monkeypatch.setattr(subprocess, "Popen", Scarce)
    else:
        monkeypatch.setattr(threading.Thread, "start", start_scarce)
    daemon = NOTE + "note('daemon')\nwait_for('learner', 2)"
    assert run_supervisor(spec(tmp_path, daemon, NOTE + "sys.exit(note('learner') == 1)")) == 0
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert " can't be started (" in log
    assert "limits of processes, threads and open files" in log


def test_what_the_first_process_of_a_container_inherits_is_reaped_and_its_own_children_are_not() -> None:
    pids = [os.posix_spawn("/bin/true", ["true"], os.environ) for _ in range(3)]
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    others = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()} - set(pids[1:])
    child.reap_strangers(others)
    for pid in pids[1:]:
        assert not Path(f"/proc/{pid}").exists()
    assert os.waitpid(pids[0], 0)[1] == 0


def test_forking_goes_on_without_a_fork_server_that_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process nor a thread: nothing of it is left."""
    said: list[str] = []
    server = preload.ForkServer(
        ["json"],
        [sys.executable, "x.py"],
        1,
        write=lambda _: None,
        report=lambda _: None,
        say=said.append,
        backoff=Backoff(0.1, 1.0),
    )

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    server.start(os.environ)
    assert (server.pid, server.is_starting) == (0, False)
    assert server.restart_at_s is not None
    assert said[-1].startswith("the preloading process can't be started (can't start new thread): another in 0.1 s")
    assert server.fork() is None


def test_the_signals_of_a_stop_reach_no_process_of_another_group(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        one = child.Child("learner", ["sleep", "60"], signal.SIGKILL, spec(tmp_path, "", None))
        ended = threading.Event()
        one.start({**os.environ, "DILOCO_SUPERVISOR": str(tmp_path)}, lambda _: ended.set())
        one.stop_below(stranger.pid, 0.1)
        one.stop_below(one.pid, 0.1)
        assert stranger.poll() is None
        assert not ended.is_set()
        one.kill()
        assert ended.wait(PATIENCE_S)
        one.ended()
        one.log.close()
        stranger.kill()
