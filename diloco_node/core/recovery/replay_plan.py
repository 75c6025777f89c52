"""The part of a run that can be computed again from a region's files: from what, by which rounds, to which digests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_node.core.ledger.summary import RunSummary
from diloco_node.core.types import Entry, ExtendedBody, FinishedBody, GenesisBody, RoundBody, SnapshotBody


@dataclass(frozen=True, slots=True)
class FragmentReplay:
    """How one fragment comes to its last version, by the rounds after a start.

    start: version of the state that it begins with; 0 is Theta_0. -1: there is no way.
    digests: that the ledger names for versions from `start` on.
    lack: what is missing for an earlier start; empty if that is version 0.
    """

    fragment: int
    start: int
    rounds: tuple[RoundBody, ...]
    digests: Mapping[int, bytes]
    lack: str = ""


def find_genesis(summary: RunSummary | None, entries: Iterable[Entry]) -> GenesisBody | None:
    """The ledger's genesis; None before there is one."""
    if summary is not None:
        return summary.genesis[0]
    return next((entry.body for entry in entries if isinstance(entry.body, GenesisBody)), None)


def find_end(summary: RunSummary | None, entries: Iterable[Entry]) -> FinishedBody | None:
    """The end of the run; None: the ledger has none, or an extension after it."""
    end = None if summary is None else next(iter(summary.finished), None)
    for entry in entries:
        if isinstance(entry.body, FinishedBody | ExtendedBody):
            end = entry.body if isinstance(entry.body, FinishedBody) else None
    return end


def plan_replay(
    genesis: GenesisBody,
    summary: RunSummary | None,
    entries: Sequence[Entry],
    states: Sequence[Collection[int]],
    payloads: Collection[tuple[int, int, bytes]],
) -> list[FragmentReplay]:
    """For each fragment the earliest start from which nothing is missing.

    A state counts as a start only if the ledger names its digest: what comes of it is checked from the first byte on.

    summary: of what is before `entries`; None: nothing is. states: per fragment the versions on disk.
    payloads: (fragment, version, digest) on disk.
    """
    rounds, digests = rounds_of(entries, len(states)), digests_of(genesis, summary, entries)
    last = [0] * len(states) if summary is None else list(summary.versions)
    return [
        _plan_fragment(fragment, max([last[fragment], *rounds[fragment]]), rounds[fragment], digests[fragment], on_disk)
        for fragment, on_disk in enumerate(_on_disk(states, payloads))
    ]


def rounds_of(entries: Iterable[Entry], fragments: int) -> list[dict[int, RoundBody]]:
    """Per fragment the rounds in the entries, by version."""
    rounds: list[dict[int, RoundBody]] = [{} for _ in range(fragments)]
    for entry in entries:
        if isinstance(entry.body, RoundBody):
            rounds[entry.body.fragment][entry.body.version] = entry.body
    return rounds


def digests_of(genesis: GenesisBody, summary: RunSummary | None, entries: Iterable[Entry]) -> list[dict[int, bytes]]:
    """Per fragment the digests that the ledger names, by version."""
    digests = [{0: digest} for digest in genesis.fragment_digests]
    snapshots = [] if summary is None else list(summary.snapshots)
    snapshots += [entry.body for entry in entries if isinstance(entry.body, SnapshotBody)]
    for snapshot in snapshots:
        digests[snapshot.fragment][snapshot.version] = snapshot.digest
    return digests


def _on_disk(
    states: Sequence[Collection[int]], payloads: Collection[tuple[int, int, bytes]]
) -> list[tuple[set[int], set[tuple[int, bytes]]]]:
    versions_on_disk: list[tuple[set[int], set[tuple[int, bytes]]]] = [(set(versions), set()) for versions in states]
    for fragment, version, digest in payloads:
        versions_on_disk[fragment][1].add((version, digest))
    return versions_on_disk


def _plan_fragment(
    fragment: int,
    last: int,
    rounds: Mapping[int, RoundBody],
    digests: Mapping[int, bytes],
    on_disk: tuple[set[int], set[tuple[int, bytes]]],
) -> FragmentReplay:
    states, payloads = on_disk
    lack = "" if 0 in states else f"the state of fragment {fragment} at version 0"
    for start in sorted(states & digests.keys()):
        missing = _missing(fragment, range(start + 1, last + 1), rounds, payloads)
        if not missing:
            digests_from_start = {version: digest for version, digest in digests.items() if version >= start}
            bodies = tuple(rounds[version] for version in range(start + 1, last + 1))
            return FragmentReplay(fragment, start, bodies, digests_from_start, "" if start == 0 else lack)
        lack = lack or missing
    if not states & digests.keys():
        lack = f"a state of fragment {fragment} whose digest the ledger names"
    return FragmentReplay(fragment, -1, (), {}, lack)


def _missing(
    fragment: int, versions: Iterable[int], rounds: Mapping[int, RoundBody], payloads: set[tuple[int, bytes]]
) -> str:
    """The first thing that is not there; empty if all is."""
    for version in versions:
        if version not in rounds:
            return f"the ledger's entry of fragment {fragment} version {version}, which is summed up"
        if (version, rounds[version].payload_digest) not in payloads:
            return f"the payload of fragment {fragment} version {version}"
    return ""
