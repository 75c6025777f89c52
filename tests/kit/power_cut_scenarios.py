"""What each part of the state folder does to the disk, what it promises meanwhile, and how a start after a crash is
checked. See `tests.kit.power_cut`.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.daemon.final_model import write_final
from diloco_node.daemon.manifest_file import MANIFEST_NAME, recover_manifest, save_manifest
from diloco_node.errors import StorageError
from diloco_node.state_names import FINAL_NAME
from diloco_node.storage.durable import new_folder
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import (
    AREA_BYTES,
    Trained,
    TrainedCounter,
    allot_incarnation,
    read_trained,
    save_trained,
    set_damaged_aside,
)
from tests.kit.node_kit import MANIFEST
from tests.kit.power_cut import RecordedDisk
from tests.kit.power_cut_logs import FRAGMENTS, DamagedLogScenario, GoneLogScenario, LogScenario, region_folder

VALUES: Final = 1500
"""Of a fragment: a state takes three pages and a bit, a payload two."""


class Scenario(Protocol):
    """One part of the folder."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        """Write, and say in `disk.note` what is promised by now."""

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        """A new process after one that was killed at any moment; what it reads and would tell is promised, too."""

    def check(self, root: Path, note: Any) -> None:
        """Start from what a power cut left. Raises AssertionError, or whatever the code raises that must not."""


# ---- payloads and states ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesNote:
    """Versions that must be there of fragment 0, and the first one that was set aside (-1: none)."""

    payloads: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    gone_from: int = -1


def values_of(version: int) -> np.ndarray:
    return np.random.default_rng(version).standard_normal(VALUES).astype(np.float32)


def parts_of(version: int) -> list[bytes]:
    data = values_of(version).tobytes()
    return [data[:2000], data[2000:]]


def digest_of(version: int) -> bytes:
    return payload_digest([stripe_digest(part) for part in parts_of(version)])


def state_digest_of(version: int) -> bytes:
    return bytes([version]) * 32


class FilesScenario:
    """Payloads and states; pruning and setting aside."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        disk.note = FilesNote()
        store = RegionStore(region_folder(root))
        store.load(FRAGMENTS)
        for version in range(1, 4):
            self._payload(disk, store, version)
            self._state(disk, store, version)
        disk.note = replace(disk.note, payloads=frozenset({3}), states=frozenset({2, 3}))
        store.prune(0, 3)
        for version in (4, 5):
            self._payload(disk, store, version)
        store.close()
        store = self._load(root, disk)
        self._state(disk, store, 5)
        disk.note = replace(disk.note, states=frozenset({2, 3}))
        store.set_states_aside(0, 5)
        disk.note = replace(disk.note, gone_from=5)
        store.close()

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        self._load(root, disk).close()

    def _load(self, root: Path, disk: RecordedDisk) -> RegionStore:
        store = RegionStore(region_folder(root))
        recovered = store.load(FRAGMENTS)
        newest = recovered.states[0]
        told = frozenset(version for fragment, version, _ in recovered.payloads if fragment == 0 and version > newest)
        states = disk.note.states | {newest} if newest >= 0 else disk.note.states
        disk.note = replace(disk.note, payloads=disk.note.payloads | told, states=states)
        return store

    def _payload(self, disk: RecordedDisk, store: RegionStore, version: int) -> None:
        store.store_payload(0, version, digest_of(version), parts_of(version))
        disk.note = replace(disk.note, payloads=disk.note.payloads | {version})

    def _state(self, disk: RecordedDisk, store: RegionStore, version: int) -> None:
        values = values_of(version)
        store.store_state(0, version, values, -values, state_digest_of(version))
        disk.note = replace(disk.note, states=disk.note.states | {version})

    def check(self, root: Path, note: FilesNote) -> None:
        store = RegionStore(region_folder(root))
        try:
            recovered = store.load(FRAGMENTS)
            assert store.lost == ""
            there = {(version, digest) for _, version, digest in recovered.payloads}
            assert there >= {(version, digest_of(version)) for version in note.payloads}
            for version, digest in there:
                with suppress(StorageError if version not in note.payloads else ZeroDivisionError):
                    assert bytes(store.read_payload(0, version, digest)) == b"".join(parts_of(version))
            assert recovered.states[0] >= max(note.states, default=-1)
            assert note.gone_from < 0 or recovered.states[0] < note.gone_from
            for version in {*note.states, *recovered.states[:1]} - {-1}:
                theta, momentum = store.read_state(0, version)
                assert np.array_equal(theta, values_of(version))
                assert np.array_equal(momentum, -theta)
        finally:
            store.close()


# ---- the learner's counters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountsNote:
    """Per incarnation that was told, the steps that were told of it. damaged: the one that is."""

    steps: tuple[tuple[int, int], ...] = ()
    damaged: int = 0


class CountsScenario:
    """Incarnations are allotted, and their counts saved."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        folder = region_folder(root)
        folder.mkdir(parents=True)
        disk.settle()  # the store has made the folder before
        disk.note = CountsNote()
        with mmap.mmap(-1, AREA_BYTES) as area:
            for number in (1, 2, 3):
                assert allot_incarnation(folder) == number
                self._tell(disk, Trained(number, 0, 0))
                TrainedCounter(folder, number, area).write(10 * number, 100 * number)
                self._tell(disk, save_trained(folder, number, area))
            TrainedCounter(folder, 3, area).write(50, 500)
            self._tell(disk, *read_trained(folder, area))

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        folder = region_folder(root)
        if folder.exists():
            set_damaged_aside(folder)
            self._tell(disk, *read_trained(folder))
            self._tell(disk, Trained(allot_incarnation(folder), 0, 0))

    def _tell(self, disk: RecordedDisk, *told: Trained) -> None:
        known = dict(disk.note.steps)
        known.update((one.incarnation, one.steps) for one in told)
        disk.note = replace(disk.note, steps=tuple(sorted(known.items())))

    def check(self, root: Path, note: CountsNote) -> None:
        folder = region_folder(root)
        if not folder.exists():
            assert not note.steps
            return
        told = dict(note.steps)
        aside = set_damaged_aside(folder)
        assert not {f"trained-{number}" for number in told if number != note.damaged} & set(aside)
        found = {one.incarnation: one.steps for one in read_trained(folder)}
        for number, steps in told.items():
            assert number == note.damaged or found.get(number, -1) >= steps, (number, steps, found)
        assert allot_incarnation(folder) > max(told, default=0)


class DamagedCountsScenario(CountsScenario):
    """A counter file is damaged and set aside; its number stays used."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        super().run(root, disk)
        folder = region_folder(root)
        disk.note = replace(disk.note, damaged=3)
        (folder / "learner" / "trained-3").write_bytes(b"short")
        disk.settle()
        assert set_damaged_aside(folder) == ("trained-3",)
        disk.note = replace(disk.note)
        assert allot_incarnation(folder) == 4
        self._tell(disk, Trained(4, 0, 0))


# ---- the model: the learner's checkpoint, manifest, final parameters -------------------------------------------------


class CheckpointScenario:
    """Checkpoints of the learner, of which two are kept. The note is the step of the last one."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        region_folder(root).mkdir(parents=True)
        disk.settle()
        disk.note = 0
        for step in range(1, 5):
            self._write(root, step)
            disk.note = step

    def _write(self, root: Path, step: int) -> None:
        import torch

        from diloco_node.learner.checkpoint import Checkpoint, TrainingProgress, write_checkpoint

        tensors = {"state.0.m": torch.full((VALUES,), float(step))}
        write_checkpoint(self._folder(root), Checkpoint(TrainingProgress("m", 1, step, step, step), tensors, {}, {}))

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        if region_folder(root).exists():
            self._write(root, 5)
            disk.note = 5

    def check(self, root: Path, note: int) -> None:
        from diloco_node.learner.checkpoint import read_checkpoint
        from tests.kit.learner_kit import read_newest

        found = read_newest(self._folder(root), "m")
        steps = 0 if found is None else found.progress.step
        assert steps >= note
        if found is not None:
            assert found.tensors["state.0.m"].tolist() == [float(steps)] * VALUES
        for path in self._folder(root).glob("*.safetensors"):
            read_checkpoint(path)  # a name is given to a whole file only

    def _folder(self, root: Path) -> Path:
        return region_folder(root) / "learner" / "checkpoints"


class FinalScenario:
    """The final model, twice, and the manifest. The note: how often each was written."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        folder = region_folder(root)
        folder.mkdir(parents=True)
        disk.settle()
        disk.note = 0
        save_manifest(folder, MANIFEST)
        for times in (1, 2):
            write_final(folder, {"w": np.full(VALUES, times, np.float32)})
            disk.note = times

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        folder = region_folder(root)
        if folder.exists():
            save_manifest(folder, MANIFEST)
            write_final(folder, {"w": np.full(VALUES, 3, np.float32)})
            disk.note = 3

    def check(self, root: Path, note: int) -> None:
        from safetensors.numpy import load_file

        folder = region_folder(root)
        if folder.exists():
            found, damage = recover_manifest(folder)
            assert damage == ""
            assert not note or found == MANIFEST
        if note or (folder / FINAL_NAME).exists():
            values = load_file(folder / FINAL_NAME)["w"]
            assert values[0] >= note
            assert np.array_equal(values, np.full(VALUES, values[0], np.float32))
            assert (folder / MANIFEST_NAME).exists()


class NewFolderScenario:
    """An exported model, and another one in its place. The note: the value of the last one that was promised."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        disk.note = 0
        for value in (1, 2):
            self._write(root, value)
            disk.note = value

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        if (root / "out").exists():
            disk.note = 0  # it may have been killed between the two renames
            self._write(root, 3)
            disk.note = 3

    def _write(self, root: Path, value: int) -> None:
        with new_folder(root / "out", is_forced=True) as fresh:
            for name in ("config.json", "model.safetensors"):
                (fresh / name).write_bytes(bytes([value]) * 5000)

    def check(self, root: Path, note: int) -> None:
        """There may be no folder while the second one takes its name, and never half of one."""
        if not (root / "out").exists():
            assert note in (0, 1)
            return
        contents = {path.name: path.read_bytes() for path in (root / "out").iterdir()}
        value = contents["config.json"][0]
        assert value >= note
        assert contents == dict.fromkeys(("config.json", "model.safetensors"), bytes([value]) * 5000)


SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {
    "log": LogScenario,
    "damaged log": DamagedLogScenario,
    "gone log": GoneLogScenario,
    "files": FilesScenario,
    "counts": CountsScenario,
    "damaged counts": DamagedCountsScenario,
    "checkpoint": CheckpointScenario,
    "final": FinalScenario,
    "new folder": NewFolderScenario,
}
