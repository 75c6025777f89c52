"""The settings that the ledger holds: genesis names the first ones, an operator's order others from its entry on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # entries are types, too
    from diloco_node.core.types import RunSettings


@dataclass(frozen=True, slots=True)
class SettingsBody:
    """The settings of `RunSettings` that may change in a run, all of them, as they are from this entry on."""

    sync_every: int
    overlap_steps: int
    quorum_min: int
    grace_gamma: float
    rounds_in_flight_max: int
    outer_lr: float
    outer_momentum: float
    carry_steps_max: int
    weight_cap: float
    weight_share_max: float
    tokens_ratio_max: float
    ballot_deadline_min_ns: int

    @classmethod
    def of(cls, settings: RunSettings) -> SettingsBody:
        """Take them out of all settings of a run."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def fault(self, regions: int, heartbeat_ns: int) -> str:
        """Say why these can't be the settings of a run with so many regions; empty if they can.

        Each value is within its bounds already (`core.bounds`).
        """
        if self.overlap_steps >= self.sync_every:
            return f"rounds.overlap_steps, {self.overlap_steps}, must be less than rounds.sync_every, {self.sync_every}"
        if self.ballot_deadline_min_ns < heartbeat_ns:
            return "rounds.ballot_deadline_min must be at least rounds.heartbeat"
        if self.quorum_min > regions:
            remedy = "set it as well; 0 means a majority of those alive"
            return f"rounds.quorum_min is {self.quorum_min}, and the run has {regions} regions: {remedy}"
        return ""

    def within(self, settings: RunSettings) -> RunSettings:
        """Put them in place of those of a region."""
        return replace(settings, **asdict(self))


LEDGER_KEYS: Final = frozenset(f"rounds.{field.name.removesuffix('_ns')}" for field in fields(SettingsBody))
"""Keys of these settings in run.toml."""
