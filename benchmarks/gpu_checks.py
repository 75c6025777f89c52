"""The checks of benchmarks/gpu.py, each a function that yields its lines. They run in a process each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from gpu_bits import bits
from gpu_checkpoint import checkpoint
from gpu_encode import figures
from gpu_graphs import capture, compiled, graphs
from gpu_lines import Line, verdict
from gpu_loop import loop
from gpu_model import DEVICE, FULL, HAS_DRIVER, Size
from gpu_waits import waits

from diloco_node.learner.layouts.block_rows import LEVELS, differing_bytes


def ranks(size: Size) -> Iterator[Line]:
    """FSDP2 over NCCL with `grad_norm=`: the bits of a single process without FSDP."""
    if HAS_DRIVER and not torch.distributed.is_nccl_available():
        yield Line("ranks", "SKIP", "no NCCL here")
        return
    count, rounds = torch.cuda.device_count(), 50 if HAS_DRIVER else 8
    devices = [] if HAS_DRIVER else ["tests.kit.fakecuda.installed"]
    script = str(Path(__file__).resolve().parent / "gpu_ranks.py")
    results = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]):
        with tempfile.TemporaryDirectory(prefix="gpu-") as name:
            command = [sys.executable, *launcher, script, name, str(rounds), *devices]
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
            if outcome.returncode:
                words = outcome.stdout + outcome.stderr
                errors = [line for line in words.splitlines() if "Error" in line and "Elastic" not in line]
                label = f"FSDP2 on {count} GPU(s)" if launcher else "a single process"
                text = (errors or words.splitlines()[-1:] or ["no word"])[0].strip()
                yield Line("ranks", "FAIL", f"{label} ended: {text[:300]}")
                return
            results.append((Path(name) / "parameters.bin").read_bytes())
    is_equal = results[0] == results[1]
    yield Line(
        "ranks",
        verdict(is_equal),
        f"FSDP2 on {count} GPU(s), grad_norm=, {rounds} rounds: parameters {'equal' if is_equal else 'differ'}, "
        "own and global, to a process without FSDP",
    )


def encoding(size: Size) -> Iterator[Line]:
    """What a fragment takes on the device."""
    values = 124_000_000 // 24 if size is FULL else 40_000
    parts = figures(values, 7)
    text = ", ".join(f"{name} {took:.3f}" for name, took in parts.items())
    yield Line("figures", "INFO", f"ms for a fragment of {values / 1e6:.1f} M values: {text}", parts)
    differing = {codec.value: differing_bytes(DEVICE, codec) for codec in LEVELS}
    text = f"in torch's operators, bytes and norms that are not the kernel's: {differing}"
    yield Line("encode", verdict(not any(differing.values())), text, differing)


CHECKS: Final[dict[str, Callable[[Size], Iterator[Line]]]] = {
    "bits": bits,
    "waits": waits,
    "loop": loop,
    "checkpoint": checkpoint,
    "graphs": graphs,
    "capture": capture,
    "compiled": compiled,
    "ranks": ranks,
    "encode": encoding,
}


def relay(name: str, size: Size, write: Callable[[Line], None]) -> None:
    """Run one check; what it raises is a line, too."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        for line in CHECKS[name](size):
            write(line)
    except Exception as error:  # noqa: BLE001 - a check that breaks is a result; the others go on
        words = f"{type(error).__name__}: {error}".strip().splitlines()
        write(Line(name, "FAIL", (words[0] if len(words) < 2 else f"{words[0]} ... {words[-1]}")[:400]))
