"""Troubles of the daemon's own effects besides crashes and cuts: disks and links.

Each fault keeps to what the protocol promises to survive: rot never takes the last good copy of anything, and what a
disk refuses, or a link loses, comes through when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.disk import RottenKey
from diloco_node.lab.sim.fake_store import FolderDisk
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import World

FSYNC_FAILURES_MAX = 6
BREAK_CHANCE = 0.5
DROP_CHANCE = 0.6

MAJORITY_NEEDS = 3
"""Least number of regions of which one may lose its folder."""

TROUBLES: dict[str, dict[str, int]] = {
    "usual": {
        "disk full": 3,
        "fsync fails": 4,
        "rot": 4,
        "disk lost": 3,
        "broken transfers": 4,
        "full queues": 3,
    },
    "elections": {"disk full": 1, "fsync fails": 3, "disk lost": 3, "full queues": 2},
    "gray": {"rot": 2, "broken transfers": 4, "full queues": 3},
    "away": {"disk full": 1, "rot": 2, "disk lost": 2, "broken transfers": 1},
}
"""How often they begin in each kind of run, beside the faults of `lab.sim.fault_storm`."""

Undo = Callable[[], None]
Begin = Callable[[], Undo | None]
"""Gives what ends it, or None if it could not begin."""


class Troubles:
    """Faults of hosts with the daemon's own effects."""

    def __init__(self, world: World, hosts: Mapping[str, Host]) -> None:
        self._world = world
        self._hosts = {name: cast(DaemonHost, hosts[name]) for name in sorted(hosts)}
        self.kinds: dict[str, Begin] = {
            "disk full": self._fill_disk,
            "fsync fails": self._fail_fsync,
            "rot": self.rot,
            "disk lost": self.lose_disk,
            "broken transfers": self._break_transfers,
            "full queues": self._fill_queues,
        }

    @classmethod
    def of(cls, world: World, hosts: Mapping[str, Host]) -> dict[str, Begin]:
        """The kinds of fault that these hosts can have."""
        return cls(world, hosts).kinds if all(isinstance(host, DaemonHost) for host in hosts.values()) else {}

    def _pick(self) -> DaemonHost:
        return self._hosts[self._world.rng.choice(list(self._hosts))]

    def _fill_disk(self) -> Undo | None:
        disk = self._pick().folder_disk
        if disk.is_full:
            return None
        disk.is_full = True
        return partial(setattr, disk, "is_full", False)

    def _fail_fsync(self) -> Undo | None:
        disk = self._pick().folder_disk
        if disk.fsync_failures:
            return None
        disk.fsync_failures = self._world.rng.randint(1, FSYNC_FAILURES_MAX)
        return partial(setattr, disk, "fsync_failures", 0)

    def rot(self) -> Undo | None:
        """Bytes of a payload or state change; found when they are read. Every region but this one has it whole."""
        here = self._pick()
        disk = here.folder_disk
        disks = [host.folder_disk for host in self._hosts.values() if host is not here]
        payloads = [key for key in sorted(disk.payloads) if _is_safe(disks, key)]
        states = [key for key in sorted(disk.older_states) if _is_safe(disks, key)]
        if disk.damaged or not payloads + states:
            return None
        keys: list[RottenKey] = [*payloads, *states]
        disk.damaged.add(self._world.rng.choice(keys))
        return lambda: None

    def lose_disk(self) -> Undo | None:
        """Lose a folder, if all the others hold what is committed, and every region's present folder is named."""
        hosts = list(self._hosts.values())
        # Beside an older copy it would be the second folder that forgets.
        has_older_copy = any("is an older copy" in host.observer.words for host in hosts)
        if len(hosts) < MAJORITY_NEEDS or has_older_copy or any(host.core is None for host in hosts):
            return None
        index, name = max((host.core.ledger.cluster_commit_index, host.name) for host in hosts)
        core = self._hosts[name].core
        if index <= core.ledger.base.index or core.ledger.disks.last_change_index > index:
            return None
        last, disks = core.ledger.entry(index), core.ledger.disks
        if any(not disks.counts(host.name, host.disk.id) or not host.disk.holds(last) for host in hosts):
            return None
        host = self._pick()
        host.lose_disk()
        return host.start

    def _break_transfers(self) -> Undo | None:
        host = self._pick()
        host.break_chance = BREAK_CHANCE
        return partial(setattr, host, "break_chance", 0.0)

    def _fill_queues(self) -> Undo | None:
        host = self._pick()
        host.drop_chance = DROP_CHANCE
        return partial(setattr, host, "drop_chance", 0.0)


def _is_safe(disks: list[FolderDisk], key: RottenKey) -> bool:
    """The others can stand in for it: nothing of this fragment is damaged there, and they have a state of it."""
    fragment = key[0]
    return all(fragment in disk.states and not any(key[0] == fragment for key in disk.damaged) for disk in disks)
