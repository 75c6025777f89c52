"""Theta_0 from files: exactly this model, or a refusal that names the difference and what to do."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from safetensors.torch import save_model

from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.daemon.effects.initial_files import check_initial, read_initial
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
        (right_header() | {"b.bias": entry([11], 11, "F8_E4M3")}, r"b\.bias is F8_E4M3 \[11\], expected"),
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


# ---- saved models of Hugging Face ------------------------------------------------------------------------------------

TIED = build_manifest([TensorSpec("model.embed_tokens.weight", (16, 4)), TensorSpec("model.norm.weight", (4,))], 2)


def values_of(manifest, thetas) -> dict[str, np.ndarray]:
    """The tensors that were put into fragments."""
    values = {spec.name: np.empty(spec.shape, np.float32) for spec in manifest.tensors}
    for fragment, theta in zip(manifest.fragments, thetas, strict=True):
        for piece in fragment.pieces:
            flat = values[piece.name].reshape(-1)
            flat[piece.value_start : piece.value_stop] = theta[piece.offset : piece.offset + piece.size]
    return values


def shard(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Two shards and their index, as `save_pretrained` writes them."""
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (number > 0)}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    (folder / "config.json").write_text("{}")
    return index


@pytest.mark.parametrize("is_folder", [False, True])
def test_shards_are_read_from_their_index_or_their_folder(tmp_path: Path, is_folder: bool) -> None:
    index = shard(tmp_path, model())
    path = tmp_path if is_folder else index
    check_initial(path)
    values = values_of(MANIFEST, read_initial(path, MANIFEST))
    assert all(values[name].tobytes() == tensor.tobytes() for name, tensor in model().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(tensor).to(dtype) for name, tensor in model().items()}
    save_torch(tensors, tmp_path / "model.safetensors")
    values = values_of(MANIFEST, read_initial(tmp_path, MANIFEST))
    assert all(values[name].tobytes() == tensor.float().numpy().tobytes() for name, tensor in tensors.items())


def tied_model() -> torch.nn.Module:
    net = torch.nn.Module()
    net.lm_head = torch.nn.Linear(4, 16, bias=False)
    net.model = torch.nn.Module()
    net.model.embed_tokens, net.model.norm = torch.nn.Embedding(16, 4), torch.nn.LayerNorm(4, bias=False)
    net.lm_head.weight = net.model.embed_tokens.weight
    return net


def write_head_twice(folder: Path, net: torch.nn.Module) -> None:
    save_torch({name: value.clone() for name, value in net.state_dict().items()}, folder / "model.safetensors")


def write_under_the_heads_name(folder: Path, net: torch.nn.Module) -> None:
    save_model(net, str(folder / "model.safetensors"))


def write_once(folder: Path, net: torch.nn.Module) -> None:
    state = {name: value for name, value in net.state_dict().items() if name != "lm_head.weight"}
    save_torch(state, folder / "model.safetensors")


@pytest.mark.parametrize("write", [write_head_twice, write_under_the_heads_name, write_once])
def test_a_tied_head_is_one_tensor_however_it_was_written(
    tmp_path: Path, write: Callable[[Path, torch.nn.Module], None]
) -> None:
    net = tied_model()
    write(tmp_path, net)
    values = values_of(TIED, read_initial(tmp_path, TIED))
    assert values["model.embed_tokens.weight"].tobytes() == net.lm_head.weight.detach().numpy().tobytes()


def test_a_head_that_is_not_tied_there_is_refused(tmp_path: Path) -> None:
    net = tied_model()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["lm_head.weight"] += 1
    save_torch(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not in the run's model"):
        read_initial(tmp_path, TIED)


@pytest.mark.parametrize("prefix", ["transformer.", "model.inner."])
def test_a_prefix_of_all_names_does_not_count(tmp_path: Path, prefix: str) -> None:
    """GPT-2's files lack `transformer.`, and a module of Lightning has its model in an attribute."""
    inner = build_manifest([TensorSpec(prefix + spec.name, spec.shape) for spec in SPECS], 3)
    masks = {"a.attn.bias": np.ones((1, 1, 4, 4), np.float32), "a.rotary.inv_freq": np.ones(2, np.float32)}
    save_file(model() | masks, tmp_path / "short.safetensors")
    save_file({prefix + name: tensor for name, tensor in model().items()}, tmp_path / "long.safetensors")
    for path, manifest in ((tmp_path / "short.safetensors", inner), (tmp_path / "long.safetensors", MANIFEST)):
        values = values_of(manifest, read_initial(path, manifest))
        assert [value.tobytes() for value in values.values()] == [tensor.tobytes() for tensor in model().values()]


def test_adapters_are_read_under_the_names_of_pefts_file(tmp_path: Path) -> None:
    names = {
        "base_model.model.q_proj.lora_A.default.weight": "base_model.model.q_proj.lora_A.weight",
        "base_model.model.q_proj.lora_B.default.weight": "base_model.model.q_proj.lora_B.weight",
        "base_model.model.lm_head.modules_to_save.default.weight": "base_model.model.lm_head.weight",
    }
    manifest = build_manifest([TensorSpec(name, (4 + at, 6)) for at, name in enumerate(names)], 2)
    rng = np.random.default_rng(3)
    values = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in manifest.tensors}
    save_file({names[name]: value for name, value in values.items()}, tmp_path / "adapter_model.safetensors")
    found = values_of(manifest, read_initial(tmp_path, manifest))
    assert all(np.array_equal(found[name], value) for name, value in values.items())
    save_file(
        {name: value for name, value in values.items() if "lora_A" in name}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"is not in the file"):
        read_initial(tmp_path, manifest)


def test_a_larger_model_of_the_same_names_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, model() | {"d.weight": np.ones((5, 5), np.float32)})
    with pytest.raises(ConfigError, match=r"d\.weight is not in the run's model.*If the script freezes it"):
        read_initial(tmp_path, MANIFEST)


def lose_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def mix_models(folder: Path) -> None:
    save_file({"z": np.ones(2, np.float32)}, folder / "model-00002-of-00002.safetensors")


def cut_a_shard(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_a_header(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:60])


def empty_a_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def leave_a_pointer(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid ...")


def put_another_model_beside(folder: Path) -> None:
    save_file(model(), folder / "model.safetensors")


def lead_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "../x.safetensors"}}')


def spoil_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def hold_pickles_alone(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lose_a_shard, r"1 of the 2 shards .* missing, such as model-00002-of-00002\.safetensors: copy all"),
        (lose_the_index, r"2 shards, but no \*\.safetensors\.index\.json: copy that too"),
        (mix_models, r"b\.bias is not in model-00002.*as the index says"),
        (cut_a_shard, r"model-00001-of-00002\.safetensors is cut off: it has \d+ B"),
        (cut_a_header, "no safetensors file"),
        (empty_a_shard, "no safetensors file"),
        (leave_a_pointer, "pointer of Git LFS.*git lfs pull"),
        (put_another_model_beside, "several models: name the file that counts"),
        (lead_elsewhere, r"leads to another folder, \.\./x\.safetensors"),
        (spoil_the_index, "weight_map is missing"),
        (
            hold_pickles_alone,
            r"no safetensors file; pytorch_model\.bin is not read: save the model with save_pretrained",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_before_any_process_starts(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    shard(tmp_path, model())
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=text):
        check_initial(tmp_path)


def test_the_hubs_cache_is_read_through_its_links_and_its_root_is_explained(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shard(blobs, model())
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    values = values_of(MANIFEST, read_initial(snapshot, MANIFEST))
    assert all(values[name].tobytes() == tensor.tobytes() for name, tensor in model().items())
    with pytest.raises(ConfigError, match="is the hub's cache of a model: give one of the folders in its snapshots"):
        check_initial(tmp_path)
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()  # as the cache is emptied
    with pytest.raises(ConfigError, match=r"1 of the 2 shards .* missing, such as model-00002-of-00002\.safetensors"):
        check_initial(snapshot)


def test_a_file_of_zeros_begins_no_run(tmp_path: Path) -> None:
    """As a download that made room first leaves it."""
    path = tmp_path / "model.safetensors"
    save_file({name: np.zeros_like(tensor) for name, tensor in model().items()}, path)
    with pytest.raises(ConfigError, match="all values are zero"):
        read_initial(tmp_path, MANIFEST)
    save_file(change("b.bias", np.zeros(11, np.float32)), path)
    assert len(read_initial(tmp_path, MANIFEST)) == len(MANIFEST.fragments)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="it is no plain file"):
        check_initial(tmp_path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GGUF\x03" + bytes(20), "is GGUF"),
        (b"\x80\x02ccopy_reg" + bytes(20), "is a pickle"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "is HDF5"),
        (b'{"architectures": ["X"]}', "is JSON, but no index"),
        (b"<!doctype html><html>", "web page"),
        (b"\xff" * 20, "a header of 18446744073709551615 B"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "first").write_bytes(data)
    with pytest.raises(ConfigError, match=text):
        check_initial(tmp_path / "first")


def test_a_file_of_torch_save_is_named(tmp_path: Path) -> None:
    torch.save(dict.fromkeys("abc", torch.ones(3)), tmp_path / "model.bin")
    with pytest.raises(ConfigError, match=r"torch\.save \(pickle.*save_pretrained"):
        check_initial(tmp_path / "model.bin")


def test_a_tensor_whose_place_is_damaged_is_refused(tmp_path: Path) -> None:
    header = right_header() | {"b.bias": {"dtype": "F32", "shape": [11], "data_offsets": [0, 40]}}
    data = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(1 << 16))
    with pytest.raises(ConfigError, match="header is damaged"):
        read_initial(tmp_path / "m.safetensors", MANIFEST)
