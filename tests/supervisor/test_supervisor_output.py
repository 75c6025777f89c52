"""Everything a supervisor says: to people, to its log and to the service manager."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diloco_node.supervisor import child
from diloco_node.supervisor.supervisor import logfmt, run_supervisor
from tests.kit.supervisor_kit import PATIENCE_S, python, spec


def test_what_the_daemon_says_to_people_is_shown_and_its_log_only_when_asked_for(tmp_path: Path) -> None:
    # Whole lines in one write, as the daemon does: `print` writes the end of a line apart.
    daemon = python("import os; os.write(1, b'for people\\n'); os.write(2, b'a fact\\n')")
    learner = python("import os; os.write(1, b'steps\\n')")
    for is_verbose, shown in ((False, {"for people", "steps"}), (True, {"for people", "steps", "a fact"})):
        place = tmp_path / str(is_verbose)
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from diloco_node.supervisor.supervisor import SupervisorSpec, run_supervisor\n"
            f"spec = SupervisorSpec('us', Path({str(place)!r}), {daemon}, {learner}, is_verbose={is_verbose}, "
            "log_format='json', daemon_first_s=0.0)\n"
            "sys.exit(run_supervisor(spec))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
        lines = done.stderr.splitlines()
        assert {line for line in lines if "us: " not in line} == shown
        assert any(line.endswith("Z us: daemon started, start=1") for line in lines)
        assert (place / "logs" / "daemon.log").read_text() == "a fact\n"
        said = [json.loads(line) for line in (place / "logs" / "supervisor.log").read_text().splitlines()]
        assert "daemon started, start=1" in [fact["event"] for fact in said]


def test_the_supervisor_s_log_is_key_value_whatever_stands_in_it() -> None:
    fact = {"level": "info", "event": 'say "x"\nand a=b', "region": "us"}
    assert logfmt(fact) == r'level=info event="say \"x\"\nand a=b" region=us'


def test_the_service_manager_is_told_when_the_region_is_up_lives_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        state = tmp_path / "us"
        state.mkdir()
        (state / "admin.port").write_text("of a daemon that was killed")
        daemon = (
            "import os, time, pathlib\nplace = pathlib.Path(os.environ['PLACE'])\n"
            "assert not (place / 'admin.port').exists()\nassert 'NOTIFY_SOCKET' not in os.environ\n"
            "time.sleep(0.1)\n(place / 'admin.port').write_text('7401')\n"
            "while not (place / 'go').exists(): time.sleep(0.01)\n"
        )
        thread = threading.Thread(target=lambda: (heard_ready.wait(PATIENCE_S), (state / "go").touch()))
        heard_ready = threading.Event()
        told: list[str] = []

        def listen() -> None:
            while "STOPPING=1" not in told:
                told.append(manager.recv(4096).decode())
                if "READY=1" in told and told.count("WATCHDOG=1") >= 3:
                    heard_ready.set()

        listener = threading.Thread(target=listen)
        thread.start()
        listener.start()
        assert run_supervisor(spec(state, daemon, None)) == 0
        listener.join(PATIENCE_S)
        thread.join(PATIENCE_S)
    assert told.index("STATUS=daemon started, start=1") < told.index("READY=1") < told.index("STOPPING=1")
    assert told.count("READY=1") == 1


def test_a_signal_to_all_that_a_learner_is_reaches_each_process_once(tmp_path: Path) -> None:
    """Python writes its stacks at SIGABRT, and a second one ends it meanwhile. Real-time signals are counted."""
    count = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    print("ready", flush=True)
    signal.sigwait([signal.SIGRTMIN])
    again = signal.sigtimedwait([signal.SIGRTMIN], 0.3)
    print("once" if again is None else "twice", flush=True)
    """
    ended = threading.Event()
    one = child.Child("learner", python(count), signal.SIGKILL, spec(tmp_path, "", None))
    one.start({**os.environ, "DILOCO_SUPERVISOR": str(tmp_path)}, lambda _: ended.set())
    log = tmp_path / "logs" / "learner.log"
    until_s = time.monotonic() + PATIENCE_S
    while "ready" not in log.read_text() and time.monotonic() < until_s:
        time.sleep(0.01)
    one.kill(signal.SIGRTMIN)
    assert ended.wait(PATIENCE_S)
    one.ended()
    one.log.close()
    assert log.read_text().split() == ["ready", "once"]
