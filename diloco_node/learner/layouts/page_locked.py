"""Memory of the host from which a device copies by itself."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES: Final = 4096

log = logging.getLogger("diloco_node.learner")


def page_locked(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU, in pages that a device copies from and to without the host; in others if it must.

    Half a second for a gigabyte. torch would round the size up to a power of two: 4.9 GB to 8.6 GB.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        runtime: Any = torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        if runtime is None:  # a device of another maker, or in software
            return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
        pages = np.zeros(-(-max(1, size) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, np.uint8)
        start = -pages.ctypes.data % PAGE_BYTES  # whole pages of its own: none may be registered twice
        _register(runtime, pages, pages.ctypes.data + start, len(pages) - PAGE_BYTES)
        return torch.from_numpy(pages[start : start + size]).view(dtype).view(shape)
    except RuntimeError as error:
        text = "no page-locked memory of %d MB (%s): copies from and to the device take longer. Raise `ulimit -l`"
        log.warning(text, size >> 20, error)
        return torch.zeros(shape, dtype=dtype, device="cpu")


def _register(runtime: Any, pages: Any, address: int, size: int) -> None:
    """Tell the driver of memory, until the array is gone. Raises RuntimeError: it refuses."""
    if int(runtime.cudaHostRegister(address, size, 0)):
        raise RuntimeError("cudaHostRegister refused it")

    def let_go() -> None:
        with contextlib.suppress(RuntimeError):
            runtime.cudaHostUnregister(address)

    weakref.finalize(pages, let_go).atexit = False
