"""`python -m diloco_node.daemon.trackers`: hands a region's run history on to TensorBoard, Trackio or Weights & Biases.

A process of its own, started by the supervisor: what these libraries do (threads, networks, hundreds of megabytes) is
then nothing to the daemon. It reads `history.jsonl` as it grows. The x axis is the region's tokens; a run is one group,
a region one line in it. TRACKED_NAME holds how far it came, so a restart repeats nothing.

Usage: python -m diloco_node.daemon.trackers STATE_DIR REGION RUN_ID TRACKER...
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from diloco_node.atomic_file import replace_file
from diloco_node.daemon.run_history import ALL_COLUMNS, HISTORY_NAME, read_history

TRACKED_NAME: Final = "history.tracked.json"
HISTORY_POLL_S: Final = 2.0
"""Between two looks at whether the history has grown."""

KEYS: Final = {
    "loss": "train/loss",
    "val_loss": "train/val_loss",
    "tokens_per_second": "train/tokens_per_second",
    "step_seconds": "train/step_seconds",
    "step": "train/step",
    "loss_merged": "sync/val_loss",
    "rounds": "sync/rounds",
    "tokens_merged": "sync/tokens_merged",
    "participation": "sync/participation",
    "bytes_out": "sync/bytes_out",
    "bytes_in": "sync/bytes_in",
}
"""A column of the history, and what a tracker calls it. `tokens` is the x axis, `unix` the time."""


class CurveTracker(Protocol):
    """Something that draws curves."""

    def log(self, values: Mapping[str, float], *, tokens: int, unix: float) -> None:
        """Log a point of several curves."""

    def close(self) -> None:
        """Everything that was logged is written when this returns."""


class TensorBoardTracker:
    """Event files in `tensorboard/RUN/REGION` of the region's folder."""

    def __init__(self, state_dir: Path, region: str, run_id: str) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(state_dir / "tensorboard" / run_id / region))

    def log(self, values: Mapping[str, float], *, tokens: int, unix: float) -> None:
        """See CurveTracker."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, tokens, wall_time=unix)
        self._writer.flush()

    def close(self) -> None:
        """See CurveTracker."""
        self._writer.close()


class TrackioTracker:
    """A project of the run's name, where Trackio keeps its projects (TRACKIO_DIR, TRACKIO_SERVER_URL)."""

    def __init__(self, state_dir: Path, region: str, run_id: str) -> None:
        import trackio

        del state_dir
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=run_id, name=region, group=run_id, resume="allow", **quiet)

    def log(self, values: Mapping[str, float], *, tokens: int, unix: float) -> None:
        """See CurveTracker."""
        self._run.log({**values, "tokens": tokens, "unix": unix}, step=tokens)

    def close(self) -> None:
        """See CurveTracker."""
        self._run.finish()


class WandbTracker:
    """A run in the project WANDB_PROJECT (`diloco-node`); files in the region's folder. WANDB_MODE=offline works."""

    def __init__(self, state_dir: Path, region: str, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "diloco-node"),
            group=run_id,
            name=region,
            id=f"{run_id}-{region}",
            resume="allow",
            dir=str(state_dir),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def log(self, values: Mapping[str, float], *, tokens: int, unix: float) -> None:
        """See CurveTracker."""
        self._run.log({**values, "tokens": tokens, "unix": unix})

    def close(self) -> None:
        """See CurveTracker."""
        self._run.finish()


TRACKERS: Final[Mapping[str, Callable[[Path, str, str], CurveTracker]]] = {
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}


class HistoryFollower:
    """Hands on what is new in a region's history.

    Args:
        state_dir: the region's folder. trackers: by name; closed by who made them.
    """

    def __init__(self, state_dir: Path, trackers: Mapping[str, CurveTracker]) -> None:
        self._state_dir = state_dir
        self._trackers = trackers
        self._seen: tuple[int, int] | None = None
        self._until = self._read_position()

    def look(self) -> int:
        """Hand on the points that each tracker does not have; how many there were.

        Raises:
            ExceptionGroup: what trackers raised. The others have got their points.
        """
        try:
            stat = (self._state_dir / HISTORY_NAME).stat()
        except FileNotFoundError:
            return 0
        if (stat.st_mtime_ns, stat.st_size) == self._seen:
            return 0
        self._seen = (stat.st_mtime_ns, stat.st_size)
        _, points = read_history(self._state_dir)
        rows = [dict(zip(ALL_COLUMNS, point, strict=True)) for point in points]
        before = dict(self._until)
        count = 0
        failures: list[Exception] = []
        for name, tracker in self._trackers.items():
            try:
                count += self._hand_on(name, tracker, rows)
            except Exception as error:  # noqa: BLE001 - whatever a library raises whose service is down
                failures.append(error)
        if self._until != before:
            self._remember()
        if failures:
            raise ExceptionGroup("trackers took no points", failures)
        return count

    def _remember(self) -> None:
        """A full disk costs a repetition after a restart; while this process lives it repeats nothing."""
        with contextlib.suppress(OSError):
            replace_file(self._state_dir / TRACKED_NAME, json.dumps(self._until).encode(), is_durable=False)

    def _hand_on(self, name: str, tracker: CurveTracker, rows: Sequence[Mapping[str, float | None]]) -> int:
        count = 0
        for row in rows:
            unix, tokens = row["unix"] or 0.0, row["tokens"]
            if unix <= self._until.get(name, 0.0) or tokens is None:
                continue
            values = {key: value for column, key in KEYS.items() if (value := row[column]) is not None}
            tracker.log(values, tokens=int(tokens), unix=unix)
            self._until[name] = unix
            count += 1
        return count

    def _read_position(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError, AttributeError, OverflowError, RecursionError):
            document = json.loads((self._state_dir / TRACKED_NAME).read_bytes())
            return {name: float(unix) for name, unix in document.items() if isinstance(unix, (int, float))}
        return {}


@contextlib.contextmanager
def open_trackers(state_dir: Path, region: str, run_id: str, names: Sequence[str]) -> Iterator[dict[str, CurveTracker]]:
    """Open the trackers that can be opened; they are closed at the end.

    Raises:
        ExceptionGroup: at the end: what the others raised.
    """
    trackers: dict[str, CurveTracker] = {}
    failures: list[Exception] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                trackers[name] = TRACKERS[name](state_dir, region, run_id)
            except Exception as error:  # noqa: BLE001 - whatever a library raises that lacks a key or a network
                failures.append(error)
            else:
                stack.callback(trackers[name].close)
        yield trackers
    if failures:
        raise ExceptionGroup("trackers did not open", failures)


def main(arguments: list[str]) -> int:
    """Follow until SIGTERM, then hand on the rest; the exit code.

    Where a tracker did not open, this ends after one look: the supervisor's restart, later each time, tries it again.
    """
    folder, region, run_id, *names = arguments
    over = threading.Event()
    with open_trackers(Path(folder), region, run_id, names) as trackers:
        # After the libraries, which may have handlers of their own.
        signal.signal(signal.SIGTERM, lambda number, frame: over.set())
        follower = HistoryFollower(Path(folder), trackers)
        while not over.wait(HISTORY_POLL_S) and len(trackers) == len(names):
            follower.look()
        follower.look()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
