"""What an entry may say after the entries before it: every region asks this before it keeps an entry.

The rules are those by which an honest leader makes entries (`core.rounds`), asked of the log as it is, committed or
not. So a leader that was captured, or is broken, can put nothing into the ledger that ends the run later.

- Genesis comes once, and is this run's, with a folder for each region. Before it nothing but leaders.
- A round takes its fragment to the next version, with members whose steps follow the account.
- What is discarded follows the account, too.
- After the end there are no more rounds.

Nothing is replayed: what an entry changes is kept with what was there before, until the entry is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.summary import decode_summary, named_disks
from diloco_node.core.merge.fragments import Fragment, Manifest
from diloco_node.core.merge.stripes import block_count, stripes_fault
from diloco_node.core.merge.weights import refusal, to_float32
from diloco_node.core.types import (
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    RoundBody,
    SnapshotBody,
    SummaryBody,
)

INCARNATIONS_SKIPPED_MAX: Final = 1 << 20
"""Lives of a learner that left no trace in the ledger, between two that did: twelve days of one restart a second. A
larger number would bar the learner, which can't count any further."""

_Key = tuple[Any, ...]

Run = tuple[str, str, str, tuple[str, ...]]
"""run_id, settings_digest, manifest_digest and regions, sorted."""


def run_fault(run: Run, body: GenesisBody) -> str:
    """What tells the run that begins so from this one, with both values; empty if it is this one.

    The settings are not compared: it names those that the run began with, and some may change (D-093).
    """
    run_id, _, manifest_digest, regions = run
    pairs = (
        ("run.id", body.run_id, run_id),
        ("regions", ", ".join(body.regions), ", ".join(regions)),
        ("model", body.manifest_digest, manifest_digest),
    )
    return "; ".join(f"its {what} is {there}, here it is {here}" for what, there, here in pairs if there != here)


class EntryCheck:
    """Follows the log (`core.ledger.entry_gate.Meaning`).

    Args:
        run: what all regions must agree on.
        manifest: of the model. summary_entries: between two sums of the ledger, which close old incarnations.
    """

    def __init__(self, run: Run, manifest: Manifest, *, summary_entries: int) -> None:
        self.index = 0
        self._run = run
        self._summary_entries = summary_entries
        self._regions = frozenset(run[3])
        self._fragments = manifest.fragments
        self._blocks = [block_count(fragment) for fragment in manifest.fragments]
        # ("genesis",), ("finished",): True. ("version", fragment). ("covered", learner, incarnation, fragment): a step.
        # ("disk", region): the id of its folder, empty for none.
        # ("included", learner, fragment): (incarnation, version). ("closed", learner): the newest closed incarnation.
        # ("lives", learner): incarnations that are not closed, ascending.
        self._facts: dict[_Key, Any] = {}
        # For each entry that may still be truncated, what its facts were before: None where there were none.
        self._before: deque[list[tuple[_Key, Any]]] = deque()
        self._rules: dict[type, Callable[[Any, Entry], str]] = {
            GenesisBody: self._genesis_fault,
            LeaderBody: lambda body, _: self._region_fault(body.leader),
            RoundBody: self._round_fault,
            DiscardedBody: self._discard_fault,
            FinishedBody: self._finished_fault,
            DiskNamedBody: self._disk_fault,
            SnapshotBody: self._snapshot_fault,
            SummaryBody: self._summary_fault,
        }

    def begin(self, base: LedgerBase) -> None:
        """Go on from a base as if its entries had been taken. Raises ProtocolViolation: it is none of such a ledger."""
        summary = decode_summary(base.summary, fragments=len(self._fragments))
        # Which sum was the last one named before the base, it does not say: entries behind it may name older ones.
        facts: dict[_Key, Any] = {("genesis",): True}
        if summary.finished:
            facts["finished",] = True
        for fragment, version in enumerate(summary.versions):
            facts["version", fragment] = version
        for body in summary.snapshots:
            facts["snapshot", body.fragment] = body.version
        for name, disk in named_disks(summary).items():
            facts["disk", name] = disk
        for closed in summary.closed:
            facts["closed", closed.learner] = closed.incarnation
        for line in summary.covered:
            facts["lives", line.learner] = (*facts.get(("lives", line.learner), ()), line.incarnation)
            for fragment in range(len(self._fragments)):
                step = line.steps[fragment if len(line.steps) > 1 else 0]
                facts["covered", line.learner, line.incarnation, fragment] = step
        for one in summary.included:
            facts["included", one.learner, one.fragment] = (one.incarnation, one.version)
        self.index, self._facts = base.index, facts
        self._before.clear()

    def fault(self, entry: Entry) -> str:
        """Why the entry can't be the next one; empty if it can."""
        body = entry.body
        rule = self._rules.get(type(body))
        if rule is None:
            return f"{type(body).__name__} is not known here"
        if ("genesis",) not in self._facts and not isinstance(body, (GenesisBody, LeaderBody)):
            return f"a {type(body).__name__} before genesis"
        return rule(body, entry)

    def take(self, entry: Entry) -> None:
        """It is the next one."""
        self.index = entry.index
        before: list[tuple[_Key, Any]] = []
        self._change(self._changes(entry.body), before)
        if entry.index % self._summary_entries == 0:
            self._change(self._closed_by_a_sum(), before)
        self._before.append(before)

    def _change(self, changes: Iterable[tuple[_Key, Any]], before: list[tuple[_Key, Any]]) -> None:
        """Make the changes one by one; None takes a fact away."""
        for key, value in changes:
            before.append((key, self._facts.get(key)))
            self._set(key, value)

    def _set(self, key: _Key, value: Any) -> None:
        if value is None:
            self._facts.pop(key, None)
        else:
            self._facts[key] = value

    def back_to(self, index: int) -> None:
        """What was taken after this index is not in the log any more."""
        assert self.index - index <= len(self._before), (self.index, index)
        while self.index > index:
            for key, value in reversed(self._before.pop()):
                self._set(key, value)
            self.index -= 1

    def settle(self, index: int) -> None:
        """Entries up to this index stay for ever."""
        while len(self._before) > max(0, self.index - index):
            self._before.popleft()

    def _changes(self, body: EntryBody) -> Iterable[tuple[_Key, Any]]:
        if isinstance(body, GenesisBody):
            yield ("genesis",), True
            yield from ((("version", fragment.index), 0) for fragment in self._fragments)
            yield from ((("disk", name), disk) for name, disk in zip(body.regions, body.disks, strict=True))
        elif isinstance(body, DiskNamedBody):
            yield ("disk", body.region), body.disk
        elif isinstance(body, FinishedBody):
            yield ("finished",), True
        elif isinstance(body, SnapshotBody):
            yield ("snapshot", body.fragment), body.version
        elif isinstance(body, SummaryBody):
            yield ("summary",), body.index
        elif isinstance(body, DiscardedBody):
            yield from self._covered(body)
        elif isinstance(body, RoundBody):
            yield ("version", body.fragment), body.version
            for member in body.members:
                one = member.contribution
                yield from self._covered(one)
                yield ("included", one.learner, one.fragment), (one.incarnation, body.version)

    def _covered(self, body: Contribution | DiscardedBody) -> Iterable[tuple[_Key, Any]]:
        yield ("covered", body.learner, body.incarnation, body.fragment), body.step_to
        lives = self._lives(body.learner)
        if body.incarnation not in lives:
            yield ("lives", body.learner), tuple(sorted((*lives, body.incarnation)))

    def _lives(self, learner: str) -> tuple[int, ...]:
        found: tuple[int, ...] = self._facts.get(("lives", learner), ())
        return found

    def _closed_by_a_sum(self) -> list[tuple[_Key, Any]]:
        """As the account closes them (`core.ledger.account`): so a whole log says what its base says."""
        changes: list[tuple[_Key, Any]] = []
        for name in sorted(self._regions):
            lives = self._lives(name)
            for closed in lives[:-INCARNATIONS_KEPT]:
                changes.append((("closed", name), closed))
                changes += ((("covered", name, closed, one.index), None) for one in self._fragments)
            if len(lives) > INCARNATIONS_KEPT:
                changes.append((("lives", name), lives[-INCARNATIONS_KEPT:]))
        return changes

    def _genesis_fault(self, body: GenesisBody, _: Entry) -> str:
        if ("genesis",) in self._facts:
            return "a second genesis"
        if other := run_fault(self._run, body):
            return f"genesis of another run: {other}"
        if len(body.fragment_digests) != len(self._fragments):
            return f"{len(body.fragment_digests)} digests for {len(self._fragments)} fragments"
        if len(body.disks) != len(body.regions) or len(set(body.disks)) != len(body.disks) or b"" in body.disks:
            return f"{len(set(body.disks))} folders for {len(body.regions)} regions"
        return ""

    def _disk_fault(self, body: DiskNamedBody, _: Entry) -> str:
        """A folder's id is taken away before another one is named."""
        named = self._facts.get(("disk", body.region), b"")
        if bool(named) == bool(body.disk):
            return f"{body.region}'s folder is {named.hex() or 'none'}, named is {body.disk.hex() or 'none'}"
        return self._region_fault(body.region)

    def _snapshot_fault(self, body: SnapshotBody, _: Entry) -> str:
        fault = self._fragment_fault(body.fragment)
        if fault:
            return fault
        last, reached = self._facts.get(("snapshot", body.fragment), 0), self._facts["version", body.fragment]
        if not last < body.version <= reached:
            return f"a snapshot at version {body.version}, after {last}, where version {reached} is reached"
        return ""

    def _summary_fault(self, body: SummaryBody, entry: Entry) -> str:
        last = self._facts.get(("summary",), 0)
        return "" if last < body.index < entry.index else f"a summary up to entry {body.index}, after one up to {last}"

    def _region_fault(self, name: str) -> str:
        return "" if name in self._regions else f"{name} is no region of the run"

    def _fragment_fault(self, fragment: int) -> str:
        return "" if 0 <= fragment < len(self._fragments) else f"there is no fragment {fragment}"

    def _finished_fault(self, body: FinishedBody, _: Entry) -> str:
        versions = tuple(self._facts["version", fragment.index] for fragment in self._fragments)
        if ("finished",) in self._facts:
            return "a second end"
        return "" if body.versions == versions else f"ends at versions {body.versions}, the ledger is at {versions}"

    def _discard_fault(self, body: DiscardedBody, _: Entry) -> str:
        return (
            self._region_fault(body.learner)
            or self._fragment_fault(body.fragment)
            or self._account_fault(body)
            or self._incarnation_fault(body)
        )

    def _account_fault(self, body: Contribution | DiscardedBody) -> str:
        closed = self._facts.get(("closed", body.learner), -1)
        if body.incarnation <= closed:
            return f"incarnation {body.incarnation} of {body.learner} is closed, as all up to {closed}"
        covered = self._facts.get(("covered", body.learner, body.incarnation, body.fragment), 0)
        if body.step_from != covered or body.step_to <= body.step_from:
            interval = f"({body.step_from}, {body.step_to}]"
            return f"{interval} of {body.learner}'s incarnation {body.incarnation} does not follow step {covered}"
        return ""

    def _incarnation_fault(self, body: Contribution | DiscardedBody) -> str:
        newest = max(self._lives(body.learner), default=0)
        is_far = body.incarnation > newest + INCARNATIONS_SKIPPED_MAX
        return f"incarnation {body.incarnation} of {body.learner} after {newest}" if is_far else ""

    def _round_fault(self, body: RoundBody, entry: Entry) -> str:
        fault = self._fragment_fault(body.fragment)
        if fault:
            return fault
        next_version = self._facts["version", body.fragment] + 1
        if ("finished",) in self._facts:
            return "a round after the end"
        if body.version != next_version:
            return f"version {body.version} of fragment {body.fragment}, the next is {next_version}"
        if not 1 <= body.ballot.term <= entry.term:
            return f"ballot {body.ballot} in an entry of term {entry.term}"
        return (
            self._members_fault(body)
            or self._numbers_fault(body, self._fragments[body.fragment])
            or stripes_fault(body.stripes, regions=self._regions, blocks=self._blocks[body.fragment])
        )

    def _members_fault(self, body: RoundBody) -> str:
        names = [member.contribution.learner for member in body.members]
        if not names or names != sorted(set(names)):
            return f"members {', '.join(names) or '(none)'}: each once, sorted, at least one"
        for member in body.members:
            fault = self._region_fault(member.contribution.learner) or self._contribution_fault(
                member.contribution, body
            )
            if fault:
                return fault
        return ""

    def _contribution_fault(self, one: Contribution, body: RoundBody) -> str:
        if one.fragment != body.fragment:
            return f"{one.learner} contributes to fragment {one.fragment}, the round is of {body.fragment}"
        if not 0 <= one.base_version < body.version:
            return f"{one.learner}'s base is version {one.base_version} for a round to version {body.version}"
        incarnation, version = self._facts.get(("included", one.learner, one.fragment), (-1, -1))
        if one.incarnation < incarnation:
            return f"incarnation {one.incarnation} of {one.learner} after {incarnation} was included"
        if one.incarnation == incarnation and one.base_version < version:
            return f"{one.learner}'s base is version {one.base_version}, it was included in {version}"
        fault = refusal(one, len(self._fragments[body.fragment].pieces))
        return (f"{one.learner} {fault}" if fault else "") or self._account_fault(one) or self._incarnation_fault(one)

    @staticmethod
    def _numbers_fault(body: RoundBody, fragment: Fragment) -> str:
        weights = [member.weight for member in body.members]
        if len(body.factors) != len(fragment.pieces):
            return f"{len(body.factors)} factors for {len(fragment.pieces)} pieces"
        if not any(weights) or any(weight < 0.0 for weight in weights) or not 0.0 < body.share <= 1.0:
            return f"weights {weights} with share {body.share}"
        if any(to_float32(number) != number for number in (*weights, *body.factors, body.share)):
            return "a weight, factor or share that is no float32"
        return ""
