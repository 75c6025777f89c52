"""Loads the loops of `loops.py`: numba compiles them once, and keeps the machine code in a folder of this user.

The folder is `NUMBA_CACHE_DIR`, else `$XDG_CACHE_HOME/diloco-node`, else `~/.cache/diloco-node`: the first that takes
files, for that of an image may be read-only. numba runs what lies there, so the folder must belong to this user or
root, and not be open to all. numba names the files after the source's folder and content, its own version and the
processor. A power cut may leave half a file: such a cache is thrown away and made again.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from diloco_node.errors import ConfigError

CACHE_NAME: Final = "diloco-node"

DAMAGE: Final = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError)
"""Errors that unpickling half a file can raise."""

log = logging.getLogger("diloco_node.codec")
_lock: Final = threading.Lock()


@cache
def loops() -> ModuleType:
    """Load the module `loops`: from the cache in a second, or compiled in some eight. Raises ConfigError."""
    with _lock, _numba_cache(folder := cache_folder()):
        try:
            return importlib.import_module("diloco_node.codec.loops")
        except DAMAGE:
            if folder is None:
                raise
            for file in folder.rglob("loops.*.nb[ci]"):
                file.unlink(missing_ok=True)
            return importlib.import_module("diloco_node.codec.loops")


def cache_folder() -> Path | None:
    """Return the first folder that takes files; None, with a warning, if there is none."""
    refusals, folders = [], []
    if place := os.environ.get("NUMBA_CACHE_DIR"):
        folders.append(Path(place))
    with suppress(RuntimeError):  # no home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_NAME)
    for folder in folders:
        if not (refusal := _refusal(folder)):
            return folder
        refusals.append(refusal)
    log.warning(
        "compiling kernels, some 15 s at each start: set NUMBA_CACHE_DIR to a folder that only this user can write; "
        "none keeps them (%s)",
        "; ".join(refusals) or "this user has no home",
    )
    return None


@contextmanager
def _announcing(folder: Path | None) -> Iterator[None]:
    """Say so before the first compilation: one that takes a minute without a word looks like a hang."""
    from numba.core.event import Event, Listener, install_listener

    class Teller(Listener):
        is_told = folder is None  # then `cache_folder` has said it

        def on_start(self, event: Event) -> None:
            if not self.is_told:
                log.warning("compiling kernels, some 15 s of processor time, once: they are kept in %s", folder)
            self.is_told = True

        def on_end(self, event: Event) -> None:
            """Part of numba's interface."""

    with install_listener("numba:compile", Teller()):
        yield


def _refusal(folder: Path) -> str:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o002:
            return f"{folder} is open to all users, or another user's"
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


@contextmanager
def _numba_cache(folder: Path | None) -> Iterator[None]:
    """Have numba keep there what is compiled inside; the training script's own functions stay where they were."""
    try:
        from numba import config as numba_config
    except OSError as error:
        raise ConfigError(
            f"{error}; allow it in SELinux (execmem), or in systemd (MemoryDenyWriteExecute=no)"
        ) from None
    config: Any = numba_config  # its attributes are made as it is imported
    if config.DISABLE_JIT:
        raise ConfigError("NUMBA_DISABLE_JIT is set, and the codec's loops are to be compiled: unset it")
    before, config.CACHE_DIR = config.CACHE_DIR, "" if folder is None else str(folder)
    try:
        with _announcing(folder):
            yield
    finally:
        config.CACHE_DIR = before
