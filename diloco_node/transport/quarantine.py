"""Decides which peers are shut out for what they did, and for how long. Pure; times are monotonic nanoseconds.

Three strikes within ten minutes: ten minutes of quarantine, and twice as long each time, up to a day; after a free day
ten minutes again. An operator can lift it. A peer that the ledger expels is shut out until the ledger readmits it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from diloco_node.numeric import NS_PER_S

MINUTE_NS: Final = 60 * NS_PER_S

STRIKES: Final = 3
WINDOW_NS: Final = 600 * NS_PER_S
FIRST_NS: Final = 600 * NS_PER_S
LONGEST_NS: Final = 86_400 * NS_PER_S
EXPELLED_REASON: Final = "expelled (an operator's order is in the ledger)"

FORGIVEN_AFTER_NS: Final = 86_400 * NS_PER_S
"""After so long without quarantine the next one is as short as the first."""


@dataclass(slots=True)
class _Record:
    """The strikes of one peer.

    strikes_ns: the last ones, oldest first. until_ns: it is shut out before then; 0: it never was.
    length_ns: of the last quarantine. reason: of the last strike.
    """

    strikes_ns: deque[int] = field(default_factory=lambda: deque(maxlen=STRIKES))
    until_ns: int = 0
    length_ns: int = 0
    reason: str = ""


class Quarantine:
    """Counts strikes. peers: their names; nobody else is counted. expelled: by the ledger."""

    def __init__(self, peers: Iterable[str]) -> None:
        self._records = {peer: _Record() for peer in sorted(peers)}
        self.expelled: frozenset[str] = frozenset()

    def add_peer(self, peer: str) -> None:
        """Count the strikes of one more peer."""
        self._records.setdefault(peer, _Record())

    def strike(self, peer: str, reason: str, *, now_ns: int) -> bool:
        """Count what no honest peer does, but not in quarantine, nor twice; whether it is shut out from now on."""
        record = self._records.get(peer)
        if record is None or now_ns < record.until_ns:
            return False
        record.reason = reason
        record.strikes_ns.append(now_ns)
        if len(record.strikes_ns) < STRIKES or now_ns - record.strikes_ns[0] > WINDOW_NS:
            return False
        is_forgiven = now_ns - record.until_ns > FORGIVEN_AFTER_NS
        record.length_ns = FIRST_NS if not record.length_ns or is_forgiven else min(2 * record.length_ns, LONGEST_NS)
        record.until_ns = now_ns + record.length_ns
        record.strikes_ns.clear()
        return True

    def left_ns(self, peer: str, *, now_ns: int) -> int:
        """For how much longer a peer is shut out; 0: it is not."""
        record = self._records.get(peer)
        return max(0, record.until_ns - now_ns) if record is not None else 0

    def describe(self, peer: str, *, now_ns: int) -> str:
        """Why and for how long, for people; empty when it is not shut out."""
        if peer in self.expelled:
            return EXPELLED_REASON
        left_ns = self.left_ns(peer, now_ns=now_ns)
        if not left_ns:
            return ""
        # Whole minutes: a text that changes each second would be logged each time a dial is refused.
        minutes = -(-left_ns // MINUTE_NS)
        return f"in quarantine for {minutes} min more, after {STRIKES} strikes; {self._records[peer].reason}"

    def lift(self, peer: str) -> bool:
        """Forget what a peer did. Returns whether it was shut out or had strikes."""
        record = self._records.get(peer)
        if record is None:
            return False
        was = bool(record.until_ns or record.strikes_ns)
        self._records[peer] = _Record()
        return was
