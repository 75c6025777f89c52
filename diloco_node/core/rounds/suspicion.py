"""Whom the leader leaves out of its ballots, as member or as reducer, for how long, and why.

A region whose control lives while its bulk fails, or that says what the others deny, must not hold up every round. Who
fails its part once is tried by the next ballot, with a short deadline. Who fails twice in a row is left out for a
while, who disagrees with the majority of the others at once. When the while is over, a short ballot tries the region
again. Each further failure doubles the pause.

The book belongs to one leader. The next one learns again, with what the ballots of this one said as a first strike.
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
"""The pause doubles up to 16 times: with ballots of 2 s to about a minute, in which a healed region is back."""

CLEAN_BALLOTS: Final = 64
"""So many ballots without a fault take one doubling back: who fails each 64th costs the others little."""

YIELDED: Final = "it led before, and gave its place away"

LEFT_OUT_SHOWN_MAX: Final = 16
REASON_SHOWN_MAX: Final = 160
"""What a ballot says of those that are left out stays short."""


class BallotPart(StrEnum):
    """What a region does in a ballot."""

    MEMBER = "member"
    REDUCER = "reducer"


@dataclass(frozen=True, slots=True)
class Blame:
    """A region that failed its part in a ballot.

    Attributes:
        reason: what was seen, and by whom.
        is_proved: the majority of the others says otherwise; else it only was late.
    """

    region: str
    part: BallotPart
    reason: str
    is_proved: bool = False


@dataclass(slots=True)
class _Suspect:
    """One region in one part.

    Attributes:
        failures: in a row. failed_at_ns: the last one.
        level: how often it was left out, less what was forgiven.
        until_ns: it is left out, and may be tried from then on; None: it takes part.
        clean: ballots without a fault since the last one.
    """

    reason: str
    failures: int = 0
    failed_at_ns: int = -1
    level: int = 0
    until_ns: int | None = None
    clean: int = 0


class SuspicionBook:
    """See the module.

    Args:
        ballot_ns: the shortest time that a ballot is given.
    """

    def __init__(self, *, ballot_ns: int) -> None:
        self._pause_ns = PAUSE_BALLOTS * ballot_ns
        self._suspects: dict[tuple[str, BallotPart], _Suspect] = {}

    def blame(self, blame: Blame, *, opened_at_ns: int, now_ns: int) -> int | None:
        """A region failed its part in a ballot that was opened then.

        Returns:
            How long it is left out from now on; None if it is not, or was already.
        """
        one = self._suspects.setdefault((blame.region, blame.part), _Suspect(blame.reason))
        is_same_cause = opened_at_ns < one.failed_at_ns
        is_out = one.until_ns is not None and now_ns < one.until_ns
        if is_out or (is_same_cause and not blame.is_proved):
            return None  # Ballots that were open at the same time fail together, and say it once.
        one.failures, one.failed_at_ns, one.clean, one.reason = one.failures + 1, now_ns, 0, blame.reason
        if one.failures < FAILURES_MAX and one.level == 0 and not blame.is_proved:
            return None
        pause_ns = self._pause_ns << min(one.level, DOUBLINGS_MAX)
        one.level = min(one.level, DOUBLINGS_MAX) + 1
        one.until_ns = now_ns + pause_ns
        return pause_ns

    def did(self, region: str, part: BallotPart) -> bool:
        """A ballot committed in which the region did its part; returns whether it was left out before."""
        one = self._suspects.get((region, part))
        if one is None:
            return False
        was_out = one.until_ns is not None
        one.failures, one.until_ns, one.clean = 0, None, one.clean + 1
        if one.clean >= CLEAN_BALLOTS:
            one.clean, one.level = 0, one.level - 1
        if one.level <= 0:
            del self._suspects[region, part]
        return was_out

    def begin(self, left_out: Iterable[LeftOut], regions: Iterable[str], *, yielded: str = "", now_ns: int = 0) -> None:
        """This region leads now: whom the leader before left out has failed once here. Its next failure counts.

        Args:
            yielded: the leader before, if it gave its place away: it stops, or held up the others. It is left out for
                the first pause.
        """
        self._suspects.clear()
        known = {(name, part) for name in regions for part in BallotPart}
        for one in left_out:
            if (one.region, one.part) in known:
                reason = f"{one.reason[:REASON_SHOWN_MAX]}, said the leader before"
                self._suspects[one.region, BallotPart(one.part)] = _Suspect(reason, failures=1)
        for part in BallotPart if yielded else ():
            until_ns = now_ns + self._pause_ns
            self._suspects[yielded, part] = _Suspect(YIELDED, failures=FAILURES_MAX, level=1, until_ns=until_ns)

    def held_back(self, part: BallotPart, *, probed: str = "", now_ns: int) -> dict[str, str]:
        """Who is left out, and why.

        Args:
            probed: is tried, if its pause is over.
        """
        return {
            name: one.reason
            for (name, own), one in sorted(self._suspects.items())
            if own is part and one.until_ns is not None and (name != probed or now_ns < one.until_ns)
        }

    def next_probe(self, *, now_ns: int, without: Collection[str] = ()) -> str:
        """The region whose pause is over for the longest time, of others than these; empty if there is none."""
        over = [
            (one.until_ns, name)
            for (name, _), one in self._suspects.items()
            if one.until_ns is not None and one.until_ns <= now_ns and name not in without
        ]
        return min(over)[1] if over else ""

    def doublings(self, region: str) -> int:
        """How often the region failed a probe, for the time that the next one gets."""
        return max(
            (one.level - 1 for (name, _), one in self._suspects.items() if name == region and one.level), default=0
        )

    def is_doubted(self, region: str, part: BallotPart) -> bool:
        """Whether it failed this part in its last ballot, and is not left out for it: the next ballot shows more."""
        one = self._suspects.get((region, part))
        return one is not None and one.failures > 0 and one.until_ns is None

    def left_out(self) -> tuple[LeftOut, ...]:
        """For the ballots and the status, by region."""
        found = [
            LeftOut(name, part.value, one.reason[:REASON_SHOWN_MAX])
            for (name, part), one in sorted(self._suspects.items())
            if one.until_ns is not None
        ]
        return tuple(found[:LEFT_OUT_SHOWN_MAX])
