"""The life of a learner's fragments by a script, on the CPU or on devices: what it comes to must be the same."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import CarryMode, Codec, Contribution
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import Answer, FragmentSettings, LearnerFragments
from diloco_node.wire.learner_link import NO_SNAPSHOT, SnapshotReady, SnapshotRequested, VersionOffered
from tests.kit.fakecuda import fake_device

FRAGMENTS: Final = 4
STEPS: Final = 30
ORDERS_MAX: Final = 2
"""Of each kind at one boundary: as many as a lane has rooms."""

SHAPES: Final = ((40, 24), (24,), (24, 64), (64,), (64, 24), (300,), (31, 17), (7,))

ON_THE_CPU: Final = ("cpu",)
PLACES: Final = {
    "one device": ("cuda:0",),
    "two devices": ("cuda:0", "cuda:1"),
    "device and host": ("cuda:0", "cpu"),
}
"""Where the parameters lie, in turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a life came to; arrays as bytes. is_checked: no optimizer undoes versions, as `RevertCheck` has found."""

    parameters: bytes
    base: bytes
    contributions: bytes
    answers: tuple[tuple[int, int, tuple[float, ...]], ...]
    is_checked: bool


class Life:
    """One life: `run` gives its outcome.

    Args:
        places: devices of the parameters, in turn. kind: `LearnerFragments`, or one with a planted fault.
    """

    def __init__(
        self,
        places: tuple[str, ...],
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
        kind: type[LearnerFragments] = LearnerFragments,
    ) -> None:
        self.seed = seed
        self.dtype = dtype
        self.places = places
        self.is_on_device = places != ON_THE_CPU
        self.model = _model(places, dtype)
        tensors = ModelTensors(self.model)
        self.manifest = build_manifest(tensors.specs, FRAGMENTS)
        version_bytes, contribution_bytes = area_sizes(self.manifest, Codec.INT4)
        self.area = np.zeros(version_bytes // 4, np.float32)
        self.contributions = np.zeros(contribution_bytes, np.uint8)
        self.heard: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.fragments = kind(
            tensors,
            self.manifest,
            FragmentSettings("us-east", 1, Codec.INT4, CarryMode.CARRY, 96),
            version_area=self.area,
            contribution_area=self.contributions,
            answer=self.heard.put,
        )
        self.values = np.random.default_rng(seed)
        self.versions = [0] * FRAGMENTS
        self.ready: list[Contribution | None] = [None] * FRAGMENTS
        self.asked: set[int] = set()
        self.coming: set[int] = set()
        self.answers: list[tuple[int, int, tuple[float, ...]]] = []

    def run(self) -> Outcome:
        """All of it."""
        self.run_steps()
        is_checked = self.fragments._revert._is_done
        self._hear()
        parameters = b"".join(p.detach().float().cpu().numpy().tobytes() for p in self.model.parameters())
        base = b"".join(vector.numpy().tobytes() for vector in self.fragments.global_vectors())
        answers = tuple(sorted(self.answers))
        self.close()
        return Outcome(parameters, base, self.contributions.tobytes(), answers, is_checked)

    def close(self) -> None:
        """Let go of everything."""
        self.fragments.close()

    def run_steps(self) -> None:
        """All steps of the script. On a device nothing may wait in this thread."""
        self.fragments.write_initial_state()
        for index in range(FRAGMENTS):
            self.fragments.apply(VersionOffered(index, 0, NO_SNAPSHOT))
        script, noise = random.Random(self.seed), torch.Generator(device="cpu").manual_seed(self.seed)
        for _ in range(STEPS):
            with fake_device.no_waits() if self.is_on_device else nullcontext():
                self._train(noise)
                self._boundary(script)

    def _train(self, noise: torch.Generator) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                change = torch.randn(parameter.shape, generator=noise, device="cpu").to(self.dtype) * 0.1
                if parameter.is_cuda:
                    change = change.pin_memory().to(parameter.device, non_blocking=True)
                parameter.add_(change)
        self.fragments.step += 1
        self.fragments.tokens += 8

    def _boundary(self, script: random.Random) -> None:
        fragments = self.fragments
        fragments.verify()
        offers = script.sample(range(FRAGMENTS), script.randint(0, ORDERS_MAX))
        requests = script.sample(range(FRAGMENTS), script.randint(0, ORDERS_MAX))
        includes = script.random() < 0.7
        self._hear()
        due = sorted(self.coming)
        for index in [] if due else offers:
            if not fragments.is_busy(index):
                self._offer(index, is_included=includes)
        for index in requests:
            may_ask = index not in self.asked and index not in self.coming
            if may_ask and fragments.step > fragments.positions[index].included_step:
                self.asked.add(index)
                fragments.snapshot(SnapshotRequested(index, self.versions[index] + 1, self.versions[index]))
        for index in due:
            assert index in fragments.arrived()
            fragments.finish(index)
            self._place(index)[:] = np.nan  # the daemon may write there from now on
            self.coming.remove(index)
            self.ready[index] = None
        fragments.encode_taken()

    def _offer(self, index: int, *, is_included: bool) -> None:
        self.versions[index] += 1
        self.asked.discard(index)
        contribution, number = self.ready[index], NO_SNAPSHOT
        if is_included and contribution is not None and contribution.base_version == self.versions[index] - 1:
            number = contribution.snapshot
        place = self._place(index)
        place[:] = self.values.standard_normal(place.size, np.float32)
        self.fragments.take(VersionOffered(index, self.versions[index], number))
        self.coming.add(index)

    def _place(self, index: int) -> np.ndarray:
        start = sum(fragment.size for fragment in self.manifest.fragments[:index])
        return self.area[start : start + self.manifest.fragments[index].size]

    def _hear(self) -> None:
        """Both lives come to the same place before something depends on it: what the worker has is done."""
        self.fragments._worker.drain()
        while not self.heard.empty():
            answer = self.heard.get()
            assert isinstance(answer, SnapshotReady), answer
            contribution = answer.contribution
            self.ready[contribution.fragment] = contribution
            self.answers.append((contribution.fragment, contribution.snapshot, contribution.squared_norms))


def complaints(
    kind: type[LearnerFragments],
    *,
    dtype: torch.dtype = torch.float32,
    place: str = "one device",
    seeds: tuple[int, ...] = (1, 2),
    expected: Callable[[torch.dtype, int], Outcome],
    stop_at: int | None = None,
) -> list[str]:
    """What is wrong with lives on devices, under all schedules; at most `stop_at` complaints.

    Args:
        expected: the outcome on the CPU.
    """
    texts: list[str] = []
    for seed in seeds:
        for schedule in fake_device.SCHEDULES:
            fake_device.reset()
            fake_device.schedule(schedule, seed=seed)
            try:
                outcome = Life(PLACES[place], dtype=dtype, seed=seed, kind=kind).run()
                torch.cuda.synchronize()
                wrong = [
                    name for name in Outcome.__slots__ if getattr(outcome, name) != getattr(expected(dtype, seed), name)
                ]
                texts += [f"{schedule}: other {', '.join(wrong)}"] if wrong else []
            except Exception as error:  # noqa: BLE001 - with a planted fault anything may happen
                texts.append(f"{schedule}: {type(error).__name__}: {error}"[:200])
            texts += [f"{schedule}: {text}" for text in fake_device.hazards()[:1]]
            if stop_at is not None and len(texts) >= stop_at:
                return texts
    return texts


def _model(places: tuple[str, ...], dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator(device="cpu").manual_seed(3)
    model = nn.Module()
    for number, shape in enumerate(SHAPES):
        values = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
        model.register_parameter(f"p{number}", nn.Parameter(values.to(places[number % len(places)])))
    return model
