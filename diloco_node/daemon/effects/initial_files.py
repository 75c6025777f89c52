"""The first parameters from files: one of safetensors, the index of a sharded model, or a folder with either.

A folder is what `save_pretrained` writes. Names count without a prefix that all of them have on one side, such as
`transformer.`. A second name of a tied tensor, and known buffers, need not be in the run's model; anything else does.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from diloco_node.core.merge.adapter_names import has_adapters, is_of_base, saved_name
from diloco_node.core.merge.fragments import Manifest, Piece
from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped
from diloco_node.numeric import F32

HEADER_BYTES_MAX: Final = 8 * 2**20
_LENGTH: Final = struct.Struct("<Q")
_SHOWN_MAX: Final = 200
"""Characters of a name or shape from the file that an error shows."""

_TYPES: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_INDEX: Final = ".safetensors.index.json"
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_BUFFER: Final = re.compile(
    r"(.*\.)?(inv_freq|masked_bias|running_mean|running_var|num_batches_tracked|position_ids|token_type_ids)"
)
_MASK: Final = re.compile(r"(.*\.)?(attn|attention)\.bias")
_MASK_DIMS: Final = 4
"""Old files keep the causal mask of an attention block as its `bias`: no bias has so many dimensions."""

SAVE: Final = "save the model with save_pretrained() or safetensors.torch.save_model()"
_FOREIGN: Final = (
    (b"PK\x03\x04", f"was written by torch.save (pickle, which may run code when it is read): {SAVE}"),
    (b"\x80", f"is a pickle, which may run code when it is read: {SAVE}"),
    (b"GGUF", f"is GGUF, made for inference: take the model that it was made from, and {SAVE}"),
    (b"\x89HDF", f"is HDF5: {SAVE}"),
    (b"version ", "is a pointer of Git LFS, not the file itself: run git lfs pull there"),
    (b"{", f"is JSON, but no index of a sharded model (*{_INDEX}): give that, or the model's folder"),
    (b"<", "is a web page: download the file itself"),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header has it, unchecked. data_start: where the data of its file begin, in bytes."""

    path: Path
    header: Mapping[str, Any]
    data_start: int
    file_bytes: int

    def describe(self) -> str:
        """Type and shape, for people."""
        return escaped(f"{self.header.get('dtype')} {self.header.get('shape')}"[:_SHOWN_MAX])

    def check_place(self) -> None:
        """Raise ConfigError: the file does not hold all of it."""
        kind = self.header.get("dtype")
        shape: Any = self.header.get("shape")
        place: Any = self.header.get("data_offsets")
        is_list = isinstance(shape, list) and isinstance(place, list) and len(place) == len(("start", "stop"))
        if not is_list or not all(type(number) is int and number >= 0 for number in (*shape, *place)):
            raise ConfigError(f"run.init: {self.path}: its header is damaged: copy it anew")
        start, stop = place
        if kind in _TYPES and stop - start != math.prod(shape) * _TYPES[kind].itemsize:
            raise ConfigError(f"run.init: {self.path}: its header is damaged: copy it anew")
        if self.data_start + stop > self.file_bytes:
            raise ConfigError(
                f"run.init: {self.path} is cut off: it has {self.file_bytes} B, its header speaks of "
                f"{self.data_start + stop} B or more. Copy it anew"
            )

    def read(self) -> F32:
        """Its values in one row, float32; `check_place` comes first."""
        kind = self.header["dtype"]
        offset = self.data_start + self.header["data_offsets"][0]
        values = np.fromfile(self.path, _TYPES[kind], math.prod(self.header["shape"]), offset=offset)
        if kind == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32, copy=False)


def check_initial(path: Path) -> None:
    """Look at what `run.init` names, before a model is known. Raises ConfigError: it is not whole."""
    for tensor in list_tensors(path).values():
        tensor.check_place()


def read_initial(path: Path, manifest: Manifest) -> list[F32]:
    """Theta_0 from `path`: exactly the run's tensors, float32, bfloat16 or float16, finite; per fragment, shape (n,),
    float32.

    Raises ConfigError: it can't be read, or is another model; the message names the first difference.
    """
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    tensors = _by_run_names(list_tensors(path), shapes)
    # All of it from the headers: what is another model costs neither time nor memory.
    extras = _check_tensors(path, tensors, shapes)
    for name in (*shapes, *extras):
        tensors[name].check_place()
    thetas = [np.empty(fragment.size, np.float32) for fragment in manifest.fragments]
    places: dict[str, list[tuple[Piece, F32]]] = {}
    for fragment, theta in zip(manifest.fragments, thetas, strict=True):
        for piece in fragment.pieces:
            places.setdefault(piece.name, []).append((piece, theta))
    is_empty = True
    try:
        for name in shapes:
            flat = tensors[name].read()
            if not np.isfinite(square := np.dot(flat, flat)):
                raise ConfigError(f"run.init: {path}: tensor {name} holds NaN, infinite or huge values")
            is_empty = is_empty and not square
            for piece, theta in places[name]:
                theta[piece.offset : piece.offset + piece.size] = flat[piece.value_start : piece.value_stop]
        for name, copies in extras.items():
            if not any(np.array_equal(tensors[name].read(), tensors[copy].read()) for copy in copies):
                raise ConfigError(_stranger(path, name, tensors, shapes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"run.init: {path} can't be read ({error}): copy it anew") from error
    if is_empty:
        raise ConfigError(f"run.init: {path}: all values are zero, as where a download was not finished: copy it anew")
    return thetas


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """By name what a file, an index's shards, or a folder's files hold, by their headers. Raises ConfigError."""
    try:
        if path.is_dir():
            path = _in_folder(path)
        return dict(_of_index(path) if path.name.endswith(_INDEX) else _of_file(path))
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise ConfigError(
            f"run.init: {path} is no safetensors file ({error}). Give one, an index (*{_INDEX}), or a folder of "
            "save_pretrained(); names of the model hub are not fetched"
        ) from error


def _in_folder(folder: Path) -> Path:
    """Return the file of a folder that holds the model, or says where it is."""
    indexes, files = sorted(folder.glob(f"*{_INDEX}")), sorted(folder.glob("*.safetensors"))
    whole = folder / "model.safetensors"
    if len(indexes) == 1 and whole not in files:
        return indexes[0]
    if not indexes and (whole in files or len(files) == 1):
        return whole if whole in files else files[0]
    if not indexes and files and all(_SHARD.fullmatch(file.name) for file in files):
        raise ConfigError(f"run.init: {folder} has {len(files)} shards, but no *{_INDEX}: copy that too")
    if indexes or files:
        names = ", ".join(file.name for file in (*indexes, *files)[:4])
        raise ConfigError(f"run.init: {folder} holds several models: name the file that counts, such as {names}")
    if (folder / "snapshots").is_dir():
        raise ConfigError(f"run.init: {folder} is the hub's cache of a model: give one of the folders in its snapshots")
    foreign = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    text = f"; {escaped(foreign[0])} is not read: {SAVE}" if foreign else f": {SAVE}"
    raise ConfigError(f"run.init: {folder} holds no safetensors file{text}")


def _of_index(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    with path.open("rb") as file:
        index = json.loads(file.read(HEADER_BYTES_MAX), object_pairs_hook=_unique)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise ValueError("its weight_map is missing")
    shards = sorted(set(names.values()))
    if strange := [shard for shard in shards if Path(shard).name != shard]:
        raise ValueError(f"its weight_map leads to another folder, {escaped(strange[0][:_SHOWN_MAX])}")
    absent = [shard for shard in shards if not (path.parent / shard).is_file()]
    if absent:
        raise ConfigError(
            f"run.init: {len(absent)} of the {len(shards)} shards that {path} names are missing, such as "
            f"{escaped(absent[0][:_SHOWN_MAX])}: copy all files of the model"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        tensors |= _of_file(path.parent / shard)
    for name, shard in names.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ConfigError(
                f"run.init: {path}: tensor {escaped(name[:_SHOWN_MAX])} is not in {escaped(shard[:_SHOWN_MAX])}, as "
                "the index says: index and shards are of different models. Copy all files anew"
            )
    yield from tensors.items()


def _of_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Read a header. Refused is what safetensors itself lets pass: a name twice, a huge header."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no plain file")
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > HEADER_BYTES_MAX:
            for magic, text in _FOREIGN:
                if head.startswith(magic):
                    raise ConfigError(f"run.init: {path} {text}")
            raise ConfigError(f"run.init: {path}: a header of {length} B, at most {HEADER_BYTES_MAX} B")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        file_bytes = file.seek(0, os.SEEK_END)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", None)
    tensors = {
        name: StoredTensor(path, entry if isinstance(entry, dict) else {}, _LENGTH.size + length, file_bytes)
        for name, entry in header.items()
    }
    # `safetensors.torch.save_model` writes a tied tensor once, and says here under which other names it is.
    names = metadata.items() if isinstance(metadata, dict) else ()
    aliases = {name: tensors[key] for name, key in names if name not in tensors and key in tensors}
    yield from (tensors | aliases).items()


def _by_run_names(tensors: dict[str, StoredTensor], shapes: Mapping[str, object]) -> dict[str, StoredTensor]:
    """Return the tensors under the run's names, where all of them differ by one prefix, or are PEFT's of adapters."""
    if has_adapters(shapes):
        run_names = {saved_name(name): name for name in shapes}
        tensors = {
            run_names.get(name, name): tensor
            for name, tensor in tensors.items()
            if name in run_names or not is_of_base(name)
        }
    first = min(shapes)
    for name in tensors if first not in tensors else ():
        if first.endswith(f".{name}"):
            tensors_by_run = {first.removesuffix(name) + key: tensor for key, tensor in tensors.items()}
        elif name.endswith(f".{first}"):
            tensors_by_run = {key.removeprefix(name.removesuffix(first)): tensor for key, tensor in tensors.items()}
        else:
            continue
        if shapes.keys() <= tensors_by_run.keys():
            return tensors_by_run
    return tensors


def _check_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Check names, shapes and types. Returns by name what the run's model lacks, and of what it may be another name."""
    copies: dict[str, list[str]] = {}
    for name in sorted(shapes.keys() | tensors.keys()):
        if name not in shapes and name in tensors:
            shape, kind = tensors[name].header.get("shape"), tensors[name].header.get("dtype")
            is_mask = isinstance(shape, list) and len(shape) == _MASK_DIMS and _MASK.fullmatch(name)
            if _BUFFER.fullmatch(name) or is_mask:
                continue
            copies[name] = [
                twin
                for twin, sizes in shapes.items()
                if twin in tensors and shape == list(sizes) and tensors[twin].header.get("dtype") == kind
            ]
        if name not in tensors or not copies.get(name, True):
            raise ConfigError(_stranger(path, name, tensors, shapes))
        if name in shapes and (
            tensors[name].header.get("dtype") not in _TYPES or tensors[name].header.get("shape") != list(shapes[name])
        ):
            raise ConfigError(
                f"run.init: {path}: tensor {name} is {tensors[name].describe()}, expected F32 {list(shapes[name])} "
                "(or BF16, F16)"
            )
    return copies


def _stranger(path: Path, name: str, tensors: Mapping[str, object], shapes: Mapping[str, object]) -> str:
    where, remedy = "the file", "Give a file of the same model"
    if name in tensors:
        where = "the run's model"
        remedy = "If the script freezes it, leave run.init out, and load the weights in every region's script"
    return (
        f"run.init: {path}: tensor {escaped(name[:_SHOWN_MAX])} is not in {where}; tensors there: {len(tensors)}, in "
        f"the run's model: {len(shapes)}. {remedy}"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a tensor is in it twice")
    return dict(pairs)
