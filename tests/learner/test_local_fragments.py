"""Hand numbers: two fragments of one value each where not said otherwise, so that a person can follow."""

import numpy as np
import pytest
import torch
from torch import nn

from diloco_node.core.types import CarryMode, Codec, FragmentPosition
from diloco_node.wire.learner_link import (
    NO_SLOT,
    UNATTACHED,
    OfferApplied,
    VersionOffered,
)
from tests.kit.fragments_bench import Bench, one_value, value

SEED = 499
PATIENCE_S = 180.0


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


def test_own_parameters_are_those_of_the_model_again_when_the_run_goes_on_after_its_last_merges() -> None:
    bench = Bench(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), fragments=2)
    bench.offer(0, 0, 1.0)
    bench.offer(1, 0, 2.0)
    bench.offer(1, 1, 3.0, is_last=True)
    bench.offer(0, 1, 4.0)
    assert [set(own.tolist()) for own in bench.fragments.own_vectors()] == [{1.0}, {2.0}], "a round open before the end"
    bench.offer(1, 2, 5.0)
    assert [set(own.tolist()) for own in bench.fragments.own_vectors()] == [{4.0}, {5.0}]


def test_own_parameters_stay_when_the_final_versions_are_written_over_the_model_at_the_end() -> None:
    """What `leaving` does with the run's last versions: positions are unattached, the versions are no merges."""
    bench = Bench(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), fragments=2)
    bench.offer(0, 0, 1.0)
    bench.offer(1, 0, 2.0)
    bench.offer(0, 1, 3.0, is_last=True)
    bench.offer(1, 1, 4.0, is_last=True)
    for index, final in enumerate((3.0, 4.0)):
        bench.fragments.positions[index] = UNATTACHED
        bench.offer(index, 1, final)
    assert [set(own.tolist()) for own in bench.fragments.own_vectors()] == [{1.0}, {2.0}]


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
    assert applied.carry_factor == 0.25


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
