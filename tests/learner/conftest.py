"""What most tests of the learner use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node.learner.region_shards import HERE
from tests.kit.learner_kit import region_folder
from tests.kit.shard_ranks import Groups


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A region's folder with its memory store; the environment points to it."""
    yield from region_folder(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def _own_shards() -> Iterator[None]:
    """What a learner that was not closed left behind is no other test's."""
    yield
    HERE.clear()


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """For the tests of one file."""
    groups_ = Groups()
    yield groups_
    groups_.end()
