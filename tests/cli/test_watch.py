"""The screen of `status --watch`: fits its terminal, obeys its keys, ends with q. The last test is on a real one."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.cli.watch import HELP, SORTS, Board
from tests.health.test_alerts import DOWN, SOUND, changed, peers

US = SOUND | {
    "learner": SOUND["learner"] | {"loss": 2.5},
    "rounds_committed": 9,
    "wire_bytes_out": 0,
    "wire_bytes_in": 0,
}
EU = deepcopy(US) | {"region": "eu", "inner_steps": 500, "role": "follower", "rounds_committed": 3}
KEYS = ("q", "s", "r", "up", "down", "enter", "esc", "x", "")


def rows_of(board: Board, documents: list[dict[str, Any]], width: int = 80) -> list[str]:
    """Names of the regions in their order on the screen."""
    lines = board.lines(documents, width, 40)
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("region"))
    names = [line[2:].split()[0] for line in lines[heading + 1 :] if line[:2] in ("> ", "  ") and line[2:3].strip()]
    return [name for name in names if name.rstrip("*") in ("us", "eu", "ap")]


@given(
    st.lists(st.sampled_from(KEYS), max_size=8),
    st.integers(20, 120),
    st.integers(1, 50),
    st.sampled_from([[], [US], [US, EU], [{"region": "us", "error": "no status: " + 9 * "refused "}]]),
)
def test_every_screen_fits(keys: list[str], width: int, height: int, documents: list[dict[str, Any]]) -> None:
    board = Board()
    for key in keys:
        board.lines(documents, width, height)
        board.press(key)
    lines = board.lines(documents, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1] == f"{HELP}  [{board.sort}{', reversed' if board.is_reversed else ''}]"[:width]


def test_health_and_the_run_stand_first_in_eighty_columns() -> None:
    lines = Board().lines([changed(peers=peers(ap=DOWN))], 80, 24)
    assert lines[0].startswith("degraded: ")
    assert any(line.startswith("run try: step 64 of 250") for line in lines[:4])
    assert any(line.startswith("‼ A-LAST-MAJORITY: ") for line in lines)


def test_keys_sort_and_reverse() -> None:
    board = Board()
    assert rows_of(board, [US, EU]) == ["ap*", "eu", "us"]
    board.press("s")
    assert board.sort == "step"
    assert rows_of(board, [US, EU]) == ["eu", "us", "ap*"], "the most steps first, who has none last"
    board.press("r")
    assert rows_of(board, [US, EU])[-1] == "eu"
    for _ in SORTS[1:]:
        board.press("s")
    assert board.sort == "region"


def test_one_region_is_chosen_and_shown_alone() -> None:
    board = Board()
    board.lines([US, EU], 80, 40)
    assert board.chosen == "ap"
    board.press("down")
    board.press("enter")
    lines = board.lines([US, EU], 80, 40)
    assert board.chosen == "eu"
    assert not any(line.lstrip("> ").startswith("us") for line in lines)
    assert any(line.startswith("learner: 200 ms a step, reported 100 ms ago") for line in lines)
    board.press("esc")
    assert "us" in rows_of(board, [US, EU])
    board.press("up")
    assert board.chosen == "ap"


SCREEN = """
from diloco_node.cli.watch import run_screen
run_screen(lambda: [{"region": "us", "error": "no status from 127.0.0.1:1"}])
print("over")
"""
WATCH = """
from diloco_node.cli.admin_client import Target
from diloco_node.cli.status import _watch
_watch([Target("us", 1)], as_json=False)
"""


def shown_on(terminal: str, script: str, *, until: bytes, press: bytes = b"") -> bytes:
    """Read what a terminal of this kind shows, up to some words and what a key then brings; at most for two minutes."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": terminal, "LINES": "24", "COLUMNS": "80"}
        os.execv(sys.executable, [sys.executable, "-c", script])
    screen, has_pressed, deadline_s = b"", False, time.monotonic() + 120.0
    try:
        while time.monotonic() < deadline_s:
            if not select.select([master], [], [], 1.0)[0]:
                continue
            try:
                output = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            screen += output
            if until not in screen or has_pressed:
                continue
            if not press:
                break
            os.write(master, press)
            has_pressed = True
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)
    return screen


@pytest.mark.parametrize("terminal", ["xterm", "vt100"])
def test_a_terminal_shows_it_and_q_ends_it(terminal: str) -> None:
    screen = shown_on(terminal, SCREEN, until=b"quit", press=b"sq")
    assert b"no status from 127.0.0.1:1" in screen
    assert b"over" in screen, screen


def test_a_terminal_that_this_machine_does_not_know_gets_lines() -> None:
    """As in a small container, where the newer ones are not listed."""
    screen = shown_on("no-such-terminal", WATCH, until=b"no status from 127.0.0.1:1")
    assert b"no status from 127.0.0.1:1" in screen
    assert b"Traceback" not in screen
