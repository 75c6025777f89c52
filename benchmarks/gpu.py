"""What a learner does on a GPU, checked and measured: one line a check, PASS, FAIL or SKIP.

    python benchmarks/gpu.py [--only bits,waits] [--json] [--size gpt2 | small | 1b] [--encode]

Needs a GPU, numpy, numba, msgpack, blake3, safetensors and torch; nothing is installed, and no other part of this
package runs.
Each check is a process of its own: one that breaks is a FAIL, and the others go on. Exit code: 0 if nothing failed, 1
else, 2 without a device or a package. Some four minutes on an H100.

- `bits`: snapshots, versions and encoded contributions are the CPU's, for float32, bfloat16, float16 and masters,
  encoded by the host and by the device.
- `waits`: in 200 steps of GPT-2's parameters with an order each, `step()` never waits for the device.
- `time`, `eager`, `boundary`, `idle`, `memory`: GPT-2 with 124 M parameters, alone and attached in short turns,
  P = H = 24; a step as a CUDA graph, and launched kernel by kernel. These alone with `--size 1b`: 0.9 B parameters.
- `checkpoint`: the longest time without a launch, while AdamW's state, 1 GB, is copied and written; `written`: that
  the disk holds it.
- `graphs`, `compiled`: `torch.cuda.graph` of a whole step, and `reduce-overhead`, with versions between replays.
- `capture`: a graph is captured while a snapshot is on its way.
- `ranks`: FSDP2 over NCCL on all GPUs, `grad_norm=` of sharded gradients.
- `--encode`: what packing, copying, applying and encoding a fragment take on the device.

With `DILOCO_ENCODER=device` the device encodes in all of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

LIMIT_S: Final = {"waits": 60.0, "compiled": 75.0, "loop": 90.0, "checkpoint": 75.0, "ranks": 75.0}
"""Seconds that a check may take; `OTHER_LIMIT_S` where it is not named."""

OTHER_LIMIT_S: Final = 60.0
OTHER_SIZE_LIMIT_S: Final = 600.0
"""Small models are for devices in software, on machines that do other things as well; a large one takes minutes."""

NAMES: Final = ("bits", "waits", "loop", "checkpoint", "graphs", "capture", "ranks", "compiled")
OF_LOOP: Final = ("time", "eager", "boundary", "idle", "memory")
"""Lines of the check `loop`."""

DRIVER_ALONE: Final = ("graphs", "capture", "compiled")
NO_DEVICE: Final = 2
PACKAGES: Final = ("blake3", "msgpack", "numba", "numpy", "safetensors", "torch")


def has_device() -> bool:
    """Whether torch sees a device of type cuda, which ROCm's are as well."""
    import torch

    return torch.cuda.is_available()


def child(name: str, size: str) -> None:
    """Run one check here, and write each of its lines as JSON."""
    from gpu_checks import relay
    from gpu_lines import Line
    from gpu_model import HAS_DRIVER, SIZES

    if name in DRIVER_ALONE and not HAS_DRIVER:
        print(json.dumps(asdict(Line(name, "SKIP", "a device in software has no graphs"))), flush=True)
        return
    relay(name, SIZES[size], lambda line: print(json.dumps(asdict(line)), flush=True))


def run(name: str, command: list[str], limit_s: float) -> list[dict[str, Any]]:
    """The lines of one check, in a process of its own."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        ending = f"ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        ending = f"took more than {limit_s:.0f} s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode:
        last = err.strip().splitlines()[-1:] or [""]
        lines.append({"name": name, "verdict": "FAIL", "text": f"{ending} {last[0][:300]}", "figures": {}})
    return lines


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of checks, with commas [all]")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--size", choices=("gpt2", "small", "1b"), default="gpt2", help="of the models [gpt2]")
    parser.add_argument("--encode", action="store_true", help="figures of a device path, too")
    parser.add_argument("--import", dest="module", default="", help="before torch: tests.kit.fakecuda.installed")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.module:
        importlib.import_module(options.module)
    if options.child:
        child(options.child, options.size)
        return 0
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"not installed here: {', '.join(missing)}. Nothing is checked: python -m pip install {' '.join(missing)}"
        )
        return NO_DEVICE
    if not has_device():
        print("no GPU here that torch can use: nothing is checked")
        return NO_DEVICE
    names = ["loop"] if options.size == "1b" else [*NAMES, *(["encode"] if options.encode else [])]
    if wishes := [name for name in options.only.split(",") if name]:
        if unknown := {*wishes} - {*NAMES, *OF_LOOP, "encode"}:
            parser.error(
                f"--only {','.join(sorted(unknown))}: the checks are {', '.join((*NAMES, *OF_LOOP, 'encode'))}"
            )
        names = list(dict.fromkeys("loop" if name in OF_LOOP else name for name in wishes))
    verdicts = []
    for name in names:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--size", options.size]
        command += ["--import", options.module] if options.module else []
        started_s = time.monotonic()
        lines = run(name, command, LIMIT_S.get(name, OTHER_LIMIT_S) if options.size == "gpt2" else OTHER_SIZE_LIMIT_S)
        for number, line in enumerate(lines):
            verdicts.append(line["verdict"])
            took = f" [{time.monotonic() - started_s:.0f} s]" if number == len(lines) - 1 else ""
            text = json.dumps(line) if options.json else f"{line['verdict']:4} {line['name']:10} {line['text']}{took}"
            print(text, flush=True)
    counts = {word: verdicts.count(word) for word in ("PASS", "FAIL", "SKIP")}
    if not options.json:
        print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["FAIL"] or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
