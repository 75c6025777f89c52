"""Host memory that a device copies to by itself, in exactly the size that is asked for.

torch's own page-locked memory is rounded up to powers of two: a base of 4.9 GB would take 8.6 GB. So memory of the
usual kind is registered with the driver, tensor by tensor: that takes half a second for a gigabyte, and is for
background threads.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES = 4096

log = logging.getLogger("diloco_node.learner")


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, in pages that stay where they are; in usual ones, with a warning, if the system has no more."""
    if torch.cuda.cudart() is None:  # a device in software: only torch's own
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = np.zeros(-(-max(1, size) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, np.uint8)
    start = -pages.ctypes.data % PAGE_BYTES  # pages of its own: what is registered twice is refused
    memory = pages[start : start + size]
    try:
        _register(pages, pages.ctypes.data + start, len(pages) - PAGE_BYTES)
    except RuntimeError as error:
        log.warning("no page-locked memory for %d MB (%s): copies from the device are waited for", size >> 20, error)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def _register(pages: Any, address: int, size: int) -> None:
    """Raise RuntimeError: the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)):
        raise RuntimeError("cudaHostRegister failed")

    def let_go() -> None:
        with contextlib.suppress(RuntimeError):
            runtime.cudaHostUnregister(address)

    weakref.finalize(pages, let_go).atexit = False
