"""`python titan_on_cpu.py SCRIPT ARGUMENTS`: run a script of torchtitan's on a machine without an accelerator.

torchtitan 0.2 asks the accelerator's module for memory and names, and imports Triton for kernels that the small model
never calls. Both get a stand-in here. All else is torchtitan as it is.
"""

import runpy
import sys
import types
from typing import Any
from unittest import mock

import torch
import torch._utils


class CpuDevice(types.ModuleType):
    """What `torch.cuda` is for torchtitan; the rest is `torch.cpu`'s."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(_device: object = None) -> str:
        return "cpu"

    @staticmethod
    def get_device_properties(_device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=2**30)

    @staticmethod
    def memory_stats(_device: object = None) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None: ...

    @staticmethod
    def empty_cache() -> None: ...


def main() -> None:
    """See the module."""
    torch.compile(len)  # torch looks now whether Triton is there, and finds none
    device = CpuDevice("device")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _kind: device  # type: ignore[assignment, return-value]
    sys.argv = sys.argv[1:]
    names = ("triton", "triton.language")
    sys.modules.update({name: mock.MagicMock() for name in names})
    import torchtitan.train  # noqa: F401

    for name in names:
        del sys.modules[name]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
