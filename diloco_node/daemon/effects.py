"""Carries the core's effects out: to the disk, the peers, the learner and the kernels. Answers come back as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, assert_never

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import payload_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.core.events import (
    AdoptState,
    ApplyVersion,
    CloseBallot,
    ContributionStripeArrived,
    DigestComputed,
    Effect,
    Event,
    FetchPayload,
    FetchState,
    FinalWritten,
    LedgerPersisted,
    MergedStripeArrived,
    Note,
    OfferVersion,
    PayloadNotStored,
    PayloadStored,
    PersistLedger,
    ReduceStripe,
    Send,
    SendContribution,
    SendMerged,
    StopLearner,
    StorePayload,
    StripeReduced,
    TakeSnapshot,
    VersionApplied,
    WriteFinal,
)
from diloco_node.core.measuring import Probe
from diloco_node.core.messages import BulkHeader, ContributionStripe, MergedStripe, Payload, State
from diloco_node.core.types import Ballot, Contribution, RoundBody, RunSettings, Stripe
from diloco_node.daemon.drafts import Drafts
from diloco_node.daemon.fetch import Fetcher
from diloco_node.daemon.final import write_final
from diloco_node.daemon.learner.proxy import LearnerSide
from diloco_node.daemon.parameters import Replica
from diloco_node.daemon.sending import Sending, Spawn
from diloco_node.daemon.stripes import (
    MergedPart,
    StripeTable,
    checked_digest,
    cut_payload,
    is_contiguous,
    reduce_stripe,
)
from diloco_node.errors import DilocoError, LedgerLost, PayloadCorrupt, StorageError
from diloco_node.numeric import U8
from diloco_node.ports import Transport
from diloco_node.storage.store import RegionStore

STORAGE_RETRY_S: Final = 1.0
"""A full disk must not stop training: what could not be written is tried again, and an alarm says so."""

VERSIONS_AHEAD_MAX: Final = 3
"""How far a stripe may be ahead of the replica: the open round, and what commits while this region applies."""

STORAGE_RETRIES_SILENT: Final = 30
"""Every so many tries it is said again that the disk still refuses."""

KEPT_FRAGMENTS_MAX: Final = 2
"""What one region may keep in memory here for one round: so many fragments of contributions, and of merged stripes."""


class Effects:
    """The hands of the region core.

    `perform` starts an effect and returns; anything that takes time is a task of `spawn`, CPU work runs in `pool`, and
    ledger writes run one after the other in `disk`.
    """

    def __init__(
        self,
        *,
        region: str,
        settings: RunSettings,
        state_dir: Path,
        replica: Replica,
        store: RegionStore,
        learner: LearnerSide,
        transport: Transport,
        fetcher: Fetcher,
        pool: Executor,
        disk: Executor,
        post: Callable[[Event], None],
        spawn: Spawn,
        note: Callable[[Note], None],
    ) -> None:
        self.stripes = StripeTable()
        self.merges_total = 0
        self._region = region
        self._settings = settings
        self._state_dir = state_dir
        self._replica = replica
        self._store = store
        self._learner = learner
        self._transport = transport
        self._sending = Sending(transport, spawn)
        self._drafts = Drafts(store, pool, spawn)
        self._fetcher = fetcher
        self._pool = pool
        self._disk = disk
        self._post = post
        self._spawn = spawn
        self._note = note
        self._ledger_turn = asyncio.Lock()
        self._is_ledger_broken = False
        # One after the other, so that the first is on its way while the next is summed; several where cores allow.
        self._reducing = asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 2))

    def perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one arm per effect: the seam
        """Start one effect."""
        match effect:
            case Send():
                self._transport.send(effect.peer, effect.message)
            case PersistLedger():
                self._spawn(self._persist(effect), "persist")
            case TakeSnapshot():
                self._learner.take_snapshot(effect)
            case SendContribution():
                self._spawn(self._send_contribution(effect), f"contribute {effect.contribution.fragment}")
            case ReduceStripe():
                self._spawn(self._reduce(effect), f"reduce {effect.fragment}")
            case SendMerged():
                self._send_merged(effect)
            case StorePayload():
                # The stripes are taken now: the next effect may close the ballot.
                parts = self.stripes.payload(effect.ballot, effect.fragment, effect.version, effect.stripes)
                self._spawn(self._store_payload(effect, parts), f"store {effect.fragment}")
            case ApplyVersion():
                self._spawn(self._apply(effect), f"apply {effect.body.fragment}")
            case AdoptState():
                self._spawn(self._adopt(effect), f"adopt {effect.fragment}")
            case OfferVersion():
                self._learner.inbox.offer(effect)
            case FetchPayload() | FetchState():
                self._fetcher.ask(effect)
            case CloseBallot():
                self._close_ballot(effect)
            case StopLearner():
                self._learner.stop(effect.reason)
            case WriteFinal():
                self._spawn(self._write_final(), "final")
            case Note():
                self._note(effect)
            case _:
                assert_never(effect)

    # ---- disk --------------------------------------------------------------------------------------------------------

    async def _persist(self, order: PersistLedger) -> None:
        # One at a time also while the disk refuses: what was asked for later must not be on it before.
        async with self._ledger_turn:
            if self._is_ledger_broken:
                return
            # Until it is written: a later token that is answered answers for this one, too.
            self._is_ledger_broken = True
            await self._on_disk(
                "ledger",
                lambda: self._store.persist(order.term, order.voted_for, order.truncate_from, order.entries),
                self._disk,
            )
            self._is_ledger_broken = False
            self._post(LedgerPersisted(order.token))

    async def _store_payload(self, order: StorePayload, parts: list[MergedPart]) -> None:
        is_right = is_contiguous(parts, self._replica.blocks[order.fragment].block_count)
        if not is_right or payload_digest([part.digest for part in parts]) != order.digest:
            # Not held, then: if it commits all the same it is fetched, else the ballot's deadline passes.
            text = f"the merged stripes of ballot {order.ballot} are no whole fragment: not stored"
            self._note(Note("corrupt", text, order.fragment, order.version, is_alarm=True))
            self._post(PayloadNotStored(order.ballot, order.fragment, order.version))
            return
        name = (order.fragment, order.version, order.digest)
        if not await self._drafts.finish(order.ballot, *name, parts):
            chunks = [part.encoded for part in parts]
            await self._on_disk(
                f"payload {order.fragment}.{order.version}",
                lambda: self._store.store_payload(*name, chunks),
                self._pool,
            )
        self._fetcher.stored(order.fragment, order.version)
        self._post(PayloadStored(order.fragment, order.version, order.digest))

    async def _on_disk(self, what: str, write: Callable[[], None], executor: Executor) -> None:
        loop = asyncio.get_running_loop()
        tries = 0
        while True:
            try:
                await loop.run_in_executor(executor, write)
            except LedgerLost:
                raise  # the daemon ends with it
            except StorageError as error:
                if tries % STORAGE_RETRIES_SILENT == 0:
                    self._note(Note("disk", f"{what} not written, trying again: {error}", is_alarm=True))
                tries += 1
                await asyncio.sleep(STORAGE_RETRY_S)
                continue
            if tries:
                self._note(Note("disk", f"{what} written after {tries + 1} tries"))
            return

    # ---- stripes -----------------------------------------------------------------------------------------------------

    async def _send_contribution(self, order: SendContribution) -> None:
        contribution = order.contribution
        fragment = contribution.fragment
        self.stripes.ballot_known(order.ballot, fragment, order.version, order.stripes)
        self._sending.contributed_again(fragment, order.ballot)
        wanted = [(index, stripe) for index, stripe in enumerate(order.stripes) if index not in order.skip]
        wanted.sort(key=lambda one: (one[1].reducer == self._region, one[0]))  # those that have a way to go first

        def copy(stripe: Stripe) -> U8 | PayloadCorrupt:
            # The learner's next snapshot of the fragment, and the first one of a restarted learner, overwrite the
            # outbox, while this may still wait for a slow link.
            start, stop = stripe.block_start, stripe.block_stop
            copied = self._learner.contribution_bytes(fragment, start, stop).copy()
            return copied if stripe.reducer != self._region else self._checked(fragment, copied, start, stop)

        loop = asyncio.get_running_loop()
        copies = [loop.run_in_executor(self._pool, copy, stripe) for _, stripe in wanted]
        for (index, stripe), copied in zip(wanted, copies, strict=True):
            start, stop = stripe.block_start, stripe.block_stop
            body = await copied
            if self._learner.has_restarted_since(contribution.incarnation):
                self._note(Note("contribute", "the learner has restarted: not sent", fragment, order.version))
                return
            if isinstance(body, PayloadCorrupt):
                self._note_corrupt(contribution, index, order.version, body)
            elif stripe.reducer == self._region:
                if order.version <= self._replica.versions[fragment]:
                    continue
                self.stripes.keep_contribution(
                    order.version, contribution, start, stop, body, limit_bytes=self._limit_up(fragment)
                )
                self._post(ContributionStripeArrived(order.ballot, index, contribution, (start, stop)))
            else:
                header = ContributionStripe(order.ballot, index, order.version, contribution, start, stop)
                self._sending.send(stripe.reducer, header, body)

    async def _reduce(self, order: ReduceStripe) -> None:
        start, stop = order.block_start, order.block_stop
        parts: list[U8] = []
        for name in order.contributions:
            part = self.stripes.contribution(order.version, name, start, stop)
            if part is None:
                # The round was closed in between; the ballot's deadline takes care of it otherwise.
                self._note(Note("reduce", f"no bytes from {name.learner}", order.fragment, order.version))
                return
            parts.append(part)
        residual_before = self.stripes.residual(order.fragment, order.residual_of, order.stripe)
        try:
            async with self._reducing:
                reduced = await asyncio.get_running_loop().run_in_executor(
                    self._pool,
                    lambda: reduce_stripe(
                        order,
                        parts,
                        self._learner.blocks[order.fragment],
                        self._replica.blocks[order.fragment],
                        residual_before=residual_before,
                        keeps_residual=self._settings.error_feedback,
                    ),
                )
        except PayloadCorrupt as error:
            self._note(Note("corrupt", str(error), order.fragment, order.version, is_alarm=True))
            return
        if order.version <= self._replica.versions[order.fragment]:
            return
        self.merges_total += 1
        merged = MergedPart(reduced.encoded, reduced.digest, start, stop, self._region)
        if self._keep_merged(order.ballot, order.stripe, order.fragment, order.version, merged):
            blocks = self._replica.blocks[order.fragment]
            self._drafts.add(order.ballot, order.fragment, order.version, start, reduced.encoded, blocks=blocks)
        if reduced.residual is not None:
            self.stripes.keep_residual(order.ballot, order.stripe, order.fragment, order.version, reduced.residual)
        self._post(
            StripeReduced(order.ballot, order.stripe, reduced.squared_norms, reduced.contribution_norms, reduced.digest)
        )
        cut = Stripe(self._region, start, stop)
        self._post(MergedStripeArrived(order.ballot, order.stripe, order.fragment, order.version, reduced.digest, cut))

    def _send_merged(self, order: SendMerged) -> None:
        merged = self.stripes.merged(order.ballot, order.stripe, order.fragment, order.version, sender=self._region)
        if merged is None:
            return
        header = MergedStripe(
            order.ballot,
            order.stripe,
            order.fragment,
            order.version,
            order.digest,
            order.block_start,
            order.block_stop,
        )
        for peer in order.peers:
            self._sending.send(peer, header, merged.encoded)

    def _keep_merged(self, ballot: Ballot, stripe: int, fragment: int, version: int, part: MergedPart) -> bool:
        """In memory; False if there is one already."""
        limit_bytes = self._limit_down(fragment)
        return self.stripes.keep_merged(ballot, stripe, fragment, version, part, limit_bytes=limit_bytes)

    def _close_ballot(self, order: CloseBallot) -> None:
        fragment, version = order.fragment, order.version
        self._drafts.close(order.ballot, fragment, version, committed=order.committed)
        self.stripes.close(order.ballot, fragment, version, committed=order.committed)
        if order.committed:
            self._sending.committed(fragment, version)
        elif version <= self._replica.versions[fragment]:
            # Late bytes of a round that is over; its merged stripes may still be on their way to slower regions.
            self.stripes.forget(fragment, version)
        else:
            self._sending.ballot_failed(order.ballot)

    def _limit_up(self, fragment: int) -> int:
        return KEPT_FRAGMENTS_MAX * self._learner.blocks[fragment].encoded_bytes

    def _limit_down(self, fragment: int) -> int:
        return KEPT_FRAGMENTS_MAX * self._replica.blocks[fragment].encoded_bytes

    # ---- versions ----------------------------------------------------------------------------------------------------

    async def _apply(self, order: ApplyVersion) -> None:
        body = order.body
        parts, is_checked = await self._payload_parts(body)
        inbox = self._learner.inbox
        place = inbox.free_place(body.fragment)
        await self._replica.apply(body, parts, place, is_checked=is_checked)
        if place is not None:
            inbox.place_written(body.fragment, body.version)
        self._post(VersionApplied(body.fragment, body.version))
        await self._after_apply(body.fragment, body.version)

    async def _payload_parts(self, body: RoundBody) -> tuple[list[U8], bool]:
        """The committed payload by stripes: from memory if it is the very one, else from disk.

        And whether every block has been looked at: what is in memory was when it came.
        """
        held = self.stripes.payload(body.ballot, body.fragment, body.version, body.stripes)
        if payload_digest([part.digest for part in held]) == body.payload_digest:
            return [part.encoded for part in held], True
        try:
            payload = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._store.read_payload, body.fragment, body.version, body.payload_digest
            )
        except StorageError as error:
            raise _lost_on_disk(f"payload {body.fragment}.{body.version}", error) from error
        return cut_payload(payload, self._replica.blocks[body.fragment], body.stripes), False

    async def _adopt(self, order: AdoptState) -> None:
        try:
            await self._replica.adopt(order.fragment, order.version)
        except StorageError as error:
            raise _lost_on_disk(f"state {order.fragment}.{order.version}", error) from error
        self._post(VersionApplied(order.fragment, order.version))
        await self._after_apply(order.fragment, order.version, is_on_disk=True)

    async def _after_apply(self, fragment: int, version: int, *, is_on_disk: bool = False) -> None:
        held_version, digest = await self._replica.digest(fragment)
        self._post(DigestComputed(fragment, held_version, digest))
        with contextlib.suppress(StorageError):  # whoever stores the next payload says what is wrong with the disk
            await self._replica.write_ahead(fragment)
        if is_on_disk or version % self._settings.checkpoint_versions:
            return
        try:
            await self._replica.checkpoint(fragment)
        except StorageError as error:
            self._note(Note("disk", f"checkpoint not written: {error}", fragment, version, is_alarm=True))

    async def _write_final(self) -> None:
        await self._on_disk(
            "final.safetensors", lambda: write_final(self._state_dir, self._replica.full_tensors()), self._pool
        )
        self._post(FinalWritten())

    # ---- what comes in (called by the transport, on the loop) --------------------------------------------------------

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        """A buffer for a transfer that makes sense, or None to skip its bytes."""
        if not self._is_expected(peer, header, raw_bytes):
            self._note(Note("refused", f"{type(header).__name__} of {raw_bytes} bytes from {peer}"))
            return None
        return np.empty(raw_bytes, np.uint8).data

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Bytes arrived: to the table, or to the fetch that waits for them."""
        body = np.frombuffer(buffer, np.uint8)
        match header:
            case ContributionStripe():
                if is_whole:
                    self._spawn(self._contribution_arrived(header, body), f"contribution from {peer}")
            case MergedStripe():
                if is_whole:
                    self._spawn(self._merged_arrived(peer, header, body), f"merged from {peer}")
            case Payload() | State():
                self._spawn(self._fetcher.arrived(peer, header, body, is_whole=is_whole), f"fetched from {peer}")

    async def _contribution_arrived(self, header: ContributionStripe, body: U8) -> None:
        contribution = header.contribution
        fragment, start, stop = contribution.fragment, header.block_start, header.block_stop
        body_or_error = await asyncio.get_running_loop().run_in_executor(
            self._pool, self._checked, fragment, body, start, stop
        )
        if isinstance(body_or_error, PayloadCorrupt):
            self._note_corrupt(contribution, header.stripe, header.version, body_or_error)
            return
        if header.version <= self._replica.versions[fragment]:
            return
        self.stripes.keep_contribution(
            header.version, contribution, start, stop, body, limit_bytes=self._limit_up(fragment)
        )
        self._post(ContributionStripeArrived(header.ballot, header.stripe, contribution, (start, stop)))

    def _checked(self, fragment: int, body: U8, start: int, stop: int) -> U8 | PayloadCorrupt:
        """Look at every block before it counts as held: one that does not decode must not stall the round later.

        The own learner's too: another process wrote it. In a thread.
        """
        try:
            squared_norms(self._learner.blocks[fragment], body, start, stop)
        except PayloadCorrupt as error:
            return error
        return body

    def _note_corrupt(self, contribution: Contribution, stripe: int, version: int, error: PayloadCorrupt) -> None:
        text = f"stripe {stripe} of the contribution of {contribution.learner}: {error}"
        self._note(Note("corrupt", text, contribution.fragment, version, is_alarm=True))

    async def _merged_arrived(self, peer: str, header: MergedStripe, body: U8) -> None:
        if header.version <= self._replica.versions[header.fragment]:
            return
        blocks = self._replica.blocks[header.fragment]
        # The disk works while we look at it; what does not pass is never named.
        self._drafts.add(header.ballot, header.fragment, header.version, header.block_start, body, blocks=blocks)
        try:
            digest = await asyncio.get_running_loop().run_in_executor(
                self._pool, checked_digest, blocks, body, header.block_start, header.block_stop
            )
            if digest != header.digest:
                raise PayloadCorrupt("it does not match its digest")
        except PayloadCorrupt as error:
            text = f"merged stripe {header.stripe} from {peer}: {error}"
            self._note(Note("corrupt", text, header.fragment, header.version, is_alarm=True))
            return
        if header.version <= self._replica.versions[header.fragment]:
            return
        part = MergedPart(body, digest, header.block_start, header.block_stop, peer)
        if self._keep_merged(header.ballot, header.stripe, header.fragment, header.version, part):
            cut = Stripe(peer, header.block_start, header.block_stop)
            self._post(MergedStripeArrived(header.ballot, header.stripe, header.fragment, header.version, digest, cut))

    def _is_expected(self, peer: str, header: BulkHeader, raw_bytes: int) -> bool:
        match header:
            case ContributionStripe():
                contribution = header.contribution
                return (
                    contribution.learner == peer
                    and contribution.base_version == header.version - 1
                    and _span_is(
                        self._learner.blocks, contribution.fragment, header.block_start, header.block_stop, raw_bytes
                    )
                    and self._is_near(contribution.fragment, header.version)
                )
            case MergedStripe():
                return (
                    _span_is(self._replica.blocks, header.fragment, header.block_start, header.block_stop, raw_bytes)
                    and self._is_near(header.fragment, header.version)
                    and self.stripes.fits(header, peer)
                )
            case Payload() | State():
                return 0 <= header.fragment < len(self._replica.blocks) and self._fetcher.expects(
                    peer, header, raw_bytes
                )
            case Probe():
                return False  # a measurement's, which has taken those that are welcome before

    def _is_near(self, fragment: int, version: int) -> bool:
        """Bytes are kept for the next versions only; a region that is further behind fetches payloads."""
        return 0 < version - self._replica.versions[fragment] <= VERSIONS_AHEAD_MAX


def _lost_on_disk(what: str, error: StorageError) -> DilocoError:
    """What was on disk is not any more. A new process finds out what is left and fetches the rest from the others."""
    return DilocoError(
        f"{what} was on disk and can't be read: {error}. The daemon starts again and fetches what it lacks"
    )


def _span_is(layouts: list[FragmentBlocks], fragment: int, start: int, stop: int, raw_bytes: int) -> bool:
    """Whether a stripe lies in its fragment and has the bytes that its blocks encode to."""
    if not 0 <= fragment < len(layouts):
        return False
    blocks = layouts[fragment]
    return 0 <= start < stop <= blocks.block_count and raw_bytes == blocks.span_bytes(start, stop)
