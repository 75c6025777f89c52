"""Facts that the checkers remember of a region, as long as its daemon lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_node.core import messages as msg
from diloco_node.core.ledger.entries import ZERO_HASH


@dataclass(slots=True)
class RegionMemory:
    """Memory of a region.

    Attributes:
        commit_index: the highest that its current daemon has shown.
        counted_index, led_term: what it had counted as committed when it was last seen to lead, and the term.
        known_index: up to which its log was compared with the committed history.
        acknowledged: the last (index, hash) whose durability was verified on this disk.
        base_index: of the ledger at which its account was compared last.
        versions: per fragment the version applied in this life.
        unasked: by fragment that is lacking, since when nobody is asked for it.
        claims: by (fragment, version, digest) of a state, and (ballot, digest) of a payload, the peers that told of it.
        asked_end: where its log ended, as far as it counts, when the message came that asks for its vote; None: another
            event is handled.
        voted: by term, where its log ended when it decided its vote.
    """

    commit_index: int = 0
    counted_index: int = 0
    led_term: int = 0
    known_index: int = 0
    acknowledged: tuple[int, bytes] = (0, ZERO_HASH)
    base_index: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    unasked: dict[int, int] = field(default_factory=dict)
    claims: dict[tuple[object, ...], set[str]] = field(default_factory=dict)
    asked_end: tuple[int, int] | None = None
    voted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def hear(self, peer: str, message: object) -> None:
        """Note which bytes a peer says to have."""
        if isinstance(message, msg.PayloadDurable):
            self.claims.setdefault((message.ballot, message.digest), set()).add(peer)
        elif isinstance(message, msg.Heartbeat):
            for report in message.digests:
                self.claims.setdefault((report.fragment, report.version, report.digest), set()).add(peer)
