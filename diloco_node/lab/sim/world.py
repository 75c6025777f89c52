"""Virtual time and a network that does what it likes: the ground the simulator stands on.

Nothing here knows the protocol. `World` is a clock, an event heap ordered by (time, sequence), one seeded source of
randomness and a trace. `FakeNetwork` carries encoded control frames and bulk transfers between named places. Its links
have delay, jitter (so frames overtake each other), loss, duplication, cuts in one direction and limited rates.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host

MS: int = 1_000_000
"""A millisecond in nanoseconds."""

SECOND: int = 1_000_000_000
"""A second in nanoseconds."""

LOCAL_NS: int = 100_000
"""Between daemon and learner over their Unix socket; first in, first out."""

TRACE_TAIL = 200
"""Lines of the trace that are kept for a report."""

NOTED_BYTES_MAX = 65_536
"""Notes go into the digest in pieces of about this size: many small updates take longer."""


class Life:
    """A life of a process: what was scheduled for it does not happen once it is over."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class World:
    """The virtual clock.

    Attributes:
        now_ns: virtual time; only `step` moves it.
        rng: the only source of chance; what it decides depends on nothing but the seed.
        events: facts handed to cores so far (counted by the hosts).
    """

    def __init__(self, seed: int) -> None:
        self.now_ns = 0
        self.rng = random.Random(seed)
        self.events = 0
        self._heap: list[tuple[int, int, Life | None, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._digest = hashlib.sha256()
        self._noted = bytearray()
        self._tail: deque[tuple[int, str, object]] = deque(maxlen=TRACE_TAIL)

    def after(self, delay_ns: int, life: Life | None, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` in `delay_ns`, unless `life` is over by then."""
        self._sequence += 1
        at_ns = self.now_ns + delay_ns if delay_ns > 0 else self.now_ns
        heapq.heappush(self._heap, (at_ns, self._sequence, life, call, args))

    def step(self) -> bool:
        """Let the next thing happen. Returns False when nothing is left to happen."""
        heap = self._heap
        while heap:
            at_ns, _, life, call, args = heapq.heappop(heap)
            if life is not None and life.is_over:
                continue
            self.now_ns = at_ns
            call(*args)
            return True
        return False

    def note(self, place: str, subject: object, fingerprint: bytes) -> None:
        """Add a line to the trace.

        Args:
            place: the region it happened in, or "world". subject: shown in the tail of a report; formatted only then.
            fingerprint: what of it goes into the digest of the trace; must not depend on hash order.
        """
        self._noted += b"%d %s " % (self.now_ns, place.encode())
        self._noted += fingerprint
        if len(self._noted) > NOTED_BYTES_MAX:
            self._digest_noted()
        self._tail.append((self.now_ns, place, subject))

    def trace_digest(self) -> str:
        """SHA-256 over everything that was noted; equal runs have equal digests."""
        self._digest_noted()
        return self._digest.hexdigest()

    def _digest_noted(self) -> None:
        self._digest.update(self._noted)
        self._noted.clear()

    def trace_tail(self, lines: int = TRACE_TAIL) -> list[str]:
        """The last lines of the trace, oldest first."""
        tail = list(self._tail)[-lines:]
        return [f"{at_ns / SECOND:10.4f}s {place:8} {_shorten(subject)}" for at_ns, place, subject in tail]

    def draw_ns(self, low_ns: int, high_ns: int) -> int:
        """A time drawn evenly from [low_ns, high_ns]."""
        return low_ns + int(self.rng.random() * (high_ns - low_ns + 1))


def _shorten(subject: object, limit: int = 240) -> str:
    text = subject if isinstance(subject, str) else repr(subject)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(slots=True)
class FakeLink:
    """A direction between two places.

    Attributes:
        delay_ns, jitter_ns: a frame takes delay + [0, jitter].
        loss, duplicate: chance of each for a control frame; a transfer is lost with chance `loss`.
        rate_bytes_per_s: of bulk transfers, which follow each other.
        cuts: how many faults cut this direction right now; 0 means open.
        bulk_cuts: the same of bulk transfers alone: control lives, and nobody is told.
        bulk_bytes_max: larger transfers never arrive, as behind an MTU black hole; 0: all do.
        free_at_ns: when the last transfer has left.
    """

    delay_ns: int
    jitter_ns: int
    loss: float
    duplicate: float
    rate_bytes_per_s: int
    cuts: int = 0
    bulk_cuts: int = 0
    bulk_bytes_max: int = 0
    free_at_ns: int = 0


FrameSpoiler = Callable[[str, bytes], bytes]
"""(target, frame) to the frame that is sent instead."""

BulkSpoiler = Callable[[str, bytes, bytes], tuple[bytes, bytes]]
"""(target, header, body) to what is sent instead."""


class FakeNetwork:
    """Links between all pairs of places.

    A connection between two places is up when both daemons live and neither direction is cut. Both hear of a change
    after a detection delay, if it has not been undone by then.

    Attributes:
        links: by (from, to). places: by name, set by `join`.
        frame_spoilers, bulk_spoilers: by source, what changes its frames and transfers as they leave.
    """

    def __init__(self, world: World, links: dict[tuple[str, str], FakeLink]) -> None:
        self.world = world
        self.links = links
        self.places: dict[str, Host] = {}
        self.frame_spoilers: dict[str, FrameSpoiler] = {}
        self.bulk_spoilers: dict[str, BulkSpoiler] = {}
        self.dropped = 0
        self._announced_state: dict[tuple[str, str], bool] = {}

    def join(self, name: str, place: Host) -> None:
        """Add a place."""
        self.places[name] = place

    def send(self, source: str, target: str, frame: bytes) -> None:
        """Carry a control frame, perhaps twice, perhaps not at all."""
        spoil = self.frame_spoilers.get(source)
        if spoil is not None:
            frame = spoil(target, frame)
        link = self.links[source, target]
        rng = self.world.rng
        if link.cuts or rng.random() < link.loss:
            self.dropped += 1
            return
        copies = 2 if rng.random() < link.duplicate else 1
        life = self.places[target].daemon_life
        if life is None:
            return
        for _ in range(copies):
            delay_ns = link.delay_ns + self.world.draw_ns(0, link.jitter_ns)
            self.world.after(delay_ns, life, self._arrive, source, target, frame)

    def transfer(self, source: str, target: str, header: bytes, body: bytes) -> None:
        """Carry a bulk transfer; it is lost if the direction is cut when it arrives, or with the link's chance."""
        spoil = self.bulk_spoilers.get(source)
        if spoil is not None:
            header, body = spoil(target, header, body)
        link = self.links[source, target]
        life = self.places[target].daemon_life
        is_too_large = 0 < link.bulk_bytes_max < len(body)
        if life is None or link.cuts or link.bulk_cuts or is_too_large or self.world.rng.random() < link.loss:
            self.dropped += 1
            return
        takes_ns = len(body) * SECOND // link.rate_bytes_per_s
        link.free_at_ns = max(link.free_at_ns, self.world.now_ns) + takes_ns
        delay_ns = link.free_at_ns - self.world.now_ns + link.delay_ns + self.world.draw_ns(0, link.jitter_ns)
        self.world.after(delay_ns, life, self._arrive_bulk, source, target, header, body)

    def cut(self, source: str, target: str) -> None:
        """Cut one direction; cuts add up."""
        self.links[source, target].cuts += 1
        self._detect(source, target)

    def mend(self, source: str, target: str) -> None:
        """Undo one cut."""
        link = self.links[source, target]
        assert link.cuts > 0, (source, target)
        link.cuts -= 1
        self._detect(source, target)

    def cut_all(self, pairs: list[tuple[str, str]]) -> Callable[[], None]:
        """Cut directions; the result mends them."""
        for source, target in pairs:
            self.cut(source, target)

        def mend_all() -> None:
            for source, target in pairs:
                self.mend(source, target)

        return mend_all

    def daemon_changed(self, name: str) -> None:
        """The daemon at this place started or died: the others notice."""
        for peer in sorted(self.places):
            if peer != name:
                self._announced_state.pop((name, peer), None)
                self._detect(name, peer)

    def is_up(self, first: str, second: str) -> bool:
        """Whether a connection between the two could stand right now."""
        return (
            self.places[first].daemon_life is not None
            and self.places[second].daemon_life is not None
            and not self.links[first, second].cuts
            and not self.links[second, first].cuts
        )

    def _arrive(self, source: str, target: str, frame: bytes) -> None:
        self.places[target].frame_arrived(source, frame)

    def _arrive_bulk(self, source: str, target: str, header: bytes, body: bytes) -> None:
        link = self.links[source, target]
        if link.cuts or link.bulk_cuts:
            self.dropped += 1
            return
        self.places[target].transfer_arrived(source, header, body)

    def _detect(self, first: str, second: str) -> None:
        is_up = self.is_up(first, second)
        low_ns, high_ns = (20 * MS, 300 * MS) if is_up else (5 * MS, 2 * SECOND)
        for place, peer in ((first, second), (second, first)):
            self.world.after(self.world.draw_ns(low_ns, high_ns), None, self._tell, place, peer, is_up)

    def _tell(self, place: str, peer: str, is_up: bool) -> None:
        if self.is_up(place, peer) != is_up or self._announced_state.get((place, peer), False) == is_up:
            return
        if self.places[place].daemon_life is None:
            return
        self._announced_state[place, peer] = is_up
        self.places[place].link_changed(peer, is_up=is_up)
