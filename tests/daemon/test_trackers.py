"""The run history in the hands of the libraries that draw it: each is the real one, and writes to this machine only."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_node.daemon import trackers as trackers_module
from diloco_node.daemon.run_history import HISTORY_NAME, row_of
from diloco_node.daemon.trackers import KEYS, TRACKED_NAME, TRACKERS, HistoryFollower, main, open_trackers


def write_history(folder: Path, steps: range) -> None:
    """A point a second; 10 tokens a step."""
    columns = (1_700_000_000.0, 0, 0, 2.5, 2.25, 40.0, 7, 8, None, 0.25, 3, 90, 1.0)
    points = ([columns[0] + step, step, 10 * step, columns[3] - step / 100, *columns[4:]] for step in steps)
    lines = [json.dumps({"period_s": 1.0}), *(row_of(point) for point in points)]
    (folder / HISTORY_NAME).write_text("\n".join(lines) + "\n")


@dataclasses.dataclass
class Recorder:
    """A tracker that keeps what it gets."""

    points: list[tuple[int, float, dict[str, float]]] = dataclasses.field(default_factory=list)

    def log(self, values: dict[str, float], *, tokens: int, unix: float) -> None:
        self.points.append((tokens, unix, dict(values)))

    def close(self) -> None: ...


class Broken(Recorder):
    """A tracker whose service is down."""

    def log(self, values: dict[str, float], *, tokens: int, unix: float) -> None:
        raise RuntimeError("planted")


def test_every_point_is_handed_on_once_also_by_the_next_process(tmp_path: Path) -> None:
    first = Recorder()
    follower = HistoryFollower(tmp_path, {"tensorboard": first})
    assert follower.look() == 0, "there is no history yet"
    write_history(tmp_path, range(1, 4))
    assert (follower.look(), follower.look()) == (3, 0)
    tokens, unix, values = first.points[0]
    assert (tokens, unix) == (10, 1_700_000_001.0)
    assert values["train/loss"] == 2.49
    assert set(values) == set(KEYS.values()) - {"train/val_loss"}, "what is not known is no point"
    write_history(tmp_path, range(1, 6))
    again, recorder = Recorder(), Recorder()
    assert HistoryFollower(tmp_path, {"tensorboard": again, "wandb": recorder}).look() == 2 + 5
    assert [point[0] for point in again.points] == [40, 50]


@pytest.mark.parametrize("names", [("good", "broken"), ("broken", "good")])
def test_a_tracker_that_fails_keeps_nothing_from_another_one_and_makes_it_repeat_nothing(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    trackers = {"good": Recorder(), "broken": Broken()}
    write_history(tmp_path, range(1, 4))
    for _ in range(2):
        with pytest.raises(ExceptionGroup, match="took no points") as failure:
            HistoryFollower(tmp_path, {name: trackers[name] for name in names}).look()
        assert [str(error) for error in failure.value.exceptions] == ["planted"]
    assert [point[0] for point in trackers["good"].points] == [10, 20, 30]


def test_a_memory_that_can_not_be_written_repeats_nothing_in_this_process(tmp_path: Path) -> None:
    (tmp_path / TRACKED_NAME).mkdir()
    good = Recorder()
    follower = HistoryFollower(tmp_path, {"tensorboard": good})
    for end in (3, 4):
        write_history(tmp_path, range(1, end))
        follower.look()
    assert [point[0] for point in good.points] == [10, 20, 30]


HUGE = b'{"tensorboard": 1' + b"0" * 400 + b"}"


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"tensorboard": "x"}', b"\xff", HUGE, b"[" * 100_000])
def test_a_damaged_memory_costs_a_repetition(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / TRACKED_NAME).write_bytes(damage)
    write_history(tmp_path, range(1, 3))
    assert HistoryFollower(tmp_path, {"tensorboard": Recorder()}).look() == 2


@pytest.mark.parametrize("names", [("good", "broken"), ("broken", "good")])
def test_what_a_tracker_that_does_not_open_leaves_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """They get their points, and are closed, before the process ends for its supervisor to try again."""
    recorders: list[Recorder] = []

    class Closing(Recorder):
        def close(self) -> None:
            recorders.append(self)

    def broken(folder: Path, region: str, run_id: str) -> Recorder:
        raise RuntimeError(f"planted {folder.name} {region} {run_id}")

    monkeypatch.setattr(trackers_module, "TRACKERS", {"good": lambda *_: Closing(), "broken": broken})
    monkeypatch.setattr(trackers_module, "HISTORY_POLL_S", 0.01)
    handlers: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(number))
    write_history(tmp_path, range(1, 4))
    with pytest.raises(ExceptionGroup, match="did not open") as failure:
        main([str(tmp_path), "us", "run1", *names])
    assert [str(error) for error in failure.value.exceptions] == [f"planted {tmp_path.name} us run1"]
    assert [[point[0] for point in recorder.points] for recorder in recorders] == [[10, 20, 30]]
    assert handlers == [signal.SIGTERM]


def test_tensorboard_draws_loss_over_tokens_in_one_group_per_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed: NOT TESTED")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_history(tmp_path, range(1, 4))
    with open_trackers(tmp_path, "us-east", "run1", ["tensorboard"]) as trackers:
        assert HistoryFollower(tmp_path, trackers).look() == 3
    accumulator = EventAccumulator(str(tmp_path / "tensorboard" / "run1" / "us-east"))
    accumulator.Reload()
    assert set(accumulator.Tags()["tensors"]) == set(KEYS.values()) - {"train/val_loss"}
    events = accumulator.Tensors("train/loss")
    assert [event.step for event in events] == [10, 20, 30]
    assert events[0].tensor_proto.float_val[0] == pytest.approx(2.49)
    assert events[0].wall_time == 1_700_000_001.0


OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "HF_HUB_OFFLINE": "1"}


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_the_process_follows_until_it_is_told_to_stop_and_hands_on_the_rest(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=f"the extra `{name}` is not installed: NOT TESTED")
    write_history(tmp_path, range(1, 4))
    env = {**os.environ, **OFFLINE, "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    words = [sys.executable, "-m", "diloco_node.daemon.trackers", str(tmp_path), "us-east", "run1", name]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline_s = time.monotonic() + 240
        while not (tmp_path / TRACKED_NAME).exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        write_history(tmp_path, range(1, 6))
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert json.loads((tmp_path / TRACKED_NAME).read_text()) == {name: 1_700_000_005.0}
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    suffix = {"tensorboard": ".0", "trackio": ".db", "wandb": ".wandb"}[name]
    assert suffix in suffixes, sorted(map(str, tmp_path.rglob("*")))
