"""Versions of each fragment that this region holds: on disk, in memory, and offered to its learner.

Payloads and states on disk let an entry be acknowledged. Entries are applied in order per fragment, one at a time.

States are fetched at a snapshot of the ledger only. Where an own state is not what the ledger names, its files are set
aside, the snapshot's state is fetched, and the payloads after it are applied. Until then no further round of the
fragment is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import AdoptState, ApplyVersion, OfferVersion, PruneFiles, SetStatesAside
from diloco_node.core.merge.numbers import is_same_norm
from diloco_node.core.recovery.fetches import INITIAL_PATIENCE_NS, Fetches
from diloco_node.core.recovery.initial_digests import InitialDigests
from diloco_node.core.rounds.history import RoundHistory, Snapshots
from diloco_node.core.types import Entry, EntryBody, GenesisBody, LearnerStatus, Recovered, RoundBody, SnapshotBody

PAYLOADS_RATHER_MAX: Final = 8
"""A fragment that lacks more payloads than this is fetched as state: 8 bytes a value against about one per payload."""

MISSING_ROUNDS: Final = PAYLOADS_RATHER_MAX + 2
"""Missing rounds of a fragment that are looked at: more would change no fetch. One may be on its way as stripes."""


@dataclass(slots=True)
class _Healing:
    """A fragment whose own state is not what the ledger names. version: own states are wrong from here on.

    reached: up to here this region has said that it can produce the fragment; that can't be taken back.
    is_ordered, is_aside: its files are to be renamed; they are.
    """

    version: int
    reached: int
    is_ordered: bool = False
    is_aside: bool = False


class Versions:
    """Follows the ledger with this region's parameters and momentum, and its learner with offers.

    applied: per fragment the version in memory. states: per fragment the newest version on disk. -1: none.
    """

    def __init__(
        self,
        *,
        region: str,
        fragments: int,
        manifest_digest: str,
        recovery: Recovered,
        history: RoundHistory,
        effects: EffectBuffer,
        payload_versions: int = 0,
    ) -> None:
        self.applied = [-1] * fragments
        self.states = list(recovery.states) or [-1] * fragments
        self._region = region
        self._manifest_digest = manifest_digest
        self._history = history
        self._effects = effects
        self._payload_versions = payload_versions
        # (fragment, version, digest) of payloads on disk, with the squared norm of each piece; empty: not known. Those
        # that no state on disk still needs are dropped.
        self._payloads: dict[tuple[int, int, bytes], tuple[float, ...]] = dict.fromkeys(recovery.payloads, ())
        self.initial = InitialDigests(fragments)
        # Snapshots that are known to be committed, before the history takes them if the own disk is behind.
        self._known = Snapshots(fragments)
        # Per fragment the committed rounds that are not applied, or follow its older snapshot, by version.
        self._rounds: list[dict[int, RoundBody]] = [{} for _ in range(fragments)]
        # Fragments whose state here is wrong, until a right one is fetched and in its place.
        self._healing: dict[int, _Healing] = {}
        # The entry where the ledger begins, and the versions at it: with less applied, that entry is not applied here.
        self._base_index = 0
        self._base_versions = [0] * fragments
        # Fragments with a new snapshot, so that files may have become useless; empty after each `pump`.
        self._prunable: set[int] = set()
        # Per fragment the version that is being applied; None: none is. Never two at once.
        self._busy: list[int | None] = [None] * fragments
        # Committed entries from the first one that is not applied, and the index of the one before it.
        self._unapplied: deque[Entry] = deque()
        self._applied_index = 0
        # The last report of this region's learner; None: none is attached.
        self._learner: LearnerStatus | None = None
        # Per fragment the newest version that was offered to this learner; -1: none was.
        self._offered = [-1] * fragments
        self._recover(recovery)

    def initial_state_stored(self, digests: tuple[bytes, ...]) -> None:
        """Theta_0 of this region's own learner is on disk; where genesis says otherwise it is fetched over it."""
        self.initial.begin_own(digests)
        for fragment, digest in enumerate(digests):
            if self.states[fragment] <= 0 and fragment not in self._healing:
                self.states[fragment] = 0
                self.initial.put(fragment, digest)

    def payload_stored(self, fragment: int, version: int, digest: bytes, squared_norms: tuple[float, ...] = ()) -> None:
        """A payload is on disk. squared_norms: of each piece, as it was decoded here."""
        self._payloads.setdefault((fragment, version, digest), squared_norms)

    def payload_fault(self, body: EntryBody) -> str:
        """Return how an entry's norms differ from those of its payload here; empty if nothing says that they do."""
        if not isinstance(body, RoundBody):
            return ""
        norms = self._payloads.get(_name(body), ())
        for piece, (claim, square) in enumerate(zip(body.squared_norms, norms, strict=False)):
            if not is_same_norm(claim, square):
                return f"piece {piece} of its payload has the squared norm {square:.6g}, it says {claim:.6g}"
        return ""

    def believe(self, body: EntryBody) -> None:
        """Take an entry's word for its norms: a majority did."""
        if isinstance(body, RoundBody) and _name(body) in self._payloads:
            self._payloads[_name(body)] = ()

    def state_stored(self, fragment: int, version: int, digest: bytes) -> None:
        """A fetched state is on disk: what the ledger names."""
        healing = self._healing.get(fragment)
        if healing is not None:
            if not healing.is_aside:
                return  # it may be renamed with the wrong ones: it is fetched again
            del self._healing[fragment]
            self.applied[fragment] = -1
        if version == 0:
            self.initial.put(fragment, digest, is_fetched=True)
        self.states[fragment] = max(self.states[fragment], version)

    def checkpoint_written(self, fragment: int, version: int, digest: bytes) -> SnapshotBody | None:
        """This region's own state is on disk. Returns what the ledger names instead, if it is another one."""
        snapshots = (self._known.oldest(fragment), self._known.newest(fragment))
        match = next((snapshot for snapshot in snapshots if snapshot is not None and snapshot.version == version), None)
        if match is not None and match.digest != digest:
            return match
        if fragment not in self._healing:
            self.states[fragment] = max(self.states[fragment], version)
        return None

    def version_applied(self, fragment: int, version: int) -> None:
        """The effect for this fragment is done."""
        self._busy[fragment] = None
        self.applied[fragment] = max(self.applied[fragment], version)
        self.offer(fragment)

    def learn(self, body: EntryBody) -> None:
        """An entry is known to be committed, whether or not the own disk can acknowledge it. Once each, in order."""
        if isinstance(body, GenesisBody):
            self._known.begin(body)
        elif isinstance(body, SnapshotBody):
            self._known.add(body)

    def on_commit(self, entry: Entry) -> None:
        """An entry is committed: it is to be applied. The history has it already."""
        body = entry.body
        self._unapplied.append(entry)
        if isinstance(body, RoundBody):
            self._rounds[body.fragment][body.version] = body
        elif isinstance(body, SnapshotBody):
            self._forget(body.fragment)

    def begin_at(self, index: int) -> None:
        """The ledger begins after this index, where the history stands now."""
        self._base_index, self._base_versions = index, list(self._history.versions)
        self._known.restore(self._history.snapshots.all())
        self._unapplied.clear()
        for fragment, version in enumerate(self._base_versions):
            self._keep_rounds(fragment, version)

    def has_base(self) -> bool:
        """Whether this region's disk can produce every fragment as it was at the ledger's base, or later."""
        return self._base_index == 0 or not any(self._lacks_base(fragment) for fragment in range(len(self.states)))

    def has_states(self, versions: Sequence[int]) -> bool:
        """Whether each fragment's state is on disk here at this version or a later one, and in the ledger for the
        others: no entry of an earlier round is needed any more."""
        return not self._healing and all(
            state >= version
            and (snapshot := self._history.snapshots.newest(fragment)) is not None
            and snapshot.version >= version
            for fragment, (state, version) in enumerate(zip(self.states, versions, strict=True))
        )

    def heal(self, snapshot: SnapshotBody, *, version_reached: int) -> None:
        """The ledger has another digest of an own state: set it aside and fetch it.

        version_reached: the newest round of the fragment in this region's log: up to there it has been acknowledged.
        """
        fragment = snapshot.fragment
        before = self._healing.get(fragment)
        if before is not None and before.version <= snapshot.version:
            return
        self._healing[fragment] = _Healing(snapshot.version, max(version_reached, before.reached if before else -1))
        self.initial.drop(fragment)
        self._effects.note(
            "diverged",
            f"this region's state is not {snapshot.digest.hex()}, which the ledger names: set aside and fetched again",
            fragment=fragment,
            version=snapshot.version,
            is_alarm=True,
        )

    def states_renamed(self, fragment: int) -> None:
        """The wrong states are set aside."""
        if fragment in self._healing:
            self._healing[fragment].is_aside = True
            self.states[fragment] = -1

    @property
    def healing(self) -> tuple[int, ...]:
        """Fragments whose own state is wrong and not there again yet, sorted."""
        return tuple(sorted(self._healing))

    @property
    def is_lacking(self) -> bool:
        """Something is to be fetched that no entry of the log waits for."""
        if self._healing or not self.has_base():
            return True
        return any(rounds and self._is_starving(fragment) for fragment, rounds in enumerate(self._rounds))

    def learner_attached(self, status: LearnerStatus | None) -> None:
        """A learner is there (again), or gone: what was offered before may be lost with the connection."""
        self._learner = status
        self._offered = [-1] * len(self._offered)
        for fragment in range(len(self._offered)):
            self.offer(fragment)

    def learner_changed(self, status: LearnerStatus | None) -> None:
        """It reported."""
        self._learner = status

    def offer(self, fragment: int) -> None:
        """Offer the applied version if that is news to the learner, with its snapshot that the version includes."""
        version = self.applied[fragment]
        if self._learner is None or version <= self._offered[fragment]:
            return
        base = self._learner.positions[fragment].base_version
        if version <= base:
            return
        if base >= 0 and self._history.versions[fragment] < version:
            # Right after a restart: a state from disk is there before the ledger says whom it includes. Handing it to a
            # learner with work of its own would make that work count twice. A new learner has none.
            return
        is_old = self._is_behind(fragment) or version < self._base_versions[fragment]
        if base < 0 and is_old:
            return  # after a restart, or a late state: a new learner would train, and evaluate, on what was long ago
        self._offered[fragment] = version
        snapshot_number = self._history.included_snapshot(
            self._region, self._learner.incarnation, fragment, base=base, version=version
        )
        is_last = self._history.is_last_round(fragment, version)
        self._effects.emit(OfferVersion(fragment, version, snapshot_number, is_last))

    def has_payload(self, body: EntryBody) -> bool:
        """Whether the entry can be applied from this region's own disk alone."""
        if isinstance(body, GenesisBody):
            return body.manifest_digest == self._manifest_digest and all(
                self._has_initial(fragment, body) for fragment in range(len(self.states))
            )
        if isinstance(body, RoundBody):
            healing = self._healing.get(body.fragment)
            if healing is not None:
                return body.version <= healing.reached
            # What is applied was on disk; its payload may be pruned since, behind a checkpoint of this region.
            newest = max(self.states[body.fragment], self.applied[body.fragment])
            return newest >= body.version or (_name(body) in self._payloads and not self.payload_fault(body))
        return True

    def has_stored(self, fragment: int, version: int, digest: bytes) -> bool:
        """Whether this very payload is on disk, and of use with what else is there."""
        return fragment not in self._healing and (fragment, version, digest) in self._payloads

    @property
    def initial_digests(self) -> tuple[bytes, ...] | None:
        """Digests of Theta_0 of the whole model, if all of it is on disk here, and of one region."""
        return self.initial.whole

    def forget_initial(self) -> None:
        """Take the Theta_0 on disk for none: it is mixed of two regions', and the own learner lays it down again."""
        self.states = [-1 if state == 0 else state for state in self.states]
        self.initial.forget()

    @property
    def held(self) -> tuple[int, ...]:
        """Per fragment the newest version of the run that is here, applied or on disk only; -1: none.

        Theta_0 on disk may be the own learner's, which is not the run's.
        """
        return tuple(max(applied, state or -1) for applied, state in zip(self.applied, self.states, strict=True))

    @property
    def has_started(self) -> bool:
        """Every fragment has a version in memory."""
        return min(self.applied) >= 0

    def applied_index(self) -> int:
        """The last ledger entry up to which everything is applied here."""
        if self._applied_index < self._base_index:
            if any(version < base for version, base in zip(self.applied, self._base_versions, strict=True)):
                return self._applied_index
            self._applied_index = self._base_index
        while self._unapplied and self._is_applied(self._unapplied[0]):
            self._applied_index = self._unapplied.popleft().index
        return self._applied_index

    def pump(self) -> None:
        """Start every apply that may start, and let go of what nobody needs any more."""
        for fragment, busy in enumerate(self._busy):
            has_news = self._next_round(fragment) or self.states[fragment] > self.applied[fragment] or self._healing
            if busy is None and has_news:
                self._advance(fragment)
        for fragment in sorted(self._prunable):
            oldest, newest = self._history.snapshots.oldest(fragment), self._history.snapshots.newest(fragment)
            if oldest is not None and newest is not None and fragment not in self._healing:
                # A fetched state may have overtaken the version that is being applied from its file.
                versions = (oldest.version, newest.version - self._payload_versions, self._busy[fragment])
                keep_from = min(version for version in versions if version is not None)
                self._effects.emit(PruneFiles(fragment, keep_from))
        self._prunable.clear()

    def plan_fetches(self, missing: Sequence[EntryBody], fetches: Fetches) -> None:
        """Request what is lacking. missing: bodies whose payload the ledger waits for."""
        lacking: dict[int, list[RoundBody]] = {}
        initial: dict[int, bytes] = {}
        for body in missing:
            if isinstance(body, GenesisBody):
                if body.manifest_digest == self._manifest_digest:
                    initial |= self._lacking_initial(body)
                    self.initial.named = body.fragment_digests
            elif isinstance(body, RoundBody) and not self.has_payload(body):
                lacking.setdefault(body.fragment, []).append(body)
        genesis = self._history.genesis
        if genesis is not None:
            # Committed, and something else lies in its place: never start from other bytes than genesis names.
            digests = self._lacking_initial(genesis)
            initial |= {fragment: digest for fragment, digest in digests.items() if self.applied[fragment] < 0}
        for fragment in range(len(self.states)):
            next_round = self._next_round(fragment)
            if next_round is not None and fragment not in lacking and self._is_starving(fragment):
                lacking[fragment] = [next_round]
            self._plan_fragment(fragment, initial.get(fragment, b""), lacking.get(fragment, []), fetches)

    def _recover(self, recovery: Recovered) -> None:
        """A state from version 1 on was committed once, so it can be used before a leader is known.

        Version 0 may be Theta_0 of a genesis that never was: it counts if the ledger on disk holds its genesis. An
        uncommitted snapshot there was agreed on all the same; if it was wrong the state is fetched for nothing.
        """
        bodies = [entry.body for entry in recovery.entries]
        genesis = self._history.genesis or next((body for body in bodies if isinstance(body, GenesisBody)), None)
        snapshots = {(snapshot.fragment, snapshot.version): snapshot for snapshot in self._history.snapshots.all()}
        snapshots |= {(body.fragment, body.version): body for body in bodies if isinstance(body, SnapshotBody)}
        if genesis is not None:
            self.initial.named = genesis.fragment_digests
            snapshots |= {(at, 0): SnapshotBody(at, 0, digest) for at, digest in enumerate(genesis.fragment_digests)}
        if recovery.base.index:
            self.begin_at(recovery.base.index)
        for fragment, version in enumerate(self.states):
            snapshot = snapshots.get((fragment, version))
            digests = recovery.state_digests[fragment : fragment + 1]  # none: they are unknown
            is_wrong = snapshot is not None and digests not in ((), (snapshot.digest,))
            if snapshot is not None and is_wrong and version >= 1:
                self.states[fragment] = -1
                self.heal(snapshot, version_reached=-1)
            elif version >= 1:
                self._busy[fragment] = version
                self._effects.emit(AdoptState(fragment, version))
            elif snapshot is not None and not is_wrong:
                self.initial.put(fragment, snapshot.digest)
            else:
                self.states[fragment] = -1

    def _forget(self, fragment: int) -> None:
        """A snapshot is committed: what is older than the one before it is of no use any more."""
        self._prunable.add(fragment)
        oldest = self._history.snapshots.oldest(fragment)
        if oldest is None or fragment in self._healing:
            return
        keep_from = min(oldest.version, self.applied[fragment])
        self._keep_rounds(fragment, keep_from)
        for payload in [payload for payload in self._payloads if payload[0] == fragment and payload[1] <= keep_from]:
            del self._payloads[payload]

    def _lacks_base(self, fragment: int) -> bool:
        """Whether the disk can't produce the fragment as it was at the ledger's base."""
        healing = self._healing.get(fragment)
        if self._base_index == 0:
            return False
        if healing is not None:
            return healing.reached < self._base_versions[fragment]
        genesis, newest = self._history.genesis, max(self.states[fragment], self.applied[fragment])
        if newest == 0 and genesis is not None and not self._has_initial(fragment, genesis):
            return True  # the Theta_0 of the own learner, and another than the run's
        return newest < self._base_versions[fragment]

    def _is_starving(self, fragment: int) -> bool:
        """Whether the next round to apply is committed, and its payload is not here."""
        body = self._next_round(fragment)
        if body is None or self._busy[fragment] is not None or fragment in self._healing:
            return False
        return self.states[fragment] <= self.applied[fragment] and _name(body) not in self._payloads

    def _next_round(self, fragment: int) -> RoundBody | None:
        """The committed round after the version in memory; None: there is no such round, or no version."""
        return self._rounds[fragment].get(self.applied[fragment] + 1)

    def _keep_rounds(self, fragment: int, after: int) -> None:
        """Let go of the rounds up to a version."""
        rounds = self._rounds[fragment]
        self._rounds[fragment] = {version: body for version, body in rounds.items() if version > after}

    def _lacking_initial(self, body: GenesisBody) -> dict[int, bytes]:
        """Fragments whose Theta_0 is not on disk here, with the digest that genesis names."""
        return {
            fragment: digest
            for fragment, digest in enumerate(body.fragment_digests)
            if not self._has_initial(fragment, body)
        }

    def _has_initial(self, fragment: int, body: GenesisBody) -> bool:
        return self.states[fragment] >= 1 or self.initial.get(fragment) == body.fragment_digests[fragment]

    def _advance(self, fragment: int) -> None:
        healing = self._healing.get(fragment)
        if healing is not None:
            if not healing.is_ordered:
                healing.is_ordered = True
                self._effects.emit(SetStatesAside(fragment, healing.version))
            return
        version_applied, state, genesis = self.applied[fragment], self.states[fragment], self._history.genesis
        is_of_run = genesis is not None and self._has_initial(fragment, genesis)
        if version_applied < state <= self._history.versions[fragment] and is_of_run:
            self._busy[fragment] = state
            self._effects.emit(AdoptState(fragment, state))
        elif (body := self._next_round(fragment)) is not None and _name(body) in self._payloads:
            self._busy[fragment] = body.version
            self._effects.emit(ApplyVersion(body))

    def _is_behind(self, fragment: int) -> bool:
        """Whether the payload of the next committed version is on disk here, so that it is applied at once."""
        body = self._next_round(fragment)
        return body is not None and _name(body) in self._payloads and fragment not in self._healing

    def _is_applied(self, entry: Entry) -> bool:
        if isinstance(entry.body, GenesisBody):
            return self.has_started
        return not isinstance(entry.body, RoundBody) or self.applied[entry.body.fragment] >= entry.body.version

    def _plan_fragment(self, fragment: int, initial_digest: bytes, lacking: list[RoundBody], fetches: Fetches) -> None:
        snapshot, healing = self._known.newest(fragment), self._healing.get(fragment)
        if healing is not None or self._lacks_base(fragment):
            is_enough = snapshot is not None and snapshot.version >= self._base_versions[fragment]
            if snapshot is not None and is_enough and (healing is None or healing.is_aside):
                fetches.request(fragment, snapshot.version, None, digest=snapshot.digest)
            else:
                fetches.forget(fragment)
        elif initial_digest and (snapshot is None or snapshot.version == 0):
            patience_ns = INITIAL_PATIENCE_NS if self.states[fragment] < 0 else 0
            fetches.request(fragment, 0, None, digest=initial_digest, patience_ns=patience_ns)
        elif snapshot is not None and (initial_digest or self._is_state_better(snapshot, lacking, fetches)):
            # Where there is a later snapshot, nobody keeps Theta_0 any more.
            fetches.request(fragment, snapshot.version, None, digest=snapshot.digest)
        elif not lacking:
            fetches.forget(fragment)
        else:
            fetches.request(fragment, lacking[0].version, lacking[0])

    @staticmethod
    def _is_state_better(snapshot: SnapshotBody, lacking: list[RoundBody], fetches: Fetches) -> bool:
        """Whether a snapshot's state is fetched rather than the payloads: it helps, and they are many or gone."""
        if not lacking or snapshot.version < lacking[0].version:
            return False
        fragment = lacking[0].fragment
        are_many = len(lacking) > PAYLOADS_RATHER_MAX and not fetches.is_refused(fragment, snapshot.version)
        return are_many or fetches.is_gone(fragment, lacking[0].version)


def _name(body: RoundBody) -> tuple[int, int, bytes]:
    """Return the name of an entry's payload: fragment, version, digest."""
    return body.fragment, body.version, body.payload_digest
