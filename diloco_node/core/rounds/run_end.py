"""The end of a run in one region: an operator's order, the final file, the learner's stop."""

from __future__ import annotations

from diloco_node.core.events import StopLearner, WriteFinal
from diloco_node.core.messages import FinishRequested
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext


class RunEnd:
    """See the module.

    Attributes:
        is_final: every fragment is at its final version and written.
    """

    def __init__(self, context: RoundContext, versions: Versions) -> None:
        self.is_final = False
        self._region, self._history = context.region, context.history
        self._liveness, self._effects = context.liveness, context.effects
        self._versions = versions
        self._ordered = ""
        self._is_writing = False

    def order(self, reason: str) -> None:
        """Remember an operator's order to end the run; `ask` passes it on until the run ends."""
        self._ordered = reason

    def ask(self, leader: str) -> None:
        """Pass the order on to the leader; repeated, for a message may be lost."""
        if self._ordered and self._history.finished is None:
            self._effects.send(leader, FinishRequested(self._ordered))

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
