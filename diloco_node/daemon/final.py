"""The outcome of a run on disk: final.safetensors, float32, under its final name only when it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from diloco_node.errors import StorageError
from diloco_node.storage.durable import remove_if_possible

FINAL_NAME: Final = "final.safetensors"


def write_final(state_dir: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write the model to `state_dir/final.safetensors`: temporary name, fsync, rename, fsync of the folder.

    Args:
        tensors: by name, float32, shaped.

    Raises:
        StorageError: the disk refused; the temporary file is gone again, if the disk allows that.
    """
    target = state_dir / FINAL_NAME
    temporary = state_dir / f".{FINAL_NAME}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        folder = os.open(state_dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:
        # The library reports a full disk in an error of its own.
        remove_if_possible(temporary)
        raise StorageError(f"{target} can't be written: {error}; free some space, it is tried again") from error
