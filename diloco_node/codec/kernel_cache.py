"""Where compiled loops are kept: once per user of a machine, whatever folder the package lies in.

numba's own cache belongs to one folder of sources, so every virtual environment and every checkout compiles again. This
one is found by the content of the source file, so a learner's environment uses what the daemon's has compiled.
numba adds the processor, Python's version and its own; nothing is loaded on a machine that it was not compiled for.

The folder is `NUMBA_CACHE_DIR`, else `$XDG_CACHE_HOME/diloco-node`, else `~/.cache/diloco-node`. It is the user's own,
because what lies in it is run. Where it can't be written, numba's places are tried in their order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

CACHE_NAME: Final = "diloco-node"


class ContentLocator(_CacheLocator):
    """Names the folder by the source's content and numba's version, so that several versions don't evict each other."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file  # numba's warnings name it
        self._line = function.__code__.co_firstlineno
        # What is loaded names its module, so a module that was renamed has compilations of its own.
        source = function.__module__.encode() + b"\0" + Path(file).read_bytes()
        self._digest = hashlib.sha256(source).hexdigest()
        self._path = _user_folder() / f"kernels-{numba.__version__}-{self._digest[:16]}"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> ContentLocator | None:
        """The locator of a function, or None where the source can't be read or the folder can't be written."""
        try:
            found = cls(py_func, py_file)
            cast(Any, found).ensure_cache_path()
        except (OSError, RuntimeError):  # RuntimeError: this user has no home
            return None
        return found

    def get_cache_path(self) -> str:
        """The folder of the compiled loops of this source file."""
        return str(self._path)

    def get_source_stamp(self) -> str:
        """SHA-256 of the module's name and its source file."""
        return self._digest

    def get_disambiguator(self) -> str:
        """The line of the function: two of a file may have one name."""
        return str(self._line)


class _ContentFirst(CompileResultCacheImpl):
    _locator_classes = [ContentLocator, *CompileResultCacheImpl._locator_classes]  # noqa: RUF012 (numba's form)


class KernelCache(FunctionCache):
    """The cache of one compiled loop, on disk. Its `flush` forgets every compilation of that loop.

    Its file format, and that writers don't disturb readers, are numba's.
    """

    _impl_class = _ContentFirst


def _user_folder() -> Path:
    if wanted := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(wanted)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_NAME
