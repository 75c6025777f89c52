"""The demo's report: put together from what the regions left on disk, and checked against it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diloco_node.core.ledger.entries import verify_chain
from diloco_node.core.ledger.summary import RunSummary, summary_of
from diloco_node.core.types import DiskNamedBody, Entry, FragmentPosition, LearnerStatus, LedgerBase, RoundBody
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.errors import StorageError
from diloco_node.lab.chaos.story import RunSample, TimedMerge, timed_merges
from diloco_node.lab.demo.account_check import AccountReport, check_account
from diloco_node.lab.demo.demo_options import CONTEXT
from diloco_node.lab.demo.row_count import count_rows
from diloco_node.storage.store import RegionStore
from diloco_node.storage.trained import read_trained

REGION_FIELDS = (
    "inner_steps",
    "tokens",
    "loss_first",
    "loss_last",
    "val_loss",
    "versions",
    "digest",
    "participation",
    "wire_bytes_out",
    "wire_bytes_in",
)


def read_region_report(state_dir: Path) -> dict[str, Any]:
    """Read the report that a region's daemon left at its end.

    Raises StorageError: there is none: the daemon did not end in order.
    """
    path = state_dir / REPORT_NAME
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} can't be read ({error}); the region did not end in order, see its logs") from error
    return report


def longest_ledger(state_dirs: Sequence[Path], fragments: int) -> tuple[LedgerBase, tuple[Entry, ...]]:
    """The base and entries of the longest ledger of all regions, its hash chain checked; every other one must be a part
    of it.

    Raises StorageError: two regions have different entries at one index below both ends.
    """
    ledgers = []
    for state_dir in state_dirs:
        recovery = RegionStore(state_dir, is_read_only=True).load(fragments)
        ledgers.append((recovery.base, recovery.entries))
    base, longest = max(ledgers, key=lambda ledger: ledger[0].index + len(ledger[1]))
    verify_chain(longest, previous_index=base.index, previous_hash=base.hash)
    hashes = {entry.index: entry.hash for entry in longest}
    for state_dir, (_, entries) in zip(state_dirs, ledgers, strict=True):
        for ours in entries:
            if ours.hash != hashes.get(ours.index, ours.hash):
                raise StorageError(f"{state_dir}: entry {ours.index} differs from the other regions' ledgers")
    return base, longest


def check_folder(
    folder: Path, regions: Sequence[str], positions: dict[str, LearnerStatus], *, former: Sequence[str] = ()
) -> AccountReport:
    """Recompute the token account of a finished run from its regions' folders.

    former: regions that have left: their ledgers end early, their learners' counts go in.

    Raises StorageError: a folder is damaged or incomplete.
    """
    sizes, base, entries = _ledger(folder, regions)
    summary = summary_of(base, fragments=len(sizes))
    counters = {
        (region, counter.incarnation): (counter.steps, counter.tokens)
        for region in (*regions, *former)
        for counter in read_trained(folder / region)
    }
    return check_account(
        entries,
        counters,
        fragment_sizes=sizes,
        positions=positions,
        summary=summary,
        lost_regions=_replaced(summary, entries),
    )


def read_merges(folder: Path, regions: Sequence[str], samples: Sequence[RunSample]) -> list[TimedMerge] | None:
    """The rounds of a finished run at the times of its samples; None of a long run, whose first ones are summed up.

    Raises StorageError: a folder is damaged or incomplete.
    """
    sizes, base, entries = _ledger(folder, regions)
    return timed_merges(entries, samples, sizes) if base.index == 0 else None


def _replaced(summary: RunSummary | None, entries: Iterable[Entry]) -> set[str]:
    """Regions whose folder was lost and replaced in the run."""
    names = {entry.body.region for entry in entries if isinstance(entry.body, DiskNamedBody) and not entry.body.disk}
    if summary is not None:
        names |= {line.region for line in summary.members if line.folders > 1 or (line.folders and not line.disk)}
    return names


def build_report(
    folder: Path,
    regions: Sequence[str],
    *,
    former: Sequence[str] = (),
    wan: dict[str, Any] | None = None,
    row_tokens: int | None = CONTEXT,
) -> dict[str, Any]:
    """The demo's report, one JSON object; the fields are described in docs/lab/demo.md.

    Args:
        folder: with one folder per region, all daemons ended. regions: the members at the end.
        former: regions that have left before.
        wan: what a demo on an emulated WAN adds (see `lab.demo.demo_wan`); None without one.
        row_tokens: of a row of the data; None: not known, so rows in no merge are counted and not judged.

    Raises StorageError: something that a finished run has is missing or damaged.
    """
    reports = {region: read_region_report(folder / region) for region in regions}
    sizes, base, entries = _ledger(folder, regions)
    summary = summary_of(base, fragments=len(sizes))
    rounds_before = 0 if summary is None else summary.rounds_committed
    positions = {
        region: learner_status(report["learner"])
        for region, report in reports.items()
        if report.get("learner") is not None
    }
    account = check_folder(folder, regions, positions, former=former)
    digests = {report["digest"] for report in reports.values()}
    global_losses = [report["val_loss_global"] for report in reports.values() if report["val_loss_global"] is not None]
    return {
        "regions": [{"name": region, **{key: reports[region][key] for key in REGION_FIELDS}} for region in regions],
        "rounds_committed": rounds_before + sum(isinstance(entry.body, RoundBody) for entry in entries),
        "rounds_in_flight_max": max(report["rounds_in_flight_max"] for report in reports.values()),
        "learner_blocked_seconds": sum(report["learner_blocked_seconds"] for report in reports.values()),
        "tokens": {
            "trained": account.trained,
            "merged": account.merged,
            "carried": account.carried,
            "discarded": account.discarded,
            "balanced": account.balanced,
            "faults": list(account.faults),
            "uncounted": [{"learner": learner, "incarnation": number} for learner, number in account.uncounted],
        },
        "data": _data(entries, sizes, account, row_tokens=row_tokens, has_lost=bool(_replaced(summary, entries)))
        if summary is None
        else None,
        "equal_digests": len(digests) == 1 and None not in digests,
        "val_loss_global": max(global_losses) if global_losses else None,
        "wan": wan,
        "folder": str(folder.resolve()),
    }


def _data(
    entries: Sequence[Entry],
    sizes: Sequence[int],
    account: AccountReport,
    *,
    row_tokens: int | None = CONTEXT,
    has_lost: bool,
) -> dict[str, Any]:
    """Return the count of the rows, and what is wrong with it.

    A region that lost its folder may train a row again that was on its way, and its discarded steps are not all known.
    """
    count, free = count_rows(entries, sizes), account.discarded + account.carried
    faults = []
    if count.twice and not has_lost:
        faults.append(f"{count.twice} rows are merged twice")
    # These sums are rounded to a token.
    if row_tokens is not None and count.unmerged * row_tokens > free + 1 and not has_lost:
        faults.append(f"{count.unmerged:.0f} rows are in no merge, and only {free:,} tokens are discarded or carried")
    return {
        "rows": count.rows,
        "merged": round(count.merged),
        "unmerged": round(count.unmerged),
        "twice": count.twice,
        "faults": faults,
    }


def learner_status(document: dict[str, Any]) -> LearnerStatus:
    """A learner's status as it stands in report.json."""
    return LearnerStatus(
        incarnation=document["incarnation"],
        step=document["step"],
        tokens=document["tokens"],
        step_time_ns=int(document["step_seconds"] * 1e9),
        positions=tuple(FragmentPosition(**position) for position in document["positions"]),
        finished=document["finished"],
    )


def _ledger(folder: Path, regions: Sequence[str]) -> tuple[list[int], LedgerBase, tuple[Entry, ...]]:
    """The size of each fragment, then the longest ledger."""
    state_dirs = [folder / region for region in regions]
    manifest = load_manifest(state_dirs[0])
    if manifest is None:
        raise StorageError(f"{state_dirs[0]}: the region never learnt its model; see logs/learner.log there")
    return [fragment.size for fragment in manifest.fragments], *longest_ledger(state_dirs, len(manifest.fragments))
