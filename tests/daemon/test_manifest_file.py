"""manifest.json: the layout again, or a refusal that says what to do."""

import json
from pathlib import Path

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import MergeRule
from diloco_node.daemon.manifest_file import (
    MANIFEST_NAME,
    describe_difference,
    load_manifest,
    recover_manifest,
    save_manifest,
)
from diloco_node.errors import StorageError
from diloco_node.storage.durable import DamagedFile
from tests.kit.node_kit import MANIFEST


def test_what_was_saved_lays_out_the_same(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None
    save_manifest(tmp_path, MANIFEST)
    again = load_manifest(tmp_path)
    assert again is not None
    assert again.digest == MANIFEST.digest
    assert again.fragments == MANIFEST.fragments
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def change(document: dict, path: Path, **changes: object) -> None:
    path.write_text(json.dumps(document | changes))


def test_another_layout_than_the_digest_says_is_refused(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    path = tmp_path / MANIFEST_NAME
    document = json.loads(path.read_text())
    change(document, path, fragments=1)
    with pytest.raises(StorageError, match="lists its tensors again"):
        load_manifest(tmp_path)
    change(document, path, tensors=document["tensors"][:-1])
    with pytest.raises(StorageError, match="names digest"):
        load_manifest(tmp_path)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"tensors": 3, "fragments": 2, "digest": ""}', "\0\0", DEEP], ids=range(7)
)
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(DamagedFile, match=r"the learner lists its tensors again"):
        load_manifest(tmp_path)


def test_every_flipped_bit_is_damage_and_sets_the_file_aside(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    images = []
    for bit in range(0, 8 * len(whole), 37):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        manifest, damage = recover_manifest(tmp_path)
        if manifest is not None:
            assert (manifest, damage) == (MANIFEST, ""), "white space, or nothing that it means"
            continue
        assert "set aside" in damage
        assert not path.exists()
        images.append(bytes(data))
    images_kept = {path.read_bytes() for path in tmp_path.iterdir()}
    assert set(images) <= images_kept, "none is written over"
    assert len(images) > 10
    save_manifest(tmp_path, MANIFEST)
    assert recover_manifest(tmp_path) == (MANIFEST, "")


def test_a_file_that_the_disk_refuses_to_read_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(StorageError, match=r"can't read"):
        recover_manifest(tmp_path)
    assert (tmp_path / MANIFEST_NAME).is_dir()


def test_a_disk_that_refuses_keeps_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"manifest\.json"):
        save_manifest(tmp_path / "gone", MANIFEST)


SPECS = list(MANIFEST.tensors)


def test_the_same_tensors_in_any_order_are_the_same_model() -> None:
    assert describe_difference(MANIFEST, SPECS) == ""
    assert describe_difference(MANIFEST, SPECS[::-1]) == ""


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (SPECS[1:], f"tensor {SPECS[0].name} of the run's model is missing"),
        ([*SPECS, TensorSpec("z.new", (3,))], "tensor z.new is not in the run's model"),
        (
            [*SPECS[1:], TensorSpec("z.new", (3,))],
            f"tensor z.new is not in the run's model, tensor {SPECS[0].name} of the run's model is missing",
        ),
        ([TensorSpec(SPECS[0].name, (1, 2)), *SPECS[1:]], f"tensor {SPECS[0].name} is (1, 2)"),
        ([TensorSpec(SPECS[0].name, SPECS[0].shape, MergeRule.AVG), *SPECS[1:]], f"tensor {SPECS[0].name} is"),
    ],
)
def test_the_first_difference_is_named(tensors: list[TensorSpec], text: str) -> None:
    assert describe_difference(MANIFEST, tensors).startswith(text)
