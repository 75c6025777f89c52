"""The daemon's log: what is told, in which form, and what changes it while the daemon runs."""

import json
import subprocess
import sys

import pytest
import structlog

from diloco_node.daemon import logs as logs_module
from diloco_node.daemon.logs import PEER_CAUSES_MAX, part_of

LINES = """
import structlog
from diloco_node.daemon.logs import set_up_logs
set_up_logs()
log = structlog.get_logger()
for number in range(1000):
    log.warning("no link", peer="b", reason=f"eu at 1.2.3.4:{number}: the peer ended the stream")
    log.info("link up", peer="b")
log.warning("no link", peer="c", reason="\\x1b[31mred\\x1b[0m\\nlevel=error event=forged \\u202e")
log.error("ends", region="a", error=ValueError("\\x1b]0;x\\x07"))
for number in range(5000):
    log.warning("no link", peer="d", reason=f"w{number}")
"""


def test_log_lines_of_a_peer_are_bounded_and_escaped() -> None:
    process = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, check=True, timeout=240)
    lines = process.stderr.splitlines()
    of_b = [line for line in lines if "peer=b" in line]
    assert len(of_b) == 2, "one of each event"
    assert len([line for line in lines if "peer=d" in line]) == PEER_CAUSES_MAX
    (of_c,) = [line for line in lines if "peer=c" in line]
    assert "\\x1b[31mred" in of_c
    assert "forged" in of_c, "no line of its own"
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4 + PEER_CAUSES_MAX


def test_the_next_line_about_a_peer_says_how_many_were_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr(logs_module.time, "monotonic_ns", lambda: now_ns[0])
    lines = logs_module.PeerLines()

    def told() -> dict | None:
        try:
            return dict(lines(None, "", {"event": "no link", "peer": "b", "reason": "gone"}))
        except structlog.DropEvent:
            return None

    assert [told() is not None for _ in range(5)] == [True, False, False, False, False]
    now_ns[0] = 10**10
    again = told()
    assert again is not None
    assert again["held_back"] == "no link:4"
    assert lines(None, "", {"event": "started"}) == {"event": "started"}


def test_what_is_counted_does_not_grow_with_the_names_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "PEERS_MAX", 10)
    lines = logs_module.PeerLines()
    for number in range(100):
        lines(None, "", {"event": "no link", "peer": f"p{number}"})
        assert len(lines._repeats) <= 10


def said_by(code: str) -> list[str]:
    """The lines of a process with a log of its own."""
    words = [sys.executable, "-c", f"import structlog\nfrom diloco_node.daemon.logs import *\n{code}"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=240).stderr.splitlines()


def test_json_has_one_object_a_line_with_the_time_first() -> None:
    code = """
set_up_logs(form="json")
log = structlog.get_logger(part="transport")
log.warning("no link", peer="b", reason="one\\ntwo", tries=3)
try:
    raise ValueError("x")
except ValueError:
    log.error("broke", exc_info=True)
"""
    first, second = (json.loads(line) for line in said_by(code))
    assert list(first)[:4] == ["timestamp", "level", "event", "peer"]
    assert first["tries"] == 3
    assert (first["level"], first["event"], first["part"]) == ("warning", "no link", "transport")
    assert first["reason"] == "one\\ntwo"
    assert "ValueError: x" in second["exception"]


def test_lines_below_the_level_are_left_out() -> None:
    code = """
set_up_logs("warning")
link = structlog.get_logger(part="transport")
link.info("not told")
link.warning("first")
structlog.get_logger().error("second")
"""
    lines = said_by(code)
    assert [line.split("event=")[1].split()[0] for line in lines] == ["first", "second"]
    assert ["part=daemon" in line for line in lines] == [False, True]


def test_every_kind_of_note_belongs_to_a_part() -> None:
    kinds = ("budget", "disk", "learner", "leader", "open", "committed")
    assert [part_of(kind) for kind in kinds] == ["transport", "disk", "learner", "ledger", "rounds", "rounds"]
