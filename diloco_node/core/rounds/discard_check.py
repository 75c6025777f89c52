"""Steps that a leader books as lost, compared with what their region tells.

An honest leader books what the region itself has reported, and the region reports it to all. So the entry waits until
this region has that report: who has just started, and has heard nothing, vouches for nobody. A heartbeat that speaks
against it may be older than the entry; one that answers a heartbeat sent later from here refuses the leader. A region
knows at once how far its own learner came.

A region may tell each of the others something else, and have an honest leader refused. So its reports count against
one leader only. It may also be gone for good right after its report: then the entry is taken after a while. If its
learner was seen to train meanwhile, and it never reported that, the leader is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diloco_node.core.rounds.claim_limits import discard_contradiction
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discards import BOOKING_MAX
from diloco_node.core.types import DiscardedBody, EntryBody


class DiscardCheck:
    """See the module.

    Args:
        lives: of the own learner, the steps of each life that has ended.
        leader: whose entries are asked about; empty while there is none.
    """

    def __init__(self, context: RoundContext, lives: Mapping[int, int], leader: Callable[[], str]) -> None:
        self._region, self._liveness, self._lives = context.region, context.liveness, lives
        self._leader = leader
        # By region, (incarnation, fragment): the last report of lost steps, at most BOOKING_MAX of a region.
        self._reports: dict[str, dict[tuple[int, int], DiscardedBody]] = {}
        # The steps that are doubted; since when, and the last heartbeat before that.
        self._question: tuple[DiscardedBody, int, int] | None = None
        # The leader that a region's reports had refused.
        self._heeded: dict[str, str] = {}
        # What is taken all the same.
        self._believed: EntryBody | None = None

    def hear(self, region: str, bodies: tuple[DiscardedBody, ...]) -> None:
        """Take a region's report of what its learner has lost."""
        reports = self._reports.setdefault(region, {})
        for body in bodies:
            if body.learner == region:
                reports.pop((body.incarnation, body.fragment), None)
                reports[body.incarnation, body.fragment] = body
        for line in list(reports)[:-BOOKING_MAX]:
            del reports[line]

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why the steps can't be taken as lost yet; empty if they can."""
        if not isinstance(body, DiscardedBody) or body == self._believed:
            return ""
        leader, name = self._leader(), body.learner
        if leader == self._region or (leader and self._heeded.get(name, leader) != leader):
            return ""
        if contradiction := self._contradiction(body, now_ns):
            return contradiction
        report = self._reports.get(name, {}).get((body.incarnation, body.fragment))
        is_known = name == self._region and body.incarnation in self._lives
        is_member = name == self._region or name in self._liveness.others
        if is_known or not is_member or (report is not None and _covers(report, body)):
            return ""
        return f"{name} has not reported them here"

    def fault(self, body: EntryBody, *, is_late: bool, now_ns: int) -> str:
        """Return the doubt if what the region tells is newer than the entry.

        Args:
            is_late: the entry has waited for so long that whatever came meanwhile is newer.
        """
        doubt = self.doubt(body, now_ns=now_ns)
        if not doubt or not isinstance(body, DiscardedBody):
            return ""
        if self._question is None or self._question[0] != body:
            self._question = (body, now_ns, self._liveness.sequence)
        _, since_ns, sequence = self._question
        name = body.learner
        is_answered = name == self._region or self._liveness.echo(name) > sequence
        is_news = is_answered and bool(self._contradiction(body, now_ns))
        if not is_news and (not is_late or (self._liveness.stepped_at_ns(name) or 0) <= since_ns):
            return ""
        return f"{name} has not given up steps ({body.step_from}, {body.step_to}]: {doubt}"

    def believe(self, body: EntryBody) -> None:
        """Take an entry all the same: a majority did, or nobody is there to speak against it."""
        self._believed = body

    def heed(self, body: EntryBody) -> None:
        """The leader is refused for this entry."""
        if isinstance(body, DiscardedBody) and body.learner != self._region:
            self._heeded[body.learner] = self._leader()

    def _contradiction(self, body: DiscardedBody, now_ns: int) -> str:
        """Return what the region's last heartbeat, or this region's own knowledge, says against it."""
        if body.learner == self._region and body.incarnation in self._lives:
            steps = self._lives[body.incarnation]
            return f"incarnation {body.incarnation} made {steps} steps" if body.step_to > steps else ""
        is_alive = self._liveness.is_alive(body.learner, now_ns=now_ns)
        return discard_contradiction(body, self._liveness.learner(body.learner)) if is_alive else ""


def _covers(report: DiscardedBody, body: DiscardedBody) -> bool:
    """Whether a region that reports so much has lost the steps of an entry: a later report begins later."""
    is_same = report.step_from == body.step_from
    return report.step_to >= body.step_to and (not is_same or report.tokens >= body.tokens)
