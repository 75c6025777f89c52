"""learner/nested.py: what a loop wants kept comes back with its types, through JSON and safetensors."""

import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.errors import LearnerError
from diloco_node.learner.checkpoint import CheckpointWriter, TrainingProgress
from diloco_node.learner.nested import DEPTH_MAX, flatten, unflatten
from tests.kit.learner_kit import read_newest

keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
        st.sampled_from(["$", "v", "tensor"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "v", "a"]), inner, max_size=3),
        st.sets(keys, max_size=4),
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    document = json.loads(json.dumps(flatten("x", value, tensors), allow_nan=False))
    return unflatten(document, tensors)


def shape(value: Any) -> Any:
    """The value with the types of all its parts, for True == 1."""
    if isinstance(value, dict):
        return sorted((repr(key), shape(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), [shape(part) for part in value]
    return type(value), value


@given(values)
def test_a_nested_value_comes_back_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert shape(found) == shape(value)


def test_tensors_arrays_and_numbers_of_numpy_come_back() -> None:
    value = {
        "a.b": torch.arange(3),
        "a": {"b": torch.ones(2, dtype=torch.bfloat16)},
        "array": np.arange(4, dtype=np.uint8).reshape(2, 2),
        "scalars": (np.float32(0.1), np.int64(2**40), np.bool_(True)),
        "odd": [math.inf, -math.inf, bytearray(b"x")],
        "nan": math.nan,
        "python": random.Random(3).getstate(),
    }
    found = there_and_back(value)
    assert torch.equal(found["a.b"], value["a.b"])
    assert torch.equal(found["a"]["b"], value["a"]["b"])
    assert found["array"].dtype == np.uint8
    assert found["array"].tolist() == [[0, 1], [2, 3]]
    assert found["scalars"] == value["scalars"]
    assert [type(one) for one in found["scalars"]] == [np.float32, np.int64, np.bool_]
    assert found["odd"] == [math.inf, -math.inf, b"x"]
    assert math.isnan(found["nan"])
    random.Random().setstate(found["python"])


def test_other_mappings_come_back_as_dictionaries() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [object()]}, r"x\.a\.0 can't be kept in a checkpoint: it is a object"),
        (np.array(["text"]), "x can't be kept"),
        (1j, "it is a complex"),
        (
            {"a": torch.ones(2, 2, device="cpu").to_sparse()},
            r"x\.a can't be kept in a checkpoint: it is a torch.sparse_coo tensor",
        ),
        (torch.ones(2, device="meta"), r"x can't be kept in a checkpoint: it is a tensor without values"),
    ],
)
def test_what_can_not_be_kept_is_named(value: Any, what: str) -> None:
    with pytest.raises(LearnerError, match=what):
        flatten("x", value, {})


def test_what_never_ends_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(LearnerError, match=f"nested more than {DEPTH_MAX} deep"):
        flatten("x", endless, {})


@pytest.mark.parametrize("document", [{"$": "unknown", "v": 1}, {"$": "tensor", "v": "none"}, {"$": "tuple"}])
def test_a_document_of_somebody_else_is_refused(document: Any) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        unflatten(document, {})


class Loader:
    """A data loader with a state as torchdata's: nested, with tensors, and not all finite."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["workers"]


def test_a_checkpoint_on_disk_has_it(tmp_path: Path) -> None:
    kept = Loader({0: (torch.tensor([math.nan, 1.0]), b"\0\xff"), 1: None})
    progress = TrainingProgress(manifest_digest="m", incarnation=1, global_step=3, step=3, tokens=9)
    writer = CheckpointWriter(tmp_path)
    writer.save(progress, None, {"loader": kept}, is_waiting=True)
    kept.state[0][0].zero_()  # goes on meanwhile
    writer.wait()
    found = read_newest(tmp_path, "m")
    assert found is not None
    fresh = Loader(None)
    found.restore(None, {"loader": fresh}, rng=False)
    assert fresh.state[0][1] == b"\0\xff"
    assert fresh.state[0][0].tolist()[1] == 1.0
    assert fresh.state[1] is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_and_arrays_come_back_from_the_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[1 + 2j, -3j], [0.5, math.inf]], dtype=dtype, device="cpu")
    loader = Loader({"tensor": values.conj(), "array": values.numpy()})
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("m", 1, 3, 3, 9), None, {"loader": loader}, is_waiting=True)
    writer.wait()
    found = read_newest(tmp_path, "m")
    assert found is not None
    fresh = Loader(None)
    found.restore(None, {"loader": fresh}, rng=False)
    assert torch.equal(fresh.state["tensor"], values.conj().resolve_conj())
    assert fresh.state["tensor"].dtype == dtype
    assert np.array_equal(fresh.state["array"], values.numpy())


class Averages:
    """Averages as diffusers has them: a load takes the tensors that it is given."""

    def __init__(self, *values: torch.Tensor) -> None:
        self.shadow_params = [*values]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow_params = state["shadow_params"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_come_back_on_the_device_that_the_script_has_them_on(tmp_path: Path) -> None:
    values = torch.ones(3, device="cuda"), torch.ones(2, device="cpu"), torch.ones(2, dtype=torch.int64, device="cuda")
    old, new = Averages(*values), Averages(*(torch.zeros_like(value) for value in values))
    writer = CheckpointWriter(tmp_path)
    writer.save(TrainingProgress("model", 1, 1, 1, 1), None, {"average": old}, is_waiting=True)
    writer.wait()
    checkpoint = read_newest(tmp_path, "model")
    assert checkpoint is not None
    checkpoint.restore(None, {"average": new}, rng=False)
    assert [value.device.type for value in new.shadow_params] == ["cuda", "cpu", "cuda"]
    new.shadow_params[0].lerp_(torch.zeros(3, device="cuda"), 0.5)
    assert [value.tolist() for value in new.shadow_params] == [[0.5] * 3, [1.0] * 2, [1] * 2]
