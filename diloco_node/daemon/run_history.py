"""How a run went, as one region saw it: a bounded row of points, kept in its folder as JSON lines.

A point comes every `period_s`. When POINTS_MAX are there, each two become one and the period doubles, so the file keeps
the whole run. The marks of the curves (`daemon.curve_marks`) are lines of their own.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from diloco_node.daemon.curve_marks import LETTERS, Mark, thin
from diloco_node.errors import StorageError
from diloco_node.storage.durable import replace_file

HISTORY_NAME: Final = "history.jsonl"
SAMPLE_S: Final = 2.0
POINTS_MAX: Final = 1024
FILE_BYTES_MAX: Final = 4 * 2**20
PERIOD_S_MAX: Final = 1e6
"""Limit on the period that a file may claim: POINTS_MAX of them are 32 years."""

COLUMNS: Final = (
    "unix",
    "step",
    "tokens",
    "loss",
    "loss_merged",
    "tokens_per_second",
    "bytes_out",
    "bytes_in",
    "val_loss",
)
"""Columns of a point: seconds since 1970, the learner's steps and tokens since the run began, loss of its training,
held-out loss of the merged model, tokens per second, bytes on the wire since this daemon started, held-out loss of this
region's own parameters."""

MORE_COLUMNS: Final = ("step_seconds", "rounds", "tokens_merged", "participation")
"""Seconds of a step, rounds committed and tokens merged of the run, part of the rounds that included this region. In
the file, and not on the page."""

ALL_COLUMNS: Final = COLUMNS + MORE_COLUMNS

MEANS: Final = frozenset({"loss", "tokens_per_second", "step_seconds"})
"""Columns that are averaged when two points become one; of the others the later value stays."""

EVALUATIONS: Final = frozenset({"loss_merged", "val_loss"})
"""Columns that stand in all points from an evaluation to the next. A daemon that restarts knows none for a while."""

Point = list[float | None]
"""Values in the order of ALL_COLUMNS."""

log = structlog.get_logger(part="disk")


def point_of(status: Mapping[str, Any], unix: float) -> Point | None:
    """The point that a status document makes; None as long as there is no learner."""
    learner = status.get("learner")
    if not isinstance(learner, Mapping):
        return None
    facts = {
        "unix": round(unix, 1),
        "step": status.get("inner_steps"),
        "tokens": status.get("tokens"),
        "loss": learner.get("loss"),
        "loss_merged": learner.get("val_loss_global"),
        "tokens_per_second": learner.get("current_tokens_per_second", learner.get("tokens_per_second")),
        "bytes_out": status.get("wire_bytes_out"),
        "bytes_in": status.get("wire_bytes_in"),
        "val_loss": learner.get("val_loss"),
        "step_seconds": learner.get("step_seconds"),
        "rounds": status.get("rounds_committed"),
        "tokens_merged": status.get("tokens_merged"),
        "participation": status.get("participation"),
    }
    return [_number(facts[name]) for name in ALL_COLUMNS]


def halve(points: Sequence[Point]) -> list[Point]:
    """Each two points made one; a last one without a partner stays."""
    pairs = [_join(points[at], points[at + 1]) for at in range(0, len(points) - 1, 2)]
    return pairs + list(points[len(pairs) * 2 :])


def _join(first: Point, second: Point) -> Point:
    return [
        _mean(before, after) if name in MEANS else before if after is None and name in EVALUATIONS else after
        for name, before, after in zip(ALL_COLUMNS, first, second, strict=True)
    ]


def _mean(first: float | None, second: float | None) -> float | None:
    values = [value for value in (first, second) if value is not None]
    return round(sum(values) / len(values), 6) if values else None


def _number(value: Any) -> float | None:
    """A finite number; None for everything else, also for what a file of this name may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return value if isinstance(value, int) else round(value, 6)


class RunHistory:
    """The points of one region, and their file. sample_s: between two points of a short run. points_max: at least 2."""

    def __init__(self, folder: Path, *, sample_s: float = SAMPLE_S, points_max: int = POINTS_MAX) -> None:
        self.period_s, self._points = read_history(folder, sample_s=sample_s)
        self._path = folder / HISTORY_NAME
        self._points_max = points_max
        self._marks = read_marks(folder)
        # Monotonic ns of the last mark of this daemon.
        self._marked_ns = 0
        # Lines that are not in the file yet. An earlier daemon's file may end in the middle of one: it is written anew.
        self._unwritten: list[str] = []
        self._is_whole = False

    def take(self, status: Mapping[str, Any]) -> bool:
        """Take the point and the new marks that a status document makes. Returns whether there is something to save."""
        self._take_marks(status)
        point = point_of(status, time.time())  # noqa: TID251 - shown to people, decides nothing
        if point is not None:
            self._points.append(point)
            self._unwritten.append(row_of(point))
        if len(self._points) >= self._points_max:
            self._points = halve(self._points)
            self.period_s *= 2
            self._is_whole = False
        return bool(self._unwritten)

    def _take_marks(self, status: Mapping[str, Any]) -> None:
        clock = status.get("clock", {})
        for at_ns, letter in status.get("marks", ()):
            if at_ns > self._marked_ns:
                self._marked_ns = at_ns
                mark = (round(clock["unix"] - (clock["monotonic_ns"] - at_ns) / 1e9, 1), letter)
                self._marks.append(mark)
                self._unwritten.append(line_of(mark))
        marks = thin(self._marks)
        self._is_whole &= len(marks) == len(self._marks)
        self._marks = marks

    def document(self) -> dict[str, Any]:
        """All points, ready for JSON; without MORE_COLUMNS."""
        points = [point[: len(COLUMNS)] for point in self._points]
        return {"columns": list(COLUMNS), "period_s": self.period_s, "rows": points, "marks": self._marks}

    def save(self) -> None:
        """Bring the file up to date, not at the same time as `take`. A disk may refuse: training goes on."""
        fresh, self._unwritten = self._unwritten, []
        try:
            if self._is_whole:
                with self._path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in fresh))
            else:
                head = json.dumps({"period_s": self.period_s})
                replace_file(
                    self._path, ["\n".join([head, *map(line_of, self._marks), *map(row_of, self._points), ""]).encode()]
                )
            self._is_whole = True
        except (OSError, StorageError) as error:
            self._is_whole = False
            log.info("no history", reason=str(error))


def row_of(point: Point) -> str:
    """A line of the file: one JSON object, its keys as in ALL_COLUMNS; what is not known is left out."""
    return json.dumps({name: value for name, value in zip(ALL_COLUMNS, point, strict=True) if value is not None})


def line_of(mark: Mark) -> str:
    """A mark's line of the file."""
    return json.dumps({"unix": mark[0], "mark": mark[1]})


def read_history(folder: Path, *, sample_s: float = SAMPLE_S) -> tuple[float, list[Point]]:
    """(period, points) of a region's file, without lines cut off; none where it is missing, or another."""
    rows = _rows(folder)
    period_s = next((_number(row.get("period_s")) for row in rows[:1]), None) or 0.0
    points = [[_number(row.get(name)) for name in ALL_COLUMNS] for row in rows if "mark" not in row]
    points = [point for point in points if point[0] is not None]
    return max(period_s if period_s <= PERIOD_S_MAX else 0.0, sample_s), points[-POINTS_MAX:]


def read_marks(folder: Path) -> list[Mark]:
    """The marks in a region's file, by time."""
    marks = [(_number(row.get("unix")), row.get("mark")) for row in _rows(folder)]
    return thin(
        (unix, letter) for unix, letter in marks if unix is not None and isinstance(letter, str) and letter in LETTERS
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The objects that are lines of the file."""
    path = folder / HISTORY_NAME
    try:
        lines = path.read_bytes().split(b"\n") if path.stat().st_size <= FILE_BYTES_MAX else []
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows
