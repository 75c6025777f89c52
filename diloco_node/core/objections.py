"""Objections to entries that wait: what only this region's own disk and reports can tell, `EntryCheck` aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from diloco_node.core.events import Effect
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery.digest_watch import DigestWatch
from diloco_node.core.recovery.versions import MISSING_ROUNDS, Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discard_check import DiscardCheck
from diloco_node.core.rounds.run_end import RunEnd, is_end
from diloco_node.core.types import DiscardedBody, DiskNamedBody, EntryBody, RoundBody, SnapshotBody

WORD_TIMEOUTS: Final = 16
"""Lost steps, and a state that is another one here, wait for the word of a silent region for so many election timeouts:
it may have died after its report."""


class Objections:
    """Asked after each event about the entries that wait (`LedgerState.missing_payloads`).

    Attributes:
        discards: hears the reports of lost steps.
        digests: of the states here and elsewhere; None: the ledger is made of what the disk held, which was
            acknowledged before.
    """

    def __init__(
        self,
        context: RoundContext,
        versions: Versions,
        end: RunEnd,
        lives: Mapping[int, int],
        leader: Callable[[], str],
    ) -> None:
        self._versions, self._end, self.discards = versions, end, DiscardCheck(context, lives, leader)
        self._context, self._effects, self._absence = context, context.effects, context.liveness.absence
        # An eviction that is taken all the same.
        self._believed: EntryBody | None = None
        # An end is doubted for so long: if others knew a reason for it, a majority would have it by then.
        self._patience_ns = context.settings.election_timeout_ns
        # A learner whose lost steps wait, a digest, or "" for another entry, and since when; None: nothing waits.
        self._wait: tuple[str, int] | None = None
        self.digests: DigestWatch | None = None

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why this region does not acknowledge an entry now; empty if it may. Once it may, it may for ever."""
        if self.digests is None:
            return ""
        if isinstance(body, SnapshotBody):
            return "" if body == self._believed else self.digests.doubt(body)
        return self._reason_to_wait(body, now_ns) or self.discards.doubt(body, now_ns=now_ns)

    def _reason_to_wait(self, body: EntryBody, now_ns: int) -> str:
        """Return why an entry may be wrong, which others may know better."""
        absence_doubt = "" if body == self._believed else self._absence.doubt(body, now_ns=now_ns)
        return self._end.doubt(body, now_ns=now_ns) or absence_doubt

    def raise_against(self, ledger: LedgerCore, *, now_ns: int) -> list[Effect]:
        """Refuse an entry that is not what it says, and its leader; take it if a majority has committed it."""
        effects: list[Effect] = []
        wait, self._wait = self._wait, None
        is_settled = wait is not None
        missing = ledger.missing_payloads(rounds_max=MISSING_ROUNDS)
        for place, body in enumerate(missing):
            is_uncertain, name = ledger.is_staged(body), _name(body)
            is_new = wait is None or wait[0] != name or self._will_know(body, missing[:place])
            waited_ns = 0 if wait is None or is_new else now_ns - wait[1]
            # Who hands on another leader's entry does not know what the region reports, and is not to blame. Of an
            # earlier term of its own the region has the entry itself by now, and reports it no more.
            is_own = ledger.is_staged(body, leader=ledger.leader)
            is_late = waited_ns >= WORD_TIMEOUTS * self._patience_ns
            is_of_term = ledger.is_staged(body, term=ledger.term)
            is_blamed = is_late and is_of_term
            fault = self._versions.payload_fault(body) or self.discards.fault(body, is_late=is_blamed, now_ns=now_ns)
            if isinstance(body, SnapshotBody) and is_uncertain:
                fault = self._snapshot_fault(body)
            waits, doubt = self._reason_to_wait(body, now_ns), self.doubt(body, now_ns=now_ns)
            if not fault and not doubt:
                continue
            is_handed_on = is_uncertain and not is_own
            if (
                isinstance(body, DiscardedBody)
                and is_handed_on
                and not self.discards.is_impossible(body, now_ns=now_ns)
            ):
                fault = ""  # refused for ever, what an honest leader took in good faith would end all merging
            is_silent = not fault and self._is_patience_over(body, waited_ns, is_of_term=is_of_term, now_ns=now_ns)
            if not is_uncertain or is_silent:
                if fault or waits or is_silent:
                    is_alarm = not waits and not isinstance(body, SnapshotBody)
                    self._effects.note("committed", f"taken all the same: {fault or doubt}", is_alarm=is_alarm)
                self._versions.believe(body)
                self.discards.believe(body)
                if is_end(body):
                    self._end.believe()
                self._believed = body if isinstance(body, DiskNamedBody | SnapshotBody) else self._believed
                effects += ledger.payload_arrived(now_ns=now_ns)
                is_settled = False
            elif fault and ledger.leader:
                self.discards.heed(body)
                return effects + ledger.refuse(body, fault, now_ns=now_ns)
            elif waits and waited_ns >= self._patience_ns and ledger.leader:
                return effects + ledger.refuse(body, doubt, now_ns=now_ns)
            else:
                # What follows waits for it.
                self._wait = (name, now_ns - waited_ns)
                break
        if is_settled and self._wait is None:
            # What waited is not doubted any more, and no leader may be there whose message would have it taken.
            effects += ledger.payload_arrived(now_ns=now_ns)
        return effects

    def _is_patience_over(self, body: EntryBody, waited_ns: int, *, is_of_term: bool, now_ns: int) -> bool:
        """Whether an entry is taken although it is doubted here. is_of_term: it was made in the present term.

        An absence was true when it was booked in an earlier term, and its region may be back since. But a leader may
        date an entry back: so this region must have missed it, too, as far as it can know.
        """
        is_denied = isinstance(body, SnapshotBody) and self.digests is not None and self.digests.differs(body)
        if isinstance(body, DiscardedBody) or is_denied:
            return waited_ns >= WORD_TIMEOUTS * self._patience_ns
        was_away = isinstance(body, DiskNamedBody) and self._absence.has_missed(body.region, now_ns=now_ns)
        is_harmless = isinstance(body, SnapshotBody) or (was_away and not is_of_term)
        return is_harmless and waited_ns >= self._patience_ns

    def _will_know(self, body: EntryBody, before: Sequence[EntryBody]) -> bool:
        """Whether this region is still to reach the version of a state, whatever the others do: its own tells more.

        before: entries that wait for their payload, up to this one, which is not acknowledged before them anyway.
        """
        if not isinstance(body, SnapshotBody) or self.digests is None:
            return False
        is_behind = any(isinstance(lacking, RoundBody) for lacking in before)
        return is_behind or (self.digests.is_due(body) and body.fragment not in self._versions.healing)

    def _snapshot_fault(self, body: SnapshotBody) -> str:
        """Return why a majority can't have the state that a leader names; empty if it may."""
        is_voter = self._context.region in self._context.history.roster.voters
        is_refuted = self.digests is not None and self.digests.is_refuted(body, is_voter=is_voter)
        return f"a majority told another state of {body.fragment}/{body.version}" if is_refuted else ""


def _name(body: EntryBody) -> str:
    """Subject of the wait for an entry: a learner, a digest, or another entry."""
    if isinstance(body, SnapshotBody):
        return body.digest.hex()
    return body.learner if isinstance(body, DiscardedBody) else ""
