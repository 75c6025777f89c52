"""Entries of a leader that say what the other regions have: this region looks whether it has it, or heard of it.

An honest leader proposes a round when a majority has its payload from the ballot, a snapshot when a majority has told
its digest, and a folder that its region has told. So each of that majority bears the entry
out at once, and the others wait until it is committed.

An entry that stays uncommitted for an election timeout is refused where it contradicts what is known here. Otherwise it
is taken: regions of the majority may have died since, and their payload must not be lost. A leader of whose rounds that
is true again and again makes them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from diloco_node.core.recovery.digest_watch import DigestWatch
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody, EntryBody, RoundBody, SnapshotBody

REMEMBERED_MAX: Final = 4096
"""Entries of which the answer is remembered."""


class Corroboration:
    """Asked about each entry that this region is to acknowledge.

    leader: of the term; empty while there is none. payloads_before: fragment, version and digest of the payloads that
    the disk held at the start.
    """

    def __init__(
        self,
        context: RoundContext,
        versions: Versions,
        participant: RoundParticipant,
        digests: DigestWatch,
        leader: Callable[[], str],
        *,
        payloads_before: Collection[tuple[int, int, bytes]],
    ) -> None:
        self._region, self._liveness, self._context = context.region, context.liveness, context
        self._versions, self._participant, self._digests, self._leader = versions, participant, digests, leader
        self._payloads_before = frozenset(payloads_before)
        self._patience_ns = context.settings.election_timeout_ns
        # By entry, since when it is doubted; None: it is borne out, for good.
        self._doubted_ns: dict[EntryBody, int | None] = {}
        # By leader and term, its rounds that were taken although nobody bore them out.
        self._taken: Counter[tuple[str, int]] = Counter()
        # An entry was borne out that was doubted before.
        self._has_news = False

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why this region does not bear an entry out; empty if it does, or did once."""
        if not isinstance(body, RoundBody | SnapshotBody | DiskNamedBody):
            return ""
        is_first = body not in self._doubted_ns
        if not is_first and self._doubted_ns[body] is None:
            return ""
        reason = "" if self._leader() == self._region else self._reason(body)
        if not reason:
            self.accept(body)
        elif is_first:
            self._remember(body, now_ns)
        return reason

    def accept(self, body: EntryBody) -> None:
        """Take an entry: it is borne out, committed, or nobody is there to say more."""
        self._has_news |= self._doubted_ns.get(body) is not None
        if isinstance(body, RoundBody | SnapshotBody | DiskNamedBody):
            self._remember(body, None)

    def take_news(self) -> bool:
        """Whether an entry was borne out, since the last call, that was doubted before."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def is_late(self, body: EntryBody, *, now_ns: int) -> bool:
        """Whether an entry was doubted for so long that a majority would have committed it."""
        since_ns = self._doubted_ns.get(body)
        return since_ns is not None and now_ns - since_ns >= self._patience_ns

    def fault(self, body: EntryBody) -> str:
        """Return why a late entry is refused; empty if it is taken all the same."""
        reason = self._reason(body)
        if isinstance(body, RoundBody) and not self._participant.has_assembled(body, another=True):
            name = (self._leader(), body.ballot.term)
            self._taken[name] += 1
            # Of those that were open at once each may be true.
            return reason if self._taken[name] > self._context.settings.rounds_in_flight_max else ""
        is_contradiction = not isinstance(body, SnapshotBody) or self._digests.contradicts(body)
        return reason if is_contradiction else ""

    def _reason(self, body: EntryBody) -> str:
        if isinstance(body, SnapshotBody):
            return self._digests.doubt(body)
        if isinstance(body, DiskNamedBody):
            disk = self._liveness.disk_of(body.region)
            is_other = disk and body.disk not in (disk, b"", EVICTED, EXPELLED)
            return f"{body.region} has told the folder {disk.hex()}, and no other" if is_other else ""
        assert isinstance(body, RoundBody)
        # This process does not remember the ballots of the one before.
        is_old = (body.fragment, body.version, body.payload_digest) in self._payloads_before
        version_here = max(self._versions.applied[body.fragment], self._versions.states[body.fragment])
        if self._participant.has_assembled(body) or is_old or version_here >= body.version:
            return ""
        return f"the payload of {body.fragment}/{body.version} is none that came here in ballot {body.ballot}"

    def _remember(self, body: EntryBody, since_ns: int | None) -> None:
        self._doubted_ns[body] = since_ns
        if len(self._doubted_ns) > REMEMBERED_MAX:
            del self._doubted_ns[next(iter(self._doubted_ns))]
