"""This region's full copy of parameters and momentum, fragment by fragment, and the outer steps on it.

Everything elementwise here is the same bits on every region: factors and payloads come from the ledger, the kernels
do no reordering. Work over a few milliseconds runs in the pool; one lock per fragment keeps readers and the step apart.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import fragment_digest
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import RoundBody, RunSettings
from diloco_node.daemon.work import beside_loop, in_thread
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore

OUTER_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
"""The rest of the cores is the learner's."""


class Parameters:
    """Theta and momentum of all fragments.

    Args:
        pool: for what a round waits for. files: for what waits for the disk. background: for what nobody waits for.
            The last two are the pool by default.

    Attributes:
        versions: per fragment the version in memory; -1 before genesis.
        blocks: per fragment the layout of merged payloads (codec_down).
    """

    def __init__(
        self,
        manifest: Manifest,
        settings: RunSettings,
        store: RegionStore,
        pool: Executor,
        *,
        files: Executor | None = None,
        background: Executor | None = None,
    ) -> None:
        self.manifest = manifest
        self.blocks = [FragmentBlocks(fragment.piece_sizes, settings.codec_down) for fragment in manifest.fragments]
        self.versions = [-1] * len(manifest.fragments)
        self._store = store
        self._pool = pool
        self._files = files or pool
        self._background = background or pool
        self.theta: list[F32] = [np.zeros(0, np.float32) for _ in manifest.fragments]
        ends = np.cumsum([fragment.size for fragment in manifest.fragments])[:-1]
        self.momentum: list[F32] = np.split(np.zeros(manifest.size, np.float32), ends)
        self._locks = [asyncio.Lock() for _ in manifest.fragments]
        self._adopting = asyncio.Lock()

    async def adopt(self, fragment: int, version: int) -> None:
        """Take the state on disk as the state in memory. Raises StorageError: there is none such, or it is damaged."""

        def read() -> F32:
            theta, momentum = self._store.read_state(fragment, version)
            np.copyto(self.momentum[fragment], momentum)
            place = own_memory(theta.size)
            np.copyto(place, theta)
            return place

        # One at a time: each takes 12 bytes a parameter of its fragment, and a start adopts them all.
        async with self._locks[fragment], self._adopting:
            self.theta[fragment] = await in_thread(self._files, read)
            self.versions[fragment] = version

    async def apply(
        self, body: RoundBody, bodies: Sequence[npt.NDArray[np.uint8]], place: F32 | None, *, is_checked: bool = False
    ) -> None:
        """The outer step of a committed round, stripe by stripe, in as many threads as there are cores to spare.

        Args:
            body: the ledger's entry; its version is one above the one in memory.
            bodies: per stripe of `body.stripes`, shape (encoded bytes,), uint8; checked when they arrived.
            place: shape (n,), float32, where the parameters lie from now on; memory of their own if None. The version
                before stays as it is where it lies: a learner may read it.
            is_checked: the parts have been looked at block by block since they came.
        """
        fragment = body.fragment
        blocks = self.blocks[fragment]
        factors, rates = np.array(body.factors, np.float32), (body.outer_lr, body.outer_momentum)
        async with self._locks[fragment]:
            assert self.versions[fragment] == body.version - 1, (fragment, self.versions[fragment], body.version)
            work = list(zip(body.stripes, bodies, strict=True))

            before = self.theta[fragment]
            theta = own_memory(before.size) if place is None else place
            # A last round leaves the momentum alone: where mu is 0 it has no part in the step.
            momentum = np.zeros_like(before) if body.is_last else self.momentum[fragment]

            def step(share: int) -> None:
                for stripe, encoded_stripe in work[share::OUTER_THREADS]:
                    ends = stripe.block_start, stripe.block_stop
                    span = blocks.value_slice(*ends)
                    np.copyto(theta[span], before[span])
                    vectors = theta[span], momentum[span]
                    kernels.outer_step(blocks, encoded_stripe, factors, *rates, *vectors, *ends, is_checked=is_checked)

            shares = range(min(OUTER_THREADS, len(work)))
            size = sum(encoded_stripe.nbytes for encoded_stripe in bodies)
            await asyncio.gather(*(beside_loop(self._pool, size, step, share) for share in shares))
            self.theta[fragment], self.versions[fragment] = theta, body.version

    async def digest(self, fragment: int) -> tuple[int, bytes]:
        """The version in memory and the digest of its parameters and momentum."""
        async with self._locks[fragment]:
            version = self.versions[fragment]
            digest = await in_thread(self._background, fragment_digest, self.theta[fragment], self.momentum[fragment])
        return version, digest

    async def move_theta(self, fragment: int, place: F32) -> int:
        """Have the parameters in `place` (shape (n,), float32) from now on; returns their version."""
        async with self._locks[fragment]:
            await in_thread(self._pool, np.copyto, place, self.theta[fragment])
            self.theta[fragment] = place
            return self.versions[fragment]

    async def checkpoint(self, fragment: int) -> tuple[int, bytes]:
        """Write the fragment's state to disk; the version written, and its digest. Raises StorageError."""
        async with self._locks[fragment]:
            version, theta, momentum = self.versions[fragment], self.theta[fragment], self.momentum[fragment]
            digest = await in_thread(self._pool, fragment_digest, theta, momentum)
            await in_thread(self._files, self._store.store_state, fragment, version, theta, momentum, digest)
        return version, digest

    async def set_states_aside(self, fragment: int, version_min: int) -> None:
        """Rename the fragment's state files from this version on, after what is being written. Raises StorageError."""
        async with self._locks[fragment]:
            await in_thread(self._files, self._store.set_states_aside, fragment, version_min)

    def full_tensors(self) -> dict[str, F32]:
        """The whole model by tensor name, float32, shaped; see `join_fragments`. Call it when no round is open."""
        return join_fragments(self.manifest, self.theta)


def own_memory(size: int) -> F32:
    """Memory for a fragment's parameters until they lie in shared memory, shape (n,), float32. It goes back to the
    kernel with the array: in the heap it would stay as a hole."""
    return np.frombuffer(mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)


def join_fragments(manifest: Manifest, vectors: Sequence[F32]) -> dict[str, F32]:
    """Tensors by name, float32, shaped, of vectors by fragment, shape (n,); views, but for those that are cut."""
    tensors = [np.empty(spec.size, np.float32) for spec in manifest.tensors]  # no page of it is touched yet
    for fragment, vector in zip(manifest.fragments, vectors, strict=True):
        for piece in fragment.pieces:
            values = vector[piece.offset : piece.offset + piece.size]
            if piece.size == manifest.tensors[piece.tensor].size:
                tensors[piece.tensor] = values
            else:
                tensors[piece.tensor][piece.value_start : piece.value_stop] = values
    return {spec.name: values.reshape(spec.shape) for spec, values in zip(manifest.tensors, tensors, strict=True)}


def split_tensors(manifest: Manifest, tensors: Mapping[str, F32]) -> list[F32]:
    """Per fragment its values, shape (n,), float32, of all tensors by name; a copy."""
    vectors = [np.empty(fragment.size, np.float32) for fragment in manifest.fragments]
    for fragment, vector in zip(manifest.fragments, vectors, strict=True):
        for piece in fragment.pieces:
            values = tensors[piece.name].ravel()[piece.value_start : piece.value_stop]
            vector[piece.offset : piece.offset + piece.size] = values
    return vectors
