"""The benchmark of idle daemons: its table, its CPU seconds, and the piece of work they are compared by."""

import idle
import psutil


def test_the_table_names_the_leader_and_each_window() -> None:
    row = {"rounds_per_second": 2.44, "leader": "eu", "cpu_percent": {"eu": 12.34, "us": 5.0}, "piece_ms": 7.25}
    lines = idle.table({"windows": {"rounds": row, "no rounds": row | {"leader": ""}}}).split("\n")
    assert lines[0] == "rounds              2.4 rounds/s, piece 7.2 ms  eu (leads) 12.3 %  us 5.0 %"
    assert lines[1].endswith("eu 12.3 %  us 5.0 %")


def test_cpu_seconds_are_those_of_the_process_and_the_piece_is_some_of_them() -> None:
    process = psutil.Process()
    before_s = idle.cpu_s(process)
    pieces_s = sum(idle.fixed_piece_s() for _ in range(20))
    assert 0.0 < pieces_s <= idle.cpu_s(process) - before_s + 0.02


def test_a_daemon_that_does_not_answer_has_no_rounds() -> None:
    assert idle.rounds_of({"region": "eu", "error": "no status"}) == 0
    assert idle.rounds_of({"rounds_committed": 3}) == 3
