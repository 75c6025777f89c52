"""Faults that a daemon has from within, such as a cut link: switched on by a file that says until when.

Only the daemons of a demo look: `lab.demo.faulty_region` starts them. The time is in the
file, so that a fault ends by itself also when whoever has set it was killed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from diloco_node.atomic_file import replace_file
from diloco_node.errors import StorageError
from diloco_node.lab.chaos.fault_plan import DAEMON_ONLY, LASTS_S_MAX
from diloco_node.numeric import NS_PER_S

FAULTS_VARIABLE: Final = "DILOCO_FAULTS"
"""The folder of fault files, in the environment of a demo's regions."""


def fault_file(folder: Path, region: str, kind: str) -> Path:
    """Where a fault of a region is switched on."""
    assert kind in DAEMON_ONLY
    return folder / f"{region}.{kind}"


def switch_on(file: Path, lasts_ns: int) -> int:
    """For so long from now. Returns until when, on the monotonic clock.

    Raises StorageError: the file can't be written.
    """
    until_ns = time.monotonic_ns() + lasts_ns
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, str(until_ns).encode(), is_durable=False)
    except OSError as error:
        raise StorageError(f"{file} can't be written: {error.strerror}") from error
    return until_ns


def switch_off(file: Path, until_ns: int) -> None:
    """Before its time, or after it; not if it was switched on anew since, until another time."""
    with contextlib.suppress(OSError):
        if file.read_text() == str(until_ns):
            file.unlink()


def is_on(file: Path) -> bool:
    """Whether the fault is on now. A file that makes no sense, of an earlier boot for example, is none."""
    try:
        until_ns = int(file.read_text())
    except (OSError, ValueError):
        return False
    return 0 < until_ns - time.monotonic_ns() <= LASTS_S_MAX * NS_PER_S
