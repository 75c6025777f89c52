"""The codec's kernels on one core, beside numpy and beside memory bandwidth, in one run.

    python benchmarks/codec.py [--mparam 16] [--repeat 15] [--json]

Every figure is a median of N; in each repetition everything runs once, so that a disturbance meets all alike. Time is
the CPU time of the thread: on a shared machine it leaves out what others took. `of memory` is the kernel's traffic
(each array once for every read and write) over that of a triad (a = b + c * d) with numpy on vectors of the same size.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import fragment_digest, stripe_digest
from diloco_node.codec.payload import CHUNK_RAW_BYTES_MAX, compress_chunk, decompress_chunk
from diloco_node.core.types import Codec
from diloco_node.numeric import F32, U8


@dataclass
class Case:
    """One thing to time.

    Attributes:
        run: does it once over all values.
        bytes_per_value: memory traffic, 0 where it says nothing.
        peer: name of the case it is compared with, or "".
    """

    name: str
    run: Callable[[], object]
    bytes_per_value: float = 0.0
    peer: str = ""


def numpy_encode(x: F32, codec: Codec) -> tuple[F32, U8]:
    """The same encoding (without norms and checks) in numpy; a multiple of 256 values."""
    blocks = x.reshape(-1, 256)
    levels = np.float32(7 if codec is Codec.INT4 else 127)
    absmax = np.abs(blocks).max(axis=1, keepdims=True)
    codes = np.rint(blocks * (levels / absmax)).astype(np.int8)
    if codec is Codec.INT8:
        return absmax / levels, codes.view(np.uint8)
    pairs = codes.view(np.uint8)
    return absmax / levels, (pairs[:, 0::2] & 15) | (pairs[:, 1::2] << 4)


def numpy_accumulate(scales: F32, codes: U8, codec: Codec, acc: F32) -> None:
    """acc += 0.5 * decoded, in numpy."""
    if codec is Codec.INT4:
        signed = np.empty((codes.shape[0], 256), np.int8)
        signed[:, 0::2] = (codes << 4).view(np.int8) >> 4
        signed[:, 1::2] = codes.view(np.int8) >> 4
    else:
        signed = codes.view(np.int8)
    acc.reshape(-1, 256)[...] += np.float32(0.5) * (scales * signed)


def numpy_outer(d: F32, theta: F32, momentum: F32) -> None:
    """The outer step in numpy, from decoded values."""
    momentum *= np.float32(0.8)
    momentum += d
    theta -= np.float32(0.4) * (d + np.float32(0.8) * momentum)


def cases(values: int) -> list[Case]:
    """All cases over vectors of this many values."""
    rng = np.random.default_rng(1)
    x, base, y = (rng.standard_normal(values).astype(np.float32) for _ in range(3))
    acc, theta, momentum = (np.zeros(values, np.float32) for _ in range(3))
    found = [
        Case("copy (numpy)", lambda: np.copyto(acc, x), 8),
        Case("triad (numpy)", lambda: np.add(np.multiply(x, np.float32(0.5), out=acc), y, out=acc), 20),
    ]
    for codec in Codec:
        found += kernel_cases(codec, x, base, (acc, theta, momentum))
    for codec in (Codec.INT4, Codec.INT8):
        scales, codes = numpy_encode(x, codec)
        found.append(Case(f"{codec} encode (numpy)", lambda c=codec: numpy_encode(x, c)))
        found.append(
            Case(
                f"{codec} accumulate (numpy)",
                lambda c=codec, s=scales, q=codes: numpy_accumulate(s, q, c, acc),
            )
        )
    found.append(Case("outer step (numpy)", lambda: numpy_outer(x, theta, momentum)))
    return found + byte_cases(x, theta, momentum)


def kernel_cases(codec: Codec, x: F32, base: F32, arrays: tuple[F32, F32, F32]) -> list[Case]:
    """The kernels under one codec."""
    blocks = FragmentBlocks((x.size,), codec)
    acc, theta, momentum = arrays
    encoded, out = np.zeros(blocks.encoded_bytes, np.uint8), np.zeros(blocks.encoded_bytes, np.uint8)
    kernels.encode(blocks, x, encoded)
    half = np.array([0.5], np.float32)
    size = blocks.encoded_bytes / x.size
    numpy_too = codec in (Codec.INT4, Codec.INT8)
    last = blocks.block_count
    return [
        Case(
            f"{codec} encode", lambda: kernels.encode(blocks, x, out), 4 + size, f"{codec} encode (numpy)" * numpy_too
        ),
        Case(f"{codec} encode delta", lambda: kernels.encode_delta(blocks, base, x, out), 8 + size),
        Case(f"{codec} check", lambda: kernels.squared_norms(blocks, encoded), size),
        Case(f"{codec} decode", lambda: kernels.decode(blocks, encoded, acc), 4 + size),
        Case(
            f"{codec} accumulate",
            lambda: kernels.accumulate(blocks, encoded, 0, last, half, acc),
            8 + size,
            f"{codec} accumulate (numpy)" * numpy_too,
        ),
        Case(
            f"{codec} outer step",
            lambda: kernels.outer_step(blocks, encoded, half, 0.4, 0.8, theta, momentum),
            16 + 2 * size,
            "outer step (numpy)",
        ),
    ]


def byte_cases(x: F32, theta: F32, momentum: F32) -> list[Case]:
    """zstd and SHA-256 over what a fragment of this size becomes."""
    found = [Case("digest of the fragment's state", lambda: fragment_digest(theta, momentum), 8)]
    for codec in (Codec.INT4, Codec.INT8):
        blocks = FragmentBlocks((x.size,), codec)
        encoded = np.zeros(blocks.encoded_bytes, np.uint8)
        kernels.encode(blocks, x, encoded)
        view = memoryview(encoded)
        chunks = [view[at : at + CHUNK_RAW_BYTES_MAX] for at in range(0, len(view), CHUNK_RAW_BYTES_MAX)]
        sent = [compress_chunk(chunk) for chunk in chunks]
        ratio = len(view) / sum(len(data) for _, data in sent)
        found += [
            Case(f"{codec} zstd compress (x{ratio:.2f})", lambda c=chunks: [compress_chunk(chunk) for chunk in c]),
            Case(f"{codec} zstd decompress", lambda c=chunks, s=sent: decompress_all(c, s)),
            Case(f"{codec} digest of the stripe", lambda e=encoded: stripe_digest(e)),
        ]
    return found


def decompress_all(chunks: list[memoryview], sent: list[tuple[bool, bytes | memoryview]]) -> None:
    """Decode every chunk that was worth compressing."""
    target = memoryview(bytearray(CHUNK_RAW_BYTES_MAX))
    for chunk, (is_compressed, data) in zip(chunks, sent, strict=True):
        if is_compressed:
            decompress_chunk(data, target[: chunk.nbytes])


def measure(values: int, repeat: int) -> dict[str, Any]:
    """Median CPU seconds of every case, and what follows from them."""
    kernels.warm_up()
    all_cases = cases(values)
    seconds: dict[str, list[float]] = {case.name: [] for case in all_cases}
    for round_number in range(repeat + 1):
        for case in all_cases:
            start_ns = time.thread_time_ns()
            case.run()
            if round_number > 0:  # the first round touches the memory
                seconds[case.name].append((time.thread_time_ns() - start_ns) / 1e9)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    memory = 20 * values / median["triad (numpy)"]
    rows = {}
    for case in all_cases:
        row = {"gparam_per_s": values / median[case.name] / 1e9, "seconds": median[case.name]}
        if case.bytes_per_value:
            row["gbyte_per_s"] = case.bytes_per_value * values / median[case.name] / 1e9
            row["of_memory"] = row["gbyte_per_s"] * 1e9 / memory
        if case.peer:
            row["times_numpy"] = median[case.peer] / median[case.name]
        rows[case.name] = row
    return {"values": values, "repeat": repeat, "machine": platform.processor() or platform.machine(), "cases": rows}


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mparam", type=int, default=16, help="millions (2^20) of values per vector (default 16)")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions, the median counts (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.mparam << 20, options.repeat)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{'':32} {'Gparam/s':>9} {'GB/s':>7} {'of memory':>10} {'x numpy':>8}")
    for name, row in result["cases"].items():
        traffic = f"{row['gbyte_per_s']:7.1f} {row['of_memory']:10.0%}" if "gbyte_per_s" in row else " " * 18
        times = f"{row['times_numpy']:8.1f}" if "times_numpy" in row else ""
        print(f"{name:32} {row['gparam_per_s']:9.2f} {traffic} {times}".rstrip())


if __name__ == "__main__":
    main()
