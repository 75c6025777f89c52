"""Which files are the text of a corpus, in which order, and which of them are held out."""

from pathlib import Path

import pytest

from diloco_node.errors import ConfigError
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
