"""Hand numbers: two fragments of one value each where not said otherwise, so that a person can follow."""

import queue
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import CarryMode, Codec, FragmentPosition
from diloco_node.errors import LearnerError
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.fragment_settings import FragmentSettings
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import Answer, LearnerFragments
from diloco_node.wire.learner_link import (
    NO_SLOT,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
    version_slots,
)

SEED = 499
PATIENCE_S = 180.0


class Bench:
    """Fragments with their memory, and the model they are of."""

    def __init__(
        self,
        model: nn.Module,
        *,
        fragments: int = 1,
        codec: Codec = Codec.FP32,
        carry: CarryMode = CarryMode.CARRY,
        limit: int = 100,
        before_ready: object = None,
    ) -> None:
        self.model = model
        tensors = ModelTensors(model)
        self.manifest = build_manifest(tensors.specs, fragments)
        self.codec = codec
        version_area_bytes, contributions_bytes = area_sizes(self.manifest, codec)
        self.version_area = np.zeros(version_area_bytes // 4, np.float32)
        self.contribution_area = np.zeros(contributions_bytes, np.uint8)
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        settings = FragmentSettings("us-east", 3, codec, carry, limit)
        more = {"before_ready": before_ready} if before_ready is not None else {}
        self.fragments = LearnerFragments(
            tensors,
            self.manifest,
            settings,
            version_area=self.version_area,
            contribution_area=self.contribution_area,
            answer=self.answers.put,
            **more,
        )
        self.slots = self.version_area.reshape(version_slots(self.manifest))

    def offer(
        self, fragment: int, version: int, values: object, snapshot: int = -1, *, is_last: bool = False
    ) -> OfferApplied:
        slot = next(slot for slot in range(len(self.slots)) if slot not in self.fragments.slots)
        self.slots[slot, : self.manifest.fragments[fragment].size] = values
        applied = self.fragments.apply(VersionOffered(fragment, version, snapshot, is_last, slot))
        for slot in set(range(len(self.slots))) - {*self.fragments.slots}:
            self.slots[slot] = np.nan  # the daemon may write there from now on
        return replace(applied, slot=NO_SLOT)

    def step(self, change: float, *, steps: int = 1, tokens: int = 10) -> None:
        """Inner steps that together move every parameter by `change`."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += change
        self.fragments.step += steps
        self.fragments.tokens += steps * tokens

    def snapshot(self, version: int, *, fragment: int = 0, base: int | None = None) -> Answer:
        wanted = SnapshotRequested(fragment, version, version - 1 if base is None else base)
        answer = self.fragments.snapshot(wanted)
        self.fragments.encode_taken()
        return self.answers.get(timeout=PATIENCE_S) if answer is None else answer

    def ready(self, version: int, *, fragment: int = 0, base: int | None = None) -> SnapshotReady:
        answer = self.snapshot(version, fragment=fragment, base=base)
        assert isinstance(answer, SnapshotReady), answer
        return answer

    def decoded(self, fragment: int = 0) -> np.ndarray:
        blocks = [FragmentBlocks(part.piece_sizes, self.codec) for part in self.manifest.fragments]
        start = sum(block.encoded_bytes for block in blocks[:fragment])
        out = np.zeros(blocks[fragment].values, np.float32)
        kernels.decode(blocks[fragment], self.contribution_area[start : start + blocks[fragment].encoded_bytes], out)
        return out


def one_value(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.full((1,), value, dtype=dtype))
    return model


def value(bench: Bench) -> float:
    return float(bench.model.w.detach())


def test_first_version_overwrites_and_places_the_learner() -> None:
    bench = Bench(one_value(7.0))
    assert not bench.fragments.is_placed
    assert bench.offer(0, 5, 2.0) == OfferApplied(0, 5, FragmentPosition(5, 0, 0, 0), 1.0, 0)
    assert value(bench) == 2.0
    assert bench.fragments.is_placed


def test_initial_state_is_the_model_in_fragment_order() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    bench = Bench(model, fragments=3)
    bench.fragments.write_initial_state()
    parts = [bench.fragments.vector(index).numpy() for index in range(3)]
    places = [bench.slots[index, : part.size] for index, part in enumerate(parts)]
    assert [place.tobytes() for place in places] == [part.tobytes() for part in parts]
    assert sorted(np.concatenate(places)) == sorted(
        np.concatenate([p.detach().cpu().numpy().ravel() for p in model.parameters()])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_is_the_slot_itself_where_the_model_holds_what_is_in_it(dtype: torch.dtype) -> None:
    bench = Bench(one_value(1.0, dtype))
    bench.slots[:] = 1.0
    applied = [bench.fragments.apply(VersionOffered(0, version, -1, slot=slot)) for version, slot in ((0, 2), (1, 1))]
    is_shared = dtype == torch.float32
    assert [answer.slot for answer in applied] == ([2, 1] if is_shared else [NO_SLOT, NO_SLOT])
    bench.slots[1] = 5.0
    assert float(bench.fragments.global_vectors()[0]) == (5.0 if is_shared else 1.0)
    again = bench.fragments.apply(VersionOffered(0, 1, -1, slot=0))
    assert again.slot == applied[1].slot, "a version that it has already is not taken"


def test_a_version_of_a_daemon_that_is_gone_is_base_in_memory_of_its_own() -> None:
    bench = Bench(one_value(1.0))
    bench.offer(0, 0, 1.0)
    bench.slots[2] = 3.0
    bench.fragments.take(VersionOffered(0, 1, -1, slot=2))
    bench.fragments.finish_reading()
    bench.slots[2] = np.nan
    assert bench.fragments.finish(0).slot == NO_SLOT
    assert float(bench.fragments.global_vectors()[0]) == 3.0 == value(bench)


def test_own_parameters_are_those_from_before_the_first_of_the_last_merges() -> None:
    bench = Bench(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), fragments=2)
    bench.offer(0, 3, 1.0, is_last=True)
    bench.offer(1, 0, 2.0)
    bench.step(0.5)
    assert [set(own.tolist()) for own in bench.fragments.own_vectors()] == [{1.5}, {2.5}], "nothing of its own before"
    bench.offer(1, 1, 7.0)
    ordinary = [own.tolist() for own in bench.fragments.own_vectors()]
    assert ordinary == [bench.fragments.vector(index).tolist() for index in range(2)], "as the model is"
    bench.offer(0, 4, 10.0, is_last=True)
    bench.step(0.25)
    bench.offer(1, 2, 20.0, is_last=True)
    assert [own.tolist() for own in bench.fragments.own_vectors()] == ordinary
    assert bench.fragments.vector(0).tolist() != ordinary[0], "the model itself went on"


def test_included_snapshot_carries_what_came_after_it() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0, steps=4)  # theta 8
    ready = bench.ready(1)
    assert ready.contribution.steps == 4
    assert ready.contribution.tokens == 40
    assert bench.decoded() == [2.0]  # base - theta, like a gradient
    assert ready.contribution.squared_norms == (4.0,)
    bench.step(-0.5, steps=1)  # theta 7.5
    applied = bench.offer(0, 1, 9.0, snapshot=ready.contribution.snapshot)
    assert value(bench) == 8.5  # 9 + (7.5 - 8)
    assert applied == OfferApplied(0, 1, FragmentPosition(1, 4, 4, 40), 1.0, 1)
    # The next contribution covers (4, ...] and begins with the half that was carried.
    bench.step(-1.0, steps=2)
    after = bench.ready(2).contribution
    assert (after.step_from, after.step_to, after.tokens, after.base_version) == (4, 7, 30, 1)
    assert bench.decoded() == [1.5]


ON_A_DEVICE = [
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="no CUDA device: snapshot and apply on a GPU are NOT tested"
        ),
    )
]


@pytest.mark.parametrize("device", ON_A_DEVICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_device_comes_to_the_bits_of_one_on_the_cpu(device: str, dtype: torch.dtype) -> None:
    """And stays where it lies: CUDA graphs keep addresses."""
    found = []
    for place in ("cpu", device):
        generator = torch.Generator(device="cpu").manual_seed(SEED)
        model = nn.Linear(33, 17, device="cpu").to(place, dtype)
        bench = Bench(model, fragments=2, codec=Codec.INT4)
        addresses = [one.data_ptr() for one in model.parameters()]
        starts = np.cumsum([0, *(part.size for part in bench.manifest.fragments)])
        size = starts[-1]
        whole = torch.randn(3, size, generator=generator, device="cpu").numpy()
        for index in range(2):
            bench.offer(index, 0, whole[0, starts[index] : starts[index + 1]])
        for version in (1, 2):
            bench.step(-0.25)
            for index in range(2):
                snapshot = bench.ready(version, fragment=index).contribution.snapshot
                part = whole[version, starts[index] : starts[index + 1]]
                bench.offer(index, version, part, snapshot=snapshot)
        assert [one.data_ptr() for one in model.parameters()] == addresses
        held = b"".join(one.detach().float().cpu().numpy().tobytes() for one in model.parameters())
        found.append((held, bench.contribution_area.tobytes()))
    assert found[0] == found[1]


def test_not_included_carries_half_of_what_was_done_since_the_base() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0, steps=4)
    ready = bench.ready(1)
    bench.step(-0.5, steps=1)
    applied = bench.offer(0, 1, 9.0)
    assert value(bench) == 7.75  # 9 + (7.5 - 10) / 2
    assert applied == OfferApplied(0, 1, FragmentPosition(1, 5, 0, 0), 0.5, 5)
    again = bench.ready(2).contribution
    assert (again.step_from, again.step_to, again.tokens) == (0, 5, 50)
    assert again.snapshot > ready.contribution.snapshot
    assert bench.decoded() == [1.25]


def test_jump_over_versions_from_the_last_included_snapshot() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0, steps=4)
    ready = bench.ready(1)
    bench.step(-1.0, steps=2)
    applied = bench.offer(0, 4, 3.0, snapshot=ready.contribution.snapshot)  # versions 1 to 3 were never seen
    assert value(bench) == 2.875  # 3 + (7 - 8) / 8
    assert applied.position == FragmentPosition(4, 4, 4, 40)


def test_long_absence_is_discounted() -> None:
    bench = Bench(one_value(), limit=8)
    bench.offer(0, 0, 10.0)
    bench.step(-4.0, steps=16)  # theta 6
    applied = bench.offer(0, 1, 2.0)
    assert value(bench) == 1.0  # 2 + 8/16 (6 - 10) / 2
    assert (applied.carry_factor, bench.fragments.discounted) == (0.25, 1)


def test_steps_that_are_not_worth_carrying_are_gone_from_its_account_too() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-4.0, steps=3)
    applied = bench.offer(0, 7, 2.0)  # seven versions without it: 2^-7 is less than CARRY_FACTOR_MIN
    assert value(bench) == 2.0
    # The next contribution begins here: what was given up must not be merged as if it had been carried.
    assert (applied.carried_steps, applied.position.included_step) == (0, 3)


def test_overwrite_keeps_nothing_of_the_own_steps() -> None:
    bench = Bench(one_value(), carry=CarryMode.OVERWRITE)
    bench.offer(0, 0, 10.0)
    bench.step(-2.0, steps=4)
    ready = bench.ready(1)
    bench.step(-0.5, steps=1)
    applied = bench.offer(0, 1, 9.0, snapshot=ready.contribution.snapshot)
    assert value(bench) == 9.0
    assert (applied.carried_steps, applied.position.included_step) == (0, 5)


def test_version_that_is_not_newer_changes_nothing() -> None:
    bench = Bench(one_value())
    bench.offer(0, 3, 10.0)
    bench.step(1.0)
    for old in (3, 2):
        assert bench.offer(0, old, -5.0).version == 3
    assert value(bench) == 11.0
    assert list(bench.fragments.global_vectors()[0]) == [10.0]


def test_same_round_asked_again_is_the_same_snapshot() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    first = bench.ready(1)
    bench.step(-2.0)
    assert bench.ready(1) == first
    assert bench.decoded() == [2.0]
    assert bench.fragments.unresolved() == (first.contribution.snapshot,)


def test_round_that_passed_without_it_gets_a_new_snapshot_against_the_old_base() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    first = bench.ready(1)
    bench.step(-2.0)
    second = bench.ready(2, base=0)
    assert second.contribution.snapshot == first.contribution.snapshot + 1
    assert second.contribution.step_to == 2
    assert bench.decoded() == [4.0]
    with pytest.raises(LearnerError, match=rf"includes snapshot {first.contribution.snapshot}.* holds 2"):
        bench.offer(0, 1, 9.0, snapshot=first.contribution.snapshot)


def test_apply_resolves_the_snapshot() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    number = bench.ready(1).contribution.snapshot
    bench.offer(0, 1, 9.0, snapshot=number)
    assert bench.fragments.unresolved() == (-1,)
    with pytest.raises(LearnerError, match="holds none"):
        bench.offer(0, 2, 9.0, snapshot=number + 1)


def test_offer_that_crossed_the_report_of_the_same_snapshot_is_carried_from_the_base() -> None:
    bench = Bench(one_value())
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    number = bench.ready(1).contribution.snapshot
    bench.step(-0.5)
    bench.offer(0, 1, 9.0, snapshot=number)  # 9 + (7.5 - 8)
    assert value(bench) == 8.5
    applied = bench.offer(0, 2, 4.0, snapshot=number)  # 4 + half of (8.5 - 9): version 2 left it out
    assert value(bench) == 3.75
    assert applied.position.base_version == 2
    assert applied.position.included_step == 1


def test_no_snapshot_against_another_base_or_without_steps() -> None:
    bench = Bench(one_value())
    bench.offer(0, 2, 10.0)
    assert bench.snapshot(3) == SnapshotDenied(0, 3, "no steps since the last inclusion")
    bench.step(1.0)
    denied = bench.snapshot(2)
    assert isinstance(denied, SnapshotDenied)
    assert denied.reason == "base is version 2, asked for one against 1"
    number = bench.ready(3).contribution.snapshot
    bench.offer(0, 3, 9.0, snapshot=number)
    assert isinstance(bench.snapshot(4), SnapshotDenied)  # all its steps are in version 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**101])
def test_values_that_can_not_be_merged_are_denied(bad: float) -> None:
    bench = Bench(one_value(), codec=Codec.INT4)
    bench.offer(0, 0, 10.0)
    bench.step(bad)
    denied = bench.snapshot(1)
    assert isinstance(denied, SnapshotDenied)
    assert "NaN, infinite or above" in denied.reason
    assert bench.snapshot(1) == denied


def test_encoded_bytes_are_the_codecs() -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(300, 40), nn.Linear(40, 130), nn.Linear(130, 70))
    for codec in Codec:
        bench = Bench(model, fragments=3, codec=codec)
        for index, part in enumerate(bench.manifest.fragments):
            bench.offer(index, 0, rng.standard_normal(part.size).astype(np.float32))
        bases = [base.numpy().copy() for base in bench.fragments.global_vectors()]
        with torch.no_grad():
            for parameter in model.parameters():
                change = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
                parameter += change.to(parameter.device)
        bench.fragments.step += 1
        start = 0
        for index, part in enumerate(bench.manifest.fragments):
            ready = bench.ready(1, fragment=index)
            blocks = FragmentBlocks(part.piece_sizes, codec)
            expected = np.zeros(blocks.encoded_bytes, np.uint8)
            norms = kernels.encode(blocks, bases[index] - bench.fragments.vector(index).numpy(), expected)
            assert bench.contribution_area[start : start + blocks.encoded_bytes].tobytes() == expected.tobytes()
            assert ready.contribution.squared_norms == tuple(norms)
            start += blocks.encoded_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_idle_low_precision_learner_contributes_exactly_zero(dtype: torch.dtype) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    bench = Bench(nn.Linear(70, 70).to(dtype), codec=Codec.FP32)
    size = bench.manifest.size
    bench.offer(0, 0, rng.standard_normal(size).astype(np.float32))
    for version in range(1, 6):
        bench.fragments.step += 1  # a step with a learning rate of zero
        ready = bench.ready(version)
        assert not bench.decoded().any()
        included = ready.contribution.snapshot if version % 2 else -1
        bench.offer(0, version, rng.standard_normal(size).astype(np.float32), snapshot=included)


def test_low_precision_base_is_what_is_held_and_carried_steps_stay_in() -> None:
    bench = Bench(one_value(dtype=torch.bfloat16))
    bench.offer(0, 0, 1.0009)  # bf16 holds 1.0
    assert list(bench.fragments.global_vectors()[0]) == [1.0]
    bench.step(-0.5)
    bench.offer(0, 1, 2.001)  # 2.001 + (0.5 - 1.0) / 2 = 1.751, held as 1.75; base 2.0
    assert value(bench) == 1.75
    assert list(bench.fragments.global_vectors()[0]) == [2.0]
    bench.ready(2)
    assert bench.decoded() == [0.25]


def test_apply_waits_while_the_encoder_reads_the_base() -> None:
    gate = threading.Event()
    bench = Bench(one_value(), before_ready=lambda: gate.wait(PATIENCE_S))
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    assert bench.fragments.snapshot(SnapshotRequested(0, 1, 0)) is None
    bench.fragments.encode_taken()
    assert bench.fragments.is_busy(0)
    assert bench.fragments.snapshot(SnapshotRequested(0, 1, 0)) is None  # asked again: the answer is on its way
    gate.set()
    assert isinstance(bench.answers.get(timeout=PATIENCE_S), SnapshotReady)
    assert not bench.fragments.is_busy(0)
    assert bench.answers.empty()


def test_a_snapshot_is_encoded_while_the_counters_go_to_the_disk_and_announced_after_both() -> None:
    encoded = threading.Event()
    seen: list[bool] = []

    def flush() -> None:
        seen.append(encoded.wait(PATIENCE_S) and bench.answers.empty())

    bench = Bench(one_value(), before_ready=flush)
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    encode = bench.fragments._encoded
    bench.fragments._encoded = lambda *taken: (encode(*taken), encoded.set())[0]  # type: ignore[method-assign]
    bench.fragments.snapshot(SnapshotRequested(0, 1, 0))
    assert bench.answers.empty()
    bench.fragments.encode_taken()
    assert isinstance(bench.answers.get(timeout=PATIENCE_S), SnapshotReady)
    assert seen == [True], "encoded while the disk was waited for, and nothing said before it was done"


def test_what_ends_the_encoder_is_raised_in_the_training_thread() -> None:
    def fail() -> None:
        raise ZeroDivisionError("planted")

    bench = Bench(one_value(), before_ready=fail)
    bench.offer(0, 0, 10.0)
    bench.step(-2.0)
    bench.fragments.snapshot(SnapshotRequested(0, 1, 0))
    bench.fragments.encode_taken()
    bench.fragments.close()
    with pytest.raises(LearnerError, match="planted"):
        bench.fragments.is_busy(0)


def test_memory_of_snapshots_is_used_again() -> None:
    bench = Bench(nn.Linear(40, 40), fragments=2)
    for index in range(2):
        bench.offer(index, 0, 1.0)
    for version in range(1, 30):
        bench.step(0.1)
        for index in range(2):
            number = bench.ready(version, fragment=index).contribution.snapshot
            bench.offer(index, version, 1.0, snapshot=number)
        bench.step(0.1)
        bench.ready(version + 2, base=version)  # a round that will pass without it
        bench.ready(version + 3, base=version)
    assert len(bench.fragments._rooms) + len(bench.fragments._snapshots) == 2


def test_memory_of_many_snapshots_at_once_is_given_back() -> None:
    count = 6
    bench = Bench(nn.Linear(40, 40), fragments=count)
    for index in range(count):
        bench.offer(index, 0, 1.0)
    bench.step(0.1)
    taken = [bench.ready(1, fragment=index).contribution.snapshot for index in range(count)]
    held = [weakref.ref(one.buffer) for one in bench.fragments._snapshots.values()]
    for index, number in enumerate(taken):
        bench.offer(index, 1, 1.0, snapshot=number)
    bench.fragments._worker.wait_for(lambda: None)  # the thread has let go of what it did last
    assert len([one for one in held if one() is not None]) == 2
