"""Objections to entries that wait: what only this region's own disk and reports can tell, `EntryCheck` aside."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_node.core.events import Effect
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery.versions import MISSING_ROUNDS, Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discard_check import DiscardCheck
from diloco_node.core.rounds.run_end import RunEnd
from diloco_node.core.types import EntryBody


class Objections:
    """Asked after each event about the entries that wait (`LedgerState.missing_payloads`)."""

    def __init__(self, context: RoundContext, versions: Versions, end: RunEnd, ended: Mapping[int, int]) -> None:
        self._versions, self._end, self._discards = versions, end, DiscardCheck(context, ended)
        self._effects = context.effects
        # An end is doubted for so long: if others knew a reason for it, a majority would have it by then.
        self._patience_ns = context.settings.election_timeout_ns
        # Since when the end that waits is doubted; None: none is.
        self._doubted_ns: int | None = None

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why this region does not acknowledge an entry now; empty if it may. Once it may, it may for ever."""
        return self._end.doubt(body, now_ns=now_ns) or self._discards.doubt(body, now_ns=now_ns)

    def raise_against(self, ledger: LedgerCore, *, now_ns: int) -> list[Effect]:
        """Refuse an entry that is not what it says, and its leader; take it if a majority has committed it."""
        effects: list[Effect] = []
        since_ns, self._doubted_ns = self._doubted_ns, None
        for body in ledger.missing_payloads(rounds_max=MISSING_ROUNDS):
            fault = self._versions.payload_fault(body) or self._discards.fault(body, now_ns=now_ns)
            end_doubt, doubt = self._end.doubt(body, now_ns=now_ns), self.doubt(body, now_ns=now_ns)
            if not fault and not doubt:
                continue
            if not ledger.is_staged(body):
                self._effects.note("committed", f"taken all the same: {fault or doubt}", is_alarm=bool(fault))
                self._versions.believe(body)
                self._discards.believe(body)
                if end_doubt:
                    self._end.believe()
                effects += ledger.payload_arrived(now_ns=now_ns)
            elif fault:
                self._discards.heed(body)
                return effects + ledger.refuse(body, fault, now_ns=now_ns)
            elif end_doubt:
                if since_ns is not None and now_ns - since_ns >= self._patience_ns:
                    return effects + ledger.refuse(body, doubt, now_ns=now_ns)
                self._doubted_ns = now_ns if since_ns is None else since_ns
        return effects
