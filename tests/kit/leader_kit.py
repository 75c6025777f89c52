"""A leader of rounds with the other regions by hand: what it says to whom, and what they answer."""

from collections.abc import Iterable
from dataclasses import replace

from diloco_node.core.events import Note, Send
from diloco_node.core.merge.freivalds import draw_windows
from diloco_node.core.messages import (
    AuditDrawn,
    BallotOpened,
    Contributed,
    MergeDecided,
    Message,
    Receipt,
    ReductionReported,
    StripesReceived,
)
from diloco_node.core.projections import NO_PROJECTION, Projection
from diloco_node.core.rounds.audit_draw import drawer_of, nonce_of
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.rounds.open_round import OpenRound, payload_digest
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.types import (
    Ballot,
    Contribution,
    EntryBody,
    LearnerStatus,
    RunSettings,
)
from tests.kit.rounds_kit import (
    GENESIS,
    REGIONS,
    SECOND,
    SETTINGS,
    Ledger,
    Neighbourhood,
    context_of,
    contribution,
    pieces,
    status,
)

DUE = status(4)
"""Fragment 0 of two is due after 4 of 7 steps, fragment 1 is not."""


class Office:
    """Region a leads; b and c answer as the test says."""

    def __init__(self, settings: RunSettings = SETTINGS, regions: tuple[str, ...] = REGIONS) -> None:
        self.world = Neighbourhood("a", regions)
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.now_ns = SECOND
        liveness, effects = self.world.liveness, self.world.effects
        context = context_of(self.history, liveness=liveness, regions=regions, settings=settings, effects=effects)
        # What the merged stripes of a ballot decode to here; a test may say so.
        self.merged: dict[int, tuple[bytes, tuple[float, ...]]] = {}
        self.own_projection, self.audits = NO_PROJECTION, self
        # Whether the drawer of a merged ballot answers at once.
        self.is_drawn = True
        self.leader = RoundLeader(context, RunProgress(context), self)
        self.notes: list[Note] = []
        self.commit(replace(GENESIS, regions=regions))
        self.leader.begin(3, {}, now_ns=self.now_ns)

    def merged_stripes(self, _fragment: int, _number: Ballot) -> dict[int, tuple[bytes, tuple[float, ...]]]:
        return self.merged

    def projection(self, _fragment: int, _number: Ballot) -> Projection:
        return self.own_projection

    def commit(self, body: EntryBody) -> None:
        entry = self.ledger.add(body)
        self.history.apply(entry, now_ns=self.now_ns)
        self.leader.on_commit(entry, now_ns=self.now_ns)

    def report(self, learner: LearnerStatus, names: Iterable[str] = REGIONS) -> None:
        """These regions' learners say this, now."""
        for name in names:
            if name == "a":
                self.world.liveness.own_learner(learner, now_ns=self.now_ns)
            else:
                self.world.hear(name, learner, now_ns=self.now_ns)
            self.leader.on_status(name, now_ns=self.now_ns)

    def go(self, ns: int = 0) -> list[tuple[str, Message]]:
        """Let time pass and the leader act; what it says, to itself too."""
        self.now_ns += ns
        for round_ in self.leader.rounds.values():
            if round_.is_merged and self.is_drawn:
                self.answer(*self.draw(round_))
        self.leader.advance(now_ns=self.now_ns)
        sent: list[tuple[str, Message]] = []
        for effect in self.world.effects.take():
            if isinstance(effect, Send):
                sent.append((effect.peer, effect.message))
            elif isinstance(effect, Note):
                self.notes.append(effect)
        while self.world.effects.local:
            sent.append(("a", self.world.effects.local.popleft()))
        return sorted(sent, key=lambda item: (item[0], type(item[1]).__name__))

    @staticmethod
    def draw(round_: OpenRound) -> tuple[str, AuditDrawn]:
        """The drawer's nonce, by which nothing is audited."""
        own = nonce_of(b"a", round_.ballot)
        nonces = (bytes([value]) * 32 for value in range(256))
        nonce = next(value for value in nonces if not draw_windows((own, value), round_.stripes, (1 << 20,)))
        return drawer_of(round_.announcement, "a"), AuditDrawn(round_.ballot, round_.digest, (nonce,))

    def answer(self, peer: str, message: Message) -> None:
        self.leader.on_answer(peer, message, now_ns=self.now_ns)  # type: ignore[arg-type]

    def open(self) -> BallotOpened:
        self.report(DUE)
        return ballots(self.go())[0]

    def contribute(self, announcement: BallotOpened, names: Iterable[str] = REGIONS) -> None:
        for name in names:
            self.answer(name, Contributed(announcement.ballot, offered(name)))

    def hold(self, announcement: BallotOpened, names: Iterable[str] = REGIONS) -> None:
        for stripe in announcement.stripes:
            receipts = tuple(Receipt(name, 1, 1) for name in names)
            self.answer(stripe.reducer, StripesReceived(announcement.ballot, receipts))

    def merge(self, announcement: BallotOpened, names: Iterable[str] = REGIONS, norm: float = 4.0 / 3) -> bytes:
        """All reducers report; returns the payload's digest."""
        width = pieces(0)
        for index, stripe in enumerate(announcement.stripes):
            rows = tuple((norm,) * width for _ in names)
            self.answer(
                stripe.reducer, ReductionReported(announcement.ballot, index, (1.0,) * width, rows, bytes([index]) * 32)
            )
        return payload_digest([bytes([index]) * 32 for index in range(len(announcement.stripes))])

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]


def offered(name: str) -> Contribution:
    return contribution(name, steps=(0, 4))


def ballots(sent: list[tuple[str, Message]]) -> list[BallotOpened]:
    return [message for _, message in sent if isinstance(message, BallotOpened)]


def decisions(sent: list[tuple[str, Message]]) -> list[MergeDecided]:
    return [message for _, message in sent if isinstance(message, MergeDecided)]
