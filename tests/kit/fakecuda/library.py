"""Builds fakecuda.cpp, once for each version of torch and of the source, and loads it before torch is imported."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("fakecuda.cpp")
FLAGS: Final = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")
BUILD_S: Final = 900.0


class NoFakeDevice(Exception):
    """This machine can't have one; the text says why."""


def load() -> ctypes.CDLL:
    """Load the library into this process, which then has CUDA devices.

    Raises:
        NoFakeDevice: there is no compiler, or torch has real CUDA.
    """
    assert "torch" not in sys.modules, "load the fake device first: torch asks once whether there is one"
    libraries = _torch_folder() / "lib"
    if (libraries / "libtorch_cuda.so").exists():
        raise NoFakeDevice("this torch is built for real CUDA devices")
    path = build()
    # What torch's libraries need, for all: as torch itself does first. The others by their place in this environment:
    # the environment that compiled the library may be gone.
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def build() -> Path:
    """Return the library of this torch and this source; compile it, some 20 CPU seconds, where no run before has.

    Raises:
        NoFakeDevice: there is no compiler.
    """
    version = importlib.metadata.version("torch")
    text = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    path = _cache_folder() / f"fakecuda-{version}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if path.exists():
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoFakeDevice("g++ is missing: apt-get install g++")
    torch = _torch_folder()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Workers may build at the same time; each renames its own, and any of them will do.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    include = torch / "include"
    includes = (f"-I{include}", f"-I{include / 'torch/csrc/api/include'}")
    libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10")
    command = (compiler, *FLAGS, *includes, str(SOURCE), "-o", str(partial), *libraries)
    try:
        subprocess.run(command, check=True, timeout=BUILD_S)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco-node"
