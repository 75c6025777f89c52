"""Merged stripes on their way to the disk before the last one is there.

A region says that it holds a payload only when all of it is on its disk. Writing each stripe when it comes lets the
disk work while the others are still being merged, and while this one is being checked; in the end only the header is
left to write. A draft becomes the payload only if it holds the very bytes that were checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Ballot
from diloco_node.daemon.effects.open_stripes import MergedPart
from diloco_node.daemon.work import Spawn, in_thread
from diloco_node.errors import StorageError
from diloco_node.numeric import U8
from diloco_node.storage.payload_files import PayloadDraft
from diloco_node.storage.store import RegionStore

DRAFTS_MAX: Final = 4
"""Files that grow at once. Stripes of further ballots are written when they are all there."""

_Name = tuple[Ballot, int, int]


@dataclass(slots=True)
class _Draft:
    """The file of a ballot; None until the first write has begun. lock: it is opened once.

    written: the encoded stripes whose bytes lie in it, or will, by the block where they begin. added_bytes: of those.
    tasks: writes that have not ended. has_failed: the disk refused one of them, or two were for the same place.
    """

    written: dict[int, U8] = field(default_factory=dict)
    added_bytes: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    file: PayloadDraft | None = None
    has_failed: bool = False


class Drafts:
    """Payload files, stripe by stripe. All methods run on the event loop; the disk is waited for in `files`."""

    def __init__(self, store: RegionStore, files: Executor, spawn: Spawn) -> None:
        self._store = store
        self._files = files
        self._spawn = spawn
        self._drafts: dict[_Name, _Draft] = {}

    @property
    def open_count(self) -> int:
        """Drafts that are neither finished nor closed."""
        return len(self._drafts)

    def add(
        self, ballot: Ballot, fragment: int, version: int, block_start: int, body: U8, *, blocks: FragmentBlocks
    ) -> None:
        """Begin to write a stripe. If the disk refuses it, `store_payload` writes it again, with an alarm.

        body: shape (bytes,), uint8, a whole stripe from `block_start` on; not changed any more. blocks: of the payload.
        """
        name = (ballot, fragment, version)
        draft = self._drafts.get(name)
        if draft is None:
            if len(self._drafts) >= DRAFTS_MAX:
                return
            draft = self._drafts[name] = _Draft()
        if block_start in draft.written or draft.added_bytes + body.nbytes > blocks.encoded_bytes:
            draft.has_failed = True  # nobody knows which of them the disk has in the end
        if draft.has_failed:
            return
        draft.written[block_start] = body
        draft.added_bytes += body.nbytes
        task = self._spawn(self._write(draft, block_start, body, blocks), f"draft {fragment}.{version}")
        draft.tasks.add(task)
        task.add_done_callback(draft.tasks.discard)

    async def _write(self, draft: _Draft, block_start: int, body: U8, blocks: FragmentBlocks) -> None:
        try:
            async with draft.lock:
                if draft.file is None:
                    draft.file = await in_thread(self._files, self._store.draft_payload, blocks.encoded_bytes)
            offset = self._store.content_offset(blocks.span_bytes(0, block_start))
            await in_thread(self._files, draft.file.write, offset, body.data)
        except StorageError:
            draft.has_failed = True
        except BaseException:
            draft.has_failed = True  # whatever it was, these bytes are not on the disk
            raise

    async def finish(
        self, ballot: Ballot, fragment: int, version: int, digest: bytes, stripes: Sequence[MergedPart]
    ) -> bool:
        """Make the draft of these stripes, the whole fragment in block order, the payload: it is on the disk then.

        Returns: False if there is no draft of exactly these, or the disk refused: it is to be stored as a whole.
        """
        draft = self._drafts.pop((ballot, fragment, version), None)
        if draft is None:
            return False
        if draft.tasks:
            await asyncio.wait(set(draft.tasks))
        sizes = [stripe.encoded.nbytes for stripe in stripes]
        # The file has the very bytes of these parts, and nothing else was written there.
        is_same = len(draft.written) == len(stripes) and all(
            draft.written.get(stripe.block_start) is stripe.encoded for stripe in stripes
        )
        try:
            if draft.file is not None and is_same and not draft.has_failed:
                await in_thread(self._files, self._store.finish_payload, draft.file, fragment, version, digest, sizes)
                return True
        except StorageError:
            pass
        await self._discard(draft)
        return False

    def close(self, ballot: Ballot, fragment: int, version: int, *, is_committed: bool) -> None:
        """The ballot is over: what is written of it is of no use; when it committed, nor is that of any other."""
        over = version if is_committed else version - 1
        for name in [name for name in self._drafts if name[1] == fragment and (name[0] == ballot or name[2] <= over)]:
            self._spawn(self._discard(self._drafts.pop(name)), "discard a draft")

    async def _discard(self, draft: _Draft) -> None:
        if draft.tasks:
            await asyncio.wait(set(draft.tasks))
        if draft.file is not None:
            await in_thread(self._files, draft.file.discard)
