"""The checks of the examination by category, the findings they make, and how `doctor` shows those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.cli.tables import finding_lines
from diloco_node.escaping import escaped
from diloco_node.health.finding import Finding, Mark

PAGE: Final = "docs/doctor.md"


@dataclass(frozen=True, slots=True)
class Topic:
    """A check: its category, which is a heading, and its name, which is its section in docs/doctor.md."""

    category: str
    check: str

    def ok(self, text: str) -> Finding:
        """Nothing is to be done."""
        return Finding(Mark.OK, self.check, escaped(text))

    def warning(self, text: str, hint: str) -> Finding:
        """The run goes on, worse than it could."""
        return Finding(Mark.WARNING, self.check, escaped(text), hint=hint)

    def failed(self, text: str, hint: str) -> Finding:
        """The region does not start, or takes no part."""
        return Finding(Mark.FAILED, self.check, escaped(text), hint=hint)

    def unknown(self, text: str) -> Finding:
        """The check is not possible here, or does not apply."""
        return Finding(Mark.UNKNOWN, self.check, escaped(text))


PROGRAM: Final = Topic("versions", "program")
BBR: Final = Topic("kernel", "bbr")
BUFFERS: Final = Topic("kernel", "tcp-buffers")
DESCRIPTORS: Final = Topic("kernel", "descriptors")
SPACE: Final = Topic("disk", "disk-space")
FSYNC: Final = Topic("disk", "fsync")
LOCKS: Final = Topic("disk", "locks")
SOCKETS: Final = Topic("disk", "sockets")
MEMORY: Final = Topic("memory", "memory")
SYNCED: Final = Topic("clock", "clock-sync")
AGREES: Final = Topic("clock", "clock-peers")
RUN_TOML: Final = Topic("settings", "run-toml")
UNCHANGED: Final = Topic("settings", "settings-changed")
EQUAL: Final = Topic("settings", "settings-equal")
CERTIFICATE: Final = Topic("certificates", "certificate")
EXPIRY: Final = Topic("certificates", "certificate-dates")
KEY_MODE: Final = Topic("certificates", "key-mode")
PORT: Final = Topic("ports", "port")
PRELOAD: Final = Topic("learner", "preload")
FILES: Final = Topic("learner", "learner-files")
REACHABLE: Final = Topic("peers", "peer-reachable")
VERSION: Final = Topic("peers", "peer-version")
LINK: Final = Topic("peers", "peer-link")
MTU: Final = Topic("peers", "mtu")
DAEMON: Final = Topic("run", "daemon")
WITNESS: Final = Topic("run", "witness")
ALERT: Final = Topic("run", "alert")

CATEGORIES: Final = {topic.check: topic.category for topic in tuple(globals().values()) if isinstance(topic, Topic)}


def examination_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Show the findings under their categories, in the order in which those come first, and the sum of it."""
    for category in dict.fromkeys(CATEGORIES[finding.code] for finding in findings):
        yield category
        for finding in findings:
            if CATEGORIES[finding.code] == category:
                yield from finding_lines(finding, page=PAGE)
        yield ""
    failures, warnings = (sum(finding.mark is mark for finding in findings) for mark in (Mark.FAILED, Mark.WARNING))
    result = f"{failures} of {len(findings)} checks failed" if failures else f"nothing failed in {len(findings)} checks"
    yield result + (f", {warnings} with a warning" if failures or warnings else "")


def examination_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Describe the findings for `--json`."""
    checks = [
        {
            "category": CATEGORIES[finding.code],
            "check": finding.code,
            "mark": finding.mark,
            "text": finding.text,
            "hint": finding.hint + (f": {finding.command}" if finding.command else ""),
            "link": f"{PAGE}#{finding.code}" if finding.hint else "",
        }
        for finding in findings
    ]
    return {"healthy": not has_failed(findings), "checks": checks}


def has_failed(findings: Sequence[Finding]) -> bool:
    """Whether the exit code is 1."""
    return any(finding.mark is Mark.FAILED for finding in findings)
