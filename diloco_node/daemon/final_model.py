"""The end of a run: the final model on disk, and how long a finished region stays for the others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from diloco_node.atomic_file import remove_if_possible, sync_folder
from diloco_node.errors import StorageError
from diloco_node.state_names import FINAL_NAME

LINGER_S: Final = 15.0
"""A region that lags and makes no progress for so long is left alone, reachable or not."""

LINGER_MAX_S: Final = 7200.0
"""Nobody keeps a finished region for longer, whatever they fetch; a pause that a loop announces may take an hour."""


def write_final(state_dir: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write the model, float32 by name, to `final.safetensors`; durable when this returns. Raises StorageError: nothing
    half-written is left then, if the disk allows that."""
    target = state_dir / FINAL_NAME
    temporary = state_dir / f".{FINAL_NAME}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(state_dir)
    except (OSError, SafetensorError) as error:
        # The library reports a full disk in an error of its own.
        remove_if_possible(temporary)
        raise StorageError(f"{target} can't be written: {error}; free some space, it is tried again") from error


class Linger:
    """Decides when a finished region may go. Times are seconds on one monotonic clock."""

    def __init__(self, needed_index: int, *, now_s: float, is_patient: bool = False) -> None:
        """Every other region needs the ledger up to `needed_index`, the end of the run. is_patient: without a limit."""
        self._is_patient = is_patient
        self._needed_index = needed_index
        self._started_s = now_s
        self._progress_s = now_s
        self._seen: tuple[object, ...] = ()

    def is_over(self, applied_indexes: Iterable[int], *, learner_is_done: bool, serves: int, now_s: float) -> bool:
        """Whether to go. applied_indexes: per other region, as it said. learner_is_done: it has told its last figures,
        or is gone. serves: transfers to regions that lack something."""
        lacking = tuple(index for index in applied_indexes if index < self._needed_index)
        if learner_is_done and not lacking:
            return True
        if self._is_patient:
            return False
        # The own learner may be in a long step, an evaluation or a checkpoint; the supervisor knows when it hangs.
        if serves or lacking != self._seen or not learner_is_done:
            self._seen, self._progress_s = lacking, now_s
        return now_s - self._progress_s >= LINGER_S or now_s - self._started_s >= LINGER_MAX_S
