"""The run as one region sees it: what nearly every part of a round's protocol asks."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.merge.fragments import Fragment, Manifest
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """Shared by all parts of one region core. History, liveness and effects change, but are never replaced.

    secret: of this process, at random: whoever knows it knows this region's nonces (`audit_draw`).
    """

    region: str
    manifest: Manifest
    history: RoundHistory
    liveness: Liveness
    effects: EffectBuffer
    secret: bytes

    @property
    def settings(self) -> RunSettings:
        """The settings of the run by the committed entries: ask again each time, for an operator may change them."""
        return self.history.settings

    @property
    def regions(self) -> tuple[str, ...]:
        """The members of the run by the committed entries, sorted; this one too, if it is a member."""
        return self.history.roster.names

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments of the model, by index."""
        return self.manifest.fragments
