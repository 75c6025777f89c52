"""What the leader does next about rounds: open one that is due, hold the last ones, or close the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diloco_node.core.effects_buffer import Outbox
from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.rounds.eligibility import Electorate
from diloco_node.core.rounds.ending import Ending, begin_ending, end_reason
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.rounds.opening import Opener, Opening
from diloco_node.core.types import FinishedBody, RunSettings

WAIT_SAID_NS: Final = 2_000_000_000
"""How long nothing was opened when the reason goes into the log; status shows it at once."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends without the last round of this fragment, which took too long."""

    fragment: int


Step = Opening | GiveUp | FinishedBody


class Agenda:
    """Asked for one step after the other until there is none. Made anew for each term of a leader.

    Attributes:
        reason: why no (further) round is open, in words.
        wake_at_ns: when to ask again even if nothing happens.
    """

    def __init__(
        self,
        *,
        regions: tuple[str, ...],
        fragments: int,
        settings: RunSettings,
        history: RoundHistory,
        liveness: Liveness,
        electorate: Electorate,
        outbox: Outbox,
    ) -> None:
        self.reason = ""
        self.wake_at_ns: int | None = None
        self.opener = Opener(settings=settings, fragments=fragments, history=history, liveness=liveness)
        self._regions = regions
        self._fragments = fragments
        self._settings = settings
        self._history = history
        self._liveness = liveness
        self._electorate = electorate
        self._outbox = outbox
        self._resting: dict[int, int] = {}
        self._ending: Ending | None = None
        self._is_finishing = False
        self._finish_asked = ""

    @property
    def is_ending(self) -> bool:
        """Whether the last rounds are being held."""
        return self._ending is not None

    def finish_wanted(self, reason: str) -> None:
        """An operator asks for the end of the run."""
        self._finish_asked = self._finish_asked or reason

    def abandoned(self, fragment: int, *, now_ns: int) -> None:
        """A round was given up: let the fragment rest for a heartbeat.

        Members that decline at once would otherwise decline for ever, in one event.
        """
        self._resting[fragment] = now_ns + self._settings.heartbeat_ns

    def committed(self, one: OpenRound, *, now_ns: int) -> None:
        """A round that was opened here is committed."""
        self.opener.committed(now_ns - one.opened_at_ns)
        if one.is_last and self._ending is not None:
            self._ending.pending.discard(one.fragment)

    def next_step(self, rounds: Mapping[int, OpenRound], *, now_ns: int) -> Step | None:
        """What to do now; None if something is waited for.

        Args:
            rounds: those that are open, by fragment.
        """
        self.wake_at_ns = None
        self._resting = {fragment: until_ns for fragment, until_ns in self._resting.items() if until_ns > now_ns}
        if self._history.genesis is None:
            self.reason = "waits for genesis"
            return None
        if self._history.finished is not None or self._is_finishing:
            self.reason = "the run is finished"
            return None
        if self._has_ended(now_ns):
            return self._next_last(rounds, now_ns)
        return self._next_due(rounds, now_ns)

    def _next_due(self, rounds: Mapping[int, OpenRound], now_ns: int) -> Opening | None:
        surroundings = self._electorate.look_around(now_ns=now_ns)
        opening = self.opener.choose(surroundings, rounds, self._resting, self._electorate, now_ns=now_ns)
        self.reason, self.wake_at_ns = self.opener.reason, self.opener.wake_at_ns
        if opening is None:
            self._say_why_nothing_opens(rounds, now_ns)
        return opening

    def _say_why_nothing_opens(self, rounds: Mapping[int, OpenRound], now_ns: int) -> None:
        """Between two rounds there is always something to wait for: say it when it takes longer than that."""
        is_usual = bool(rounds) or now_ns - self.opener.last_open_ns < WAIT_SAID_NS
        said = "" if is_usual else "".join(letter for letter in self.reason if not letter.isdigit())
        self._outbox.note_change("waits", said, self.reason)

    def _has_ended(self, now_ns: int) -> bool:
        if self._ending is None:
            steps = []
            for name in self._regions:
                status = self._liveness.learner(name)
                if status is not None:
                    steps.append(status.step + self._history.steps_before(name, status.incarnation))
            tokens = self._history.account.merged_tokens(self._fragments)
            reason = end_reason(self._settings, steps=steps, tokens=tokens, asked=self._finish_asked)
            if not reason:
                return False
            timing = self.opener.timing(self._electorate.look_around(now_ns=now_ns))
            self._ending = begin_ending(
                self._settings, reason, fragments=self._fragments, step_time_ns=timing.step_time_ns, now_ns=now_ns
            )
            self._outbox.note("ending", f"{reason}: one last round per fragment")
        return True

    def _next_last(self, rounds: Mapping[int, OpenRound], now_ns: int) -> Step | None:
        """The last rounds: no quorum, no pacing. Rounds that were open before are finished first."""
        ending = self._ending
        assert ending is not None
        for fragment in sorted(ending.pending):
            step = self._advance_last(ending, fragment, rounds, now_ns)
            if step is not None:
                return step
        self.reason = f"ending: last rounds of {len(ending.pending)} fragments to go"
        if ending.pending or rounds:
            return None
        self._is_finishing = True
        return FinishedBody(tuple(self._history.versions), ending.reason)

    def _advance_last(
        self, ending: Ending, fragment: int, rounds: Mapping[int, OpenRound], now_ns: int
    ) -> Opening | GiveUp | None:
        one = rounds.get(fragment)
        if one is None and len(rounds) >= self._settings.rounds_in_flight_max:
            return None
        give_up_ns = ending.allow(fragment, now_ns=now_ns, ballot_ns=self._settings.ballot_deadline_min_ns)
        is_over = now_ns >= give_up_ns
        if one is None:
            return self._open_last(ending, fragment, is_over, now_ns)
        if not is_over or one.is_proposed:
            return None
        ending.pending.discard(fragment)
        return GiveUp(fragment)

    def _open_last(self, ending: Ending, fragment: int, is_over: bool, now_ns: int) -> Opening | None:
        """The last round of a fragment with everybody, after a while with those who can; without any it is skipped."""
        surroundings = self._electorate.look_around(now_ns=now_ns)
        members, excluded = self._electorate.members(fragment, surroundings, now_ns=now_ns)
        must_wait = fragment in self._resting or (bool(excluded) and now_ns < ending.ready_by_ns)
        if must_wait and not is_over:
            return None
        if members and not is_over:
            return Opening(fragment, "the last round", is_last=True)
        self._outbox.note("skipped", "no learner contributes to a last round", fragment=fragment)
        ending.pending.discard(fragment)
        return None
