"""Settings that operators change in a simulated run, and the check that each region has each change at its entry."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import EntryBody, GenesisBody, RunSettings
from diloco_node.lab.sim import core_parts as view
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import MS, World

CHANCE: Final = 0.25
"""Part of the seeds in which operators change settings."""

GAP_EVENTS: Final = 700
CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "sync_every": (4, 6, 9),
    "overlap_steps": (1, 2),
    "quorum_min": (0, 1),
    "grace_gamma": (0.0, 0.5, 0.8),
    "rounds_in_flight_max": (1, 2, 3),
    "outer_lr": (0.3, 0.5, 0.7),
    "outer_momentum": (0.0, 0.3, 0.6),
    "carry_steps_max": (0, 20),
    "weight_cap": (1.0, 2.0),
    "weight_share_max": (0.4, 0.5, 1.0),
    "tokens_ratio_max": (2.0, 4.0),
    "ballot_deadline_min_ns": (1000 * MS, 2000 * MS),
}
"""Values that a change draws from."""


class SettingOrders:
    """Orders other settings from the region that leads, in some seeds. counts: of faults, by name."""

    def __init__(self, seed: int, world: World, hosts: Mapping[str, Host], counts: Counter[str]) -> None:
        # A draw of its own, so that the other seeds' runs do not depend on it.
        self._rng = random.Random(f"settings of {seed}")
        self._world, self._hosts, self._counts = world, hosts, counts
        self._gap = GAP_EVENTS if self._rng.random() < CHANCE else 0
        self._next_at_event = self._gap

    def poll(self) -> None:
        """Give an order if it is time for one, and somebody leads."""
        if not self._gap or self._world.events < self._next_at_event:
            return
        self._next_at_event = self._world.events + self._rng.randint(self._gap // 2, 2 * self._gap)
        host = view.newest_leader(self._hosts.values())
        if host is None or host.core.history.genesis is None:
            return
        names = self._rng.sample(list(CHOICES), self._rng.randint(1, 4))
        drawn = {name: self._rng.choice(CHOICES[name]) for name in names}
        self._counts["settings changed"] += 1
        host.post(EntryOrdered(replace(SettingsBody.of(host.core.history.settings), **drawn)))


class SettingCheck:
    """Follows the committed history, and asks each core.

    Attributes:
        settings: in force after the last entry.
    """

    def __init__(self, settings: RunSettings, violate: Callable[[str], None]) -> None:
        self.settings = settings
        self._violate = violate
        # The settings from each index on, ascending.
        self._history = [(0, SettingsBody.of(settings))]

    def committed(self, index: int, body: EntryBody) -> None:
        """Take a committed entry."""
        bodies = body.settings if isinstance(body, GenesisBody) else (body,)
        for settings in bodies:
            if isinstance(settings, SettingsBody):
                self.settings = settings.within(self.settings)
                self._history.append((index, settings))

    def look(self, name: str, core: Any, commit_index: int) -> None:
        """Compare the settings of a core with those at its last committed entry, unless it is not there yet."""
        if core.is_replaying or core.history.genesis is None:
            return
        due = max((line for line in self._history if line[0] <= commit_index), key=lambda line: line[0])[1]
        own = SettingsBody.of(core.history.settings)
        if own != due:
            self._violate(f"settings: {name} at entry {commit_index} has {own}, due is {due}")
