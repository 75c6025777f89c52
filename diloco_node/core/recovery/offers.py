"""Which versions this region's learner is offered, and which of its snapshots they include."""

from __future__ import annotations

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import OfferVersion
from diloco_node.core.recovery.versions import Replica
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import LearnerStatus


class Offers:
    """Offers each applied version once to each attached learner, and never an older one than it has."""

    def __init__(self, *, region: str, history: RoundHistory, replica: Replica, effects: EffectBuffer) -> None:
        self._region = region
        self._history = history
        self._replica = replica
        self._effects = effects
        self._learner: LearnerStatus | None = None
        self._offered = [-1] * len(replica.applied)

    def attached(self, status: LearnerStatus | None) -> None:
        """A learner is there (again), or gone: what was offered before may be lost with the connection."""
        self._learner = status
        self._offered = [-1] * len(self._offered)
        for fragment in range(len(self._offered)):
            self.applied(fragment)

    def learner_changed(self, status: LearnerStatus | None) -> None:
        """It reported."""
        self._learner = status

    def applied(self, fragment: int) -> None:
        """The fragment is at a new version here, or more of the ledger is known, or the learner is new."""
        version = self._replica.applied[fragment]
        if self._learner is None or version <= self._offered[fragment]:
            return
        base = self._learner.positions[fragment].base_version
        if version <= base:
            return
        if base >= 0 and self._history.versions[fragment] < version:
            # Right after a restart: a state from disk is there before the ledger says whom it includes. Handing it to a
            # learner with work of its own would make that work count twice. A new learner has none.
            return
        self._offered[fragment] = version
        included = self._history.included_snapshot(
            self._region, self._learner.incarnation, fragment, base=base, version=version
        )
        is_last = self._history.is_last_round(fragment, version)
        self._effects.emit(OfferVersion(fragment, version, included, is_last))
