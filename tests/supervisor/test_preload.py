"""supervisor/preload.py and fork_server.py, as two real processes: a fork is what a fresh start would have been."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco_node.backoff import Backoff
from diloco_node.supervisor import preload
from diloco_node.supervisor.preload import (
    FORK_SERVER,
    Forked,
    ForkServer,
    ServerEnded,
    ServerEvent,
    ServerReady,
    forkable_command,
)

PATIENCE_S = 60.0

# What a process can see of itself; the same text is a script and a module.
LOOK = """
import json, os, pathlib, signal, sys, threading
names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGUSR1")
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "cwd": os.getcwd(),
    "env": dict(os.environ), "name": __name__, "file": __file__, "cached": __cached__, "doc": __doc__,
    "package": __package__, "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__, "is_main": sys.modules["__main__"].__dict__ is globals(),
    "main_names": sorted(set(globals()) - {"__annotations__", "names"}),
    "signals": [str(signal.getsignal(getattr(signal, name))) for name in names],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "is_group_leader": os.getpgid(0) == os.getpid(), "is_session_leader": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "stdin": os.readlink("/proc/self/fd/0"),
    "is_one_pipe": os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through],
    "threads": threading.active_count(), "umask": os.umask(0o22), "threshold": __import__("gc").get_threshold(),
}))
"""


class Harness:
    """A fork server, and what it reports and says."""

    def __init__(self, modules: Sequence[str], command: Sequence[str]) -> None:
        self.events: queue.SimpleQueue[ServerEvent] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.output = bytearray()
        at, reason = forkable_command(command)
        assert reason == ""
        self.server = ForkServer(
            modules,
            command,
            at,
            write=self.output.extend,
            report=self.events.put,
            say=self.lines.append,
            backoff=Backoff(0.01, 0.02),
        )

    def start(self, env: dict[str, str] | None = None) -> ServerEvent:
        """Until it is ready, or says that it never will be."""
        self.server.start(dict(os.environ) if env is None else env)
        return self.next()

    def next(self) -> ServerEvent:
        event = self.events.get(timeout=PATIENCE_S)
        self.server.note(event)
        return event

    def fork(self) -> Forked:
        forked = self.server.fork()
        assert forked is not None, self.lines
        return forked


@contextmanager
def ready(modules: Sequence[str], command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Harness]:
    harness = Harness(modules, command)
    try:
        event = harness.start(env)
        assert isinstance(event, ServerReady)
        assert event.error == ""
        yield harness
    finally:
        harness.server.close()


def finish(process: Forked | subprocess.Popen[bytes]) -> tuple[str, int]:
    """Its output and exit code."""
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read().decode()
    return text, process.wait()


def fresh(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """As the supervisor starts one."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@pytest.mark.parametrize("options", [[], ["-u", "-X", "utf8", "-W", "error"], ["-P"]])
@pytest.mark.parametrize("kind", ["script", "relative", "link", "module"])
def test_a_fork_sees_what_a_fresh_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: list[str]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(LOOK)
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "train.py")
    monkeypatch.chdir(tmp_path)
    what = {
        "script": [str(tmp_path / "package" / "train.py")],
        "relative": ["package/train.py"],
        "link": ["link.py"],
        "module": ["-m", "package.train"],
    }[kind]
    command = [sys.executable, *options, *what, "--lr", "0.1", "", "-m", "--"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OF_THE_RUN": "x", "PYTHONDONTWRITEBYTECODE": "1"}
    as_fresh = json.loads(finish(fresh(command, env))[0])
    with ready(["json", "decimal"], command, env) as harness:
        for _ in range(2):
            assert json.loads(finish(harness.fork())[0]) == as_fresh


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs these tests may ignore it
signal.raise_signal(signal.SIGINT)
"""

ENDS = {
    "whole": ("print('done')", 0, "done\n"),
    "exit": ("import sys; sys.exit(5)", 5, ""),
    "words": ("import sys; sys.exit('wrong data')", 1, "wrong data\n"),
    "hard": ("import os; os._exit(9)", 9, ""),
    "killed": ("import os; os.kill(os.getpid(), 9)", -9, ""),
    "interrupt": (INTERRUPTED, -2, "KeyboardInterrupt"),
    "abort": ("import os; os.abort()", -6, ""),
    "error": ("raise ValueError('no data')", 1, "ValueError: no data\n"),
    "syntax": ("x = = 1", 1, "SyntaxError: invalid syntax\n"),
    "atexit": ("import atexit; atexit.register(print, 'at exit'); print('end')", 0, "end\nat exit\n"),
    "thread": ("import threading, time\nthreading.Timer(0.1, print, ['late']).start()", 0, "late\n"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_supervisor_sees_how_a_fork_ends(tmp_path: Path, end: str) -> None:
    text, code, output = ENDS[end]
    with ready(["json"], script(tmp_path, text)) as harness:
        found, found_code = finish(harness.fork())
    assert found_code == code
    assert output in found


def test_a_script_that_is_gone_by_then_is_named_as_the_interpreter_does(tmp_path: Path) -> None:
    command = script(tmp_path, "")
    with ready(["json"], command) as harness:
        Path(command[1]).unlink()
        output, code = finish(harness.fork())
    assert code == finish(fresh(command, dict(os.environ)))[1] == 2
    assert f"can't open file '{command[1]}': [Errno 2] No such file" in output


def test_each_start_reads_the_script_anew(tmp_path: Path) -> None:
    command = script(tmp_path, "print('one')")
    with ready(["json"], command) as harness:
        assert finish(harness.fork()) == ("one\n", 0)
        Path(command[1]).write_text("print('two')")
        assert finish(harness.fork()) == ("two\n", 0)


def test_each_fork_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    text = (
        "import random, numpy as np, uuid\nprint(random.random(), np.random.rand(), np.random.default_rng().random())"
    )
    with ready(["random", "numpy", "numpy.random"], script(tmp_path, text)) as harness:
        drawn = [finish(harness.fork())[0].split() for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 9


def test_torch_is_seeded_in_each_fork_as_in_each_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = "import os, torch\nprint(torch.initial_seed(), torch.rand(1).item(), torch.get_num_threads(), flush=True)"
    command = script(tmp_path, f"{text}\nos._exit(0)")  # its end takes a second
    with ready(["torch"], command) as harness:
        seen = [finish(process)[0].split() for process in (harness.fork(), harness.fork())]
    seen.append(finish(fresh(command, dict(os.environ)))[0].split())
    seeds, numbers, threads = (set(column) for column in zip(*seen, strict=True))
    assert (len(seeds), len(numbers), len(threads)) == (3, 3, 1)


def test_what_a_fork_uses_was_imported_before_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os\nborn = os.getpid()\n")
    command = script(
        tmp_path, "import os, sys\nprint('slow' in sys.modules)\nimport slow\nprint(slow.born == os.getpid())"
    )
    with ready(["slow"], command) as harness:  # found beside the script, as the script finds it
        assert finish(harness.fork()) == ("True\nFalse\n", 0)


def test_forks_write_into_pipes_of_their_own_and_the_server_into_the_log(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('imported')")
    with ready(["loud"], script(tmp_path, "import sys\nprint('out')\nprint('err', file=sys.stderr)")) as harness:
        first, second = harness.fork(), harness.fork()
        assert sorted(finish(first)[0].split()) == sorted(finish(second)[0].split()) == ["err", "out"]
    assert bytes(harness.output) == b"imported\n"


def test_threads_of_a_forked_learner_work(tmp_path: Path) -> None:
    text = "import numpy as np\nfrom concurrent.futures import ThreadPoolExecutor\na = np.ones((300, 300))\n"
    text += "with ThreadPoolExecutor(2) as pool: print(*pool.map(lambda k: (k * a @ a).sum(), [1, 2]))"
    with ready(["numpy", "concurrent.futures.thread"], script(tmp_path, text)) as harness:
        assert finish(harness.fork()) == ("27000000.0 54000000.0\n", 0)


# ---- what can't be forked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "can't import 'wrong' (ModuleNotFoundError: No module named 'no_such_module')"),
        ("raise OSError('no disk')", "can't import 'wrong' (OSError: no disk)"),
        ("raise SystemExit(3)", "can't import 'wrong' (SystemExit: 3)"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "importing 'wrong' started threads (",
        ),
    ],
)
def test_a_module_that_can_not_be_preloaded_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "wrong.py").write_text(text)
    harness = Harness(["json", "wrong"], script(tmp_path, "print('trained')"))
    try:
        event = harness.start()
        assert isinstance(event, ServerReady)
        assert event.error.startswith(reason)
        assert harness.lines[-1].startswith(f"no preload: {reason}")
        assert "correct `[learner] preload`" in harness.lines[-1]
        assert harness.server.fork() is None
        assert harness.next() == ServerEnded(1)
        assert harness.server.restart_at_s is None  # it would only say so again
    finally:
        harness.server.close()


def test_an_open_device_is_a_problem() -> None:
    text = f"""
import sys
sys.path[0] = {str(FORK_SERVER.parent)!r}
import fork_server
fork_server.DEVICES = ("/dev/nvidia", "/dev/zero")
print(fork_server.fork_problem() == "")
file = open("/dev/zero", "rb")
print(fork_server.fork_problem())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "True\nopened the device /dev/zero, which a fork can't use\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["torchrun", "train.py"], "torchrun starts its ranks itself, each as a process of its own"),
        ([sys.executable, "-m", "torch.distributed.run", "train.py"], "torch.distributed.run starts its ranks itself"),
        (["bash", "train.sh"], "bash is not Python"),
        ([sys.executable, "-c", "print()"], "neither `python SCRIPT`"),
        ([sys.executable, "no-such-file.py"], "neither `python SCRIPT`"),
        ([sys.executable], "neither `python SCRIPT`"),
        ([sys.executable, "-m"], "neither `python SCRIPT`"),
        ([sys.executable, "-i", str(FORK_SERVER)], "neither `python SCRIPT`"),
        (["/no/such/python3", str(FORK_SERVER)], "/no/such/python3 is not there"),
    ],
)
def test_a_command_that_can_not_be_forked_says_why(command: list[str], reason: str) -> None:
    at, said = forkable_command(command)
    assert at == 0
    assert reason in said


@pytest.mark.parametrize("options", [[], ["-u"], ["-uB", "-X", "dev", "-W", "error", "-O"]])
def test_a_command_that_can_be_forked(options: list[str]) -> None:
    assert forkable_command([sys.executable, *options, str(FORK_SERVER), "-m"]) == (1 + len(options), "")
    assert forkable_command([sys.executable, *options, "-m", "train"]) == (1 + len(options), "")


# ---- how it ends -----------------------------------------------------------------------------------------------------


def test_a_killed_server_is_started_again_and_its_forks_go_on(tmp_path: Path) -> None:
    text = "import signal\nprint('trains', flush=True)\nsignal.sigwait([signal.SIGUSR1])\nprint('still')"
    text = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n{text}"
    with ready(["json"], script(tmp_path, text)) as harness:
        forked = harness.fork()
        assert forked.stdout.readline() == b"trains\n"
        os.kill(harness.server.pid, signal.SIGKILL)
        assert harness.next() == ServerEnded(-9)
        assert harness.server.fork() is None
        assert harness.server.restart_at_s is not None
        assert harness.server.pid == 0
        assert isinstance(harness.start(), ServerReady)
        again = harness.fork()
        assert again.stdout.readline() == b"trains\n"
        for one in (forked, again):
            one.send_signal(signal.SIGUSR1)
            assert finish(one) == ("still\n", 0)
            one.send_signal(signal.SIGKILL)  # it has ended, its number may be another's


def test_one_that_served_for_long_is_started_again_as_soon_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(preload.time, "monotonic", lambda: now_s[0])
    harness = Harness(["json"], [sys.executable, "-m", "json.tool"])
    waits = []
    for served_s in (0.0, 0.0, 1.0):
        event = harness.start()
        assert isinstance(event, ServerReady)
        now_s[0] += served_s
        os.kill(harness.server.pid, signal.SIGKILL)
        assert isinstance(harness.next(), ServerEnded)
        assert harness.server.restart_at_s is not None
        waits.append(round(harness.server.restart_at_s - now_s[0], 3))
    assert waits == [0.01, 0.02, 0.01]


def test_a_server_that_can_not_be_started_is_tried_again(tmp_path: Path) -> None:
    harness = Harness(["json"], script(tmp_path, ""))
    python = Path(sys.executable).name
    harness.server._interpreter[0] = str(tmp_path / python)  # it was there when the supervisor began
    harness.server.start(dict(os.environ))
    assert not harness.server.is_starting
    assert harness.server.restart_at_s is not None
    assert harness.lines == [
        "the preloading process can't be started (No such file or directory): another in 0.0 s; "
        "until that is ready the learner starts afresh"
    ]
    assert harness.server.fork() is None
    harness.server.close()


def test_a_server_that_does_not_answer_is_killed_and_makes_no_learner_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "ANSWER_S", 0.1)
    mark = tmp_path / "trained"
    with ready(["json"], script(tmp_path, f"open({str(mark)!r}, 'w')")) as harness:
        os.kill(harness.server.pid, signal.SIGSTOP)
        assert harness.server.fork() is None
        assert "it is killed, the learner starts afresh" in harness.lines[-1]
        assert harness.next() == ServerEnded(-9)
    assert not mark.exists()


def test_a_fork_that_nobody_waits_for_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor gave up after the fork was made: two learners must not run."""
    mark = tmp_path / "trained"
    with ready(["json"], script(tmp_path, f"open({str(mark)!r}, 'w')")) as harness:
        with monkeypatch.context() as context:
            context.setattr(preload, "_PR_SET_CHILD_SUBREAPER", 0)  # an option that prctl does not know
            assert harness.server.fork() is None
            assert "ChildProcessError" in harness.lines[-1]
        assert harness.next() == ServerEnded(-9)
    assert not mark.exists()


def test_neither_server_nor_fork_outlives_the_supervisor(tmp_path: Path) -> None:
    command = script(tmp_path, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    text = f"""
import os, queue, sys
from diloco_node.backoff import Backoff
from diloco_node.supervisor.preload import ForkServer
events = queue.SimpleQueue()
server = ForkServer(["json"], {command!r}, 1, write=print, report=events.put, say=lambda line: None,
                    backoff=Backoff(1, 1))
server.start(dict(os.environ))
server.note(events.get())
print(server.pid, server.fork().stdout.readline().decode().strip(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    deadline_s = time.monotonic() + PATIENCE_S
    for pid in done.stdout.split():
        while (
            Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
