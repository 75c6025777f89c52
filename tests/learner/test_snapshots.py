"""Snapshots of fragments: which are given, what is in them, and how long they and base are held."""

import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.wire.learner_link import SnapshotDenied, SnapshotReady, SnapshotRequested
from tests.kit.fragments_bench import PATIENCE_S, Bench, one_value

SEED = 499


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
