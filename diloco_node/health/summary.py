"""The health of a run in one state, one line and its alerts: of one status document, or of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import find_alerts
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
    """The same of several regions: the worst state, each alert once, the least tolerance. Of none: nothing is known."""
    known = [(one, part(one, "health") or health_of(one)) for one in documents if text(one, "state")]
    if not known:
        return {"state": "starting", "line": "no region answers", "failure_tolerance": 0, "alerts": []}
    found = {
        (text(one, "code"), text(one, "region")): dict(one) for _, health in known for one in rows(health, "alerts")
    }
    alerts = sorted(found.values(), key=_severity_rank)
    state = min((text(health, "state") for _, health in known), key=_state_rank)
    document = next(one for one, health in known if text(health, "state") == state)
    return {
        "state": state,
        "line": _line(document, state, alerts),
        "failure_tolerance": min(int(number(health, "failure_tolerance") or 0) for _, health in known),
        "alerts": alerts[:ALERTS_SHOWN_MAX],
    }


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
    if any(one["code"] in STALLS for one in alerts):
        return "stalled"
    if said == "starting" or (isinstance(versions, list) and -1 in versions):
        return "starting"
    return "degraded" if any(one["severity"] != kinds.INFO for one in alerts) else "healthy"


def _line(document: Document, state: str, alerts: Sequence[Document]) -> str:
    if state == "finished":
        return text(document, "reason") or "finished"
    if alerts:
        first = alerts[0]
        more = f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else ""
        about = "" if first["region"] in first["text"] else f"{first['region']}: "
        return f"{state}: {about}{first['text']}{more}"
    if state == "starting":
        return f"starting: {text(document, 'reason')}".rstrip(": ")
    tolerance, age_s = failure_tolerance(document), number(document, "commit_age_seconds")
    may_fail = f"{tolerance} more may fail" if tolerance else "none may fail"
    merged = "" if age_s is None else f", merged {duration(age_s)} ago"
    return f"{state}: {alive_count(document)} of {region_count(document)} regions, {may_fail}{merged}"
