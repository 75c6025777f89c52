"""Outcome of a simulated seed, and how people read it."""

from __future__ import annotations

from dataclasses import dataclass, field

EVENTS = 3000
"""Under faults, unless asked otherwise."""

FAST = "fast"
"""The effects of a run, unless asked otherwise."""


@dataclass(frozen=True, slots=True)
class SimReport:
    """Outcome of a seed.

    Attributes:
        seed, regions, options, fault, effects: what was run, with so many founders; `fault` is the planted one,
            or empty.
        events: facts given to cores in both phases; events_under_faults: in phase one.
        commits: committed rounds. faults: injected, by kind.
        virtual_seconds: of both phases; heal_seconds: of phase two.
        messages_dropped: frames and transfers that never arrived.
        violations: what was found wrong; empty for a good run.
        trace_digest: SHA-256 of the whole trace. trace_tail: its last lines.
        schedule: which kinds of faults.
        joiners: regions that do not found the run; with some, members come and go.
        limits: of the core, which the seed lowered.
        liar: the region that lied, empty if none did. lie: how (`LIARS`).
        lies: how many it told, by what it changed. wrong_sums: committed stripes that it summed up wrongly.
        accusations: alarms of honest regions that name it and what it did.
    """

    seed: int
    regions: int
    options: str
    fault: str
    effects: str
    events: int
    events_under_faults: int
    commits: int
    faults: dict[str, int]
    virtual_seconds: float
    heal_seconds: float
    messages_dropped: int
    violations: tuple[str, ...]
    trace_digest: str
    trace_tail: tuple[str, ...] = field(repr=False)
    schedule: str = "usual"
    limits: tuple[str, ...] = ()
    liar: str = ""
    lie: str = ""
    lies: dict[str, int] = field(default_factory=dict)
    wrong_sums: int = 0
    accusations: int = 0
    joiners: int = 0

    @property
    def is_good(self) -> bool:
        """Nothing was found wrong."""
        return not self.violations

    @property
    def command(self) -> str:
        """Command that runs this again; without a planted fault, which only tests can give."""
        return f"diloco-node simulate run --seed {self.seed} --regions {self.regions}{self.options}"


def format_report(report: SimReport, *, tail_lines: int = 40) -> str:
    """A few lines for people; with the end of the trace if something was found."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.faults.items()) or "none"
    joiners = f" and {report.joiners} that join" if report.joiners else ""
    lines = [
        f"seed {report.seed}: {report.regions} regions{joiners}, {report.events} events "
        f"({report.events_under_faults} under faults), {report.commits} commits, "
        f"{report.virtual_seconds:.1f} virtual seconds ({report.heal_seconds:.1f} after healing)",
        f"schedule {report.schedule}; faults: {kinds}; {report.messages_dropped} messages lost; "
        f"lowered: {', '.join(report.limits) or 'nothing'}",
        f"trace {report.trace_digest}",
    ]
    if report.liar:
        lies = ", ".join(f"{count} {label}" for label, count in report.lies.items()) or "none"
        lines.append(f"{report.liar} lied ({report.lie}): {lies}; accused {report.accusations} times")
    if report.is_good:
        lines.append("every check held")
        return "\n".join(lines)
    lines.extend(f"VIOLATION {violation}" for violation in report.violations)
    lines.extend(report.trace_tail[-tail_lines:])
    lines.append(f"run it again: {report.command}")
    return "\n".join(lines)
