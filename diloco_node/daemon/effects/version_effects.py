"""Effects on the parameters: outer steps and adopted states, their digests and checkpoints."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from diloco_node.codec.digest import payload_digest
from diloco_node.core import events as ev
from diloco_node.core.types import RoundBody
from diloco_node.daemon.effects.open_stripes import StripeTable, cut_payload
from diloco_node.daemon.effects.sending import EffectContext
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.daemon.work import in_thread
from diloco_node.errors import DilocoError, StorageError
from diloco_node.numeric import U8


@dataclass(slots=True, kw_only=True)
class VersionEffects(EffectContext):
    """Brings fragments to their next versions, in the learner's area if a slot is free, and to the disk."""

    checkpoint_versions: int
    table: StripeTable
    version_area: VersionArea

    async def apply(self, order: ev.ApplyVersion) -> None:
        """The outer step of a committed round. Raises DilocoError: its payload was on disk and is not any more."""
        fragment, version = order.body.fragment, order.body.version
        bodies, is_checked = await self._payload_parts(order.body)
        place = self.version_area.free_place(fragment, version)
        await self.parameters.apply(order.body, bodies, place, is_checked=is_checked)
        self.version_area.place_written(fragment)
        self.post(ev.VersionApplied(fragment, version))
        await self._compute_digest(fragment)
        if version % self.checkpoint_versions == 0:
            try:
                checkpoint = await self.parameters.checkpoint(fragment)
            except StorageError as error:
                self.note(ev.Note("disk", f"checkpoint not written: {error}", fragment, version, is_alarm=True))
            else:
                self.post(ev.CheckpointWritten(fragment, *checkpoint))

    async def _payload_parts(self, body: RoundBody) -> tuple[list[U8], bool]:
        """The committed payload by stripes, from memory if it is the very one, else from disk; whether all was
        checked."""
        stripes = self.table.payload(body.ballot, body.fragment, body.version, body.stripes)
        if payload_digest([stripe.digest for stripe in stripes]) == body.payload_digest:
            return [stripe.encoded for stripe in stripes], True
        name = (body.fragment, body.version, body.payload_digest)
        try:
            payload = await in_thread(self.files, self.store.read_payload, *name)
        except StorageError as error:
            raise _lost_on_disk(f"payload {body.fragment}.{body.version}", error) from error
        return cut_payload(payload, self.parameters.blocks[body.fragment], body.stripes), False

    async def adopt(self, order: ev.AdoptState) -> None:
        """Take a stored state. Raises DilocoError when it is not on disk any more."""
        try:
            await self.parameters.adopt(order.fragment, order.version)
        except StorageError as error:
            raise _lost_on_disk(f"state {order.fragment}.{order.version}", error) from error
        self.version_area.place_written(order.fragment)
        self.post(ev.VersionApplied(order.fragment, order.version))
        await self._compute_digest(order.fragment)

    async def set_aside(self, order: ev.SetStatesAside) -> None:
        """Rename states that are not what the ledger names. Raises DilocoError when the disk refuses."""
        try:
            await self.parameters.set_states_aside(order.fragment, order.version_min)
        except StorageError as error:
            raise _lost_on_disk(f"state {order.fragment}.{order.version_min}", error) from error
        self.post(ev.StatesRenamed(order.fragment))

    async def prune(self, order: ev.PruneFiles) -> None:
        """Remove files that nobody needs any more; those that the disk refuses to remove stay until the next time."""
        with contextlib.suppress(StorageError):
            await in_thread(self.files, self.store.prune, order.fragment, order.keep_from_version)

    async def _compute_digest(self, fragment: int) -> None:
        self.post(ev.DigestComputed(fragment, *await self.parameters.digest(fragment)))


def _lost_on_disk(file: str, error: StorageError) -> DilocoError:
    """The error that ends a daemon whose disk lost a file: a new process fetches from the others what is lacking."""
    return DilocoError(
        f"{file} was on disk and can't be read: {error}. The daemon starts again and fetches what it lacks"
    )
