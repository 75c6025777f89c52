"""What merging costs the training thread: snapshot and apply of one fragment, beside an inner step of a 50 M model.

With P = H one round per inner step is the most that pacing allows, so a step has at most one snapshot and one apply.
Run alone:

    python benchmarks/learner.py [--json] [--threads N] [--steps N] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import CarryMode, Codec
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import Answer, FragmentSettings, LearnerFragments
from diloco_node.wire.learner_link import SnapshotReady, SnapshotRequested, VersionOffered

FRAGMENTS = 24
SHAPE = ModelSettings(layers=10, dim=640, heads=10, context=64)
BATCH = 8


def now_s() -> float:
    """When everything that was begun is done, on the device too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = now_s()
    work()
    return now_s() - start


class Bench:
    """A 50 M model with its optimizer, and its fragments."""

    def __init__(self, device: str) -> None:
        self.model = ByteGPT(SHAPE).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.windows = torch.randint(0, 256, (BATCH, SHAPE.context + 1), device=device)
        tensors = ModelTensors(self.model)
        self.manifest = build_manifest(tensors.specs, FRAGMENTS)
        version_area_bytes, contributions_bytes = area_sizes(self.manifest, Codec.INT4)
        self.version_area = np.zeros(version_area_bytes // 4, np.float32)
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.fragments = LearnerFragments(
            tensors,
            self.manifest,
            FragmentSettings("bench", 1, Codec.INT4, CarryMode.CARRY, 96),
            version_area=self.version_area,
            contribution_area=np.zeros(contributions_bytes, np.uint8),
            answer=self.answers.put,
        )
        self.fragments.write_initial_state()
        for index in range(FRAGMENTS):
            self.fragments.apply(VersionOffered(index, 0, -1))

    def inner_step(self) -> None:
        """Forward, backward, AdamW."""
        loss = self.model.loss(self.windows)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.fragments.step += 1
        self.fragments.tokens += BATCH * SHAPE.context

    def round(self, index: int, version: int) -> tuple[float, float, float]:
        """Seconds that the snapshot and the apply took the training thread, and until the contribution was encoded."""
        wanted = SnapshotRequested(index, version, version - 1)
        start = now_s()
        self.fragments.snapshot(wanted)
        self.fragments.encode_taken()
        snapshot_s = now_s() - start
        answer = self.answers.get(timeout=60)
        encoded_s = time.perf_counter() - start
        assert isinstance(answer, SnapshotReady), answer
        offered = VersionOffered(index, version, answer.contribution.snapshot)
        return snapshot_s, timed(lambda: self.fragments.apply(offered)), encoded_s


def measure(steps: int, device: str) -> dict[str, float]:
    """Medians over `steps` inner steps, each followed by one round of the next fragment."""
    bench = Bench(device)
    bench.inner_step()
    for index in range(FRAGMENTS):
        bench.round(index, 1)  # touches every page once, as a run's first cycle does
    inner, rounds = [], []
    for number in range(steps):
        inner.append(timed(bench.inner_step))
        rounds.append(bench.round(number % FRAGMENTS, 2 + number // FRAGMENTS))
    snapshot_s, apply_s, encoded_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    step_s = statistics.median(inner)
    return {
        "parameters": bench.manifest.size,
        "fragments": FRAGMENTS,
        "threads": torch.get_num_threads(),
        "tokens_per_step": BATCH * SHAPE.context,
        "step_seconds": step_s,
        "snapshot_seconds": snapshot_s,
        "apply_seconds": apply_s,
        "encoded_after_seconds": encoded_s,
        "share_of_step": (snapshot_s + apply_s) / step_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as cores")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: NOTHING is measured")
    if given.threads:
        torch.set_num_threads(given.threads)
    found = measure(given.steps, given.device)
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{found['parameters'] / 1e6:.1f} M parameters, P = {FRAGMENTS}, {found['threads']:.0f} threads: inner step "
        f"{found['step_seconds'] * 1e3:.0f} ms, snapshot {found['snapshot_seconds'] * 1e3:.2f} ms, apply "
        f"{found['apply_seconds'] * 1e3:.2f} ms, together {found['share_of_step']:.2%} of a step; encoded "
        f"{found['encoded_after_seconds'] * 1e3:.1f} ms after the request"
    )


if __name__ == "__main__":
    main()
