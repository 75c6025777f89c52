"""The machine code: no contracted products, one compilation per use, and a damaged cache is made again."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import njit

from diloco_node.codec import kernels, loops
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec

FUSED = re.compile(r"\bv?fn?m(add|sub|la|ls)\w*")
"""x86 vfmadd..., vfmsub..., vfnmadd..., vfnmsub...; ARM fmadd, fnmadd, fmsub, fmla, fmls."""


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    kernels.warm_up()


@pytest.mark.parametrize("loop", loops.ALL, ids=lambda loop: loop.__name__)
def test_no_loop_contracts_a_product_and_a_sum_into_one_rounding(loop: Any) -> None:
    # numba keeps no assembly of what it took from its cache, so the loop is compiled again here
    signatures = loop.signatures
    assert len(signatures) == (2 if loop in (loops.encode_span, loops.outer_span) else 1), "one machine code per use"
    for signature in signatures:
        fresh = njit(signature, nogil=True, _nrt=False)(loop.py_func)
        (text,) = fresh.inspect_asm().values()
        assert re.search(r"\bv?mul[ps][sd]|\bfmul\b", text), "the products of the loop are in this text"
        assert FUSED.findall(text) == []


def test_the_search_for_fused_instructions_finds_them() -> None:
    @njit("void(float32[::1], float32[::1])", fastmath={"contract"})  # type: ignore[untyped-decorator]
    def contracted(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = y[i] + x[i] * x[i]

    (text,) = contracted.inspect_asm().values()
    assert FUSED.findall(text) != []


def test_read_only_and_writable_inputs_share_one_compilation() -> None:
    norms_span: Any = loops.norms_span
    blocks = FragmentBlocks((300,), Codec.FP32)
    before = len(norms_span.signatures)
    encoded = bytearray(blocks.encoded_bytes)
    for buffer in (encoded, bytes(encoded), memoryview(encoded), np.frombuffer(encoded, np.uint8)):
        kernels.squared_norms(blocks, buffer)
    assert len(norms_span.signatures) == before == 1


@pytest.mark.parametrize("damage", [pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError])
def test_whatever_unpickling_raises_flushes_the_caches_once(
    damage: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    for loop in loops.ALL:
        monkeypatch.setattr(loop, "_cache", SimpleNamespace(flush=lambda name=loop.__name__: flushed.append(name)))
    runs: list[int] = []

    def action() -> None:
        runs.append(len(flushed))
        if len(runs) == 1:
            raise damage

    kernels.repair_cache_for(action)
    assert runs == [0, len(loops.ALL)]
    assert flushed == [loop.__name__ for loop in loops.ALL]


def test_other_errors_are_not_taken_for_a_damaged_cache() -> None:
    with pytest.raises(ZeroDivisionError):
        kernels.repair_cache_for(lambda: 1 // 0)
