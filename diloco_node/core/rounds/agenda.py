"""The leader's next step: open a round that is due, hold the last rounds, or close the run.

A run ends with one last round per fragment, with everybody who can be reached, and then the entry that says so. It
ends by its limits only when a majority of the regions has or had a learner: one alone would end it at its own pace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from diloco_node.core.rounds.ballot import first_duration_ns
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.eligibility import Eligibility
from diloco_node.core.rounds.extension import extension
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.rounds.opening import Opener, Opening
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.types import NO_STEPS, ExtendedBody, FinishedBody, RunSettings

WAIT_NOTE_NS: Final = 2_000_000_000
"""How long nothing was opened when the reason goes into the log; status shows it at once."""

READY_STEPS: Final = 4
"""Steps that late members get to be ready for the last round of a fragment."""

GIVE_UP_BALLOTS: Final = 8
"""A fragment's last round may take as long as this many first ballots; then the run ends without it. That is enough for
three ballots, each twice as long as the one before, and some time to be ready."""

LAST_WAIT_NS_MAX: Final = 600_000_000_000
"""Most that a first ballot of a last round, or the time to be ready for it, counts: both go by what regions say. No
longer do the last rounds wait for learners that evaluate or save: one that hangs looks the same from here."""

SHARE_MIN_PART: Final = 32
"""A run ends by tokens only if the median live learner has at least one 32nd of its fair share of them.

So no single learner ends the run with a huge count. One of four may train 125 times as much as each other before this
rule delays the end.
"""

REASON_CHARACTERS_MAX: Final = 200
"""Longest reason of an operator that is kept: it goes into the ledger of every region."""


@dataclass(slots=True)
class Ending:
    """The run is being closed by this leader. reason: what ended it, in words.

    pending: fragments whose last round is not committed (or given up).
    ready_by_ns: until then a last round waits for every live learner, afterwards it takes those that can.
    ready_ns: how long that is. pauses_until_ns: no pause of a learner is waited for after that.
    turns: per fragment, since when its last round could be held, and the longest first ballot of its rounds.
    waits: per fragment the learners whose pause its last round waits for.
    excused: fragments whose ballot was abandoned for learners that may have paused, though it is not sure yet.
    """

    reason: str
    pending: set[int]
    ready_by_ns: int
    ready_ns: int
    pauses_until_ns: int
    turns: dict[int, tuple[int, int]] = field(default_factory=dict)
    waits: dict[int, tuple[str, ...]] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)

    def allow(self, fragment: int, *, now_ns: int, ballot_ns: int) -> int:
        """When the fragment's last round is given up. ballot_ns: of a first ballot over the links that there are."""
        since_ns, longest_ns = self.turns.get(fragment, (max(now_ns, self.ready_by_ns), 0))
        longest_ns = max(longest_ns, min(ballot_ns, LAST_WAIT_NS_MAX))
        self.turns[fragment] = since_ns, longest_ns
        return since_ns + GIVE_UP_BALLOTS * longest_ns

    def put_off(self, fragment: int, learners: tuple[str, ...], *, now_ns: int) -> None:
        """Wait for the end of a pause; then all have as much time as at the beginning."""
        self.waits[fragment] = learners
        self.turns.pop(fragment, None)
        self.excused.discard(fragment)
        self.ready_by_ns = now_ns + self.ready_ns


def end_reason(
    settings: RunSettings, *, steps: Iterable[int], tokens: int, booked_tokens: Iterable[int], reason_ordered: str
) -> str:
    """Why the run ends now; empty while it goes on. A single learner's claims about itself end no run.

    steps: of each learner that counts (`RunProgress.learner_steps`). tokens: merged, mean over the fragments.
    booked_tokens: of each, in the ledger; asked only when enough are merged. reason_ordered: empty without a request.
    """
    if reason_ordered:
        return reason_ordered
    median = median_low(list(steps) or [0])
    if 0 < settings.steps_max <= median:
        return f"the median learner made {settings.steps_max} of {settings.steps_max} steps"
    if 0 < settings.tokens_max <= tokens:
        shares = list(booked_tokens)
        if shares and SHARE_MIN_PART * len(shares) * median_low(shares) >= settings.tokens_max:
            return f"{tokens} of {settings.tokens_max} tokens are merged"
    return ""


def begin_ending(settings: RunSettings, reason: str, *, fragments: int, step_time_ns: int, now_ns: int) -> Ending:
    """Begin to close the run."""
    ready_ns = max(settings.ballot_deadline_min_ns, min(READY_STEPS * step_time_ns, LAST_WAIT_NS_MAX))
    return Ending(reason, set(range(fragments)), now_ns + ready_ns, ready_ns, now_ns + LAST_WAIT_NS_MAX)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends without the last round of this fragment, which took too long."""

    fragment: int


Step = Opening | GiveUp | FinishedBody | ExtendedBody


class Agenda:
    """Asked for one step after the other until there is none. Built anew for each term of a leader.

    Attributes:
        reason: why no (further) round is open, in words. wake_at_ns: when to ask again even if nothing happens.
    """

    def __init__(self, context: RoundContext, eligibility: Eligibility, progress: RunProgress) -> None:
        self.reason = ""
        self.wake_at_ns: int | None = None
        self.opener = Opener(context)
        self._fragments = len(context.fragments)
        self._history, self._effects = context.history, context.effects
        self._eligibility = eligibility
        self._progress = progress
        self._resting: dict[int, int] = {}
        self._ending: Ending | None = None
        self._is_finishing = self._is_extending = False
        self._finish_ordered = ""

    @property
    def is_ending(self) -> bool:
        """Whether the last rounds are being held."""
        return self._ending is not None

    def request_finish(self, reason: str) -> None:
        """End the run, as an operator or the scripts of a majority ask."""
        self._finish_ordered = self._finish_ordered or reason[:REASON_CHARACTERS_MAX] or "an operator asked for the end"

    def on_abandon(self, fragment: int, *, now_ns: int) -> None:
        """Let the fragment rest for a heartbeat: members that decline at once would decline for ever, in one event."""
        self._resting[fragment] = now_ns + self._history.settings.heartbeat_ns

    def on_commit(self, round_: OpenRound, *, now_ns: int) -> None:
        """Take the commit of a round that was opened here."""
        self.opener.on_commit(now_ns - round_.opened_at_ns)
        if round_.is_last and self._ending is not None:
            self._ending.pending.discard(round_.fragment)
            contributions = round_.decision.contributions if round_.decision else ()
            members = {item.learner for item in contributions}
            # What they have made since is carried, as what contributors have made since theirs.
            members |= {name for name, reason in round_.refusals.items() if reason == NO_STEPS}
            cause = "their contributions to the last round did not come, or were refused"
            self._note_unmerged(round_.fragment, cause, now_ns, members)

    def pausing_members(self, round_: OpenRound, *, now_ns: int) -> tuple[str, ...]:
        """Return the members of a last round's ballot that did not contribute, for they make no steps at the moment.

        Their steps would be in no merge: the round is to be opened again when they go on. Once between two pauses a
        learner is believed to pause before that is sure, at a ballot's deadline.
        """
        ending, fragment = self._ending, round_.fragment
        if ending is None or not round_.is_last or fragment not in ending.pending:
            return ()
        is_sure = fragment in ending.excused or now_ns < round_.deadline_ns
        half_ns = round_.ballot_at_ns + round_.deadline.duration_ns // 2
        pausing = self._pausing(ending, fragment, now_ns, None if is_sure else half_ns)
        names = tuple(name for name in round_.missing_members() if name in pausing)
        if names:
            ending.excused.add(fragment)
        return names

    def next_step(self, rounds: Mapping[int, OpenRound], *, now_ns: int) -> Step | None:
        """Return what to do now; None if something is waited for. rounds: those that are open, by fragment."""
        self.wake_at_ns = None
        self._resting = {fragment: until_ns for fragment, until_ns in self._resting.items() if until_ns > now_ns}
        if self._history.genesis is None:
            self.reason = "waits for genesis"
            return None
        if self._history.finished is not None or self._is_finishing:
            self.reason = "the run is finished"
            further = None if self._is_extending else extension(self._history.finished, self._history.settings)
            self._is_extending |= further is not None
            return further
        if self.has_ended(now_ns=now_ns):
            return self._next_last(rounds, now_ns)
        reachability = self._eligibility.reachability(now_ns=now_ns)
        opening = self.opener.choose(reachability, rounds, self._resting, self._eligibility, now_ns=now_ns)
        self.reason, self.wake_at_ns = self.opener.reason, self.opener.wake_at_ns
        if opening is None:
            # Between two rounds there is always something to wait for: say it when it takes longer than that.
            is_usual = bool(rounds) or now_ns - self.opener.last_open_ns < WAIT_NOTE_NS
            state = "" if is_usual else "".join(letter for letter in self.reason if not letter.isdigit())
            self._effects.note_change("waits", state, self.reason)
        return opening

    def has_ended(self, *, now_ns: int) -> bool:
        """Whether the last rounds are due, or being held; from now on if a limit is reached."""
        if self._ending is None and self._history.genesis is not None and self._history.finished is None:
            account = self._history.account
            names = self._progress.learners(now_ns=now_ns) if self._progress.has_quorum else []
            reason = end_reason(
                self._history.settings,
                steps=map(self._progress.steps_of, names),
                tokens=account.merged_tokens(self._fragments),
                booked_tokens=(account.covered_tokens(name, self._fragments) for name in names),
                reason_ordered=self._finish_ordered,
            )
            if not reason:
                return False
            timing = self.opener.timing(self._eligibility.reachability(now_ns=now_ns))
            settings, step_time_ns = self._history.settings, timing.step_time_ns
            self._ending = begin_ending(
                settings, reason, fragments=self._fragments, step_time_ns=step_time_ns, now_ns=now_ns
            )
            self._effects.note("ending", f"{reason}: one last round per fragment")
        return self._ending is not None

    def _next_last(self, rounds: Mapping[int, OpenRound], now_ns: int) -> Step | None:
        """The last rounds: no quorum, no pacing. Rounds that were open before are finished first."""
        ending = self._ending
        assert ending is not None
        ending.waits.clear()
        for fragment in sorted(ending.pending):
            step = self._advance_last(ending, fragment, rounds, now_ns)
            if step is not None:
                return step
        names = sorted({name for learners in ending.waits.values() for name in learners})
        pauses = f"; waits for the learners of {', '.join(names)}, which make no steps: an evaluation?" if names else ""
        self.reason = f"ending: last rounds of {len(ending.pending)} fragments to go{pauses}"
        self._effects.note_change("waits", pauses, self.reason)
        if ending.pending or rounds:
            return None
        self._is_finishing = True
        limits = (self._history.settings.steps_max, self._history.settings.tokens_max)
        return FinishedBody(tuple(self._history.versions), ending.reason, *limits)

    def _advance_last(
        self, ending: Ending, fragment: int, rounds: Mapping[int, OpenRound], now_ns: int
    ) -> Opening | GiveUp | None:
        round_ = rounds.get(fragment)
        if round_ is None and len(rounds) >= self._history.settings.rounds_in_flight_max:
            return None
        if round_ is None and (pausing := self._pausing(ending, fragment, now_ns)):
            ending.put_off(fragment, pausing, now_ns=now_ns)
            return None
        ballot_ns = self._history.settings.ballot_deadline_min_ns
        if round_ is not None:  # where links are slow it takes minutes, and nothing else merges the last steps
            ballot_ns = max(ballot_ns, first_duration_ns(round_.deadline, round_.attempt))
        is_over = now_ns >= ending.allow(fragment, now_ns=now_ns, ballot_ns=ballot_ns)
        if round_ is None:
            return self._open_last(ending, fragment, is_over, now_ns)
        if not is_over or round_.is_proposed:
            return None
        self._note_unmerged(fragment, f"the last round is given up while it {round_.wait_reason()}", now_ns)
        ending.pending.discard(fragment)
        return GiveUp(fragment)

    def _open_last(self, ending: Ending, fragment: int, is_over: bool, now_ns: int) -> Opening | None:
        """Open a fragment's last round with everybody, after a while with those who can; skip it if nobody can."""
        reachability = self._eligibility.reachability(now_ns=now_ns)
        members, ineligible = self._eligibility.members(fragment, reachability, now_ns=now_ns)
        must_wait = fragment in self._resting or (bool(ineligible) and now_ns < ending.ready_by_ns)
        if must_wait and not is_over:
            return None
        if members and not is_over:
            return Opening(fragment, "the last round", is_last=True)
        self._effects.note("skipped", "no learner contributes to a last round", fragment=fragment)
        self._note_unmerged(fragment, "no last round could be held with them", now_ns)
        ending.pending.discard(fragment)
        return None

    def _pausing(self, ending: Ending, fragment: int, now_ns: int, since_ns: int | None = None) -> tuple[str, ...]:
        if now_ns >= ending.pauses_until_ns:
            return ()
        return self._eligibility.pausing(fragment, now_ns=now_ns, max_ns=LAST_WAIT_NS_MAX, since_ns=since_ns)

    def _note_unmerged(self, fragment: int, cause: str, now_ns: int, members: Collection[str] = ()) -> None:
        """Tell whose last steps the run ends without. members: of the last round, or with nothing to give to it."""
        names = [name for name in self._eligibility.unmerged(fragment, now_ns=now_ns) if name not in members]
        if names:
            text = f"the run ends without the last steps of {', '.join(names)}: {cause}"
            self._effects.note("skipped", text, fragment=fragment, is_alarm=True)
