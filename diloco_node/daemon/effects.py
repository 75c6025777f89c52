"""Which part of the daemon carries out what the core orders, and takes what peers send in bulk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from diloco_node.core import events as ev
from diloco_node.core.messages import BulkHeader, ContributionStripe, MergedStripe, Payload, State
from diloco_node.daemon.disk_effects import DiskEffects
from diloco_node.daemon.fetch import Fetcher
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.sending import Transport
from diloco_node.daemon.stripe_effects import StripeEffects
from diloco_node.daemon.version_effects import VersionEffects
from diloco_node.daemon.work import Spawn


@dataclass(frozen=True, slots=True)
class Effects:
    """The hands of the region core. All methods run on the event loop and return at once."""

    disk: DiskEffects
    stripes: StripeEffects
    versions: VersionEffects
    fetcher: Fetcher
    learner: LearnerProxy
    transport: Transport
    spawn: Spawn
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
                parts = self.stripes.table.payload(effect.ballot, effect.fragment, effect.version, effect.stripes)
                self.spawn(self.disk.store_payload(effect, parts), f"store {effect.fragment}")
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
                self.learner.stop(effect.reason)
            case ev.WriteFinal():
                self.spawn(self.disk.write_final(), "final")
            case ev.Note():
                self.note(effect)
            case _:
                assert_never(effect)

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        """A buffer for a transfer that makes sense, or None to skip its bytes."""
        match header:
            case ContributionStripe() | MergedStripe():
                is_expected = self.stripes.expects(peer, header, raw_bytes)
            case Payload() | State():
                is_expected = self.fetcher.expects(peer, header, raw_bytes)
        if not is_expected:
            self.note(ev.Note("refused", f"{type(header).__name__} of {raw_bytes} bytes from {peer}"))
            return None
        return np.empty(raw_bytes, np.uint8).data

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Bytes have arrived, or (not whole) the transfer broke off."""
        body = np.frombuffer(buffer, np.uint8)
        match header:
            case ContributionStripe() if is_whole:
                self.spawn(self.stripes.contribution_arrived(header, body), f"contribution from {peer}")
            case MergedStripe() if is_whole:
                self.spawn(self.stripes.merged_arrived(peer, header, body), f"merged from {peer}")
            case Payload() | State():
                self.spawn(self.fetcher.arrived(peer, header, body, is_whole=is_whole), f"fetched from {peer}")
