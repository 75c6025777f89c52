"""A model on devices comes to the bits of one on the CPU, and its training thread never waits for them."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_node.errors import LearnerError
from diloco_node.learner import tensor_forms
from diloco_node.learner.layouts import device as device_module
from diloco_node.learner.layouts.capture import check_not_capturing
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.loss import LateLoss
from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    SnapshotRequested,
    VersionOffered,
)
from tests.kit.device_life import FRAGMENTS, ON_THE_CPU, PLACES, RANKS, Life, Outcome, complaints
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.fakecuda import fake_device
from tests.kit.planted.device_faults import DEVICE_FAULTS, planted
from tests.kit.shard_ranks import Groups, states

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not fake_device.is_installed(), reason="needs a device in software: make test-device"),
]

ROUNDS = 4
SHARDED = {
    2: ["fsdp", "fsdp-masters", "offload", "tp", "experts", "ddp"],
    4: ["fsdp", "hsdp", "fsdp-tp", "experts", "fsdp-experts"],
}
"""By number of ranks. The models of one rank, "whole" ones, are on the CPU."""


@lru_cache
def on_the_cpu(dtype: torch.dtype, seed: int) -> Outcome:
    return Life(ON_THE_CPU, dtype=dtype, seed=seed).run()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_cpu_under_every_schedule(dtype: torch.dtype, place: str) -> None:
    assert not complaints(LearnerFragments, dtype=dtype, place=place, expected=on_the_cpu)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_device_encodes_is_what_the_host_encodes(dtype: torch.dtype, place: str) -> None:
    assert not complaints(LearnerFragments, dtype=dtype, place=place, expected=on_the_cpu, encode="device")
    assert fake_device.operators().get("amax.out", 0) >= FRAGMENTS, "codes were packed there"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_without_streams_comes_to_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's (MPS): values go the host's way, and are waited for."""
    monkeypatch.setattr(device_module, "WITHOUT_STREAMS", ("cpu", "cuda"))
    monkeypatch.setattr(fake_device, "no_waits", nullcontext)
    life = Life(PLACES["one device"], dtype=dtype)
    assert life.fragments._lane is None
    assert life.run() == on_the_cpu(dtype, 1)
    late = LateLoss()
    late.offer(torch.tensor(3.5, device="cuda"))
    assert late.newest() == 3.5


def test_a_device_without_memory_leaves_the_encoding_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode_rows, calls = device_module.encode_rows, itertools.count()

    def refuse(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return encode_rows(*arguments)

    monkeypatch.setattr(device_module, "encode_rows", refuse)
    life = Life(PLACES["two devices"], encode="device")
    assert life.run() == on_the_cpu(torch.float32, 1)
    assert next(calls) == 4, "it is not asked again"
    assert caplog.text.count("the host encodes from now on") == 1


def test_a_device_without_memory_for_fragments_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*shape: Any, device: Any = None, **options: Any) -> Any:
        if torch.device(device or "cpu").type == "cuda":
            raise torch.OutOfMemoryError("out of memory")
        return empty(*shape, device=device, **options)

    monkeypatch.setattr(device_module.torch, "empty", refuse)
    with pytest.raises(LearnerError, match=r"cuda:0 has no 0 MiB left .*more \[rounds\] fragments"):
        Life(PLACES["one device"])


def test_devices_of_other_makers_have_what_the_lane_calls() -> None:
    """It names no maker: what it takes from `torch.cuda` and its streams and events, `torch.xpu` has."""
    for module in (torch.cuda, torch.xpu):
        assert {"Event", "Stream", "current_stream", "default_generators", "is_initialized", "stream"} <= set(
            dir(module)
        )
        assert {"query", "record", "synchronize"} <= set(dir(module.Event))
        assert "wait_event" in dir(module.Stream)


def test_a_boundary_inside_of_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(PLACES["one device"])
    life.fragments.take(VersionOffered(0, 0, NO_SNAPSHOT))
    life.fragments._worker.drain()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LearnerError, match="inside of a CUDA graph's capture: call step\\(\\) after each replay"):
        life.fragments.finish(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    life.close()


def test_a_graph_of_another_maker_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(LearnerError, match="inside of a CUDA graph's capture"):
        check_not_capturing("")


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_come_to_the_bits_of_one_on_the_cpu(ranks: str) -> None:
    assert not complaints(LearnerFragments, holdings=RANKS[ranks], expected=on_the_cpu)


@pytest.mark.parametrize("name", DEVICE_FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    """Each drops one wait, one order or one buffer of the lane."""
    fault = DEVICE_FAULTS[name]
    found = complaints(
        planted(fault), dtype=fault.dtype, seeds=(1, 2, 3), expected=on_the_cpu, stop_at=1, encode=fault.encode
    )
    fake_device.reset()
    print(f"{name}: {found}")
    assert found


def test_a_device_holds_six_fragments_at_most() -> None:
    """At P = 24 that is one byte for each parameter."""
    life = Life(PLACES["one device"])
    lane = life.fragments._lane
    assert lane is not None
    life.run_steps()
    life._hear()
    rooms = [*lane._down, *lane._up]
    largest = max(fragment.size for fragment in life.manifest.fragments)
    assert sum(values.nbytes for room in rooms for values in room.staging.values()) == 6 * largest * 4
    life.close()


def test_more_orders_than_rooms_wait_for_a_later_boundary() -> None:
    life = Life(PLACES["one device"])
    request, offer = SnapshotRequested(0, 1, 0), VersionOffered(0, 1, NO_SNAPSHOT)
    assert [life.fragments.has_room(request, ahead=count) for count in range(3)] == [True, True, False]
    assert [life.fragments.has_room(offer, ahead=count) for count in range(3)] == [True, True, False]
    assert Life(ON_THE_CPU).fragments.has_room(offer, ahead=FRAGMENTS)
    life.close()


def test_a_version_is_there_when_the_worker_has_sent_it() -> None:
    life = Life(PLACES["one device"])
    go = threading.Event()
    life.fragments._worker.put(lambda: assert_true(go.wait(60.0)))
    life.fragments.take(VersionOffered(0, 0, NO_SNAPSHOT))
    assert life.fragments.arrived() == ()
    go.set()
    life.fragments._worker.drain()
    assert life.fragments.arrived() == (0,)
    life.close()


def test_a_new_daemon_may_write_when_no_place_is_read_any_more() -> None:
    life = Life(PLACES["one device"])
    go = threading.Event()
    life.fragments._worker.put(lambda: assert_true(go.wait(60.0)))
    life.area[:] = 2.0
    for index in range(2):
        life.fragments.take(VersionOffered(index, 0, NO_SNAPSHOT))
    reading = threading.Thread(target=life.fragments.finish_reading)
    reading.start()
    reading.join(0.05)
    assert reading.is_alive()
    go.set()
    reading.join(60.0)
    life.area[:] = float("nan")
    life.fragments.finish(0)
    assert set(life.fragments.vector(0).tolist()) == {2.0}
    life.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, groups: Groups) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return states(1, ["whole", "whole-masters"], folder, rounds=ROUNDS, groups=groups)


@pytest.mark.parametrize("count", SHARDED)
def test_ranks_that_hold_parts_of_a_model_come_to_the_bits_of_one_on_the_cpu(
    count: int, whole: dict[str, Any], groups: Groups, tmp_path: Path
) -> None:
    """FSDP2, tensor parallelism, experts and two-dimensional meshes, on devices of as many processes."""
    for layout, outcome in states(count, SHARDED[count], tmp_path, rounds=ROUNDS, groups=groups).items():
        expected = whole["whole-masters" if layout.endswith("masters") else "whole"]
        assert outcome == expected, layout
        assert expected["first"] != expected["last"]


def test_ranks_on_devices_go_on_with_their_moments_cut_in_another_way(groups: Groups, tmp_path: Path) -> None:
    kept: dict[str, str] = {}
    theta = versions = None
    with MemoryStore(tmp_path / "memory.sock"), groups.take(2) as ranks:
        for layout in ("fsdp", "ddp", "fsdp-masters", "fsdp"):
            with FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon:
                ranks.attach(layout, tmp_path, optimizer=True)
                if kept:
                    assert ranks.moments() == kept, layout
                ranks.merged(daemon, 2, applied=2)
                assert ranks.moments() != kept
                kept = ranks.moments()
                ranks.ask(do="close")
                theta, versions = daemon.theta, daemon.versions


def assert_true(value: bool) -> None:
    assert value


def test_slices_on_a_device_are_laid_out_once_and_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out, lay_out = [], tensor_forms._slices
    monkeypatch.setattr(tensor_forms, "_slices", lambda shards: laid_out.append(1) or lay_out(shards))
    tensors = [torch.ones(1000, 1000), torch.ones(3)]
    reader = tensor_forms.SliceReader(tensors)
    for factor in (1.0, 2.0):
        (values,) = reader.read().values()
        assert values.tolist() == [factor] * tensor_forms.SLICE_VALUES + [1.0] * 3
        tensors[0].mul_(2.0)
    assert len(laid_out) == 1
    torch.cuda.synchronize()
    before = fake_device.counts()["device_bytes"]
    tensors[0].data = torch.zeros(2, 2)
    torch.cuda.synchronize()
    assert fake_device.counts()["device_bytes"] < before - 3_000_000
    (values,) = reader.read().values()
    assert values.tolist() == [0.0] * 4 + [1.0] * 3


def test_fsdp2_gathers_after_what_was_applied() -> None:
    """A loop that told FSDP2 to wait for its optimizer alone (`set_post_optim_event`) waits for the version, too."""
    life = Life(PLACES["one device"])
    lane = life.fragments._lane
    assert lane is not None

    class Context:
        post_optim_event: object = None

    class Sharded:
        context = Context()

        def _get_fsdp_state(self) -> Sharded:
            return self

        @property
        def _state_ctx(self) -> Context:
            return self.context

        def set_post_optim_event(self, event: object) -> None:
            self.context.post_optim_event = event

    sharded = Sharded()
    lane._sharded.append(sharded)
    life.run()
    assert sharded.context.post_optim_event is None, "who has told nothing waits for the whole stream"
    life = Life(PLACES["one device"])
    assert life.fragments._lane is not None
    life.fragments._lane._sharded.append(sharded)
    sharded.context.post_optim_event = told = torch.cuda.Event()
    life.run()
    assert sharded.context.post_optim_event is not told
