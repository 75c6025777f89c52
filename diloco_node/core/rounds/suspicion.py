"""Regions that the leader leaves out of its ballots as member or as reducer: for how long, and why.

A region that fails its part once is tried by the next ballot, with a short deadline. It is suspended for a while if it
fails twice in a row, and at once if it disagrees with the majority of the others. After the pause a short ballot tries
it again. Each further failure doubles the pause.

Each leader keeps a book of its own. A new one begins with what the leader before announced: those regions have failed
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from diloco_node.core.messages import LeftOut

FAILURES_MAX: Final = 2
"""Failures in a row: one may be a stall of a second, or the loss of a connection."""

PAUSE_BALLOTS: Final = 2
"""The first pause is so many shortest ballots: at least as long as those two failures have cost the others."""

DOUBLINGS_MAX: Final = 4
"""The pause doubles four times at most. With ballots of 2 s that comes to about a minute."""

CLEAN_BALLOTS: Final = 64
"""Ballots without a fault that take one doubling back: a failure in every 64th costs the others little."""

HANDED_OVER: Final = "it led before, and gave its place away"

LEFT_OUT_SHOWN_MAX: Final = 16
REASON_SHOWN_MAX: Final = 160
"""Longest reason that a ballot tells of a suspended region."""


class BallotRole(StrEnum):
    """The role of a region in a ballot."""

    MEMBER = "member"
    REDUCER = "reducer"


@dataclass(frozen=True, slots=True)
class Blame:
    """A region that failed its part in a ballot. reason: the observation, and whose it is.

    is_proved: the majority of the others says otherwise; else it only was late.
    """

    region: str
    role: BallotRole
    reason: str
    is_proved: bool = False


@dataclass(slots=True)
class _Suspect:
    """The record of one region in one role. until_ns: it may be tried from then on; None: it takes part.

    failures: in a row. failed_at_ns: the last one. level: how often it was suspended, less what was forgiven.
    clean: ballots without a fault since the last one.
    """

    reason: str
    failures: int = 0
    failed_at_ns: int = -1
    level: int = 0
    until_ns: int | None = None
    clean: int = 0


class SuspicionBook:
    """Regions that failed, and their pauses. ballot_ns: the shortest time that a ballot is given."""

    def __init__(self, *, ballot_ns: int) -> None:
        self.ballot_ns = ballot_ns
        self._suspects: dict[tuple[str, BallotRole], _Suspect] = {}

    def blame(self, blame: Blame, *, opened_at_ns: int, now_ns: int) -> int | None:
        """Record that a region failed its part in a ballot that was opened then.

        Returns: how long it is suspended from now on; None if it is not, or was already.
        """
        suspect = self._suspects.setdefault((blame.region, blame.role), _Suspect(blame.reason))
        is_same_cause = opened_at_ns < suspect.failed_at_ns
        is_out = suspect.until_ns is not None and now_ns < suspect.until_ns
        if is_out or (is_same_cause and not blame.is_proved):
            return None  # Ballots that were open at the same time fail together, and say it once.
        suspect.failures, suspect.clean = suspect.failures + 1, 0
        suspect.failed_at_ns, suspect.reason = now_ns, blame.reason
        if suspect.failures < FAILURES_MAX and suspect.level == 0 and not blame.is_proved:
            return None
        pause_ns = PAUSE_BALLOTS * self.ballot_ns << min(suspect.level, DOUBLINGS_MAX)
        suspect.level = min(suspect.level, DOUBLINGS_MAX) + 1
        suspect.until_ns = now_ns + pause_ns
        return pause_ns

    def on_success(self, region: str, role: BallotRole) -> bool:
        """Record a committed ballot in which the region did its part; return whether it was suspended before."""
        suspect = self._suspects.get((region, role))
        if suspect is None:
            return False
        was_out = suspect.until_ns is not None
        suspect.failures, suspect.until_ns, suspect.clean = 0, None, suspect.clean + 1
        if suspect.clean >= CLEAN_BALLOTS:
            suspect.clean, suspect.level = 0, suspect.level - 1
        if suspect.level <= 0:
            del self._suspects[region, role]
        return was_out

    def begin(
        self, left_out: Iterable[LeftOut], regions: Iterable[str], *, predecessor: str = "", now_ns: int = 0
    ) -> None:
        """Begin as a new leader. Regions that the leader before left out have failed once: their next failure counts.

        predecessor: the leader before, if it gave its place away: it is suspended for the first pause.
        """
        self._suspects.clear()
        known_roles = {(name, role) for name in regions for role in BallotRole}
        for line in left_out:
            if (line.region, line.part) in known_roles:
                reason = f"{line.reason[:REASON_SHOWN_MAX]}, said the leader before"
                self._suspects[line.region, BallotRole(line.part)] = _Suspect(reason, failures=1)
        for role in BallotRole if predecessor else ():
            until_ns = now_ns + PAUSE_BALLOTS * self.ballot_ns
            self._suspects[predecessor, role] = _Suspect(HANDED_OVER, failures=FAILURES_MAX, level=1, until_ns=until_ns)

    def suspensions(self, role: BallotRole, *, probe: str = "", now_ns: int) -> dict[str, str]:
        """Return the suspended regions of a role, each with the reason, but a probe whose pause is over."""
        return {
            name: suspect.reason
            for (name, suspect_role), suspect in sorted(self._suspects.items())
            if suspect_role is role and suspect.until_ns is not None and (name != probe or now_ns < suspect.until_ns)
        }

    def next_probe(self, *, now_ns: int, without: Collection[str] = ()) -> str:
        """Return the region whose pause is over for the longest time, without some; empty if there is none."""
        over = [
            (suspect.until_ns, name)
            for (name, _), suspect in self._suspects.items()
            if suspect.until_ns is not None and suspect.until_ns <= now_ns and name not in without
        ]
        return min(over)[1] if over else ""

    def doublings(self, region: str) -> int:
        """Return how often the region failed a probe: its next one gets more time."""
        return max(
            (suspect.level - 1 for (name, _), suspect in self._suspects.items() if name == region and suspect.level),
            default=0,
        )

    def is_doubted(self, region: str, role: BallotRole) -> bool:
        """Whether the region failed this role in its last ballot, and is not suspended: the next ballot shows more."""
        suspect = self._suspects.get((region, role))
        return suspect is not None and suspect.failures > 0 and suspect.until_ns is None

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return the suspensions for ballots and status, by region."""
        lines = [
            LeftOut(name, role.value, suspect.reason[:REASON_SHOWN_MAX])
            for (name, role), suspect in sorted(self._suspects.items())
            if suspect.until_ns is not None
        ]
        return tuple(lines[:LEFT_OUT_SHOWN_MAX])
