"""Writes that are tried again while the disk refuses: a full disk must not stop training, and an alarm says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from diloco_node.core.events import Note
from diloco_node.daemon.work import in_thread
from diloco_node.errors import LedgerGone, LedgerLost, StorageError

T = TypeVar("T")

STORAGE_RETRY_S: Final = 1.0

STORAGE_RETRIES_SILENT: Final = 30
"""The alarm is repeated after so many tries."""

REFUSALS_SHOWN: Final = 3
"""Writes that the status names: on a full disk many payloads wait, for the same reason."""


@dataclass(slots=True)
class DiskWrites:
    """Carries writes out until the disk takes them.

    Attributes:
        refusals: what the disk does not take at this moment, with `StorageError.disk`, and why.
    """

    note: Callable[[Note], None]
    refusals: dict[str, tuple[tuple[int, int], str]] = field(default_factory=dict, init=False)

    def summary(self) -> str:
        """Say what the disk does not take now, the first for each disk and reason at first; empty: nothing."""
        first = {disk: subject for subject, (disk, _) in reversed(self.refusals.items())}.values()
        subjects = sorted(self.refusals, key=lambda subject: subject not in first)
        texts = [f"{subject}: {self.refusals[subject][1]}" for subject in subjects]
        more = len(texts) - REFUSALS_SHOWN
        return "; ".join(texts[:REFUSALS_SHOWN]) + (f"; and {more:,} more files" if more > 0 else "")

    async def until_written(self, subject: str, executor: Executor, write: Callable[[], T]) -> T:
        """Call `write` in a thread until the disk takes it; what it returned. Raises LedgerLost, LedgerGone."""
        tries = 0
        while True:
            try:
                result = await in_thread(executor, write)
            except (LedgerLost, LedgerGone):
                raise
            except StorageError as error:
                is_news = subject not in self.refusals or self.refusals[subject][0] != error.disk
                self.refusals[subject] = error.disk, str(error)
                if is_news or tries % STORAGE_RETRIES_SILENT == 0:
                    # One alarm for all that wait behind it: on this disk, for this reason.
                    is_first = next(name for name, why in self.refusals.items() if why[0] == error.disk) == subject
                    self.note(Note("disk", f"{subject} not written, trying again: {error}", is_alarm=is_first))
                tries += 1
                await asyncio.sleep(STORAGE_RETRY_S)
                continue
            if tries:
                self.refusals.pop(subject, None)
                self.note(Note("disk", f"{subject} written after {tries + 1} tries"))
            return result
