"""Finished runs, kept one a line, and tables of those of `quality.py`: each setting beside data-parallel.

    python benchmarks/quality_lines.py [runs/quality.jsonl]

The gap is the mean over seeds of the loss above data-parallel's of the same size, learners, steps and seed, with its
standard error. Where several inner rates were tried, the one with most seeds counts, then the lowest mean.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REFERENCE: Final = "data_parallel"
SAME_RUN: Final = ("size", "learners", "steps")
SETTING: Final = ("arm", *SAME_RUN, "every", "codec", "merge", "outer")


class Lines:
    """Finished runs in a file of JSON lines, so that a benchmark goes on where it was stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {record["key"]: record for record in records_in(path)}

    def record(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is known of a run, from the file or from running it. key: names everything that it depends on."""
        if key not in self._known:
            self._known[key] = record = {"key": key, **run()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_cut = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            with self._path.open("a") as file:
                file.write("\n" * is_cut + json.dumps(record) + "\n")
            shown = [f"{name} {value}" for name, value in record.items() if isinstance(value, (str, int, float))]
            print(*shown[1:], sep=", ", file=sys.stderr, flush=True)
        return self._known[key]


def records_in(path: Path) -> list[dict[str, Any]]:
    """All of a file, none if there is no such file; a run cut off in the middle of its line is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@dataclass(frozen=True, slots=True)
class Setting:
    """All seeds of one setting at its inner rate.

    Attributes:
        facts: of its first record. losses: by seed.
        gaps: percent above data-parallel, of each seed that it has too. tried: mean loss by inner rate.
        bits: up, per parameter and 1,000 tokens of a learner. autocorrelation: per fragment.
    """

    facts: dict[str, Any]
    losses: dict[int, float]
    gaps: tuple[float, ...]
    tried: dict[float, float]
    bits: float
    autocorrelation: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Mean over the seeds; NaN without data-parallel."""
        return statistics.fmean(self.gaps) if self.gaps else math.nan

    @property
    def error(self) -> float:
        """Standard error of the gap; 0 of a single seed."""
        return statistics.stdev(self.gaps) / math.sqrt(len(self.gaps)) if len(self.gaps) > 1 else 0.0

    @property
    def gap_words(self) -> str:
        """As in a table: gap and standard error."""
        return f"{self.gap:+.2f} % ± {self.error:.2f}" if self.error else f"{self.gap:+.2f} %" if self.gaps else ""


def settings_of(records: Iterable[dict[str, Any]]) -> list[Setting]:
    """Records in the order of their settings: by size, learners, steps, then bits."""
    settings: dict[tuple[Any, ...], dict[float, dict[int, dict[str, Any]]]] = {}
    for record in records:
        rates = settings.setdefault(tuple(record.get(name) for name in SETTING), {})
        rates.setdefault(record["rate"], {})[record["seed"]] = record
    chosen = {setting: _chosen(rates) for setting, rates in settings.items()}
    references = {
        tuple(first[name] for name in SAME_RUN): runs
        for runs in chosen.values()
        if (first := next(iter(runs.values())))["arm"] == REFERENCE
    }
    result = []
    for setting, runs in chosen.items():
        first = next(iter(runs.values()))
        reference = references.get(tuple(first[name] for name in SAME_RUN), {})
        gaps = [
            100 * (run["loss"] / reference[seed]["loss"] - 1) for seed, run in sorted(runs.items()) if seed in reference
        ]
        waves = [run["autocorrelation"] for run in runs.values() if run.get("autocorrelation")]
        result.append(
            Setting(
                first,
                {seed: run["loss"] for seed, run in sorted(runs.items())},
                () if first["arm"] == REFERENCE else tuple(gaps),
                {rate: _mean(tried) for rate, tried in sorted(settings[setting].items())},
                statistics.fmean(run.get("bits", 0.0) for run in runs.values()),
                tuple(statistics.fmean(fragment) for fragment in zip(*waves, strict=True)),
            )
        )
    return sorted(result, key=lambda setting: (*_run_of(setting), setting.facts["arm"] != REFERENCE, setting.bits))


def _run_of(setting: Setting) -> tuple[Any, ...]:
    return tuple(setting.facts[name] for name in ("parameters", "learners", "steps"))


def _chosen(rates: dict[float, dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    return min(rates.values(), key=lambda runs: (-len(runs), _mean(runs)))


def _mean(runs: dict[int, dict[str, Any]]) -> float:
    return statistics.fmean(run["loss"] for run in runs.values())


def read(path: Path) -> list[Setting]:
    """The settings of a file, of its newest revision."""
    records = records_in(path)
    revisions = [json.loads(record["key"])[0] for record in records]
    newest = max(revisions, default=0)
    return settings_of(record for record, revision in zip(records, revisions, strict=True) if revision == newest)


def table(settings: Sequence[Setting]) -> str:
    """Markdown. Bits are those up, per parameter and 1,000 tokens of a learner; the last column is per fragment."""
    lines = [
        "| size, M, steps | arm | H | codec, merge, outer | rate | seeds | loss | to data-parallel | bits | lag 1 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        facts = setting.facts
        how = ", ".join(facts[name] for name in ("codec", "merge", "outer") if name in facts)
        waves = " ".join(f"{value:.2f}" for value in setting.autocorrelation)
        losses = f"{statistics.fmean(setting.losses.values()):.4f}"
        lines.append(
            f"| {facts['size']}, {facts['learners']}, {facts['steps']} | {facts['arm']} | {facts.get('every', '')} "
            f"| {how} | {facts['rate']:g} | {len(setting.losses)} | {losses} | {setting.gap_words} "
            f"| {setting.bits:.2f} | {waves} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and what each inner rate came to where several were tried."""
    settings = read(Path(arguments[0] if arguments else "runs/quality.jsonl"))
    print(table(settings))
    for setting in settings:
        if len(setting.tried) > 1:
            what = ", ".join(str(setting.facts[name]) for name in SETTING if name in setting.facts)
            print(what, *(f"{rate:g}: {loss:.4f}" for rate, loss in setting.tried.items()), sep="; ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
