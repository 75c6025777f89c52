"""Steps that a leader books as lost, compared with what their region tells.

An honest leader books what the region itself has reported, and the region reports it to all. So the entry waits until
this region has that report: who has just started, and has heard nothing, vouches for nobody. A heartbeat that speaks
against it may be older than the entry; one that answers a heartbeat sent later from here refuses the leader.

A region may die right after its report, and an entry that only some can bear out would hold up all others. So each
voter passes the report on to the leader, which books once a majority has it.

A region may tell each of the others something else, and have an honest leader refused. So its reports count against
one leader only. It may also be gone for good: then an entry that too few can bear out is taken after a while. The
leader is refused if the region's learner was seen to train meanwhile, and the region never reported that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from diloco_node.core.ledger.roster import majority_of
from diloco_node.core.messages import DiscardReported
from diloco_node.core.rounds.claim_limits import STEPS_AHEAD_MAX, discard_contradiction
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discards import BOOKING_MAX, REPORTED_MAX
from diloco_node.core.types import DiscardedBody, EntryBody


class DiscardCheck:
    """The check of steps booked as lost. lives: of the own learner, the steps of each life that has ended.

    leader: whose entries are asked about; empty while there is none.
    """

    def __init__(self, context: RoundContext, lives: Mapping[int, int], leader: Callable[[], str]) -> None:
        self._region, self._liveness, self._lives = context.region, context.liveness, lives
        self._leader, self._history, self._effects = leader, context.history, context.effects
        self._patience_ns = context.settings.election_timeout_ns
        # By (who tells, whose learner), then (incarnation, fragment): the last reports, at most BOOKING_MAX each.
        self._reports: dict[tuple[str, str], dict[tuple[int, int], DiscardedBody]] = {}
        # By region, since when it reports lost steps without a pause, and when it did last.
        self._reported_ns: dict[str, tuple[int, int]] = {}
        # The steps that are doubted; since when, and the last heartbeat before that.
        self._question: tuple[DiscardedBody, int, int] | None = None
        # The leader that a region's reports had refused.
        self._heeded: dict[str, str] = {}
        # What is taken all the same.
        self._believed: EntryBody | None = None

    def hear(self, peer: str, bodies: Sequence[DiscardedBody], *, now_ns: int) -> list[DiscardedBody]:
        """Take what a region tells of lost steps, and pass its report of its own ones on to the leader.

        Returns those that this region may book as the leader: what it books, a majority can bear out.
        """
        roster, leader, bodies = self._history.roster, self._leader(), bodies[:REPORTED_MAX]
        for body in bodies:
            if body.learner in roster.names:
                reports = self._reports.setdefault((peer, body.learner), {})
                reports.pop((body.incarnation, body.fragment), None)
                reports[body.incarnation, body.fragment] = body
                if len(reports) > BOOKING_MAX:
                    del reports[next(iter(reports))]
        own_bodies = tuple(body for body in bodies if body.learner == peer)
        if own_bodies:
            since_ns, last_ns = self._reported_ns.get(peer, (now_ns, now_ns))
            self._reported_ns[peer] = (since_ns if now_ns - last_ns < self._patience_ns else now_ns, now_ns)
        if leader == self._region:
            return [body for body in bodies if self._is_borne_out(body, now_ns)]
        if own_bodies and leader and peer != self._region and self._region in roster.voters:
            self._effects.send(leader, DiscardReported(own_bodies))
        return []

    def _is_borne_out(self, body: DiscardedBody, now_ns: int) -> bool:
        """Whether a majority acknowledges an entry with these steps, even if their region dies at this moment.

        Its own word is needed where too few others are there, and is enough once it was repeated for a while.
        """
        name, voters = body.learner, self._history.roster.voters
        if self._report(name, body) != body:
            return False
        others = [voter for voter in voters if voter != name]
        present = [voter for voter in others if self._liveness.is_alive(voter, now_ns=now_ns)]
        # The object that stands in for a voter that is away asks no question.
        stand_in = self._history.roster.witness if len(present) < len(others) - 1 else ""
        witnesses = [
            voter for voter in others if voter in (self._region, stand_in) or _covers(self._report(voter, body), body)
        ]
        quorum, (since_ns, _) = majority_of(len(voters)), self._reported_ns.get(name, (now_ns, now_ns))
        is_word_enough = len(present) < quorum or now_ns - since_ns >= self._patience_ns
        return len(witnesses) + (is_word_enough and name in voters) >= quorum

    def _report(self, peer: str, body: DiscardedBody) -> DiscardedBody | None:
        return self._reports.get((peer, body.learner), {}).get((body.incarnation, body.fragment))

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why the steps can't be taken as lost yet; empty if they can."""
        if not isinstance(body, DiscardedBody) or body == self._believed:
            return ""
        leader, name = self._leader(), body.learner
        if leader == self._region or (leader and self._heeded.get(name, leader) != leader):
            return ""
        if contradiction := self._contradiction(body, now_ns):
            return contradiction
        is_known = name == self._region and body.incarnation in self._lives
        is_member = name == self._region or name in self._liveness.others
        if is_known or not is_member or _covers(self._report(name, body), body) or self._has_passed(body):
            return ""
        return f"{name} has not reported them here"

    def _has_passed(self, body: DiscardedBody) -> bool:
        """Whether the living learner says of itself that it goes on right behind these steps, and these tokens.

        Its region may not report them again: it has started anew, and does not know yet what is committed.
        """
        status = self._liveness.learner(body.learner)
        if status is None or status.incarnation != body.incarnation:
            return False
        position = status.positions[body.fragment]
        step, tokens = self._history.account.covered(body.learner, body.incarnation, body.fragment)
        steps_to, tokens_to = position.included_step, position.included_tokens
        return (step, steps_to, tokens_to - tokens) == (body.step_from, body.step_to, body.tokens)

    def fault(self, body: EntryBody, *, is_late: bool, now_ns: int) -> str:
        """Return the doubt if what the region tells is newer than the entry, as all is once the entry is late."""
        doubt = self.doubt(body, now_ns=now_ns)
        if not doubt or not isinstance(body, DiscardedBody):
            return ""
        if self._question is None or self._question[0] != body:
            self._question = (body, now_ns, self._liveness.sequence)
        _, since_ns, sequence = self._question
        name = body.learner
        is_answered = (
            name == self._region
            or self._liveness.echo(name) > sequence
            or not self._liveness.is_alive(name, now_ns=now_ns)  # what is doubted then was never possible
        )
        is_news = is_answered and bool(self._contradiction(body, now_ns))
        if not is_news and (not is_late or (self._liveness.stepped_at_ns(name) or 0) <= since_ns):
            return ""
        return f"{name} has not given up steps ({body.step_from}, {body.step_to}]: {doubt}"

    def is_impossible(self, body: DiscardedBody, *, now_ns: int) -> bool:
        """Whether these are more steps than the learner can have made: nobody took them in good faith."""
        if body.learner == self._region and body.incarnation in self._lives:
            return body.step_to > self._lives[body.incarnation] + STEPS_AHEAD_MAX
        status, silent_ns = self._liveness.learner(body.learner), self._silence_ns(body, now_ns)
        return bool(discard_contradiction(body, status, silent_ns=silent_ns))

    def believe(self, body: EntryBody) -> None:
        """Take an entry all the same: a majority did, or nobody is there to speak against it."""
        self._believed = body

    def heed(self, body: EntryBody) -> None:
        """The leader is refused for this entry."""
        if isinstance(body, DiscardedBody) and body.learner != self._region and self._leader():
            self._heeded[body.learner] = self._leader()

    def _contradiction(self, body: DiscardedBody, now_ns: int) -> str:
        """Return what the region's last heartbeat, or this region's own knowledge, says against it."""
        if body.learner == self._region and body.incarnation in self._lives:
            steps = self._lives[body.incarnation]
            return f"incarnation {body.incarnation} made {steps} steps" if body.step_to > steps else ""
        silent_ns = None if self._liveness.is_alive(body.learner, now_ns=now_ns) else self._silence_ns(body, now_ns)
        return discard_contradiction(body, self._liveness.learner(body.learner), silent_ns=silent_ns)

    def _silence_ns(self, body: DiscardedBody, now_ns: int) -> int:
        return now_ns - (self._liveness.stepped_at_ns(body.learner) or 0)


def _covers(report: DiscardedBody | None, body: DiscardedBody) -> bool:
    """Whether a region that reports so much has lost the steps of an entry: a later report begins later."""
    if report is None or report.step_to < body.step_to:
        return False
    if (report.step_from, report.step_to) == (body.step_from, body.step_to):
        return report.tokens == body.tokens
    return report.step_from != body.step_from or report.tokens >= body.tokens
