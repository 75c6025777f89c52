"""The end of a run: one last round per fragment with everybody who can be reached, then the entry that says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from diloco_node.core.types import RunSettings

READY_STEPS: Final = 4
"""Steps that late members get to be ready for the last round of a fragment."""

GIVE_UP_BALLOTS: Final = 8
"""A fragment's last round may take as long as this many shortest ballots; then the run ends without it."""


@dataclass(slots=True)
class Ending:
    """The run is being closed by this leader.

    Attributes:
        reason: what ended it, in words.
        pending: fragments whose last round is not committed (or given up).
        ready_by_ns: until then a last round waits for every live learner, afterwards it takes those that can.
        give_up_ns: per fragment, when its last round is given up; set when it is the fragment's turn.
    """

    reason: str
    pending: set[int]
    ready_by_ns: int
    give_up_ns: dict[int, int] = field(default_factory=dict)

    def allow(self, fragment: int, *, now_ns: int, ballot_ns: int) -> int:
        """When the fragment's last round is given up, from its first turn on."""
        return self.give_up_ns.setdefault(fragment, now_ns + GIVE_UP_BALLOTS * ballot_ns)


def end_reason(settings: RunSettings, *, steps: Iterable[int], tokens: int, asked: str) -> str:
    """Why the run ends now; empty while it goes on.

    Args:
        steps: of each learner, all its lives together.
        tokens: merged, mean over the fragments.
        asked: an operator's reason, empty if nobody asked.
    """
    fastest = max(steps, default=0)
    if asked:
        return asked
    if 0 < settings.steps_max <= fastest:
        return f"the fastest learner made {fastest} of {settings.steps_max} steps"
    if 0 < settings.tokens_max <= tokens:
        return f"{tokens} of {settings.tokens_max} tokens are merged"
    return ""


def begin_ending(settings: RunSettings, reason: str, *, fragments: int, step_time_ns: int, now_ns: int) -> Ending:
    """Start to close the run."""
    ready_by_ns = now_ns + max(settings.ballot_deadline_min_ns, READY_STEPS * step_time_ns)
    return Ending(reason, set(range(fragments)), ready_by_ns)
