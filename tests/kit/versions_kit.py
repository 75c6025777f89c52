"""A region's versions with their ledger, as tests drive them."""

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect
from diloco_node.core.recovery.fetches import Fetches
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import Entry, EntryBody, Recovered, RoundBody
from tests.kit.rounds_kit import (
    DIGESTS,
    GENESIS,
    MANIFEST,
    REGIONS,
    Ledger,
)

EMPTY = Recovered(0, "", (), (-1, -1), frozenset())


class Disk:
    """A replica with its ledger; `commit` commits."""

    def __init__(self, recovered: Recovered = EMPTY) -> None:
        self.effects = EffectBuffer("a")
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.versions = Versions(
            region="a",
            fragments=2,
            manifest_digest=MANIFEST.digest,
            recovery=recovered,
            history=self.history,
            effects=self.effects,
        )
        self.fetches = Fetches(region="a", regions=REGIONS, effects=self.effects)

    def commit(self, body: EntryBody) -> Entry:
        entry = self.ledger.add(body)
        self.history.apply(entry, now_ns=0)
        self.versions.on_commit(entry)
        return entry

    def pump(self) -> list[Effect]:
        self.versions.pump()
        return self.effects.take()

    def begin(self) -> None:
        self.versions.initial_state_stored(DIGESTS)
        self.commit(GENESIS)
        self.pump()
        for fragment in range(2):
            self.versions.version_applied(fragment, 0)

    def store(self, body: RoundBody) -> None:
        self.versions.payload_stored(body.fragment, body.version, body.payload_digest)

    def requests(self, *missing: EntryBody) -> list[tuple[int, int, bool]]:
        """(fragment, version, is_state) of what is asked for."""
        self.versions.plan_fetches(missing, self.fetches)
        return [
            (fetch.fragment, fetch.version, fetch.body is None) for _, fetch in sorted(self.fetches.pending.items())
        ]
