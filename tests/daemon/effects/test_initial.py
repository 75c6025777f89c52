"""Theta_0 from a file: exactly this model, or a refusal that names the difference."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.daemon.effects.initial import read_initial
from diloco_node.errors import ConfigError

SPECS = [TensorSpec("a.weight", (30, 7)), TensorSpec("b.bias", (11,)), TensorSpec("c.weight", (64, 64))]
MANIFEST = build_manifest(SPECS, 3)


def model(seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in SPECS}


def test_every_value_lands_at_its_place(tmp_path: Path) -> None:
    tensors = model()
    save_file(tensors, tmp_path / "m.safetensors")
    thetas = read_initial(tmp_path / "m.safetensors", MANIFEST)
    for fragment, theta in zip(MANIFEST.fragments, thetas, strict=True):
        for piece in fragment.pieces:
            values = tensors[piece.name].ravel()[piece.value_start : piece.value_stop]
            assert theta[piece.offset : piece.offset + piece.size].tobytes() == values.tobytes()


def change(name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors = model()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (change("b.bias", None), "b.bias is not in the file"),
        (change("z", np.ones(3, np.float32)), "z is not in the run's model"),
        (change("b.bias", np.ones(12, np.float32)), r"b\.bias is F32 \[12\], expected F32 \[11\]"),
        (change("b.bias", np.ones(11, np.float64)), r"b\.bias is F64 \[11\], expected F32 \[11\]"),
        (change("b.bias", np.full(11, np.nan, np.float32)), "NaN"),
    ],
)
def test_another_model_is_refused_with_the_difference(tmp_path: Path, tensors, text: str) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=text):
        read_initial(tmp_path / "m.safetensors", MANIFEST)


def entry(shape: list[int], stop: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]}


def right_header() -> dict[str, object]:
    return {spec.name: entry(list(spec.shape), 4 * int(np.prod(spec.shape))) for spec in MANIFEST.tensors}


EMPTY_TENSORS = b"{%s}" % b",".join(
    b'"t%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}' % number for number in range(100_000)
)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (EMPTY_TENSORS, "there: 100000, in the run's model: 3"),
        (right_header() | {"z": entry([0], 0)}, "z is not in the run's model"),
        (right_header() | {"b.bias": entry([2**40], 2**42)}, r"b\.bias is F32 \[1099511627776\], expected"),
        (right_header() | {"b.bias": entry([11], 22, "F16")}, r"b\.bias is F16 \[11\], expected"),
        (right_header() | {"b.bias": 7}, r"b\.bias is None None, expected"),
        (right_header() | {"\x1b[2J" + "y" * 4000: entry([0], 0)}, r"tensor \\x1b\[2Jy{196} is not in the run's model"),
        (b"[]", "no object"),
        (b"[" * 1_000_000, "recursion"),
        (b"9" * 5000, "4300 digits"),
        (b"{" + b" " * (8 * 2**20), r"a header of 8388609 B, at most 8388608 B"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_a_header_says_is_refused_before_a_tensor_is_read(
    tmp_path: Path, header: dict[str, object] | bytes, text: str
) -> None:
    """No file here holds the data that its header names: reading that would be another error."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    with pytest.raises(ConfigError, match=text) as caught:
        read_initial(path, MANIFEST)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


def test_a_name_twice_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ConfigError, match="twice"):
        read_initial(path, MANIFEST)
    path.write_bytes(b"PK\x03\x04 not one")
    with pytest.raises(ConfigError, match="safetensors"):
        read_initial(path, MANIFEST)
    with pytest.raises(ConfigError, match="no safetensors file"):
        read_initial(tmp_path / "missing", MANIFEST)
