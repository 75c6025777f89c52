"""The health of a run in one state, one line and its alerts: of one status document, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import cut_off, find_alerts, starting_peers
from diloco_node.health.finding import Finding, Mark, alert_document, read_alert
from diloco_node.health.reading import Document, duration, number, rows, section, text
from diloco_node.health.tolerance import alive_count, failure_tolerance, has_majority, region_count, training_tolerance

STATES: Final = ("stalled", "degraded", "starting", "healthy", "finished")
"""Worst first."""

STALLS: Final = frozenset({kinds.NO_MAJORITY.code, kinds.NO_COMMIT.code})
ALERTS_SHOWN_MAX: Final = 64
_NO_TOLERANCE: Final = {"failure_tolerance": 0, "training_tolerance": 0}


def health_of(document: Document) -> dict[str, Any]:
    """Summarize one region's document without its `health`: state, line, both tolerances and alerts, for JSON."""
    alerts = find_alerts(document)[:ALERTS_SHOWN_MAX]
    state = _state(document, alerts)
    return {
        "state": state,
        "line": _line(document, state, alerts),
        "failure_tolerance": failure_tolerance(document),
        "training_tolerance": training_tolerance(document),
        "alerts": [alert_document(alert) for alert in alerts],
    }


def joint_health(documents: Sequence[Document]) -> dict[str, Any]:
    """Summarize several regions in the same way. Without any region nothing is known.

    The state is the worst, each alert comes once, the tolerance is the least. But a region that can't merge does not
    stall a run that others carry on. It counts as cut off, and only the others' tolerance holds. A region that starts
    knows no other one, and does not change the tolerance.
    """
    summaries = [
        (document, section(document, "health") or health_of(document))
        for document in documents
        if text(document, "state")
    ]
    if not summaries:
        return {"state": "starting", "line": "no region answers", **_NO_TOLERANCE, "alerts": []}
    sound = [document for document, health in summaries if text(health, "state") in ("healthy", "degraded")]
    going = [(document, health) for document, health in summaries if not _is_left_behind(health, sound)]
    alerts = _joint_alerts(summaries, is_carried=bool(sound))
    states = [text(health, "state") for _, health in going] + ["degraded"] * (len(going) < len(summaries))
    state = min(states, key=lambda state: STATES.index(state) if state in STATES else 0)
    worst = next((document for document, health in going if text(health, "state") == state), going[0][0])
    running = [health for _, health in going if text(health, "state") != "starting"]
    beginnings_unix = [
        since for _, health in going if text(health, "state") == state and (since := number(health, "since_unix"))
    ]
    return {
        "state": state,
        "since_unix": min(beginnings_unix, default=None),
        "line": _line(worst, state, alerts),
        # A peer's word may be any number.
        **{
            name: max(0, int(min((number(health, name) or 0 for health in running), default=0)))
            for name in _NO_TOLERANCE
        },
        "alerts": [alert_document(alert) for alert in alerts[:ALERTS_SHOWN_MAX]],
    }


def joint_alerts(documents: Sequence[Document]) -> list[Finding]:
    """List the alerts of several regions, each once, the worst first."""
    return [read_alert(alert) for alert in rows(joint_health(documents), "alerts")]


def _is_left_behind(health: Document, sound: Sequence[Document]) -> bool:
    """Whether a region can't merge while others do.

    A region without a majority is left behind if others have one. A region without commits is left behind if another
    has seen one: a region that has just started has not, and proves nothing.
    """
    if text(health, "state") != "stalled":
        return False
    if kinds.NO_MAJORITY.code in {text(alert, "code") for alert in rows(health, "alerts")}:
        return bool(sound)
    return any(
        "commit_age_seconds" not in document or number(document, "commit_age_seconds") is not None for document in sound
    )


def _joint_alerts(summaries: Sequence[tuple[Document, Document]], *, is_carried: bool) -> list[Finding]:
    unique: dict[tuple[str, str], Finding] = {}
    for document, health in summaries:
        for alert in map(read_alert, rows(health, "alerts")):
            is_cut_off = is_carried and alert.code == kinds.NO_MAJORITY.code
            finding = cut_off(document) if is_cut_off else alert
            is_of_run = finding.code in (kinds.LAST_MAJORITY.code, kinds.MERGES_LATE.code)  # whichever region raises it
            unique.setdefault((finding.code, "" if is_of_run else finding.region), finding)
    return sorted(unique.values(), key=lambda alert: tuple(Mark).index(alert.mark))


def _state(document: Document, alerts: Sequence[Finding]) -> str:
    state, versions = text(document, "state"), document.get("versions")
    if state == "finished":
        return "finished"
    if any(alert.code in STALLS for alert in alerts):
        return "stalled"
    is_waiting = bool(starting_peers(document)) and not has_majority(document)
    if state == "starting" or is_waiting or (isinstance(versions, list) and -1 in versions):
        return "starting"
    return "degraded" if any(alert.mark is not Mark.INFO for alert in alerts) else "healthy"


def _line(document: Document, state: str, alerts: Sequence[Finding]) -> str:
    if state == "finished":
        return text(document, "reason") or "finished"
    grave = [alert for alert in alerts if alert.mark is not Mark.INFO]
    if grave:
        more = f" (and {len(grave) - 1} more)" if len(grave) > 1 else ""
        return f"{state}: {grave[0].named_text}{more}"
    if state == "starting":
        return f"starting: {text(document, 'reason')}".rstrip(": ")
    tolerance, age_s = failure_tolerance(document), number(document, "commit_age_seconds")
    may_fail = f"{tolerance} more may fail" if tolerance else "none may fail"
    commits = ", no merge seen yet" if "commit_age_seconds" in document else ""
    if age_s is not None:
        commits = f", merged {duration(age_s)} ago"
    return f"{state}: {alive_count(document)} of {region_count(document)} regions, {may_fail}{commits}"
