"""Objects in folders, and what is said of a store that refuses; a real store is in tests/cli/test_checkpoint.py."""

import errno
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, NotFoundError, PermissionDeniedError, UnauthenticatedError

from diloco_node import atomic_file
from diloco_node.config.urls import is_url
from diloco_node.errors import ConfigError, DiskRefused, StoreRefused
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.object_store import BucketObjects, bucket_scheme, folder_of, open_objects


def test_a_folder_holds_objects_by_their_keys(tmp_path: Path) -> None:
    objects = open_objects(tmp_path / "copies")
    assert objects.sizes() == {}
    objects.write("v1/a", [b"one", memoryview(b"two")])
    objects.write("v1/b", [])
    (tmp_path / "copies" / "v1" / "c.tmp").write_bytes(b"half")
    assert objects.sizes() == {"v1/a": 6, "v1/b": 0}
    assert objects.read("v1/a", 6).tobytes() == b"onetwo"
    with pytest.raises(DamagedFile, match="has 6 bytes, at most 5 belong there"):
        objects.read("v1/a", 5)
    objects.remove("v1/a")
    with pytest.raises(DamagedFile, match="is not there"):
        objects.read("v1/a", 6)


def test_a_full_disk_leaves_the_object_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(tmp_path)
    objects.write("v1/a", [b"one"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(atomic_file, "write_parts", full)
    with pytest.raises(
        DiskRefused, match=r"can't write .*v1/a: the disk is full: free some space .*; [0-9,]+ bytes are free"
    ):
        objects.write("v1/a", [b"two"])
    assert objects.read("v1/a", 3).tobytes() == b"one"


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ("file:///a/b%20c", Path("/a/b c")),
        ("a/b@c:d", Path("a/b@c:d")),
        (Path("s3://bucket/run"), Path("s3:/bucket/run")),
        ("s3://bucket/run", None),
        ("file://host/a", None),
    ],
)
def test_a_place_is_a_folder_or_a_url(place: str | Path, folder: Path | None) -> None:
    assert folder_of(place) == folder
    assert is_url(place) == (folder is None or str(place).startswith("file:"))
    if str(place).startswith("file://host"):
        with pytest.raises(ConfigError, match="names no store"):
            open_objects(place)
    if isinstance(place, str) and folder is not None:
        with pytest.raises(ConfigError, match=r"can't be a witness: give s3://BUCKET/PREFIX, gs:// or az://"):
            bucket_scheme(str(place))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (NotFoundError("Object at location run/v1/a not found"), DamagedFile, "s3://bucket/run/v1/a: it is not there"),
        (GenericError("<Code>XMinioStorageFull</Code>"), StoreRefused, "the bucket is full: free some space"),
        (GenericError("507 Insufficient Storage"), StoreRefused, "the bucket is full"),
        (PermissionDeniedError("<Code>AccessDenied</Code>"), StoreRefused, "the store refuses these credentials"),
        (UnauthenticatedError("<Code>ExpiredToken</Code>"), StoreRefused, "the store refuses these credentials"),
        (GenericError("503 <Code>SlowDown</Code>"), StoreRefused, "the store is busy: try again later"),
        (GenericError("error sending request: dns error"), StoreRefused, "nobody answers: look at the network"),
        (GenericError("some\nother \x1b[2Jthing " + "x" * 999), StoreRefused, "the store refuses (some other "),
    ],
)
def test_each_refusal_is_one_line_with_what_helps(
    error: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    for name in ("put", "head", "delete", "list"):
        monkeypatch.setattr(f"obstore.{name}", refuse)
    objects = BucketObjects("s3://bucket/run", "s3")
    with pytest.raises(kind) as refusal:
        objects.write("v1/a", [b"x"])
    text = str(refusal.value)
    assert words in text
    assert text.startswith("can't write s3://bucket/run/v1/a: ")
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 700
    for act in (objects.sizes, lambda: objects.read("v1/a", 9), lambda: objects.remove("v1/a")):
        with pytest.raises(kind):
            act()


def test_a_fault_of_ours_is_none_of_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("obstore.delete", fail)
    with pytest.raises(ZeroDivisionError):
        BucketObjects("s3://bucket/run", "s3").remove("a")
