"""The independent check of a run's token account: from the raw entries of its ledger and the learners' own counts.

It shares no code with `core.ledger.account`, which the daemon keeps: each finds what the other forgot. If the first
entries are summed up, the check must believe the sums; a majority of the regions worked them out alike.

A region that lost its folder lost the counts of its learners with it. For such an incarnation only the booked steps are
known; nobody can tell how much more it trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from diloco_node.core.ledger.summary import RunSummary
from diloco_node.core.types import DiscardedBody, Entry, LearnerStatus, Member, RoundBody


@dataclass(frozen=True, slots=True)
class AccountReport:
    """The account in tokens, and every fault that was found.

    Attributes:
        trained: by all learners and incarnations, as they counted themselves; what is booked of those in `uncounted`.
        merged, discarded: mean over the fragments, weighted with their sizes, rounded to whole tokens.
        carried: likewise; what living learners hold that is in no merge yet. If balanced, the three add up to trained.
        balanced: no fault. faults: one line each, sorted.
        uncounted: (learner, incarnation) whose own count was lost with a folder, sorted; without those that a summary
            has closed.
    """

    trained: int
    merged: int
    carried: int
    discarded: int
    balanced: bool
    faults: tuple[str, ...]
    uncounted: tuple[tuple[str, int], ...] = ()


class _Interval(NamedTuple):
    step_from: int
    step_to: int
    tokens: int
    is_merged: bool
    entry: int


_Identity = tuple[str, int]


def check_account(
    entries: Iterable[Entry],
    totals: Mapping[tuple[str, int], tuple[int, int]],
    *,
    fragment_sizes: Sequence[int],
    positions: Mapping[str, LearnerStatus] | None = None,
    summary: RunSummary | None = None,
    lost_regions: Collection[str] = (),
) -> AccountReport:
    """Recompute the account of a run from its ledger and the learners' own counts.

    Args:
        entries: committed ones, from entry 1 or behind the summary (hash chain: `entries.verify_chain`).
        totals: per (learner, incarnation) the steps and tokens that it counted itself and that were persisted apart
            from the ledger. The highest incarnation of a learner is taken as alive, the others as dead.
        fragment_sizes: values of each fragment, by index: their weights in the report, and how many there are.
        positions: per learner its last report. With them a lost inclusion at the end of an account is found
            too; without them it would look like steps that are carried.
        summary: what stands for the entries before the first one; None: there are none.
        lost_regions: learners whose region's folder was replaced: counts of theirs may be missing from `totals`.

    Returns:
        The report. It never raises for what is wrong in the data: that is a fault in the report.
    """
    checker = _Checker(totals, len(fragment_sizes), positions or {}, lost_regions)
    if summary is not None:
        checker.begin(summary)
    for entry in entries:
        checker.read(entry)
    checker.check()
    return checker.report(fragment_sizes)


class _Checker:
    """One pass over the entries, then one over the accounts."""

    def __init__(
        self,
        totals: Mapping[_Identity, tuple[int, int]],
        fragments: int,
        positions: Mapping[str, LearnerStatus],
        lost_regions: Collection[str],
    ) -> None:
        self._trained = dict(totals)
        self._lost = lost_regions
        self._uncounted: set[_Identity] = set()
        self._fragments = fragments
        self._positions = positions
        self._faults: list[str] = []
        self._intervals: dict[tuple[str, int, int], list[_Interval]] = {}
        self._versions: dict[int, int] = {}
        self._included: dict[tuple[str, int, int], int] = {}
        # What a summary says: where accounts stand, ends of earlier inclusions, closed incarnations, totals.
        self._start: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._ends: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
        self._closed: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._totals: tuple[tuple[int, ...], tuple[int, ...]] = ((0,) * fragments, (0,) * fragments)

    def begin(self, summary: RunSummary) -> None:
        self._versions = dict(enumerate(summary.versions))
        self._totals = (summary.merged, summary.discarded)
        for line in summary.covered:
            for fragment in range(self._fragments):
                at = fragment if len(line.steps) > 1 else 0
                self._start[line.learner, line.incarnation, fragment] = (line.steps[at], line.tokens[at])
            self._know((line.learner, line.incarnation))
        for inclusion in summary.included:
            name = (inclusion.learner, inclusion.incarnation, inclusion.fragment)
            self._included[name] = inclusion.version
            self._ends.setdefault(name, set()).add((inclusion.step_to, inclusion.tokens_to))
        self._closed = {closure.learner: (closure.incarnation, closure.tokens) for closure in summary.closed}

    def read(self, entry: Entry) -> None:
        body = entry.body
        if isinstance(body, RoundBody):
            self._read_round(entry.index, body)
        elif isinstance(body, DiscardedBody):
            interval = _Interval(body.step_from, body.step_to, body.tokens, False, entry.index)
            self._add((body.learner, body.incarnation), body.fragment, interval)

    def _read_round(self, index: int, body: RoundBody) -> None:
        next_version = self._versions.get(body.fragment, 0) + 1
        if body.version != next_version:
            self._fault(
                f"entry {index}: fragment {body.fragment} goes to version {body.version}, expected {next_version}"
            )
        self._versions[body.fragment] = body.version
        learners = [member.contribution.learner for member in body.members]
        if len(set(learners)) != len(learners):
            self._fault(f"entry {index}: a learner is in the round twice: {', '.join(sorted(learners))}")
        for member in body.members:
            self._read_member(index, body, member)

    def _read_member(self, index: int, body: RoundBody, member: Member) -> None:
        contribution = member.contribution
        where = f"entry {index}: {contribution.learner} incarnation {contribution.incarnation} fragment {body.fragment}"
        if contribution.fragment != body.fragment:
            self._fault(f"{where}: the contribution is of fragment {contribution.fragment}")
        last = self._included.get((contribution.learner, contribution.incarnation, body.fragment), 0)
        if not last <= contribution.base_version < body.version:
            self._fault(
                f"{where}: base version {contribution.base_version} for version {body.version}, last included in {last}"
            )
        self._included[contribution.learner, contribution.incarnation, body.fragment] = body.version
        steps = (contribution.step_from, contribution.step_to)
        interval = _Interval(*steps, contribution.tokens, member.weight > 0.0, index)
        self._add((contribution.learner, contribution.incarnation), body.fragment, interval)

    def _add(self, identity: _Identity, fragment: int, interval: _Interval) -> None:
        if not 0 <= fragment < self._fragments:
            self._fault(f"entry {interval.entry}: fragment {fragment} of {self._fragments}")
        if interval.step_to <= interval.step_from or interval.step_from < 0 or interval.tokens < 0:
            self._fault(f"entry {interval.entry}: {_text(interval)} with {interval.tokens} tokens is no interval")
        if not self._know(identity):
            self._fault(f"entry {interval.entry}: {identity[0]} incarnation {identity[1]} is in no learner's own count")
        self._intervals.setdefault((*identity, fragment), []).append(interval)

    def _know(self, identity: _Identity) -> bool:
        """Whether the incarnation has a count of its own, or may have lost it."""
        if identity not in self._trained and identity[0] in self._lost:
            self._uncounted.add(identity)
        return identity in self._trained or identity in self._uncounted

    def _count_lost(self) -> None:
        """Steps of an incarnation without a count are those booked of its furthest fragment."""
        for identity in self._uncounted:
            steps, tokens = 0, 0
            for fragment in range(self._fragments):
                intervals = self._intervals.get((*identity, fragment), [])
                start = self._start.get((*identity, fragment), (0, 0))
                steps = max(steps, start[0], *(interval.step_to for interval in intervals))
                tokens = max(tokens, start[1] + sum(interval.tokens for interval in intervals))
            self._trained[identity] = (steps, tokens)

    def check(self) -> None:
        self._count_lost()
        newest: dict[str, int] = {}
        for learner, incarnation in sorted(self._trained):
            newest[learner] = incarnation
        for learner in sorted(self._closed):
            self._check_closed(learner, *self._closed[learner])
        for identity in sorted(self._trained):
            if identity[1] <= self._closed.get(identity[0], (-1, ()))[0]:
                continue
            tokens_at: dict[int, int] = {0: 0}
            for fragment in range(self._fragments):
                interval = self._check_contiguous(identity, fragment, tokens_at)
                self._check_rest(identity, fragment, interval, is_alive=newest[identity[0]] == identity[1])
            self._check_monotonic(identity, tokens_at)
        for learner in sorted(self._positions):
            self._check_position(learner, self._positions[learner])

    def _check_closed(self, learner: str, newest: int, tokens: tuple[int, ...]) -> None:
        """Closed incarnations leave only sums: together they trained what was merged or discarded."""
        if learner in self._lost:
            return  # a count may be among those that were lost
        tokens_trained = sum(
            pair[1] for (name, number), pair in self._trained.items() if name == learner and number <= newest
        )
        for fragment, bookings in enumerate(tokens):
            if bookings != tokens_trained:
                self._fault(
                    f"{learner} fragment {fragment}: incarnations up to {newest} trained {tokens_trained} tokens, "
                    f"{bookings} are merged or discarded"
                )

    def _check_contiguous(self, identity: _Identity, fragment: int, tokens_at: dict[int, int]) -> tuple[int, int]:
        """The intervals follow each other, and a step has the same tokens before it in every fragment."""
        step, tokens = self._start.get((*identity, fragment), (0, 0))
        if tokens_at.setdefault(step, tokens) != tokens:
            self._fault(f"{_label(identity, fragment)}: {_pair((step, tokens))} summed up, {tokens_at[step]} elsewhere")
        for interval in sorted(self._intervals.get((*identity, fragment), [])):
            where = f"entry {interval.entry}: {_label(identity, fragment)}: {_text(interval)}"
            if interval.step_from > step:
                self._fault(f"{where} leaves out ({step}, {interval.step_from}]")
            elif interval.step_from < step:
                self._fault(f"{where} counts ({interval.step_from}, {min(step, interval.step_to)}] twice")
            step = max(step, interval.step_to)
            tokens += interval.tokens
            earlier_tokens = tokens_at.setdefault(step, tokens)
            if earlier_tokens != tokens:
                self._fault(
                    f"{where} makes {tokens} tokens up to step {step}, another fragment's account {earlier_tokens}"
                )
        return step, tokens

    def _check_rest(self, identity: _Identity, fragment: int, interval: tuple[int, int], *, is_alive: bool) -> None:
        """Covered steps were trained; a dead incarnation has every trained step covered."""
        total = self._trained[identity]
        if interval[0] > total[0] or interval[1] > total[1]:
            self._fault(f"{_label(identity, fragment)}: {_pair(interval)} merged or discarded, {_pair(total)} trained")
        elif interval[0] == total[0] and interval[1] != total[1]:
            self._fault(f"{_label(identity, fragment)}: all steps are covered, but {_pair(interval)} of {_pair(total)}")
        elif not is_alive and interval != total and identity not in self._uncounted:
            self._fault(f"{_label(identity, fragment)}: dead, but only {_pair(interval)} of {_pair(total)} are covered")

    def _check_monotonic(self, identity: _Identity, tokens_at: dict[int, int]) -> None:
        steps = sorted(tokens_at)
        for before, after in pairwise(steps):
            if tokens_at[after] < tokens_at[before]:
                self._fault(
                    f"{identity[0]} incarnation {identity[1]}: fewer tokens up to step {after} than up to {before}"
                )

    def _check_position(self, learner: str, status: LearnerStatus) -> None:
        """The learner's own marks are ends of intervals; the ledger may be ahead (not applied yet), never behind."""
        identity = (learner, status.incarnation)
        total = self._trained.get(identity)
        if total is None or status.step > total[0] or status.tokens > total[1]:
            self._fault(f"{learner} incarnation {status.incarnation}: says {status.step} steps, counted {total}")
        if len(status.positions) != self._fragments:
            self._fault(f"{learner}: {len(status.positions)} positions for {self._fragments} fragments")
        for fragment, position in enumerate(status.positions[: self._fragments]):
            start = self._start.get((*identity, fragment), (0, 0))
            ends = {(0, 0), start, *self._ends.get((*identity, fragment), ())}
            tokens = start[1]
            for interval in sorted(self._intervals.get((*identity, fragment), [])):
                tokens += interval.tokens
                ends.add((interval.step_to, tokens))
            if (position.included_step, position.included_tokens) not in ends:
                position_pair = _pair((position.included_step, position.included_tokens))
                self._fault(
                    f"{_label(identity, fragment)}: it was included up to {position_pair}, the ledger has no such"
                )

    def _fault(self, text: str) -> None:
        self._faults.append(text)

    def report(self, fragment_sizes: Sequence[int]) -> AccountReport:
        total = sum(fragment_sizes)
        merges, discards = (
            sum(
                (Fraction(size * amount, total) for size, amount in zip(fragment_sizes, amounts, strict=True)),
                Fraction(0),
            )
            for amounts in self._totals
        )
        for (_, _, fragment), intervals in self._intervals.items():
            share = Fraction(fragment_sizes[fragment], total) if 0 <= fragment < self._fragments else Fraction(0)
            merges += share * sum(interval.tokens for interval in intervals if interval.is_merged)
            discards += share * sum(interval.tokens for interval in intervals if not interval.is_merged)
        trained_tokens = sum(tokens for _, tokens in self._trained.values()) + self._closed_uncounted()
        merged_tokens, discarded_tokens = round(merges), round(discards)
        return AccountReport(
            trained=trained_tokens,
            merged=merged_tokens,
            carried=trained_tokens - merged_tokens - discarded_tokens,
            discarded=discarded_tokens,
            balanced=not self._faults,
            faults=tuple(sorted(self._faults)),
            uncounted=tuple(sorted(self._uncounted)),
        )

    def _closed_uncounted(self) -> int:
        """Tokens that closed incarnations booked, of those whose counts were lost."""
        closed_tokens = 0
        for learner, (newest, tokens) in self._closed.items():
            if learner in self._lost:
                counted_tokens = (
                    pair[1] for (name, number), pair in self._trained.items() if name == learner and number <= newest
                )
                closed_tokens += max(0, max(tokens, default=0) - sum(counted_tokens))
        return closed_tokens


def _label(identity: _Identity, fragment: int) -> str:
    return f"{identity[0]} incarnation {identity[1]} fragment {fragment}"


def _text(interval: _Interval) -> str:
    kind = "merged" if interval.is_merged else "discarded"
    return f"{kind} ({interval.step_from}, {interval.step_to}]"


def _pair(interval: tuple[int, int]) -> str:
    return f"{interval[0]} steps ({interval[1]} tokens)"
