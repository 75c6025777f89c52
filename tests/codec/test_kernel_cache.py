"""One compilation serves every checkout and virtual environment of a user, as long as the source is the same."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diloco_node.codec.kernel_cache import CACHE_NAME, ContentLocator
from tests.kit.repository import ROOT

SOURCE = "def loop(x):\n    return x\n"

MEASURE = """
import numpy as np
from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec
blocks = FragmentBlocks((300,), Codec.FP32)
kernels.repair_cache_for(lambda: kernels.squared_norms(blocks, np.ones(300, np.float32).view(np.uint8)))
print(kernels.loops.norms_span.stats.cache_hits.total())
"""


def cache_hits(cache: Path, root: Path = ROOT) -> int:
    """How many loops a new process took from this cache, with the package that lies in `root`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one loop in it."""
    cache = tmp_path_factory.mktemp("cache")
    assert cache_hits(cache) == 0
    return cache


def test_another_checkout_loads_what_this_one_has_compiled(compiled: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "diloco_node", tmp_path / "diloco_node", ignore=shutil.ignore_patterns("__pycache__"))
    assert cache_hits(compiled, tmp_path) == 1


def test_a_damaged_cache_is_thrown_away_and_made_again(compiled: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(compiled, cache)
    (index,) = cache.rglob("*.nbi")
    index.write_bytes(b"")  # what a power cut leaves
    assert cache_hits(cache) == 0
    assert cache_hits(cache) == 1


def module_of(folder: Path, source: str, name: str = "loops_of_a_test") -> ModuleType:
    folder.mkdir(exist_ok=True)
    (folder / "loops.py").write_text(source)
    spec = importlib.util.spec_from_file_location(name, folder / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def located(module: ModuleType) -> ContentLocator | None:
    return ContentLocator.from_function(module.loop, str(module.__file__))


def test_the_folder_is_named_by_module_and_content_and_not_by_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    first, same, other, renamed = (
        located(module_of(tmp_path / place, source, name))
        for place, source, name in (
            ("here", SOURCE, "one"),
            ("there", SOURCE, "one"),
            ("here", SOURCE + "\n", "one"),
            ("here", SOURCE, "two"),
        )
    )
    assert first is not None
    assert same is not None
    assert (same.get_cache_path(), same.get_source_stamp()) == (first.get_cache_path(), first.get_source_stamp())
    for changed in (other, renamed):
        assert changed is not None
        assert changed.get_cache_path() != first.get_cache_path()
        assert changed.get_source_stamp() != first.get_source_stamp()


def test_the_folder_is_the_wanted_one_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(tmp_path / "here", SOURCE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, parent in (
        ("", "", tmp_path / "home" / ".cache" / CACHE_NAME),
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), tmp_path / "xdg" / CACHE_NAME),
        ("NUMBA_CACHE_DIR", str(tmp_path / "numba"), tmp_path / "numba"),
    ):
        if name:
            monkeypatch.setenv(name, value)
        locator = located(module)
        assert locator is not None
        assert Path(locator.get_cache_path()).parent == parent
        assert Path(locator.get_cache_path()).is_dir()


def test_a_folder_that_cannot_be_written_leaves_it_to_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert located(module_of(tmp_path / "here", SOURCE)) is None
