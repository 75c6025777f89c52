"""Small parts for tests of rounds: a model of two fragments, learners' reports, committed entries."""

from collections.abc import Iterable

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.merge.weights import weight
from diloco_node.core.messages import Heartbeat
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.eligibility import Eligibility
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.suspicion import SuspicionBook
from diloco_node.core.types import (
    NO_LIMITS,
    Ballot,
    Contribution,
    Entry,
    EntryBody,
    FragmentPosition,
    GenesisBody,
    LearnerStatus,
    Member,
    MergeRule,
    RateLimits,
    RoundBody,
    RunSettings,
    Stripe,
)

MS = 1_000_000
SECOND = 1_000_000_000
REGIONS = ("a", "b", "c")
SETTINGS = RunSettings(fragments=2, sync_every=7, heartbeat_ns=199 * MS, election_timeout_ns=997 * MS)
MANIFEST: Manifest = build_manifest(
    [TensorSpec("one", (600,)), TensorSpec("two", (601,), MergeRule.AVG), TensorSpec("three", (300,))], 2
)
DIGESTS = tuple(bytes([number]) * 32 for number in range(1, 3))
DISKS = tuple(bytes([number]) * 16 for number in range(1, 4))
GENESIS = GenesisBody("run", MANIFEST.digest, "settings", REGIONS, DIGESTS, DISKS)


def pieces(fragment: int) -> int:
    """Pieces of a fragment of MANIFEST."""
    return len(MANIFEST.fragments[fragment].pieces)


def position(base: int = 0, mark: int = 0, step: int = 0, tokens: int = 0) -> FragmentPosition:
    """Where a learner stands with a fragment."""
    return FragmentPosition(base, mark, step, tokens)


def status(
    step: int = 10, *, incarnation: int = 1, finished: bool = False, **changed: FragmentPosition
) -> LearnerStatus:
    """A report; `f0=` and `f1=` replace the positions."""
    positions = tuple(changed.get(f"f{fragment}", position()) for fragment in range(2))
    return LearnerStatus(incarnation, step, 64 * step, 100 * MS, positions, finished)


def contribution(
    learner: str,
    fragment: int = 0,
    *,
    base: int = 0,
    steps: tuple[int, int] = (0, 10),
    incarnation: int = 1,
    snapshot: int = 1,
    norm: float = 4.0,
) -> Contribution:
    """A learner's offer; every piece has the same squared norm."""
    tokens = 64 * (steps[1] - steps[0])
    norms = (norm,) * pieces(fragment)
    return Contribution(learner, incarnation, fragment, base, snapshot, *steps, tokens, norms)


def committed_round(
    fragment: int, version: int, members: Iterable[Contribution], *, ballot: Ballot | None = None, digest: bytes = b""
) -> RoundBody:
    """A round as the ledger has it."""
    number = ballot or Ballot(1, version)
    digest = digest or bytes([100 + version]) * 32
    member_entries = tuple(Member(member, weight(member.tokens, member.steps)) for member in members)
    ones = (1.0,) * pieces(fragment)
    return RoundBody(
        fragment, version, number, member_entries, 1.0, ones, (Stripe("a", 0, 5),), digest, squared_norms=ones
    )


class Ledger:
    """Seals bodies into entries one after the other."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, body: EntryBody) -> Entry:
        """The next entry."""
        previous = self.entries[-1].hash if self.entries else ZERO_HASH
        self.entries.append(seal(len(self.entries) + 1, 1, previous, body))
        return self.entries[-1]


def history_of(*bodies: EntryBody, now_ns: int = 0) -> RoundHistory:
    """A history that has seen these."""
    history, ledger = RoundHistory(2), Ledger()
    for body in bodies:
        history.apply(ledger.add(body), now_ns=now_ns)
    return history


def eligibility_of(
    liveness: Liveness, history: RoundHistory, regions: tuple[str, ...] = REGIONS, book: SuspicionBook | None = None
) -> Eligibility:
    """The questions of region a about the others; nobody is left out unless the book says so."""
    suspicions = book or SuspicionBook(ballot_ns=SETTINGS.ballot_deadline_min_ns)
    return Eligibility(context_of(history, liveness=liveness, regions=regions), suspicions)


def context_of(
    history: RoundHistory,
    *,
    liveness: Liveness | None = None,
    region: str = "a",
    regions: tuple[str, ...] = REGIONS,
    manifest: Manifest = MANIFEST,
    settings: RunSettings = SETTINGS,
    effects: EffectBuffer | None = None,
) -> RoundContext:
    """The run of these tests as a region sees it."""
    history.roster = Roster.of_voters(regions, history.roster.disks)
    history.settings = settings
    return RoundContext(
        region=region,
        manifest=manifest,
        history=history,
        liveness=liveness or Neighbourhood(region, regions).liveness,
        effects=effects or EffectBuffer(region),
        secret=region.encode(),
    )


class Neighbourhood:
    """Liveness of one region with the heartbeats of the others in a test's hand."""

    def __init__(self, region: str = "a", regions: tuple[str, ...] = REGIONS) -> None:
        self.effects = EffectBuffer(region)
        self.regions = regions
        self.liveness = Liveness(
            region=region, regions=regions, heartbeat_ns=SETTINGS.heartbeat_ns, effects=self.effects
        )
        self._sequences = dict.fromkeys(regions, 0)

    def hear(
        self,
        peer: str,
        learner: LearnerStatus | None = None,
        *,
        now_ns: int,
        hears: Iterable[str] | None = None,
        applied_index: int = 1_000,
        budget: RateLimits = NO_LIMITS,
        leaving: bool = False,
        echo: int = 0,
    ) -> None:
        """A heartbeat of a peer arrives."""
        self._sequences[peer] += 1
        peers = tuple(sorted(hears if hears is not None else set(self.regions) - {peer}))
        beat = Heartbeat(self._sequences[peer], echo, 0, peers, learner, applied_index, (), budget, leaving)
        self.liveness.heartbeat_arrived(peer, beat, now_ns=now_ns)

    def all_hear(self, learner: LearnerStatus, *, now_ns: int) -> None:
        """Everybody is there and has a learner like this one."""
        for name in self.regions:
            if name != self.regions[0]:
                self.hear(name, learner, now_ns=now_ns)
        self.liveness.own_learner(learner, now_ns=now_ns)
