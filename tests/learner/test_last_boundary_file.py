"""The file of a learner's last boundary: what is damaged, of somebody else or too dear is left alone."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node import shared_memory
from diloco_node.errors import LearnerError
from diloco_node.learner import last_boundary
from diloco_node.learner.attach import ON_SPIKE_VARIABLE
from diloco_node.learner.last_boundary import HEAD_BYTES
from diloco_node.shared_memory import boundary_file
from diloco_node.storage.trained import allot_incarnation
from diloco_node.wire.learner_link import NEW_PROCESS, Failed
from tests.kit.boundary_kit import Life, saving_folder
from tests.kit.fake_daemon import FakeDaemon


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from saving_folder(tmp_path, monkeypatch)


@pytest.fixture
def daemon(folder: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(folder) as made:
        yield made


def test_a_torn_head_is_passed_over_for_the_one_before(folder: Path, daemon: FakeDaemon) -> None:
    life = Life(folder)
    life.step(6)
    life.look()
    heads = [life.left[:HEAD_BYTES], life.left[HEAD_BYTES : 2 * HEAD_BYTES]]
    steps = [last_boundary._head(one).facts.step for one in heads]  # type: ignore[union-attr]
    assert sorted(steps) == [5, 6]
    newest = steps.index(6)
    torn = bytearray(life.left)
    torn[newest * HEAD_BYTES + 20] ^= 1
    life.left = bytes(torn)
    life.killed()
    Life(folder).diloco.close()
    assert daemon.wait_attached(2).step == 5


@pytest.mark.parametrize("spoil", ["cut", "noise", "longer", "empty", "manifest", "run"])
def test_what_is_of_no_use_is_refused_and_the_next_process_begins_anew(
    folder: Path, daemon: FakeDaemon, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(folder)
    life.step(6)
    life.look()
    if spoil == "cut":
        life.left = life.left[:-4]
    elif spoil == "noise":
        life.left = random.Random(3).randbytes(len(life.left))
    elif spoil == "longer":
        life.left += bytes(8)
    elif spoil == "empty":
        life.left = life.left[: HEAD_BYTES - 1]
    life.killed()
    if spoil in ("manifest", "run"):
        head = last_boundary._head
        changes = {"manifest": {"manifest_digest": "other"}, "run": {"run_id": "other"}}[spoil]
        monkeypatch.setattr(
            last_boundary, "_head", lambda raw: (one := head(raw)) and last_boundary.replace(one, **changes)
        )
    if spoil in ("noise", "empty"):
        Life(folder).diloco.close()
    else:
        with pytest.raises(LearnerError, match="of another model or run"):
            Life(folder)
        Life(folder).diloco.close()
        assert daemon.wait_attached(3).incarnation == NEW_PROCESS
        return
    assert daemon.wait_attached(2).incarnation == NEW_PROCESS


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_life_that_is_not_the_folders_last_is_over(folder: Path, daemon: FakeDaemon, is_followed: bool) -> None:
    """The next one may have kept nothing, as on a GPU. Or the folder is another one with the inode of one removed."""
    life = Life(folder)
    life.step(5)
    life.killed()
    if is_followed:
        allot_incarnation(folder)
    else:
        (folder / "learner" / "trained-1").unlink()
    again = Life(folder)
    again.step(5)
    assert again.path.exists()
    again.diloco.close()
    assert daemon.wait_attached(2).incarnation == NEW_PROCESS


@pytest.mark.parametrize("who", ["link", "open", "folder", "two names"])
def test_a_file_of_somebody_else_is_left_alone(folder: Path, daemon: FakeDaemon, who: str, tmp_path: Path) -> None:
    path = boundary_file(folder)
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    other.chmod(0o600)
    if who == "link":
        path.symlink_to(other)
    elif who == "folder":
        path.mkdir()
    elif who == "two names":
        shutil.copy(other, path)
        path.chmod(0o600)
        os.link(path, second := path.with_name(path.name + "-2"))
    else:
        path.write_bytes(b"precious")
        path.chmod(0o666)
    try:
        life = Life(folder)
        life.step(5)
        life.diloco.close()
        assert daemon.wait_attached().incarnation == NEW_PROCESS
        assert other.read_bytes() == b"precious"
        if who in ("open", "two names"):
            assert path.read_bytes() == b"precious"
    finally:
        if who == "folder":
            path.rmdir()
        if who == "two names":
            second.unlink()


HOLDER = """
import fcntl, os, sys, time
fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


def test_while_a_process_lives_no_other_takes_its_boundary(folder: Path, daemon: FakeDaemon) -> None:
    life = Life(folder)
    life.step(5)
    life.killed()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(life.path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            second = Life(folder)
            assert daemon.wait_attached(2).incarnation == NEW_PROCESS
            second.step(5)
            second.diloco.close()
            assert life.path.read_bytes() == life.left
        finally:
            holder.kill()


def test_a_copy_that_takes_too_long_is_not_made(
    folder: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_boundary, "COST_PART", 0.0)
    life = Life(folder)
    life.step(4)
    assert not life.path.exists()
    life.diloco.close()


def test_what_turns_out_to_take_too_long_ends_and_leaves_nothing(
    folder: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(folder)
    life.step(5)
    assert life.path.exists()
    monkeypatch.setattr(last_boundary, "COST_PART", 0.0)
    life.step(last_boundary.LOOK_STEPS)
    assert not life.path.exists()
    life.path.write_bytes(b"of the process that has come in its place")
    life.step(3)
    life.diloco.close()
    assert life.path.read_bytes() == b"of the process that has come in its place"


def test_memory_that_is_short_is_left_to_others(
    folder: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_boundary, "MEMORY_PART", 1 << 40)
    life = Life(folder)
    life.step(4)
    assert not life.path.exists()
    life.diloco.close()


def test_once_the_last_merges_have_begun_nothing_is_left(folder: Path, daemon: FakeDaemon) -> None:
    life = Life(folder)
    life.step(4)
    assert life.path.exists()
    life.diloco._session.fragments._own = []  # type: ignore[union-attr]
    life.step()
    assert not life.path.exists()
    life.diloco.close()


def test_who_attaches_once_more_in_a_process_has_failed_before(folder: Path, daemon: FakeDaemon) -> None:
    left = Life(folder)
    left.step(5)
    again = Life(folder)
    assert daemon.wait_attached(2).incarnation == NEW_PROCESS
    again.step(5)
    left.diloco._close(Failed("late"))
    again.step()
    again.killed()
    Life(folder).diloco.close()
    assert daemon.wait_attached(3).step == 6


@pytest.mark.parametrize("on_spike", ["warn", "rollback"])
def test_parameters_that_may_have_diverged_are_not_kept(
    folder: Path, daemon: FakeDaemon, on_spike: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ON_SPIKE_VARIABLE, on_spike)
    life = Life(folder)
    for value in [1.0] * 40:
        life.toy.step(life.diloco, loss=value)
    for wrong, is_kept in ((math.nan, False), (50.0, on_spike == "warn"), (1.0, True)):
        life.toy.step(life.diloco, loss=wrong)
        heads = [life.path.read_bytes()[start : start + HEAD_BYTES] for start in (0, HEAD_BYTES)]
        kept = [head for head in map(last_boundary._head, heads) if head is not None]
        assert max((head.facts.step for head in kept), default=0) == (life.diloco.steps if is_kept else 0)
    life.killed()
    Life(folder).diloco.close()
    assert daemon.wait_attached(2).step == 43


class Blanked:
    """Which heads are written over, in their order."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def __setitem__(self, place: slice, data: bytes) -> None:
        assert data == bytes(HEAD_BYTES)
        self.places.append(place.start // HEAD_BYTES)


def test_a_kill_while_nothing_is_to_be_left_leaves_the_newest_or_nothing(folder: Path, daemon: FakeDaemon) -> None:
    life = Life(folder)
    for steps in (5, 6):  # the newest head lies in either place
        life.step(steps - life.diloco.steps)
        made = life.diloco._session._last_boundary  # type: ignore[union-attr]
        area, saved, blanked = made._area, made._saved, Blanked()
        made._area = blanked  # type: ignore[assignment]
        made.blank()
        made._area, made._saved = area, saved
        assert blanked.places == [1 - saved.sequence % 2, saved.sequence % 2]
    life.diloco.close()


def test_what_was_there_before_a_reboot_is_not_looked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = boundary_file(folder)
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(shared_memory, "BOOT_ID", tmp_path / "boot")
    assert boundary_file(folder) != before
