"""An operator's order of other settings: the leader puts them into the ledger between two merges.

A merge's weights, and the rates of its outer step, follow from the settings at its entry; every region works them out
again. So from the order on the leader decides no merge. It waits for those that it has decided, which end with their
ballots, and puts the settings behind them. Merges go on when they are committed.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.settings_body import SettingsBody

HOLD_NS: Final = 60_000_000_000
"""Merges that are decided end with their ballots. So long after the last deadline their entries may wait for a
majority; then an order is dropped, for no merge is decided in the meantime."""


class SettingsChange:
    """The leader's side; see the module."""

    def __init__(self, ledger: LedgerCore, history: RoundHistory, merges: RoundLeader) -> None:
        self._ledger, self._history, self._merges = ledger, history, merges
        # Ordered, and not in the ledger yet.
        self._body: SettingsBody | None = None
        # Merges are held for it until then, at most.
        self._limit_ns = 0
        # Of the entry of the last order.
        self._index = 0

    def order_fault(self, body: SettingsBody) -> str:
        """Say why these settings can't be ordered here and now, with the remedy; empty if they can."""
        # An order holds all the settings: it is made of those that the order before has left.
        applied_index = min(self._ledger.cluster_commit_index, self._history.account.index)
        if self._body is not None or self._index > applied_index:
            return "another change of the settings is not committed yet: try again"
        return self._fault(body)

    def _fault(self, body: SettingsBody) -> str:
        ledger = self._ledger
        if self._history.genesis is None:
            return "the run has not begun: change run.toml in all regions"
        if self._history.finished is not None or self._merges.is_ending:
            return "the run is over, or about to end"
        if not ledger.is_settled:
            return f"only the leader can do it: give the order to {ledger.leader or 'it, when there is one'}"
        return self._value_fault(body)

    def _value_fault(self, body: SettingsBody) -> str:
        settings = self._history.settings
        if body == SettingsBody.of(settings):
            return "the run has these settings already"
        return body.fault(len(self._history.roster.names), settings.heartbeat_ns)

    def carry_out(self, body: SettingsBody, effects: EffectBuffer, *, now_ns: int) -> list[Effect]:
        """Begin to carry out an order, if it still can be; what the ledger wants for it."""
        if fault := self.order_fault(body):
            effects.note("settings", f"an operator changes the settings: refused, {fault}", is_alarm=True)
            return []
        deadlines_ns = (round_.deadline_ns for round_ in self._merges.rounds.values() if round_.decision is not None)
        self._body, self._limit_ns = body, HOLD_NS + max(deadlines_ns, default=now_ns)
        return self.advance(effects, now_ns=now_ns)

    def advance(self, effects: EffectBuffer, *, now_ns: int) -> list[Effect]:
        """Put the settings that wait into the ledger once no merge is in the way; what the ledger wants for it."""
        body = self._body
        if body is None:
            return []
        fault = self._fault(body)
        if not fault and not self._merges.hold_merges(now_ns=now_ns):
            if now_ns < self._limit_ns:
                return []
            fault = "a merge that was decided before is not committed: look at `status`, and order it again"
        self._body = None
        last_index = self._ledger.last_index
        wishes = [] if fault else self._ledger.propose(body, now_ns=now_ns)
        if self._ledger.last_index == last_index:
            self._merges.go_on(now_ns=now_ns)
            effects.note("settings", f"the settings stay: {fault or 'the ledger refuses others'}", is_alarm=True)
        self._index = self._ledger.last_index
        return wishes
