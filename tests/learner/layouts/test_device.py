"""A model on devices comes to the bits of one on the CPU, and its training thread never waits for them."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner import tensor_forms
from diloco_node.learner.layouts import device as device_module
from diloco_node.learner.layouts.capture import check_not_capturing
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.loss import LateLoss
from diloco_node.learner.model_watch import LOOKS_WAITED
from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
    Warned,
)
from tests.kit.device_life import FRAGMENTS, ON_THE_CPU, PLACES, RANKS, Life, Outcome, complaints
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.fakecuda import fake_device
from tests.kit.learner_kit import Toy, region_folder, session_of
from tests.kit.planted.device_faults import DEVICE_FAULTS, planted
from tests.kit.shard_ranks import Groups, states
from tests.kit.waiting import until

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not fake_device.is_installed(), reason="needs a device in software: make test-device"),
]
folder = pytest.fixture(region_folder)

BOUNDARIES = 1000
ROUNDS = 4
SHARDED = {
    2: ["fsdp", "fsdp-masters", "offload", "tp", "experts", "ddp"],
    4: ["fsdp", "hsdp", "fsdp-tp", "experts", "fsdp-experts"],
}
"""By number of ranks. The models of one rank, "whole" ones, are on the CPU."""

DAEMONS = 3


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


def test_an_optimizer_that_is_captured_can_not_count_its_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, step="auto"):
        toy.model(torch.ones(3, 6)).sum().backward()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(LearnerError, match="would miss its replays"):
            toy.optimizer.step()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


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


def test_a_thousand_boundaries_without_a_wait_while_daemons_die(folder: Path) -> None:
    toy = Toy()
    theta = versions = None
    applied = snapshots = boundary = 0
    diloco = None
    for life in range(DAEMONS):
        with FakeDaemon(folder, theta=theta, versions=versions) as daemon:
            if diloco is None:
                diloco = diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=0.0)
                fake_device.reset()
            daemon.wait_attached()
            answers = [0] * daemon.fragments
            while boundary < BOUNDARIES * (life + 1) // DAEMONS:
                with fake_device.no_waits():
                    toy.step(diloco, loss=torch.ones((), device="cuda"))
                boundary += 1
                time.sleep(0.001)
                _go_on(daemon, answers)
            applied += sum(isinstance(message, OfferApplied) for message in daemon.said)
            snapshots += sum(isinstance(message, SnapshotReady) for message in daemon.said)
            theta, versions = daemon.theta, daemon.versions
    assert diloco is not None
    assert fake_device.own_waits() == []
    assert min(applied, snapshots) > BOUNDARIES // 20, "it was asked for something all the time"
    diloco.close()


def _go_on(daemon: FakeDaemon, answers: list[int]) -> None:
    """Ask for a snapshot of each fragment; of what has come make the next version."""
    for index in range(daemon.fragments):
        ready = [m for m in daemon.said if isinstance(m, SnapshotReady) and m.contribution.fragment == index]
        if len(ready) > answers[index]:
            answers[index] = len(ready)
            contribution = ready[-1].contribution
            if contribution.base_version == daemon.versions[index]:
                daemon.commit(index, daemon.theta[index] - 0.125, contribution.snapshot)
        daemon.want(index)


@pytest.mark.parametrize("is_before_the_optimizer", [True, False])
def test_a_load_by_data_is_in_no_snapshot_though_the_look_at_it_comes_late(
    folder: Path, is_before_the_optimizer: bool
) -> None:
    toy = Toy()
    texts: list[str] = []

    def train(diloco: diloco_node.Diloco, daemon: FakeDaemon) -> None:
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        daemon.want(1)
        until(lambda: session_of(diloco).link.waiting_commands)
        for parameter in toy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps = [toy.optimizer.step, lambda: [parameter.data.mul_(2.0) for parameter in toy.model.parameters()]]
        for step in reversed(steps) if is_before_the_optimizer else steps:
            step()
        with fake_device.no_waits():
            diloco.step(tokens=7)
        texts.append(daemon.wait_for(SnapshotDenied).reason)
        toy.step(diloco)

    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        daemon.want(0)
        with pytest.raises(LearnerError, match="changed between two steps by something else"), diloco:
            train(diloco, daemon)
        assert "changed between two steps by something else" in texts[0]
        assert sum(isinstance(message, SnapshotReady) for message in daemon.said) == 1


def test_a_write_by_data_is_told_on_each_device(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2).to("cuda:1"), nn.Linear(2, 2).to("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, foreach=False)
    for name, place in (("1.weight", 1), ("2.weight", 2)):
        with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
            for step in range(6):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                diloco.step(tokens=7)
                torch.cuda.synchronize(0)
                torch.cuda.synchronize(1)
                if step == 2:
                    model[place].weight.data.add_(0.5)  # type: ignore[operator, union-attr]
            assert [name for message in daemon.said if isinstance(message, Warned) and f"{name!r} was" in message.text]


def test_a_module_to_evaluate_may_lie_on_several_devices(folder: Path) -> None:
    toy = Toy()
    outside = deepcopy(toy.model)
    outside[-1].to("cuda:1")
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        daemon.commit(0, daemon.theta[0] + 1, -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        outside.load_state_dict(diloco.global_state_dict())
        diloco.checkpoint()
        toy.step(diloco)
        assert not [message for message in daemon.said if isinstance(message, Warned) and "outside" in message.text]


def test_versions_on_their_way_are_no_copies_that_a_search_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read them while another stream writes them."""
    toy = Toy()
    is_sending, go, record_event = threading.Event(), threading.Event(), device_module.record_event

    def record_late(device: torch.device) -> Any:
        event = record_event(device)
        if threading.current_thread().name == "diloco-encoder" and not go.is_set():
            is_sending.set()
            assert go.wait(60.0)
        return event

    with FakeDaemon(folder, fragments=1) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        fragments = session_of(diloco).fragments
        for applied in range(2, 4):  # so both rooms have held all of the largest
            daemon.commit(0, daemon.theta[0] + 0.01, NO_SNAPSHOT)
            toy.steps_until(diloco, daemon, OfferApplied, applied)
        toy.step(diloco)
        diloco.checkpoint()
        daemon.commit(0, daemon.theta[0] + 0.01, NO_SNAPSHOT)
        until(lambda: session_of(diloco).link.waiting_commands)
        monkeypatch.setattr(device_module, "record_event", record_late)
        toy.step(diloco)
        assert is_sending.wait(60.0)
        diloco.checkpoint()
        go.set()
        fragments._worker.drain()
        assert not fake_device.hazards()


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


def test_an_optimizer_that_undoes_versions_is_found_without_a_wait(folder: Path) -> None:
    toy = Toy()
    masters = [parameter.detach().clone() for parameter in toy.model.parameters()]
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        answers = [0] * daemon.fragments
        fake_device.reset()

        def undo() -> None:
            with torch.no_grad():
                for parameter, master in zip(toy.model.parameters(), masters, strict=True):
                    parameter.copy_(master.sub_(0.01))

        def train() -> None:
            for _ in range(BOUNDARIES):
                undo()
                with fake_device.no_waits():
                    diloco.step(tokens=7)
                time.sleep(0.001)
                _go_on(daemon, answers)

        with pytest.raises(LearnerError, match="reverted"):
            train()
        assert fake_device.own_waits() == []


def test_a_loop_that_writes_to_its_weights_at_each_step_is_soon_not_waited_for(folder: Path) -> None:
    toy = Toy()

    def scale(factor: float) -> None:
        with torch.no_grad():
            for parameter in toy.model.parameters():
                parameter.mul_(factor)

    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        for step in range(4 * LOOKS_WAITED):
            with fake_device.no_waits() if step > LOOKS_WAITED else nullcontext():
                scale(0.999)
                toy.step(diloco)
        scale(2.0)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            _steps_that_arrive(toy, diloco)


def _steps_that_arrive(toy: Toy, diloco: diloco_node.Diloco) -> None:
    for _ in range(3):
        toy.step(diloco)
        torch.cuda.synchronize()


class NoDoubles(TorchDispatchMode):
    """A device that has no float64, as some of Intel and Apple."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not (isinstance(result, torch.Tensor) and result.is_cuda and result.dtype == torch.float64), func
        return result


def test_a_device_without_float64_may_train(folder: Path) -> None:
    toy = Toy()
    toy.model.append(nn.Linear(2, 2).requires_grad_(False))
    toy.model.append(nn.BatchNorm1d(2))
    with NoDoubles(), FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.ones((), device="cuda"))
        daemon.commit(0, daemon.theta[0] + 1, -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        diloco.global_state_dict()
        diloco.checkpoint()


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
