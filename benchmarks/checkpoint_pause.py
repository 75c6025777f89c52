"""The longest pause of a training loop while a checkpoint is written in the background.

A thread spins as a training loop does between two operators and measures the gaps between its turns, while
`CheckpointWriter` writes a state of `--mb` megabytes. A library that holds Python's lock for a whole file shows as one
gap as long as the write. The same spin without a writer says what the machine itself takes away.

    python benchmarks/checkpoint_pause.py [--mb 500] [--repeats 3] [--folder DIR] [--json]

Copying the state, which the loop waits for by design, is timed apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_node.learner.checkpoint import CheckpointWriter, TrainingProgress

TENSOR_MB = 16
"""Of one tensor: that of a matrix of 2,048 by 2,048 in float32."""


class State:
    """A `stateful` of so many megabytes."""

    def __init__(self, megabytes: int) -> None:
        count = max(1, round(megabytes / TENSOR_MB))
        self.tensors = {str(index): torch.randn(TENSOR_MB * 250_000) for index in range(count)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.tensors = state


def longest_gap_s(is_going_on: Callable[[], bool]) -> float:
    """Spin, and return the longest time between two turns."""
    longest_ns, last_ns = 0, time.perf_counter_ns()
    while is_going_on():
        now_ns = time.perf_counter_ns()
        longest_ns = max(longest_ns, now_ns - last_ns)
        last_ns = now_ns
    return longest_ns / 1e9


def measure(folder: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` checkpoints, but for the longest pauses."""
    writer, state = CheckpointWriter(folder), State(megabytes)
    copies, writes, pauses, idles = [], [], [], []
    for step in range(repeats + 1):
        start_s = time.perf_counter()
        writer.save(TrainingProgress("bench", 1, step, step, step), None, {"state": state})
        copied_s = time.perf_counter()
        pause_s = longest_gap_s(lambda: writer.is_busy)
        written_s = time.perf_counter()
        if writer.written is None:
            raise SystemExit("the checkpoint was not written: NOTHING is measured")
        until_s = written_s + (written_s - copied_s)
        idle_s = longest_gap_s(lambda until_s=until_s: time.perf_counter() < until_s)
        if step:  # the first one touches every page once
            copies.append(copied_s - start_s)
            writes.append(written_s - copied_s)
            pauses.append(pause_s)
            idles.append(idle_s)
    return {
        "safetensors": version("safetensors"),
        "megabytes": megabytes,
        "copy_seconds": statistics.median(copies),
        "write_seconds": statistics.median(writes),
        "longest_pause_seconds": max(pauses),
        "median_pause_seconds": statistics.median(pauses),
        "longest_pause_without_writer_seconds": max(idles),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=500, help="size of the state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; else a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options.mb, options.repeats)
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"safetensors {figures['safetensors']}, {figures['megabytes']} MB: copied in {figures['copy_seconds']:.2f} s, "
        f"written in {figures['write_seconds']:.2f} s; longest pause meanwhile "
        f"{figures['longest_pause_seconds'] * 1e3:.0f} ms, without a writer "
        f"{figures['longest_pause_without_writer_seconds'] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
