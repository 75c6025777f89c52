"""The machine code: no contracted products, one compilation per use, and a damaged cache is made again."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
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


MEASURE = """
import numpy as np
from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec
blocks = FragmentBlocks((300,), Codec.FP32)
kernels.repair_cache_for(lambda: kernels.squared_norms(blocks, np.ones(300, np.float32).view(np.uint8)))
print(kernels.loops.norms_span.stats.cache_hits.total())
"""


def test_a_damaged_cache_is_thrown_away_and_made_again(tmp_path: Path) -> None:
    def cache_hits() -> int:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert cache_hits() == 0
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(b"")  # what a power cut leaves
    assert cache_hits() == 0
    assert cache_hits() == 1


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
