"""Whether a region whose folder does not count yet gets to where the run is, or falls further behind.

A line that is narrower than the run's rounds brings less than is committed meanwhile: then it would never join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import RunSettings
from diloco_node.health.rate import SlidingRate
from diloco_node.numeric import NS_PER_S
from diloco_node.planning.advice import format_rate
from diloco_node.planning.plan import OVERHEAD, fragment_sizes

WINDOW_S: Final = 60.0
"""Rates are of the last minute, and no verdict comes before one has passed."""

BEHIND_MIN: Final = 2
"""Rounds of each fragment that are on their way to any region."""


class CatchUp:
    """Call `look` every few seconds.

    Attributes:
        text: how far this region is behind, and what would help; empty: it is not behind.
        is_hopeless: less arrives than the run's rounds need, and the gap has grown for WINDOW_S.
    """

    def __init__(self, manifest: Manifest, settings: RunSettings) -> None:
        self.text = ""
        self.is_hopeless = False
        sizes = fragment_sizes(manifest)
        self._round_bytes = [float(size.encoded[settings.codec_down] * (1 + OVERHEAD)) for size in sizes]
        self._begin()

    def _begin(self) -> None:
        self.text = ""
        self._versions = [0] * len(self._round_bytes)
        self._need, self._arrival = SlidingRate(WINDOW_S), SlidingRate(WINDOW_S)
        self._bytes_in = 0
        # (ns, rounds behind) of the last WINDOW_S, and the newest look before.
        self._gaps: deque[tuple[int, int]] = deque()

    def look(
        self,
        positions: Sequence[Sequence[int]],
        own_versions: Sequence[int],
        *,
        is_counted: bool,
        bytes_in: int,
        ingress: int | None,
        now_ns: int,
    ) -> Note | None:
        """The line to log, when this region falls behind for good, and when that ends.

        positions: per fragment, the versions that the learner of each region that is there has. own_versions: those
        here, or -1.
        is_counted: this region's folder counts: it is no joiner. bytes_in: received since the start. ingress: own
        budget, B/s.
        """
        was_hopeless, self.is_hopeless = self.is_hopeless, False
        for versions in positions:
            self._versions = [max(pair) for pair in zip(self._versions, versions, strict=True)]
        lack = [max(0, version - max(0, own)) for version, own in zip(self._versions, own_versions, strict=True)]
        if is_counted or sum(lack) <= BEHIND_MIN * len(lack):
            self._begin()
            return Note("members", "it has caught up enough to go on with the others") if was_hopeless else None
        self._bytes_in = max(self._bytes_in, bytes_in)
        need = sum(size * version for size, version in zip(self._round_bytes, self._versions, strict=True))
        self._need.add(need, now_ns=now_ns)
        self._arrival.add(self._bytes_in, now_ns=now_ns)
        self._gaps.append((now_ns, sum(lack)))
        while len(self._gaps) > 2 and now_ns - self._gaps[1][0] >= WINDOW_S * NS_PER_S:
            self._gaps.popleft()
        self.text = self._words(sum(lack), ingress, now_ns)
        if self.is_hopeless and not was_hopeless:
            return Note("members", self.text, is_alarm=True)
        return Note("members", "the gap to the run grows no more") if was_hopeless and not self.is_hopeless else None

    def _words(self, behind: int, ingress: int | None, now_ns: int) -> str:
        need, arrival = (rate.per_second(now_ns=now_ns) for rate in (self._need, self._arrival))
        then_ns, behind_then = self._gaps[0]
        if need is None or arrival is None or now_ns - then_ns < WINDOW_S * NS_PER_S:
            return f"{behind} rounds behind"
        course = "closes" if behind < behind_then else "grows" if behind > behind_then else "stays"
        text = (
            f"{behind} rounds behind, the gap {course}: rounds need {format_rate(need)} here, "
            f"{format_rate(arrival)} arrive"
        )
        self.is_hopeless = course == "grows" and arrival < need
        if not self.is_hopeless:
            return text
        remedy = "widen its line, free its processor"
        if ingress is not None and ingress < need:
            remedy = f"raise budget.ingress ({format_rate(ingress)})"
        return f"{text}; so it never joins: {remedy} or `config set rounds.sync_every`"
