"""Faults to plant into the daemon's own effects; see `core_faults` for those in the core and under everything."""

import contextlib
from typing import Any, cast

from diloco_node.daemon.effects.effects import Effects
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.errors import StorageError
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.planting import Fault
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore


class _Lavish:
    """A version area in which the slots that are read are free."""

    def __init__(self, area: VersionArea) -> None:
        self._area = area

    def free_place(self, fragment: int, version: int) -> F32 | None:
        if fragment not in self._area._base:
            return self._area.free_place(fragment, version)
        self._area._stepping[fragment] = self._area._base[fragment]
        return self._area.place(fragment, self._area._base[fragment])

    def place_written(self, fragment: int) -> None:
        self._area.place_written(fragment)


def _write_into_lent_places(hands: Effects) -> None:
    hands.versions.version_area = cast(VersionArea, _Lavish(hands.versions.version_area))


class _Deaf:
    """A folder whose refusals nobody hears."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def persist(self, *write: Any) -> None:
        with contextlib.suppress(StorageError):
            self._store.persist(*write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _answer_what_was_refused(hands: Effects) -> None:
    hands.disk.store = cast(RegionStore, _Deaf(hands.disk.store))


def _spoil(spoil: Any) -> Any:
    def plant(host: Host) -> None:
        cast(DaemonHost, host).spoil_effects = spoil

    return plant


EFFECT_FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "lent-place",
            "a place of the version area is the learner's until it has applied the version",
            plant=_spoil(_write_into_lent_places),
        ),
        Fault(
            "refused-write",
            "what the disk refused is written again before it is answered",
            plant=_spoil(_answer_what_was_refused),
        ),
    )
}
