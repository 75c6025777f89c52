"""The version area: whose slot is whose, and the versions that are offered to the learner through it.

A slot holds a version of one fragment, and is written before anybody is told of it. It stays as it is while it holds
the daemon's parameters, is offered, or is the base that the learner measures its steps from. So where learner and
daemon stand at the same version, one copy serves both. A version that finds no free slot lies in memory of the daemon's
own until its learner can take it.

While the learner writes Theta_0, all slots are its own. Without an attached learner nobody can tell which ones a
process of before still reads: none is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from diloco_node.core.events import OfferVersion
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.work import Spawn
from diloco_node.numeric import F32
from diloco_node.wire.learner_link import NO_SLOT, NO_SNAPSHOT, ToLearner, VersionOffered

OFFERS_KEPT: Final = 64
"""Offers whose time is remembered, for whoever measures rounds from outside."""


@dataclass(slots=True)
class VersionArea:
    """Slots of shared memory in which versions are offered to the learner. All methods run on the event loop.

    Args:
        area: shape (slots, values of the largest fragment), float32, shared with the learner. sizes: per fragment.
        parameters: whose versions lie here. send: to the learner; False if it is gone.
        spawn: runs a task. now_ns: monotonic.

    Attributes:
        is_lent: the learner is to write Theta_0, and it has not been read out yet.
        generation: grows whenever a learner attaches or detaches; what was begun in an older one is void.
        offered_at_ns: (fragment, version, monotonic ns) of the last versions that the learner could read.
    """

    area: F32
    sizes: Sequence[int]
    parameters: Parameters
    send: Callable[[ToLearner], bool]
    spawn: Spawn
    now_ns: Callable[[], int]
    generation: int = field(default=0, init=False)
    offered_at_ns: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=OFFERS_KEPT), init=False)
    _has_learner: bool = field(default=False, init=False)
    is_lent: bool = field(default=False, init=False)
    # Offered, and not taken yet; its slot is in `_lent_slots` once it is sent. Those that wait are of later versions,
    # or there was no slot.
    _offered: dict[int, OfferVersion] = field(default_factory=dict, init=False)
    _waiting: dict[int, OfferVersion] = field(default_factory=dict, init=False)
    # The slots that are not free: of the parameters, of the learner's base, offered, being written by the outer step,
    # all by fragment; and being written by a copy.
    _own: dict[int, int] = field(default_factory=dict, init=False)
    _base: dict[int, int] = field(default_factory=dict, init=False)
    _base_versions: tuple[int, ...] = field(default=(), init=False)
    _lent_slots: dict[int, int] = field(default_factory=dict, init=False)
    _stepping: dict[int, int] = field(default_factory=dict, init=False)
    _copying: set[int] = field(default_factory=set, init=False)

    def place(self, fragment: int, slot: int) -> F32:
        """A slot as a fragment's, shape (n,), float32, not a copy."""
        return self.area[slot, : self.sizes[fragment]]

    def initial_places(self) -> list[F32]:
        """Where the learner writes Theta_0: per fragment its place, shape (n,), float32, not copies."""
        return [self.place(fragment, fragment) for fragment in range(len(self.sizes))]

    def begin_learner(
        self, *, writes_initial: bool, base_slots: Sequence[int] = (), base_versions: Sequence[int] = ()
    ) -> None:
        """A learner is attached: earlier offers are void. writes_initial: every slot is its own until
        `release_initial`. Per fragment, base_slots: where its base is, or NO_SLOT; base_versions: the base."""
        # The parameters begin with Theta_0: no version of theirs can be here.
        assert not (writes_initial and self._own), self._own
        self.end_learner()
        self._has_learner = True
        self.is_lent = writes_initial
        self._base = {fragment: slot for fragment, slot in enumerate(base_slots) if slot != NO_SLOT}
        self._base_versions = tuple(base_versions)

    def end_learner(self) -> None:
        """Void what was begun. Its connection may be gone: then it lives and reads on, until it or another attaches."""
        self.generation += 1
        self._has_learner = self.is_lent = False
        self._offered.clear()
        self._lent_slots.clear()
        self._waiting.clear()

    def is_offered(self, fragment: int, version: int) -> bool:
        """Whether the learner was offered exactly this, and has not taken it yet."""
        offer = self._offered.get(fragment)
        return offer is not None and offer.version == version

    def release(self, fragment: int, version: int, base_slot: int) -> None:
        """The learner has taken a version: the next may be offered. base_slot: where its base is now."""
        offer = self._offered.get(fragment)
        if offer is None or version < offer.version or fragment not in self._lent_slots:
            return
        del self._offered[fragment]
        if self._lent_slots.pop(fragment) == base_slot:
            self._base[fragment] = base_slot
        elif base_slot == NO_SLOT:
            self._base.pop(fragment, None)
        waiting = self._waiting.get(fragment)
        if waiting is not None and waiting.included_snapshot == offer.included_snapshot:
            # Decided while the learner had not yet taken the one before, which has resolved that snapshot since.
            self._waiting[fragment] = replace(waiting, included_snapshot=NO_SNAPSHOT)
        self._offer_waiting()

    def release_initial(self) -> None:
        """Theta_0 has been read out: the slots are free again."""
        self.is_lent = False
        self._offer_waiting()

    def free_place(self, fragment: int, version: int) -> F32 | None:
        """A free slot as the fragment's; the caller writes this version there. None: there is none, or the learner had
        the version when it came: nobody offers it, and its slot would be lacking until the fragment's next round."""
        is_news = all(version > base for base in self._base_versions[fragment : fragment + 1])
        slot = self._free_slot() if is_news else None
        if slot is None:
            return None
        self._stepping[fragment] = slot
        return self.place(fragment, slot)

    def place_written(self, fragment: int) -> None:
        """The fragment's parameters lie in the place that was given out for them; without one, nowhere here."""
        self._own.pop(fragment, None)
        if (slot := self._stepping.pop(fragment, None)) is not None:
            self._own[fragment] = slot
        self._offer_waiting()

    def offer(self, order: OfferVersion) -> None:
        """Hand a version to the learner; while it has not taken the one before, the newest one waits."""
        fragment = order.fragment
        if not self._has_learner:
            return
        if self.is_lent or fragment in self._offered:
            self._waiting[fragment] = order
            return
        slot = self._own.get(fragment)
        if slot is not None:
            # The parameters may have moved on, and only the core knows whether that version includes a snapshot. Its
            # own offer of it follows, or has come meanwhile.
            if self.parameters.versions[fragment] == order.version:
                self._send_offer(order, slot)
        elif (slot := self._free_slot()) is not None:
            self._offered[fragment] = order
            self._copying.add(slot)
            self.spawn(self._copy(order, slot, self.generation), f"offer {fragment}")
        else:
            self._waiting[fragment] = order

    async def _copy(self, order: OfferVersion, slot: int, generation: int) -> None:
        fragment = order.fragment
        version = await self.parameters.move_theta(fragment, self.place(fragment, slot))
        self._own[fragment] = slot
        self._copying.remove(slot)
        if generation != self.generation:
            self._offer_waiting()  # the snapshot it names is another learner's; that one's own offer waits for the slot
            return
        del self._offered[fragment]
        if version == order.version:
            self._send_offer(order, slot)
        else:
            self._offer_waiting()

    def close(self) -> None:
        """Let go of the shared memory: nothing is offered any more."""
        self.end_learner()
        self.area = np.zeros((0, 0), np.float32)

    def _send_offer(self, order: OfferVersion, slot: int) -> None:
        fragment, version = order.fragment, order.version
        self._offered[fragment], self._lent_slots[fragment] = order, slot
        self.send(VersionOffered(fragment, version, order.included_snapshot, order.is_last, slot))
        self.offered_at_ns.append((fragment, version, self.now_ns()))

    def _free_slot(self) -> int | None:
        if not self._has_learner or self.is_lent:
            return None
        uses = (self._own, self._base, self._lent_slots, self._stepping)
        taken = self._copying.union(*(use.values() for use in uses))
        return next((slot for slot in range(len(self.area)) if slot not in taken), None)

    def _offer_waiting(self) -> None:
        for fragment in sorted(self._waiting.keys() - self._offered.keys()):
            self.offer(self._waiting.pop(fragment))
