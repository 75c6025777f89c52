"""The folder of a region, on a disk that is not waited for where a file asks for that."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import FRAGMENTS


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are opened: with the calls to fsync counted where it matters, not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def store(folder: Path) -> Iterator[RegionStore]:
    opened = RegionStore(folder)
    opened.load(FRAGMENTS)
    yield opened
    opened.close()
