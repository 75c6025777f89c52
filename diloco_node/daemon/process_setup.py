"""Set-up of a daemon process, once and before anything else: garbage collector, memory of the C library, open files.

A round takes and frees tens of megabytes. By default glibc gives such blocks back to the kernel, which clears every
page again when the next round asks: a seventh of the CPU time of a transfer over TLS. So the memory stays in the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Names and numbers of malloc.h."""

HEAP_BLOCK_BYTES_MAX: Final = 64 * 2**20
"""Larger blocks go back to the kernel as before: holes of that size in the heap would be memory lost. A stripe of 16
Mparam in float32 is as large as this."""

KEPT_BYTES_MAX: Final = 256 * 2**20
"""Free memory at the end of the heap that is kept."""

GROWTH_BYTES: Final = 16 * 2**20

DESCRIPTORS_MAX: Final = 65_536
"""To which the limit of open files is raised. A daemon of 64 regions needs under a thousand; some systems allow a
billion, which some programs walk through."""

DESCRIPTORS_LOW: Final = 512
"""Below so many a warning: half of them are for incoming connections, some for each peer and each open file."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import inside of this what the process stays with: the garbage collector never looks at it. That would take a
    seventh of the imports' CPU time, and each full walk afterwards 70 ms of the event loop."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> bool:
    """Tell glibc, before other threads start; False: there is none. All threads share an arena, and what they free."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Older ones refuse more than half of one of their heaps. Any setting freezes the threshold, so it must be ours.
    if not any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in (HEAP_BLOCK_BYTES_MAX, HEAP_BLOCK_BYTES_MAX // 2)):
        return False
    settings = ((_M_TRIM_THRESHOLD, KEPT_BYTES_MAX), (_M_TOP_PAD, GROWTH_BYTES), (_M_ARENA_MAX, 1))
    return all([mallopt(name, value) == 1 for name, value in settings])  # noqa: C419 - each of them, whatever the others


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most DESCRIPTORS_MAX. Returns the limit: with the usual
    1024 a daemon may be unable to write a payload."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = max(soft, min(hard if hard != resource.RLIM_INFINITY else DESCRIPTORS_MAX, DESCRIPTORS_MAX))
    if target != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            return soft
    return target
