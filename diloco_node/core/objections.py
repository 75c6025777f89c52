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
        return self._suspicion(body, now_ns) or self.discards.doubt(body, now_ns=now_ns)

    def _suspicion(self, body: EntryBody, now_ns: int) -> str:
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
            is_new = wait is None or wait[0] != _name(body) or self._will_know(body, missing[:place])
            since_ns = now_ns if wait is None or is_new else wait[1]
            waited_ns = now_ns - since_ns
            fault = self._fault(body, ledger, waited_ns, now_ns=now_ns)
            reason, suspicion = fault or self.doubt(body, now_ns=now_ns), self._suspicion(body, now_ns)
            if not reason:
                continue
            is_patience_over = self._is_patience_over(body, ledger, waited_ns, now_ns=now_ns)
            # What is not staged any more a majority has.
            if not ledger.is_staged(body) or (is_patience_over and not fault):
                if fault or suspicion or is_patience_over:
                    is_alarm = not suspicion and not isinstance(body, SnapshotBody)
                    self._effects.note("committed", f"taken all the same: {reason}", is_alarm=is_alarm)
                self._believe(body)
                effects += ledger.payload_arrived(now_ns=now_ns)
                is_settled = False
            elif ledger.leader and (fault or (suspicion and waited_ns >= self._patience_ns)):
                self.discards.heed(body)
                return effects + ledger.refuse(body, reason, now_ns=now_ns)
            else:
                # What follows waits for it.
                self._wait = (_name(body), since_ns)
                break
        if is_settled and self._wait is None:
            # What waited is not doubted any more, and no leader may be there whose message would have it taken.
            effects += ledger.payload_arrived(now_ns=now_ns)
        return effects

    def _fault(self, body: EntryBody, ledger: LedgerCore, waited_ns: int, *, now_ns: int) -> str:
        """Return why an entry that waits is not what it says; empty if it may be."""
        is_staged = ledger.is_staged(body)
        if isinstance(body, SnapshotBody) and is_staged:
            return self._snapshot_fault(body)
        is_of_term = ledger.is_staged(body, term=ledger.term)
        is_blamed = is_of_term and waited_ns >= WORD_TIMEOUTS * self._patience_ns
        fault = self._versions.payload_fault(body) or self.discards.fault(body, is_late=is_blamed, now_ns=now_ns)
        # Who hands on another leader's entry does not know what the region reports, and is not to blame. Of an earlier
        # term of its own the region has the entry itself by now, and reports it no more.
        is_handed_on = is_staged and not ledger.is_staged(body, leader=ledger.leader)
        if isinstance(body, DiscardedBody) and is_handed_on and not self.discards.is_impossible(body, now_ns=now_ns):
            fault = ""  # refused for ever, what an honest leader took in good faith would end all merging
        return fault

    def _believe(self, body: EntryBody) -> None:
        """Doubt an entry no more."""
        self._versions.believe(body)
        self.discards.believe(body)
        if is_end(body):
            self._end.believe()
        if isinstance(body, DiskNamedBody | SnapshotBody):
            self._believed = body

    def _is_patience_over(self, body: EntryBody, ledger: LedgerCore, waited_ns: int, *, now_ns: int) -> bool:
        """Whether an entry is taken although it is doubted here.

        An absence was true when it was booked in an earlier term, and its region may be back since. But a leader may
        date an entry back: so this region must have missed it, too, as far as it can know.
        """
        is_denied = isinstance(body, SnapshotBody) and self.digests is not None and self.digests.differs(body)
        if isinstance(body, DiscardedBody) or is_denied:
            return waited_ns >= WORD_TIMEOUTS * self._patience_ns
        was_away = isinstance(body, DiskNamedBody) and self._absence.has_missed(body.region, now_ns=now_ns)
        is_harmless = isinstance(body, SnapshotBody) or (was_away and not ledger.is_staged(body, term=ledger.term))
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
