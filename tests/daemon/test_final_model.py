"""The end of a run: final.safetensors is whole or not there; a region stays as long as it is of use."""

import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_node.daemon.final_model import LINGER_MAX_S, LINGER_S, Linger, write_final
from diloco_node.errors import StorageError
from diloco_node.state_names import FINAL_NAME


def model(seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"b.weight": rng.standard_normal((30, 7)).astype(np.float32), "a": np.array([-0.0, 1e-45], np.float32)}


def test_what_was_written_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = model()
    write_final(tmp_path, tensors)
    again = load_file(tmp_path / FINAL_NAME)
    assert {name: (values.shape, values.tobytes()) for name, values in again.items()} == {
        name: (values.shape, values.tobytes()) for name, values in tensors.items()
    }
    assert [path.name for path in tmp_path.iterdir()] == [FINAL_NAME]


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    write_final(tmp_path / "one", model())
    write_final(tmp_path / "two", dict(reversed(model().items())))
    assert (tmp_path / "one" / FINAL_NAME).read_bytes() == (tmp_path / "two" / FINAL_NAME).read_bytes()


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"final\.safetensors can't be written"):
        write_final(tmp_path / "gone", model())


def test_a_disk_that_takes_no_more_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_final(tmp_path, model())
    before = (tmp_path / FINAL_NAME).read_bytes()
    large = {"a": np.zeros(100_000, np.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(StorageError):
            write_final(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [FINAL_NAME]
    assert (tmp_path / FINAL_NAME).read_bytes() == before


def test_everybody_is_at_the_end_and_the_learner_is_done() -> None:
    linger = Linger(10, now_s=0.0)
    assert linger.is_over([10, 12], learner_is_done=True, serves=0, now_s=0.0)


def test_the_learner_is_waited_for() -> None:
    linger = Linger(10, now_s=0.0)
    for second in range(0, int(LINGER_MAX_S), 10):
        assert not linger.is_over([10], learner_is_done=False, serves=0, now_s=float(second)), "it may be evaluating"
    assert linger.is_over([10], learner_is_done=True, serves=0, now_s=LINGER_MAX_S - 1)


def test_a_learner_that_never_leaves_does_not_keep_the_region() -> None:
    linger = Linger(10, now_s=0.0)
    assert linger.is_over([10], learner_is_done=False, serves=0, now_s=LINGER_MAX_S)


def test_a_region_that_lags_is_waited_for_as_long_as_it_gets_on() -> None:
    linger = Linger(10, now_s=0.0)
    now_s = 0.0
    for index in range(10):
        assert not linger.is_over([index, 10], learner_is_done=True, serves=0, now_s=now_s)
        now_s += LINGER_S - 1
    assert linger.is_over([10, 10], learner_is_done=True, serves=0, now_s=now_s)


def test_a_region_that_stands_still_is_left_alone() -> None:
    linger = Linger(10, now_s=0.0)
    assert not linger.is_over([9], learner_is_done=True, serves=0, now_s=0.0)
    assert not linger.is_over([9], learner_is_done=True, serves=0, now_s=LINGER_S - 0.1)
    assert linger.is_over([9], learner_is_done=True, serves=0, now_s=LINGER_S)


def test_a_long_transfer_is_progress() -> None:
    linger = Linger(10, now_s=0.0)
    for second in range(0, 600, 10):
        assert not linger.is_over([3], learner_is_done=True, serves=1, now_s=float(second))
    assert not linger.is_over([3], learner_is_done=True, serves=0, now_s=600.0)
    assert linger.is_over([3], learner_is_done=True, serves=0, now_s=600.0 + LINGER_S)


def test_nobody_keeps_a_region_for_ever() -> None:
    linger = Linger(10, now_s=100.0)
    assert not linger.is_over([3], learner_is_done=True, serves=1, now_s=100.0 + LINGER_MAX_S - 1)
    assert linger.is_over([3], learner_is_done=True, serves=1, now_s=100.0 + LINGER_MAX_S)


def test_entries_after_the_end_are_no_reason_to_stay() -> None:
    """Leaders change while regions go: who has left can't apply what came after."""
    linger = Linger(10, now_s=0.0)
    assert linger.is_over([10, 11], learner_is_done=True, serves=0, now_s=0.0)


def test_a_region_that_serves_waits_without_end_for_those_that_lag() -> None:
    linger = Linger(10, now_s=0.0, is_patient=True)
    for now_s in (0.0, LINGER_S, 2 * LINGER_MAX_S, 1e9):
        assert not linger.is_over([10, 9], learner_is_done=True, serves=0, now_s=now_s)
    assert linger.is_over([10, 10], learner_is_done=True, serves=0, now_s=1e9)
