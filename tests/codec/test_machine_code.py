"""The loops' machine code: kept for each user, loaded without numba, never run when damaged or somebody else's."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from diloco_node.codec import machine_code
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.machine_code import CACHE_NAME, cache_files, keep, kept, loops
from diloco_node.core.types import Codec
from diloco_node.errors import ConfigError
from tests.kit.repository import ROOT

OBJECTS = {"norms": b"\x7fELF...", "decode": b"\x7fELF"}

DAEMON = """
import sys
import diloco_node.daemon.program
from diloco_node.codec.golden import check_golden
check_golden()
print("numba" in sys.modules)
"""


def compiles(cache: Path, root: Path = ROOT) -> bool:
    """Whether a new daemon process imports numba, with this folder for machine code and the package in `root`."""
    folders = {"NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache / "xdg")}
    environment = {**os.environ, **folders, "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", DAEMON], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout == "True\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found where this user keeps it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def test_one_compilation_serves_every_checkout_and_no_later_daemon_imports_numba(tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    assert compiles(cache)
    shutil.copytree(ROOT / "diloco_node", other / "diloco_node", ignore=shutil.ignore_patterns("__pycache__"))
    assert not compiles(cache, other)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "loops.o"
    keep(path, OBJECTS)
    assert kept(path) == OBJECTS
    assert list(path.parent.iterdir()) == [path]


def test_damaged_machine_code_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "loops.o"
    keep(path, OBJECTS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert kept(path) is None
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert kept(path) is None
    path.write_bytes(whole)
    assert kept(path) == OBJECTS


def test_machine_code_that_others_can_write_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "loops.o"
    keep(path, OBJECTS)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert kept(path) is None
    path.chmod(0o644)
    assert kept(path) == OBJECTS


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_machine_code_of_another_user_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "loops.o"
    keep(path, OBJECTS)
    os.chown(path, 12_345, -1)
    assert kept(path) is None


def test_only_a_file_of_a_sensible_size_is_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert kept(tmp_path / "pipe") is None
    assert kept(tmp_path) is None
    assert kept(tmp_path / "nothing") is None
    keep(tmp_path / "loops.o", OBJECTS)
    monkeypatch.setattr(machine_code, "FILE_BYTES_MAX", 20)
    assert kept(tmp_path / "loops.o") is None


def test_the_folder_is_the_wanted_one_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    of_home, of_xdg = tmp_path / "home" / ".cache" / CACHE_NAME, tmp_path / "xdg" / CACHE_NAME
    for name, value, folders in (
        ("", "", [of_home]),
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), [of_xdg]),
        ("NUMBA_CACHE_DIR", str(tmp_path / "numba"), [tmp_path / "numba", of_xdg]),
    ):
        if name:
            monkeypatch.setenv(name, value)
        assert [path.parent for path in cache_files()] == folders


@pytest.mark.parametrize("what", ["source", "numba", "llvmlite", "features"])
def test_other_loops_versions_or_processors_have_machine_code_of_their_own(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache_files()
    if what == "source":
        (tmp_path / "loops.py").write_text(machine_code.SOURCE.read_text() + "\n")
        monkeypatch.setattr(machine_code, "SOURCE", tmp_path / "loops.py")
    elif what == "features":
        features = machine_code.llvm.get_host_cpu_features()
        features["avx2"] = not features.get("avx2", False)
        monkeypatch.setattr(machine_code.llvm, "get_host_cpu_features", lambda: features)
    else:
        version = machine_code.version
        monkeypatch.setattr(machine_code, "version", lambda name: version(name) + "x" * (name == what))
    assert cache_files()[0] != before[0]


def test_where_nothing_can_be_kept_a_process_compiles_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(machine_code, "compiled", lambda: OBJECTS)
    assert machine_code.objects() == OBJECTS


def test_a_folder_that_takes_nothing_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container with a read-only root, whose image was built on another processor.
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    whole = dict.fromkeys(machine_code.USES, b"\x7fELF")
    monkeypatch.setattr(machine_code, "compiled", lambda: whole)
    assert machine_code.objects() == whole
    assert kept(cache_files()[1]) == whole
    monkeypatch.delattr(machine_code, "compiled")
    assert machine_code.objects() == whole


def test_what_was_damaged_is_made_again(folders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache_files()[0]
    path.touch()  # what a power cut leaves
    monkeypatch.setattr(machine_code, "compiled", lambda: OBJECTS)
    assert machine_code.objects() == OBJECTS
    assert kept(path) == OBJECTS


def test_what_lacks_a_loop_is_made_again(folders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(cache_files()[0], OBJECTS)
    whole = dict.fromkeys(machine_code.USES, b"\x7fELF")
    monkeypatch.setattr(machine_code, "compiled", lambda: whole)
    assert machine_code.objects() == whole


def test_a_disk_that_can_t_be_read_is_as_if_nothing_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "loops.o", OBJECTS)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(machine_code.os, "read", fail)
    assert kept(tmp_path / "loops.o") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="reads as another user")
def test_what_root_has_compiled_is_for_all(tmp_path: Path) -> None:
    keep(tmp_path / "loops.o", OBJECTS)
    assert (tmp_path / "loops.o").stat().st_mode & 0o777 == 0o644


def test_a_system_that_runs_no_new_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("cannot allocate executable memory")

    monkeypatch.setattr(machine_code.llvm, "check_jit_execution", refuse)
    with pytest.raises(ConfigError, match="MemoryDenyWriteExecute"):
        machine_code._linked({})


def test_numba_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT"):
        machine_code.compiled()


def test_a_numba_that_calls_its_loops_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "USES", {"norms": machine_code.USES["norms"]})
    words = machine_code.llvm_words
    monkeypatch.setattr(machine_code, "llvm_words", lambda argument: [*words(argument), "i64"])
    with pytest.raises(ConfigError, match=r"constraints\.txt"):
        machine_code.compiled()


def norms_arguments() -> list[np.ndarray]:
    blocks = FragmentBlocks((300,), Codec.FP32)
    span = np.array([0, 0, blocks.block_count, 0, 0], np.int64)
    encoded, norms = np.zeros(blocks.encoded_bytes, np.uint8), np.zeros(1)
    return [blocks.layout, span, encoded, norms, np.empty(512, np.uint8), np.empty(256, np.float32), np.empty(32)]


def test_a_loop_takes_nothing_that_its_machine_code_was_not_made_for() -> None:
    norms, outer = loops()["norms"], loops()["outer"]
    right = norms_arguments()
    assert norms(*right) == -1
    read_only, misplaced = np.zeros(1), np.zeros(300 * 4 + 1, np.uint8)
    read_only.flags.writeable = False
    for at, wrong in (
        (2, right[2].view(np.float32)),  # of another type
        (2, np.zeros(2 * right[2].size, np.uint8)[::2]),  # with holes
        (3, read_only),
        (5, misplaced[1 : 1 + 256 * 4].view(np.float32)),  # not aligned
        (0, right[0].reshape(-1)),  # of other dimensions
        (2, None),
        (2, [0]),
    ):
        given = [*right]
        given[at] = wrong  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="norms takes"):
            norms(*given)
    with pytest.raises(ValueError, match="zip"):
        norms(*right[:-1])
    with pytest.raises(TypeError, match="outer takes"):
        outer(
            *right[:3], np.ones(1, np.float32), 1.0, np.float32(0), *[np.zeros(300, np.float32)] * 2, None, *right[4:]
        )
