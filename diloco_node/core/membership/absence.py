"""The voters that are away for long: the leader takes their vote, and nobody takes it from a region that is there.

A voter that is gone for good makes each further failure more dangerous: of five, with two away, one more stops merging.
So after EVICT_AFTER_NS the ledger names EVICTED in place of its folder. It stays a voter by the roster that the
authority signed, and counts for no majority. Once it is back and has caught up its folder is named again, as a joiner's
is. No key is needed, for this takes a vote away for a while, and adds and removes nobody. No fewer than VOTERS_MIN are
left, and a majority of the others must have missed the region themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from diloco_node.core.types import EVICTED, DiskNamedBody, EntryBody
from diloco_node.numeric import NS_PER_S

if TYPE_CHECKING:  # which asks, and has one of these
    from diloco_node.core.membership.liveness import Liveness

EVICT_AFTER_NS: Final = 1800 * NS_PER_S
"""Away for so long, by what this region and all others hear, a voter loses its vote."""


class Absence:
    """Since when each of the others is away. Asked with each heartbeat to all. region: this one."""

    def __init__(self, region: str) -> None:
        self._region = region
        # By region: when it was first asked about; when it was heard here; when for the first time after it was away
        # for long; when it was heard here or, by their word, elsewhere, or was first asked about.
        self._since_ns: dict[str, int] = {}
        self._heard_ns: dict[str, int] = {}
        self._returned_ns: dict[str, int] = {}
        self._present_ns: dict[str, int] = {}
        self._watched_ns = 0

    def watch(self, hearing: Liveness, *, now_ns: int) -> None:
        """Note who is there. A process that stood still begins anew."""
        if now_ns - self._watched_ns >= EVICT_AFTER_NS // 2:
            for times in (self._since_ns, self._heard_ns, self._returned_ns, self._present_ns):
                times.clear()
        self._watched_ns = now_ns
        for name in hearing.others:
            since_ns = self._since_ns.setdefault(name, now_ns)
            if hearing.is_alive(name, now_ns=now_ns):
                if now_ns - self._heard_ns.get(name, since_ns) >= EVICT_AFTER_NS // 2:
                    self._returned_ns[name] = now_ns
                self._heard_ns[name] = self._present_ns[name] = now_ns
            elif any(hearing.hears(peer, name, now_ns=now_ns) for peer in hearing.others if peer != name):
                self._present_ns[name] = now_ns
            self._present_ns.setdefault(name, now_ns)

    def longest(self, names: Iterable[str], *, now_ns: int) -> str:
        """Return the region among these that is to lose its vote; empty: none has been away for long enough."""
        away = [(self._present_ns[name], name) for name in names if name in self._present_ns]
        since_ns, name = min(away, default=(now_ns, ""))
        return name if now_ns - since_ns >= EVICT_AFTER_NS else ""

    def has_missed(self, region: str, *, now_ns: int) -> bool:
        """Whether a region came back of late from where it was long, or may have, before this process began."""
        since_ns = self._since_ns.get(region, now_ns - EVICT_AFTER_NS)
        return now_ns - self._returned_ns.get(region, since_ns) < EVICT_AFTER_NS

    def doubt(self, body: EntryBody, *, now_ns: int) -> str:
        """Return why the region of an entry can't have been away for so long; empty if it can, as far as is known."""
        if not isinstance(body, DiskNamedBody) or body.disk != EVICTED:
            return ""
        if body.region == self._region:
            return f"{body.region} is here itself"  # else it would hold what the others refuse, and elect none of them
        heard_ns = self._heard_ns.get(body.region)
        # Half, for what the leader heard last may have come later to others.
        if heard_ns is None or now_ns - heard_ns >= EVICT_AFTER_NS // 2:
            return ""
        # Who comes back is not heard by all at once. It loses its vote for as long as its folder takes to be named.
        if now_ns - self._returned_ns.get(body.region, -EVICT_AFTER_NS) < EVICT_AFTER_NS // 4:
            return ""
        return f"{body.region} was heard here {(now_ns - heard_ns) // NS_PER_S} s ago"
