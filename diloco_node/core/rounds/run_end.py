"""The end of a run in one region: who wants it, whether a leader may end it, the final file, the learner's stop.

A run ends by its limits (`agenda.end_reason`), by an operator's order, or by the scripts of a majority of all regions:
each script that calls `finish` votes for its region. A vote lasts as long as it is repeated, and the next life of a
learner does not vote until its script does.

A leader ends a run for every region. So each region looks at its own progress before it acknowledges an entry of the
end. Where the run is not near it, an order or the votes must have come here. A region that knows of neither waits for
a while; others may know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diloco_node.core.events import StopLearner, WriteFinal
from diloco_node.core.messages import FinishRequested
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.extension import lasting_end
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.types import EntryBody, ExtendedBody, FinishedBody, RoundBody

NEAR_END: Final = 0.9
"""Share of the run that must be done before a leader may end it. Reports may be some heartbeats old: not all of it."""


class RunEnd:
    """Wishes and votes for the run's end.

    Attributes:
        is_final: every fragment is at its final version and written.
        reason: why the run is to end, once an order or enough votes came here; it lasts until the run is extended.
    """

    def __init__(self, context: RoundContext, versions: Versions, progress: RunProgress) -> None:
        self.is_final = False
        self.reason: str | None = None
        self._progress, self._context = progress, context
        self._is_believed = False
        # Of this region, what `ask` repeats: its operator's order, its script's vote; None: there is none.
        self._order: FinishRequested | None = None
        self._vote: FinishRequested | None = None
        # The learner's incarnation that voted, or may.
        self._incarnation = 0
        # By region its script's reason, and when it was last heard.
        self._votes: dict[str, tuple[str, int]] = {}
        self._region, self._history = context.region, context.history
        self._liveness, self._effects = context.liveness, context.effects
        self._versions = versions
        self._is_writing = False

    def want(self, reason: str, *, is_order: bool) -> None:
        """Remember that this region's operator, or its script, wants the end; `ask` passes it on until the run ends."""
        request = FinishRequested(reason, is_order)
        if is_order:
            self._order = request
        else:
            self._vote = request

    def ask(self, *, now_ns: int) -> None:
        """Pass the own order and vote on to all regions, this one too; repeated, for a message may be lost.

        The run's position is looked at as often: who was at its end believes that when a learner is gone since.
        """
        if not self._is_believed and self._progress.has_quorum:
            self._is_believed = (self._progress.position(now_ns=now_ns).part or 0.0) >= NEAR_END
        for request in self.wishes if self._history.finished is None else ():
            self._effects.send_all(self._context.regions, request)

    @property
    def wishes(self) -> tuple[FinishRequested, ...]:
        """The order and the vote of this region that `ask` repeats."""
        return tuple(request for request in (self._order, self._vote) if request is not None)

    def recall(self, wishes: Iterable[FinishRequested]) -> None:
        """Take the wishes of an earlier daemon, once the ledger is replayed: else an earlier end would take them."""
        for wish in wishes:
            if wish.is_order:
                self._order = self._order or wish
            elif not self._incarnation:  # else a learner has come since, and its script votes itself
                self._vote = wish

    def take(self, region: str, request: FinishRequested, *, now_ns: int) -> str | None:
        """Take a region's order or vote. Return the reason to end the run; None: votes lack, or it is over."""
        if self._history.finished is not None:
            return None  # one for its extension comes again after that
        if request.is_order:
            self.reason = self.reason or request.reason
            return self.reason
        if region not in self._votes:
            self._effects.note("finish", f"{region}'s script wants the run to end: {request.reason}")
        self._votes[region] = (request.reason, now_ns)
        votes = self._present_votes(now_ns)
        if 2 * len(votes) > len(self._context.regions):
            self.reason = self.reason or "; ".join(dict.fromkeys(votes.values()))
        return self.reason

    def _present_votes(self, now_ns: int) -> dict[str, str]:
        """By region, sorted, the reasons that are still repeated."""
        since_ns = now_ns - self._liveness.silent_ns
        self._votes = {region: vote for region, vote in sorted(self._votes.items()) if vote[1] >= since_ns}
        return {region: reason for region, (reason, _) in self._votes.items()}

    def waiting(self, leader: str, *, now_ns: int) -> str:
        """Return what the end waits for, in words; empty while nobody wants it and this region is not at it."""
        if self._history.finished is not None or self.reason is not None:
            return ""
        if reason := self.unclosed_end(leader, now_ns=now_ns):
            return reason
        votes = self._present_votes(now_ns)
        words = "; ".join(f"{region} ({reason})" for region, reason in votes.items())
        needs = len(self._context.regions) // 2 + 1
        return (
            f"scripts of {len(votes)} regions want the end: {words}; it takes {needs}, or an operator" if votes else ""
        )

    def unclosed_end(self, leader: str, *, now_ns: int, own_steps: int = 0) -> str:
        """Return why a learner that comes now would train past the run's end; empty if it would not.

        Nobody closes the run without a leader. The others may have closed it, and be gone.
        own_steps: of all lives of the own learner, by its counters: after a restart the ledger tells none alone.
        """
        limit, position = self._history.settings.steps_max, self._progress.position(now_ns=now_ns)
        has_made_steps = 0 < limit <= max(position.steps, self._progress.steps_of(self._region), own_steps)
        if leader or self._history.finished is not None or (not has_made_steps and (position.part or 0.0) < 1.0):
            return ""
        end = f"step {limit} of {limit}" if has_made_steps else f"{self._history.settings.tokens_max} tokens are merged"
        return (
            f"the run is at its end here ({end}), and no majority is there to close it: start the other regions, "
            "finished ones with `start --serve`"
        )

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why an entry may not end the run now; empty if it may, or is no end. Once yes, always yes."""
        if self._is_believed or not is_end(body):
            return ""
        progress = self._progress.position(now_ns=now_ns).part
        self._is_believed = self.reason is not None or (progress is not None and progress >= NEAR_END)
        if self._is_believed:
            return ""
        extent = "a run without a limit" if progress is None else f"{progress:.0%} of the run"
        return f"it ends {extent}, and no operator's order came here, nor votes of a majority"

    def believe(self) -> None:
        """A majority has committed the end, or this region leads and has begun it."""
        self._is_believed = True

    def on_commit(self, body: EntryBody) -> None:
        """Let go of the wishes at the end, and begin anew when the run is extended."""
        if isinstance(body, FinishedBody) and lasting_end(body, self._history.settings) is not None:
            self._order = self._vote = None
        if isinstance(body, ExtendedBody):  # wishes that came since the end are for this one
            self.is_final = self._is_writing = self._is_believed = False
            self.reason = None
            self._votes.clear()
            self._effects.note(
                "extended", f"the run goes on: steps {body.steps_max}, tokens {body.tokens_max}; 0: no limit"
            )

    @property
    def end(self) -> FinishedBody | None:
        """The end of the run, once it is committed and this region was not started to extend it."""
        return lasting_end(self._history.finished, self._history.settings)

    def pump(self) -> None:
        """Write the final file once every fragment is at its final version, and stop the learner."""
        end = self.end
        if end is not None and not self._is_writing and tuple(self._versions.applied) == end.versions:
            self._is_writing = True
            self._effects.emit(WriteFinal())
            self.stop_learner()

    def learner_attached(self, incarnation: int) -> None:
        """A learner is there, perhaps a new one, whose script has not voted. It stops at once at the end."""
        if incarnation != self._incarnation:
            self._incarnation, self._vote = incarnation, None
        self.stop_learner()

    def stop_learner(self) -> None:
        """Stop the learner, if there is one and this region is at the end."""
        end = self.end
        if end is not None and self._is_writing and self._liveness.learner(self._region) is not None:
            self._effects.emit(StopLearner(end.reason, end.versions))

    def on_final_written(self) -> None:
        """Take it that the final file is on disk."""
        self.is_final = True
        self._effects.note("final", "final parameters are written")


def is_end(body: EntryBody) -> bool:
    """Whether an entry ends the run, or the rounds of a fragment."""
    return isinstance(body, FinishedBody) or (isinstance(body, RoundBody) and body.is_last)
