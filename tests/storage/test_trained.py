import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_node.errors import StorageError
from diloco_node.storage.trained import (
    COUNT_MAX,
    Trained,
    TrainedCounter,
    allot_incarnation,
    newest_incarnation,
    read_trained,
    sync_trained,
)
from tests.kit.fsync_kit import traced


def test_incarnations_grow_and_start_at_zero(tmp_path: Path) -> None:
    assert [allot_incarnation(tmp_path) for _ in range(11)] == list(range(1, 12))  # 10 sorts after 9
    assert read_trained(tmp_path)[9:] == (Trained(10, 0, 0), Trained(11, 0, 0))
    assert (tmp_path / "learner" / "trained-11").stat().st_size == 16


def test_lost_disk_does_not_reuse_a_number_of_the_ledger(tmp_path: Path) -> None:
    assert allot_incarnation(tmp_path, incarnation_min=7) == 7
    assert allot_incarnation(tmp_path, incarnation_min=3) == 8


def test_counter_survives_sigkill(tmp_path: Path) -> None:
    number = allot_incarnation(tmp_path)
    code = (
        "import os, pathlib, sys\nfrom diloco_node.storage.trained import TrainedCounter\n"
        "counter = TrainedCounter(pathlib.Path(sys.argv[1]), int(sys.argv[2]))\n"
        "for step in range(1, 1001): counter.write(step, step * 2**33)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(number)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_trained(tmp_path) == (Trained(number, 1000, 1000 * 2**33),)
    raw = (tmp_path / "learner" / f"trained-{number}").read_bytes()
    assert raw == (1000).to_bytes(8, "little") + (1000 * 2**33).to_bytes(8, "little")


def test_counter_that_was_not_allotted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="same state folder"):
        TrainedCounter(tmp_path, 1)


def test_damaged_counter_is_named(tmp_path: Path) -> None:
    number = allot_incarnation(tmp_path)
    (tmp_path / "learner" / f"trained-{number}").write_bytes(b"short")
    with pytest.raises(StorageError, match="trained-1 has 5 B"):
        read_trained(tmp_path)


def test_an_incarnation_is_on_disk_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """Else a power cut gives the same number to another life."""
    folder = tmp_path / "learner"
    with traced() as trace:
        allot_incarnation(tmp_path)
    assert trace == [("fsync", str(tmp_path)), ("fsync", str(folder / "trained-1")), ("fsync", str(folder))]
    with traced() as trace:
        allot_incarnation(tmp_path)
    assert trace == [("fsync", str(folder / "trained-2")), ("fsync", str(folder))]


def test_what_is_read_of_a_dead_life_is_durable_before_it_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's own mapping survives its death, not a power cut; what is booked as discarded is for ever."""
    numbers = [allot_incarnation(tmp_path) for _ in range(3)]
    for number in numbers:
        counter = TrainedCounter(tmp_path, number)
        counter.write(10 * number, 1000 * number)
        counter.close()
    steps: list[str] = []
    read, sync = os.read, os.fdatasync
    monkeypatch.setattr(os, "read", lambda *args: (steps.append("read"), read(*args))[1])
    monkeypatch.setattr(os, "fdatasync", lambda *args: (steps.append("sync"), sync(*args))[1])
    assert read_trained(tmp_path) == tuple(Trained(number, 10 * number, 1000 * number) for number in numbers)
    assert steps == ["read", "sync"] * 3, "what was read is what is on disk, or less"
    steps.clear()
    sync_trained(tmp_path, 2)
    assert steps == ["read", "sync"]


def test_a_disk_that_refuses_is_a_storage_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = allot_incarnation(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError, match=r"trained-1.*dmesg"):
            read_trained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", fail)
        with pytest.raises(StorageError, match="learner"):
            newest_incarnation(tmp_path)
    (tmp_path / "learner" / f"trained-{number}").unlink()
    (tmp_path / "learner" / f"trained-{number}").mkdir()
    with pytest.raises(StorageError, match="trained-1"):
        read_trained(tmp_path)
    with pytest.raises(StorageError, match="trained-9"):
        sync_trained(tmp_path, 9)


def test_counts_that_no_learner_reaches_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "learner" / f"trained-{allot_incarnation(tmp_path)}"
    for steps, tokens in ((COUNT_MAX + 1, 0), (0, 2**64 - 1)):
        path.write_bytes(steps.to_bytes(8, "little") + tokens.to_bytes(8, "little"))
        with pytest.raises(StorageError, match="damaged"):
            read_trained(tmp_path)
