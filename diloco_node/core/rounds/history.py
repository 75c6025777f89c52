"""What the committed entries record of rounds: versions, who was included up to where, what was discarded.

The leader and every member ask the same questions here before steps are merged, so that none counts twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from diloco_node.core.ledger.account import AccountCore
from diloco_node.core.merge.outliers import RecentRounds
from diloco_node.core.types import Contribution, DiscardedBody, Entry, FinishedBody, GenesisBody, RoundBody

INCLUSIONS_KEPT: Final = 64
"""Inclusions of one learner in one fragment that are remembered. It can contribute again only after it applied the last
one, so two would do; the rest is for learners that restart from an older checkpoint."""


@dataclass(frozen=True, slots=True)
class Inclusion:
    """One snapshot of a learner that became part of a version."""

    version: int
    incarnation: int
    snapshot: int


class RoundHistory:
    """The committed past, as far as rounds need it. Fed with committed entries in order.

    Attributes:
        genesis: None until it is committed.
        versions: per fragment, the last committed version; -1 before genesis.
        version_entries: per fragment, the index of the entry that committed it.
        committed_at_ns: per fragment, when this region learnt of it.
        finished: the end of the run, once committed.
        rounds_committed: over all fragments. rounds_included: per learner.
        recent: per fragment, its last rounds: how long an outer gradient usually is.
        account: whose steps are merged or discarded up to where.
    """

    def __init__(self, fragments: int) -> None:
        self.recent = tuple(RecentRounds() for _ in range(fragments))
        self.genesis: GenesisBody | None = None
        self.versions = [-1] * fragments
        self.version_entries = [0] * fragments
        self.committed_at_ns = [0] * fragments
        self.finished: FinishedBody | None = None
        self.rounds_committed = 0
        self.account = AccountCore()
        self.rounds_included: dict[str, int] = {}
        self._inclusions: dict[tuple[str, int], deque[Inclusion]] = {}
        self._incarnations: dict[str, int] = {}
        self._furthest: dict[tuple[str, int], int] = {}
        self._last_rounds: set[tuple[int, int]] = set()
        self._given_up: dict[tuple[str, int], tuple[int, int, int]] = {}  # (incarnation, step, version)

    def apply(self, entry: Entry, *, now_ns: int) -> None:
        """Take the next committed entry."""
        self.account.apply(entry)
        body = entry.body
        if isinstance(body, GenesisBody):
            self.genesis = body
            self.versions = [0] * len(self.versions)
            self.version_entries = [entry.index] * len(self.versions)
            self.committed_at_ns = [now_ns] * len(self.versions)
        elif isinstance(body, RoundBody):
            self._take_round(body)
            self.version_entries[body.fragment] = entry.index
            self.committed_at_ns[body.fragment] = now_ns
        elif isinstance(body, DiscardedBody):
            self._saw(body.learner, body.incarnation, body.step_to)
            mark = (body.incarnation, body.step_to, self.versions[body.fragment])
            self._given_up[body.learner, body.fragment] = mark
        elif isinstance(body, FinishedBody):
            self.finished = body

    def last_version(self, learner: str, fragment: int) -> int:
        """The last version of the fragment that includes steps of this learner, of any incarnation; -1 if none."""
        last = self.account.last_inclusion(learner, fragment)
        return -1 if last is None else last.version

    def carried_since(self, offered: Contribution) -> int | None:
        """The version since which the steps of a contribution were carried on: the last that includes its learner, or
        the one for which this incarnation gave its steps up, as known when that was booked; None: it began so."""
        last = self.account.last_inclusion(offered.learner, offered.fragment)
        if last is not None and (last.incarnation, last.step_to) == (offered.incarnation, offered.step_from):
            return last.version
        *given_up, version = self._given_up.get((offered.learner, offered.fragment), (-1, -1, -1))
        return version if given_up == [offered.incarnation, offered.step_from] else None

    def covered_step(self, learner: str, incarnation: int, fragment: int) -> int:
        """Up to where an incarnation's steps are merged or discarded; 0 if none are."""
        return self.account.covered(learner, incarnation, fragment)[0]

    def is_last_round(self, fragment: int, version: int) -> bool:
        """Whether the version came of the run's last round of the fragment."""
        return (fragment, version) in self._last_rounds

    def incarnation(self, learner: str) -> int:
        """The newest incarnation of the learner in the ledger; -1 if it is not in it."""
        return self._incarnations.get(learner, -1)

    def steps_before(self, learner: str, incarnation: int) -> int:
        """Steps of the learner's earlier incarnations that the ledger knows of: how far each got in any fragment."""
        return sum(
            step for (name, earlier), step in self._furthest.items() if name == learner and earlier < incarnation
        )

    def included_snapshot(self, learner: str, incarnation: int, fragment: int, *, base: int, version: int) -> int:
        """The incarnation's last snapshot that versions (base, version] include; -1 if they include none."""
        for one in reversed(self._inclusions.get((learner, fragment), ())):
            if base < one.version <= version and one.incarnation == incarnation:
                return one.snapshot
        return -1

    def contribution_fault(self, offered: Contribution, *, version: int, incarnation_min: int) -> str:
        """Why a contribution may not be merged into `version`; empty if it may. No step may count twice.

        Args:
            offered: what the learner offers.
            version: the new version of the round.
            incarnation_min: an older incarnation of the learner is over, and what it trained is booked as discarded.
        """
        if offered.incarnation < max(incarnation_min, self.incarnation(offered.learner)):
            return f"incarnation {offered.incarnation} of {offered.learner} is over"
        if not 0 <= offered.base_version < version:
            return f"base version {offered.base_version} for a round to version {version}"
        return self.account.refusal(offered)

    def discard_fault(self, body: DiscardedBody) -> str:
        """Why an interval can't be booked as discarded; empty if it can."""
        if not 0 <= body.fragment < len(self.versions):
            return f"there is no fragment {body.fragment}"
        covered = self.covered_step(body.learner, body.incarnation, body.fragment)
        if body.step_from != covered or body.step_to <= body.step_from or body.tokens < 0:
            return f"({body.step_from}, {body.step_to}] does not follow step {covered}"
        return ""

    def _take_round(self, body: RoundBody) -> None:
        self.versions[body.fragment] = body.version
        self.rounds_committed += 1
        self.recent[body.fragment].took([member.contribution for member in body.members])
        if body.is_last:
            self._last_rounds.add((body.fragment, body.version))
        for member in body.members:
            one = member.contribution
            kept = self._inclusions.setdefault((one.learner, body.fragment), deque(maxlen=INCLUSIONS_KEPT))
            kept.append(Inclusion(body.version, one.incarnation, one.snapshot))
            self._saw(one.learner, one.incarnation, one.step_to)
            self.rounds_included[one.learner] = self.rounds_included.get(one.learner, 0) + 1

    def _saw(self, learner: str, incarnation: int, step: int) -> None:
        self._furthest[learner, incarnation] = max(self._furthest.get((learner, incarnation), 0), step)
        self._incarnations[learner] = max(self._incarnations.get(learner, -1), incarnation)
