"""What a service manager hears, at a path and at an abstract name; without one nothing happens."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from diloco_node.supervisor.service_manager import ServiceManager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_each_word_is_one_datagram(tmp_path: Path, is_abstract: bool) -> None:
    place = f"@diloco-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + place[1:] if is_abstract else place)
        listener.settimeout(30)
        manager = ServiceManager({"NOTIFY_SOCKET": place}, 7)
        manager.send("READY=1")
        manager.send("STATUS=steps")
        heard = [listener.recv(100) for _ in range(2)]
    assert heard == [b"READY=1", b"STATUS=steps"]


def test_a_manager_that_is_behind_hears_it_all_the_same(tmp_path: Path) -> None:
    place = str(tmp_path / "notify")
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(place)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # each from a socket of its own: the queue of the listener is what is full
                other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                other.setblocking(False)
                other.sendto(b"STATUS=other", place)
        ready = threading.Thread(target=ServiceManager({"NOTIFY_SOCKET": place}, 7).send, args=("READY=1",))
        ready.start()
        ready.join(0.2)
        heard = {listener.recv(100)}
        ready.join()
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.add(listener.recv(100))
    assert heard == {b"STATUS=other", b"READY=1"}


def test_nobody_listens_and_nothing_breaks(tmp_path: Path) -> None:
    for env in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, {"NOTIFY_SOCKET": "x" * 200}):
        ServiceManager(env, 7).send("READY=1")


@pytest.mark.parametrize(
    ("env", "every_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "120000000"}, 60.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "7"}, 60.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_period_if_it_is_ours(env: dict[str, str], every_s: float) -> None:
    assert ServiceManager(env, 7).alive_every_s == every_s
