"""What the supervisor says of its learner's process is read back, and nothing that makes no sense."""

from pathlib import Path

import pytest

from diloco_node.supervisor.process_file import PROCESS_FILE, REASON_CHARS_MAX, read_process, write_process

WORD = {
    "state": "stopped",
    "reason": "crashed 10 times in 2 min",
    "crashes": 10,
    "hangs": 0,
    "exit_code": -11,
    "restarts": 9,
    "log": "/state/us/logs/learner.log",
    "lost": {"unsaved_steps": 99, "unmerged_steps": 12},
}


def test_what_was_written_is_read_and_replaced(tmp_path: Path) -> None:
    write_process(tmp_path, {"state": "running", "reason": "", "crashes": 0, "hangs": 0})
    write_process(tmp_path, WORD)
    assert read_process(tmp_path) == WORD
    assert [path.name for path in tmp_path.iterdir()] == [PROCESS_FILE]
    write_process(tmp_path, None)
    assert read_process(tmp_path) == {}, "a supervisor without a learner"
    write_process(tmp_path, None)


def test_the_word_of_an_older_supervisor_is_read(tmp_path: Path) -> None:
    write_process(tmp_path, {"state": "running", "reason": "", "crashes": 0, "hangs": 0})
    found = read_process(tmp_path)
    assert (found["exit_code"], found["restarts"], found["log"], found["lost"]) == (None, 0, "", None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 20_000,
        '{"state": "stopped"}',
        '{"state": "flying", "reason": "", "crashes": 0, "hangs": 0}',
        '{"state": "stopped", "reason": "", "crashes": Infinity, "hangs": 0}',
        '{"state": "stopped", "reason": "", "crashes": [], "hangs": 0}',
        '{"state": "stopped", "reason": "", "crashes": 0, "hangs": 0, "lost": [1]}',
        '{"state": "stopped", "reason": "' + "x" * 20_000 + '", "crashes": 0, "hangs": 0}',
    ],
)
def test_what_makes_no_sense_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / PROCESS_FILE).write_text(text)
    assert read_process(tmp_path) == {}


def test_a_long_reason_is_cut(tmp_path: Path) -> None:
    write_process(tmp_path, {**WORD, "reason": "x" * 5000})
    assert len(read_process(tmp_path)["reason"]) == REASON_CHARS_MAX


def test_no_file_is_nothing_and_a_folder_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    assert read_process(tmp_path) == {}
    write_process(tmp_path / "gone", WORD)
