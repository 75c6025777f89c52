"""How a run ends in one region: an operator's order, the final file, the learner's stop."""

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
        """An operator of this region wants the run to end; `ask` the leader until it does."""
        self._ordered = reason

    def ask(self, leader: str) -> None:
        """Pass the order on; repeated, for a message may be lost."""
        if self._ordered and self._history.finished is None:
            self._effects.send(leader, FinishRequested(self._ordered))

    def pump(self) -> None:
        """Write the final file once every fragment is at its final version, and stop the learner."""
        finished = self._history.finished
        if finished is not None and not self._is_writing and tuple(self._versions.applied) == finished.versions:
            self._is_writing = True
            self._effects.emit(WriteFinal(finished.versions))
            self.stop_learner()

    def stop_learner(self) -> None:
        """A learner that is there has nothing more to do, if this region is at the end."""
        finished = self._history.finished
        if finished is not None and self._is_writing and self._liveness.learner(self._region) is not None:
            self._effects.emit(StopLearner(finished.reason))

    def written(self) -> None:
        """The final file is there."""
        self.is_final = True
        self._effects.note("final", "final parameters are written")
