"""The version area: who may touch which place, and the versions that are offered to the learner through it.

A place holds one fragment. It is the learner's from VersionOffered to Applied, and all of them are its own while it
writes Theta_0. Without an attached learner nobody can tell whether a process of before still reads: nothing is written.
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
from diloco_node.wire.learner_link import NO_SNAPSHOT, ToLearner, VersionOffered

OFFERS_KEPT: Final = 64
"""Offers whose time is remembered, for whoever measures rounds from outside."""


@dataclass(slots=True)
class VersionArea:
    """See the module. All methods run on the event loop.

    Args:
        area: shape (all values,), float32, shared with the learner. offsets: where each fragment begins, and the end.
        parameters: where versions are copied from. send: to the learner; False if it is gone.
        spawn: runs a task. now_ns: monotonic.

    Attributes:
        generation: grows whenever a learner attaches or detaches; what was begun in an older one is void.
        offered_at_ns: (fragment, version, monotonic ns) of the last versions that the learner could read.
    """

    area: F32
    offsets: Sequence[int]
    parameters: Parameters
    send: Callable[[ToLearner], bool]
    spawn: Spawn
    now_ns: Callable[[], int]
    generation: int = field(default=0, init=False)
    offered_at_ns: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=OFFERS_KEPT), init=False)
    _has_learner: bool = field(default=False, init=False)
    _is_lent: bool = field(default=False, init=False)
    _offered: dict[int, OfferVersion] = field(default_factory=dict, init=False)
    _waiting: dict[int, OfferVersion] = field(default_factory=dict, init=False)
    _written: dict[int, int] = field(default_factory=dict, init=False)

    def place(self, fragment: int) -> F32:
        """The fragment's place, shape (n,), float32, not a copy."""
        return self.area[self.offsets[fragment] : self.offsets[fragment + 1]]

    def begin_learner(self, *, writes_initial: bool) -> None:
        """A learner is attached: what the one before was offered is void.

        Args:
            writes_initial: it is to write Theta_0: every place is its own until `release_initial`.
        """
        self._begin_generation()
        self._has_learner = True
        self._is_lent = writes_initial

    def end_learner(self) -> None:
        """Its connection is gone. It may live and read on, until it attaches again or another one does."""
        self._begin_generation()

    @property
    def is_lent(self) -> bool:
        """Whether the learner is to write Theta_0, and it has not been read out yet."""
        return self._is_lent

    def is_offered(self, fragment: int, version: int) -> bool:
        """Whether the learner was offered exactly this, and has not taken it yet."""
        offer = self._offered.get(fragment)
        return offer is not None and offer.version == version

    def release(self, fragment: int, version: int) -> None:
        """The learner has taken a version: the place is free, and the next one may be offered."""
        offer = self._offered.get(fragment)
        if offer is None or version < offer.version:
            return
        del self._offered[fragment]
        waiting = self._waiting.get(fragment)
        if waiting is not None and waiting.included_snapshot == offer.included_snapshot:
            # Decided while the learner had not yet taken the one before, which has resolved that snapshot since.
            self._waiting[fragment] = replace(waiting, included_snapshot=NO_SNAPSHOT)
        self._offer_waiting(fragment)

    def release_initial(self) -> None:
        """Theta_0 has been read out: the places are free again."""
        self._take_back()
        for fragment in sorted(self._waiting):
            self._offer_waiting(fragment)

    def free_place(self, fragment: int) -> F32 | None:
        """The fragment's place if nobody may be reading or writing it; the caller writes the next version there."""
        if not self._has_learner or self._is_lent or fragment in self._offered:
            return None
        self._written.pop(fragment, None)
        return self.place(fragment)

    def place_written(self, fragment: int, version: int) -> None:
        """The free place now holds this version."""
        self._written[fragment] = version

    def offer(self, order: OfferVersion) -> None:
        """Hand a version to the learner; while its place is taken, the newest one waits."""
        fragment = order.fragment
        if not self._has_learner:
            return
        if self._is_lent or fragment in self._offered:
            self._waiting[fragment] = order
            return
        self._offered[fragment] = order
        if self._written.get(fragment) == order.version:
            self._send_offer(order)
        else:
            self.spawn(self._copy(order, self.generation), f"offer {fragment}")

    async def _copy(self, order: OfferVersion, generation: int) -> None:
        fragment = order.fragment
        version = await self.parameters.copy_theta(fragment, self.place(fragment))
        self._written[fragment] = version
        if generation != self.generation:
            return  # the snapshot it names is another learner's
        if version == order.version:
            self._send_offer(order)
            return
        # The parameters have moved on, and only the core knows whether that version includes a snapshot. Its own offer
        # of it follows, or has come meanwhile.
        del self._offered[fragment]
        self._offer_waiting(fragment)

    def close(self) -> None:
        """Let go of the shared memory: nothing is offered any more."""
        self._begin_generation()
        self.area = np.zeros(0, np.float32)

    def _send_offer(self, order: OfferVersion) -> None:
        self.send(VersionOffered(order.fragment, order.version, order.included_snapshot, order.is_last))
        self.offered_at_ns.append((order.fragment, order.version, self.now_ns()))

    def _offer_waiting(self, fragment: int) -> None:
        waiting = self._waiting.pop(fragment, None)
        if waiting is not None:
            self.offer(waiting)

    def _begin_generation(self) -> None:
        self.generation += 1
        self._has_learner = False
        self._take_back()
        self._offered.clear()
        self._waiting.clear()

    def _take_back(self) -> None:
        if self._is_lent:
            # The learner may have written over what was there.
            self._written.clear()
        self._is_lent = False
