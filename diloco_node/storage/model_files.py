"""Model folders as `from_pretrained` reads them: safetensors of any type, read and written without torch.

The library's own numpy functions know no bfloat16, and hold the whole file. Here a tensor is its bytes, and those of a
file stay on disk until they are written.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from diloco_node.atomic_file import sync_file, sync_folder
from diloco_node.errors import ConfigError, StorageError
from diloco_node.numeric import F32, U8
from diloco_node.storage.durable import disk_error

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
CONFIG_NAME: Final = "config.json"
HEADER_BYTES_MAX: Final = 64 * 2**20
_LENGTH: Final = struct.Struct("<Q")
_F32: Final = "F32"
DTYPES: Final = {"float32": _F32, "float16": "F16", "bfloat16": "BF16"}
"""What torch calls them, and what safetensors does."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        dtype: as safetensors calls it, such as "F32". data: its bytes, uint8, row-major.
    """

    dtype: str
    shape: tuple[int, ...]
    data: U8

    @classmethod
    def of(cls, values: F32, dtype: str = "float32") -> StoredTensor:
        """From float32 values, rounded to nearest where the type is smaller.

        Args:
            values: any shape; not changed, and not to be changed later. dtype: of `DTYPES`.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        narrow: np.ndarray[Any, Any] = flat
        if dtype == "float16":
            narrow = flat.astype(np.float16)
        elif dtype == "bfloat16":
            bits = flat.view(np.uint32)
            # Half of the last bit that stays, and one less where that bit is even: ties go to even.
            narrow = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return cls(DTYPES[dtype], values.shape, narrow.view(np.uint8))

    def is_same(self, other: StoredTensor) -> bool:
        """Whether type, shape and bytes are equal."""
        is_alike = (self.dtype, self.shape) == (other.dtype, other.shape)
        return is_alike and bool(np.array_equal(self.data, other.data))


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name; their bytes are mapped, not read.

    Raises:
        ConfigError: it is no such file, or can't be read.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size_bytes, HEADER_BYTES_MAX):
                raise ValueError(f"a header of {length} B in a file of {size_bytes} B")
            header: dict[str, Any] = json.loads(file.read(length))
        begin = _LENGTH.size + length
        empty = np.zeros(0, np.uint8)
        mapped: U8 = np.memmap(path, np.uint8, "r", offset=begin) if size_bytes > begin else empty
        found = {}
        for name, one in header.items():
            if name == "__metadata__":
                continue
            start, stop = one["data_offsets"]
            if not 0 <= start <= stop <= len(mapped):
                raise ValueError(f"{name} lies beyond the end of the file")
            found[name] = StoredTensor(str(one["dtype"]), tuple(one["shape"]), mapped[start:stop])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} can't be read as safetensors: {error}") from error
    return found


def read_model(place: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder: one file, or several with an index.

    Raises:
        ConfigError: there is none, or it can't be read.
    """
    if place.is_file():
        return read_tensors(place)
    index = place / INDEX_NAME
    if (place / WEIGHTS_NAME).is_file():
        return read_tensors(place / WEIGHTS_NAME)
    if not index.is_file():
        raise ConfigError(f"{place}: neither {WEIGHTS_NAME} nor {INDEX_NAME} there; save it with save_pretrained")
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
        raise ConfigError(f"{index} has no weight_map: save the model again with save_pretrained")
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(parts.values())):
        found |= read_tensors(place / name)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError: it can't be read, or is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object")
    return found


def write_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a safetensors file, tensor after tensor; durable once it is synced. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, one in sorted(tensors.items()):
        header[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + len(one.data)]}
        at += len(one.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for _, one in sorted(tensors.items()):
            file.write(one.data.data)


def write_model_folder(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    documents: Mapping[str, Mapping[str, Any]],
    copies: Sequence[Path] = (),
    *,
    is_forced: bool = False,
) -> None:
    """Write `model.safetensors` and the files beside it; the folder has its name only when all of it is durable.

    Args:
        documents: JSON by file name. copies: files that are copied under their own names.
        is_forced: a folder that is there and not empty is replaced; without it that is an error.

    Raises:
        ConfigError: the folder is there. StorageError: the disk refused, and nothing is left of it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_forced:
        raise ConfigError(f"{folder} is there and not empty: name another folder, or add --force to replace it")
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)  # in a container the number of one that was killed comes again
        fresh.mkdir()
        for path in copies:
            shutil.copyfile(path, fresh / path.name)
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            (fresh / name).write_text(text, encoding="utf-8")
        write_tensors(fresh / WEIGHTS_NAME, tensors)
        for path in fresh.iterdir():
            sync_file(path)
        sync_folder(fresh)
        if folder.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise StorageError(str(disk_error("write", folder, error))) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
