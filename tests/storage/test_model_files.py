"""Safetensors without torch are those of the library; a folder is there as a whole, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from diloco_node.errors import ConfigError, StorageError
from diloco_node.storage import model_files
from diloco_node.storage.model_files import (
    StoredTensor,
    read_model,
    read_tensors,
    write_model_folder,
    write_tensors,
)

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_smaller_types_are_rounded_as_torch_rounds(values: list[float]) -> None:
    given_values = np.array(values, np.float32)
    for dtype in ("float32", "bfloat16", "float16"):
        with np.errstate(over="ignore"):
            found = StoredTensor.of(given_values, dtype)
        expected = torch.from_numpy(given_values).to(getattr(torch, dtype))
        assert found.data.tobytes() == expected.view(torch.uint8).numpy().tobytes(), dtype


def test_what_the_library_writes_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b.bf16": torch.randn(4).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.zeros(0, 3),
        "e": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    read = read_tensors(tmp_path / "theirs.safetensors")
    write_tensors(tmp_path / "ours.safetensors", read)
    found = load_file(tmp_path / "ours.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in tensors.items()
    }
    assert all(torch.equal(found[name], one) for name, one in tensors.items())


def test_a_model_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert sorted(read_model(tmp_path)) == ["a", "b"]
    index.write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        read_model(tmp_path)
    index.unlink()
    with pytest.raises(ConfigError, match="save_pretrained"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (58).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16000]}}',
    ],
)
def test_what_is_no_such_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"x\.safetensors can't be read"):
        read_tensors(path)


def test_a_folder_is_refused_if_it_is_there_and_replaced_only_if_told_so(tmp_path: Path) -> None:
    out, extra = tmp_path / "deep" / "out", tmp_path / "tokenizer.json"
    extra.write_text("{}")
    tensors = {"a": StoredTensor.of(VALUES)}
    write_model_folder(out, tensors, {"config.json": {"model_type": "x"}}, [extra])
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(ConfigError, match="--force"):
        write_model_folder(out, tensors, {})
    write_model_folder(out, tensors, {}, is_forced=True)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="is a file"):
        write_model_folder(extra, tensors, {}, is_forced=True)


def test_a_disk_that_refuses_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    tensors = {"a": StoredTensor.of(VALUES)}
    write_model_folder(out, tensors, {})

    def refuse(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "sync_folder", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        write_model_folder(out, {}, {}, is_forced=True)
    assert list(read_tensors(out / "model.safetensors")) == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
