"""A folder is there as a whole, or not at all."""

from pathlib import Path

import pytest

from diloco_node.errors import ConfigError, StorageError
from diloco_node.storage import durable
from diloco_node.storage.durable import new_folder


def write(folder: Path, content: str, *, is_forced: bool = False) -> None:
    with new_folder(folder, is_forced=is_forced) as fresh:
        assert not (folder / content).exists()
        (fresh / content).write_text(content)


def test_a_folder_is_refused_if_it_is_there_and_replaced_only_if_forced(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    write(out, "first")
    with pytest.raises(ConfigError, match="--force"):
        write(out, "second")
    write(out, "second", is_forced=True)
    assert [path.name for path in out.iterdir()] == ["second"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="is a file"):
        write(out / "second", "third", is_forced=True)


def test_a_disk_that_refuses_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "first")

    def refuse(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync_folder", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        write(tmp_path / "out", "second", is_forced=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fail(folder: Path) -> None:
    with new_folder(folder) as fresh:
        (fresh / "half").write_text("half")
        raise ConfigError("mine")


def test_an_error_of_the_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mine"):
        fail(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
