"""Which files are the text of a corpus, in which order, and which of them are held out."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import ConfigError, DiskRefused
from diloco_node.learner.builtin import text_files as module
from diloco_node.learner.builtin.text_files import TextFile, files_below, text_files


def test_files_come_in_order_of_their_paths_and_links_are_left_out(tmp_path: Path):
    for name in ("b/z.txt", "b.txt", "b/a/c.txt", "a.txt", "B.txt", "site-packages/d.txt", "b/.e/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    assert files_below(tmp_path) == ["B.txt", "a.txt", "b.txt", "b/a/c.txt", "b/z.txt"]
    assert [file.name for file in text_files([tmp_path / "b", tmp_path / "a.txt"])] == ["a/c.txt", "z.txt", "a.txt"]


def test_a_folder_whose_disk_is_not_there_yet_is_no_corpus(tmp_path: Path):
    """The text of the other paths alone would be other rows than those of the other regions."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DiskRefused, match=r"data path .*disk has no files but links and hidden ones: mount its disk"):
        text_files([tmp_path / "a.txt", tmp_path / "disk"])
    assert DiskRefused.exit_code not in (0, 2), "the supervisor starts the learner again"


@pytest.mark.parametrize("folder", ["", "b"])
def test_what_can_not_be_read_is_refused_and_what_is_gone_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("text")
    (tmp_path / "a.txt").write_text("text")
    scan = os.scandir
    for fault, text in ((errno.ESTALE, "Stale file handle"), (errno.EACCES, "denied"), (errno.ENOENT, "No such")):

        def refuse(path: Path, fault: int = fault) -> Any:
            if path == tmp_path / folder:
                raise OSError(fault, os.strerror(fault), str(path))
            return scan(path)

        monkeypatch.setattr(module.os, "scandir", refuse)
        if folder and fault == errno.ENOENT:
            assert files_below(tmp_path) == ["a.txt"]
            continue
        with pytest.raises(DiskRefused, match=rf"can't be read \(.*{text}.*\): mount its disk"):
            text_files([tmp_path])


def test_a_file_that_can_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t.txt").write_text("text")

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DiskRefused, match=r"t\.txt can't be read"):
        TextFile("t.txt", tmp_path / "t.txt").read()


@pytest.mark.parametrize("fault", [errno.EACCES, errno.ESTALE, errno.ENOTCONN])
def test_a_path_of_a_disk_that_is_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int):
    def refuse(path: Path, **_: object) -> os.stat_result:
        raise OSError(fault, os.strerror(fault), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DiskRefused, match=r"data path .*corpus can't be read"):
        text_files([tmp_path / "corpus"])


def test_a_file_that_goes_while_it_is_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t.txt").write_text("text")
    monkeypatch.setattr(TextFile, "is_binary", property(lambda file: file.path.unlink()))
    assert TextFile("t.txt", tmp_path / "t.txt").read() is None


@pytest.mark.parametrize("content", [b"", b"x\0y", None])
def test_a_file_without_text_is_not_read(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "t.txt").write_bytes(content)
    assert TextFile("t.txt", tmp_path / "t.txt").read() is None


def test_about_five_files_of_a_hundred_are_held_out_by_their_name_wherever_they_lie(tmp_path: Path):
    names = [f"a/{number}.txt" for number in range(2000)]
    held_out = [name for name in names if TextFile(name, tmp_path / name).is_held_out]
    assert 60 < len(held_out) < 140
    assert held_out == [name for name in names if TextFile(name, Path("elsewhere") / name).is_held_out]


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FILES_MAX", 2)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("text")
    with pytest.raises(ConfigError, match="more than 2 files below"):
        text_files([tmp_path])
