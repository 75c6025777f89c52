"""Theta_0: from the learner's own parameters, from a safetensors file, or fetched; and which one is on this disk."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.merge.fragments import Manifest
from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore

HEADER_BYTES_MAX: Final = 8 * 2**20
_LENGTH: Final = struct.Struct("<Q")
_SHOWN_MAX: Final = 200
"""Characters of a name or shape from the file that an error shows."""


class InitialStates:
    """The states at version 0 on disk, one writer per fragment at a time. For threads: all methods wait for the disk.

    The learner's own Theta_0 is never written over a fetched one: a region may have said to the others already that it
    holds what genesis names.
    """

    def __init__(self, fragments: int, store: RegionStore) -> None:
        self._store = store
        self._locks = [threading.Lock() for _ in range(fragments)]
        self._fetched: dict[int, bytes] = {}

    def store_own(self, fragment: int, theta: F32, momentum: F32 | None = None) -> bytes:
        """Write this region's Theta_0 of a fragment, unless a fetched one is there.

        Args:
            theta, momentum: shape (n,), float32; not changed. Without a momentum it is zero.

        Returns:
            The digest of what is on disk now.

        Raises:
            StorageError: the disk refused.
        """
        with self._locks[fragment]:
            if fragment in self._fetched:
                return self._fetched[fragment]
            momentum = np.zeros_like(theta) if momentum is None else momentum
            digest = fragment_digest(theta, momentum)
            self._store.store_state(fragment, 0, theta, momentum, digest)
            return digest

    def store_fetched(self, fragment: int, theta: F32, momentum: F32, digest: bytes) -> None:
        """Write the Theta_0 that genesis names over whatever is there. Raises StorageError."""
        with self._locks[fragment]:
            self._store.store_state(fragment, 0, theta, momentum, digest)
            self._fetched[fragment] = digest


def read_initial(path: Path, manifest: Manifest) -> list[F32]:
    """Theta_0 from a safetensors file: exactly the run's tensors, float32, finite.

    Args:
        path: the file, for example another run's final.safetensors.
        manifest: names, shapes and layout.

    Returns:
        Per fragment, shape (n,), float32.

    Raises:
        ConfigError: the file is no such file, or holds another model; the message names the first difference.
    """
    # All of it from the header: what is another model costs neither time nor memory.
    _check_tensors(path, _read_header(path), {spec.name: spec.shape for spec in manifest.tensors})
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ConfigError(f"run.init: {path} can't be read ({error}); give a safetensors file of float32") from error
    for name, tensor in tensors.items():
        if not np.isfinite(np.dot(tensor.ravel(), tensor.ravel())):
            raise ConfigError(f"run.init: {path}: tensor {name} holds NaN, infinite or huge values")
    thetas = [np.empty(fragment.size, np.float32) for fragment in manifest.fragments]
    for fragment, theta in zip(manifest.fragments, thetas, strict=True):
        for piece in fragment.pieces:
            flat = tensors[piece.name].ravel()
            theta[piece.offset : piece.offset + piece.size] = flat[piece.value_start : piece.value_stop]
    return thetas


def _read_header(path: Path) -> dict[str, Any]:
    """By tensor what a file says of it. Refused is what safetensors itself lets pass: a name twice, a huge header."""
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > HEADER_BYTES_MAX:
                raise ConfigError(f"run.init: {path}: a header of {length} B, at most {HEADER_BYTES_MAX} B")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            if not isinstance(header, dict):
                raise ValueError("its header is no object")
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise ConfigError(f"run.init: {path} is no safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return header


def _check_tensors(path: Path, header: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Exactly the run's names, shapes and types."""
    for name in sorted(shapes.keys() | header.keys()):
        if name not in header or name not in shapes:
            where = "the file" if name not in header else "the run's model"
            raise ConfigError(
                f"run.init: {path}: tensor {escaped(name[:_SHOWN_MAX])} is not in {where}; "
                f"tensors there: {len(header)}, in the run's model: {len(shapes)}"
            )
        entry = header[name] if isinstance(header[name], dict) else {}
        kind, shape = entry.get("dtype"), entry.get("shape")
        if kind != "F32" or shape != list(shapes[name]):
            description = escaped(f"{kind} {shape}"[:_SHOWN_MAX])
            raise ConfigError(f"run.init: {path}: tensor {name} is {description}, expected F32 {list(shapes[name])}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a tensor is in it twice")
    return dict(pairs)
