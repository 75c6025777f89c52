"""One region's effects between fakes, with the real codec, parameters and store."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.core.events import ContributionStripeArrived, Event, Note, OfferVersion, SendContribution, TakeSnapshot
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.core.types import Ballot, Contribution, Entry, LedgerBase, RoundBody, Stripe
from diloco_node.daemon.effects.disk_effects import DiskEffects
from diloco_node.daemon.effects.disk_writes import DiskWrites
from diloco_node.daemon.effects.effects import Effects
from diloco_node.daemon.effects.fetch import Fetcher
from diloco_node.daemon.effects.initial import InitialStates
from diloco_node.daemon.effects.open_stripes import StripeTable
from diloco_node.daemon.effects.sending import Sending
from diloco_node.daemon.effects.stripe_effects import StripeEffects
from diloco_node.daemon.effects.version_effects import VersionEffects
from diloco_node.daemon.final_model import write_final
from diloco_node.daemon.parameters import Parameters
from diloco_node.errors import LedgerLost, StorageError
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import save_trained
from tests.kit.node_kit import (
    MANIFEST,
    SETTINGS,
    FakeTransport,
    InlineExecutor,
    Tasks,
    contribution_of,
    encoded,
    theta_of,
)

BALLOT = Ballot(1, 1)


class FakeInbox:
    def __init__(self) -> None:
        self.offered: list[OfferVersion] = []
        self.written: list[int] = []
        self.places: dict[int, np.ndarray] = {}

    def offer(self, order: OfferVersion) -> None:
        self.offered.append(order)

    def free_place(self, fragment: int, _: int) -> np.ndarray | None:
        return self.places.get(fragment)

    def place_written(self, fragment: int) -> None:
        self.written.append(fragment)


@dataclass
class FakeLearner:
    """The learner's side: a contribution area that the test writes, and what was asked."""

    blocks: list[FragmentBlocks]
    contribution_area: list[np.ndarray]
    version_area: FakeInbox = field(default_factory=FakeInbox)
    incarnation: int = 1
    asked: list[TakeSnapshot] = field(default_factory=list)
    stopped: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def take_snapshot(self, order: TakeSnapshot) -> None:
        self.asked.append(order)

    def has_restarted_since(self, incarnation: int) -> bool:
        return incarnation != self.incarnation

    def contribution_bytes(self, fragment: int, start: int, stop: int) -> np.ndarray:
        blocks = self.blocks[fragment]
        first = blocks.span_bytes(0, start)
        return self.contribution_area[fragment][first : first + blocks.span_bytes(start, stop)]

    def stop(self, reason: str, versions: tuple[int, ...]) -> None:
        self.stopped.append((reason, versions))


class FlakyStore:
    """The real store, that refuses as often as the test says."""

    def __init__(self, store: RegionStore) -> None:
        self._store = store
        self.refusals: dict[str, int] = {}
        self.is_ledger_lost = False
        self.persisted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _maybe_refuse(self, what: str) -> None:
        if self.refusals.get(what, 0) > 0:
            self.refusals[what] -= 1
            raise StorageError(f"{what}: the disk is full")

    def persist(
        self, term: int, voted_for: str, truncate_from: int, entries: Sequence[Entry], base: LedgerBase | None = None
    ) -> None:
        self._maybe_refuse(f"persist {term}")
        if self.is_ledger_lost:
            raise LedgerLost("entries can't be read back")
        self.persisted.append(term)

    def store_payload(self, *args: Any) -> None:
        self._maybe_refuse("payload")
        self._store.store_payload(*args)

    def read_payload(self, *args: Any) -> np.ndarray:
        self._maybe_refuse("read payload")
        return self._store.read_payload(*args)


class Bench:
    """One region's effects between fakes, with the real codec, parameters and store."""

    def __init__(self, folder: Path, parameters: Parameters, store: RegionStore, *, region: str = "a") -> None:
        self.parameters, self.store = parameters, FlakyStore(store)
        self.folder = folder
        up = [FragmentBlocks(part.piece_sizes, SETTINGS.codec_up) for part in MANIFEST.fragments]
        self.down = parameters.blocks
        self.learner = FakeLearner(up, [encoded(one, theta_of(index, 7)) for index, one in enumerate(up)])
        self.transport = FakeTransport()
        self.tasks = Tasks()
        self.posted: list[Event] = []
        self.notes: list[Note] = []
        pool = InlineExecutor()
        self.table = StripeTable()
        initial = InitialStates(len(MANIFEST.fragments), store)
        learner: Any = self.learner
        flaky: Any = self.store
        shared: dict[str, Any] = {"parameters": parameters, "store": flaky, "pool": pool, "files": pool}
        shared |= {"post": self.posted.append, "note": self.notes.append, "spawn": self.tasks.spawn}
        writes = DiskWrites(self.notes.append)
        files = {**shared, "store": store}
        fetcher = Fetcher(**files, transport=self.transport, initial=initial, writes=writes)
        disk = DiskEffects(
            **shared,
            init=None,
            write_final_file=partial(write_final, folder),
            save_counter_file=partial(save_trained, folder),
            fetcher=fetcher,
            writes=writes,
            initial=initial,
            disk=pool,
        )
        self.stripe_effects = StripeEffects(
            **shared,
            region=region,
            is_trimmed=False,
            learner=learner,
            table=self.table,
            sending=Sending(self.transport, self.tasks.spawn),
            reject=self.transport.reject,
        )
        versions = VersionEffects(
            **shared,
            checkpoint_versions=SETTINGS.checkpoint_versions,
            table=self.table,
            version_area=learner.version_area,
        )
        self.effects = Effects(
            disk,
            self.stripe_effects,
            versions,
            fetcher,
            learner,
            self.transport,
            self.tasks.spawn,
            self.posted.append,
            self.notes.append,
        )

    async def do(self, *effects: Any) -> list[Event]:
        """Carry effects out until nothing runs any more; what came of it."""
        before = len(self.posted)
        for effect in effects:
            self.effects.perform(effect)
        await self.tasks.finish()
        return self.posted[before:]

    async def receive(self, peer: str, header: Any, body: bytes, *, is_whole: bool = True) -> bool:
        """A transfer as the transport hands it in; False if it was not wanted."""
        buffer = self.effects.transfer_opened(peer, header, len(body))
        if buffer is None:
            return False
        buffer[:] = body
        self.effects.transfer_closed(peer, header, buffer, is_whole=is_whole)
        await self.tasks.finish()
        return True

    def stripes(self, fragment: int = 0, reducers: Sequence[str] = ("a", "b")) -> tuple[Stripe, ...]:
        count = self.down[fragment].block_count
        edges = [count * index // len(reducers) for index in range(len(reducers) + 1)]
        return tuple(Stripe(name, edges[i], edges[i + 1]) for i, name in enumerate(reducers))

    def own(self, fragment: int = 0) -> Contribution:
        return contribution_of("a", fragment)

    def send_order(self, ballot: Ballot = BALLOT, **changes: Any) -> SendContribution:
        return replace(SendContribution(ballot, 1, self.own(), self.stripes()), **changes)

    def merged_bytes(self, stripe: Stripe, fragment: int = 0, seed: int = 3) -> bytes:
        blocks = self.down[fragment]
        whole = encoded(blocks, theta_of(fragment, seed))
        first = blocks.span_bytes(0, stripe.block_start)
        return whole[first : first + blocks.span_bytes(stripe.block_start, stripe.block_stop)].tobytes()

    def merged_header(self, index: int, ballot: Ballot = BALLOT, version: int = 1, **changes: Any) -> MergedStripe:
        stripe = self.stripes()[index]
        digest = stripe_digest(self.merged_bytes(stripe))
        header = MergedStripe(ballot, index, 0, version, digest, stripe.block_start, stripe.block_stop)
        return replace(header, **changes)

    async def receive_payload(self, ballot: Ballot = BALLOT) -> bytes:
        """All merged stripes arrive; the payload's digest."""
        digests = []
        for index, stripe in enumerate(self.stripes()):
            body = self.merged_bytes(stripe)
            digests.append(stripe_digest(body))
            assert await self.receive(stripe.reducer, self.merged_header(index, ballot), body)
        return payload_digest(digests)

    def round(self, digest: bytes, version: int = 1, ballot: Ballot = BALLOT) -> RoundBody:
        factors = (0.5,) * len(MANIFEST.fragments[0].pieces)
        return RoundBody(0, version, ballot, (), 1.0, factors, self.stripes(), digest)


def contribution_header(bench: Bench, learner: str = "b", **changes: Any) -> ContributionStripe:
    own = bench.stripes()[0]
    header = ContributionStripe(BALLOT, 0, 1, contribution_of(learner), own.block_start, own.block_stop)
    return replace(header, **changes)


def arrived(bench: Bench, contribution: Contribution) -> ContributionStripeArrived:
    own = bench.stripes()[0]
    return ContributionStripeArrived(BALLOT, 0, contribution, (own.block_start, own.block_stop))


def contribution_body(bench: Bench) -> bytes:
    own = bench.stripes()[0]
    return bench.learner.contribution_bytes(0, own.block_start, own.block_stop).tobytes()
