"""The run's history: bounded, decimated without looking at a clock, and read back from its file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.daemon.admin import history
from diloco_node.daemon.admin.history import COLUMNS, HISTORY_NAME, RunHistory, halved, point_of, read_history

STATUS: dict[str, Any] = {
    "learner": {"step": 7, "tokens": 700, "loss": 2.5, "val_loss_global": None, "tokens_per_second": 99.0},
    "wire_bytes_out": 10,
    "wire_bytes_in": 20,
}
POINTS = st.lists(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=8, max_size=8), max_size=40)


def test_a_point_holds_what_the_status_says() -> None:
    assert point_of(STATUS, 1000.04) == [1000.0, 7, 700, 2.5, None, 99.0, 10, 20]


def test_a_loss_that_blew_up_or_a_missing_field_is_unknown() -> None:
    learner = {**STATUS["learner"], "loss": math.nan, "step": True}
    assert point_of({"learner": learner}, 5.0) == [5.0, None, 700, None, None, 99.0, None, None]
    assert point_of({"learner": None}, 5.0) is None
    assert point_of({"state": "starting"}, 5.0) is None


def test_the_current_rate_is_taken_where_there_is_one() -> None:
    learner = {**STATUS["learner"], "current_tokens_per_second": 5.0}
    point = point_of({**STATUS, "learner": learner}, 5.0)
    assert point is not None
    assert point[COLUMNS.index("tokens_per_second")] == 5.0


@given(POINTS)
def test_halving_keeps_the_end_and_the_bounds_of_every_column(points: list) -> None:
    half = halved(points)
    assert len(half) == math.ceil(len(points) / 2)
    if points:
        assert half[-1][0] == points[-1][0]
    for at in range(len(COLUMNS)):
        before = [point[at] for point in points if point[at] is not None]
        for value in (point[at] for point in half if point[at] is not None):
            assert min(before) - 1e-6 <= value <= max(before) + 1e-6


def test_two_hours_have_as_many_points_as_the_bound_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(history.time, "time", lambda: clock[0])
    kept = RunHistory(tmp_path)
    while clock[0] < 7200:
        clock[0] += kept.period_s
        assert kept.take(STATUS)
        kept.save()
    rows = kept.document()["rows"]
    assert history.POINTS_MAX // 2 <= len(rows) < history.POINTS_MAX
    assert kept.period_s == 8.0
    assert rows[-1][0] == pytest.approx(7200, abs=8)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert (tmp_path / HISTORY_NAME).stat().st_size < 2**20
    again = RunHistory(tmp_path)
    assert again.document() == kept.document()


def test_only_what_a_viewer_has_not_seen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RunHistory(tmp_path)
    for unix in (10.0, 20.0, 30.0):
        monkeypatch.setattr(history.time, "time", lambda unix=unix: unix)
        kept.take(STATUS)
    assert [row[0] for row in kept.document(20.0)["rows"]] == [30.0]


def test_a_status_without_a_learner_leaves_no_point(tmp_path: Path) -> None:
    kept = RunHistory(tmp_path)
    assert not kept.take({"learner": None})
    assert kept.document()["rows"] == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"columns": 3}', '{"columns": ["unix"], "period_s": 2}\n[1]', "\x00\xff", "null\n1"]
)
def test_a_damaged_file_is_no_history(tmp_path: Path, text: str) -> None:
    (tmp_path / HISTORY_NAME).write_text(text)
    assert read_history(tmp_path) == (history.SAMPLE_S, [])
    kept = RunHistory(tmp_path)
    kept.take(STATUS)
    kept.save()
    assert len(read_history(tmp_path)[1]) == 1


def test_lines_that_are_no_points_are_left_out(tmp_path: Path) -> None:
    head = json.dumps({"columns": COLUMNS, "period_s": 4.0})
    good = [1.0, 2, 3, None, 5.5, 6.0, 7, 8]
    lines = [head, json.dumps(good), "[1, 2]", '"x"', json.dumps([*good[:-1], "eight"]), json.dumps(good)[:-4]]
    (tmp_path / HISTORY_NAME).write_text("\n".join(lines))
    assert read_history(tmp_path) == (4.0, [good, [*good[:-1], None]])


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RunHistory(tmp_path)
    kept.take(STATUS)
    kept.save()
    monkeypatch.setattr(history, "FILE_BYTES_MAX", 10)
    assert read_history(tmp_path)[1] == []


def test_a_disk_that_refuses_costs_the_file_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    kept = RunHistory(folder)
    kept.take(STATUS)
    kept.save()
    folder.mkdir()
    kept.take(STATUS)
    kept.save()
    assert len(read_history(folder)[1]) == 2, "all of it is written when the disk takes it again"
