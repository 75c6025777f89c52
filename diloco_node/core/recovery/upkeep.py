"""Upkeep of a long run: snapshots and sums go into the ledger, own states are compared with it."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from diloco_node.core.events import CheckpointWritten, DigestComputed
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.summary import decode_summary
from diloco_node.core.recovery.compaction import Compaction
from diloco_node.core.recovery.digest_watch import DigestWatch
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.types import Entry, EntryBody, GenesisBody, RoundBody, SnapshotBody

LEARNT_PER_CALL: Final = 64
"""Entries that `learn` reads in one call, as many as are applied in one."""


class Upkeep:
    """Snapshots, sums and comparisons of states during a run. digests: of this region and the others."""

    def __init__(self, context: RoundContext, ledger: LedgerCore, versions: Versions) -> None:
        history, effects = context.history, context.effects
        self._fragments = len(history.versions)
        self._history, self._effects = history, effects
        self._ledger, self._versions = ledger, versions
        snapshot_versions = context.settings.checkpoint_versions
        self.digests = DigestWatch(self._fragments, effects, history=history, snapshot_versions=snapshot_versions)
        self.compaction = Compaction(context, ledger, versions)
        self._learnt_index = ledger.base.index
        self._must_compare = False
        self._proposed: dict[int, tuple[int, int]] = {}

    @property
    def is_behind(self) -> bool:
        """Whether `learn` has more to read."""
        return self._learnt_index < self._ledger.cluster_commit_index

    def follow_base(self, *, now_ns: int) -> bool:
        """Go on from a base that the leader sent, if there is a new one."""
        base = self._ledger.take_base()
        if base is None:
            return False
        summary = decode_summary(base.summary, fragments=self._fragments)
        self._history.restore(summary, base.index, now_ns=now_ns)
        self._versions.begin_at(base.index)
        self.compaction.on_base()
        self._learnt_index = base.index
        return True

    def learn(self) -> None:
        """Learn which snapshots are committed, also beyond what the own disk can acknowledge."""
        last = min(self._ledger.cluster_commit_index, self._learnt_index + LEARNT_PER_CALL)
        for index in range(self._learnt_index + 1, last + 1):
            self._learn(self._ledger.entry(index))

    def _learn(self, entry: Entry) -> None:
        self._versions.learn(entry.body)
        self._learnt_index = entry.index

    def on_commit(self, entry: Entry) -> None:
        """The history and the versions have taken an entry."""
        if entry.index > self._learnt_index:  # the log may begin after it from now on
            self._learn(entry)
        self.compaction.on_entry(entry)
        self._must_compare |= isinstance(entry.body, SnapshotBody | GenesisBody)

    def digest_computed(self, event: DigestComputed, *, now_ns: int) -> None:
        """This region's digest of a version is known."""
        if event.fragment in self._versions.healing:
            return  # of what is set aside
        self.digests.on_digest(event.fragment, event.version, event.digest, now_ns=now_ns)
        self._must_compare = True

    def checkpoint_written(self, event: CheckpointWritten) -> None:
        """This region's own state is on disk."""
        snapshot = self._versions.checkpoint_written(event.fragment, event.version, event.digest)
        if snapshot is not None:
            self._versions.heal(snapshot, version_reached=self._newest_round(event.fragment))

    def compare(self) -> None:
        """Set aside what is not as the ledger names it."""
        if not self._must_compare:
            return
        self._must_compare = False
        for snapshot in self.digests.divergences():
            self._versions.heal(snapshot, version_reached=self._newest_round(snapshot.fragment))
            self.digests.forget(snapshot.fragment)

    def proposals(self, there: Container[str]) -> list[EntryBody]:
        """As leader: snapshots that a majority of the regions that are there agrees on, and the newest sum; once in
        each term."""
        if self._versions.healing:
            return []
        bodies: list[EntryBody] = []
        for body in self.digests.majority_snapshots(there):
            name = (self._ledger.term, body.version)
            if self._proposed.get(body.fragment, (0, 0)) < name:
                self._proposed[body.fragment] = name
                self._effects.note("snapshot", body.digest.hex(), fragment=body.fragment, version=body.version)
                bodies.append(body)
        summary = self.compaction.proposal()
        return [*bodies, summary] if summary is not None else bodies

    @property
    def reason(self) -> str:
        """Why this region should not lead now, in words: its state of a fragment is wrong, or most say so."""
        healing = self._versions.healing
        if healing:
            return (
                f"its state of fragment {', '.join(map(str, healing))} differs from the ledger's: it is fetched again"
            )
        minority = self.digests.minority_fragment() if self._ledger.is_leader else -1
        return f"its state of fragment {minority} differs from that of most regions" if minority >= 0 else ""

    def _newest_round(self, fragment: int) -> int:
        """The newest round of a fragment in the log: up to there this region may have acknowledged it."""
        for index in range(self._ledger.last_index, self._ledger.base.index, -1):
            body = self._ledger.entry(index).body
            if isinstance(body, RoundBody) and body.fragment == fragment:
                return body.version
        return self._history.versions[fragment]
