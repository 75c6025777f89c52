"""A region's part in a round, for its tests: region b of three."""

from collections.abc import Iterable
from dataclasses import replace

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import (
    ContributionStripeArrived,
    Effect,
    MergedStripeArrived,
    ReductionDone,
    Send,
    TakeSnapshot,
)
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.messages import (
    BallotOpened,
    MergeDecided,
    MergedReceived,
)
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.open_round import payload_digest
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.types import Ballot, Contribution, EntryBody, Recovered, RoundBody, RunSettings, Stripe
from tests.kit.rounds_kit import (
    GENESIS,
    MANIFEST,
    REGIONS,
    SETTINGS,
    Ledger,
    context_of,
    contribution,
    pieces,
    status,
)

MODEL = build_manifest([TensorSpec("one", (1200,)), TensorSpec("two", (700,)), TensorSpec("three", (500,))], 2)
"""Fragments of one and two pieces, as those of MANIFEST, and of five blocks each."""

STRIPES = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 5))
FIRST, SECOND_BALLOT = Ballot(3, 1), Ballot(3, 2)
OPENED = BallotOpened(FIRST, 0, 1, REGIONS, STRIPES)
AGAIN = replace(OPENED, ballot=SECOND_BALLOT)
OWN = contribution("b", steps=(0, 10), snapshot=4)
TAKE = TakeSnapshot(0, 1, 0)


LACKS_ALL = Send("a", MergedReceived(FIRST, (b"",) * len(STRIPES)))
"""The answer that a region adds when it is asked again: no merged stripe is here."""


class Place:
    """Region b, with genesis committed and a learner at step 10; region a leads."""

    def __init__(self, settings: RunSettings = SETTINGS) -> None:
        self.effects = EffectBuffer("b")
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.versions = Versions(
            region="b",
            fragments=2,
            manifest_digest=MANIFEST.digest,
            recovery=Recovered(0, "", (), (-1, -1), frozenset()),
            history=self.history,
            effects=self.effects,
        )
        context = context_of(self.history, region="b", manifest=MODEL, settings=settings, effects=self.effects)
        self.participant = RoundParticipant(context, self.versions)
        self.commit(GENESIS)
        for fragment in range(2):
            self.versions.version_applied(fragment, 0)
        self.participant.learner_changed(status(10))

    def commit(self, body: EntryBody) -> None:
        entry = self.ledger.add(body)
        self.history.apply(entry, now_ns=0)
        self.versions.on_commit(entry)
        if isinstance(body, RoundBody):
            self.participant.on_commit(body)

    def apply(self, body: RoundBody) -> list[Effect]:
        self.commit(body)
        self.versions.version_applied(body.fragment, body.version)
        self.participant.on_apply(body.fragment, body.version)
        return self.go()

    def go(self) -> list[Effect]:
        self.participant.pump()
        return self.effects.take()

    def tick(self) -> list[Effect]:
        self.participant.tick()
        return self.effects.take()

    def open(self, announcement: BallotOpened = OPENED) -> list[Effect]:
        self.participant.ballot_opened("a", announcement)
        return self.go()

    def take(self, taken: Contribution = OWN) -> list[Effect]:
        self.participant.snapshot_taken(taken)
        return self.go()

    def stripes(
        self, names: Iterable[str], ballot: Ballot = FIRST, *, index: int = 1, cut: tuple[Stripe, ...] = STRIPES
    ) -> list[Effect]:
        stripe = cut[min(index, len(cut) - 1)]
        blocks = (stripe.block_start, stripe.block_stop)
        for name in names:
            self.participant.stripe_arrived(ContributionStripeArrived(ballot, index, contribution(name), blocks))
        return self.go()

    def decide(self, names: str = "abc", ballot: Ballot = FIRST) -> list[Effect]:
        chosen = tuple(contribution(name) for name in names)
        rows = tuple((float(place),) * pieces(0) for place in range(len(names)))
        self.participant.merge_decided(MergeDecided(ballot, 0, 1, chosen, rows))
        return self.go()

    def reduced(self, ballot: Ballot = FIRST) -> list[Effect]:
        self.participant.stripe_reduced(ReductionDone(ballot, 1, (1.0,), ((1.0,), (2.0,), (3.0,)), b"m" * 32))
        return self.go()

    def merged(self, indexes: Iterable[int], ballot: Ballot = FIRST, version: int = 1) -> list[Effect]:
        for index in indexes:
            cut = STRIPES[index] if index < len(STRIPES) else STRIPES[0]
            digest = bytes([index]) * 32
            self.participant.merged_arrived(MergedStripeArrived(ballot, index, 0, version, digest, cut, (1.0,)))
        return self.go()


PAYLOAD = payload_digest([bytes([index]) * 32 for index in range(3)])


def told(effects: list[Effect]) -> list[object]:
    """Messages to the leader."""
    assert all(effect.peer == "a" for effect in effects if isinstance(effect, Send))
    return [effect.message for effect in effects if isinstance(effect, Send)]
