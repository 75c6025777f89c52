"""The token account: what was trained is merged, carried or discarded, each step once.

Per learner, incarnation and fragment the intervals (a, b] of inclusions (members of committed rounds) and of
`DiscardedBody` must follow each other from step 0, without a gap and without an overlap. What lies beyond the last one
is carried: it is in the parameters of a living learner and will be in a later merge.

`account_check` recomputes the same from the raw entries, and trusts nothing that is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_node.core.types import Contribution, DiscardedBody, Entry, RoundBody


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
        # fragment -> tokens of all inclusions.
        self._merged: dict[int, int] = {}

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
        tokens = (tokens for (name, _, _), (_, tokens) in self._covered.items() if name == learner)
        return sum(tokens) // fragments

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
        for fragment in range(fragments):
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
