"""Dispatch: each order of the core, and each message of a peer, to the part of the daemon that takes it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.projections import Project, ProjectContributions
from diloco_node.core.types import MergeRule, RunSettings
from diloco_node.daemon.effects.disk_effects import DiskEffects
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.fetch import Fetcher
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.effects.open_stripes import StripeTable
from diloco_node.daemon.effects.sending import Sending, Transport
from diloco_node.daemon.effects.stripe_effects import StripeEffects
from diloco_node.daemon.effects.version_effects import VersionEffects
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.work import Spawn, Threads
from diloco_node.errors import PeerError
from diloco_node.numeric import F32
from diloco_node.storage.store import RegionStore


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """The hands of the region core. All methods run on the event loop and return at once."""

    disk: DiskEffects
    stripes: StripeEffects
    versions: VersionEffects
    fetcher: Fetcher
    learner: LearnerProxy
    transport: Transport
    spawn: Spawn
    post: Callable[[ev.Event], None]
    note: Callable[[ev.Note], None]

    def perform(self, effect: ev.Effect) -> None:  # noqa: C901, PLR0912 - one arm per effect: the seam
        """Start one effect."""
        match effect:
            case ev.Send():
                self.transport.send(effect.peer, effect.message)
            case ev.PersistLedger():
                self.spawn(self.disk.persist_ledger(effect), "persist")
            case ev.TakeSnapshot():
                self.learner.take_snapshot(effect)
            case ev.SendContribution():
                self.spawn(self.stripes.send_contribution(effect), f"contribute {effect.contribution.fragment}")
            case ev.ReduceStripe():
                self.spawn(self.stripes.reduce(effect), f"reduce {effect.fragment}")
            case ev.SendMerged():
                self.stripes.send_merged(effect)
            case ev.StorePayload():
                # The stripes are taken now: the next effect may close the ballot.
                stripes = self.stripes.table.payload(effect.ballot, effect.fragment, effect.version, effect.stripes)
                self.spawn(self.disk.store_payload(effect, stripes), f"store {effect.fragment}")
            case Project():
                stripes = self.stripes.table.payload(effect.ballot, effect.fragment, effect.version, effect.stripes)
                self.spawn(self.stripes.project(effect, stripes), f"project {effect.fragment}")
            case ProjectContributions():
                self.spawn(self.stripes.project_contributions(effect), f"project {effect.fragment}")
            case ev.ApplyVersion():
                self.spawn(self.versions.apply(effect), f"apply {effect.body.fragment}")
            case ev.AdoptState():
                self.spawn(self.versions.adopt(effect), f"adopt {effect.fragment}")
            case ev.SetStatesAside():
                self.spawn(self.versions.set_aside(effect), f"set aside {effect.fragment}")
            case ev.PruneFiles():
                self.spawn(self.versions.prune(effect), f"prune {effect.fragment}")
            case ev.OfferVersion():
                self.learner.version_area.offer(effect)
            case ev.FetchPayload() | ev.FetchState():
                self.fetcher.ask(effect)
            case ev.CloseBallot():
                self.stripes.close_ballot(effect)
            case ev.StopLearner():
                self.learner.stop(effect.reason, effect.versions)
            case ev.WriteFinal():
                self.spawn(self.disk.write_final(), "final")
            case ev.Note():
                self.note(effect)
            case _:
                assert_never(effect)

    def control_arrived(self, peer: str, message: msg.Message) -> None:
        """Requests for bytes are the daemon's business, everything else the core's."""
        match message:
            case msg.PayloadRequested() | msg.StateRequested():
                self.fetcher.serve(peer, message)
            case msg.Refused():
                self.fetcher.on_refusal(peer, message)
            case _:
                try:
                    self.post(ev.MessageArrived(peer, message))
                except PeerError as error:
                    self.note(ev.Note("peer", f"{peer}: {error}", is_alarm=True))

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Both connections to a peer are there, or one is gone."""
        # The core first: it must not ask this peer again for what has just failed.
        self.post(ev.LinkChanged(peer, is_up))
        if not is_up:
            self.fetcher.peer_lost(peer)

    def transfer_opened(self, peer: str, header: msg.BulkHeader, raw_bytes: int) -> memoryview | None:
        """A buffer for a transfer that makes sense, or None to skip its bytes."""
        match header:
            case msg.ContributionStripe() | msg.MergedStripe():
                is_expected = self.stripes.expects(peer, header, raw_bytes)
            case msg.Payload() | msg.State():
                is_expected = self.fetcher.expects(peer, header, raw_bytes)
        if not is_expected:
            self.note(ev.Note("refused", f"{type(header).__name__} of {raw_bytes} bytes from {peer}"))
            return None
        return np.empty(raw_bytes, np.uint8).data

    def transfer_closed(self, peer: str, header: msg.BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Bytes have arrived, or (not whole) the transfer broke off."""
        body = np.frombuffer(buffer, np.uint8)
        match header:
            case msg.ContributionStripe() if is_whole:
                self.spawn(self.stripes.contribution_arrived(header, body), f"contribution from {peer}")
            case msg.MergedStripe() if is_whole:
                self.spawn(self.stripes.merged_arrived(peer, header, body), f"merged from {peer}")
            case msg.Payload() | msg.State():
                self.spawn(self.fetcher.take_transfer(peer, header, body, is_whole=is_whole), f"fetched from {peer}")


def build_effects(
    *,
    region: str,
    settings: RunSettings,
    init: str | None,
    parameters: Parameters,
    store: RegionStore,
    transport: Transport,
    learner: LearnerProxy,
    threads: Threads,
    spawn: Spawn,
    post: Callable[[ev.Event], None],
    note: Callable[[ev.Note], None],
    write_final_file: Callable[[dict[str, F32]], None],
    save_counter_file: Callable[[int, mmap.mmap], object],
) -> Effects:
    """All of them, over this process's disk, links, learner and threads.

    Args:
        region: our name. init: a file with Theta_0; None: it is the learner's.
        write_final_file: makes the final model durable, by tensor name; raises StorageError.
        save_counter_file: makes durable what the shared memory says of an incarnation; raises StorageError.
    """
    context: dict[str, Any] = {"parameters": parameters, "store": store, "pool": threads.pool, "files": threads.files}
    context |= {"post": post, "note": note, "spawn": spawn}
    table = StripeTable()
    initial = InitialStates(len(parameters.manifest.fragments), store)
    writes = DiskWrites(note)
    fetcher = Fetcher(**context, transport=transport, initial=initial, writes=writes)
    disk = DiskEffects(
        **context,
        init=init,
        write_final_file=write_final_file,
        save_counter_file=save_counter_file,
        fetcher=fetcher,
        writes=writes,
        initial=initial,
        disk=threads.disk,
    )
    stripes = StripeEffects(
        **context,
        region=region,
        is_trimmed=settings.merge is MergeRule.TRIMMED,
        learner=learner,
        table=table,
        sending=Sending(transport, spawn),
        reject=transport.reject,
    )
    versions = VersionEffects(
        **context, checkpoint_versions=settings.checkpoint_versions, table=table, version_area=learner.version_area
    )
    return Effects(disk, stripes, versions, fetcher, learner, transport, spawn, post, note)
