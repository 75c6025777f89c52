"""The one type in which alerts, `doctor` and `why` report something."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from diloco_node.health.reading import Document, text


class Mark(StrEnum):
    """How grave a finding is, the worst first."""

    FAILED = "failed"
    WARNING = "warning"
    INFO = "info"
    UNKNOWN = "unknown"
    OK = "ok"


SEVERITIES: Final = {Mark.FAILED: "critical", Mark.WARNING: "warning", Mark.INFO: "info"}
"""The marks of alerts, as status documents and metrics name them; the worst first."""

_WORD: Final = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about regions, and what helps.

    code: of an alert, as A-PEER-DOWN; else the check or the topic. regions: the main one first; empty: the run or this
    machine. text: one line, with figures and units. hint: the remedy. command: to copy. basis: how the figures were
    computed. saves_seconds: of each round, with the remedy; None: not known.
    """

    mark: Mark
    code: str
    text: str
    regions: tuple[str, ...] = ()
    hint: str = ""
    command: str = ""
    basis: str = ""
    saves_seconds: float | None = None

    @property
    def region(self) -> str:
        """The main region; empty if there is none."""
        return self.regions[0] if self.regions else ""

    @property
    def named_text(self) -> str:
        """The text, with the main region in front unless the text names it."""
        is_named = not self.region or self.region in _WORD.findall(self.text)
        return self.text if is_named else f"{self.region}: {self.text}"


def alert_document(finding: Finding) -> dict[str, Any]:
    """Describe an alert as status documents have it."""
    return {
        "severity": SEVERITIES[finding.mark],
        "code": finding.code,
        "region": finding.region,
        "text": finding.text,
        "hint": finding.hint,
        "command": finding.command,
    }


def read_alert(document: Document) -> Finding:
    """Read an alert of a status document; one of unknown severity counts as a warning."""
    marks = {severity: mark for mark, severity in SEVERITIES.items()}
    region = text(document, "region")
    return Finding(
        marks.get(text(document, "severity"), Mark.WARNING),
        text(document, "code"),
        text(document, "text"),
        (region,) if region else (),
        text(document, "hint"),
        text(document, "command"),
    )
