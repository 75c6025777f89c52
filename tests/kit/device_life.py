"""The life of a learner's fragments by a script, on the CPU or on devices: what it comes to must be the same."""

import queue
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from diloco_node.core.merge.fragments import Manifest, build_manifest
from diloco_node.core.types import CarryMode, Codec, Contribution
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.layouts.device import Encoder
from diloco_node.learner.layouts.shard_map import ShardMap, agreed, describe
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import Answer, LearnerFragments
from diloco_node.learner.pull_back import VERSIONS_MAX
from diloco_node.learner.rank_exchange import RankExchange
from diloco_node.learner.snapshots import FragmentSettings
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
    version_slots,
)
from tests.kit.fakecuda import fake_device

FRAGMENTS: Final = 4
STEPS: Final = 30
ORDERS_MAX: Final = 2
"""Of each kind at one boundary: as many as a lane has rooms."""

SHAPES: Final = ((140, 64), (24,), (64, 131), (64,), (64, 24), (300,), (31, 170), (7,))
"""Pieces that travel in blocks of codes, of which some do not end with a block, and small ones."""

PATIENCE_S: Final = 60.0

ALONE: Final = (tuple(range(len(SHAPES))),)
RANKS: Final = {"copies": (*ALONE, *ALONE), "stages": (tuple(range(4)), tuple(range(4, len(SHAPES))))}
"""By rank the numbers of its parameters: what DistributedDataParallel does, and pipeline stages."""

ON_THE_CPU: Final = ("cpu",)
PLACES: Final = {"one device": ("cuda:0",), "two devices": ("cuda:0", "cuda:1"), "device and host": ("cuda:0", "cpu")}
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
        holdings: by rank the numbers of its parameters. All ranks are in this process.
        encode: what encodes contributions.
    """

    def __init__(
        self,
        places: tuple[str, ...],
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
        kind: type[LearnerFragments] = LearnerFragments,
        holdings: Sequence[Sequence[int]] = ALONE,
        encode: Encoder = "host",
    ) -> None:
        self.seed = seed
        self.dtype = dtype
        self.places = places
        self.is_on_device = places != ON_THE_CPU
        self.models = [_model(places, dtype, numbers) for numbers in holdings]
        tensors = [ModelTensors(model) for model in self.models]
        specs, shards = agreed([describe(rank.specs, rank.boxes) for rank in tensors])
        self.manifest = build_manifest(specs, FRAGMENTS)
        _, contribution_bytes = area_sizes(self.manifest, Codec.INT4)
        # More slots than a run has: all offers of a boundary are made at once.
        self.area = np.zeros((3 * FRAGMENTS, version_slots(self.manifest)[1]), np.float32)
        self.lent: dict[int, int] = {}
        self.contributions = np.zeros(contribution_bytes, np.uint8)
        self.heard: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        post = Post()
        self.ranks = [
            kind(
                tensors[rank],
                self.manifest,
                FragmentSettings("us-east", 1, Codec.INT4, CarryMode.CARRY, 96, encode),
                version_area=self.area.reshape(-1) if rank == 0 else None,
                contribution_area=self.contributions if rank == 0 else None,
                answer=self.heard.put,
                shards=shards,
                rank=rank,
                exchange=PostExchange(post, rank, shards, self.manifest) if len(holdings) > 1 else None,
            )
            for rank in range(len(holdings))
        ]
        self.fragments = self.ranks[0]
        self.values = np.random.default_rng(seed)
        self.versions = [0] * FRAGMENTS
        self.ready: list[Contribution | None] = [None] * FRAGMENTS
        self.asked: set[int] = set()
        self.coming: set[int] = set()
        self.answers: list[tuple[int, int, tuple[float, ...]]] = []

    def run(self) -> Outcome:
        """All of it."""
        self.run_steps()
        is_checked = self.fragments.revert._is_done
        self._hear()
        copies = [dict(model.named_parameters()) for model in self.models]
        parameters = b""
        for number in range(len(SHAPES)):
            same = {_bytes(held[f"p{number}"]) for held in copies if f"p{number}" in held}
            assert len(same) == 1, "ranks that hold the same have the same"
            parameters += same.pop()
        base = b"".join(vector.numpy().tobytes() for vector in self.fragments.global_vectors())
        answers = tuple(sorted(self.answers))
        self.close()
        return Outcome(parameters, base, self.contributions.tobytes(), answers, is_checked)

    def close(self) -> None:
        """Let go of everything."""
        for fragments in self.ranks:
            fragments.close()

    def run_steps(self) -> None:
        """All steps of the script. On a device nothing may wait in this thread."""
        self.area[:] = self.values.standard_normal(self.area.shape, np.float32)
        for index in range(FRAGMENTS):
            for fragments in self.ranks:
                fragments.take(VersionOffered(index, 0, NO_SNAPSHOT, slot=index))
            self._drain()
            for fragments in self.ranks:
                fragments.finish(index)
        script, noise = random.Random(self.seed), torch.Generator(device="cpu").manual_seed(self.seed)
        for _ in range(STEPS):
            with fake_device.no_waits() if self.is_on_device else nullcontext():
                self._train(noise)
                self._boundary(script)

    def _train(self, noise: torch.Generator) -> None:
        for number, shape in enumerate(SHAPES):
            change = torch.randn(shape, generator=noise, device="cpu").to(self.dtype) * 0.1
            with torch.no_grad():
                for parameter in (getattr(model, f"p{number}", None) for model in self.models):
                    if parameter is not None and parameter.is_cuda:
                        parameter.add_(change.pin_memory().to(parameter.device, non_blocking=True))
                    elif parameter is not None:
                        parameter.add_(change)
        for fragments in self.ranks:
            fragments.step += 1
            fragments.tokens += 8

    def _boundary(self, script: random.Random) -> None:
        for fragments in self.ranks:
            fragments.revert.verify()
        offers = script.sample(range(FRAGMENTS), script.randint(0, ORDERS_MAX))
        requests = script.sample(range(FRAGMENTS), script.randint(0, ORDERS_MAX))
        includes = script.random() < 0.7
        self._hear()
        due = sorted(self.coming)
        for index in [] if due else offers:
            if not self.fragments.is_busy(index):
                self._offer(index, is_included=includes)
        for index in requests:
            may_ask = index not in self.asked and index not in self.coming
            if may_ask and self.fragments.step > self.fragments.positions[index].included_step:
                self.asked.add(index)
                for fragments in self.ranks:
                    fragments.snapshot(SnapshotRequested(index, self.versions[index] + 1, self.versions[index]))
        for index in due:
            for fragments in self.ranks:
                assert index in fragments.arrived()
                fragments.finish(index)
            del self.lent[index]
            self.coming.remove(index)
            for slot in self._free_slots():
                self.area[slot] = np.nan  # the daemon may write there from now on
            self.ready[index] = None
        for fragments in self.ranks:
            fragments.encode_taken()

    def _offer(self, index: int, *, is_included: bool) -> None:
        self.versions[index] += 1
        self.asked.discard(index)
        contribution, number = self.ready[index], NO_SNAPSHOT
        if is_included and contribution is not None and contribution.base_version == self.versions[index] - 1:
            number = contribution.snapshot
        self.lent[index] = slot = self._free_slots()[0]
        size = self.manifest.fragments[index].size
        self.area[slot, :size] = self.values.standard_normal(size, np.float32)
        for fragments in self.ranks:
            fragments.take(VersionOffered(index, self.versions[index], number, slot=slot))
        self.coming.add(index)

    def _free_slots(self) -> list[int]:
        taken = {*self.fragments.slots, *self.lent.values()}
        return [slot for slot in range(len(self.area)) if slot not in taken]

    def _drain(self) -> None:
        for fragments in self.ranks:
            if fragments._lane is not None:
                fragments._lane._fetcher.submit(lambda: None).result()
        for fragments in self.ranks:
            fragments._worker.drain()

    def _hear(self) -> None:
        """Both lives come to the same place before something depends on it: what the worker has is done."""
        self._drain()
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
    holdings: Sequence[Sequence[int]] = ALONE,
    encode: Encoder = "host",
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
            life = Life(PLACES[place], dtype=dtype, seed=seed, kind=kind, holdings=holdings, encode=encode)
            if kind is not LearnerFragments:
                # Its looks at each boundary give the worker time, in which some faults do no harm.
                life.fragments.revert._pull_back._versions = VERSIONS_MAX
            try:
                outcome = life.run()
                names = set(Outcome.__slots__) - ({"base", "is_checked"} if len(holdings) > 1 else set())
                wrong = [name for name in names if getattr(outcome, name) != getattr(expected(dtype, seed), name)]
                texts += [f"{schedule}: other {', '.join(sorted(wrong))}"] if wrong else []
            except Exception as error:  # noqa: BLE001 - with a planted fault anything may happen
                texts.append(f"{schedule}: {type(error).__name__}: {error}"[:200])
            finally:
                life.close()
                for device in range(torch.cuda.device_count()):
                    torch.cuda.synchronize(device)
            texts += [f"{schedule}: {text}" for text in fake_device.hazards()[:1]]
            if stop_at is not None and len(texts) >= stop_at:
                return texts
    return texts


class Post:
    """Letters between ranks that are all in this process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)

    def send(self, source: int, target: int, values: torch.Tensor) -> None:
        self.boxes[source, target].put(values.clone())

    def receive(self, source: int, target: int) -> torch.Tensor:
        return self.boxes[source, target].get(timeout=PATIENCE_S)


class PostExchange(RankExchange):
    """`RankExchange` whose bytes go by post."""

    def __init__(self, post: Post, rank: int, shards: ShardMap, manifest: Manifest) -> None:
        super().__init__(None, rank, shards, manifest)  # type: ignore[arg-type]
        self._post = post

    def gather(self, index: int, vector: torch.Tensor) -> torch.Tensor | None:
        self._post.send(self._rank, 0, vector)
        if self._rank:
            return None
        whole = torch.zeros(self._manifest.fragments[index].size, device="cpu")
        for rank in self._ranks:
            values = self._post.receive(rank, 0)
            for slab in self._owned[index][rank].slabs:
                self._inside(whole, slab).copy_(values[slab.span].view(slab.shape))
        return whole

    def scatter(self, index: int, whole: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        for rank, packet in enumerate(self.pack(index, whole) if whole is not None else ()):
            self._post.send(0, rank, packet)
        packet = self._post.receive(0, self._rank)
        size = self._owned[index][self._rank].size
        return packet[:size], packet[size:]

    def share_anchor(self, index: int, anchor: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(self._followed[index][self._rank].size, device="cpu")
        for (owner, follower), (sources, targets) in self._pairs[index].items():
            if self._rank == owner:
                self._post.send(owner, follower, torch.cat([anchor[slab.span] for slab in sources]))
            elif self._rank == follower:
                packet, end = self._post.receive(owner, follower), 0
                for slab in targets:
                    values[slab.span] = packet[end : end + slab.size]
                    end += slab.size
        return values


def _bytes(parameter: torch.Tensor) -> bytes:
    return parameter.detach().float().cpu().numpy().tobytes()


def _model(places: tuple[str, ...], dtype: torch.dtype, numbers: Sequence[int]) -> nn.Module:
    generator = torch.Generator(device="cpu").manual_seed(3)
    model = nn.Module()
    for number, shape in enumerate(SHAPES):
        values = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
        if number in numbers:
            model.register_parameter(f"p{number}", nn.Parameter(values.to(places[number % len(places)])))
    return model
