"""The end of a run in one region: an operator's order, whether a leader may end it, the final file, the learner's stop.

A leader ends a run for every region, and for good. So each region looks at its own progress before it acknowledges an
entry of the end. Where the run is not near it, an operator's order must have come here, from the region that got it:
each region repeats its own to all others. A region that knows of neither waits for a while; others may know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diloco_node.core.events import StopLearner, WriteFinal
from diloco_node.core.messages import FinishRequested
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.types import EntryBody, FinishedBody, RoundBody

NEAR_END: Final = 0.9
"""Part of the way from which on a leader may end the run: reports of another region may be some heartbeats old."""


class RunEnd:
    """See the module.

    Attributes:
        is_final: every fragment is at its final version and written.

    Args:
        bodies: of the ledger on disk: an end in it was acknowledged before.
    """

    def __init__(
        self, context: RoundContext, versions: Versions, progress: RunProgress, bodies: Iterable[EntryBody] = ()
    ) -> None:
        self.is_final = False
        self._progress, self._regions = progress, context.regions
        self._is_believed = any(map(is_end, bodies))
        # By region, the reason that its operator gave.
        self._orders: dict[str, str] = {}
        self._region, self._history = context.region, context.history
        self._liveness, self._effects = context.liveness, context.effects
        self._versions = versions
        self._is_writing = False

    def order(self, region: str, reason: str) -> None:
        """Remember the order of a region's operator to end the run; `ask` passes the own one on until the run ends."""
        self._orders[region] = reason

    def ask(self) -> None:
        """Pass the own operator's order on to all regions; repeated, for a message may be lost."""
        reason = self._orders.get(self._region)
        if reason is not None and self._history.finished is None:
            for name in self._regions:
                self._effects.send(name, FinishRequested(reason))

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why an entry may not end the run now; empty if it may, or does not. It never does again later."""
        if self._is_believed or not is_end(body):
            return ""
        part = self._progress.position(now_ns=now_ns).part
        self._is_believed = bool(self._orders) or (part is not None and part >= NEAR_END)
        if self._is_believed:
            return ""
        way = "a run without a limit" if part is None else f"{part:.0%} of the run"
        return f"it ends {way}, and no operator's order came here"

    def believe(self) -> None:
        """A majority has committed the end."""
        self._is_believed = True

    def pump(self) -> None:
        """Write the final file once every fragment is at its final version, and stop the learner."""
        end = self._history.finished
        if end is not None and not self._is_writing and tuple(self._versions.applied) == end.versions:
            self._is_writing = True
            self._effects.emit(WriteFinal(end.versions))
            self.stop_learner()

    def stop_learner(self) -> None:
        """Stop the learner, if there is one and this region is at the end."""
        end = self._history.finished
        if end is not None and self._is_writing and self._liveness.learner(self._region) is not None:
            self._effects.emit(StopLearner(end.reason))

    def on_final_written(self) -> None:
        """Take it that the final file is on disk."""
        self.is_final = True
        self._effects.note("final", "final parameters are written")


def is_end(body: EntryBody) -> bool:
    """Whether an entry ends the run, or the rounds of a fragment."""
    return isinstance(body, FinishedBody) or (isinstance(body, RoundBody) and body.is_last)
