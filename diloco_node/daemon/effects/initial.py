"""Theta_0 on this disk: the learner's own parameters, those of `initial_files`, or fetched ones."""

from __future__ import annotations

import threading

import numpy as np

from diloco_node.codec.digest import fragment_digest
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore


class InitialStates:
    """The states at version 0 on disk, one writer per fragment at a time; for threads. A region may have said that it
    holds what genesis names, so the learner's own is never written over a fetched one."""

    def __init__(self, fragments: int, store: RegionStore) -> None:
        self._store = store
        self._locks = [threading.Lock() for _ in range(fragments)]
        self._fetched: set[int] = set()

    def store_own(self, fragment: int, theta: F32, momentum: F32 | None = None) -> bytes:
        """Write this region's Theta_0 of a fragment, unless a fetched one is there; its digest. theta, momentum (None:
        zeros): shape (n,), float32. Raises StorageError."""
        momentum = np.zeros_like(theta) if momentum is None else momentum
        digest = fragment_digest(theta, momentum)
        with self._locks[fragment]:
            if fragment not in self._fetched:
                self._store.store_state(fragment, 0, theta, momentum, digest)
        return digest

    def store_fetched(self, fragment: int, theta: F32, momentum: F32, digest: bytes) -> None:
        """Write the Theta_0 that genesis names over whatever is there. Raises StorageError."""
        with self._locks[fragment]:
            self._store.store_state(fragment, 0, theta, momentum, digest)
            self._fetched.add(fragment)

    def forget_fetched(self) -> None:
        """Let the own learner's be written over fetched ones: no genesis here names them any more."""
        self._fetched.clear()
