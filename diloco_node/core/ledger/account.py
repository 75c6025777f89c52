"""The token account: what was trained is merged, carried or discarded, each step once.

Per learner, incarnation and fragment the intervals (a, b] of inclusions (members of committed rounds) and of
`DiscardedBody` must follow each other from step 0, without a gap and without an overlap. What lies beyond the last one
is carried: it is in the parameters of a living learner and will be in a later merge.

`account_check` recomputes the same from the raw entries, and trusts nothing that is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.ledger.summary import Closed, Covered, Included, RunSummary
from diloco_node.core.types import Contribution, DiscardedBody, Entry, RoundBody

INCARNATIONS_KEPT: Final = 8
"""Incarnations of one learner that are in the ledger and have an account of their own; what older ones trained is
closed and added up. They are booked in order, so the eighth before the newest was complete long ago."""


@dataclass(frozen=True, slots=True)
class LastInclusion:
    """The newest committed round that included a learner's contribution to a fragment.

    Attributes:
        incarnation: of the learner. version: what the round made. snapshot: the learner's number for it.
        step_to: the snapshot's step. tokens_to: tokens of the incarnation up to that step.
    """

    incarnation: int
    version: int
    snapshot: int
    step_to: int
    tokens_to: int


class AccountCore:
    """The account as the daemon needs it: `apply` each committed entry once, in order, then ask."""

    def __init__(self) -> None:
        self._applied_index = 0
        # (learner, fragment) -> the newest inclusion, of whatever incarnation.
        self._inclusions: dict[tuple[str, int], LastInclusion] = {}
        # (learner, incarnation, fragment) -> steps and tokens that are merged or discarded.
        self._covered: dict[tuple[str, int, int], tuple[int, int]] = {}
        # fragment -> tokens of all inclusions, of all discards.
        self._merged: dict[int, int] = {}
        self._discarded: dict[int, int] = {}
        # (learner, incarnation) -> how far it got in any fragment.
        self._furthest: dict[tuple[str, int], int] = {}
        self._closed: dict[str, Closed] = {}

    @property
    def applied_index(self) -> int:
        """The last entry that was applied."""
        return self._applied_index

    def apply(self, entry: Entry) -> None:
        """Take note of the next committed entry."""
        assert entry.index == self._applied_index + 1, (entry.index, self._applied_index)
        self._applied_index = entry.index
        body = entry.body
        if isinstance(body, DiscardedBody):
            self._cover(body.learner, body.incarnation, body.fragment, body.step_to, body.tokens)
            self._discarded[body.fragment] = self._discarded.get(body.fragment, 0) + body.tokens
        elif isinstance(body, RoundBody):
            for member in body.members:
                self._include(member.contribution, body.version)

    def last_inclusion(self, learner: str, fragment: int) -> LastInclusion | None:
        """The newest inclusion of this learner in a round of this fragment; None if there was none."""
        return self._inclusions.get((learner, fragment))

    def covered(self, learner: str, incarnation: int, fragment: int) -> tuple[int, int]:
        """(steps, tokens) of an incarnation that are merged or discarded in this fragment: where its next begins."""
        return self._covered.get((learner, incarnation, fragment), (0, 0))

    def covered_tokens(self, learner: str, fragments: int) -> int:
        """Tokens of all incarnations of a learner that are merged or discarded: the mean over the fragments."""
        known = sum(tokens for (name, _, _), (_, tokens) in self._covered.items() if name == learner)
        closed = sum(self._closed[learner].tokens) if learner in self._closed else 0
        return (known + closed) // fragments

    def is_closed(self, learner: str, incarnation: int) -> bool:
        """Whether the incarnation is so old that nothing of it is booked any more."""
        return learner in self._closed and incarnation <= self._closed[learner].incarnation

    def newest_incarnation(self, learner: str) -> int:
        """The newest incarnation of the learner in the ledger; -1 if it is not in it."""
        return max((number for name, number in self._furthest if name == learner), default=-1)

    def steps_before(self, learner: str, incarnation: int) -> int:
        """Steps of the learner's earlier incarnations that the ledger knows of: how far each got in any fragment."""
        known = sum(step for (name, one), step in self._furthest.items() if name == learner and one < incarnation)
        return known + (self._closed[learner].steps if learner in self._closed else 0)

    def close_old(self, fragments: int) -> None:
        """Add up the incarnations that are old enough. Every region must do it after the same entries."""
        numbers: dict[str, list[int]] = {}
        for learner, incarnation in sorted(self._furthest):
            numbers.setdefault(learner, []).append(incarnation)
        for learner, known in numbers.items():
            for incarnation in known[:-INCARNATIONS_KEPT]:
                self._close(learner, incarnation, fragments)

    def covered_lines(self, fragments: int) -> tuple[Covered, ...]:
        """The account of each incarnation that is not closed, by learner and incarnation."""
        lines = []
        for learner, incarnation in sorted(self._furthest):
            pairs = [self.covered(learner, incarnation, fragment) for fragment in range(fragments)]
            if len(set(pairs)) == 1:
                del pairs[1:]
            lines.append(Covered(learner, incarnation, *(tuple(column) for column in zip(*pairs, strict=True))))
        return tuple(lines)

    def closed_lines(self) -> tuple[Closed, ...]:
        """What is closed, by learner."""
        return tuple(self._closed[learner] for learner in sorted(self._closed))

    def included_lines(self) -> tuple[Included, ...]:
        """The newest inclusions, by learner and fragment."""
        return tuple(
            Included(*name, one.incarnation, one.version, one.snapshot, one.step_to, one.tokens_to)
            for name, one in sorted(self._inclusions.items())
        )

    def totals(self, fragments: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens merged and discarded so far, per fragment."""
        every = range(fragments)
        return tuple(self._merged.get(one, 0) for one in every), tuple(self._discarded.get(one, 0) for one in every)

    def restore(self, summary: RunSummary, applied_index: int) -> None:
        """Go on from a summary as if every entry up to `applied_index` had been applied."""
        self._applied_index = applied_index
        fragments = range(len(summary.versions))
        self._inclusions = {
            (one.learner, one.fragment): LastInclusion(
                one.incarnation, one.version, one.snapshot, one.step_to, one.tokens_to
            )
            for one in summary.included
        }
        self._covered = {
            (one.learner, one.incarnation, fragment): (_at(one.steps, fragment), _at(one.tokens, fragment))
            for one in summary.covered
            for fragment in fragments
        }
        self._furthest = {(one.learner, one.incarnation): max(one.steps) for one in summary.covered}
        self._merged, self._discarded = dict(enumerate(summary.merged)), dict(enumerate(summary.discarded))
        self._closed = {one.learner: one for one in summary.closed}

    def merged_tokens(self, fragments: int) -> int:
        """Tokens of all inclusions, the mean over the fragments, rounded down."""
        return sum(self._merged.values()) // fragments

    def refusal(self, contribution: Contribution) -> str:
        """Why including this contribution would count steps twice or lose some; empty if it may be included."""
        learner, fragment = contribution.learner, contribution.fragment
        step_from, _ = self.covered(learner, contribution.incarnation, fragment)
        if contribution.step_from != step_from:
            return f"its steps begin after {contribution.step_from}, the ledger's account is at {step_from}"
        if contribution.step_to <= contribution.step_from:
            return f"it covers no step: ({contribution.step_from}, {contribution.step_to}]"
        last = self._inclusions.get((learner, fragment))
        if last is None:
            return ""
        if contribution.incarnation < last.incarnation:
            return f"it is of incarnation {contribution.incarnation}, {last.incarnation} was included already"
        if contribution.base_version < last.version and contribution.incarnation == last.incarnation:
            return f"its base version {contribution.base_version} is older than its last inclusion, {last.version}"
        return ""

    def discards_due(
        self, learner: str, incarnation: int, *, steps: int, tokens: int, fragments: int, reason: str
    ) -> tuple[DiscardedBody, ...]:
        """What must be booked as discarded when an incarnation is dead.

        Args:
            steps, tokens: what it had trained, as it counted.
            fragments: P.
            reason: for the ledger.

        Returns:
            One body per fragment with steps that are in no merge, by fragment.
        """
        due = []
        for fragment in range(0 if self.is_closed(learner, incarnation) else fragments):
            step_from, tokens_from = self.covered(learner, incarnation, fragment)
            if steps > step_from:
                left = max(0, tokens - tokens_from)
                due.append(DiscardedBody(learner, incarnation, fragment, step_from, steps, left, reason))
        return tuple(due)

    def _include(self, contribution: Contribution, version: int) -> None:
        learner, incarnation, fragment = contribution.learner, contribution.incarnation, contribution.fragment
        self._cover(learner, incarnation, fragment, contribution.step_to, contribution.tokens)
        self._merged[fragment] = self._merged.get(fragment, 0) + contribution.tokens
        step_to, tokens_to = self._covered[learner, incarnation, fragment]
        self._inclusions[learner, fragment] = LastInclusion(
            incarnation, version, contribution.snapshot, step_to, tokens_to
        )

    def _cover(self, learner: str, incarnation: int, fragment: int, step_to: int, tokens: int) -> None:
        _, tokens_before = self.covered(learner, incarnation, fragment)
        self._covered[learner, incarnation, fragment] = (step_to, tokens_before + tokens)
        self._furthest[learner, incarnation] = max(self._furthest.get((learner, incarnation), 0), step_to)

    def _close(self, learner: str, incarnation: int, fragments: int) -> None:
        before = self._closed.get(learner, Closed(learner, incarnation, 0, (0,) * fragments))
        own = [self._covered.pop((learner, incarnation, fragment), (0, 0))[1] for fragment in range(fragments)]
        tokens = tuple(known + more for known, more in zip(before.tokens, own, strict=True))
        self._closed[learner] = Closed(
            learner, incarnation, before.steps + self._furthest.pop((learner, incarnation)), tokens
        )


def _at(values: Sequence[int], fragment: int) -> int:
    return values[fragment if len(values) > 1 else 0]
