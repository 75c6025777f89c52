"""The health of a run in one state, one line and its alerts: of one status document, or of several."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import cut_off, find_alerts
from diloco_node.health.reading import Document, duration, number, part, rows, text
from diloco_node.health.tolerance import alive_count, failure_tolerance, region_count

STATES: Final = ("stalled", "degraded", "starting", "healthy", "finished")
"""Worst first."""

STALLS: Final = frozenset({kinds.NO_MAJORITY.code, kinds.NO_COMMIT.code})
ALERTS_SHOWN_MAX: Final = 64


def health_of(document: Document) -> dict[str, Any]:
    """State, line, failure tolerance and alerts, ready for JSON, of one region's document without its `health`."""
    alerts = [dataclasses.asdict(one) for one in find_alerts(document)][:ALERTS_SHOWN_MAX]
    state = _state(document, alerts)
    return {
        "state": state,
        "line": _line(document, state, alerts),
        "failure_tolerance": failure_tolerance(document),
        "alerts": alerts,
    }


def joint_health(documents: Sequence[Document]) -> dict[str, Any]:
    """The same of several regions. Of none: nothing is known.

    The state is the worst, each alert comes once, the tolerance is the least. But a region that can't merge does not
    stall a run that others carry on: then it counts as cut off, and only theirs is the tolerance. One that starts
    knows no other region, and has no say in it.
    """
    known = [(one, part(one, "health") or health_of(one)) for one in documents if text(one, "state")]
    if not known:
        return {"state": "starting", "line": "no region answers", "failure_tolerance": 0, "alerts": []}
    well = [one for one, health in known if text(health, "state") in ("healthy", "degraded")]
    going = [(one, health) for one, health in known if not _is_left_behind(health, well)]
    alerts = _joint_alerts(known, is_carried=bool(well))
    states = [text(health, "state") for _, health in going] + ["degraded"] * (len(going) < len(known))
    state = min(states, key=_state_rank)
    document = next((one for one, health in going if text(health, "state") == state), going[0][0])
    told = [number(health, "failure_tolerance") or 0 for _, health in going if text(health, "state") != "starting"]
    return {
        "state": state,
        "line": _line(document, state, alerts),
        "failure_tolerance": int(min(told, default=0)),
        "alerts": alerts[:ALERTS_SHOWN_MAX],
    }


def _is_left_behind(health: Document, well: Sequence[Document]) -> bool:
    """Whether a region can't merge while others do: one without a majority, when others have one; else when another
    has seen a commit. One that has just started has not, and proves nothing."""
    if text(health, "state") != "stalled":
        return False
    if kinds.NO_MAJORITY.code in {text(one, "code") for one in rows(health, "alerts")}:
        return bool(well)
    return any("commit_age_seconds" not in one or number(one, "commit_age_seconds") is not None for one in well)


def _joint_alerts(known: Sequence[tuple[Document, Document]], *, is_carried: bool) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for document, health in known:
        for one in rows(health, "alerts"):
            is_cut_off = is_carried and text(one, "code") == kinds.NO_MAJORITY.code
            alert = dataclasses.asdict(cut_off(document)) if is_cut_off else dict(one)
            is_of_run = text(alert, "code") == kinds.LAST_MAJORITY.code  # whichever region says so
            found.setdefault((text(alert, "code"), "" if is_of_run else text(alert, "region")), alert)
    return sorted(found.values(), key=_severity_rank)


def said_of_region(alert: Document) -> str:
    """What an alert says, with the region that it is about."""
    region, said = text(alert, "region"), text(alert, "text")
    return said if not region or region in _WORD.findall(said) else f"{region}: {said}"


_WORD: Final = re.compile(r"[\w.-]+")


def _severity_rank(alert: Document) -> int:
    severity = text(alert, "severity")
    return kinds.SEVERITIES.index(severity) if severity in kinds.SEVERITIES else len(kinds.SEVERITIES)


def _state_rank(state: str) -> int:
    return STATES.index(state) if state in STATES else 0


def _state(document: Document, alerts: Sequence[Document]) -> str:
    said = text(document, "state")
    versions = document.get("versions")
    if said == "finished":
        return "finished"
    if any(text(one, "code") in STALLS for one in alerts):
        return "stalled"
    if said == "starting" or (isinstance(versions, list) and -1 in versions):
        return "starting"
    return "degraded" if any(text(one, "severity") != kinds.INFO for one in alerts) else "healthy"


def _line(document: Document, state: str, alerts: Sequence[Document]) -> str:
    if state == "finished":
        return text(document, "reason") or "finished"
    grave = [one for one in alerts if text(one, "severity") != kinds.INFO]
    if grave:
        more = f" (and {len(grave) - 1} more)" if len(grave) > 1 else ""
        return f"{state}: {said_of_region(grave[0])}{more}"
    if state == "starting":
        return f"starting: {text(document, 'reason')}".rstrip(": ")
    tolerance, age_s = failure_tolerance(document), number(document, "commit_age_seconds")
    may_fail = f"{tolerance} more may fail" if tolerance else "none may fail"
    merged = ", no merge seen yet" if "commit_age_seconds" in document else ""
    if age_s is not None:
        merged = f", merged {duration(age_s)} ago"
    return f"{state}: {alive_count(document)} of {region_count(document)} regions, {may_fail}{merged}"
