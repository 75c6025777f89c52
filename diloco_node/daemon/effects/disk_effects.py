"""Effects on the disk: the ledger, merged payloads, Theta_0 and the final model. Answers come back as events."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from diloco_node.codec.digest import payload_digest
from diloco_node.core import events as ev
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.fetch import Fetcher
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.effects.initial_files import read_initial
from diloco_node.daemon.effects.open_stripes import MergedPart, is_contiguous
from diloco_node.daemon.effects.past_init import read_past_init
from diloco_node.daemon.effects.sending import EffectContext
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.daemon.work import in_thread
from diloco_node.numeric import F32


@dataclass(slots=True, kw_only=True)
class DiskEffects(EffectContext):
    """Writes what must survive the process until the disk takes it. disk: one thread, for the ledger."""

    init: str | None
    write_final_file: Callable[[dict[str, F32]], None]
    save_counter_file: Callable[[int, mmap.mmap], object]
    fetcher: Fetcher
    writes: DiskWrites
    initial: InitialStates
    disk: Executor
    _ledger_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _is_ledger_broken: bool = field(default=False, init=False)
    _initial_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def persist_ledger(self, order: ev.PersistLedger) -> None:
        """Append to the ledger. Orders are carried out one at a time, also while the disk refuses."""
        async with self._ledger_lock:
            if self._is_ledger_broken:
                return
            # Until it is written: the answer to a later token answers for this one, too.
            self._is_ledger_broken = True
            write = partial(
                self.store.persist, order.term, order.voted_for, order.truncate_from, order.entries, order.base
            )
            await self.writes.until_written("ledger", self.disk, write)
            self._is_ledger_broken = False
            self.post(ev.LedgerPersisted(order.token))

    async def save_counters(self, incarnation: int, area: mmap.mmap) -> None:
        """Wait until what an incarnation of the learner has counted, in the shared memory, is durable."""
        save = partial(self.save_counter_file, incarnation, area)
        await self.writes.until_written(f"the counters of incarnation {incarnation}", self.disk, save)

    async def store_payload(self, order: ev.StorePayload, stripes: list[MergedPart]) -> None:
        """Write a merged payload. stripes: the ballot's merged stripes that are in memory, in block order."""
        fragment, version, digest = order.fragment, order.version, order.digest
        is_right = is_contiguous(stripes, self.parameters.blocks[fragment].block_count)
        if not is_right or payload_digest([stripe.digest for stripe in stripes]) != digest:
            # If it commits all the same it is fetched, else the ballot's deadline passes.
            text = f"the merged stripes of ballot {order.ballot} are no whole fragment: not stored"
            self.note(ev.Note("corrupt", text, fragment, version, is_alarm=True))
            self.post(ev.PayloadNotStored(order.ballot, fragment, version))
            return
        chunks = [stripe.encoded for stripe in stripes]
        write = partial(self.store.store_payload, fragment, version, digest, chunks)
        await self.writes.until_written(f"payload {fragment}.{version}", self.files, write)
        self.fetcher.drop_fetch(fragment, version)
        self.post(ev.PayloadStored(fragment, version, digest))

    async def store_initial_state(self, version_area: VersionArea, generation: int) -> None:
        """Write Theta_0 of the whole model: this region can propose genesis then. Nothing is offered meanwhile.
        generation: of the learner that wrote it; a later one may be writing."""
        async with self._initial_lock:
            if version_area.generation != generation:
                return
            manifest = self.parameters.manifest
            momentum: Sequence[F32 | None] = [None] * len(manifest.fragments)
            thetas = version_area.initial_places()
            if self.init is not None:
                past = await in_thread(self.files, read_past_init, self.init, manifest)
                if past is not None:
                    thetas, momentum = past
                else:
                    thetas = await in_thread(self.files, read_initial, Path(self.init), manifest)
            digests = []
            for fragment, theta in enumerate(thetas):
                write = partial(self.initial.store_own, fragment, theta, momentum[fragment])
                digests.append(await self.writes.until_written("Theta_0", self.files, write))
            if version_area.generation != generation:
                return  # it may have been written over while it was read; the next learner lays down its own
            self.post(ev.InitialStateStored(tuple(digests)))
            version_area.release_initial()

    def forget_fetched_initial(self) -> bool:
        """Let Theta_0 be written over fetched ones; not (False) while it is being written."""
        if self._initial_lock.locked():
            return False
        self.initial.forget_fetched()
        return True

    async def write_final(self) -> None:
        """Write final.safetensors."""
        await self.writes.until_written(
            "final.safetensors", self.files, lambda: self.write_final_file(self.parameters.full_tensors())
        )
        self.post(ev.FinalWritten())
