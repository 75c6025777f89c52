"""Which version of each fragment this region holds, on disk, in memory and offered to its learner.

Payloads and states on disk let an entry be acknowledged. Entries are applied in order per fragment, one at a time;
different fragments go in parallel. What is applied is offered to the learner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import AdoptState, ApplyVersion, OfferVersion
from diloco_node.core.recovery.fetches import INITIAL_PATIENCE_NS, Fetches
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import Entry, EntryBody, GenesisBody, LearnerStatus, Recovered, RoundBody

PAYLOADS_RATHER_MAX: Final = 8
"""A fragment that lacks more payloads than this is fetched as state: 8 bytes a value against about one per payload."""


class Versions:
    """Follows the ledger with this region's parameters and momentum, and its learner with offers.

    Each applied version is offered once to each attached learner, and never an older one than it has.

    Attributes:
        applied: per fragment the version in memory; -1 before there is one.
        states: per fragment the newest version on disk that was recovered or fetched; -1: none.
    """

    def __init__(
        self,
        *,
        region: str,
        fragments: int,
        manifest_digest: str,
        recovered: Recovered,
        history: RoundHistory,
        effects: EffectBuffer,
    ) -> None:
        self.applied = [-1] * fragments
        self.states = list(recovered.states) or [-1] * fragments
        self._region = region
        self._manifest_digest = manifest_digest
        self._history = history
        self._effects = effects
        self._payloads = set(recovered.payloads)
        self._initial: dict[int, bytes] = {}
        self._queues: list[deque[RoundBody]] = [deque() for _ in range(fragments)]
        self._busy: list[int | None] = [None] * fragments
        self._unapplied: deque[Entry] = deque()
        self._applied_index = 0
        self._learner: LearnerStatus | None = None
        self._offered = [-1] * fragments
        self._recover(recovered)

    def initial_state_stored(self, digests: tuple[bytes, ...]) -> None:
        """Theta_0 of this region's own learner is on disk; where genesis says otherwise it is fetched over it."""
        for fragment, digest in enumerate(digests):
            if self.states[fragment] <= 0:
                self.states[fragment] = 0
                self._initial[fragment] = digest

    def payload_stored(self, fragment: int, version: int, digest: bytes) -> None:
        """A payload is on disk."""
        self._payloads.add((fragment, version, digest))

    def state_stored(self, fragment: int, version: int, digest: bytes) -> None:
        """A fetched state is on disk."""
        if version == 0:
            self._initial[fragment] = digest
        self.states[fragment] = max(self.states[fragment], version)

    def version_applied(self, fragment: int, version: int) -> None:
        """The effect for this fragment is done."""
        self._busy[fragment] = None
        self.applied[fragment] = max(self.applied[fragment], version)
        # Payloads of older versions are never requested again: what is committed and applied can't be truncated.
        self._payloads = {one for one in self._payloads if one[0] != fragment or one[1] >= version}
        self.offer(fragment)

    def committed(self, entry: Entry) -> None:
        """An entry is committed: it is to be applied."""
        self._unapplied.append(entry)
        if isinstance(entry.body, RoundBody):
            self._queues[entry.body.fragment].append(entry.body)

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
        self._offered[fragment] = version
        included = self._history.included_snapshot(
            self._region, self._learner.incarnation, fragment, base=base, version=version
        )
        is_last = self._history.is_last_round(fragment, version)
        self._effects.emit(OfferVersion(fragment, version, included, is_last))

    def has_payload(self, body: EntryBody) -> bool:
        """Whether the entry can be applied from this region's own disk alone."""
        if isinstance(body, GenesisBody):
            return body.manifest_digest == self._manifest_digest and all(
                self._has_initial(fragment, body) for fragment in range(len(self.states))
            )
        if isinstance(body, RoundBody):
            # What is applied was on disk; its payload may be pruned since, behind a checkpoint of this region.
            reached = max(self.states[body.fragment], self.applied[body.fragment])
            return reached >= body.version or (body.fragment, body.version, body.payload_digest) in self._payloads
        return True

    def has_stored(self, fragment: int, version: int, digest: bytes) -> bool:
        """Whether this very payload is on disk."""
        return (fragment, version, digest) in self._payloads

    @property
    def initial_digests(self) -> tuple[bytes, ...] | None:
        """Digests of Theta_0 of the whole model, if all of it is on disk here."""
        if any(fragment not in self._initial for fragment in range(len(self.states))):
            return None
        return tuple(self._initial[fragment] for fragment in range(len(self.states)))

    @property
    def has_started(self) -> bool:
        """Every fragment has a version in memory."""
        return min(self.applied) >= 0

    def applied_index(self) -> int:
        """The last ledger entry up to which everything is applied here."""
        while self._unapplied and self._is_applied(self._unapplied[0]):
            self._applied_index = self._unapplied.popleft().index
        return self._applied_index

    def pump(self) -> None:
        """Start every apply that may start."""
        for fragment, busy in enumerate(self._busy):
            if busy is None and (self._queues[fragment] or self.states[fragment] > self.applied[fragment]):
                self._advance(fragment)

    def plan_fetches(self, missing: Sequence[EntryBody], fetches: Fetches) -> None:
        """Request what is lacking.

        Args:
            missing: bodies whose payload the ledger waits for.
        """
        lacking: dict[int, list[RoundBody]] = {}
        initial: dict[int, bytes] = {}
        for body in missing:
            if isinstance(body, GenesisBody):
                if body.manifest_digest == self._manifest_digest:
                    initial |= self._lacking_initial(body)
            elif isinstance(body, RoundBody) and not self.has_payload(body):
                lacking.setdefault(body.fragment, []).append(body)
        genesis = self._history.genesis
        if genesis is not None:
            # Committed, and something else lies in its place: never start from other bytes than genesis names.
            lost = self._lacking_initial(genesis)
            initial |= {one: digest for one, digest in lost.items() if self.applied[one] < 0}
        for fragment in range(len(self.states)):
            self._plan_fragment(fragment, initial.get(fragment, b""), lacking.get(fragment, []), fetches)

    def _recover(self, recovered: Recovered) -> None:
        """A state from version 1 on was committed once, so it can be used before a leader is known.

        Version 0 may be Theta_0 of a genesis that never was: it counts if the ledger on disk holds its genesis, for
        that was written only when the states matched.
        """
        genesis = next((one.body for one in recovered.entries if isinstance(one.body, GenesisBody)), None)
        for fragment, version in enumerate(self.states):
            if version >= 1:
                self._busy[fragment] = version
                self._effects.emit(AdoptState(fragment, version))
            elif version == 0 and genesis is not None:
                self._initial[fragment] = genesis.fragment_digests[fragment]
            else:
                self.states[fragment] = -1

    def _lacking_initial(self, body: GenesisBody) -> dict[int, bytes]:
        """Fragments whose Theta_0 is not on disk here, with the digest that genesis names."""
        return {
            fragment: digest
            for fragment, digest in enumerate(body.fragment_digests)
            if not self._has_initial(fragment, body)
        }

    def _has_initial(self, fragment: int, body: GenesisBody) -> bool:
        return self.states[fragment] >= 1 or self._initial.get(fragment) == body.fragment_digests[fragment]

    def _advance(self, fragment: int) -> None:
        queue, applied, state = self._queues[fragment], self.applied[fragment], self.states[fragment]
        while queue and queue[0].version <= applied:
            queue.popleft()
        genesis = self._history.genesis
        is_of_run = genesis is not None and self._has_initial(fragment, genesis)
        if applied < state <= self._history.versions[fragment] and is_of_run:
            self._busy[fragment] = state
            self._effects.emit(AdoptState(fragment, state))
        elif queue and applied >= 0 and queue[0].version == applied + 1:
            body = queue[0]
            if (fragment, body.version, body.payload_digest) in self._payloads:
                self._busy[fragment] = body.version
                self._effects.emit(ApplyVersion(body))

    def _is_applied(self, entry: Entry) -> bool:
        if isinstance(entry.body, GenesisBody):
            return self.has_started
        return not isinstance(entry.body, RoundBody) or self.applied[entry.body.fragment] >= entry.body.version

    def _plan_fragment(self, fragment: int, initial_digest: bytes, lacking: list[RoundBody], fetches: Fetches) -> None:
        if initial_digest:
            patience_ns = INITIAL_PATIENCE_NS if self.states[fragment] < 0 else 0
            fetches.request(fragment, 0, None, initial_digest=initial_digest, patience_ns=patience_ns)
        elif not lacking:
            fetches.forget(fragment)
        elif len(lacking) > PAYLOADS_RATHER_MAX or fetches.is_gone(fragment, lacking[0].version):
            fetches.request(fragment, lacking[0].version, None)
        else:
            fetches.request(fragment, lacking[0].version, lacking[0])
