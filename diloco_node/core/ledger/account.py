"""The token account: trained tokens are merged, carried or discarded, each step once.

Per learner, incarnation and fragment the intervals (a, b] of inclusions (members of committed rounds) and of
`DiscardedBody` must follow each other from step 0, without a gap and without an overlap. Steps beyond the last interval
are carried: they are in the parameters of a living learner and will be in a later merge.

Everybody who asks whether steps may be booked asks `Account.fault`: the leader before it merges, every region before it
takes an entry. `lab.demo.account_check` recomputes the account from the raw entries and shares no code with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from diloco_node.core.ledger.shard_account import K, ShardAccount, V, put
from diloco_node.core.ledger.summary import Closed, Covered, GivenUp, Included, RunSummary
from diloco_node.core.types import Contribution, DiscardedBody, Entry, RoundBody

INCARNATIONS_KEPT: Final = 8
"""Incarnations of one learner that are in the ledger and have an account of their own. The tokens of older ones are
added up, and they are closed. They are booked in order, so the eighth before the newest was complete long ago. Only
where a learner is started nine times within one round of a fragment, some of its lost steps are never booked there."""


class Account:
    """The account after some entries: `take` each entry once, in order, then ask.

    Entries that are taken may be taken back, newest first, until they are settled.

    Attributes:
        index: of the last entry that was taken. shards: the same for the rows of the data.
    """

    def __init__(self) -> None:
        self.index = 0
        self.shards = ShardAccount(self._set)
        # (learner, fragment) -> the newest inclusion, of whatever incarnation; and the last steps that were given up.
        self._included: dict[tuple[str, int], Included] = {}
        self._given_up: dict[tuple[str, int], GivenUp] = {}
        # (learner, incarnation, fragment) -> steps and tokens that are merged or discarded.
        self._covered: dict[tuple[str, int, int], tuple[int, int]] = {}
        # fragment -> tokens of all inclusions with a weight; of all others and of all discards.
        self._merged: dict[int, int] = {}
        self._discarded: dict[int, int] = {}
        # (learner, incarnation) -> how far it got in any fragment. Closed incarnations are not in it.
        self._furthest: dict[tuple[str, int], int] = {}
        self._closed: dict[str, Closed] = {}
        # fragment -> its version, as far as rounds say it.
        self._versions: dict[int, int] = {}
        # Per entry that is not settled: calls that restore what it changed, in the order of the changes.
        self._undo: deque[list[Callable[[], None]]] = deque()

    def take(self, entry: Entry) -> None:
        """Book the next entry."""
        assert entry.index == self.index + 1, (entry.index, self.index)
        self.index = entry.index
        self._undo.append([])
        body = entry.body
        self.shards.take(entry)
        if isinstance(body, DiscardedBody):
            self._cover(body)
            self._set(self._discarded, body.fragment, self._discarded.get(body.fragment, 0) + body.tokens)
            where = (body.learner, body.fragment)
            line = GivenUp(*where, body.incarnation, body.step_to, self._versions.get(body.fragment, 0))
            # An earlier life may be booked late: it goes on with nothing.
            if line.incarnation >= self._given_up.get(where, line).incarnation:
                self._set(self._given_up, where, line)
        elif isinstance(body, RoundBody):
            self._set(self._versions, body.fragment, body.version)
            for member in body.members:
                # The round took nothing of a contribution without weight, and its learner begins anew from the result.
                self._include(member.contribution, body.version, self._merged if member.weight else self._discarded)

    def back_to(self, index: int) -> None:
        """Take back every entry after this index; none of them is settled."""
        assert self.index - index <= len(self._undo), (self.index, index)
        while self.index > index:
            for restore in reversed(self._undo.pop()):
                restore()
            self.index -= 1

    def settle(self, index: int) -> None:
        """Keep the entries up to this index for ever: forget how to take them back."""
        while len(self._undo) > max(0, self.index - index):
            self._undo.popleft()

    def fault(self, body: Contribution | DiscardedBody) -> str:
        """Return why booking these steps would count some twice or lose some; empty if they may be booked."""
        learner, incarnation, fragment = body.learner, body.incarnation, body.fragment
        if self.is_closed(learner, incarnation):
            return f"incarnation {incarnation} of {learner} is closed, as all up to {self._closed[learner].incarnation}"
        last = self.last_inclusion(learner, fragment)
        if last is not None and isinstance(body, Contribution):
            if incarnation < last.incarnation:
                return f"incarnation {incarnation} of {learner} after {last.incarnation} was included"
            # A later incarnation knows nothing of the versions before it, and begins with whatever base it has.
            if incarnation == last.incarnation and body.base_version < last.version:
                return f"{learner}'s base is version {body.base_version}, it was included in {last.version}"
        steps, _ = self.covered(learner, incarnation, fragment)
        if body.step_from != steps or body.step_to <= body.step_from or body.tokens < 0:
            interval = f"({body.step_from}, {body.step_to}]"
            return f"{interval} of {learner}'s incarnation {incarnation} does not follow step {steps}"
        return self.shards.fault(body) if isinstance(body, Contribution) else ""

    def last_inclusion(self, learner: str, fragment: int) -> Included | None:
        """The newest inclusion of this learner in a round of this fragment; None if there was none."""
        return self._included.get((learner, fragment))

    def carried_since(self, contribution: Contribution) -> int | None:
        """Return the version since which a contribution's steps were carried on; None: its incarnation began with them.

        It is the last one that includes the learner, or the one for which it gave its steps up, as booked.
        """
        where, begin = (contribution.learner, contribution.fragment), (contribution.incarnation, contribution.step_from)
        for line in (self._included.get(where), self._given_up.get(where)):
            if line is not None and (line.incarnation, line.step_to) == begin:
                return line.version
        return None

    def given_up_lines(self) -> tuple[GivenUp, ...]:
        """The last steps that were given up, by learner and fragment."""
        return tuple(self._given_up[name] for name in sorted(self._given_up))

    def covered(self, learner: str, incarnation: int, fragment: int) -> tuple[int, int]:
        """(steps, tokens) of an incarnation that are merged or discarded in this fragment: where its next begins."""
        return self._covered.get((learner, incarnation, fragment), (0, 0))

    def covered_tokens(self, learner: str, fragments: int) -> int:
        """Tokens of all incarnations of a learner that are merged or discarded: the mean over the fragments."""
        open_tokens = sum(tokens for (name, _, _), (_, tokens) in self._covered.items() if name == learner)
        closed_tokens = sum(self._closed[learner].tokens) if learner in self._closed else 0
        return (open_tokens + closed_tokens) // fragments

    def is_closed(self, learner: str, incarnation: int) -> bool:
        """Whether the incarnation is so old that nothing of it is booked any more."""
        return learner in self._closed and incarnation <= self._closed[learner].incarnation

    def newest_incarnation(self, learner: str) -> int:
        """The newest incarnation of the learner in the ledger; -1 if it is not in it."""
        return max((number for name, number in self._furthest if name == learner), default=-1)

    def steps_before(self, learner: str, incarnation: int) -> int:
        """Steps of the learner's earlier incarnations that the ledger knows of: how far each got in any fragment."""
        open_steps = sum(
            step for (name, number), step in self._furthest.items() if name == learner and number < incarnation
        )
        return open_steps + (self._closed[learner].steps if learner in self._closed else 0)

    def close_old(self, fragments: int) -> None:
        """Add up the incarnations that are old enough. Every region must do it after the same entries."""
        numbers: dict[str, list[int]] = {}
        for learner, incarnation in sorted(self._furthest):
            numbers.setdefault(learner, []).append(incarnation)
        for learner, lives in numbers.items():
            for incarnation in lives[:-INCARNATIONS_KEPT]:
                self._close(learner, incarnation, fragments)
        self.shards.drop_unused()

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
        """Sums of the closed incarnations, by learner."""
        return tuple(self._closed[learner] for learner in sorted(self._closed))

    def included_lines(self) -> tuple[Included, ...]:
        """The newest inclusions, by learner and fragment."""
        return tuple(self._included[name] for name in sorted(self._included))

    def totals(self, fragments: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens merged and discarded so far, per fragment."""
        sums = [tuple(table.get(at, 0) for at in range(fragments)) for table in (self._merged, self._discarded)]
        return sums[0], sums[1]

    def restore(self, summary: RunSummary, index: int) -> None:
        """Go on from a summary as if every entry up to `index` had been taken."""
        self.index = index
        self._undo.clear()
        fragments = range(len(summary.versions))
        self._included = {(line.learner, line.fragment): line for line in summary.included}
        self._given_up = {(line.learner, line.fragment): line for line in summary.given_up}
        self._covered = {
            (line.learner, line.incarnation, fragment): (_at(line.steps, fragment), _at(line.tokens, fragment))
            for line in summary.covered
            for fragment in fragments
        }
        self._furthest = {(line.learner, line.incarnation): max(line.steps) for line in summary.covered}
        self._merged, self._discarded = dict(enumerate(summary.merged)), dict(enumerate(summary.discarded))
        self._closed = {line.learner: line for line in summary.closed}
        self._versions = dict(enumerate(summary.versions))
        self.shards.restore(summary)

    def merged_tokens(self, fragments: int) -> int:
        """Tokens of all inclusions with a weight, the mean over the fragments, rounded down."""
        return sum(self._merged.values()) // fragments

    def discards_due(
        self, learner: str, incarnation: int, *, steps: int, tokens: int, fragments: int, reason: str
    ) -> tuple[DiscardedBody, ...]:
        """Return the discards that must be booked when an incarnation is dead, for each fragment with steps in no
        merge.

        steps, tokens: trained by it, as it counted. reason: for the ledger.
        """
        due = []
        for fragment in range(0 if self.is_closed(learner, incarnation) else fragments):
            step_from, tokens_from = self.covered(learner, incarnation, fragment)
            if steps > step_from:
                tokens_left = max(0, tokens - tokens_from)
                due.append(DiscardedBody(learner, incarnation, fragment, step_from, steps, tokens_left, reason))
        return tuple(due)

    def _include(self, contribution: Contribution, version: int, sums: dict[int, int]) -> None:
        learner, incarnation, fragment = contribution.learner, contribution.incarnation, contribution.fragment
        self._cover(contribution)
        self._set(sums, fragment, sums.get(fragment, 0) + contribution.tokens)
        sums_to = self.covered(learner, incarnation, fragment)
        line = Included(learner, fragment, incarnation, version, contribution.snapshot, *sums_to)
        self._set(self._included, (learner, fragment), line)
        self.shards.include(contribution)

    def _cover(self, body: Contribution | DiscardedBody) -> None:
        line, life = (body.learner, body.incarnation, body.fragment), (body.learner, body.incarnation)
        _, tokens = self.covered(*line)
        self._set(self._covered, line, (body.step_to, tokens + body.tokens))
        self._set(self._furthest, life, max(self._furthest.get(life, 0), body.step_to))

    def _close(self, learner: str, incarnation: int, fragments: int) -> None:
        before = self._closed.get(learner, Closed(learner, incarnation, 0, (0,) * fragments))
        tokens = [self.covered(learner, incarnation, fragment)[1] for fragment in range(fragments)]
        sums = tuple(earlier + later for earlier, later in zip(before.tokens, tokens, strict=True))
        steps = before.steps + self._furthest[learner, incarnation]
        self._set(self._closed, learner, Closed(learner, incarnation, steps, sums))
        self._set(self._furthest, (learner, incarnation), None)
        for fragment in range(fragments):
            self._set(self._covered, (learner, incarnation, fragment), None)

    def _set(self, table: dict[K, V], key: K, value: V | None) -> None:
        """Change a value, so that it can be taken back with the newest entry; None removes it."""
        if self._undo:
            self._undo[-1].append(partial(put, table, key, table.get(key)))
        put(table, key, value)


def _at(values: Sequence[int], fragment: int) -> int:
    return values[fragment if len(values) > 1 else 0]
