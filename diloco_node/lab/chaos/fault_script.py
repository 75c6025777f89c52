"""A script: a fault plan as a file, one JSON object a line, so that a storm can be had again or be written by hand.

{"at_seconds": 5, "do": "join", "target": "us-central"}
{"at_seconds": 12.5, "do": "kill", "target": "us-east.learner"}
{"at_seconds": 20.0, "do": "pause", "target": "eu-west", "seconds": 3.0}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from diloco_node.core.shapes import is_region_name
from diloco_node.errors import ConfigError
from diloco_node.lab.chaos.fault_plan import (
    AT_S_MAX,
    FAULTS_MAX,
    LASTING,
    LASTS_S_DEFAULT,
    FaultPlan,
    PlannedFault,
    check_fault,
    parse_target,
)
from diloco_node.numeric import NS_PER_S

SCRIPT_BYTES_MAX: Final = 256 * FAULTS_MAX
T = TypeVar("T")
KEYS: Final = frozenset({"at_seconds", "do", "target", "seconds"})


def script_text(plan: FaultPlan) -> str:
    """The plan as lines of JSON."""
    return "".join(json.dumps(_document(fault)) + "\n" for fault in plan.faults)


def read_script(file: Path, regions: Sequence[str]) -> FaultPlan:
    """Read a script; its lines may stand in any order.

    regions: those that are there from the beginning, as voters; others may join.

    A region that is not there at its time is struck by nothing; what a member can't do then the run itself refuses.

    Raises ConfigError: it can't be read, or a line is wrong.
    """
    try:
        if file.stat().st_size > SCRIPT_BYTES_MAX:
            raise ConfigError(f"{file} is longer than {SCRIPT_BYTES_MAX:,} bytes: no script")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the script {file} can't be read ({error})") from None
    rows = [
        (number, _at(file, number, _document_of, line))
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    if len(rows) > FAULTS_MAX:
        raise ConfigError(f"{file} has {len(rows)} faults: at most {FAULTS_MAX}")
    names = [*regions]
    for number, document in rows:
        if document["do"] == "join":
            names.append(_at(file, number, _joiner, document, names))
    faults = [_at(file, number, _fault, document, names) for number, document in rows]
    return FaultPlan(tuple(sorted(faults, key=lambda fault: fault.at_ns)))


def _at(file: Path, number: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call something about a line of the file. Raises ConfigError, with the line, for what it refuses."""
    try:
        return work(*arguments)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{file}, line {number}: {error}") from None


def _joiner(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """The region that joins. names: of those before it. Raises ValueError: that is no name for one."""
    if not is_region_name(name := document["target"]):
        raise ValueError(f"{name!r} is no region's name: use 1 to 63 of a-z, 0-9 and '-'")
    if name in names:
        raise ValueError(f"{name} is a region of the demo already: a region joins once, and comes back by wipe")
    return str(name)


def _document_of(line: str) -> dict[str, Any]:
    """The object of a line. Raises ValueError: it is none, or has other keys."""
    try:
        document = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(document, dict) or not {"at_seconds", "do", "target"} <= document.keys() <= KEYS:
        raise ValueError(f"a line is one object with {', '.join(sorted(KEYS))}; seconds may be left away")
    if not isinstance(document["do"], str) or not isinstance(document["target"], str):
        raise ValueError("do and target are texts")
    return document


def _fault(document: Mapping[str, Any], regions: Sequence[str]) -> PlannedFault:
    kind, target = document["do"], document["target"]
    lasts_s = _seconds(document.get("seconds", LASTS_S_DEFAULT if kind in LASTING else 0.0))
    fault = PlannedFault(
        round(_seconds(document["at_seconds"]) * NS_PER_S),
        kind,
        parse_target(target, regions),
        round(lasts_s * NS_PER_S),
    )
    check_fault(fault)
    return fault


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= AT_S_MAX:
        raise ValueError("times are numbers of seconds, at most 30 days")
    return float(value)


def _document(fault: PlannedFault) -> dict[str, Any]:
    lasts = {"seconds": fault.lasts_ns / NS_PER_S} if fault.lasts_ns else {}
    return {"at_seconds": fault.at_ns / NS_PER_S, "do": fault.kind, "target": str(fault.target), **lasts}
