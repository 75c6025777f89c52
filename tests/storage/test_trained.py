import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node.core.bounds import STEP_MAX, TOKENS_MAX
from diloco_node.errors import StorageError
from diloco_node.shared_memory import MemoryStore, request_area
from diloco_node.storage.trained import (
    AREA_BYTES,
    Trained,
    TrainedCounter,
    allot_incarnation,
    newest_incarnation,
    read_trained,
    save_trained,
    set_damaged_aside,
)
from tests.kit.counter_kit import counter_file
from tests.kit.fsync_kit import traced


def test_incarnations_grow_and_start_at_zero(tmp_path: Path) -> None:
    assert [allot_incarnation(tmp_path) for _ in range(11)] == list(range(1, 12))  # 10 sorts after 9
    assert read_trained(tmp_path)[9:] == (Trained(10, 0, 0), Trained(11, 0, 0))
    assert (tmp_path / "learner" / "trained-11").stat().st_size == 20


def test_lost_disk_does_not_reuse_a_number_of_the_ledger(tmp_path: Path) -> None:
    assert allot_incarnation(tmp_path, lambda newest: max(7, newest + 1)) == 7
    assert allot_incarnation(tmp_path, lambda newest: max(3, newest + 1)) == 8


@pytest.fixture
def area() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, AREA_BYTES) as made:
        yield made


def test_counter_survives_sigkill(tmp_path: Path) -> None:
    """In the supervisor's memory; the file has it as soon as somebody saves it."""
    number = allot_incarnation(tmp_path)
    code = (
        "import os, pathlib, sys\n"
        "from diloco_node.shared_memory import request_area\n"
        "from diloco_node.storage.trained import AREA_BYTES, TrainedCounter\n"
        "area = request_area(pathlib.Path(sys.argv[3]), 'counters', AREA_BYTES)\n"
        "counter = TrainedCounter(pathlib.Path(sys.argv[1]), int(sys.argv[2]), area)\n"
        "for step in range(1, 1001): counter.write(step, step * 2**33)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = Path(tempfile.mkdtemp(prefix="dl-"))  # a Unix socket's path is short
    with MemoryStore(folder / "m.sock") as memory:
        command = [sys.executable, "-c", code, str(tmp_path), str(number), str(memory.path)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        area = request_area(memory.path, "counters", AREA_BYTES)
        assert read_trained(tmp_path, area) == (Trained(number, 1000, 1000 * 2**33),)
    shutil.rmtree(folder)
    assert read_trained(tmp_path) == (Trained(number, 1000, 1000 * 2**33),), "now without the memory, too"
    raw = (tmp_path / "learner" / f"trained-{number}").read_bytes()
    assert raw == counter_file(1000, 1000 * 2**33)


def test_a_step_is_counted_without_the_disk(tmp_path: Path, area: mmap.mmap) -> None:
    """A mapped page of a file is written back now and then, and the next write to it may wait for the file system."""
    counter = TrainedCounter(tmp_path, allot_incarnation(tmp_path), area)
    counter.write(5, 50)
    assert "trained-" not in Path("/proc/self/maps").read_text()
    assert not any("trained-" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    assert read_trained(tmp_path) == (Trained(1, 0, 0),)
    counter.flush()
    assert read_trained(tmp_path) == (Trained(1, 5, 50),)


def test_each_life_has_its_own_count_and_a_file_never_goes_back(tmp_path: Path, area: mmap.mmap) -> None:
    numbers = [allot_incarnation(tmp_path) for _ in range(20)]
    counters = [TrainedCounter(tmp_path, number, area) for number in numbers]
    for number, counter in zip(numbers, counters, strict=True):
        counter.write(number, 10 * number)
        read_trained(tmp_path, area)
    counters[19].write(100, 1000)
    counters[18].write(7, 70)  # an old life that still steps, and lost its count: it stays below its file
    expected = [(number, 10 * number) for number in numbers[:19]] + [(100, 1000)]
    found = [(one.steps, one.tokens) for one in read_trained(tmp_path, area)]
    assert found == expected, "slots that a later life has taken over change nothing"
    counters[19].write(2**63, 0)
    assert read_trained(tmp_path, area)[19].steps == 100, "no count at all"


def test_counter_that_was_not_allotted_is_refused(tmp_path: Path, area: mmap.mmap) -> None:
    with pytest.raises(StorageError, match="same state folder"):
        TrainedCounter(tmp_path, 1, area)


def test_damaged_counter_is_named(tmp_path: Path) -> None:
    number = allot_incarnation(tmp_path)
    (tmp_path / "learner" / f"trained-{number}").write_bytes(b"short")
    with pytest.raises(StorageError, match="trained-1 is damaged"):
        read_trained(tmp_path)


def test_an_incarnation_is_on_disk_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """Else a power cut gives the same number to another life."""
    folder = tmp_path / "learner"
    for number in (1, 2):
        with traced() as trace:
            allot_incarnation(tmp_path)
        made = [("fsync", str(path)) for path in (tmp_path, folder / f"trained-{number}", folder)]
        assert trace[-3:] == made


def test_what_is_read_of_a_dead_life_is_durable_before_it_can_be_told(
    tmp_path: Path, area: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is booked as discarded is for ever; a power cut must not forget that it was trained."""
    numbers = [allot_incarnation(tmp_path) for _ in range(3)]
    for number in numbers:
        TrainedCounter(tmp_path, number, area).write(10 * number, 1000 * number)
    steps: list[str] = []
    write, sync = os.pwrite, os.fdatasync
    monkeypatch.setattr(os, "pwrite", lambda *args: (steps.append("write"), write(*args))[1])
    monkeypatch.setattr(os, "fdatasync", lambda *args: (steps.append("sync"), sync(*args))[1])
    expected = tuple(Trained(number, 10 * number, 1000 * number) for number in numbers)
    assert read_trained(tmp_path, area) == expected
    assert steps == ["write", "sync"] * 3
    steps.clear()
    assert read_trained(tmp_path) == expected
    assert steps == ["sync"] * 3, "also what another process wrote, and perhaps did not sync"
    assert save_trained(tmp_path, 2, area) == expected[1]


def test_lives_of_long_ago_cost_no_sync_unless_they_are_written(
    tmp_path: Path, area: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have thousands; each sync holds up the ledger."""
    numbers = [allot_incarnation(tmp_path) for _ in range(40)]
    TrainedCounter(tmp_path, 3, area).write(30, 300)
    synced: list[str] = []
    sync = os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda file: (synced.append(Path(f"/proc/self/fd/{file}").readlink().name), sync(file))
    )
    trained = read_trained(tmp_path, area)
    assert synced == ["trained-3", *(f"trained-{number}" for number in numbers[-16:])]
    assert (len(trained), trained[2]) == (40, Trained(3, 30, 300))


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
        save_trained(tmp_path, 9, None)


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 20, bytes(16), bytes(20), counter_file(3, 3) + b"x"])
def test_a_damaged_counter_holds_nobody_up_and_its_number_is_not_used_again(
    tmp_path: Path, area: mmap.mmap, damage: bytes
) -> None:
    numbers = [allot_incarnation(tmp_path) for _ in range(3)]
    for number in numbers:
        TrainedCounter(tmp_path, number, area).write(number, number)
        save_trained(tmp_path, number, area)
    path = tmp_path / "learner" / "trained-3"
    path.write_bytes(damage)
    assert set_damaged_aside(tmp_path) == ("trained-3",)
    assert path.with_name("trained-3.damaged").read_bytes() == damage
    assert read_trained(tmp_path) == (Trained(1, 1, 1), Trained(2, 2, 2), Trained(3, 0, 0))
    assert read_trained(tmp_path, area)[-1] == Trained(3, 3, 3), "the memory still knows"
    assert set_damaged_aside(tmp_path) == ()
    assert allot_incarnation(tmp_path) == 4


def test_counts_that_no_learner_reaches_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "learner" / f"trained-{allot_incarnation(tmp_path)}"
    for steps, tokens in ((STEP_MAX + 1, 0), (0, TOKENS_MAX + 1), (0, 2**64 - 1)):
        path.write_bytes(counter_file(steps, tokens))
        with pytest.raises(StorageError, match="damaged"):
            read_trained(tmp_path)


def test_no_bit_of_a_counter_can_flip_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "learner" / f"trained-{allot_incarnation(tmp_path)}"
    whole = counter_file(70, 7000)
    path.write_bytes(whole)
    assert read_trained(tmp_path) == (Trained(1, 70, 7000),)
    for bit in range(8 * len(whole)):
        path.write_bytes((int.from_bytes(whole, "little") ^ 1 << bit).to_bytes(len(whole), "little"))
        with pytest.raises(StorageError, match="trained-1 is damaged"):
            read_trained(tmp_path)
