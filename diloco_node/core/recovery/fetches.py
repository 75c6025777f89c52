"""Fetches of payloads and states that this region lacks: one fetch per fragment, few at once, from several peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import FetchPayload, FetchState
from diloco_node.core.types import RoundBody

FETCHES_MAX: Final = 4
"""Fetches in flight. More would share the same link; fewer would leave it idle between two small fragments."""

RETRY_NS: Final = 200_000_000
RETRY_NS_MAX: Final = 5_000_000_000
"""When all peers failed: wait this long, doubled each time, up to five seconds."""

INITIAL_PATIENCE_NS: Final = 5_000_000_000
"""How long Theta_0 is waited for before it is fetched: the own learner, a little later than the others', has the same
one as a rule, and eight bytes for each parameter from one region to all others take minutes."""

GONE: Final = frozenset({"gone", "unknown"})
"""Answers that will not change: this peer can't help with this payload."""

LATE: Final = "too slow; it may still come"
"""The bytes come in, and take too long: the next requests go to others first."""

LATE_LOAD: Final = 2
"""A donor whose last transfer was late counts as if it sent so many more. Others go first; it is not left out."""


@dataclass(slots=True)
class _Fetch:
    """A payload, or (`body` is None) the state with this digest. patience_ns: waited before the first peer is asked."""

    fragment: int
    version: int
    body: RoundBody | None
    digest: bytes
    patience_ns: int = 0
    peer: str = ""
    failed: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    retries: int = 0
    not_before_ns: int = 0
    has_witness_failed: bool = False

    @property
    def kind(self) -> str:
        """Payload or state, in a word."""
        return "state" if self.body is None else "payload"


class Fetches:
    """Turns requests into fetch effects. After every call that changes something, call `pump`."""

    def __init__(self, *, region: str, regions: tuple[str, ...], effects: EffectBuffer) -> None:
        self._region = region
        # The other regions; and those that can be asked, a leader from outside too.
        self._members: tuple[str, ...] = ()
        self._others: tuple[str, ...] = ()
        # Peers whose last transfer took too long.
        self._late: set[str] = set()
        self.follow(regions)
        self._effects = effects
        self.pending: dict[int, _Fetch] = {}
        self._alive: frozenset[str] = frozenset()
        self._witness = ""
        # Per fragment the version of the last state that nobody who was there could send.
        self._refused: dict[int, int] = {}

    def follow(self, regions: Iterable[str]) -> None:
        """These are the regions from now on. A fetch from one that has gone ends as one from a lost peer does."""
        self._members = self._others = tuple(sorted(name for name in regions if name != self._region))
        self._late.intersection_update(self._members)

    @property
    def is_idle(self) -> bool:
        """Nothing is requested."""
        return not self.pending

    @property
    def wake_at_ns(self) -> int | None:
        """When a fetch that failed everywhere may be tried again."""
        waiting = [fetch.not_before_ns for fetch in self.pending.values() if not fetch.peer and fetch.not_before_ns > 0]
        return min(waiting, default=None)

    def request(
        self, fragment: int, version: int, body: RoundBody | None, *, digest: bytes = b"", patience_ns: int = 0
    ) -> None:
        """Request a payload (`body` given) or the state at `version`. Repeating it changes nothing.

        A fetch in flight for the same fragment is left to end first: it may bring the same bytes.

        digest: of the state. patience_ns: it may come without a request within this time from the next `pump` on.
        """
        current = self.pending.get(fragment)
        digest = digest if body is None else body.payload_digest
        name = (version, digest, body is None)
        if current is not None and (current.peer or (current.version, current.digest, current.body is None) == name):
            return
        self.pending[fragment] = _Fetch(fragment, version, body, digest, patience_ns)

    def forget(self, fragment: int) -> None:
        """Nothing of this fragment is lacking any more; one that is in flight still counts until it ends."""
        current = self.pending.get(fragment)
        if current is not None and not current.peer:
            del self.pending[fragment]

    def on_end(self, fragment: int, *, version: int, is_state: bool) -> None:
        """A payload or a state was stored; if it was fetched, the fetch is over."""
        current = self.pending.get(fragment)
        if current is not None and (current.version, current.body is None) == (version, is_state):
            self._late.discard(current.peer)
            del self.pending[fragment]

    def on_failure(self, peer: str, fragment: int, reason: str, *, now_ns: int) -> None:
        """A peer could not help; the next one is asked, and after the last one it starts again, later."""
        current = self.pending.get(fragment)
        if current is None or current.peer != peer:
            return
        current.peer = ""
        current.failed.append(peer)
        current.has_witness_failed |= peer == self._witness
        if reason == LATE:
            self._late.add(peer)
        if reason in GONE and current.body is not None:
            # A state that a peer can't give now it may have later; a payload that was pruned does not come back.
            current.gone.add(peer)
        cause = f"{peer} could not send it: {reason}"
        if reason in GONE:
            # Usual while the ledger catches up: what it names by now is older than what its senders keep.
            remedy = "another region is asked, or a newer state is fetched instead"
            cause = f"{peer} does not have this {current.kind}: {remedy}"
        self._effects.note("fetch", cause, fragment=fragment, version=current.version)
        if set(current.failed) >= set(self._others):
            current.failed.clear()
        # Those that are away can't be asked, so they are no reason to ask the others again without a pause.
        if not current.failed or {*current.failed, *current.gone} >= set(self._others) & self._alive:
            current.not_before_ns = now_ns + min(RETRY_NS << min(current.retries, 8), RETRY_NS_MAX)
            current.retries += 1
            if current.body is None:
                self._refused[fragment] = current.version

    def is_gone(self, fragment: int, version: int) -> bool:
        """Whether every other region that can be asked has answered that it no longer has the payload.

        A region that is away may have it, but it may be away for good. A witness is asked before.
        """
        current = self.pending.get(fragment)
        return (
            current is not None
            and current.body is not None
            and current.version == version
            and bool(current.gone)
            and current.gone >= self._alive
            and (current.has_witness_failed or not self._witness)
        )

    def is_refused(self, fragment: int, version: int) -> bool:
        """Whether nobody has this state, or is there, beside a witness, which may have the payloads instead."""
        is_alone = self._alive.isdisjoint(self._others)
        return self._witness != "" and (is_alone or self._refused.get(fragment) == version)

    def brings_other_initial(self, digests: Sequence[bytes]) -> bool:
        """Whether a fetch in flight may still put another Theta_0 than this one on the disk."""
        return any(
            fetch.peer and fetch.body is None and fetch.version == 0 and fetch.digest != digests[fragment]
            for fragment, fetch in self.pending.items()
        )

    def pump(self, *, leader: str, alive: Sequence[str], now_ns: int, witness: str = "") -> None:
        """Start what may be started, from the regions that are alive.

        leader: asked first of those that send as little. witness: asked last, and for payloads alone. Empty: none.
        """
        self._others = self._members
        if leader not in ("", self._region, *self._members):
            # It came after all that this region has read of the ledger. Those that were there then may have gone.
            self._others, alive = tuple(sorted({*self._members, leader})), (*alive, leader)
        self._alive, self._witness = frozenset(alive), witness
        in_flight = sum(1 for fetch in self.pending.values() if fetch.peer)
        # States first: while rounds go on, payloads are lacking all the time.
        for fragment, current in sorted(self.pending.items(), key=lambda item: (item[1].body is not None, item[0])):
            if current.patience_ns:
                current.not_before_ns, current.patience_ns = now_ns + current.patience_ns, 0
            is_another_back = bool(current.failed) and bool(self._alive - {*current.failed, *current.gone})
            if current.peer or (now_ns < current.not_before_ns and not is_another_back):
                continue
            # Also when nobody can be asked now: a time that has passed must not wake the core again and again.
            current.not_before_ns = 0
            if in_flight >= FETCHES_MAX:
                continue
            peer = self._choose(current, leader, alive, witness)
            if peer:
                current.peer = peer
                in_flight += 1
                self._start(fragment, current)

    def in_flight(self) -> tuple[tuple[int, int, str], ...]:
        """(fragment, version, peer) of fetches that were started."""
        return tuple(
            (fetch.fragment, fetch.version, fetch.peer) for _, fetch in sorted(self.pending.items()) if fetch.peer
        )

    def _choose(self, current: _Fetch, leader: str, alive: Sequence[str], witness: str) -> str:
        # A majority has the state of a snapshot: whoever sends least just now sends it. Theta_0 and payloads the leader
        # has for sure.
        is_snapshot = current.body is None and current.version > 0
        loads = Counter(fetch.peer for fetch in self.pending.values() if is_snapshot)
        able = set(self._others) & set(alive)
        order = sorted(able, key=lambda name: (loads[name] + LATE_LOAD * (name in self._late), name != leader, name))
        order += [witness] * (witness != "" and current.body is not None)
        for name in order:
            if name not in current.failed and name not in current.gone:
                return name
        if order and current.failed:
            # Those that are alive have all failed, the rest is away: begin again with them.
            current.failed.clear()
            return next((name for name in order if name not in current.gone), "")
        return ""

    def _start(self, fragment: int, current: _Fetch) -> None:
        body = current.body
        if body is None:
            self._effects.emit(FetchState(current.peer, fragment, current.version, current.digest))
        else:
            self._effects.emit(FetchPayload(current.peer, fragment, body.version, body.payload_digest, body.stripes))
        text = f"{current.kind} from {current.peer}"
        self._effects.note("fetch", text, fragment=fragment, version=current.version)
