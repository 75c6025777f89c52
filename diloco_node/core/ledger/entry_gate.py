"""Nothing gets into the log that makes no sense: entries are asked for their meaning before they are staged.

The meaning of an entry is not the ledger's business (`core.rounds.entry_check` knows it). The gate keeps that check in
step with the log, whatever is truncated and sent again, and remembers who sent what was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.messages import AppendEntries
from diloco_node.core.types import Entry, EntryBody, LeaderBody, LedgerBase
from diloco_node.errors import ProtocolViolation, StorageError


class Meaning(Protocol):
    """Follows the log entry by entry, and says whether the next one makes sense."""

    @property
    def index(self) -> int:
        """The last entry that was taken."""

    def fault(self, entry: Entry) -> str:
        """Return why the entry can't be the next one; empty if it can."""

    def doubt(self, entry: Entry) -> str:
        """Return why the leader of the entry's term made it wrongly; empty if it did not. Asked after `fault`."""

    def take(self, entry: Entry) -> None:
        """Take the entry as the next one."""

    def back_to(self, index: int) -> None:
        """Take back the entries after this index, none of which is settled: they are not in the log any more."""

    def settle(self, index: int) -> None:
        """Keep the entries up to this index for ever."""

    def begin(self, base: LedgerBase) -> None:
        """Begin with a base, as the log does, and forget everything before."""


def _first_fault(
    meaning: Meaning, entries: Sequence[Entry], *, is_doubtful: Callable[[Entry], bool] = lambda _: False
) -> str:
    """Return the first fault of the entries, and take those before."""
    before = meaning.index
    for entry in entries:
        fault = meaning.fault(entry) or (meaning.doubt(entry) if is_doubtful(entry) else "")
        if fault:
            # The log keeps what it has: the next question begins there again.
            meaning.back_to(before)
            return f"entry {entry.index}: {fault}"
        meaning.take(entry)
    return ""


def check_held(base: LedgerBase, entries: Sequence[Entry], meaning: Meaning) -> None:
    """Ask about the entries from the disk, before anything is built on them.

    Raises StorageError: they make no sense: the ledger is damaged.
    """
    try:
        if base.index:
            meaning.begin(base)
        fault = _first_fault(meaning, entries)
    except ProtocolViolation as error:
        fault = str(error)
    if fault:
        raise StorageError(f"the ledger on disk makes no sense: {fault}")


class EntryGate:
    """The check of entries before the log. log: read only.

    Attributes:
        refused: per peer, how many of its messages held an entry that can't be. faults: the last of them, in words.
        leaders: by term, as the log names them.
    """

    def __init__(self, log: ReplicaLog, meaning: Meaning) -> None:
        self.refused: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self._log = log
        self._meaning = meaning
        # Until when, by peer.
        self._distrusted_ns: dict[str, int] = {}
        self.leaders: dict[int, str] = {}
        self._learn(log.entries)

    @property
    def reason(self) -> str:
        """Peers whose entries were refused, in words; empty if there are none."""
        counts = [f"{peer} ({count} times)" for peer, count in sorted(self.refused.items())]
        return f"; refused entries of {', '.join(counts)}" if counts else ""

    def fault(self, request: AppendEntries, *, peer: str, committed_index: int) -> str:
        """Return why an entry of a peer's message can't be; empty if all can.

        It is also empty if the previous entry does not match: then none is taken. Entries in the log are not asked
        again. The sender answers for all that it made: the entries of this term, and of older terms that it led those
        that are not committed. Others may have been committed under other settings.
        An empty `peer` is a witness: it made none, and shows what may be committed long since.
        """
        if not self._log.has(request.previous_index, request.previous_hash):
            return ""
        new = [entry for entry in request.entries if not self._log.has(entry.index, entry.hash)]
        self._learn(new)

        def is_doubtful(entry: Entry) -> bool:
            is_own = not peer or self.leaders.get(entry.term, peer) == peer
            return (bool(peer) and entry.term == request.term) or (is_own and entry.index > request.commit_index)

        return self._fault_after(new, committed_index, is_doubtful) if new else ""

    def sealed(self, body: EntryBody, *, term: int, committed_index: int) -> Entry | str:
        """The next entry of a leader's log; or why it can't be one."""
        index = self._log.last_index + 1
        try:
            entry = seal(index, term, self._log.hash_at(index - 1), body)
        except ValueError as error:
            return str(error)
        return self._fault_after([entry], committed_index, lambda _: True) or entry

    def begin(self, base: LedgerBase) -> None:
        """Begin with a base, as the log does."""
        self._meaning.begin(base)

    def distrust(self, peer: str, *, until_ns: int) -> None:
        """Follow a peer no more, and give it no vote, until then: if the others elect it, it has to be tried again."""
        self._distrusted_ns[peer] = until_ns

    def refuse(self, peer: str, fault: str, *, until_ns: int) -> None:
        """Distrust a peer that sent an entry that can't be, for this reason."""
        self.refused[peer], self.faults[peer] = self.refused.get(peer, 0) + 1, fault
        self.distrust(peer, until_ns=until_ns)

    def trusts(self, peer: str, *, now_ns: int) -> bool:
        """Whether a peer may lead."""
        return now_ns >= self._distrusted_ns.get(peer, now_ns)

    def link_changed(self, peer: str) -> None:
        """Trust a peer again: another process may run there now."""
        self._distrusted_ns.pop(peer, None)

    def _learn(self, entries: Iterable[Entry]) -> None:
        """Remember who led which term. A term's first leader stays: a later claim is not its own."""
        for entry in entries:
            if isinstance(entry.body, LeaderBody):
                self.leaders.setdefault(entry.term, entry.body.leader)

    def _fault_after(self, entries: Sequence[Entry], committed_index: int, is_doubtful: Callable[[Entry], bool]) -> str:
        """Bring the check to where the log is before these entries, and ask."""
        meaning, index = self._meaning, entries[0].index - 1
        if meaning.index > index:
            meaning.back_to(index)
        while meaning.index < index:
            meaning.take(self._log.entry(meaning.index + 1))
        meaning.settle(min(committed_index, index))
        return _first_fault(meaning, entries, is_doubtful=is_doubtful)
