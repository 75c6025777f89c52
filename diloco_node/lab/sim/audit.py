"""The token account, recomputed from nothing but committed entries, learner counters and the learners themselves.

It shares no code with `core.ledger.account`, so that each finds what the other forgot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_node.core.bounds import INCARNATION_MAX
from diloco_node.core.types import Contribution, DiscardedBody, EntryBody, RoundBody

if TYPE_CHECKING:
    from diloco_node.core.ledger.account import Account
    from diloco_node.lab.sim.host import Host
    from diloco_node.lab.sim.setup import Setup

Counters = Mapping[str, Mapping[int, tuple[int, int]]]
"""Per region and incarnation: (steps, tokens) on its disk."""

Identity = tuple[str, int, int]
"""Learner, incarnation, fragment."""


@dataclass(slots=True)
class Line:
    """Account of a fragment for a learner's incarnation: what of it was merged or discarded.

    Attributes:
        end: the last step; the next interval must begin there. steps, tokens: sums.
        included_version: the last version that included it; -1 if none.
    """

    end: int = 0
    steps: int = 0
    tokens: int = 0
    included_version: int = -1


class Audit:
    """Follows the committed history.

    Attributes:
        lines: by (learner, incarnation, fragment). liars: their learners' accounts are not looked at.
    """

    def __init__(self, setup: Setup, violate: Callable[[str], None]) -> None:
        self.lines: dict[Identity, Line] = {}
        self.liars: frozenset[str] = frozenset()
        # Entries that are committed.
        self._index = 0
        self._newest: dict[tuple[str, int], int] = {}
        self._setup = setup
        self._violate = violate

    def committed(self, body: EntryBody, counters: Counters) -> None:
        """Book a committed entry."""
        self._index += 1
        if isinstance(body, RoundBody):
            for member in body.members:
                if member.contribution.learner not in self.liars:
                    self._check_merged(body, member.contribution, counters)
        elif isinstance(body, DiscardedBody) and body.learner not in self.liars:
            self._check_discarded(body, counters)

    def _check_merged(self, body: RoundBody, contribution: Contribution, counters: Counters) -> None:
        line = self._line(contribution.learner, contribution.incarnation, body.fragment)
        label = f"{contribution.learner}/{contribution.incarnation} in {body.fragment}/{body.version}"
        if contribution.fragment != body.fragment:
            self._violate(f"account: {label} names fragment {contribution.fragment}")
        if contribution.base_version < line.included_version:
            self._violate(
                f"account: {label} has base {contribution.base_version}, "
                f"but version {line.included_version} already included it"
            )
        if contribution.base_version >= body.version:
            self._violate(f"account: {label} has base {contribution.base_version}, not before the version it makes")
        # Fragment by fragment: a ballot that was decided while a learner lived may commit after its next incarnation
        # was merged in another one. What may be decided, `sim.checkers` asks at that moment.
        where = (contribution.learner, body.fragment)
        if contribution.incarnation < self._newest.get(where, 0):
            self._violate(f"account: {label} is of a dead incarnation: {self._newest[where]} was merged there")
        self._newest[where] = contribution.incarnation
        line.included_version = body.version
        self._book(line, label, contribution, counters[contribution.learner].get(contribution.incarnation))

    def _check_discarded(self, body: DiscardedBody, counters: Counters) -> None:
        line = self._line(body.learner, body.incarnation, body.fragment)
        label = f"{body.learner}/{body.incarnation} discarded of {body.fragment}"
        self._book(line, label, body, counters[body.learner].get(body.incarnation))

    def _line(self, learner: str, incarnation: int, fragment: int) -> Line:
        return self.lines.setdefault((learner, incarnation, fragment), Line())

    def _book(
        self, line: Line, label: str, work: Contribution | DiscardedBody, counters: tuple[int, int] | None
    ) -> None:
        """Book steps, which follow the last ones, and were trained."""
        if work.step_from != line.end or work.step_to <= work.step_from:
            covers = f"({work.step_from}, {work.step_to}]"
            self._violate(f"account: {label} covers {covers}, the account stands at {line.end}")
        line.end = max(line.end, work.step_to)
        line.steps += work.step_to - work.step_from
        line.tokens += work.tokens
        if counters is None or line.end > counters[0] or line.tokens > counters[1]:
            self._violate(f"account: {label}: {line.end} steps and {line.tokens} tokens, but trained are {counters}")

    def close(self, hosts: Mapping[str, Host]) -> None:
        """At rest: trained = merged + discarded + carried, for every incarnation and fragment there ever was."""
        for name in sorted(hosts.keys() - self.liars):
            for incarnation in sorted(hosts[name].disk.counters):
                for fragment in range(len(self._setup.layouts)):
                    self._close_line(hosts[name], incarnation, fragment)
            core = hosts[name].core
            if core is not None:
                self.has_compared(name, core.history.account)

    def has_compared(self, region: str, account: Account) -> bool:
        """Compare steps and tokens of every learner, its closed lives too, as a region counts them; not if it is at
        another entry."""
        if account.index != self._index:
            return False
        fragments = len(self._setup.layouts)
        for learner in sorted(set(self._setup.regions) - self.liars):
            ends: dict[int, int] = {}
            tokens = 0
            for (name, incarnation, _), line in self.lines.items():
                if name == learner:
                    ends[incarnation] = max(ends.get(incarnation, 0), line.end)
                    tokens += line.tokens
            due = (sum(ends.values()), tokens // fragments)
            sums = (account.steps_before(learner, INCARNATION_MAX + 1), account.covered_tokens(learner, fragments))
            if sums != due:
                self._violate(f"account: {region} counts {sums} steps and tokens of {learner}, the ledger has {due}")
        return True

    def open_lines(self, hosts: Mapping[str, Host]) -> dict[Identity, int]:
        """Accounts that wait for a discard, of dead incarnations or after `overwrite`: up to which step."""
        return {
            (name, incarnation, fragment): step
            for name in sorted(hosts.keys() - self.liars)
            for incarnation in hosts[name].disk.counters
            for fragment in range(len(self._setup.layouts))
            if (step := self._due_step(hosts[name], incarnation, fragment)) > self._end(name, incarnation, fragment)
        }

    def is_booked(self, due: Mapping[Identity, int]) -> bool:
        """Whether what was due at one time is in the ledger by now."""
        return all(self._end(*identity) >= step for identity, step in due.items())

    def _end(self, name: str, incarnation: int, fragment: int) -> int:
        return self.lines.get((name, incarnation, fragment), Line()).end

    def _due_step(self, host: Host, incarnation: int, fragment: int) -> int:
        if host.learner is not None and host.learner.incarnation == incarnation:
            return host.learner.parts[fragment].position.included_step
        return host.disk.counters[incarnation][0]

    def _close_line(self, host: Host, incarnation: int, fragment: int) -> None:
        line = self.lines.get((host.name, incarnation, fragment), Line())
        label = f"{host.name}/{incarnation} fragment {fragment}"
        learner = host.learner
        if learner is None or learner.incarnation != incarnation:
            steps, tokens = host.disk.counters[incarnation]
            account = (line.steps, line.tokens)
            if account != (steps, tokens):
                self._violate(f"account: {label} trained {(steps, tokens)} and is gone, but {account} are booked")
            return
        fragment_state = learner.parts[fragment]
        carried_steps = learner.step - line.end
        if carried_steps < 0 or learner.tokens < line.tokens:
            self._violate(f"account: {label} carries {carried_steps} steps: {line}")
        if (
            fragment_state.position.base_version >= line.included_version
            and fragment_state.position.included_step != line.end
        ):
            self._violate(
                f"account: {label} counts from {fragment_state.position.included_step}, the ledger from {line.end}"
            )
