"""The committed past as rounds need it: versions, who was included up to where, which steps were discarded.

The leader and every member ask the same questions here before steps are merged, so that none counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diloco_node.core.data_shards import region_shards
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import Joined, RunSummary, summed_roster
from diloco_node.core.merge.outliers import RecentRounds, recent_after
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    Contribution,
    Entry,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    RevokedBody,
    RoundBody,
    RunSettings,
    SnapshotBody,
)


class Snapshots:
    """Per fragment the last two states whose digest is in the ledger. Version 0 counts as one: genesis names it."""

    def __init__(self, fragments: int) -> None:
        self._last: list[tuple[SnapshotBody, ...]] = [() for _ in range(fragments)]

    def begin(self, genesis: GenesisBody) -> None:
        """Begin with the states that genesis names."""
        self._last = [(SnapshotBody(at, 0, digest),) for at, digest in enumerate(genesis.fragment_digests)]

    def add(self, body: SnapshotBody) -> None:
        """Take a snapshot that an entry names: it is newer than the last one (`EntryCheck`)."""
        self._last[body.fragment] = (*self._last[body.fragment][-1:], body)

    def newest(self, fragment: int) -> SnapshotBody | None:
        """The newer snapshot, at which states are fetched; None before genesis."""
        last = self._last[fragment]
        return last[-1] if last else None

    def oldest(self, fragment: int) -> SnapshotBody | None:
        """The older snapshot, which others may still be fetching."""
        last = self._last[fragment]
        return last[0] if last else None

    def all(self) -> tuple[SnapshotBody, ...]:
        """All snapshots, by fragment and version."""
        return tuple(snapshot for pair in self._last for snapshot in pair)

    def restore(self, snapshots: tuple[SnapshotBody, ...]) -> None:
        """Go on from these, in their order."""
        self._last = [
            tuple(snapshot for snapshot in snapshots if snapshot.fragment == at) for at in range(len(self._last))
        ]


class RoundHistory:
    """The committed past, as far as rounds need it. Fed with committed entries in order.

    Attributes:
        settings: in force: where the ledger holds them, its own; else those that this region was started with.
        genesis: None until it is committed. versions: per fragment, the last committed version; -1 before genesis.
        version_entries, committed_at_ns: per fragment, the index of its entry, and when this region learnt of it.
        finished: the end of the run, once committed; None again when it is extended.
        roster: the members, by the committed entries; before genesis the founders.
        followers: called with the names of the members when the roster changes.
        revocations: certificates, by SHA-256.
        rounds_committed: over all fragments. rounds_included: per learner.
        recent: per fragment, its last rounds: how long an outer gradient usually is.
    """

    def __init__(
        self,
        fragments: int,
        founders: Iterable[str] = (),
        *,
        settings: RunSettings = RunSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.settings = settings
        self.recent = [RecentRounds() for _ in range(fragments)]
        self.genesis: GenesisBody | None = None
        self.versions = [-1] * fragments
        self.version_entries = [0] * fragments
        self.committed_at_ns = [0] * fragments
        self.finished: FinishedBody | None = None
        self.rounds_committed = 0
        self.account = Account()
        self.snapshots = Snapshots(fragments)
        self.rounds_included: dict[str, int] = {}
        self.roster = Roster.of_voters(founders)
        self.followers: tuple[Callable[[tuple[str, ...]], None], ...] = ()
        self.revocations: frozenset[bytes] = frozenset()
        # Per fragment the version of the run's last round; -1: it was not held yet.
        self._last_rounds = [-1] * fragments
        # As the newest entry has them; empty while the ledger holds none.
        self._settings_body: tuple[SettingsBody, ...] = ()

    def apply(self, entry: Entry, *, now_ns: int) -> None:
        """Take the next committed entry."""
        self.account.take(entry)
        self.account.settle(entry.index)
        self._follow(self.roster.after(entry))
        match entry.body:
            case GenesisBody() as body:
                self.genesis = body
                self._set(body.settings)
                self.snapshots.begin(body)
                self.versions = [0] * len(self.versions)
                self.version_entries = [entry.index] * len(self.versions)
                self.committed_at_ns = [now_ns] * len(self.versions)
            case RoundBody() as body:
                self._take_round(body)
                self.version_entries[body.fragment] = entry.index
                self.committed_at_ns[body.fragment] = now_ns
            case FinishedBody() as body:
                self.finished = body
            case ExtendedBody():
                self.finished = None
                self._last_rounds = [-1] * len(self.versions)
            case SnapshotBody() as body:
                self.snapshots.add(body)
            case RevokedBody() as body:
                self.revocations |= {body.certificate}
            case SettingsBody() as body:
                self._set((body,))

    def _set(self, bodies: tuple[SettingsBody, ...]) -> None:
        """Take the settings that the ledger holds from here on; none: it holds none."""
        self._settings_body = bodies
        for body in bodies:
            self.settings = body.within(self.settings)

    def _follow(self, roster: Roster) -> None:
        if roster is self.roster:
            return
        self.roster = roster
        for follow in self.followers:
            follow(roster.names)

    def sum_up(self) -> RunSummary:
        """Sum up all entries so far. It closes old incarnations: every region does it after the same entry."""
        fragments = len(self.versions)
        self.account.close_old(fragments)
        merged_tokens, discarded_tokens = self.account.totals(fragments)
        return RunSummary(
            genesis=() if self.genesis is None else (self.genesis,),
            finished=() if self.finished is None else (self.finished,),
            versions=tuple(self.versions),
            version_entries=tuple(self.version_entries),
            snapshots=self.snapshots.all(),
            merged=merged_tokens,
            discarded=discarded_tokens,
            covered=self.account.covered_lines(fragments),
            closed=self.account.closed_lines(),
            included=self.account.included_lines(),
            given_up=self.account.given_up_lines(),
            last_rounds=tuple(self._last_rounds),
            rounds_committed=self.rounds_committed,
            recent=tuple(recent.packed() for recent in self.recent),
            joined=tuple(Joined(learner, rounds) for learner, rounds in sorted(self.rounds_included.items())),
            members=self.roster.lines if self.genesis is not None else (),
            changes=self.roster.changes,
            signature=self.roster.signature,
            revocations=tuple(sorted(self.revocations)),
            settings=self._settings_body,
            shards=self.account.shards.lines(),
        )

    def restore(self, summary: RunSummary, index: int, *, now_ns: int) -> None:
        """Go on from a summary as if every entry up to `index` had been applied."""
        self.recent = [RecentRounds.unpacked(data) for data in summary.recent]
        self.genesis = summary.genesis[0] if summary.genesis else None
        self.finished = summary.finished[0] if summary.finished else None
        self.versions = list(summary.versions)
        self.version_entries = list(summary.version_entries)
        self.committed_at_ns = [now_ns] * len(self.versions)
        self.snapshots.restore(summary.snapshots)
        self.account.restore(summary, index)
        self._last_rounds = list(summary.last_rounds)
        self.rounds_committed = summary.rounds_committed
        self.rounds_included = {line.learner: line.rounds for line in summary.joined}
        self.revocations = frozenset(summary.revocations)
        self._set(summary.settings)
        self._follow(summed_roster(summary))

    def last_version(self, learner: str, fragment: int) -> int:
        """Return the last version of the fragment that includes any incarnation of this learner; -1 if none does."""
        last = self.account.last_inclusion(learner, fragment)
        return -1 if last is None else last.version

    def covered_step(self, learner: str, incarnation: int, fragment: int) -> int:
        """Return the step up to which an incarnation is merged or discarded; 0 if it is not."""
        return self.account.covered(learner, incarnation, fragment)[0]

    def is_last_round(self, fragment: int, version: int) -> bool:
        """Whether the version came of the run's last round of the fragment."""
        return version == self._last_rounds[fragment]

    def included_snapshot(self, learner: str, incarnation: int, fragment: int, *, base: int, version: int) -> int:
        """Return the incarnation's last snapshot that versions (base, version] include; -1 if they include none."""
        last = self.account.last_inclusion(learner, fragment)
        is_it = last is not None and base < last.version <= version and last.incarnation == incarnation
        return last.snapshot if is_it and last is not None else -1

    def contribution_fault(self, contribution: Contribution, *, version: int, incarnation_min: int) -> str:
        """Return why a contribution may not be merged into `version`; empty if it may. No step may count twice.

        incarnation_min: older incarnations of the learner are over, and their steps are booked as discarded.
        """
        if contribution.incarnation < max(incarnation_min, self.account.newest_incarnation(contribution.learner)):
            return f"incarnation {contribution.incarnation} of {contribution.learner} is over"
        if not 0 <= contribution.base_version < version:
            return f"base version {contribution.base_version} for a round to version {version}"
        return self.account.fault(contribution)

    def shards(self, run_id: str, region: str, incarnation: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return how often the members have changed, a region's shards of the data, and where its learner begins."""
        own = region_shards(run_id, region, self.roster.names)
        return self.roster.changes, own, self.account.shards.starts(region, incarnation, own)

    def _take_round(self, body: RoundBody) -> None:
        self.versions[body.fragment] = body.version
        self.rounds_committed += 1
        self.recent[body.fragment] = recent_after(self.recent, body)
        if body.is_last:
            self._last_rounds[body.fragment] = body.version
        for member in body.members:
            learner = member.contribution.learner
            self.rounds_included[learner] = self.rounds_included.get(learner, 0) + 1
