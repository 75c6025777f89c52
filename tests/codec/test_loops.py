"""The loops as numba compiles them: no contracted products."""

import re
from typing import Any

import numpy as np
import pytest
from numba import njit

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.kernel_cache import loops
from diloco_node.core.types import Codec

FUSED = re.compile(r"\bv?fn?m(add|sub|la|ls)\w*")
"""x86 vfmadd..., vfmsub..., vfnmadd..., vfnmsub...; ARM fmadd, fnmadd, fmsub, fmla, fmls."""


def assemblies(loop: Any) -> list[str]:
    """The machine code of each use as text. numba shows none of what it took from its cache, but has its bitcode."""
    libraries = [overload.library for overload in loop.overloads.values()]
    return [library.codegen._tm.emit_assembly(library._get_module_for_linking()) for library in libraries]


@pytest.mark.parametrize("name", ["encode", "norms", "decode", "accumulate", "outer"])
def test_no_loop_contracts_a_product_and_a_sum_into_one_rounding(name: str) -> None:
    loop = getattr(loops(), f"{name}_span")
    assert len(loop.signatures) == (2 if name == "encode" else 1), "one machine code per use"
    for text in assemblies(loop):
        assert re.search(r"\bv?mul[ps][sd]|\bfmul\b", text), "the products of the loop are in this text"
        assert FUSED.findall(text) == []


def test_the_search_for_fused_instructions_finds_them() -> None:
    @njit("void(float32[::1], float32[::1])", fastmath={"contract"})  # type: ignore[untyped-decorator]
    def contracted(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = y[i] + x[i] * x[i]

    (text,) = contracted.inspect_asm().values()
    assert FUSED.findall(text) != []


def test_buffers_of_every_kind_are_read() -> None:
    blocks = FragmentBlocks((300,), Codec.FP32)
    encoded = bytearray(np.ones(300, np.float32).tobytes())
    for buffer in (encoded, bytes(encoded), memoryview(encoded), np.frombuffer(encoded, np.uint8)):
        assert kernels.squared_norms(blocks, buffer) == [300.0]
