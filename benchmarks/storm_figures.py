"""What the logs of benchmarks/storm_peers.py say: how much of the work ended in the model. Pure.

An event is one line of a rank's log: `kind`, `at` in seconds of the monotonic clock, `rank`, and what belongs to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank that was killed, and when."""

    at: float
    rank: int


def events_of(folder: Path, ranks: int) -> list[Event]:
    """All ranks' events, in the order of their time."""
    events = []
    for rank in range(ranks):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events += [{**json.loads(line), "rank": rank} for line in lines]
    return sorted(events, key=lambda one: one["at"])


def commits_kept(events: Sequence[Event], begun_s: float, end_s: float) -> tuple[float, list[float]]:
    """torchft: tokens in the model at the end, less those at the beginning, and the times of the commits kept."""
    before, after = (_kept(events, until_s) for until_s in (begun_s, end_s))
    tokens = sum(one["tokens"] for one in after) - sum(one["tokens"] for one in before)
    return tokens, [one["at"] for one in after if one["at"] > begun_s]


def _kept(events: Sequence[Event], until_s: float) -> list[Event]:
    """The commits that are in the model at a time.

    An outer step is named by its number and its quorum. When one with the same or a lower number comes under another
    quorum, the run has gone back: what was committed from that number on is lost.
    """
    kept: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["kind"] == "commit" and event["at"] <= until_s:
            name = (event["step"], event["quorum"])
            if name not in kept:
                kept = {other: parts for other, parts in kept.items() if other[0] < event["step"]}
            kept.setdefault(name, []).append(event)
    return sorted((one for parts in kept.values() for one in parts), key=lambda one: one["at"])


def steps_kept(events: Sequence[Event], kills: Sequence[Kill], begun_s: float, end_s: float) -> tuple[int, list[float]]:
    """Elastic DDP: optimizer steps in the model at the end that were not at the beginning, and the times of new ones.

    Steps that were lost and made again count once. At the end the last checkpoint counts, if somebody was killed since
    the last step.
    """
    reached = [0, 0]
    for which, until_s in enumerate((begun_s, end_s)):
        steps = [one for one in events if one["kind"] == "step" and one["rank"] == 0 and one["at"] <= until_s]
        if steps:
            reached[which] = steps[-1]["step"]
            if any(steps[-1]["at"] < kill.at <= until_s for kill in kills):
                saved = [one["step"] for one in events if one["kind"] == "saved" and one["at"] <= until_s]
                reached[which] = max(saved, default=0)
    times, most = [], reached[0]
    for one in events:
        if one["kind"] == "step" and one["rank"] == 0 and begun_s < one["at"] <= end_s and one["step"] > most:
            most = one["step"]
            times.append(one["at"])
    return reached[1] - reached[0], times


def return_s(events: Sequence[Event], kills: Sequence[Kill], end_s: float) -> list[float]:
    """Of each kill, how long until that rank's work was in the model again; without those after which it never was."""
    found = []
    for kill in kills:
        after = [
            one["at"]
            for one in events
            if one["rank"] == kill.rank
            and kill.at < one["at"] <= end_s
            and (one["kind"] == "step" or one.get("tokens"))
        ]
        if after:
            found.append(after[0] - kill.at)
    return found
