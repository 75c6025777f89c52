"""Equal versions must have equal bytes: compare the digests that heartbeats carry with our own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.types import FragmentDigest

DIGEST_BYTES: Final = 16
"""What travels of a SHA-256."""

VERSIONS_KEPT: Final = 8
"""Own digests remembered per fragment; a peer that is further behind is compared when it has caught up."""

FRESH_NS: Final = 2_000_000_000
"""A new digest rides on every heartbeat for this long, so that a few lost ones do not matter."""

FRESH_MAX: Final = 8
"""Digests in one heartbeat; the oldest of more go first, and later ones ride on the next."""


class DigestWatch:
    """Keeps this region's digests, chooses those to report, and raises an alarm at a difference."""

    def __init__(self, fragments: int, effects: EffectBuffer) -> None:
        self._own: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(fragments)]
        self._reported: dict[tuple[str, int], FragmentDigest] = {}
        self._fresh: OrderedDict[int, int] = OrderedDict()
        self._alarmed: set[tuple[str, int]] = set()
        self._rotation = 0
        self._effects = effects

    def computed(self, fragment: int, version: int, digest: bytes, *, now_ns: int) -> None:
        """This region's digest of a fragment at a version is known."""
        own = self._own[fragment]
        own[version] = digest[:DIGEST_BYTES]
        while len(own) > VERSIONS_KEPT:
            own.popitem(last=False)
        self._fresh[fragment] = now_ns
        self._fresh.move_to_end(fragment)
        for (peer, reported_fragment), reported in sorted(self._reported.items()):
            if reported_fragment == fragment:
                self._compare(peer, reported)

    def reported(self, peer: str, digests: tuple[FragmentDigest, ...]) -> None:
        """A heartbeat brought a peer's digests."""
        for one in digests:
            if 0 <= one.fragment < len(self._own):
                self._reported[peer, one.fragment] = one
                self._compare(peer, one)

    def to_report(self, *, now_ns: int) -> tuple[FragmentDigest, ...]:
        """Digests for the next heartbeat: those that changed in the last seconds, and one more in rotation."""
        for fragment in [one for one, at_ns in self._fresh.items() if now_ns - at_ns > FRESH_NS]:
            del self._fresh[fragment]
        chosen = set(list(self._fresh)[:FRESH_MAX])
        self._rotation = (self._rotation + 1) % len(self._own)
        chosen.add(self._rotation)
        result = []
        for fragment in sorted(chosen):
            if self._own[fragment]:
                version, digest = next(reversed(self._own[fragment].items()))
                result.append(FragmentDigest(fragment, version, digest))
        return tuple(result)

    def newest(self, fragment: int) -> tuple[int, bytes]:
        """(version, digest) of the last one computed here; (-1, b"") if there is none."""
        own = self._own[fragment]
        return next(reversed(own.items())) if own else (-1, b"")

    @property
    def differences(self) -> int:
        """(peer, fragment) pairs that once differed."""
        return len(self._alarmed)

    def _compare(self, peer: str, reported: FragmentDigest) -> None:
        own = self._own[reported.fragment].get(reported.version)
        if own is None or own == reported.digest[:DIGEST_BYTES] or (peer, reported.fragment) in self._alarmed:
            return
        self._alarmed.add((peer, reported.fragment))
        self._effects.note(
            "digest",
            f"{peer} has {reported.digest.hex()}, here it is {own.hex()}: parameters differ at the same version",
            fragment=reported.fragment,
            version=reported.version,
            is_alarm=True,
        )
