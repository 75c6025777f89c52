"""Findings for people: how `status`, `why` and `doctor` print what they report."""

from __future__ import annotations

import sys
from typing import Final

from diloco_node.cli.tables import INDENT, wrap_text
from diloco_node.health.finding import Finding, Mark
from diloco_node.health.reading import duration

SIGNS: Final = {Mark.FAILED: "×", Mark.WARNING: "‼", Mark.INFO: "i", Mark.UNKNOWN: "-", Mark.OK: "√"}
PLAIN_SIGNS: Final = {Mark.FAILED: "xx", Mark.WARNING: "!!", Mark.INFO: "i", Mark.UNKNOWN: "--", Mark.OK: "ok"}
"""For an output that can't show the others."""


def finding_lines(finding: Finding, width: int | None = None, *, page: str = "") -> list[str]:
    """Show a finding in a line, and what helps in another one.

    width: of the output in characters; None: no line is wrapped. page: has a section for each code.
    """
    basis = f" ({finding.basis})" if finding.basis else ""
    lines = wrap_text(f"{_signs()[finding.mark]} {finding.code}: {finding.named_text}{basis}", width)
    command = f"`{finding.command}`" if finding.command else ""
    section = f"({page}#{finding.code})" if page and finding.hint else ""
    saving = f"saves {duration(finding.saves_seconds)} of a round" if finding.saves_seconds else ""
    remedy = " ".join(filter(None, (finding.hint, command, section)))
    if saving:
        remedy = f"{remedy} ({saving})" if remedy else saving
    return lines + (wrap_text(f"-> {remedy}", width, first=INDENT) if remedy else [])


def _signs() -> dict[Mark, str]:
    try:
        "".join(SIGNS.values()).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_SIGNS
    return SIGNS
