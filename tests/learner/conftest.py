"""What most tests of the learner use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.learner_kit import region_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A region's folder with its memory store; the environment points to it."""
    yield from region_folder(tmp_path, monkeypatch)
