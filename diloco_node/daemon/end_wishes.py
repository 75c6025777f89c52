"""The wishes for the run's end of this region's operator and script, on disk: a daemon that starts anew asks again.

They last as long as the core has them (`RunEnd.wishes`): an order until the run is over, a script's vote until the next
life of its learner. The learner may be gone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

import structlog

from diloco_node.core.bounds import REASON_BYTES
from diloco_node.core.messages import FinishRequested
from diloco_node.errors import StorageError
from diloco_node.state_names import WISHES_NAME
from diloco_node.storage.durable import replace_file

log = structlog.get_logger(part="disk")


class EndWishes:
    """Wishes for the run's end on disk. limits: steps and tokens of the run of this daemon: a wish for another end is
    none."""

    def __init__(self, folder: Path, limits: tuple[int, int]) -> None:
        self._path = folder / WISHES_NAME
        self._limits = list(limits)
        # Reasons, by "order" and "vote".
        self._reasons = _read(self._path, self._limits)

    @property
    def last(self) -> list[FinishRequested]:
        """The wishes on disk, which may be those that an earlier daemon took."""
        return [FinishRequested(reason, kind == "order") for kind, reason in sorted(self._reasons.items())]

    def save(self, wishes: Iterable[FinishRequested]) -> None:
        """Have these on disk, and no others, unless the disk refuses. A power cut may bring back removed ones: the end
        that they were for is in the ledger."""
        reasons = {"order" if wish.is_order else "vote": wish.reason for wish in wishes}
        if reasons == self._reasons:
            return
        self._reasons = reasons
        try:
            if reasons:
                replace_file(self._path, [json.dumps({**reasons, "limits": self._limits}).encode()])
            else:  # a full disk allows that, too
                self._path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            log.warning("the wishes for the run's end on disk are not those of now", reason=str(error))


def _read(path: Path, limits: list[int]) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            document = json.loads(file.read(16 * REASON_BYTES))
        if isinstance(document, dict):
            reasons = {
                kind: reason
                for kind in ("order", "vote")
                if isinstance(reason := document.get(kind), str)
                and len(reason.encode(errors="replace")) <= REASON_BYTES
            }
            if document.get("limits") == limits:
                return reasons
            if reasons:
                cause = "run.steps or run.tokens changed since"
                if "limits" not in document:
                    cause = "an earlier version did not note their limits"
                log.warning(
                    f"wishes for the end are dropped: {cause}; order the end again if it is still wanted", **reasons
                )
    return {}
