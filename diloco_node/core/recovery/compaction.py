"""Summing the ledger up: every region does it after the same entries, and forgets those when nobody needs them.

A sum becomes the ledger's base when a majority has the same, at least `summary_entries` entries follow it (a region
that was away for a while gets those), and every fragment's state is on the own disk and in the ledger as a snapshot, at
its version there or a later one: no entry of an earlier round is needed any more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.summary import base_digest, encode_summary
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.types import Entry, LedgerBase, SummaryBody

SUMS_KEPT: Final = 4
"""Own sums that may still become the base. While snapshots lag behind, the log grows and the oldest sums go."""


class Compaction:
    """Decides when the ledger is summed up, and when entries may go."""

    def __init__(self, context: RoundContext, ledger: LedgerCore, versions: Versions) -> None:
        # Between two sums.
        self._summary_entries = context.settings.summary_entries
        self._history, self._effects = context.history, context.effects
        self._ledger, self._versions = ledger, versions
        self._sums: OrderedDict[int, tuple[LedgerBase, tuple[int, ...]]] = OrderedDict()
        self._agreed: set[int] = set()
        self._proposed = (0, 0)

    def on_entry(self, entry: Entry) -> None:
        """The history has taken a committed entry: sum up if it is one after which that is done."""
        body = entry.body
        if isinstance(body, SummaryBody):
            self._compare(body)
        if entry.index % self._summary_entries:
            return
        summary = self._history.sum_up()
        if not summary.genesis:
            return
        try:
            summary_bytes = encode_summary(summary)
        except ValueError as error:
            self._effects.note("summary", f"entry {entry.index}: {error}; the ledger stays whole", is_alarm=True)
            return
        base = LedgerBase(entry.index, entry.term, entry.hash, summary_bytes)
        self._sums[entry.index] = (base, summary.versions)
        if len(self._sums) > SUMS_KEPT:
            self._agreed.discard(self._sums.popitem(last=False)[0])

    def on_base(self) -> None:
        """The ledger has another beginning: sums of before are of no use."""
        self._sums = OrderedDict(item for item in self._sums.items() if item[0] > self._ledger.base.index)
        self._agreed.intersection_update(self._sums)

    def proposal(self) -> SummaryBody | None:
        """The newest sum, for the leader to put into the ledger; once in each term."""
        index = next(reversed(self._sums), 0)
        if index in self._agreed or index == 0 or (self._ledger.term, index) <= self._proposed:
            return None
        self._proposed = (self._ledger.term, index)
        return SummaryBody(index, base_digest(self._sums[index][0]))

    def next_base(self) -> LedgerBase | None:
        """Return the base with which the ledger may begin now; None if it is to stay as it is."""
        for index in sorted(self._agreed, reverse=True):
            base, versions = self._sums[index]
            is_old = self._history.account.index - index >= self._summary_entries
            if is_old and self._ledger.commit_index >= index and self._versions.has_states(versions):
                return base
        return None

    def _compare(self, body: SummaryBody) -> None:
        own_base = self._sums.get(body.index, (self._ledger.base,))[0]
        if own_base.index != body.index:
            return
        if base_digest(own_base) != body.digest:
            self._effects.note(
                "summary",
                f"up to entry {body.index} this region has other sums than the ledger names: the token account, "
                "versions or snapshots differ here; its ledger stays whole",
                is_alarm=True,
            )
            self._sums.pop(body.index, None)
        elif body.index in self._sums:
            self._agreed.add(body.index)
