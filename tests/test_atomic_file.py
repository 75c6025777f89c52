"""atomic_file.py: old bytes or new ones, with and without a disk that refuses."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from diloco_node.atomic_file import replace_file
from tests.kit.fsync_kit import traced


@pytest.mark.parametrize("data", [b"new", [b"n", memoryview(b"ew"), b""]], ids=["bytes", "parts"])
@pytest.mark.parametrize("is_durable", [True, False])
def test_the_new_bytes_take_the_place_of_the_old(tmp_path: Path, data: Any, is_durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    replace_file(path, data, is_durable=is_durable)
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_durable_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with traced() as trace:
        replace_file(path, b"new", is_durable=True)
    ((first, temporary), *others) = trace
    assert (first, Path(temporary).parent, Path(temporary).suffix) == ("fsync", tmp_path, ".tmp")
    assert others == [("rename", str(path)), ("fsync", str(tmp_path))]
    with traced() as trace:
        replace_file(path, b"newer", is_durable=False)
    assert trace == [("rename", str(path))]


@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", is_durable=True)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
