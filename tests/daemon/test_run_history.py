"""The run history: bounded, whole after whatever the disk did, and readable while it is written."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.daemon import run_history as module
from diloco_node.daemon.curve_marks import MARKS_MAX, thin
from diloco_node.daemon.run_history import (
    ALL_COLUMNS,
    COLUMNS,
    HISTORY_NAME,
    RunHistory,
    halve,
    point_of,
    read_history,
    read_marks,
)


def status(step: int, **learner: Any) -> dict[str, Any]:
    return {
        "learner": {"loss": 2.0, "val_loss": 3.0, "val_loss_global": None, "step_seconds": 0.5, **learner},
        "inner_steps": step,
        "tokens": 10 * step,
        "tokens_merged": 25 * step,
        "rounds_committed": step // 4,
        "participation": 0.75,
        "wire_bytes_out": 7,
        "wire_bytes_in": 8,
    }


def test_a_row_says_what_the_status_said(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    assert history.take(status(8, current_tokens_per_second=5.0))
    history.save()
    head, row = (json.loads(line) for line in (tmp_path / HISTORY_NAME).read_text().splitlines())
    assert head == {"period_s": 2.0}
    assert row.pop("unix") > 1_700_000_000
    assert row == {
        "step": 8, "tokens": 80, "loss": 2.0, "tokens_per_second": 5.0, "bytes_out": 7, "bytes_in": 8, "val_loss": 3.0,
        "step_seconds": 0.5, "rounds": 2, "tokens_merged": 200, "participation": 0.75,
    }  # fmt: skip
    document = history.document()
    assert (document["columns"], len(document["rows"][0])) == (list(COLUMNS), len(COLUMNS))


def test_without_a_learner_there_is_no_point_and_no_number_is_none() -> None:
    assert point_of({"learner": None}, 1.0) is None
    point = point_of(status(1, loss=math.nan, val_loss="3"), 1.0)
    assert point is not None
    assert (point[ALL_COLUMNS.index("loss")], point[ALL_COLUMNS.index("val_loss")]) == (None, None)


def test_a_long_run_is_kept_whole_in_a_bounded_file(tmp_path: Path) -> None:
    history = RunHistory(tmp_path, points_max=8)
    for step in range(1, 101):
        if 2 * step % history.period_s:
            continue
        assert history.take(status(step))
        history.save()
        period_s, points = read_history(tmp_path)
        assert len(points) <= 8
        assert period_s == history.period_s
        assert points[-1][ALL_COLUMNS.index("step")] == step, "its end is there"
    steps = [point[ALL_COLUMNS.index("step")] for point in points]
    assert steps[0] == period_s / 2, "the run's beginning is there"
    assert steps == sorted(steps)
    assert len(points) >= 4


def test_the_next_daemon_goes_on_where_the_last_one_was_cut_off(tmp_path: Path) -> None:
    first = RunHistory(tmp_path, sample_s=1.0)
    for step in (1, 2):
        first.take(status(step))
        first.save()
    with (tmp_path / HISTORY_NAME).open("a") as file:
        file.write('{"unix": 17')
    second = RunHistory(tmp_path, sample_s=1.0)
    second.take(status(3))
    second.save()
    steps = [point[ALL_COLUMNS.index("step")] for point in read_history(tmp_path, sample_s=1.0)[1]]
    assert steps == [1, 2, 3]


def test_a_disk_that_refuses_costs_points_and_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "us"
    history = RunHistory(folder)
    history.take(status(1))
    history.save()
    folder.mkdir()
    history.take(status(2))
    history.save()
    assert len(read_history(folder)[1]) == 2


@pytest.mark.parametrize(
    ("text", "period_s", "unixes"),
    [
        ('{"period_s": 4}\n{"unix": 5.5, "loss": HUGE}\n{"unix": HUGE}\n', 4, [5.5]),
        ('{"period_s": HUGE}\n{"unix": 5.5}\n', 2, [5.5]),
        ('{"period_s": 1e300}\n{"unix": 5.5}\n', 2, [5.5]),
        ('{"period_s": NaN}\n{"unix": 5.5}\n{"unix": Infinity}\n', 2, [5.5]),
    ],
)
def test_numbers_that_no_run_has_are_not_believed(
    tmp_path: Path, text: str, period_s: float, unixes: list[float]
) -> None:
    (tmp_path / HISTORY_NAME).write_text(text.replace("HUGE", "1" + "0" * 400))
    found_s, points = read_history(tmp_path)
    assert (found_s, [point[0] for point in points]) == (period_s, unixes)
    assert all(value is None for point in points for value in point[1:])


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_is_emptied_meanwhile_keeps_what_comes_later(tmp_path: Path, is_gone: bool) -> None:
    history = RunHistory(tmp_path)
    for step in (1, 2, 3):
        history.take(status(step))
        history.save()
        if step == 1:
            (tmp_path / HISTORY_NAME).unlink() if is_gone else (tmp_path / HISTORY_NAME).write_text("")
    points = read_history(tmp_path)[1]
    assert [point[ALL_COLUMNS.index("step")] for point in points] == [2, 3]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HISTORY_NAME).write_text('{"period_s": 4}\n{"unix": 5.5}\n')
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 20)
    assert read_history(tmp_path) == (2.0, [])


def test_marks_stay_for_the_whole_run_each_once(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    clock = {"unix": 1e9, "monotonic_ns": 5_000_000_000}
    marks = [[1_000_000_000, "R"], [4_000_000_000, "L"]]
    assert history.take({"clock": clock, "marks": marks[:1]}), "a start without a learner, too"
    history.take(status(1) | {"clock": clock, "marks": marks})
    history.take(status(2) | {"clock": clock, "marks": marks[1:]})
    history.save()
    wanted = [(1e9 - 4.0, "R"), (1e9 - 1.0, "L")]
    assert read_marks(tmp_path) == history.document()["marks"] == wanted
    assert len(read_history(tmp_path)[1]) == 2
    later = RunHistory(tmp_path)
    clock = {"unix": 1e9 + 100.0, "monotonic_ns": 1_000_000_000}
    assert later.take({"clock": clock, "marks": [[500_000_000, "P"]]}), "of a machine that was started anew"
    later.save()
    assert read_marks(tmp_path) == [*wanted, (1e9 + 99.5, "P")]


def test_of_too_many_marks_those_stay_that_are_apart() -> None:
    marks = [(float(at), letter) for at in range(400) for letter in "RL"] + [(200.5, "Q")]
    apart = thin(marks)
    assert len(apart) <= MARKS_MAX
    assert (200.5, "Q") in apart, "a rare letter is not lost among others"
    assert {unix for unix, letter in apart if letter == "R"} == {7.0 * at for at in range(58)}
    assert len(thin([(1.0, "R")] * 600)) == 1


@pytest.mark.parametrize("mark", ["7", '"Z"', '["R"]', "null"])
def test_a_mark_of_somebody_else_is_none(tmp_path: Path, mark: str) -> None:
    (tmp_path / HISTORY_NAME).write_text(f'{{"unix": 5.5, "mark": {mark}}}\n{{"mark": "R"}}\n')
    assert (read_marks(tmp_path), read_history(tmp_path)[1]) == ([], [])


@given(st.binary(max_size=200))
def test_whatever_lies_there_is_read_as_points_or_as_nothing(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    folder = tmp_path_factory.mktemp("history")
    for head in (b"", b'{"period_s": 4}\n'):
        (folder / HISTORY_NAME).write_bytes(head + tail)
        period_s, points = read_history(folder)
        assert period_s > 0
        assert all(len(point) == len(ALL_COLUMNS) for point in points)


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=13, max_size=13), max_size=40))
def test_halving_keeps_the_end_and_the_bounds_of_every_column(points: list) -> None:
    half = halve(points)
    assert len(half) == math.ceil(len(points) / 2)
    if points:
        assert half[-1][0] == points[-1][0]
    for at in range(len(ALL_COLUMNS)):
        before = [point[at] for point in points if point[at] is not None]
        for value in (point[at] for point in half if point[at] is not None):
            assert min(before) - 1e-6 <= value <= max(before) + 1e-6


def test_rates_and_losses_are_averaged_and_of_counters_and_evaluations_the_later_stays() -> None:
    first, second = ([float(at), *(10.0 * at for _ in ALL_COLUMNS[1:])] for at in (1, 3))
    (value,) = halve([first, second])
    means = {name for name, value in zip(ALL_COLUMNS, value, strict=True) if value == 20.0}
    assert means == {"loss", "tokens_per_second", "step_seconds"}
    assert {value for name, value in zip(ALL_COLUMNS, value, strict=True) if name not in means} == {3.0, 30.0}
    (value,) = halve([first, [3.0, *(None for _ in ALL_COLUMNS[1:])]])
    kept_columns = {name for name, value in zip(ALL_COLUMNS, value, strict=True) if value == 10.0}
    assert kept_columns == means | {"loss_merged", "val_loss"}, "a daemon that restarts knows no evaluation for a while"


def test_the_recipe_for_curves_hands_each_row_on_once(tmp_path: Path) -> None:
    """examples/curves.py with a library that keeps what it gets."""
    (tmp_path / "node.json").write_text(json.dumps({"run_id": "try", "region": "eu"}))
    (tmp_path / "wandb.py").write_text(
        "class Run:\n"
        "    def log(self, values, step):\n"
        f"        print(step, values['loss'], file=open({str(tmp_path / 'log')!r}, 'a'))\n"
        "def init(project, name, group, resume): return Run()\n"
    )
    rows = [{"period_s": 1.0}, *({"unix": 1.7e9 + n, "tokens": 10 * n, "loss": 2.0 - n / 4} for n in (1, 2, 3))]
    script = Path(module.__file__).parents[2] / "examples" / "curves.py"
    for count in (2, 3):
        text = "".join(f"{json.dumps(row)}\n" for row in rows[: count + 1])
        (tmp_path / HISTORY_NAME).write_text(text + '{"unix": 1')
        command = [sys.executable, str(script), str(tmp_path), "wandb"]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
            until_s = time.monotonic() + 10.0
            while not (tmp_path / "curves.json").exists() or f"{count}.0" not in (tmp_path / "curves.json").read_text():
                assert time.monotonic() < until_s
                time.sleep(0.05)
            process.kill()
    assert (tmp_path / "log").read_text().split("\n") == ["10 1.75", "20 1.5", "30 1.25", ""]
