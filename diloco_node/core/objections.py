"""Objections to entries that wait: what only this region's own disk and reports can tell, `EntryCheck` aside."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.run_end import RunEnd
from diloco_node.core.types import EntryBody, RunSettings


class Objections:
    """Asked after each event about the entries that wait (`LedgerState.missing_payloads`)."""

    def __init__(
        self, ledger: LedgerCore, versions: Versions, end: RunEnd, effects: EffectBuffer, settings: RunSettings
    ) -> None:
        self._ledger, self._versions, self._end, self._effects = ledger, versions, end, effects
        # An end is doubted for so long: if others knew a reason for it, a majority would have it by then.
        self._patience_ns = settings.election_timeout_ns
        # Since when the end that waits is doubted; None: none is.
        self._doubted_ns: int | None = None

    def raise_against(self, bodies: Iterable[EntryBody], *, now_ns: int) -> list[Effect]:
        """Refuse an entry that is not what it says, and its leader; take it if a majority has committed it."""
        effects: list[Effect] = []
        since_ns, self._doubted_ns = self._doubted_ns, None
        for body in bodies:
            fault, doubt = self._versions.payload_fault(body), self._end.doubt(body, now_ns=now_ns)
            if not fault and not doubt:
                continue
            if not self._ledger.is_staged(body):
                self._effects.note("committed", f"taken all the same: {fault or doubt}", is_alarm=bool(fault))
                self._versions.believe(body)
                self._end.believe()
                effects += self._ledger.payload_arrived(now_ns=now_ns)
            elif fault or (since_ns is not None and now_ns - since_ns >= self._patience_ns):
                return effects + self._ledger.refuse(body, fault or doubt, now_ns=now_ns)
            else:
                self._doubted_ns = now_ns if since_ns is None else since_ns
        return effects
