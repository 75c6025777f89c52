"""CUDA graphs that the loop captures: nothing of ours may be a part of one, and no thread of ours may break it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any, Final

import torch

from diloco_node.errors import LearnerError

CAPTURE_MODE_RELAXED: Final = 2

_WITH_GRAPHS: Final[list[Any]] = [
    module for module in (torch.cuda, torch.xpu) if hasattr(module, "is_current_stream_capturing")
]


def check_not_capturing(advice: str) -> None:
    """Raise LearnerError, with the advice, while a CUDA graph is captured: what is ordered would be a part of it."""
    if is_capturing():
        raise LearnerError(f"a step boundary inside of a CUDA graph's capture: {advice}")


def is_capturing() -> bool:
    """Whether a graph is being recorded: nothing may be read then, and the hooks of a replay are not called."""
    return any(module.is_initialized() and module.is_current_stream_capturing() for module in _WITH_GRAPHS)


def relax_capture() -> None:
    """Let this thread wait for events while another one captures a CUDA graph, which CUDA forbids by default."""
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    # On ROCm, and where torch lies elsewhere, it stays forbidden.
    with contextlib.suppress(OSError, AttributeError):
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        ctypes.CDLL(str(library)).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
