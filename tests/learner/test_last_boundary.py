"""A learner's last boundary, which the next process goes on from: over the real link, with a process that is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_node.core.merge.fragments import Manifest
from diloco_node.learner import last_boundary
from diloco_node.learner.attach import Diloco
from diloco_node.learner.last_boundary import BEGUN_MAX, BoundaryFacts, LastBoundary, SavedBoundary
from diloco_node.shared_memory import boundary_file, request_area
from diloco_node.storage.trained import AREA_BYTES, read_trained
from diloco_node.wire.learner_link import (
    COUNTERS_AREA,
    NEW_PROCESS,
    NO_SNAPSHOT,
    Done,
    Failed,
    OfferApplied,
    Report,
    SnapshotReady,
    ToDaemon,
)
from tests.kit.boundary_kit import TOKENS, Life, saving_folder
from tests.kit.counter_kit import counter_file
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon
from tests.kit.learner_kit import vector


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from saving_folder(tmp_path, monkeypatch)


@pytest.fixture
def daemon(folder: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(folder) as made:
        yield made


def steps_made(diloco: Diloco) -> int:
    assert diloco._session is not None
    return diloco._session.fragments.step


@pytest.mark.parametrize("keeps_model", [False, True])
def test_the_next_process_goes_on_at_the_last_boundary(folder: Path, daemon: FakeDaemon, keeps_model: bool) -> None:
    first = Life(folder, keeps_model=keeps_model)
    first.step(5)
    first.diloco.checkpoint()  # of older parameters, where the loop keeps its model for the buffers
    first.step(4)
    theta = first.vectors()
    first.killed()
    second = Life(folder, keeps_model=keeps_model)
    said = daemon.wait_attached(2)
    assert (said.incarnation, said.step, said.tokens) == (1, 9, 9 * TOKENS)
    assert second.vectors() == theta
    assert theta != [part.tolist() for part in daemon.theta]
    second.step()
    second.diloco.close()
    done = daemon.wait_for(Done)
    assert (done.step, done.tokens) == (10, 10 * TOKENS)
    assert not second.path.exists(), "who is done leaves nothing"


def test_an_announced_snapshot_is_there_again_with_the_same_bytes(folder: Path, daemon: FakeDaemon) -> None:
    first = Life(folder)
    first.step(3)
    daemon.want(0)
    first.toy.steps_until(first.diloco, daemon, SnapshotReady, 1)
    contribution, encoded = daemon.wait_for(SnapshotReady).contribution, daemon.encoded(0)
    first.step(4)
    theta = first.vectors()
    first.killed()
    second = Life(folder)
    assert daemon.wait_attached(2).snapshots == (contribution.snapshot, NO_SNAPSHOT)
    assert daemon.wait_for(SnapshotReady, 2).contribution == contribution
    assert daemon.encoded(0) == encoded
    # The merge includes it: what was made since is kept, as by one that was never killed.
    new = daemon.theta[0] - np.float32(3)
    daemon.commit(0, new, contribution.snapshot)
    second.toy.steps_until(second.diloco, daemon, OfferApplied, 3)
    applied = daemon.wait_for(OfferApplied, 3)
    assert (applied.version, applied.carry_factor) == (1, 1.0)
    assert applied.position.included_step == contribution.step_to
    own = 0.25 * (steps_made(second.diloco) - contribution.step_to)
    np.testing.assert_allclose(vector(second.diloco, 0), new - own, rtol=1e-5, atol=1e-5)
    since = steps_made(second.diloco) - daemon.wait_attached(2).step
    np.testing.assert_allclose(vector(second.diloco, 1) + 0.25 * since, theta[1], rtol=1e-5, atol=1e-5)
    second.diloco.close()


@dataclass
class Told:
    """What the region has heard of a learner by some moment, and what then lay in memory."""

    image: bytes
    step: int
    snapshot: int
    versions: tuple[int, int]


class Watched:
    """A life that is looked at in the middle of each boundary, and after it.

    Attributes:
        told: in the order of time. boundaries: by facts, the parameters, bases and snapshots of each.
    """

    def __init__(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        assert life.diloco._session is not None
        self.life, self.session = life, life.diloco._session
        self.told: list[Told] = []
        self.boundaries: dict[BoundaryFacts, list[list[list[float]]]] = {}
        self._step, self._snapshot, self._versions = 0, NO_SNAPSHOT, [0, 0]
        fragments, link, counter = self.session.fragments, self.session._link, self.session._counter
        assert counter is not None
        checked = last_boundary._checked
        read, send, write, save = fragments.read, link.send, counter.write, self.session.save

        def reading(index: int, out: torch.Tensor) -> None:
            self.look()
            read(index, out)
            self.look()

        def writing(head: SavedBoundary) -> bytes:
            if not life.diloco._is_closed:
                self.look()
            return checked(head)

        def sending(message: ToDaemon) -> None:
            match message:
                case Report():
                    self._step = max(self._step, message.step)
                case SnapshotReady():
                    self._snapshot = max(self._snapshot, message.contribution.snapshot)
                case OfferApplied():
                    self._versions[message.fragment] = message.version
            send(message)

        def counting(steps: int, tokens: int) -> None:
            self._step = max(self._step, steps)
            write(steps, tokens)

        def saving() -> None:
            facts, held = fragments.facts(), {one.fragment for one in fragments.facts().unresolved}
            snapshots = [fragments.snapshot_values(one).tolist() if one in held else [] for one in range(2)]
            bases = [one.tolist() for one in fragments.global_vectors()]
            self.boundaries[facts] = [life.vectors(), bases, snapshots]
            save()
            self.look()

        monkeypatch.setattr(fragments, "read", reading)
        monkeypatch.setattr(last_boundary, "_checked", writing)
        monkeypatch.setattr(link, "send", sending)
        monkeypatch.setattr(counter, "write", counting)
        monkeypatch.setattr(self.session, "save", saving)

    def look(self) -> None:
        # Whatever the encoder has been given by now is told as well.
        self.session.fragments._worker.wait_for(lambda: None)
        if self.life.path.exists():
            image = self.life.path.read_bytes()
            self.told.append(Told(image, self._step, self._snapshot, (self._versions[0], self._versions[1])))


class Resumed:
    """Takes what `LastBoundary.begin` gives."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.facts_begun: BoundaryFacts | None = None
        self.vectors: list[list[list[float]]] = []

    def begin_at(self, facts: BoundaryFacts, **vectors: Sequence[torch.Tensor]) -> None:
        held = {one.fragment for one in facts.unresolved}
        self.facts_begun = facts
        self.vectors = [[], [one.tolist() for one in vectors["bases"]]]
        self.vectors.append([one.tolist() if at in held else [] for at, one in enumerate(vectors["snapshots"])])

    def write(self, index: int, values: torch.Tensor) -> None:
        assert index == len(self.vectors[0])
        self.vectors[0].append(values.tolist())


def test_whatever_moment_a_kill_comes_a_whole_boundary_is_there_and_nothing_that_was_told_is_missing(
    folder: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(folder)
    life.step(3)
    watched = Watched(life, monkeypatch)
    life.step(3)
    ready = 0
    for round_number in range(1, 5):
        numbers = {}
        # The first fragment is asked for again, for a round that passed without it: the new snapshot replaces the old.
        for fragment, ahead in ((0, 1), (0, 2), (1, 1)):
            daemon.want(fragment, version=daemon.versions[fragment] + ahead)
            ready += 1
            life.toy.steps_until(life.diloco, daemon, SnapshotReady, ready)
            numbers[fragment] = daemon.wait_for(SnapshotReady, ready).contribution.snapshot
        for fragment, number in numbers.items():
            version = daemon.versions[fragment] + 2
            included = number if round_number % 2 else NO_SNAPSHOT
            daemon.commit(fragment, daemon.theta[fragment] + 1, included, version=version)
            life.toy.steps_until(life.diloco, daemon, OfferApplied, 2 * round_number + 1 + fragment)
    life.step(3)
    manifest, welcome = watched.session.manifest, watched.session.welcome
    assert welcome is not None
    life.diloco._close(None)
    assert len(watched.told) > 60
    for moment in watched.told:
        life.path.write_bytes(moment.image)
        life.path.chmod(0o600)
        found = LastBoundary.at(life.path)
        assert found is not None
        resumed = Resumed(manifest)
        assert found.begin(resumed, welcome)  # type: ignore[arg-type] - it is saved nowhere
        found.write_parameters(resumed)  # type: ignore[arg-type]
        found.close()
        facts = resumed.facts_begun
        assert facts is not None
        if facts in watched.boundaries:
            assert resumed.vectors == watched.boundaries[facts]
        else:
            assert facts.step <= 3, "from before it was watched"
        assert facts.step >= moment.step
        assert facts.next_snapshot > moment.snapshot
        reached = [position.base_version for position in facts.positions]
        assert all(told <= reached[at] for at, told in enumerate(moment.versions))


def test_counters_and_numbers_go_on_where_they_were(folder: Path, daemon: FakeDaemon) -> None:
    first = Life(folder)
    first.step(3)
    daemon.want(0)
    first.toy.steps_until(first.diloco, daemon, SnapshotReady, 1)
    daemon.commit(0, daemon.theta[0] + 1, 1)
    first.toy.steps_until(first.diloco, daemon, OfferApplied, 3)
    made = steps_made(first.diloco)
    first.killed()
    with request_area(folder / "memory.sock", COUNTERS_AREA, AREA_BYTES) as area:
        area[:] = bytes(AREA_BYTES)  # the supervisor died too, and nothing was saved for long
        (folder / "learner" / "trained-1").write_bytes(counter_file(0, 0))
        second = Life(folder)
        [trained] = read_trained(folder, area)
        assert (trained.steps, trained.tokens) == (made, made * TOKENS)
    # An offer that crossed the kill names the snapshot that is in the base by now.
    daemon.commit(0, daemon.theta[0] + 1, 1)
    second.toy.steps_until(second.diloco, daemon, OfferApplied, 4)
    daemon.want(1)
    second.toy.steps_until(second.diloco, daemon, SnapshotReady, 2)
    assert daemon.wait_for(SnapshotReady, 2).contribution.snapshot == 2
    second.diloco.close()


class Position:
    """Counts what the loop has read."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def test_the_next_process_is_told_how_far_its_checkpoint_is_behind(folder: Path, daemon: FakeDaemon) -> None:
    made = 0
    for steps, is_saved in ((4, False), (3, True), (5, False), (2, True), (1, False)):
        position = Position()
        life = Life(folder, {"position": position})
        # Each batch is read once: the checkpoint's, and so many more, are in the parameters.
        assert position.batches + life.diloco.unsaved_steps == steps_made(life.diloco) == made
        position.batches = made
        for _ in range(steps):
            position.batches += 1
            life.step()
        made += steps
        if is_saved:
            life.diloco.checkpoint()
            life.step()
            made += 1
        life.killed()


@pytest.mark.parametrize("begun", range(1, BEGUN_MAX + 2))
def test_processes_that_die_before_a_step_go_on_so_often_and_then_begin_anew(
    folder: Path, daemon: FakeDaemon, begun: int
) -> None:
    first = Life(folder)
    first.step(5)
    first.killed()
    for _ in range(begun - 1):
        Life(folder).killed()
    Life(folder).diloco.close()
    attached = daemon.wait_attached(begun + 1)
    assert attached.incarnation == (1 if begun <= BEGUN_MAX else NEW_PROCESS)


def test_a_step_makes_the_count_of_beginners_start_again(folder: Path, daemon: FakeDaemon) -> None:
    first = Life(folder)
    first.step(5)
    first.killed()
    for count in range(1, 2 * BEGUN_MAX):
        life = Life(folder)
        assert daemon.wait_attached(count + 1).step == 4 + count
        life.step()
        life.killed()


@pytest.mark.parametrize("end", ["failed", "done", "stopped"])
def test_only_who_was_interrupted_leaves_its_boundary(
    folder: Path, daemon: FakeDaemon, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(folder)
    life.step(5)
    assert life.path.exists()
    link = life.diloco._session._link  # type: ignore[union-attr]
    left_then, send = [], link.send

    def sending(message: ToDaemon) -> None:
        if isinstance(message, Done | Failed):
            left_then.append(life.path.exists())
        send(message)

    monkeypatch.setattr(link, "send", sending)
    if end == "failed":
        with pytest.raises(ZeroDivisionError), life.diloco:
            raise ZeroDivisionError("planted")
    else:
        if end == "stopped":
            life.diloco._terminate.is_set = True
            life.step()
        life.diloco.close()
    assert life.path.exists() == (end == "stopped")
    assert left_then == ([] if end == "stopped" else [False]), "a kill may come right after the last word"
    Life(folder).diloco.close()
    assert daemon.wait_attached(2).incarnation == (1 if end == "stopped" else NEW_PROCESS)


SCRIPT = """
import os, sys
import torch
import diloco_node
from diloco_node.learner import last_boundary
from tests.kit.learner_kit import Toy
last_boundary.COST_PART = 1e9
torch.set_num_threads(1)
toy = Toy()
with diloco_node.attach(toy.model, toy.optimizer) as diloco:
    while True:
        toy.step(diloco)
"""

BARE = """
import os
import diloco_node
from diloco_node.learner import last_boundary
from tests.kit.learner_kit import Toy
last_boundary.COST_PART = 1e9
toy = Toy()
diloco = diloco_node.attach(toy.model, toy.optimizer)
for _ in range(5):
    toy.step(diloco)
if not (child := os.fork()):
    raise SystemExit
os.waitpid(child, 0)
assert diloco._session._last_boundary._path.exists()
raise ZeroDivisionError("planted")
"""


def test_an_exception_in_a_loop_that_closes_nothing_leaves_nothing(folder: Path, daemon: FakeDaemon) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BARE], cwd=Path(__file__).parents[2], capture_output=True, timeout=PATIENCE_S
    )
    assert b"planted" in ended.stderr
    assert not boundary_file(folder).exists()


def test_a_killed_process_costs_the_step_under_way(folder: Path, daemon: FakeDaemon) -> None:
    """SIGKILL at random moments of a loop that does nothing but boundaries; each next one is there at what was told."""
    rng = random.Random(11)
    for life in (1, 2):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2])
        try:
            attached = daemon.wait_attached(life)
            reported = max((one.step for one in daemon.said if isinstance(one, Report)), default=0)
            if life > 1:
                assert (attached.incarnation, attached.step >= reported) == (1, True)
            already = sum(isinstance(one, Report) for one in daemon.said)
            daemon.wait_for(Report, already + rng.randrange(20, 60))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        assert boundary_file(folder).exists()
