"""`checkpoint list`, `verify` and `copy`, and `export` of what they wrote: to a real S3 server, and to folders."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

from diloco_node.config.sources import read_file
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.daemon.checkpoint_copies import CheckpointCopies
from diloco_node.daemon.effects.past_init import read_past_init
from diloco_node.daemon.parameters import join_fragments
from diloco_node.daemon.past_run import check_past_init, find_past
from diloco_node.daemon.run_record import past_of
from diloco_node.daemon.state_replay import read_past
from diloco_node.errors import ConfigError, StoreRefused
from diloco_node.main import main
from diloco_node.storage import object_store
from diloco_node.storage.object_store import BucketObjects
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import read_header, write_state
from tests.kit.archived_run import SETTINGS, train
from tests.kit.node_kit import MANIFEST
from tests.kit.ports import free_port
from tests.kit.s3_server import s3_server

SHORT = dataclasses.replace(SETTINGS, steps_max=20)
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over; region a has its archive."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, SHORT)
    return folder


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server(BUCKET) as environment:
        yield environment


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}"


class Commands:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> tuple[int, str]:
        """Exit code and all output, as a shell sees them."""
        code = main([*map(str, words)])
        out, err = self._capsys.readouterr()
        return code, out + err

    def rows(self, place: str | Path) -> dict[int, dict[str, Any]]:
        code, text = self("checkpoint", "list", place, "--json")
        assert code == 0, text
        return {row["version"]: row for row in json.loads(text)["versions"]}


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def expected_of(run: Path, version: int) -> dict[str, np.ndarray]:
    return read_past([run / "a"], version=version)[2].full_tensors()


def newest_of(run: Path) -> int:
    return find_past([run / "a"])[1].number


def is_equal(tensors: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
    return tensors.keys() == arrays.keys() and all(
        np.asarray(tensors[name]).tobytes() == values.tobytes() for name, values in arrays.items()
    )


def test_a_region_lists_each_version_and_what_the_others_lack(run: Path, told: Commands) -> None:
    newest = newest_of(run)
    assert newest >= 3
    rows = told.rows(run / "a")
    assert sorted(rows) == list(range(newest + 1))
    past = find_past([run / "a"], version=2)[1]
    assert (rows[2]["step"], rows[2]["tokens"], rows[2]["lack"]) == (past.step, past.tokens, "")
    assert rows[2]["content_bytes"] == 8 * MANIFEST.size
    others = told.rows(run / "b")
    assert others[max(others)]["lack"] == ""
    code, text = told("checkpoint", "list", run)
    assert code == 0
    assert text.count("whole") == newest + 1, "of all regions any that has it counts"


def test_a_copy_in_a_bucket_lists_verifies_begins_a_run_and_comes_back(
    run: Path, bucket: str, told: Commands, tmp_path: Path
) -> None:
    newest = newest_of(run)
    for words in ((), ("--version", "1")):
        code, text = told("checkpoint", "copy", run / "a", bucket, *words)
        assert code == 0, text
    assert f"{bucket}@1: run run, step " in text
    assert sorted(told.rows(bucket)) == [1, newest]
    assert {row["lack"] for row in told.rows(bucket).values()} == {""}
    assert told("checkpoint", "verify", bucket) == (0, f"{bucket}: 4 files, none of them wrong\n")
    assert "was there already" in told("checkpoint", "copy", run, bucket, "--version", "1")[1]

    code, text = told("checkpoint", "copy", bucket, tmp_path / "back", "--step", str(told.rows(bucket)[newest]["step"]))
    assert code == 0, text
    assert sorted(told.rows(tmp_path / "back")) == [newest]
    specs = [TensorSpec(spec.name, spec.shape) for spec in MANIFEST.tensors]
    manifest = build_manifest(specs, 3)
    for init, version in ((f"{bucket}@1", 1), (f"{tmp_path / 'back'}@{newest}", newest)):
        check_past_init(init)
        first = read_past_init(init, manifest)
        assert first is not None
        _, _, parameters = read_past([run / "a"], version=version)
        for vectors, earlier in zip(first, (parameters.theta, parameters.momentum), strict=True):
            assert is_equal(join_fragments(manifest, vectors), join_fragments(MANIFEST, earlier))
    assert any(map(np.any, parameters.momentum)), "there is a momentum to lose"


def test_run_init_names_copies_that_are_not_there_and_a_url_without_version(
    run: Path, bucket: str, told: Commands, tmp_path: Path
) -> None:
    assert told("checkpoint", "copy", run / "a", bucket, "--version", "1")[0] == 0
    assert past_of(f"{bucket}@12") == (bucket, 12)
    with pytest.raises(ConfigError, match=r"run\.init: .* has no whole version 2\. There are versions 1$"):
        check_past_init(f"{bucket}@2")
    for wrong in (bucket, f"{bucket}@", f"{bucket}@yesterday"):
        with pytest.raises(ConfigError, match=r"the version comes after it, as in .*@120"):
            past_of(wrong)
    (tmp_path / "run.toml").write_text(f'[run]\ninit = "{bucket}@1"\n')
    assert read_file(tmp_path / "run.toml")[0]["run"]["init"] == f"{bucket}@1"
    other = build_manifest([TensorSpec("other", (3,)), *MANIFEST.tensors], 2)
    with pytest.raises(ConfigError, match="tensor other is not there"):
        read_past_init(f"{bucket}@1", other)


def test_half_a_copy_is_none_and_the_next_one_makes_it_whole(
    run: Path, bucket: str, told: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends, or the network is cut, after the first objects."""
    write = BucketObjects.write

    def cut(self: BucketObjects, key: str, chunks: Any) -> None:
        if key.endswith("f001.bin"):
            raise StoreRefused("the network is cut")
        write(self, key, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "write", cut)
        assert told("checkpoint", "copy", run / "a", bucket, "--version", "1")[0] == 6
    assert "checkpoint.json, which is written last" in told.rows(bucket)[1]["lack"]
    code, text = told("checkpoint", "verify", bucket)
    assert (code, "version 1 lacks checkpoint.json" in text) == (1, True)
    with pytest.raises(ConfigError, match=r"has no whole version 1: it lacks checkpoint\.json"):
        check_past_init(f"{bucket}@1")
    assert told("export", bucket, "out")[0] == 2
    assert told("checkpoint", "copy", run / "a", bucket, "--version", "1")[0] == 0
    assert told("checkpoint", "verify", bucket)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "write", cut)
        assert told("checkpoint", "copy", run / "a", bucket, "--version", "1", "--force")[0] == 6
    assert told.rows(bucket)[1]["lack"], "while a copy is replaced it is not whole"


def test_other_bytes_in_a_bucket_are_named_and_never_given(run: Path, bucket: str, told: Commands) -> None:
    for version in ("1", "2"):
        assert told("checkpoint", "copy", run / "a", bucket, "--version", version)[0] == 0
    objects = object_store.open_objects(bucket)
    content = objects.read("v00000001/f001.bin", 1 << 30)
    content[-1] ^= 1
    objects.write("v00000001/f001.bin", [content.data])
    code, text = told("checkpoint", "verify", bucket)
    assert code == 1
    assert f"{bucket}/v00000001/f001.bin is damaged: its bytes do not have the digest" in text
    assert "4 files, 1 of them wrong" in text
    assert told("checkpoint", "verify", bucket, "--version", "2")[0] == 0
    code, text = told("checkpoint", "copy", bucket, bucket + "-2", "--version", "1")
    assert (code, "f001.bin is damaged" in text) == (6, True)
    with pytest.raises(ConfigError, match=r"f001\.bin is damaged"):
        read_past_init(f"{bucket}@1", MANIFEST)
    objects.write("v00000002/f000.bin", [b"short"])
    assert told.rows(bucket)[2]["lack"] == "f000.bin as it was written"
    for version in ("1", "2"):
        assert told("checkpoint", "copy", run / "a", bucket, "--version", version, "--force")[0] == 0
    assert told("checkpoint", "verify", bucket)[0] == 0


def test_copies_of_another_run_or_a_newer_format_are_refused(
    run: Path, bucket: str, told: Commands, tmp_path: Path
) -> None:
    assert told("checkpoint", "copy", run / "a", bucket, "--version", "1")[0] == 0
    objects = object_store.open_objects(bucket)
    key = "v00000001/checkpoint.json"
    document = json.loads(objects.read(key, 1 << 20).tobytes())
    for difference, code, phrase in (
        ({"run": "0" * 64}, 2, "has copies of run run, another one of the same name, not of run: give each run"),
        ({"run": "0" * 64, "run_id": "old"}, 2, "has copies of run old, not of run: give each run a prefix"),
        ({"format": 2}, 2, "has format 2, and this diloco-node reads 1: install a newer one"),
    ):
        objects.write(key, [json.dumps(document | difference).encode()])
        result, text = told("checkpoint", "copy", run / "a", bucket, "--version", "2", "--force")
        assert (result, phrase in text) == (code, True), text
    changes: tuple[dict[str, Any], ...] = (
        {"version": 2},
        {"versions": [1]},
        {"versions": [1, "x"]},
        {"digests": [1, 2]},
        {"step": -1},
        {"tokens": 1.5},
        {"model": []},
        {"manifest": {}},
        {"more": 1},
        {"manifest": document["manifest"] | {"digest": "0"}},
    )
    for change in changes:
        objects.write(key, [json.dumps(document | change).encode()])
        (state,) = CheckpointCopies(bucket).states()
        assert state.checkpoint is None, change
        assert "checkpoint.json is damaged" in state.lack
    objects.write(key, [b"[" * 100_000])
    assert "checkpoint.json is damaged" in told.rows(bucket)[1]["lack"]
    assert told("checkpoint", "copy", run / "a", bucket, "--version", "1")[0] == 0
    assert told("checkpoint", "verify", bucket)[0] == 0


def test_a_store_that_refuses_is_named_with_what_helps(
    run: Path, bucket: str, told: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 0})

    def refusal(url: str) -> str:
        code, text = told("checkpoint", "copy", run / "a", url, "--version", "1")
        assert (code, text.count("\n")) == (6, 1), text
        return text

    text = refusal("s3://nothing-there/run")
    assert "there is no such bucket: make it, or correct the URL" in text
    assert "E-BUCKET" in text
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nobody)
    assert "nobody answers: look at the network and the endpoint" in refusal(bucket)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody)
    assert "no credentials: the environment gives AWS_ACCESS_KEY_ID" in refusal(bucket)
    for url, phrase in (
        ("S3://bucket/run", "names no store"),
        ("s3:bucket/run", "names no store"),
        ("s3://key:secret@bucket/run", "secrets in a URL would stand in messages"),
        ("az://bucket/run?sig=secret", "secrets in a URL would stand in messages"),
        ("ftp://host/run", "names no store: give s3://BUCKET/PREFIX"),
        ("s3:///run", "names no store"),
        ("file://host/run", "names no store"),
        (str(run / "a"), "which a copy would hide: name a folder of its own"),
        (str(run), "which a copy would hide"),
    ):
        code, text = told("checkpoint", "copy", run / "a", url)
        assert (code, phrase in text) == (2, True), text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, text = told("checkpoint", "list", bucket)
    assert (code, "needs obstore: pip install 'diloco-node[store]'" in text) == (2, True)


def test_export_takes_copies_and_gives_both_formats_also_to_a_bucket(
    run: Path, bucket: str, told: Commands, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    assert told("checkpoint", "copy", run / "a", bucket, "--version", "2")[0] == 0
    expected = expected_of(run, 2)
    for source in (run / "a", bucket):
        out = tmp_path / "dcp"
        code, text = told("export", source, out, "--format", "dcp", "--version", "2", "--force")
        assert code == 0, text
        state = {name: torch.zeros(values.shape) for name, values in expected.items()}
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            load(state, checkpoint_id=out, no_dist=True)
        assert is_equal(state, expected)
        document = json.loads((out / "export.json").read_text())
        assert (document["version"], document["run_id"], document["region"]) == (2, "run", "a")
        files = {path.name for path in out.iterdir()} - {"export.json"}
        assert document["files"].keys() == files
    code, text = told("export", source, out, "--format", "dcp", "--config", tmp_path / "config.json", "--force")
    assert (code, "--config and --base are for --format hf" in text) == (2, True)

    out_url = f"{bucket}-model"
    words = ("export", bucket, out_url, "--config", tmp_path / "config.json")
    code, text = told(*words)
    assert code == 0, text
    objects = object_store.open_objects(out_url)
    document = json.loads(objects.read("export.json", 1 << 20).tobytes())
    assert document["files"].keys() | {"export.json"} == objects.sizes().keys()
    (tmp_path / "model.safetensors").write_bytes(objects.read("model.safetensors", 1 << 30).tobytes())
    assert is_equal(load_file(tmp_path / "model.safetensors"), expected)
    code, text = told(*words)
    assert (code, "is there and not empty: give another URL, or add --force" in text) == (2, True)
    # A cut in the middle, beside objects of others: --force replaces what was sent, and nothing else.
    objects.write("others/model.bin", [b"theirs"])
    with pytest.MonkeyPatch.context() as patch:
        write = object_store.BucketObjects.write

        def cut(self: object_store.BucketObjects, key: str, chunks: Any) -> None:
            if key == "model.safetensors":
                raise StoreRefused("the network went away")
            write(self, key, chunks)

        patch.setattr(object_store.BucketObjects, "write", cut)
        assert told(*words, "--force")[0] != 0
    assert "export.json" not in objects.sizes()
    assert told(*words)[0] == 2
    assert told(*words, "--force")[0] == 0
    assert objects.sizes().keys() == document["files"].keys() | {"export.json", "others/model.bin"}
    code, text = told("export", run / "a", bucket, "--format", "dcp", "--force")
    assert (code, "has no export.json: --force replaces earlier exports only" in text) == (2, True)
    assert told("checkpoint", "verify", bucket)[0] == 0


def test_a_region_is_verified_against_its_ledger_and_the_file_is_named(
    run: Path, told: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(run / "a", folder, ignore=shutil.ignore_patterns("*.sock"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, text = told("checkpoint", "verify", folder)
    assert (code, "none of them wrong" in text) == (0, True), text
    assert told("checkpoint", "verify", folder, "--version", "2")[0] == 0
    assert told("checkpoint", "verify", run)[0] == 0
    payload = next((folder / "payloads").glob("f000-v00000002-*"))
    state = max((folder / "state").glob("f001-*"))
    for path in (payload, state):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    code, text = told("checkpoint", "verify", folder)
    assert code == 1
    assert payload.name in text
    assert state.name in text
    assert "2 of them wrong" in text
    code, text = told("checkpoint", "verify", folder, "--version", "2")
    assert (code, payload.name in text) == (6, True)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path not in (payload, state)}
    assert after.items() <= before.items(), "it reads only"


def test_a_state_with_other_values_and_a_right_checksum_is_found_by_the_ledger(
    run: Path, told: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(run / "a", folder, ignore=shutil.ignore_patterns("*.sock"))
    theta, momentum = RegionStore(folder, is_read_only=True).read_state(1, 0)
    theta[3] += 1
    path = folder / "state" / "f001-v00000000.bin"
    write_state(path, theta, momentum, fragment=1, version=0, digest=read_header(path).digest)
    code, text = told("checkpoint", "verify", folder)
    assert (code, f"{path} differs: the ledger names digest " in text) == (1, True), text


def test_a_folder_of_copies_needs_no_library(
    run: Path, told: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for target in (str(tmp_path / "copies"), f"file://{tmp_path}/copies"):
        code, text = told("checkpoint", "copy", run, target, "--version", "1", "--force")
        assert code == 0, text
        assert told("checkpoint", "verify", target)[0] == 0
    assert [state.version for state in CheckpointCopies(tmp_path / "copies").states()] == [1]
    (tmp_path / "copies" / "v00000001" / "f000.bin").unlink()
    assert told.rows(tmp_path / "copies")[1]["lack"] == "f000.bin as it was written"
    assert told("checkpoint", "verify", tmp_path / "copies")[0] == 1
