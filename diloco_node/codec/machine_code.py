"""The loops of `loops.py` as machine code: numba compiles them once per user of a machine, LLVM alone loads them.

A process that imports numba spends 0.36 s of processor time and 70 MB before its first loop runs, in each daemon and in
each learner. Loading what numba made takes a tenth of that. So numba is imported only where nothing is kept yet.

What is kept lies in `NUMBA_CACHE_DIR`, or in `$XDG_CACHE_HOME/diloco-node` or `~/.cache/diloco-node`: one file, named
by what it was made from (the source, numba, LLVM, the processor). So a learner's environment uses what the daemon's has
compiled. It is found in any of these folders, and written to the first that takes it: that of an image may be read-only
and for another processor. It is run, so it must belong to this user or to root, and nobody else may write it. What is
damaged is made again. Where nothing can be written, each process compiles for itself.

A loop is called as numba's own code calls it: `status = loop(result*, exception**, arguments...)`. An array is two
pointers (of numba's runtime, here null), its values, bytes of one, address, shape and strides. Each start of a daemon
checks the golden vectors (`golden.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
import msgpack
import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError

CACHE_NAME: Final = "diloco-node"
SOURCE: Final = Path(__file__).with_name("loops.py")
FILE_BYTES_MAX: Final = 16 * 2**20
"""Ours has 160 kB."""

_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Vector:
    """A C-contiguous array that a loop takes."""

    dtype: np.dtype[Any]
    is_writable: bool = False
    dimensions: int = 1


Argument = Vector | type[np.float32] | None
"""None: a loop is compiled without what it would do with the array."""

_U8, _I64, _F32, _F64 = (np.dtype(one) for one in (np.uint8, np.int64, np.float32, np.float64))
_BYTES, _VALUES, _SUMS = Vector(_U8), Vector(_F32), Vector(_F64, is_writable=True)
_BYTES_OUT, _VALUES_OUT = Vector(_U8, is_writable=True), Vector(_F32, is_writable=True)
_PLACE: Final = (Vector(_I64, dimensions=2), Vector(_I64, is_writable=True))
_SCRATCH: Final = (_BYTES_OUT, _VALUES_OUT, _SUMS)

USES: Final[Mapping[str, tuple[str, tuple[Argument, ...]]]] = {
    "encode": ("encode_span", (*_PLACE, _VALUES, None, _BYTES_OUT, _SUMS, _VALUES_OUT, *_SCRATCH)),
    "encode_delta": ("encode_span", (*_PLACE, _VALUES, _VALUES, _BYTES_OUT, _SUMS, _VALUES_OUT, *_SCRATCH)),
    "norms": ("norms_span", (*_PLACE, _BYTES, _SUMS, *_SCRATCH)),
    "decode": ("decode_span", (*_PLACE, _BYTES, _VALUES_OUT, _SUMS, *_SCRATCH)),
    "accumulate": ("accumulate_span", (*_PLACE, _BYTES, _VALUES, _VALUES_OUT, _SUMS, *_SCRATCH)),
    "outer": (
        "outer_span",
        (*_PLACE, _BYTES, _VALUES, np.float32, np.float32, _VALUES_OUT, _VALUES_OUT, None, *_SCRATCH),
    ),
    "outer_copy": (
        "outer_span",
        (*_PLACE, _BYTES, _VALUES, np.float32, np.float32, _VALUES_OUT, _VALUES_OUT, _VALUES_OUT, *_SCRATCH),
    ),
}
"""Per use of a loop its name in `loops.py`, and what it takes."""

_READABLE: Final = 0x101
_WRITABLE: Final = 0x501
"""numpy's flags: C_CONTIGUOUS, ALIGNED and WRITEABLE."""


class Loop:
    """One use of a loop. Calls release the GIL.

    Args:
        address: of its machine code. arguments: what it takes.
    """

    def __init__(self, name: str, address: int, arguments: tuple[Argument, ...]) -> None:
        self._name, self._arguments = name, arguments
        pointer, word = ctypes.c_void_p, ctypes.c_ssize_t
        kinds: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Vector):
                kinds += [pointer, pointer, word, word, pointer, *[word] * (2 * argument.dimensions)]
            else:
                kinds.append(pointer if argument is None else ctypes.c_float)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, *kinds)(address)

    def __call__(self, *given: NDArray[Any] | np.float32 | None) -> int:
        """Run it over these arrays.

        Returns:
            What the loop returns; 0 if it returns nothing.

        Raises:
            TypeError: an argument is not what the machine code was made for, which would write anywhere.
        """
        words: list[float | None] = []
        for argument, one in zip(self._arguments, given, strict=True):
            if isinstance(argument, Vector) and isinstance(one, np.ndarray):
                words += _words(self._name, argument, one)
            elif argument is np.float32 and isinstance(one, np.float32):
                words.append(float(one))
            elif argument is None and one is None:
                words.append(None)
            else:
                raise TypeError(f"{self._name} takes {argument}, not {type(one).__name__}")
        result, exception = ctypes.c_int64(0), ctypes.c_void_p()
        status = self._call(ctypes.addressof(result), ctypes.addressof(exception), *words)
        if status:
            raise RuntimeError(f"{self._name} ended with status {status}: the loop raised, which it never should")
        return result.value


def _words(name: str, argument: Vector, array: NDArray[Any]) -> list[float | None]:
    needs = _WRITABLE if argument.is_writable else _READABLE
    if array.dtype != argument.dtype or array.ndim != argument.dimensions or array.flags.num & needs != needs:
        raise TypeError(f"{name} takes {argument}, not {array.dtype} of shape {array.shape}: {array.flags}")
    return [None, None, array.size, array.itemsize, array.ctypes.data, *array.shape, *array.strides]


_lock: Final = threading.Lock()
_loops: dict[str, Loop] = {}
_engines: list[Any] = []
"""What LLVM frees when it goes: the machine code."""


def loops() -> Mapping[str, Loop]:
    """Every use of a loop by its name in USES; found, or else compiled, at the first call of a process.

    Raises:
        ConfigError: this system runs no code that was made at run time, or numba can't make it.
    """
    with _lock:
        if not _loops:
            _loops.update(_linked(objects()))
        return _loops


def _linked(objects: Mapping[str, bytes]) -> dict[str, Loop]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    try:
        llvm.check_jit_execution()  # else LLVM would go on, and the first loop end the process
    except OSError as error:
        raise ConfigError(
            f"{error}; allow it in SELinux (execmem), or in systemd (MemoryDenyWriteExecute=no)"
        ) from None
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    for content in objects.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _engines.append(engine)
    return {name: Loop(name, engine.get_function_address(name), USES[name][1]) for name in USES}


def target_machine() -> Any:
    """This machine's processor, as LLVM is told to write for it."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


def objects() -> dict[str, bytes]:
    """An object file for each use, as kept, or compiled and kept."""
    paths = cache_files()
    for path in paths:
        found = kept(path)
        if found is not None and found.keys() == USES.keys():
            return found
    made = compiled()
    for path in paths:
        with suppress(OSError):
            keep(path, made)
            break
    return made


def cache_files() -> list[Path]:
    """Where machine code may lie for this source and this machine; none: this user has no home."""
    parts = (
        SOURCE.read_bytes(),
        Path(__file__).read_bytes(),
        repr(USES).encode(),
        version("numba").encode(),
        version("llvmlite").encode(),
        llvm.get_process_triple().encode(),
        llvm.get_host_cpu_name().encode(),
        llvm.get_host_cpu_features().flatten().encode(),
    )
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return [folder / f"loops-{key[:32]}.o" for folder in _folders()]


def _folders() -> Iterator[Path]:
    if wanted := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(wanted)
    with suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_NAME


def kept(path: Path) -> dict[str, bytes] | None:
    """What lies there; None: nothing, or nothing that may be run."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        is_others = info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(info.st_mode) or is_others or info.st_size > FILE_BYTES_MAX:
            return None
        raw = os.read(descriptor, info.st_size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    digest, document = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    if hashlib.sha256(document).digest() != digest:
        return None
    found: dict[str, bytes] = msgpack.unpackb(document)
    return found


def keep(path: Path, objects: Mapping[str, bytes]) -> None:
    """Whole or not at all; a power cut may leave a file that its digest does not fit."""
    document = msgpack.packb(dict(objects))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".loops-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(document).digest() + document)
            os.fchmod(file.fileno(), 0o644)  # what root has compiled is for all
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink()
        raise


def compiled() -> dict[str, bytes]:
    """An object file for each use, by numba: 7 s of processor time."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = target_machine()
    return {name: machine.emit_object(module) for name, module in modules()}


def modules() -> Iterator[tuple[str, Any]]:
    """Each use with its LLVM module, whose only visible function has the name of the use.

    Raises:
        ConfigError: numba is off, or has made something else than what `Loop` calls.
    """
    import numba

    if getattr(numba.config, "DISABLE_JIT"):  # noqa: B009 (numba has it, its types do not)
        raise ConfigError("NUMBA_DISABLE_JIT is set, and the codec's loops are to be compiled: unset it")

    from diloco_node.codec import loops as source

    for name, (loop_name, arguments) in USES.items():
        options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        loop: Any = source.compiler(**options)(getattr(source, loop_name))
        loop.compile(tuple(_numba_type(argument, numba) for argument in arguments))
        (text,) = loop.inspect_llvm().values()
        module = llvm.parse_assembly(text)
        defined = [one for one in module.functions if not one.is_declaration and one.linkage == llvm.Linkage.external]
        (function,) = defined
        found = [str(one.type) for one in function.arguments]
        wanted = ["ptr", "ptr", *(word for argument in arguments for word in llvm_words(argument))]
        outside = [one.name for one in module.functions if one.is_declaration and not one.name.startswith("llvm.")]
        if found != wanted or outside:
            raise ConfigError(
                f"numba {version('numba')} calls {loop_name} with {found}, not {wanted}, or needs {outside}: take the "
                "version of constraints.txt"
            )
        function.name = name
        yield name, module


def _numba_type(argument: Argument, numba: Any) -> Any:
    if isinstance(argument, Vector):
        item = numba.from_dtype(argument.dtype)
        return numba.types.Array(item, argument.dimensions, "C", readonly=not argument.is_writable)
    return numba.types.none if argument is None else numba.types.float32


def llvm_words(argument: Argument) -> list[str]:
    """The types of LLVM in which one argument is handed over."""
    if isinstance(argument, Vector):
        return ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * argument.dimensions)]
    return ["ptr" if argument is None else "float"]
