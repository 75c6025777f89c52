"""The cache of compiled loops: compiled once, kept in the first folder that takes files, made again if damaged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

from diloco_node.codec import kernel_cache
from diloco_node.codec.kernel_cache import CACHE_NAME, cache_folder, loops
from diloco_node.errors import ConfigError
from tests.kit.repository import ROOT

MEASURE = """
import json, numba
from diloco_node.codec.golden import check_golden
from diloco_node.codec.kernel_cache import loops
check_golden()
spans = [getattr(loops(), f"{name}_span") for name in ("encode", "norms", "decode", "accumulate", "outer")]
print(json.dumps([sum(sum(span.stats.cache_hits.values()) for span in spans), numba.config.CACHE_DIR]))
"""
ALL_LOOPS = 6
"""Two uses of `encode_span`, one of each other."""


def cache_hits(folder: Path) -> int:
    """How many loops a new process finds there."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    hits, left = json.loads(run.stdout)
    assert left == str(folder)
    return int(hits)


def test_one_compilation_serves_every_later_process(tmp_path: Path) -> None:
    assert loops()
    folder = cache_folder()
    assert folder is not None, "these tests need a home, or NUMBA_CACHE_DIR"
    shutil.copytree(folder, tmp_path / "cache")
    assert cache_hits(tmp_path / "cache") == ALL_LOOPS


DOUBLED = """
from numba import njit
@njit("float64(float64)", cache=True)
def doubled(x):
    return x + x
@njit("float64(float64)", cache=True)
def halved(x):
    return x / 2
"""


def test_what_a_power_cut_leaves_is_thrown_away_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With loops that are small: ours take half a minute to compile."""
    (tmp_path / "loops.py").write_text(DOUBLED)
    folder = tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    load = kernel_cache.importlib.import_module
    monkeypatch.setattr(kernel_cache.importlib, "import_module", lambda name: load(name.rpartition(".")[2]))

    def hits() -> list[int]:
        monkeypatch.delitem(sys.modules, "loops", raising=False)
        loops.cache_clear()
        return [sum(loop.stats.cache_hits.values()) for loop in (loops().doubled, loops().halved)]

    try:
        assert hits() == [0, 0]
        (record,) = caplog.records
        assert record.getMessage().startswith("compiling kernels, some 15 s of processor time, once")
        assert str(folder) in record.getMessage()
        assert hits() == [1, 1]
        assert len(caplog.records) == 1, "what is kept is not compiled, and nothing is said"
        for pattern, size in (("*doubled*.nbi", 0), ("*halved*.nbc", 1000)):
            file, *_ = folder.rglob(pattern)
            assert file.stat().st_size > size
            file.write_bytes(file.read_bytes()[:size])
            assert hits() == [0, 0]
            assert hits() == [1, 1]
    finally:
        monkeypatch.delitem(sys.modules, "loops", raising=False)
        loops.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def test_the_folder_is_the_wanted_one_or_the_users_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value, folder in (
        ("", "", home / ".cache" / CACHE_NAME),
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), tmp_path / "xdg" / CACHE_NAME),
        ("NUMBA_CACHE_DIR", str(tmp_path / "numba"), tmp_path / "numba"),
    ):
        if name:
            monkeypatch.setenv(name, value)
        assert cache_folder() == folder
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_takes_nothing_is_followed_by_the_next(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container with a read-only root, whose image has a folder of its own.
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache_folder() == home / ".cache" / CACHE_NAME


@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_a_folder_that_is_open_to_all_is_not_used(
    mode: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache_folder() == home / ".cache" / CACHE_NAME


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_not_used(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", 12_345, -1)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "theirs"))
    assert cache_folder() == home / ".cache" / CACHE_NAME


def test_where_nothing_can_be_kept_the_log_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    assert cache_folder() is None
    (record,) = caplog.records
    assert "Not a directory" in record.getMessage()
    assert "set NUMBA_CACHE_DIR" in record.getMessage()


def test_other_compilations_of_the_process_stay_where_they_were() -> None:
    before = numba.config.CACHE_DIR
    loops.cache_clear()
    assert loops().norms_span.signatures
    assert before == numba.config.CACHE_DIR


def test_a_system_that_runs_no_new_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise OSError("cannot allocate executable memory")

    monkeypatch.setitem(sys.modules, "numba", Refused("numba"))
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: None)
    loops.cache_clear()
    with pytest.raises(ConfigError, match="MemoryDenyWriteExecute"):
        loops()


def test_numba_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    loops.cache_clear()
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT"):
        loops()
