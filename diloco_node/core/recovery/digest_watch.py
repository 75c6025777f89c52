"""Equal versions must have equal bytes: compare the digests that heartbeats carry with our own and with the ledger's.

Every region tells the digest of each version that it reaches, and repeats those of snapshot versions (every
`checkpoint_versions`) until the ledger has one. Whoever has another digest than the ledger heals (`recovery.versions`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.ledger.roster import majority_of
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import FragmentDigest, SnapshotBody

DIGEST_BYTES: Final = 32
"""A whole SHA-256: what is fetched is compared with it."""

VERSIONS_KEPT: Final = 8
"""Own digests remembered per fragment; a peer that is further behind is compared when it has caught up."""

PENDING_MAX: Final = 2
"""Own snapshot versions per fragment that wait for the ledger and are told: the newest, and the one that a region which
is up to `checkpoint_versions` behind can tell, too."""

REPORTED_MAX: Final = PENDING_MAX + 1
"""Digests remembered per peer and fragment: those, and that of the newest version."""

FRESH_NS: Final = 2_000_000_000
"""A new digest rides on every heartbeat for this long, so that a few lost ones do not matter."""

FRESH_MAX: Final = 8
"""Fragments in one heartbeat, each for a new digest and for those that wait; the others ride on the next ones."""


class DigestWatch:
    """Keeps this region's digests, chooses those to report, and says who differs.

    snapshot_versions: between two snapshots of a fragment.
    """

    def __init__(self, fragments: int, effects: EffectBuffer, *, history: RoundHistory, snapshot_versions: int) -> None:
        self._own: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(fragments)]
        self._pending: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(fragments)]
        self.reported: list[dict[str, OrderedDict[int, bytes]]] = [{} for _ in range(fragments)]
        self._fresh: OrderedDict[int, int] = OrderedDict()
        self._alarmed: set[tuple[str, int]] = set()
        self._rotation = 0
        self._effects = effects
        self._history = history
        self._snapshot_versions = snapshot_versions

    def on_digest(self, fragment: int, version: int, digest: bytes, *, now_ns: int) -> None:
        """This region's digest of a fragment at a version is known."""
        _keep(self._own[fragment], version, digest, VERSIONS_KEPT)
        if version % self._snapshot_versions == 0:
            _keep(self._pending[fragment], version, digest, PENDING_MAX)
        self._fresh[fragment] = now_ns
        self._fresh.move_to_end(fragment)
        for peer, peer_digests in sorted(self.reported[fragment].items()):
            self._compare(peer, fragment, version, peer_digests.get(version, digest))

    def on_report(self, peer: str, digests: tuple[FragmentDigest, ...]) -> None:
        """A heartbeat brought a peer's digests. Kept are a few, of versions that may matter."""
        for report in digests:
            if not 0 <= report.fragment < len(self._own) or len(report.digest) != DIGEST_BYTES:
                continue
            # The peer may know of a commit before this region does.
            if not 0 <= report.version <= self._history.versions[report.fragment] + 1:
                continue
            digests_of_peer = self.reported[report.fragment].setdefault(peer, OrderedDict())
            _keep(digests_of_peer, report.version, report.digest, REPORTED_MAX)
            self._compare(peer, report.fragment, report.version, report.digest)

    def to_report(self, *, now_ns: int) -> tuple[FragmentDigest, ...]:
        """Digests for the next heartbeat: new ones, those that the ledger is still to get, and a fragment in turn."""
        fragments = len(self._own)
        for fragment in [stale for stale, at_ns in self._fresh.items() if now_ns - at_ns > FRESH_NS]:
            del self._fresh[fragment]
        self._rotation = (self._rotation + 1) % fragments
        in_turn = [(self._rotation + step) % fragments for step in range(fragments)]
        waiting = [fragment for fragment in in_turn if self._waiting(fragment)]
        chosen_fragments = {self._rotation, *list(self._fresh)[:FRESH_MAX], *waiting[:FRESH_MAX]}
        result = []
        for fragment in sorted(chosen_fragments):
            digests = self._waiting(fragment)
            if self._own[fragment]:
                version, digest = self.newest(fragment)
                digests[version] = digest
            result += [FragmentDigest(fragment, version, digest) for version, digest in sorted(digests.items())]
        return tuple(result)

    def majority_snapshots(self, there: Container[str]) -> tuple[SnapshotBody, ...]:
        """Snapshots that the ledger can get: per fragment the newest with the same digest here and in a majority.

        there: the regions that are; see `Roster.words_needed`.
        """
        quorum = self._history.roster.words_needed(there)
        bodies = []
        for fragment in range(len(self._own)):
            for version, digest in sorted(self._waiting(fragment).items(), reverse=True):
                equal = sum(peer_digest == digest for peer_digest in self._peer_digests(fragment, version))
                if version <= self._history.versions[fragment] and 1 + equal >= quorum:
                    bodies.append(SnapshotBody(fragment, version, digest))
                    break
        return tuple(bodies)

    def doubt(self, body: SnapshotBody) -> str:
        """Return why a snapshot may be a state that no majority has; empty if it is the own one, or a majority's."""
        digests = self._peer_digests(body.fragment, body.version)
        own_digest = self._own_digest(body)
        if own_digest == body.digest or digests.count(body.digest) >= majority_of(len(self._history.roster.voters)):
            return ""
        here = f"it is {own_digest.hex()} here" if own_digest else "it is not known here"
        return f"no majority told the state {body.digest.hex()} of {body.fragment}/{body.version}, and {here}"

    def is_refuted(self, body: SnapshotBody, *, is_voter: bool) -> bool:
        """Whether a majority told one other state, this region's, so that none can have that of the snapshot.

        is_voter: this region counts among them.
        """
        equal = self._peer_digests(body.fragment, body.version).count(self._own_digest(body))
        return self.differs(body) and equal + is_voter >= majority_of(len(self._history.roster.voters))

    def differs(self, body: SnapshotBody) -> bool:
        """Whether this region reached the version of a snapshot with another state."""
        return self._own_digest(body) not in (b"", body.digest)

    def is_due(self, body: SnapshotBody) -> bool:
        """Whether the version of a snapshot is committed and on the disk here, and not reached yet."""
        return self.newest(body.fragment)[0] < body.version <= self._history.versions[body.fragment]

    def minority_fragment(self) -> int:
        """A fragment of which a majority tells another digest than this region; -1 if there is none.

        The ledger gets no snapshot of it while this region leads."""
        majority = majority_of(len(self._history.roster.voters))
        for fragment in range(len(self._own)):
            for version, digest in self._waiting(fragment).items():
                counts = Counter(self._peer_digests(fragment, version))
                if any(count >= majority for peer_digest, count in counts.items() if peer_digest != digest):
                    return fragment
        return -1

    def divergences(self) -> tuple[SnapshotBody, ...]:
        """Snapshots of the ledger that this region has with another digest."""
        return tuple(snapshot for snapshot in self._history.snapshots.all() if self.differs(snapshot))

    def forget(self, fragment: int) -> None:
        """This region's state of the fragment is wrong: nothing of it is told any more until there is another one."""
        self._own[fragment].clear()
        self._pending[fragment].clear()
        self._alarmed.add(("", fragment))

    def newest(self, fragment: int) -> tuple[int, bytes]:
        """(version, digest) of the last one computed here; (-1, b"") if there is none."""
        digests = self._own[fragment]
        return max(digests.items()) if digests else (-1, b"")

    @property
    def differences(self) -> int:
        """Pairs of peer (or ledger) and fragment that once differed."""
        return len(self._alarmed)

    def _waiting(self, fragment: int) -> dict[int, bytes]:
        """Own snapshot versions that are newer than the ledger's snapshot."""
        newest = self._history.snapshots.newest(fragment)
        version_named = 0 if newest is None else newest.version
        return {version: digest for version, digest in self._pending[fragment].items() if version > version_named}

    def _own_digest(self, snapshot: SnapshotBody) -> bytes:
        """This region's digest of a snapshot's fragment and version; empty if it is not known."""
        own_digests, waiting = self._own[snapshot.fragment], self._pending[snapshot.fragment]
        return own_digests.get(snapshot.version, waiting.get(snapshot.version, b""))

    def _peer_digests(self, fragment: int, version: int) -> list[bytes]:
        """Return the digests that the voters among the peers reported for a version."""
        voters, reported = self._history.roster.voters, sorted(self.reported[fragment].items())
        return [digests[version] for peer, digests in reported if peer in voters and version in digests]

    def _compare(self, peer: str, fragment: int, version: int, digest: bytes) -> None:
        own_digest = self._own[fragment].get(version, digest)
        if own_digest == digest or (peer, fragment) in self._alarmed:
            return
        self._alarmed.add((peer, fragment))
        self._effects.note(
            "digest",
            f"{peer} has {digest.hex()}, here it is {own_digest.hex()}: parameters differ at the same version",
            fragment=fragment,
            version=version,
            is_alarm=True,
        )


def _keep(digests: OrderedDict[int, bytes], version: int, digest: bytes, count: int) -> None:
    """Remember it, and at most `count` altogether: the newest versions."""
    digests[version] = digest
    while len(digests) > count:
        del digests[min(digests)]
