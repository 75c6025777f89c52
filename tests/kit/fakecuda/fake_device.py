"""The fake devices as tests see them: what was waited for, what raced, what was allocated, and when tasks run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.kit.fakecuda import library

LATE: Final = 0
AT_ONCE: Final = 1
RANDOM: Final = 2

SCHEDULES: Final = {
    "late": (LATE, LATE),
    "side starved": (AT_ONCE, LATE),
    "main starved": (LATE, AT_ONCE),
    "random": (RANDOM, RANDOM),
}
"""When tasks run, of default streams and of all others: as late as possible, at once, or at random by a seed."""

COUNTERS: Final = (
    "launches",
    "bytes_up",
    "bytes_down",
    "bytes_across",
    "device_bytes",
    "device_peak",
    "pinned_bytes",
    "pinned_allocations",
)

_library: ctypes.CDLL | None = None


def install() -> None:
    """Load the devices and import torch, whose `torch.cuda` then speaks of them.

    Raises:
        NoFakeDevice: this machine can't have them.
    """
    global _library
    _library = library.load()
    for name in ("waits", "hazards", "operators"):
        getattr(_library, f"fakecuda_{name}").restype = ctypes.c_char_p
    _library.fakecuda_count.restype = ctypes.c_uint64
    _library.fakecuda_schedule.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    _patch_torch()


def is_installed() -> bool:
    """Whether this process has them."""
    return _library is not None


def waits(*, thread: int | None = None) -> list[str]:
    """Reasons for which the host waited since `reset`; of one thread (`threading.get_ident`) or of all."""
    rows = [line.split(" ", 1) for line in _lines("waits")]
    return [reason for ident, reason in rows if thread is None or int(ident) == thread]


def own_waits() -> list[str]:
    """Those of this thread."""
    return waits(thread=threading.get_ident())


def hazards() -> list[str]:
    """Races, and memory that was freed while it was in use, since `reset`."""
    return _lines("hazards")


def operators() -> dict[str, int]:
    """How often each operator was launched since `reset`."""
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in _lines("operators"))}


def counts() -> dict[str, int]:
    """Totals since `reset`, by the names of `COUNTERS`; device and pinned bytes are those of now."""
    return {name: _loaded().fakecuda_count(index) for index, name in enumerate(COUNTERS)}


def reset() -> None:
    """Begin to count anew."""
    _loaded().fakecuda_reset()


def schedule(name: str, *, seed: int = 1) -> None:
    """Choose when tasks run: a name of `SCHEDULES`."""
    main, side = SCHEDULES[name]
    _loaded().fakecuda_schedule(main, side, seed)


@contextmanager
def no_waits() -> Iterator[None]:
    """This thread must not wait for a device: a RuntimeError where it does."""
    _loaded().fakecuda_forbid_waits(1)
    try:
        yield
    finally:
        _loaded().fakecuda_forbid_waits(0)


@contextmanager
def waits_allowed() -> Iterator[None]:
    """This thread may wait within it, for what the test itself does inside `no_waits`."""
    _loaded().fakecuda_forbid_waits(0)
    try:
        yield
    finally:
        _loaded().fakecuda_forbid_waits(1)


def _loaded() -> ctypes.CDLL:
    assert _library is not None, "no fake device in this process: run `make test-device`"
    return _library


def _lines(name: str) -> list[str]:
    text: bytes = getattr(_loaded(), f"fakecuda_{name}")()
    return text.decode().splitlines()


def _patch_torch() -> None:
    """What is compiled into torch's CUDA builds alone, by the device-agnostic parts of this one."""
    import torch

    def index_of(device: Any) -> int:
        index = torch.device(device).index if device is not None and not isinstance(device, int) else device
        return torch.accelerator.current_device_index() if index is None else index

    class Event(torch.Event):
        def __new__(cls, *_: Any, **__: Any) -> Event:
            return super().__new__(cls, device="cuda")

        def record(self, stream: torch.Stream | None = None) -> None:
            super().record(stream or torch.accelerator.current_stream())

        def wait(self, stream: torch.Stream | None = None) -> None:
            super().wait(stream or torch.accelerator.current_stream())

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
            return super().__new__(cls, device=f"cuda:{index_of(device)}", priority=priority)

    @contextmanager
    def stream(entered: torch.Stream | None) -> Iterator[None]:
        if entered is None:
            yield
            return
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(entered.device)
        torch.accelerator.set_stream(entered)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)

    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: torch.UntypedStorage, size: int) -> None:
        if storage.device.type == "cuda":
            _loaded().fakecuda_resize(ctypes.c_void_p(storage._cdata), ctypes.c_size_t(size))
        else:
            resize(storage, size)

    seed = torch.manual_seed

    def seed_after_draws(number: int) -> torch.Generator:
        for device in range(_loaded().fakecuda_devices()):
            torch.accelerator.synchronize(device)  # tasks draw when they run, a real device when they are ordered
        return seed(number)

    torch.set_num_threads(1)  # sums in a kernel of the CPU go by its threads: a device's bits are the same everywhere
    torch.manual_seed = seed_after_draws
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[assignment,method-assign]
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: _loaded().fakecuda_devices()
    cuda.current_device = torch.accelerator.current_device_index
    cuda.set_device = lambda device=None: torch.accelerator.set_device_index(index_of(device))
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    cuda.is_current_stream_capturing = lambda: False
    cuda.Event, cuda.Stream, cuda.stream = Event, Stream, stream
