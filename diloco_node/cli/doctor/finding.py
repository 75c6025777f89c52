"""One line of the examination, and how lines are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from diloco_node.escaping import escaped

PAGE: Final = "docs/doctor.md"


class Mark(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


SIGNS: Final = {Mark.OK: "√", Mark.WARNING: "‼", Mark.FAILED: "×", Mark.UNKNOWN: "-"}
PLAIN_SIGNS: Final = {Mark.OK: "ok", Mark.WARNING: "!!", Mark.FAILED: "xx", Mark.UNKNOWN: "--"}
"""Where the output can't show the others."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        category: the heading that it stands under. check: its name, and its section in docs/doctor.md.
        text: one line, with figures and units. hint: the remedy; empty when nothing is to be done.
    """

    category: str
    check: str
    mark: Mark
    text: str
    hint: str = ""

    @property
    def link(self) -> str:
        """Where the remedy is explained; empty when nothing is to be done."""
        return f"{PAGE}#{self.check}" if self.hint else ""


@dataclass(frozen=True, slots=True)
class Topic:
    """Makes the findings of one check."""

    category: str
    check: str

    def ok(self, text: str) -> CheckResult:
        """Nothing is to be done."""
        return CheckResult(self.category, self.check, Mark.OK, escaped(text))

    def warning(self, text: str, hint: str) -> CheckResult:
        """The run goes on, worse than it could."""
        return CheckResult(self.category, self.check, Mark.WARNING, escaped(text), hint)

    def failed(self, text: str, hint: str) -> CheckResult:
        """The region does not start, or takes no part."""
        return CheckResult(self.category, self.check, Mark.FAILED, escaped(text), hint)

    def unknown(self, text: str) -> CheckResult:
        """It could not be looked at, or does not apply."""
        return CheckResult(self.category, self.check, Mark.UNKNOWN, escaped(text))


def finding_lines(findings: Sequence[CheckResult], *, encoding: str) -> Iterator[str]:
    """Categories in the order in which they come first, one line each finding, the remedy and its page below.

    Args:
        encoding: of the output.
    """
    signs = SIGNS if _is_shown("".join(SIGNS.values()), encoding) else PLAIN_SIGNS
    for category in dict.fromkeys(one.category for one in findings):
        yield category
        for one in (one for one in findings if one.category == category):
            yield f"{signs[one.mark]} {one.check}: {one.text}"
            if one.hint:
                yield f"    {one.hint}"
                yield f"    see {one.link}"
        yield ""
    yield conclusion(findings)


def conclusion(findings: Sequence[CheckResult]) -> str:
    """The last line."""
    failed, warnings = (sum(one.mark is mark for one in findings) for mark in (Mark.FAILED, Mark.WARNING))
    if failed:
        return f"{failed} of {len(findings)} checks failed, {warnings} with a warning"
    return f"nothing failed in {len(findings)} checks" + (f", {warnings} with a warning" if warnings else "")


def _is_shown(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def finding_document(findings: Sequence[CheckResult]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "healthy": not has_failed(findings),
        "checks": [{**dataclasses.asdict(one), "link": one.link} for one in findings],
    }


def has_failed(findings: Sequence[CheckResult]) -> bool:
    """Whether the exit code says so."""
    return any(one.mark is Mark.FAILED for one in findings)
