"""Steps that a leader books as lost, compared with the number that their region reports to be made.

An honest leader books what the region itself has reported, so a leader that books more is wrong. But a report that came
here may be older than the entry. So the entry waits until the region has answered a heartbeat that this region sent
later. A region knows it of its own learner at once.

A region may tell each of the others something else, and have an honest leader refused. So its reports count against
one leader only.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco_node.core.rounds.claim_limits import discard_contradiction
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.types import DiscardedBody, EntryBody


class DiscardCheck:
    """See the module. ended: of the own learner, the steps of each life that has ended."""

    def __init__(self, context: RoundContext, ended: Mapping[int, int]) -> None:
        self._region, self._liveness, self._ended = context.region, context.liveness, ended
        # The steps that are doubted, and the last heartbeat before that.
        self._question: tuple[DiscardedBody, int] | None = None
        # Regions whose reports had a leader refused.
        self._heeded: set[str] = set()
        # What a majority has committed all the same.
        self._believed: EntryBody | None = None

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return what the region's last report says against its steps being lost; empty if nothing."""
        if not isinstance(body, DiscardedBody) or body == self._believed or body.learner in self._heeded:
            return ""
        if body.learner == self._region and body.incarnation in self._ended:
            steps = self._ended[body.incarnation]
            return f"incarnation {body.incarnation} made {steps} steps" if body.step_to > steps else ""
        is_alive = self._liveness.is_alive(body.learner, now_ns=now_ns)
        return discard_contradiction(body, self._liveness.learner(body.learner)) if is_alive else ""

    def fault(self, body: EntryBody, *, now_ns: int) -> str:
        """Return the doubt if a report that is newer than the entry has it, too."""
        doubt = self.doubt(body, now_ns=now_ns)
        if not doubt or not isinstance(body, DiscardedBody):
            return ""
        if self._question is None or self._question[0] != body:
            self._question = (body, self._liveness.sequence)
        is_news = body.learner == self._region or self._liveness.echo(body.learner) > self._question[1]
        return f"{body.learner} has not given up steps ({body.step_from}, {body.step_to}]: {doubt}" if is_news else ""

    def believe(self, body: EntryBody) -> None:
        """Take an entry all the same: a majority did."""
        self._believed = body

    def heed(self, body: EntryBody) -> None:
        """The leader is refused for this entry."""
        if isinstance(body, DiscardedBody) and body.learner != self._region:
            self._heeded.add(body.learner)
