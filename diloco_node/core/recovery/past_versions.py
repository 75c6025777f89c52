"""The versions of the whole model that a run went through, and those that a region's files can give back.

Fragments are merged one after the other, so their versions differ at most times. The model gets to version N with the
ledger's entry that takes its last fragment there. Other fragments may be further by then, and each has one version: all
regions find the same ones, and their bytes are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from diloco_node.core.bounds import INCARNATION_MAX
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import RunSummary, summed_roster
from diloco_node.core.recovery.replay_plan import FragmentReplay, digests_of, rounds_of
from diloco_node.core.types import Entry, GenesisBody, RoundBody


@dataclass(frozen=True, slots=True)
class PastVersion:
    """The run at the entry with which its last fragment got to a version.

    number: N, the lowest version of a fragment. versions: per fragment, N or later.
    step: of the median learner, by the steps that were booked until then. tokens: merged, mean over the fragments.
    """

    number: int
    versions: tuple[int, ...]
    step: int
    tokens: int


def past_versions(
    genesis: GenesisBody, summary: RunSummary | None, base_index: int, entries: Sequence[Entry]
) -> tuple[PastVersion, ...]:
    """The versions that were reached in these entries, in order, without gaps.

    Args:
        summary: of the entries up to `base_index`; None: there are none. entries: those after it, committed ones only.
    """
    fragments = len(genesis.fragment_digests)
    account, versions = Account(), [0] * fragments
    past: list[PastVersion] = []
    if summary is None:
        past.append(PastVersion(0, tuple(versions), 0, 0))
    else:
        account.restore(summary, base_index)
        versions = list(summary.versions)
    number, roster = min(versions), Roster() if summary is None else summed_roster(summary)
    for entry in entries:
        roster = roster.after(entry)
        account.take(entry)
        account.settle(entry.index)
        if isinstance(entry.body, RoundBody):
            versions[entry.body.fragment] = entry.body.version
            if min(versions) > number:
                number = min(versions)
                steps = [account.steps_before(name, INCARNATION_MAX + 1) for name in roster.names]
                # The run never goes back, also where a learner joins late.
                step = max(median_low([count for count in steps if count] or [0]), past[-1].step if past else 0)
                past.append(PastVersion(number, tuple(versions), step, account.merged_tokens(fragments)))
    return tuple(past)


class ReachableVersions:
    """The versions of each fragment that can be computed from a region's files.

    Args:
        states: per fragment the versions on disk. payloads: (fragment, version, digest) on disk.
    """

    def __init__(
        self,
        genesis: GenesisBody,
        summary: RunSummary | None,
        entries: Sequence[Entry],
        states: Sequence[Collection[int]],
        payloads: Collection[tuple[int, int, bytes]],
    ) -> None:
        self._rounds = rounds_of(entries, len(states))
        self._digests = digests_of(genesis, summary, entries)
        self._starts = [
            _nearest_starts(fragment, on_disk, self._rounds[fragment], payloads)
            for fragment, on_disk in enumerate(states)
        ]

    def lack(self, past: PastVersion) -> str:
        """The first thing that is missing for a version, in words; empty if nothing is."""
        for fragment, version in enumerate(past.versions):
            starts = self._starts[fragment]
            if version not in starts:
                before = max((start for start in starts if start < version), default=None)
                if before is None:
                    return f"a state of fragment {fragment} at version {version} or earlier"
                return f"the payload of fragment {fragment} version {before + 1}"
        return ""

    def plan(self, past: PastVersion) -> tuple[FragmentReplay, ...]:
        """How each fragment is computed, from the nearest state before it; nothing is lacking."""
        plan = []
        for fragment, version in enumerate(past.versions):
            start = self._starts[fragment][version]
            bodies = tuple(self._rounds[fragment][step] for step in range(start + 1, version + 1))
            plan.append(FragmentReplay(fragment, start, bodies, self._digests[fragment]))
        return tuple(plan)


def _nearest_starts(
    fragment: int,
    states: Collection[int],
    rounds: Mapping[int, RoundBody],
    payloads: Collection[tuple[int, int, bytes]],
) -> dict[int, int]:
    """By each version that can be computed, the newest state on the way to it."""
    starts: dict[int, int] = {}
    for version in sorted({*states, *rounds}):
        if version in states:
            starts[version] = version
        elif version - 1 in starts and (fragment, version, rounds[version].payload_digest) in payloads:
            starts[version] = starts[version - 1]
    return starts
