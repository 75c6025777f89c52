"""The wishes for the run's end of this region's operator and script, on disk: a daemon that starts anew asks again.

An order lasts until the run is over, a script's vote until the next life of its learner. The learner may be gone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Final

import structlog

from diloco_node.core.bounds import REASON_BYTES
from diloco_node.core.events import Event, FinalWritten, FinishOrdered, LearnerAttached
from diloco_node.errors import StorageError
from diloco_node.storage.durable import replace_file

WISHES_NAME: Final = "end.json"

log = structlog.get_logger(part="disk")


class EndWishes:
    """Wishes for the run's end on disk. folder: the region's."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WISHES_NAME
        # Reasons, by "order" and "vote".
        self._reasons = _read(self._path)
        # Of the learner that is there, or was last.
        self._incarnation = 0

    def of_last_life(self) -> list[FinishOrdered]:
        """The wishes that an earlier daemon took, to be posted to the core."""
        return [FinishOrdered(reason, is_order=kind == "order") for kind, reason in sorted(self._reasons.items())]

    def note(self, event: Event) -> None:
        """Take what an event changes; durable when this returns, unless the disk refuses."""
        reasons = dict(self._reasons)
        if isinstance(event, FinishOrdered):
            reasons["order" if event.is_order else "vote"] = event.reason
        elif isinstance(event, FinalWritten):
            reasons = {}
        elif isinstance(event, LearnerAttached) and event.status.incarnation != self._incarnation:
            self._incarnation = event.status.incarnation
            reasons.pop("vote", None)  # as the core: the script of this life has not voted
        if reasons != self._reasons:
            self._reasons = reasons
            try:
                replace_file(self._path, [json.dumps(reasons).encode()])
            except StorageError as error:
                log.warning("a wish for the run's end is not on disk: a restart forgets it", reason=str(error))


def _read(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            document = json.loads(file.read(16 * REASON_BYTES))
        if isinstance(document, dict):
            return {
                kind: reason
                for kind in ("order", "vote")
                if isinstance(reason := document.get(kind), str)
                and len(reason.encode(errors="replace")) <= REASON_BYTES
            }
    return {}
