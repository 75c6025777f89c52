import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_node.errors import StorageError
from diloco_node.storage.trained import Trained, TrainedCounter, allot_incarnation, newest_incarnation, read_trained


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


@pytest.mark.parametrize("counters", [(2**63 - 1, 5), (5, 2**63), (2**64 - 1, 2**64 - 1)])
def test_a_counter_that_no_learner_can_have_reached_counts_nothing(tmp_path: Path, counters: tuple[int, int]) -> None:
    number = allot_incarnation(tmp_path)
    (tmp_path / "learner" / f"trained-{number}").write_bytes(struct.pack("<QQ", *counters))
    assert read_trained(tmp_path) == (Trained(number, 0, 0),)


@pytest.mark.parametrize("name", [2**40 + 1, 2**63 - 1, "9" * 200])
def test_a_file_named_for_an_incarnation_that_can_not_be_is_no_counter(tmp_path: Path, name: object) -> None:
    assert allot_incarnation(tmp_path) == 1
    path = tmp_path / "learner" / f"trained-{name}"
    path.write_bytes(bytes(16))
    assert newest_incarnation(tmp_path) == 1
    assert allot_incarnation(tmp_path) == 2
