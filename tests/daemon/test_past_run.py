"""Earlier versions of a run: each has the bytes that its daemon had then, and what is gone is said with the nearest."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.types import FinishedBody, MergeRule, RoundBody
from diloco_node.daemon import state_replay
from diloco_node.daemon.effects import disk_effects
from diloco_node.daemon.effects.past_init import read_past_init
from diloco_node.daemon.parameters import join_fragments
from diloco_node.daemon.past_run import check_past_init, find_past
from diloco_node.daemon.run_files import RunFiles, region_folders
from diloco_node.daemon.run_record import past_of
from diloco_node.daemon.state_replay import Replay, read_past
from diloco_node.errors import ConfigError, StorageError
from diloco_node.main import main
from diloco_node.state_names import FINAL_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import read_header, write_state
from tests.kit.archived_run import NAMES, SETTINGS, train
from tests.kit.node_kit import MANIFEST

EVERY_STATE = dataclasses.replace(SETTINGS, checkpoint_versions=1, steps_max=60)

States = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
"""(fragment, version) -> parameters and momentum."""


@dataclasses.dataclass(frozen=True)
class World:
    """A run that is over. `states`: all that the daemon of region a had; its folder has only what is kept."""

    folder: Path
    states: States

    @property
    def archive(self) -> Path:
        return self.folder / "a"

    def entry_versions(self) -> list[tuple[int, ...]]:
        """The versions of all fragments after each round of the ledger, from genesis on."""
        versions = [(0, 0)]
        for entry in read_whole_ledger(self.archive, 2)[1]:
            if isinstance(entry.body, RoundBody):
                now = list(versions[-1])
                now[entry.body.fragment] = entry.body.version
                versions.append((now[0], now[1]))
        return versions


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    with pytest.MonkeyPatch.context() as patch:
        prune = RegionStore.prune
        patch.setattr(RegionStore, "prune", lambda *_: None)
        train(folder, EVERY_STATE)
        store = RegionStore(folder / "a", is_read_only=True)
        states = {(at, version): store.read_state(at, version) for at in (0, 1) for version in store.state_versions(at)}
        for name in NAMES:
            kept_files = RegionStore(folder / name, is_archive=name == "a")
            for fragment in (0, 1):
                prune(kept_files, fragment, 1 << 40)
            kept_files.close()
    yield World(folder, states)
    shutil.rmtree(folder)


@pytest.fixture
def copied(world: World, tmp_path: Path) -> World:
    """The same, to be damaged."""
    shutil.copytree(world.folder, tmp_path / "state", ignore=shutil.ignore_patterns("*.sock"))
    return World(tmp_path / "state", world.states)


def is_version(world: World, folders: list[Path], number: int) -> bool:
    """Whether reading it gives the bytes that the daemon had at the entry that took the last fragment there."""
    versions = next(versions for versions in world.entry_versions() if min(versions) == number)
    _, past, parameters = read_past(folders, version=number)
    assert (past.number, past.versions) == (number, versions)
    pairs = [world.states[fragment, version] for fragment, version in enumerate(versions)]
    return all(
        theta.tobytes() == parameters.theta[fragment].tobytes()
        and momentum.tobytes() == parameters.momentum[fragment].tobytes()
        for fragment, (theta, momentum) in enumerate(pairs)
    )


def last_number(world: World) -> int:
    return min(world.entry_versions()[-1])


def unfinish(world: World, name: str, *, newest_states: tuple[int, int]) -> None:
    """As in mid-run: no end of the run, these states, and none after them."""
    folder = world.folder / name
    store = RegionStore(folder)
    before = store.load(2)
    ends = [entry.index for entry in before.entries if isinstance(entry.body, FinishedBody)]
    store.persist(before.term, before.voted_for, ends[0], ())
    store.close()
    (folder / FINAL_NAME).unlink()
    for fragment, newest in enumerate(newest_states):
        for path in (folder / "state").glob(f"f{fragment:03d}-*"):
            if int(path.stem[6:]) > newest:
                path.unlink()
    store = RegionStore(folder)
    for place in enumerate(newest_states):
        store.store_state(*place, *world.states[place], fragment_digest(*world.states[place]))
    store.close()


def test_an_archive_gives_back_every_version_with_its_momentum(world: World) -> None:
    last = last_number(world)
    assert last >= 5
    first, *others = RegionStore(world.archive, is_read_only=True).state_versions(0)
    assert (first, len(others)) == (0, 2), "there is no way but by the payloads"
    assert all(is_version(world, [world.archive], number) for number in range(last + 1))
    assert any(np.any(world.states[0, version][1]) for version in range(1, last)), "there is a momentum to lose"


def test_without_an_archive_the_newest_versions_are_there_and_the_nearest_is_named(world: World) -> None:
    last = last_number(world)
    folder = world.folder / "b"
    assert is_version(world, [folder], last)
    with pytest.raises(ConfigError) as refusal:
        find_past([folder], version=0)
    text = str(refusal.value)
    assert f"version 0 is gone from {folder}, which lacks" in text
    nearest = int(text.split("The nearest is version ")[1].split(maxsplit=1)[0])
    assert 0 < nearest <= last
    assert is_version(world, [folder], nearest)
    assert "payload_archive = true in [regions.NAME]" in text


def test_of_all_regions_any_that_has_it_is_taken(world: World) -> None:
    folders = [world.folder / "b", world.folder / "c", world.archive]
    assert find_past(folders, version=1)[0].files.folder == world.archive
    assert find_past(folders, version=last_number(world))[0].files.folder == world.folder / "b"
    assert is_version(world, region_folders(world.folder), 2)


def test_a_hole_in_the_archive_is_named_with_what_is_left(copied: World) -> None:
    (payload,) = (copied.archive / "payloads").glob("f001-v00000003-*")
    payload.unlink()
    last = last_number(copied)
    assert is_version(copied, [copied.archive], 1)
    with pytest.raises(
        ConfigError, match=r"version 3 is gone from .* lacks the payload of fragment 1 version 3\."
    ) as hole:
        find_past([copied.archive], version=3)
    assert "The nearest is version 2 (step " in str(hole.value) or "The nearest is version 1 (step " in str(hole.value)
    assert is_version(copied, [copied.archive], last)


def test_the_future_is_refused_and_says_where_the_run_is(world: World) -> None:
    last = last_number(world)
    for wish in ({"version": last + 1}, {"version": 1 << 60}, {"step": 1 << 60}):
        with pytest.raises(ConfigError, match=rf"is in the future of .* version {last} \(step \d+\)"):
            find_past([world.archive], **wish)


def test_a_step_means_the_newest_version_up_to_it(world: World) -> None:
    steps = {number: find_past([world.archive], version=number)[1].step for number in range(last_number(world) + 1)}
    assert steps[0] == 0
    assert sorted(steps.values()) == list(steps.values())
    assert steps[2] > steps[1] > 0
    assert find_past([world.archive], step=steps[2])[1].number == max(
        n for n, step in steps.items() if step == steps[2]
    )
    assert find_past([world.archive], step=steps[2] - 1)[1].number == 1
    assert find_past([world.archive], step=0)[1].number == 0
    with pytest.raises(ConfigError, match=r"step 0 is gone from .* lacks the ledger's entries of that time"):
        find_past([world.folder / "b"], step=0)


def test_in_mid_run_only_what_no_leader_can_replace_is_given(copied: World) -> None:
    """The entries behind the newest state on disk may be none of the run's."""
    unfinish(copied, "a", newest_states=(3, 2))
    versions = copied.entry_versions()
    entry_of_a_state = max(
        next(at for at, now in enumerate(versions) if now[0] == 3),
        next(at for at, now in enumerate(versions) if now[1] == 2),
    )
    newest = min(versions[entry_of_a_state])
    assert newest < last_number(copied)
    with pytest.raises(ConfigError, match=rf"the newest whole version on disk is version {newest} "):
        find_past([copied.archive], version=newest + 1)
    assert is_version(copied, [copied.archive], newest)


def test_other_bytes_than_the_ledger_names_are_never_given(copied: World) -> None:
    path = copied.archive / "state" / "f001-v00000000.bin"
    theta, momentum = copied.states[1, 0]
    theta = theta.copy()
    theta[7] += 1
    write_state(path, theta, momentum, fragment=1, version=0, digest=read_header(path).digest)
    with pytest.raises(StorageError, match="fragment 1 version 0 differs from what the ledger names"):
        read_past([copied.archive], version=2)


def test_a_damaged_payload_is_named(copied: World) -> None:
    (payload,) = (copied.archive / "payloads").glob("f000-v00000002-*")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    with pytest.raises(StorageError, match=payload.name):
        read_past([copied.archive], version=2)


def test_files_that_a_daemon_removes_meanwhile_are_looked_for_once_more(
    copied: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a newer state and prunes the oldest one, from which the version was to be computed."""
    real, calls = state_replay.compute, []
    store = RegionStore(copied.archive, is_read_only=True)
    *_, before, last = store.state_versions(0)

    def compute(*arguments):
        if not calls:
            (copied.archive / "state" / f"f000-v{before:08d}.bin").unlink()
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(state_replay, "compute", compute)
    _, past, parameters = read_past([copied.archive], version=before)
    assert len(calls) == 2 or past.versions[0] == last
    assert parameters.theta[0].tobytes() == copied.states[0, past.versions[0]][0].tobytes()


def test_folders_of_several_runs_are_told_apart(world: World, tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(EVERY_STATE, steps_max=12))
    with pytest.raises(ConfigError, match="these folders are of several runs"):
        find_past([world.archive, tmp_path / "b"], version=1)


def test_a_run_begins_at_a_version_in_other_fragments(world: World) -> None:
    specs = [dataclasses.replace(spec, merge=MergeRule.AVG) for spec in MANIFEST.tensors]
    manifest = build_manifest(specs, 3)
    first = read_past_init(world.folder / "a@3", manifest)
    assert first is not None
    _, _, parameters = read_past([world.archive], version=3)
    for vectors, earlier in zip(first, (parameters.theta, parameters.momentum), strict=True):
        joined, expected = join_fragments(manifest, vectors), join_fragments(MANIFEST, earlier)
        assert {name: values.tobytes() for name, values in joined.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }
    assert read_past_init(world.folder / "a" / FINAL_NAME, manifest) is None


def test_all_regions_of_a_new_run_begin_with_parameters_and_momentum_of_the_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_past_init(world.folder / "a@3", MANIFEST)
    assert first is not None
    # Here the daemon's threads are its loop's, in which nothing else can wait.
    monkeypatch.setattr(disk_effects, "read_past_init", lambda *_: first)
    train(tmp_path, dataclasses.replace(SETTINGS, steps_max=18), init=world.folder / "a@3")
    genesis = RunFiles.read(tmp_path / "a").genesis
    assert genesis.fragment_digests == tuple(fragment_digest(*pair) for pair in zip(*first, strict=True))
    assert any(np.any(momentum) for momentum in first[1])
    for fragment in (0, 1):
        theta, momentum = RegionStore(tmp_path / "a", is_read_only=True).read_state(fragment, 0)
        assert (theta.tobytes(), momentum.tobytes()) == (first[0][fragment].tobytes(), first[1][fragment].tobytes())
    report = Replay(tmp_path / "a").run(lambda: None)
    assert report.agrees
    assert report.final


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda specs: specs[1:], r"tensor a\.weight is \[70, 90\], in this run's model not there"),
        (lambda specs: [*specs, TensorSpec("z", (3,))], r"tensor z is not there, in this run's model \[3\]"),
        (
            lambda specs: [TensorSpec("a.weight", (90, 70)), *specs[1:]],
            r"tensor a\.weight is \[70, 90\], in this run's model \[90, 70\]",
        ),
    ],
)
def test_another_model_is_refused_with_the_tensor(world: World, change, text: str) -> None:
    manifest = build_manifest(change(list(MANIFEST.tensors)), 2)
    with pytest.raises(ConfigError, match=text):
        read_past_init(world.folder / "a@1", manifest)


def test_a_version_that_is_not_finite_begins_no_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    files, past, parameters = read_past([world.archive], version=1)
    parameters.momentum[1][5] = np.nan
    monkeypatch.setattr("diloco_node.daemon.effects.past_init.read_past", lambda *_, **__: (files, past, parameters))
    with pytest.raises(ConfigError, match=r"momentum of tensor .* holds NaN"):
        read_past_init(world.folder / "a@1", MANIFEST)


def test_a_setting_names_a_version_only_where_no_file_has_the_name(world: World, tmp_path: Path) -> None:
    assert past_of(world.folder / "a@12") == (world.archive, 12)
    assert past_of(tmp_path / "gone@3") == (tmp_path / "gone", 3)
    (tmp_path / "model@2").write_bytes(b"")
    assert past_of(tmp_path / "model@2") is None
    assert past_of(tmp_path / "model.safetensors") is None
    assert past_of(tmp_path / "@7") is None
    for wrong in ("a@", "a@-1", "a@yesterday", "a@1.5", "a@٣"):
        with pytest.raises(ConfigError, match=r"the number of a version comes after the @, as in .*a@120"):
            past_of(world.folder / wrong)
    with pytest.raises(ConfigError, match=r"is a region's state folder: add a version, as in .*a@120"):
        past_of(world.archive)


def test_a_version_that_cannot_be_had_is_refused_at_the_start(world: World, tmp_path: Path) -> None:
    check_past_init(world.folder / "a@2")
    check_past_init(tmp_path / "model.safetensors")
    for init, text in (
        (world.folder / "a@9999", "run.init: version 9999 is in the future"),
        (world.folder / "b@0", "run.init: version 0 is gone"),
        (tmp_path / "gone@3", "run.init: .*no manifest.json there"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_past_init(init)


def exported(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main(["export", *map(str, words)])
    out, err = capsys.readouterr()
    return code, err if code else out


def test_export_writes_a_version_and_says_which(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    out = tmp_path / "out"
    words = (world.folder, out, "--config", tmp_path / "config.json", "--force")
    before = {path: path.stat().st_mtime_ns for path in world.folder.rglob("*")}
    _, past, parameters = read_past([world.archive], version=2)
    expected = {name: values.tobytes() for name, values in parameters.full_tensors().items()}
    for wish in (("--version", "2"), ("--step", str(past.step))):
        code, message = exported(capsys, *words, *wish)
        assert code == 0, message
        assert f"run run (version 2, step {past.step}, versions 2 to {max(past.versions)}, " in message
        tensors = load_file(out / "model.safetensors")
        assert {name: values.tobytes() for name, values in tensors.items()} == expected
        document = json.loads((out / "export.json").read_text())
        assert (document["version"], document["step"], document["is_final"]) == (2, past.step, False)
        assert (document["versions"], document["tokens"]) == (list(past.versions), past.tokens)
    assert {path: path.stat().st_mtime_ns for path in world.folder.rglob("*")} == before
    assert exported(capsys, *words)[0] == 0
    document = json.loads((out / "export.json").read_text())
    assert (document["version"], document["step"], document["is_final"]) == (None, None, True)
    code, message = exported(capsys, *words, "--version", "2", "--step", "9")
    assert (code, "give one of them" in message) == (2, True)
    code, message = exported(capsys, *words, "--version", "9999")
    assert (code, "is in the future" in message) == (2, True)
